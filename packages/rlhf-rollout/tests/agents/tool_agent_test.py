"""Episodes of a policy with tools: what is recorded, what a tool's failure looks like to the policy, and limits."""

import json
import os
import re
import time

import numpy as np
import pytest

from agent_testing import ToolTokenizer, run, texts_of, writes
from record_testing import make_prompt
from rlhf_data.chat.template import render_follow_up
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason, Prompt, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents.conversation import Conversations
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.tools.tool_agent import ToolAgent, function_tool
from rlhf_rollout.engines.fake import FakeEngine

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
TOKENIZER = ToolTokenizer()

TOOLS = """
    import asyncio, sys, time
    from typing import Literal

    def add(a: int, b: int = 1) -> int:
        '''Add two numbers.'''
        return a + b

    async def look_up(key: Literal["x", "y"]) -> dict:
        '''Look up a value.'''
        await asyncio.sleep(0)
        return {"key": key, "value": 7}

    def breaks(how: str) -> str:
        if how == "raise": raise KeyError("gone")
        if how == "exit": sys.exit(3)
        if how == "hang": time.sleep(1000)
        if how == "long": return "x" * 50
        return "\\ud800"

    TOOLS = [add, look_up, breaks]
    TOOL_LIMITS = {"max_calls": 3, "timeout_s": 60.0, "max_chars": 40}

    def reward(messages, label):
        return {"rewards": float(messages[-1]["content"] == label), "extra": {"messages": len(messages)}}
"""


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools_run(source, answers, **options):
    options = {"tokenizer": TOKENIZER, "limits": EpisodeLimits(max_length=4000), "engine_tokens": 200, **options}
    return run(source, writes(answers, sign="assistant: "), **options)[0]


def test_results_follow_the_answer_token_by_token_until_an_answer_calls_nothing(write):
    first = call("add", a=2, b=2)
    second = call("look_up", key="x") + call("add", a=5)
    prompt = Prompt("p", [1], "rendered", "4", messages=({"role": "user", "content": "2+2="},))
    [episode] = tools_run(write(TOOLS), [first, second, "4"], prompts=[prompt])
    [rollout] = episode.rollouts
    assert texts_of(rollout) == [
        (PROMPT, "add,look_up,breaks|<bos>user: 2+2=<eos>\nassistant: "),
        (POLICY, first + "<eos>"),
        (ENVIRONMENT, "\ntool: 4<eos>\nassistant: "),
        (POLICY, second + "<eos>"),
        (ENVIRONMENT, '\ntool: {"key": "x", "value": 7}<eos>\ntool: 6<eos>\nassistant: '),
        (POLICY, "4<eos>"),
    ]
    assert rollout.loss_mask.sum() == len(first) + len(second) + len("4") + 3
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.verdict.kind, rollout.verdict.reward) == (VerdictKind.OK, 1.0)
    extra = dict(rollout.verdict.extra)
    assert (extra.pop("tool_calls"), extra.pop("messages")) == (3.0, 7.0)
    assert set(extra.values()) == {0.0}


# What the policy writes, how the text that it gets begins, and what counts it.
FAILURES = [
    (call("div", a=1), "Error: there is no tool 'div'; the tools\n[25 more char", "tool_unknown"),
    (call("add", a="two"), "Error: a: Input should be a valid intege\n", "tool_arguments"),
    (call("add", b=2), "Error: a: Missing required argument<eos>", "tool_arguments"),
    (call("add", a=1, c=2), "Error: c: Unexpected keyword argument<eos>", "tool_arguments"),
    (call("look_up", key="z"), "Error: key: Input should be 'x' or 'y'<eos>", "tool_arguments"),
    ('<tool_call>{"name": "add"', "Error: the call is not JSON: {\"name\": \"a\n", "tool_unreadable"),
    (call("breaks", how="raise"), "Error: KeyError: 'gone'<eos>", "tool_failed"),
    (call("breaks", how="exit"), "Error: SystemExit: 3<eos>", "tool_failed"),
    (call("breaks", how="long"), "x" * 40 + "\n[10 more characters are left out]<eos>", None),
]  # fmt: skip


def check_failure(episode, content, count):
    source, text = texts_of(episode.rollouts[0])[2]
    assert source is ENVIRONMENT and text.startswith("\ntool: " + content)
    counted = {name for name, value in episode.verdict.extra.items() if value and name.startswith("tool_")}
    assert counted == {"tool_calls", count} - {None}
    assert episode.verdict.reward == 1.0


