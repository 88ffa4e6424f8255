"""What agents cost besides the engine: the door per request, and many episodes at a time in one event loop.

    python tools/bench/run.py agents --out agents-cpu.json

The first part sends chat requests of conversations of several turns through the door, one after the other, from another
process over HTTP, to an engine that answers at once. The engine is asked for the same tokens directly, too. The
overhead is the difference of each pair.

The second part runs episodes of several turns at the same time, with an engine whose answers take a random time between
half of `--latency_s` and one and a half times it. Episodes begin within one `--latency_s`. The agent's code runs in the
event loop, so that nothing but the rollout's own work is measured. There are two rounds: memory is flat if the second
round needs as much as the first. The lag of the event loop is that of a timer which is due every 5 ms; a timer that
could not fire while the loop was busy counts for each time it was due.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.records import Prompt
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents.gateway import Gateway
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.interface import Session
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.rpc import Activity, Call
from runner import memory_mib

FLAGS = {
    "door_episodes": (400, "conversations through the door"),
    "episodes": (10_000, "episodes at the same time"),
    "turns": 5,
    "latency_s": (8.0, "mean time of an answer in the second part"),
}
GOAL_OVERHEAD_MS = 2.0  # median per request
GOAL_LAG_MS = 50.0  # 99th percentile
GOAL_GROWTH_MIB = 20.0  # of the peak, from the first round to the second
TICK_S = 0.005
TOKENIZER = ByteTokenizer(add_bos=False)
ANSWER = b"The answer is forty-two."
QUESTION = "What is the answer to this question, and what would you ask next?"
SAMPLING = SamplingParams(max_tokens=64, seed=1)

# In a process of its own, with the standard library only: the time of a client library is not the door's.
CLIENT = """
import http.client, json, sys, time, urllib.parse
urls, turns, question = json.loads(sys.stdin.read())
place = urllib.parse.urlsplit(urls[0])
connection = http.client.HTTPConnection(place.hostname, place.port)
seconds = []
for url in urls:
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": question})
        body = json.dumps({"model": "policy", "messages": messages})
        started = time.perf_counter()
        connection.request("POST", urllib.parse.urlsplit(url).path + "/v1/chat/completions", body)
        answer = connection.getresponse()
        content = answer.read()
        seconds.append(time.perf_counter() - started)
        assert answer.status == 200, content
        messages.append(json.loads(content)["choices"][0]["message"])
print(json.dumps(seconds))
"""


def answer_script(prompt: Any, seed: int) -> list[int]:
    """Return the same answer to everything."""
    return [*ANSWER, EOS_ID]


def decode(token_ids: Any) -> str:
    """Return a text without special tokens."""
    return TOKENIZER.decode(token_ids, skip_special_tokens=True)


async def measure_door(num_episodes: int, turns: int) -> dict[str, Any]:
    """Return the overhead of the door in ms per request."""
    router = EngineRouter([FakeEngine(script=answer_script)])
    prompt = Prompt("p", [1], QUESTION)
    gateway = Gateway(TOKENIZER)
    await gateway.start()
    options = {"group_id": "g", "limits": EpisodeLimits(max_length=2**20), "decode": decode}
    recorders = [EpisodeRecorder(router, prompt, SAMPLING, name=f"e{i}", **options) for i in range(num_episodes)]
    with contextlib.ExitStack() as stack:
        doors = [gateway.session(recorder, Activity()) for recorder in recorders]
        urls = [stack.enter_context(door).url for door in doors]
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, stdin=pipe, stdout=pipe)
        output, _ = await client.communicate(json.dumps([urls, turns, QUESTION]).encode())
    await gateway.close()
    through_door = np.array(json.loads(output)) * 1e3
    direct = []
    for recorder in recorders:
        [rollout] = recorder.episode((), None).rollouts
        tokens: list[int] = []
        for span in rollout.spans:
            if span.logprobs is not None:
                started = time.perf_counter()
                await router.generate(np.array(tokens, np.int32), SAMPLING)
                direct.append((time.perf_counter() - started) * 1e3)
            tokens += span.token_ids.tolist()
    overhead = through_door - np.array(direct)
    return {
        "num_requests": len(overhead),
        "direct_median_ms": float(np.median(direct)),
        "door_median_ms": float(np.median(through_door)),
        "overhead_median_ms": float(np.median(overhead)),
        "overhead_p99_ms": float(np.percentile(overhead, 99)),
    }


class SlowEngine(FakeEngine):
    """A fake engine whose answers take different times."""

    def __init__(self, latency_s: float) -> None:
        super().__init__(script=answer_script)
        self.mean_latency_s = latency_s
        self.random = random.Random(0)

    async def _complete(self, token_ids: np.ndarray, sampling: SamplingParams, drafts: Any) -> list[Completion]:
        await asyncio.sleep(self.mean_latency_s * self.random.uniform(0.5, 1.5))
        return await super()._complete(token_ids, sampling, drafts)


class InLoop:
    """The agent in this event loop, in place of processes: the same question several times."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.num_running = 0
        self.max_running = 0

    async def start(self) -> None:
        """There is no process to start."""

    async def call(self, episode: Call) -> dict[str, Any]:
        """Run an episode."""
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)

        async def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
            return await episode.answer(request)

        session = Session({"timeout_s": 60.0, **episode.begin({})}, ask)
        for _ in range(self.turns):
            await session.reply(QUESTION)
        self.num_running -= 1
        return {"rewards": [1.0] * self.turns}


