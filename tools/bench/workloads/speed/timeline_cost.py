"""What `--timeline` adds to a step of the built-in run of `rlhf ppo`.

    python tools/bench/run.py timeline_cost --out timeline-cost.json

One run has its timeline on in even steps only, so that each step with it has a neighbour without it on the same machine
a moment before. `cost` is the median over these pairs of the relative difference of `time/step`. `inside` is the share
of the even steps that their calls of the timeline took, which the noise of the machine hardly changes.
"""

import functools
import multiprocessing
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import UsageError, read_metrics

FLAGS = {"steps": (41, "of the run, odd and at least 3: the first one is left out")}
_METHODS = ("begin", "end", "state", "slice", "count", "group", "phase", "busy", "work", "flush")


def run(flags: list[str], sent: Any) -> None:
    """Run `rlhf ppo` with a timeline in even steps, and send the seconds in its calls by step; in a process of its own.

    Calls of several threads are added up. What an outer call calls counts once.
    """
    from rlhf_cli.console.views import RunView
    from rlhf_cli.main import main
    from rlhf_train.learning.learner import Learner
    from rlhf_train.tracing.trace import Trace

    sys.stdout = sys.stderr
    traces: list[Trace] = []
    inside = [0.0]
    here = threading.local()

    def timed(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            here.depth = getattr(here, "depth", 0) + 1
            begin_s = time.perf_counter()
            try:
                return method(*args, **named)
            finally:
                here.depth -= 1
                inside[0] += (time.perf_counter() - begin_s) * (not here.depth)

        return call

    def show(view: RunView, step: int, *rest: Any) -> None:
        shown(view, step, *rest)
        sent.send((step, inside[0]))
        inside[0] = 0.0
        for trace in traces:
            trace.is_on = step % 2 == 1

    def make(trace: Trace, *args: Any, **named: Any) -> None:
        made(trace, *args, **named)
        traces.extend([trace] if trace.is_on else [])

    made, Trace.__init__ = Trace.__init__, make
    shown, RunView.step = RunView.step, show
    for name in _METHODS:
        setattr(Trace, name, timed(getattr(Trace, name)))
    Learner.show_in = timed(Learner.show_in)
    sys.exit(main(["ppo", "--timeline", *flags]))


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run, and compare neighbouring steps."""
    if options.steps < 3 or options.steps % 2 == 0:
        raise UsageError("--steps must be odd and at least 3: steps 2 and 3 are the first pair, and so on")
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    flags = ["--train_steps", str(options.steps), "--eval_data", "None", "--save_path", str(folder / "run")]
    process = context.Process(target=run, args=(flags, sent))
    process.start()
    sent.close()
    inside = dict(received.recv() for _ in range(options.steps))
    process.join()
    if process.exitcode:
        raise RuntimeError(f"rlhf ppo ended with status {process.exitcode}")
    seconds = {step["step"]: step["time/step"] for step in read_metrics(folder / "run").steps}
    evens = range(2, options.steps, 2)
    costs = [seconds[step] / seconds[step + 1] - 1 for step in evens]
    yield {
        "cost": statistics.median(costs),
        "quartiles": statistics.quantiles(costs, n=4),
        "inside": statistics.median(inside[step] / seconds[step] for step in evens),
        "step_s": statistics.median(seconds.values()),
        "bytes_per_step": (folder / "run" / "timeline.json").stat().st_size / len(evens),
        "seconds": seconds,
    }
