"""Kill `rlhf ppo` at random moments, let it continue, and compare it with a run that nothing interrupted.

    python tools/bench/run.py kills --kills 200 --workers 8 --out kills.json

Every run trains the built-in model for `--train_steps` steps with a checkpoint after each, with one of `VARIANTS`: one
or two training processes and different ZeRO stages. SIGKILL hits its main process at a random moment, and
`rlhf ppo --load_checkpoint` continues it, until the run has ended or its share of the kills is used up; then it runs to
its end. One kill in ten comes while the run starts, the others at a random moment of the first steps.

The report counts the kills by phase, the rollouts that are missing, and the runs whose metrics, rollouts or weights
differ from the run of the same variant without interruption. On CPUs none may differ in a single bit. A second run of
each variant without interruption, under the same load, is compared in the same way.
"""

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner import OWN_CLUSTER, progress, read_lines

FLAGS = {
    "kills": 200,
    "workers": (1, "runs at the same time"),
    "train_steps": 40,
    "num_rollouts": (128, "rollouts per step of the built-in run"),
    "window_s": (4.0, "a kill comes at most so long after the start"),
    "seed": 0,
}
VARIANTS = (
    "--zero_stage 2",
    "--zero_stage 2 --actor_num_gpus_per_node 2",
    "--zero_stage 0",
    "--zero_stage 3 --actor_num_gpus_per_node 2",
)
RUN_FLAGS = "--eval_steps 10 --enable_ema --save_steps 1 --max_ckpt_num 2"
SHARE_IN_START = 0.1
SECONDS = re.compile(r'"score_seconds": [\d.e-]+')
NOT_NUMBERS = ("time/", "startup/", "throughput/", "memory/")  # they differ between any two runs
PHASE_BYTES = 16
STARTING = "start"
POLL_S = 0.01