def test_failure_of_a_tool_is_text_for_the_policy_and_counted(write):
    def script(prompt, _):
        text = TOKENIZER.decode(prompt)
        number = int(re.search(r"user: (\d)", text)[1])
        return [*(FAILURES[number][0] if text.count("assistant: ") == 1 else "4").encode(), EOS_ID]

    prompts = [make_prompt(str(number), "4") for number in range(len(FAILURES))]
    options = {"tokenizer": TOKENIZER, "limits": EpisodeLimits(max_length=4000), "engine_tokens": 200}
    episodes, _ = run(write(TOOLS), FakeEngine(script=script), prompts=prompts, **options)
    for episode, (_, content, count) in zip(episodes, FAILURES, strict=True):
        check_failure(episode, content, count)


def test_tool_that_hangs_is_late_and_does_not_hold_up_the_end(write):
    started = time.monotonic()
    [episode] = tools_run(write(TOOLS.replace("60.0", "1.0")), [call("breaks", how="hang"), "4"])
    check_failure(episode, "Error: breaks took longer than 1 s<eos>", "tool_late")
    assert time.monotonic() - started < 60


def test_calls_beyond_the_limit_are_refused_and_a_policy_that_never_ends_is_cut(write):
    limits = EpisodeLimits(max_length=4000, max_turns=4)
    [episode] = tools_run(write(TOOLS), [call("add", a=1)], limits=limits)
    [rollout] = episode.rollouts
    texts = [text for source, text in texts_of(rollout) if source is ENVIRONMENT]
    assert texts == ["\ntool: 2<eos>\nassistant: "] * 3  # nothing asks the policy after the fourth
    assert rollout.finish_reason is FinishReason.LENGTH
    extra = dict(rollout.verdict.extra)
    assert (extra["tool_calls"], extra["tool_refused"], rollout.verdict.reward) == (4.0, 1.0, 0.0)


NAP = """
    import asyncio

    async def nap(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "rested"

    TOOLS = [nap]
    TOOL_LIMITS = {"max_calls": 9, "timeout_s": 4.0, "total_s": TOTAL}

    def reward(messages, label):
        return float(messages[-1]["content"] == label)
"""


def results_of(episode):
    texts = [text for source, text in texts_of(episode.rollouts[0]) if source is ENVIRONMENT]
    return "".join(texts).replace("<eos>", "").replace("assistant: ", "").split("\ntool: ")[1:]


def test_calls_of_an_episode_have_a_total_of_time(write):
    answers = [call("nap", seconds=0), call("nap", seconds=1000), call("nap", seconds=0), "4"]
    [episode] = tools_run(write(NAP.replace("TOTAL", "2.0")), answers)
    rested, late, refused = results_of(episode)
    assert rested.startswith("rested") and late.startswith("Error: nap took longer than ")
    assert refused.startswith("Error: the calls have used up the time that tools have")
    extra = dict(episode.verdict.extra)
    assert (extra["tool_calls"], extra["tool_late"], extra["tool_refused"]) == (3.0, 1.0, 1.0)
    assert (episode.verdict.kind, episode.verdict.reward) == (VerdictKind.OK, 1.0)


def test_slow_calls_of_one_answer_do_not_make_the_agent_late(write):
    started = time.monotonic()
    answers = [call("nap", seconds=1000) * 3, "5"]
    [episode] = tools_run(write(NAP.replace("TOTAL", "120.0")), answers, engine_tokens=400, timeout_s=6.0)
    first, second, third = results_of(episode)
    assert first.startswith("Error: nap took longer than 4 s")
    assert second.startswith("Error: nap took longer than 1.")
    assert third.startswith("Error: the calls have used up the time that tools have")
    assert (episode.verdict.kind, episode.verdict.reward) == (VerdictKind.WRONG, 0.0)
    assert time.monotonic() - started > 5.3


def test_text_that_is_no_unicode_fails_its_episode_only(write):
    prompts = [make_prompt("a", "4"), make_prompt("b", "4")]
    episodes = tools_run(write(TOOLS), [call("breaks", how="surrogate"), "4"], prompts=prompts)
    assert [episode.verdict.kind for episode in episodes] == [VerdictKind.CRASH] * 2
    assert "surrogates not allowed" in episodes[0].verdict.detail


def test_template_that_does_not_write_the_tools_is_an_error_unless_the_system_message_does(write):
    plain = ToolTokenizer(writes_tools=False)
    [episode] = tools_run(write(TOOLS), ["4"], tokenizer=plain)
    assert "the chat template does not write the tool 'add'" in episode.verdict.detail
    source = write(TOOLS + "\n    SYSTEM = 'You have add, look_up and breaks.'\n", "told.py")
    [episode] = tools_run(source, ["4"], tokenizer=plain)
    expected = "<bos>system: You have add, look_up and breaks.<eos>\nuser: 2+2=<eos>\nassistant: "
    assert texts_of(episode.rollouts[0]) == [(PROMPT, expected), (POLICY, "4<eos>")]
    [episode] = tools_run(source, [call("add", a=2, b=2), "4"], tokenizer=plain)
    [_, _, (_, result), last] = texts_of(episode.rollouts[0])
    assert (result, last) == ("\ntool: 4<eos>\nassistant: ", (POLICY, "4<eos>"))


