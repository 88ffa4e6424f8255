"""Measure what hung rewards leave behind: processes, memory, file descriptors, and the time that they cost.

    python tools/bench/reward_faults.py --out reward-faults.json

The first part scores many rollouts, one call each, with a reward function that starts a child in a session of its own
and then hangs. Each call is ended at the time limit and its worker is replaced; no call is held back. Then the script
counts which of the processes still exist, and by how much its own memory has grown.

The second part scores the same number of rollouts with the default settings, by which a function that keeps hanging is
called only now and then. It tells how many calls were made and how long they took.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_rollout.rewards.function import FunctionReward
from runner import arguments, write

GOAL_MIB = 20.0  # largest growth of this process's memory over all hung rewards
NUM_WARM_UP = 10  # hung rewards after which memory is read a second time: what the first ones load is there to stay

HANG = """
import os, subprocess, time
def reward_func(queries, prompts, labels):
    child = subprocess.Popen(["sleep", "100000"], start_new_session=True)
    with open({path!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}\\n")
    time.sleep(100000)
"""


def memory_mib() -> float:
    """Return the resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def num_open_files() -> int:
    """Return how many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


async def score(reward: FunctionReward, count: int, num_workers: int) -> list[Verdict]:
    """Score `count` rollouts, each of a prompt and in a call of its own, as many at a time as there are workers."""
    prompts = [Prompt(f"p{index}", [1], "2+2=", "4") for index in range(count)]
    rollout = Rollout("r", "g0", (Span(SpanSource.PROMPT, prompts[0].token_ids),), FinishReason.STOP, "4")
    verdicts: list[Verdict] = []
    while len(verdicts) < count:
        calls = [reward.score(prompt, [rollout]) for prompt in prompts[len(verdicts) :][:num_workers]]
        for [verdict] in await asyncio.gather(*calls):
            verdicts.append(verdict)
    return verdicts


async def measure_hangs(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `--count` hung rewards leave when every one of them is called."""
    pids = folder / "pids"
    (folder / "hang.py").write_text(HANG.format(path=str(pids)), encoding="utf-8")
    before = memory_mib()
    files_before = num_open_files()
    shape = {"timeout_s": options.timeout_s, "num_workers": options.num_workers, "batch_size": 1, "max_failures": 2**31}
    reward = FunctionReward(str(folder / "hang.py"), log_path=folder / "log", **shape)
    started = time.monotonic()
    verdicts = await score(reward, NUM_WARM_UP, options.num_workers)
    warm = memory_mib()
    verdicts += await score(reward, options.count - NUM_WARM_UP, options.num_workers)
    seconds = time.monotonic() - started
    after = memory_mib()
    await reward.close()
    process_ids = pids.read_text(encoding="utf-8").split()
    return {
        "num_hung": len(verdicts),
        "verdicts": Counter(str(verdict.kind) for verdict in verdicts),
        "num_replaced": reward.num_replaced,
        "num_processes_seen": len(process_ids),
        "num_processes_left": sum(os.path.exists(f"/proc/{process_id}") for process_id in process_ids),
        "seconds": seconds,
        "seconds_per_hang": seconds / len(verdicts),
        "memory_before_mib": before,
        "memory_warm_mib": warm,
        "memory_after_mib": after,
        "memory_growth_mib": after - before,
        "open_files_growth": num_open_files() - files_before,
    }


async def measure_held_back(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what as many rewards cost when a function that keeps hanging is held back, as it is by default."""
    pids = folder / "held_back"
    (folder / "hang.py").write_text(HANG.format(path=str(pids)), encoding="utf-8")
    shape = {"timeout_s": options.timeout_s, "num_workers": options.num_workers, "batch_size": 1}
    reward = FunctionReward(str(folder / "hang.py"), log_path=folder / "log", **shape)
    started = time.monotonic()
    verdicts = await score(reward, options.count, options.num_workers)
    seconds = time.monotonic() - started
    await reward.close()
    num_calls = len(pids.read_text(encoding="utf-8").splitlines())
    return {"num_rewards": len(verdicts), "num_calls": num_calls, "seconds": seconds}


def main() -> int:
    """Measure, write the report, and return the exit status: 1 when a process is left or memory has grown too much."""
    parser = arguments(
        __doc__,
        count=(1000, f"hung rewards, more than {NUM_WARM_UP}"),
        timeout_s=(0.15, "time limit of a reward"),
        num_workers=2,
    )
    options = parser.parse_args()
    if options.count <= NUM_WARM_UP:
        parser.error(f"--count must be more than {NUM_WARM_UP}")
    with tempfile.TemporaryDirectory() as name:
        hangs = asyncio.run(measure_hangs(Path(name), options))
        held_back = asyncio.run(measure_held_back(Path(name), options))
    report = {
        "goal_mib": GOAL_MIB,
        "hangs": hangs,
        "held_back": held_back,
    }
    write(options, "reward_faults", report)
    print(
        f"{hangs['num_hung']} hung rewards: {hangs['num_processes_left']} of {hangs['num_processes_seen']} processes"
        f" left, {hangs['memory_growth_mib']:.1f} MiB more (goal: 0, at most {GOAL_MIB:g}), {hangs['seconds']:.0f} s;"
        f" held back: {held_back['num_calls']} calls, {held_back['seconds']:.1f} s"
    )
    return int(hangs["num_processes_left"] > 0 or hangs["memory_growth_mib"] > GOAL_MIB)


if __name__ == "__main__":
    sys.exit(main())