async def watch_lag(lags: list[float]) -> None:
    """Append the lag of a timer in ms, for each time that it is due."""
    due = time.perf_counter() + TICK_S
    while True:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        while due <= now:
            lags.append((now - due) * 1e3)
            due += TICK_S


async def run_round(num_episodes: int, turns: int, latency_s: float) -> dict[str, Any]:
    """Run episodes at the same time; return what they cost."""
    pool = InLoop(turns)
    agent = HostedAgent(EngineRouter([SlowEngine(latency_s)]), pool, TOKENIZER, EpisodeLimits(max_length=2**20))  # type: ignore[arg-type]
    lags: list[float] = []
    peak = memory_mib()
    num_tokens = 0

    async def episode(number: int) -> None:
        nonlocal num_tokens, peak
        await asyncio.sleep(latency_s * number / num_episodes)
        prompt = Prompt(f"p{number}", list(QUESTION.encode()), QUESTION)
        [done] = await agent.run(prompt, SAMPLING, f"g{number}")
        [rollout] = done.rollouts
        assert len(rollout.turn_ends) == turns and rollout.verdict is not None
        num_tokens += rollout.num_tokens
        if number % 100 == 0:
            peak = max(peak, memory_mib())

    await agent.start()
    started = time.monotonic()
    watching = asyncio.create_task(watch_lag(lags))
    await asyncio.gather(*(episode(number) for number in range(num_episodes)))
    watching.cancel()
    return {
        "num_episodes": num_episodes,
        "max_concurrent_episodes": pool.max_running,
        "num_tokens": num_tokens,
        "seconds": time.monotonic() - started,
        "lag_median_ms": float(np.median(lags)),
        "lag_p99_ms": float(np.percentile(lags, 99)),
        "lag_max_ms": max(lags),
        "memory_peak_mib": peak,
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the door, and two rounds of episodes."""
    door = asyncio.run(measure_door(options.door_episodes, options.turns))
    rounds = [asyncio.run(run_round(options.episodes, options.turns, options.latency_s)) for _ in range(2)]
    growth = rounds[1]["memory_peak_mib"] - rounds[0]["memory_peak_mib"]
    lag = max(one["lag_p99_ms"] for one in rounds)
    goals = {
        "overhead_ms": (door["overhead_median_ms"], GOAL_OVERHEAD_MS),
        "lag_p99_ms": (lag, GOAL_LAG_MS),
        "memory_growth_mib": (growth, GOAL_GROWTH_MIB),
    }
    yield {
        "goals": {name: goal for name, (_, goal) in goals.items()},
        "door": door,
        "episodes": {"rounds": rounds, "memory_growth_mib": growth, "lag_p99_ms": lag},
        "missed": [f"{name} is {got:.1f}, the goal is {goal:g}" for name, (got, goal) in goals.items() if got >= goal],
    }
