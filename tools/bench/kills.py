"""Kill `rlhf ppo` at random moments, let it continue, and compare it with a run that nothing interrupted.

    python tools/bench/kills.py --kills 200 --workers 8 --out kills.json

Every run trains the built-in model for `--train_steps` steps with a checkpoint after each, with one of `VARIANTS`: one
or two training processes and different ZeRO stages. SIGKILL hits its main process at a random moment, and
`rlhf ppo --load_checkpoint` continues it, until the run has ended or its share of the kills is used up; then it runs to
its end. One kill in ten comes while the run starts, the others at a random moment of the first steps.

The report counts the kills by phase, the rollouts that are missing, and the runs whose metrics, rollouts or weights
differ from the run of the same variant without interruption. On CPUs none may differ in a single bit. A second run of
each variant without interruption, under the same load, is compared in the same way.
"""

import argparse
import concurrent.futures
import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner import OWN_CLUSTER, arguments, read_lines, write

VARIANTS = (
    "--zero_stage 2",
    "--zero_stage 2 --actor_num_gpus_per_node 2",
    "--zero_stage 0",
    "--zero_stage 3 --actor_num_gpus_per_node 2",
)
FLAGS = ["--eval_steps", "10", "--enable_ema", "--save_steps", "1", "--max_ckpt_num", "2"]
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


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the run's metrics without seconds and bytes of memory."""
    lines = read_lines(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(NOT_NUMBERS)} for line in lines]


def content(folder: Path) -> dict[str, Any]:
    """Return what two runs of the same numbers have in common: metrics, and hashes of rollouts and final weights."""
    found: dict[str, Any] = {"metrics.jsonl": numbers(folder)}
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        text = SECONDS.sub("", (folder / name).read_text(encoding="utf-8"))
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    for name in ("model/model.safetensors", "ema_model/model.safetensors"):
        found[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return found


def first_difference(found: dict[str, Any], reference: dict[str, Any]) -> str | None:
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
    """What happened in the runs of one worker."""

    phases: Counter[str] = field(default_factory=Counter)
    num_writing: int = 0  # kills while a checkpoint was being written
    num_runs: int = 0
    num_lost: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.phases += other.phases
        self.num_writing += other.num_writing
        self.num_runs += other.num_runs
        self.num_lost += other.num_lost
        self.differences += other.differences


class Run:
    """One run in a folder, started any number of times."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self._flags = flags
        self._phase_path = folder.with_suffix(".phase")

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or continue it."""
        self._phase_path.write_bytes(STARTING.ljust(PHASE_BYTES).encode())
        flags = [*self._flags, "--save_path", str(self.folder), "--load_checkpoint"]
        command = [sys.executable, __file__, "--child", str(self._phase_path), *flags]
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, env=os.environ | OWN_CLUSTER, stdout=log, stderr=log)

    def phase(self) -> str:
        """Return the current phase."""
        return self._phase_path.read_bytes().decode().strip()

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any((self.folder / "checkpoints").glob(".step-*"))

    def resumed_after(self) -> list[int]:
        """Return the steps after which the run was continued."""
        text = self.folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
        return [int(step) for step in re.findall(r"the run continues after step (\d+)", text)]

    def finish(self) -> float:
        """Run to the end; return the seconds that this took."""
        started = time.monotonic()
        status = self.start().wait()
        if status != 0:
            text = self.folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{self.folder} ended with status {status}:\n{text[-3000:]}")
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
        writing = self.is_writing()
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return False
        tally.phases[phase] += 1
        tally.num_writing += writing
        return True


def work(number: int, num_kills: int, folder: Path, whole: Sequence[Run], options: argparse.Namespace) -> Tally:
    """Do one worker's share of the kills; return what happened. `whole` has the complete run of each variant."""
    rng = random.Random(options.seed + number)
    tally = Tally()
    variant = number % len(VARIANTS)
    reference = content(whole[variant].folder)
    while sum(tally.phases.values()) < num_kills:
        run = Run(folder / f"worker{number}-run{tally.num_runs}", flags_of(options, variant))
        while sum(tally.phases.values()) < num_kills and run.kill(rng, options.window_s, tally):
            pass
        run.finish()
        tally.num_runs += 1
        difference = first_difference(content(run.folder), reference)
        if difference is not None:
            tally.differences.append(f"{VARIANTS[variant]}; continued after {run.resumed_after()}; {difference}")
        tally.num_lost += num_lost(run.folder, options.train_steps, options.num_rollouts)
        print(f"worker {number}: {sum(tally.phases.values())} kills, difference: {difference}", flush=True)
    return tally


def control(variant: int, folder: Path, whole: Sequence[Run], options: argparse.Namespace) -> str | None:
    """Run a variant once more without interruption; return where it differs from the first run, if it does."""
    run = Run(folder / f"control{variant}", flags_of(options, variant))
    run.finish()
    difference = first_difference(content(run.folder), content(whole[variant].folder))
    return None if difference is None else f"{VARIANTS[variant]}; {difference}"


def flags_of(options: argparse.Namespace, variant: int) -> list[str]:
    """Return the flags of all runs of a variant."""
    return ["--train_steps", str(options.train_steps), *FLAGS, *VARIANTS[variant].split()]


def main() -> int:
    """Run the reference and all workers, write the report, and return 1 if anything was lost or differs."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    options = arguments(
        __doc__,
        kills=200,
        workers=(1, "runs at the same time"),
        train_steps=40,
        num_rollouts=(128, "rollouts per step of the built-in run"),
        window_s=(4.0, "a kill comes at most so long after the start"),
        seed=0,
    ).parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        whole = [Run(Path(name, f"whole{n}"), flags_of(options, n)) for n in range(len(VARIANTS))]
        least, more = divmod(options.kills, options.workers)
        shares = [least + (n < more) for n in range(options.workers)]
        tally = Tally()
        with concurrent.futures.ThreadPoolExecutor(options.workers + len(VARIANTS)) as pool:
            seconds = list(pool.map(Run.finish, whole))
            controls = pool.map(lambda n: control(n, Path(name), whole, options), range(len(VARIANTS)))
            for part in pool.map(lambda n: work(n, shares[n], Path(name), whole, options), range(options.workers)):
                tally.add(part)
            differing_controls = [difference for difference in controls if difference is not None]
    report = {
        "variants": [" ".join(flags_of(options, n)) for n in range(len(VARIANTS))],
        "num_kills": sum(tally.phases.values()),
        "num_kills_by_phase": dict(tally.phases.most_common()),
        "num_kills_while_a_checkpoint_was_written": tally.num_writing,
        "num_runs": tally.num_runs,
        "num_differing_runs": len(tally.differences),
        "differences": tally.differences,
        "num_differing_runs_without_a_kill": len(differing_controls),
        "differences_without_a_kill": differing_controls,
        "num_lost_rollouts": tally.num_lost,
        "seconds_uninterrupted": [round(value, 1) for value in seconds],
        "seconds": round(time.monotonic() - started, 1),
    }
    write(options, "kills", report)
    counts = f"{tally.num_lost} rollouts lost, {len(tally.differences)} runs differ"
    print(f"{report['num_kills']} kills in {tally.num_runs} runs: {counts}")
    return int(tally.num_lost != 0 or bool(tally.differences))


if __name__ == "__main__":
    sys.exit(main())
