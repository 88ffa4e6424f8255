"""What hung rewards leave behind: processes and memory.

    python tools/bench/run.py reward_faults --out reward-faults.json

Scores many rollouts, one call each, with a reward function that starts a child in a session of its own and then hangs.
Each call is ended at the time limit and its worker is replaced; no call is held back. Then the benchmark counts which
of the processes still exist, and by how much its own memory has grown.
"""

import asyncio
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_rollout.http.breaker import Breaker
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.sources import CallOptions
from runner import memory_mib

GOAL_MIB = 20.0  # largest growth of this process's memory over all hung rewards
FLAGS = {
    "count": (1000, "hung rewards"),
    "timeout_s": (0.15, "time limit of a reward"),
    "num_workers": 2,
}

HANG = """
import os, subprocess, time
def reward_func(queries, prompts, labels):
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}\\n")
    time.sleep(100000)
"""


async def score(reward: FunctionReward, count: int, num_workers: int) -> list[Verdict]:
    """Score `count` rollouts, each of a prompt and in a call of its own, as many at a time as there are workers."""
    prompts = [Prompt(f"p{index}", [1], "2+2=", "4") for index in range(count)]
    rollout = Rollout("r", "g0", (Span(SpanSource.PROMPT, prompts[0].token_ids),), FinishReason.STOP, "4")
    verdicts: list[Verdict] = []
    while len(verdicts) < count:
        calls = [reward.score(prompt, [rollout]) for prompt in prompts[len(verdicts) :][:num_workers]]
        verdicts += [verdict for [verdict] in await asyncio.gather(*calls)]
    await reward.close()
    return verdicts


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Hang `--count` rewards."""
    pids = folder / "pids"
    (folder / "hang.py").write_text(HANG.format(path=str(pids)), encoding="utf-8")
    calls = CallOptions(timeout_s=options.timeout_s, num_workers=options.num_workers, batch_size=1)
    before = memory_mib()
    started = time.monotonic()
    reward = FunctionReward(str(folder / "hang.py"), calls, log_path=folder / "log")
    reward._breaker = Breaker(2**31)
    verdicts = asyncio.run(score(reward, options.count, options.num_workers))
    seconds = time.monotonic() - started
    growth = memory_mib() - before
    process_ids = pids.read_text(encoding="utf-8").split()
    num_left = sum(os.path.exists(f"/proc/{process_id}") for process_id in process_ids)
    missed = [f"{num_left} processes are left, the goal is 0"] if num_left else []
    if growth > GOAL_MIB:
        missed.append(f"memory has grown by {growth:.1f} MiB, the goal is {GOAL_MIB:g}")
    hangs = {
        "num_hung": len(verdicts),
        "verdicts": Counter(str(verdict.kind) for verdict in verdicts),
        "num_replaced": reward.num_replaced,
        "num_processes_seen": len(process_ids),
        "num_processes_left": num_left,
        "seconds": seconds,
        "memory_growth_mib": growth,
    }
    yield {"goal_mib": GOAL_MIB, "hangs": hangs, "missed": missed}
