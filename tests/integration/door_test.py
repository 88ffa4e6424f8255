"""Programs of the `openai` library and of smolagents, which know nothing of training, are trained in one run.

What they sent and got is logged by their HTTP client, and compared with what the run recorded and trained.
"""

import collections
import shlex
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from record_testing import read_jsonl

ROOT = Path(__file__).parents[2]
NUM_STEPS = 2
RETRY = "Now let's retry: take care not to repeat previous errors!"  # smolagents' words after an answer without a call

# A process per episode runs one of two programs: the example as it is, and one of smolagents. Their HTTP is logged.
AGENT = """
import io, json, os, runpy, sys
from pathlib import Path

try:
    import httpx2 as httpx  # of recent versions of `openai`
except ImportError:
    import httpx

FOLDER = Path({folder!r})
text = sys.stdin.read()
task = json.loads(text)
kind = "openai" if int(task["label"]) % 2 else "smolagents"


def log(response):
    line = {{"label": task["label"], "url": str(response.url), "status": response.status_code}}
    line |= {{"request": json.loads(response.request.content), "response": json.loads(response.content)}}
    with (FOLDER / f"{{kind}}-{{os.getpid()}}.jsonl").open("a") as file:
        file.write(json.dumps(line) + chr(10))


class Asynchronous(httpx.AsyncClient):
    async def send(self, request, **options):
        response = await super().send(request, **options)
        await response.aread()
        log(response)
        return response


class Synchronous(httpx.Client):
    def send(self, request, **options):
        response = super().send(request, **options)
        response.read()
        log(response)
        return response


httpx.AsyncClient, httpx.Client = Asynchronous, Synchronous


def with_smolagents():
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: one number
            b: the other one
        '''
        return a + b

    templates = {{
        "system_prompt": "Call a tool.",
        "planning": dict.fromkeys(
            ["initial_plan", "update_plan_pre_messages", "update_plan_post_messages"], ""
        ),
        "managed_agent": {{"task": "", "report": ""}},
        "final_answer": {{"pre_messages": "No calls.", "post_messages": "Answer: {{{{task}}}}"}},
    }}
    agent = ToolCallingAgent(
        [add], OpenAIModel("policy"), prompt_templates=templates, max_steps=2, verbosity_level=LogLevel.OFF
    )
    return float(task["label"] in str(agent.run(task["messages"][-1]["content"])))


if kind == "openai":
    sys.stdin = io.StringIO(text)
    runpy.run_path({example!r}, run_name="__main__")
else:
    print(with_smolagents())
"""


def answers_of(record: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each span of the policy."""
    found = []
    start = 0
    for span in record["spans"]:
        if span["source"] == "policy":
            found.append(record["token_ids"][start : start + span["num_tokens"]])
        start += span["num_tokens"]
    return found


def test_openai_and_smolagents_programs_are_recorded_and_trained(rlhf, tmp_path):
    (tmp_path / "http").mkdir()
    source = AGENT.format(example=str(ROOT / "examples/openai_client.py"), folder=str(tmp_path / "http"))
    (tmp_path / "agent.py").write_text(source, encoding="utf-8")
    flags = ["--agent_func_path", f"{shlex.quote(sys.executable)} agent.py", "--agent_timeout_s", "300"]
    flags += ["--max_steps", "4", "--agent_max_len", "1024", "--seed", "2"]
    # An odd and an even label in each step. Every episode is a process, which imports a library for a second.
    flags += ["--rollout_batch_size", "2", "--n_samples_per_prompt", "2", "--train_batch_size", "4"]
    flags += ["--micro_train_batch_size", "4", "--micro_rollout_batch_size", "32", "--eval_data", "None"]
    flags += ["--train_steps", str(NUM_STEPS), "--save_path", "out"]
    rlhf("ppo", *flags, folder=tmp_path)

    steps = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if "time/step" in line]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert line["samples/trained"] > 0
        assert line["mismatch/logprob_gap_max"] < 1e-3

    tokenizer = Tokenizer.from_file(str(tmp_path / "out/model/tokenizer.json"))
    records = read_jsonl(tmp_path / "out/rollouts.jsonl")
    for kind, parity in (("openai", 1), ("smolagents", 0)):
        logged = [line for path in (tmp_path / "http").glob(f"{kind}-*.jsonl") for line in read_jsonl(path)]
        mine = [record for record in records if int(record["label"]) % 2 == parity]
        assert mine and all(record["kept"] and record["verdict"] in ("ok", "wrong") for record in mine), kind
        assert all(exchange["status"] == 200 for exchange in logged)
        # Each answer that a client got is a span of the policy, with as many tokens as it was told, and no other is.
        told = collections.Counter()
        for exchange in logged:
            [choice] = exchange["response"]["choices"]
            usage = exchange["response"]["usage"]
            told[exchange["label"], choice["message"]["content"], usage["completion_tokens"]] += 1
        recorded = collections.Counter()
        for record in mine:
            for ids in answers_of(record):
                recorded[record["label"], tokenizer.decode(ids), len(ids)] += 1
        assert told == recorded, kind
    # smolagents tells the policy what was wrong, and asks for the last answer in a conversation of its own.
    by_sources: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if int(record["label"]) % 2 == 0:
            sources = tuple(span["source"] for span in record["spans"])
            by_sources.setdefault(sources, []).append(tokenizer.decode(record["token_ids"]))
    retried = by_sources["prompt", "policy", "environment", "policy"]
    assert all(text.startswith("system\nCall a tool.") and text.count(RETRY) == 1 for text in retried)
    closing = by_sources["prompt", "policy"]
    assert all(text.startswith("system\nNo calls.") and text.count(RETRY) == 2 for text in closing)
    assert len(closing) == len(retried) > 0
