"""Agent programs that know nothing of training: with the libraries of OpenAI and Anthropic, and plain ones."""

import asyncio
import shlex
import sys
from functools import partial

import pytest

import agent_testing
from agent_testing import TOKENIZER
from process_testing import eventually, is_running
from record_testing import make_prompt
from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, SpanSource, VerdictKind
from rlhf_rollout.agents.agent_spec import AgentSpec, make_workflow
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.user_agent import PROGRAM, parse_agent
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

writes = partial(agent_testing.writes, sign="assistant: ")
OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT


def run(path, engine, *, label="4", samples=1, limits=None, gives_reward=True, timeout_s=30.0):
    """Return the episodes of one prompt."""

    async def collect():
        spec = AgentSpec(path=path, limits=limits or EpisodeLimits(), num_processes=1, timeout_s=timeout_s)
        agent = make_workflow(spec, EngineRouter([engine]), TOKENIZER, gives_reward=gives_reward)
        assert isinstance(agent, HostedAgent)
        try:
            await agent.start()
            sampling = SamplingParams(max_tokens=32, seed=3, num_samples=samples)
            return await agent.run(make_prompt("2+2=", label), sampling, "g")
        finally:
            await agent.close()

    return asyncio.run(collect())


def texts_of(episode):
    return [[TOKENIZER.decode(span.token_ids) for span in rollout.spans] for rollout in episode.rollouts]


RETRIES = [
    "<bos>user: 2+2=<eos>\nassistant: ",
    "5<eos>",
    "\nuser: no, again<eos>\nassistant: ",
    "4<eos>",
]

# A script as one finds it, but for where the question comes from.
OPENAI = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()
messages = [{"role": "user", "content": task["prompt"]}]
for turn in range(3):
    answer = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.7).choices[0].message
    if answer.content == task["label"]:
        break
    messages += [answer, {"role": "user", "content": "no, again"}]
print("done")
print(json.dumps({"reward": 1.0 - 0.25 * turn, "extra": {"turns": turn}}))
"""


def test_openai_program_is_run_for_each_episode(write):
    command = f"{sys.executable} {shlex.quote(write(OPENAI, 'my agent.py'))}"
    episodes = run(command, writes(["5", "4"]), samples=2)
    for episode in episodes:
        assert texts_of(episode) == [RETRIES]
        assert [span.source for span in episode.rollouts[0].spans][1] is SpanSource.POLICY
        assert (episode.verdict.reward, dict(episode.verdict.extra)) == (0.75, {"turns": 1.0})


ANTHROPIC = """
import asyncio
from anthropic import AsyncAnthropic

async def run_episode(session):
    async with AsyncAnthropic(base_url=session.base_url.removesuffix("/v1"), api_key="none") as client:
        messages = [{"role": "user", "content": session.prompt}]
        for turn in range(3):
            answer = await client.messages.create(model="claude", max_tokens=9, messages=messages)
            if answer.content[0].text == session.label:
                return 1.0
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "no, again"}]
    return 0.0
"""


def test_function_speaks_anthropics_protocol(write):
    [episode] = run(write(ANTHROPIC), writes(["5", "4"]))
    assert texts_of(episode) == [RETRIES]
    assert (episode.verdict.kind, episode.verdict.reward) == (OK, 1.0)


def shell(code):
    return f"sh -c {shlex.quote(code)}"


# The standard library is enough for a request.
ASK = f"""{sys.executable} -c 'import os, urllib.request as u; u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"]
 + "/completions", b"{{\\"prompt\\": \\"x\\"}}")).read()' && """


