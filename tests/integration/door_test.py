"""Two agents that know nothing of training, one of the `openai` library and one of smolagents, are trained in one run.

What they sent and got is logged by their HTTP client, and compared with what the run recorded and trained.
"""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
NUM_STEPS = 2
NUM_EPISODES = 16  # per step
RETRY = "Now let's retry: take care not to repeat previous errors!"  # smolagents' words after an answer without a call

AGENT = """
import asyncio, json, runpy, sys
from pathlib import Path

import httpx
from openai import AsyncOpenAI
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

EXAMPLE = runpy.run_path({example!r})
FOLDER = Path({folder!r})
TEMPLATES = {{
    "system_prompt": "Call a tool.",
    "planning": dict.fromkeys(
        ["initial_plan", "update_plan_pre_messages", "update_plan_post_messages"], ""
    ),
    "managed_agent": {{"task": "", "report": ""}},
    "final_answer": {{"pre_messages": "No calls.", "post_messages": "Answer: {{{{task}}}}"}},
}}


@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: one number
        b: the other one
    '''
    return a + b


def log(kind, label, response):
    line = {{"kind": kind, "label": label, "url": str(response.url), "status": response.status_code}}
    line |= {{"request": json.loads(response.request.content), "response": json.loads(response.content)}}
    with (FOLDER / f"{{kind}}.jsonl").open("a") as file:
        file.write(json.dumps(line) + chr(10))


async def with_openai(session, question):
    async def keep(response):
        await response.aread()
        log("openai", session.label, response)

    async with httpx.AsyncClient(event_hooks={{"response": [keep]}}) as http:
        client = AsyncOpenAI(base_url=session.base_url, api_key="none", http_client=http)
        return await EXAMPLE["solve"](client, question, session.label)


def with_smolagents(session, question):
    def keep(response):
        response.read()
        log("smolagents", session.label, response)

    with httpx.Client(event_hooks={{"response": [keep]}}) as http:
        options = {{"client_kwargs": {{"http_client": http}}, "api_base": session.base_url, "api_key": "none"}}
        model = OpenAIModel("policy", **options)
        agent = ToolCallingAgent(
            [add], model, prompt_templates=TEMPLATES, max_steps=2, verbosity_level=LogLevel.OFF
        )
        return float(session.label in str(agent.run(question)))


async def run_episode(session):
    question = session.messages[-1]["content"]
    if int(session.label) % 2:
        return await with_openai(session, question)
    return await asyncio.to_thread(with_smolagents, session, question)
"""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers_of(record: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each span of the policy."""
    found = []
    start = 0
    for span in record["spans"]:
        if span["source"] == "policy":
            found.append(record["token_ids"][start : start + span["num_tokens"]])
        start += span["num_tokens"]
    return found


def test_openai_and_smolagents_agents_are_recorded_and_trained(tmp_path):
    binary = ROOT / "packages/rlhf-cli/ppo"
    command = [str(binary)] if binary.is_file() else [sys.executable, "-m", "rlhf_cli.commands.ppo"]
    (tmp_path / "http").mkdir()
    source = AGENT.format(example=str(ROOT / "examples/openai_client.py"), folder=str(tmp_path / "http"))
    (tmp_path / "agent.py").write_text(source, encoding="utf-8")
    flags = ["--agent_func_path", "agent.py", "--max_steps", "4", "--agent_max_len", "1024", "--seed", "1"]
    flags += ["--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--train_batch_size", "8"]
    flags += ["--micro_train_batch_size", "8", "--micro_rollout_batch_size", "32", "--eval_data", "None"]
    flags += ["--train_steps", str(NUM_STEPS), "--save_path", "out"]
    environment = os.environ | {"BUILD_WORKING_DIRECTORY": str(tmp_path)}
    done = subprocess.run(
        [*command, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    steps = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if "time/step" in line]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert line["samples/trained"] > 0
        assert line["mismatch/logprob_gap_max"] < 1e-3

    tokenizer = Tokenizer.from_file(str(tmp_path / "out/model/tokenizer.json"))
    records = read_jsonl(tmp_path / "out/rollouts.jsonl")
    for kind, parity in (("openai", 1), ("smolagents", 0)):
        logged = read_jsonl(tmp_path / f"http/{kind}.jsonl")
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
