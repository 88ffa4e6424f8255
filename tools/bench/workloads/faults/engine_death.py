"""How long a run is without its engine after a SIGKILL, beside the time in which an engine starts.

    python tools/bench/run.py engine_death --out engine-death.json

First the engine of the built-in run starts alone, `--kills` times. Then the run itself kills its engine while it
generates, in as many of its steps. Reported are the seconds from each kill until the restarted engine has the current
weights. The goal is the longest time of a start plus `GOAL_S`.
"""

import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlhf_cli.commands.ppo import COMMAND_LINE
from rlhf_cli.commands.ppo_job import make_job, make_plan
from rlhf_cli.preflight.inputs import check_inputs
from rlhf_train.cluster.ray_session import wait
from rlhf_train.online import run_online
from rlhf_train.online_job import OnlineJob
from rlhf_train.processes import placed_bundles, ray_cluster, start_engines
from rlhf_train.run.observer import Observer
from runner import OWN_CLUSTER, read_metrics

FLAGS = {"kills": 3}
GOAL_S = 5.0
DELAY_S = 0.05  # from the begin of a generation to the kill


def engine_process() -> psutil.Process:
    """Return the process of the only engine."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[0].startswith("ray::EngineActor"):
                return process
        except (psutil.Error, IndexError):
            continue
    raise SystemExit("the engine's process was not found")


class Killer(Observer):
    """Kills the engine in the generation of every second step, and notes when it is back."""

    def __init__(self, num_kills: int) -> None:
        self._left = num_kills
        self._num_generations = 0
        self._killed_at = 0.0
        self.back_s: list[float] = []

    def phase(self, name: str) -> None:
        if name != "generate":
            return
        self._num_generations += 1
        if self._left and self._num_generations % 2 == 0:
            self._left -= 1
            threading.Timer(DELAY_S, self._kill).start()

    def warning(self, text: str) -> None:
        print(text.partition("\n")[0], flush=True)
        if " is back" in text:
            self.back_s.append(time.monotonic() - self._killed_at)

    def _kill(self) -> None:
        self._killed_at = time.monotonic()
        os.kill(engine_process().pid, signal.SIGKILL)


def job_of(flags: Sequence[str], folder: Path) -> OnlineJob:
    """Return the job of `rlhf ppo` with these flags and this --save_path, to be run in this process."""
    config = COMMAND_LINE.parse([*flags, "--save_path", str(folder)]).config
    return make_job(config, check_inputs(config, folder), make_plan(config, [0]), folder, None)


def start_seconds(job: OnlineJob) -> float:
    """Return the seconds in which the engine of a job starts alone."""
    with placed_bundles(job.plan) as reserved:
        started = time.monotonic()
        wait([engine.handle.ready.remote() for engine in start_engines(job, reserved, [0])])
        return time.monotonic() - started


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the times of starts and of returns from the dead."""
    os.environ.update(OWN_CLUSTER)
    run = folder / "run"
    job = job_of(["--train_steps", str(2 * options.kills + 1), "--eval_steps", "-1"], run)
    killer = Killer(options.kills)
    with ray_cluster(job.plan, None):
        starts = [start_seconds(job) for _ in range(options.kills)]
        run_online(job, killer)
    steps = read_metrics(run).steps
    missed = [f"back after {seconds:.1f} s" for seconds in killer.back_s if seconds > max(starts) + GOAL_S]
    if len(killer.back_s) < options.kills:
        missed.append(f"{len(killer.back_s)} of {options.kills} engines came back")
    yield {
        "goal_s": GOAL_S,
        "start_s": starts,
        "back_s": killer.back_s,
        "num_steps": len(steps),
        "num_failed_rollouts": sum(row["samples/failed"] for row in steps),
        "missed": missed,
    }