@pytest.mark.parametrize(
    ("code", "kind", "reward", "detail"),
    [
        (ASK + "echo log; echo 1; echo", OK, 1.0, ""),
        (ASK + """echo '{"rewards": 0.5}'""", WRONG, 0.5, ""),
        (ASK + "echo log", CRASH, None, "the agent gave no reward"),
        (ASK + 'echo \'{"rewards": "high"}\'', CRASH, None, "must be one number"),
        ("setsid sleep 1000 & " + ASK + "echo 1", OK, 1.0, ""),  # it holds the pipe of the output
        (ASK + "echo 1; exit 3", CRASH, None, "sh exited with status 3"),
        ("echo 1", CRASH, None, "the agent never asked the policy"),
        ("head -c 300000 /dev/zero; " + ASK + "echo; echo 1", OK, 1.0, ""),
        (ASK + "sleep 1000", TIMEOUT, None, "the agent took longer than 2 s"),
    ],
)
def test_outcome_of_a_program(code, kind, reward, detail):
    timeout_s = 2.0 if kind is TIMEOUT else 30.0
    [episode] = run(shell(code.replace("\n", "")), writes(["a"]), timeout_s=timeout_s)
    assert (episode.verdict.kind, episode.verdict.reward) == (kind, reward)
    assert detail in episode.verdict.detail


def test_program_has_no_secrets_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pid, env = tmp_path / "pid", tmp_path / "env"
    [episode] = run(
        shell(f"env > {env}; sleep 1000 & echo $! > {pid}; " + ASK.replace("\n", "") + "echo 1"),
        writes(["a"]),
    )
    assert episode.verdict.reward == 1.0
    assert "secret" not in env.read_text() and "OPENAI_API_KEY=none" in env.read_text()
    assert eventually(lambda: not is_running(int(pid.read_text())))


ENDLESS = """
import json, sys
from openai import OpenAI

task = json.load(sys.stdin)
client = OpenAI()
messages = [{"role": "user", "content": task["prompt"]}]
while True:
    answer = client.chat.completions.create(model="gpt-4o", messages=messages).choices[0].message
    messages += [answer, {"role": "user", "content": "more"}]
"""


def test_program_that_knows_no_limits_is_cut_and_not_failed(write):
    command = f"{sys.executable} {write(ENDLESS)}"
    [episode] = run(command, writes(["a"]), limits=EpisodeLimits(max_turns=2))
    assert (episode.verdict.kind, episode.verdict.reward) == (WRONG, 0.0)
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH
    assert [text for text in texts_of(episode)[0] if text == "a<eos>"] == ["a<eos>"] * 2


def test_agent_whose_process_dies_begins_again_with_a_new_record(write, tmp_path):
    """Two episodes in one process: the one that ends it fails, and the other one is recorded from its start."""
    source = write(f"""
        import asyncio, os, pathlib, urllib.request as u
        async def run_episode(session):
            ask = u.Request(session.base_url + "/completions", b'{{"prompt": "x"}}')
            await asyncio.to_thread(lambda: u.urlopen(ask).read())
            flag = pathlib.Path({str(tmp_path / "flag")!r})
            if not flag.exists():
                flag.touch()
                await asyncio.sleep(0.2)
                os._exit(3)
            await asyncio.sleep(1.0)
            return 1.0
    """)
    episodes = run(source, writes(["a"]), samples=2)
    assert [episode.verdict.reward for episode in episodes] == [1.0, 1.0]
    assert [texts_of(episode) for episode in episodes] == [[["x", "a<eos>"]]] * 2


@pytest.mark.parametrize(
    ("agent", "target"),
    [("sh -c 'echo 1'", PROGRAM), ("/bin/sh", PROGRAM), ("FILE", ""), ("FILE:run_episode", "run_episode")],
)
def test_forms_of_an_agent(write, agent, target):
    path = write("def run_episode(session): pass", "an agent.py")
    assert parse_agent(agent.replace("FILE", path)).name == target


@pytest.mark.parametrize("agent", ["no-such-program --flag", "'unbalanced", "/no/such/program", "a b.py", ""])
def test_program_that_does_not_exist_is_refused(agent):
    with pytest.raises(ConfigError, match=r"does not exist|nor a program that can be run"):
        parse_agent(agent)