def child(phase_path: str, argv: list[str]) -> int:
    """Run `rlhf ppo` in this process and keep the name of the current phase in a file."""
    from rlhf_cli.main import main
    from rlhf_train.run.timeline import Timeline

    descriptor = os.open(phase_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    open_phases = [STARTING]
    original = Timeline.phase

    def write() -> None:
        os.pwrite(descriptor, open_phases[-1].ljust(PHASE_BYTES).encode(), 0)

    @contextmanager
    def phase(timeline: Timeline, name: str) -> Iterator[None]:
        open_phases[0] = "between phases"
        open_phases.append(name)
        write()
        try:
            with original(timeline, name):
                yield
        finally:
            open_phases.pop()
            write()

    write()
    Timeline.phase = phase  # type: ignore[method-assign]
    return main(["ppo", *argv])


def content(folder: Path) -> dict[str, Any]:
    """Return what two runs of the same numbers have in common: metrics, and hashes of rollouts and final weights."""
    lines = read_lines(folder / "metrics.jsonl")
    found: dict[str, Any] = {
        "metrics.jsonl": [
            {name: value for name, value in line.items() if not name.startswith(NOT_NUMBERS)} for line in lines
        ]
    }
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        text = SECONDS.sub("", (folder / name).read_text(encoding="utf-8"))
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    for name in ("model/model.safetensors", "ema_model/model.safetensors"):
        found[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return found


def first_difference(found: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Return where two runs begin to differ; None if they do not."""
    for line, expected in zip(found["metrics.jsonl"], reference["metrics.jsonl"], strict=False):
        if line != expected:
            names = sorted(name for name in line.keys() | expected.keys() if line.get(name) != expected.get(name))
            return f"metrics of step {expected.get('step')}: {', '.join(names[:6])}"
    return next((name for name in reference if found[name] != reference[name]), None)


def num_lost(folder: Path, num_steps: int, num_rollouts: int) -> int:
    """Return how many of `num_rollouts` rollouts per step are not in `rollouts.jsonl`, or are there more than once."""
    ids = Counter(record["rollout_id"] for record in read_lines(folder / "rollouts.jsonl"))
    return num_steps * num_rollouts - len(ids) + sum(count - 1 for count in ids.values())


@dataclass
class Tally:
    """What happened in the runs of one worker, or of all."""

    phases: Counter[str] = field(default_factory=Counter)
    num_writing: int = 0  # kills while a checkpoint was being written
    num_runs: int = 0
    num_lost: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add what happened in the runs of another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Run:
    """One run in a folder, started any number of times."""

    def __init__(self, folder: Path, flags: str) -> None:
        self.folder = folder
        self.flags = flags
        self._phase_path = folder.with_suffix(".phase")
        self._log_path = folder.with_suffix(".log")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or continue it."""
        self._phase_path.write_bytes(STARTING.ljust(PHASE_BYTES).encode())
        flags = [*self.flags.split(), "--save_path", str(self.folder), "--load_checkpoint"]
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, __file__, str(self._phase_path), *flags],
                env=os.environ | OWN_CLUSTER | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=log,
                stderr=log,
            )

    def phase(self) -> str:
        """Return the current phase."""
        return self._phase_path.read_bytes().decode().strip()

    def log(self) -> str:
        """Return what all starts have printed."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def finish(self) -> float:
        """Run to the end; return the seconds that this took."""
        started = time.monotonic()
        status = self.start().wait()
        if status != 0:
            raise SystemExit(f"{self.folder} ended with status {status}:\n{self.log()[-3000:]}")
        return time.monotonic() - started

    def kill(self, rng: random.Random, window_s: float, tally: Tally) -> bool:
        """Start or continue the run, and kill it at a random moment; return False if it ended before."""
        process = self.start()
        in_start = rng.random() < SHARE_IN_START
        begun = time.monotonic()
        at = rng.uniform(0.0, window_s)
        while process.poll() is None:
            if not in_start and self.phase() == STARTING:
                begun = time.monotonic()
            elif time.monotonic() - begun >= at:
                break
            time.sleep(POLL_S)
        phase = self.phase()
        is_writing = any((self.folder / "checkpoints").glob(".step-*"))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return False
        tally.phases[phase] += 1
        tally.num_writing += is_writing
        return True


def work(number: int, whole: Sequence[Run], options: Namespace) -> Tally:
    """Do one worker's share of the kills; return what happened. `whole` has the complete run of each variant."""
    rng = random.Random(options.seed + number)
    tally = Tally()
    reference = whole[number % len(VARIANTS)]
    num_kills = options.kills // options.workers + (number < options.kills % options.workers)
    while tally.phases.total() < num_kills:
        run = Run(reference.folder.with_name(f"worker{number}-run{tally.num_runs}"), reference.flags)
        while tally.phases.total() < num_kills and run.kill(rng, options.window_s, tally):
            pass
        run.finish()
        tally.num_runs += 1
        difference = first_difference(content(run.folder), content(reference.folder))
        if difference is not None:
            resumed = re.findall(r"the run continues after step (\d+)", run.log())
            tally.differences.append(f"{run.flags}; continued after {', '.join(resumed)}; {difference}")
        tally.num_lost += num_lost(run.folder, options.train_steps, options.num_rollouts)
        progress({"worker": number, "kills": tally.phases.total(), "difference": difference})
    return tally


def control(whole: Run) -> str | None:
    """Run a variant once more without interruption; return where it differs from the first run, if it does."""
    again = Run(whole.folder.with_name(f"control-{whole.folder.name}"), whole.flags)
    again.finish()
    difference = first_difference(content(again.folder), content(whole.folder))
    return None if difference is None else f"{whole.flags}; {difference}"


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every variant without a kill, and then all workers."""
    steps = f"--train_steps {options.train_steps} {RUN_FLAGS}"
    whole = [Run(folder / f"whole{number}", f"{steps} {variant}") for number, variant in enumerate(VARIANTS)]
    tally = Tally()
    with ThreadPoolExecutor(options.workers + len(VARIANTS)) as pool:
        seconds = list(pool.map(Run.finish, whole))
        controls = pool.map(control, whole)
        for part in pool.map(lambda number: work(number, whole, options), range(options.workers)):
            tally.add(part)
        differing_controls = [difference for difference in controls if difference is not None]
    missed = [f"{tally.num_lost} rollouts are lost"] if tally.num_lost else []
    yield {
        "variants": [run.flags for run in whole],
        "num_kills": tally.phases.total(),
        "num_kills_by_phase": dict(tally.phases.most_common()),
        "num_kills_while_a_checkpoint_was_written": tally.num_writing,
        "num_runs": tally.num_runs,
        "num_differing_runs": len(tally.differences),
        "differences": tally.differences,
        "num_differing_runs_without_a_kill": len(differing_controls),
        "differences_without_a_kill": differing_controls,
        "num_lost_rollouts": tally.num_lost,
        "seconds_uninterrupted": seconds,
        "missed": missed + tally.differences,
    }


if __name__ == "__main__":
    sys.exit(child(sys.argv[1], sys.argv[2:]))