def test_answer_that_is_cut_gets_its_end_from_the_template():
    messages = [{"role": "tool", "content": "5"}]
    assert render_follow_up(messages, TOKENIZER, origin="e") == "<eos>\ntool: 5<eos>\nassistant: "


def test_schema_comes_from_hints_and_docstring():
    def add(a: int, names: list[str], b: float = 1.5) -> int:
        """Add two numbers.

        Args:
            a: the first.
        """

    assert function_tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nArgs:\n    a: the first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "b": {"type": "number", "default": 1.5},
                },
                "required": ["a", "names"],
                "additionalProperties": False,
            },
        },
    }


def test_functions_that_are_no_tools_are_refused(write):
    def positional(a, /):
        pass

    def strange(a: object()):
        pass

    def good(a: int):
        pass

    for functions, message in {
        (positional,): "the tool positional has parameters without names",
        (strange,): "the tool strange has no JSON schema",
        (good, good): "two tools have the name good",
        (3,): "the tool 3 has no JSON schema",
    }.items():
        with pytest.raises(RewardError, match=message):
            ToolAgent(functions)
    for settings, message in {
        "TOOL_LIMITS = {'max_call': 1}": "TOOL_LIMITS: .* unexpected keyword argument 'max_call'",
        "TOOL_LIMITS = {'timeout_s': 0}": "timeout_s of the tools must be positive, got 0",
        "TOOL_LIMITS = {'total_s': -1}": "total_s of the tools must be positive, got -1",
        # Without vLLM, whose import takes seconds.
        "import sys\nsys.modules['vllm'] = None\nTOOL_PARSER = 'hermis'": "unknown tool parser `hermis`",
        "MCP = ['/no/such/program']": "the MCP server `/no/such/program` does not start",
    }.items():
        with pytest.raises(RewardError, match=message):
            run(write(f"TOOLS = []\n{settings}"), writes(["4"]))


SERVER = """
    import os, sys
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("shop")
    open(sys.argv[1], "a").write(f"{os.getpid()} ")

    @server.tool()
    def price(item: str, count: int = 1) -> str:
        "Return the price of items."
        if item == "gold":
            raise ValueError("no gold today")
        return f"{count} {item}: {3 * count}"

    server.run()
"""


def test_tools_of_an_mcp_server_join_the_others_and_it_ends_with_the_process(write, tmp_path):
    server = write(SERVER, "server.py")
    source = write(f"""
        import sys
        def add(a: int, b: int) -> int:
            return a + b
        TOOLS = [add]
        MCP = [sys.executable, {server!r}, {str(tmp_path / "pids")!r}]
        def reward(messages, label):
            return float(label in messages[-1]["content"])
    """)
    answers = [
        call("price", item="tea", count=2),
        call("price", item="gold"),
        call("price"),
        call("add", a=2, b=2),
        "4",
    ]
    [episode] = tools_run(source, answers)
    texts = texts_of(episode.rollouts[0])
    assert texts[0][1].startswith("add,price|")
    results = [text for span, text in texts if span is ENVIRONMENT]
    assert results[0] == "\ntool: 2 tea: 6<eos>\nassistant: "
    assert "Error: RuntimeError: " in results[1] and "price" in results[1]
    assert "Error: " in results[2] and "item" in results[2]
    assert results[3] == "\ntool: 4<eos>\nassistant: "
    assert (episode.verdict.reward, dict(episode.verdict.extra)["tool_failed"]) == (1.0, 2.0)
    [process_id] = (tmp_path / "pids").read_text().split()
    assert not os.path.exists(f"/proc/{process_id}")


def test_program_at_the_door_may_describe_its_tools_itself():
    plain = ToolTokenizer(writes_tools=False)
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [{"role": "user", "content": "2+2="}]
    expected = plain("<bos>user: 2+2=<eos>\nassistant: ", add_special_tokens=False)["input_ids"]
    chats = Conversations(plain)
    assert chats.encode_chat(messages, [schema]).token_ids.tolist() == expected
    answer = {"role": "assistant", "content": "4"}
    start = [*expected, *b"4", EOS_ID]
    chats.add_chat([*messages, answer], [schema], np.array(start), is_ended=True)
    more = plain("\nuser: why?<eos>\nassistant: ", add_special_tokens=False)["input_ids"]
    asked = [*messages, answer, {"role": "user", "content": "why?"}]
    assert chats.encode_chat(asked, [schema]).token_ids.tolist() == [*start, *more]
