"""What a run shows: results on stdout, everything else on stderr; colored on a terminal, plain text elsewhere."""

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from rlhf_data.options.capture import keep
from rlhf_data.options.checks import once
from rlhf_data.options.exits import with_flags
from rlhf_data.options.progress import Progress, duration
from rlhf_data.records import Prompt, Rollout
from rlhf_data.safety import visible

_BARS = "▁▂▃▄▅▆▇█"
_HEADER_EVERY = 20  # lines between headers
_MAX_SHOWN = 400  # characters of a prompt or response
_MAX_LABEL = 40  # characters of a label
_MAX_NAMES = 4  # metrics of an offline objective in the table
_MAX_SOURCES = 6  # lines with the results of single data sources


class Column(NamedTuple):
    """A column of the table: its title, the name of its metric, decimals, width in characters, and rich's style."""

    title: str
    metric: str
    decimals: int
    width: int
    style: str = ""


PPO_COLUMNS = (
    Column("reward", "rollout/reward", 3, 7, "bold green"),
    Column("KL", "kl/reference", 4, 8),
    Column("policy", "policy/loss", 4, 8),
    Column("value", "value/loss", 4, 8),
    Column("length", "rollout/response_tokens", 1, 7),
    Column("entropy", "policy/entropy", 3, 8),
    Column("tok/s", "throughput/response_tokens", 0, 7),
    Column("generate", "time/generate", 2, 9, "dim"),
    Column("reward", "time/reward", 2, 7, "dim"),
    Column("exper.", "time/experience", 2, 7, "dim"),
    Column("train", "time/train", 2, 6, "dim"),
    Column("sync", "time/sync", 2, 6, "dim"),
    Column("rest", "time/rest", 2, 6, "dim"),  # with it the columns of seconds add up to the step
)
# What the live line says in each phase; see `rlhf_train.run.timeline.PHASES`.
DOING = {
    "generate": "generating",
    "reward": "scoring",
    "load": "rollouts to the trainers",
    "experience": "log-probs and values",
    "train": "training",
    "sync": "sending weights to the engines",
    "evaluate": "answering held-out prompts",
    "write": "writing metrics and rollouts",
    "checkpoint": "copying the state of the run",
    "save": "saving the model",
    "offload": "trainers free GPU memory",
    "reload": "trainers take GPU memory",
    "sleep": "engines free GPU memory",
    "wake": "engines take GPU memory",
}
_FILTERED = Column("filtered", "samples/filtered", 0, 9)
_TEACHER = Column("teacher", "kl/teacher", 4, 8)
_OFFLINE_COLUMNS = (
    Column("grad norm", "train/grad_norm", 3, 10),
    Column("rate", "train/learning_rate", 7, 11),
    Column("tok/s", "throughput/tokens", 0, 8),
    Column("seconds", "time/update", 2, 8, "dim"),
)


class Console:
    """Writes lines, and a live line while work is in progress. Terminals get colors unless NO_COLOR is set."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = _rich_console(out or sys.stdout)
        self._err = _rich_console(err or sys.stderr)
        self._progress = Progress(err or sys.stderr)
        self._told: list[str] = []
        self.working = self._progress.show  # shows the live line, until the next call or `done`
        self.done = self._progress.clear  # removes the live line

    def result(self, text: str = "", style: str = "") -> None:
        """Write a line to stdout."""
        self.done()
        self._out.print(Text(visible(text), style))

    def log(self, text: str, style: str = "") -> None:
        """Write a line to stderr."""
        self.done()
        self._err.print(Text(with_flags(visible(text)), style))

    def notice(self, text: str) -> None:
        """Write a notice to stderr and to the log."""
        self.flagged(f"notice: {text}")

    def flagged(self, text: str) -> None:
        """Write a line that begins with its kind, such as "warning: ", to stderr and to the log."""
        self.log(text, "yellow")
        keep(with_flags(visible(text)))

    def notices(self, *found: Iterable[str]) -> None:
        """Show notices, but none of an option whose other notice is shown already; see `once`."""
        told = [*self._told, *chain(*found)]
        new = once(told)[len(self._told) :]
        self._told += new
        for text in new:
            self.notice(text)

    def aside(self, text: str) -> None:
        """Write a line to stderr above the live line, which stays. Other threads may call it."""
        keep(with_flags(visible(f"notice: {text}")))
        with self._progress.paused():
            self._err.print(Text(with_flags(visible(text)), "yellow"))

    @property
    def is_terminal(self) -> bool:
        """Whether stderr is a terminal."""
        return self._err.is_terminal

    @property
    def width(self) -> float:
        """Characters of a line that fit on stdout; no limit where it is no terminal."""
        return self._out.width if self._out.is_terminal else math.inf

    def row(self, cells: Sequence[tuple[str, str]]) -> None:
        """Write a line of (text, style) cells to stdout."""
        self.done()
        self._out.print(Text.assemble(*((visible(text), style) for text, style in cells)))


@dataclass(slots=True)
class StepTable:
    """A table with one line per step or update. The header is repeated every 20 lines.

    It shows every step whose number is a multiple of `every`, at most one per `min_interval_s`, and the last step. The
    first column has the title `noun`; the others show metrics. Columns at the end for which a terminal is too narrow
    are left out.
    """

    console: Console
    columns: Sequence[Column]
    noun: str = field(default="step", kw_only=True)
    every: int = field(default=1, kw_only=True)
    min_interval_s: float = field(default=0.0, kw_only=True)
    _num_lines: int = field(default=0, init=False)
    _shown_at: float = field(default=float("-inf"), init=False)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Show a step, if it is due."""
        now = time.monotonic()
        is_due = step % self.every == 0 and now - self._shown_at >= self.min_interval_s
        if not is_due and step != num_steps:
            return
        self._shown_at = now
        keep(f"{self.noun} {step} of {num_steps} ended")
        width = max(2 * len(str(num_steps)) + 2, len(self.noun) + 1)
        ends = list(accumulate((column.width for column in self.columns), initial=width))[1:]
        columns = [column for column, end in zip(self.columns, ends, strict=True) if end <= self.console.width]
        if self._num_lines % _HEADER_EVERY == 0:
            titles = [(self.noun.rjust(width), "bold"), *((c.title.rjust(c.width), "bold") for c in columns)]
            self.console.row(titles)
        self._num_lines += 1
        cells = [(f"{step}/{num_steps}".rjust(width), "cyan")]
        self.console.row([*cells, *((_cell(metrics.get(c.metric), c), c.style) for c in columns)])


class View:
    """What online and offline runs both show. An `Observer`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def starting(self, text: str) -> None:
        """See `Observer`."""
        self._console.working(f"starting {text}")

    def ending(self, error: BaseException) -> None:
        """See `Observer`. The error itself is shown at the end."""
        self._console.working("ending the processes of the run")

    def waiting(self, text: str) -> None:
        """See `Observer`."""
        self._console.aside(text)

    def notice(self, text: str) -> None:
        """See `Observer`."""
        self._console.notice(text)

    def warning(self, text: str) -> None:
        """See `Observer`."""
        self._console.flagged(f"warning: {text}")


class OfflineView(View):
    """Shows a run on fixed examples."""

    def __init__(self, console: Console, prefix: str, names: Sequence[str], *, logging_steps: int = 1) -> None:
        """Show the first few of the objective's metrics `names`, which are logged as `prefix`/name, in the table."""
        super().__init__(console)
        self._names = names[:_MAX_NAMES]
        own = [
            Column(name.replace("_", " "), f"{prefix}/{name}", 4, max(8, len(name) + 1), "" if index else "bold green")
            for index, name in enumerate(self._names)
        ]
        columns = [*own, *_OFFLINE_COLUMNS]
        self._table = StepTable(console, columns, noun="update", every=logging_steps, min_interval_s=1.0)

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        self._table.step(update, num_updates, metrics)
        self.progress(update, num_updates)

    def progress(self, done: int, total: int) -> None:
        """See `Observer`."""
        self._console.working("training", done=done, total=total, announce=False)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        names = [name for name in self._names if f"eval/{name}" in metrics]
        shown = ", ".join(f"{name} {metrics[f'eval/{name}']:.4f}" for name in names)
        self._console.result(f"held-out after update {step}: {shown}", "bold")


class RunView(View):
    """Shows an online run."""

    def __init__(
        self,
        console: Console,
        num_steps: int,
        *,
        dynamic_sampling: bool = False,
        has_teacher: bool = False,
        logging_steps: int = 1,
    ) -> None:
        """Show an online run of at most `num_steps` steps, one in `logging_steps`.

        The table shows samples that `dynamic_sampling` filtered out, and the reverse KL to a teacher, if there is one.
        """
        super().__init__(console)
        self._num_steps = num_steps
        more = [column for column, is_shown in ((_FILTERED, dynamic_sampling), (_TEACHER, has_teacher)) if is_shown]
        self._table = StepTable(console, [PPO_COLUMNS[0], *more, *PPO_COLUMNS[1:]], every=logging_steps)
        self._place = ""  # the beginning of the live line: which step is running
        self._ends_at: float | None = None  # the estimated end of the run, from the mean time of the steps so far
        self._doing = ""  # the phase, on the live line
        self._step_seconds: list[float] = []
        self._last: Mapping[str, float] = {}  # metrics of the last step
        self._curves: dict[str, list[float]] = {"reward": [], "accuracy": []}  # of the steps so far

    def phase(self, name: str) -> None:
        """See `Observer`."""
        if name == "generate" and not self._place:
            self._place = f"step 1/{self._num_steps}: "
        self._doing = f"{self._place}{DOING[name]}"
        self._show()

    def progress(self, done: int, total: int) -> None:
        """See `Observer`. Until a step has ended, the time that is left is estimated for the phase only."""
        self._show(done=done, total=total)

    def _show(self, **parts: int) -> None:
        left = None if self._ends_at is None else self._ends_at - time.monotonic()
        self._console.working(self._doing, ends_in_s=left, announce=False, above=self._block(), **parts)

    def _block(self) -> list[str]:
        """Return the lines above the live line: curves of the run, and of the last step its phases and its queue."""
        if not self._last:
            return []
        curves = [f"{name} {values[-1]:.3f} {sparkline(values)}" for name, values in self._curves.items() if values]
        seconds = {name: self._last.get(f"time/{name}", 0.0) for name in (*DOING, "other")}
        total = sum(seconds.values()) or 1.0
        largest = sorted(seconds, key=lambda name: -seconds[name])
        shares = [f"{name} {seconds[name] / total:.0%}" for name in largest if seconds[name] >= total / 100]
        lines = ["  ".join(curves), f"last step {duration(total)}: {', '.join(shares)}"]
        if "async/waiting_groups" in self._last:
            waiting, flying = (self._last[f"async/{name}"] for name in ("waiting_groups", "groups_in_flight"))
            lines.append(f"queue: {waiting:.0f} groups waited and {flying:.0f} were generated when it was taken")
        return [f"  {line}" for line in lines if line]

    def stopping(self) -> None:
        """See `Observer`."""
        self._place, self._ends_at, self._last = "", None, {}  # no step follows

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        self._step_seconds.append(metrics.get("time/step", 0.0))
        self._last = metrics
        for name, values in self._curves.items():
            values += [metrics[f"rollout/{name}"]] if f"rollout/{name}" in metrics else []
        self._ends_at = time.monotonic() + sum(self._step_seconds) / len(self._step_seconds) * (num_steps - step)
        self._place = f"step {min(step + 1, num_steps)}/{num_steps}: "
        shown = sum(metrics.get(column.metric, 0.0) for column in PPO_COLUMNS if column.metric.startswith("time/"))
        rest = {"time/rest": metrics["time/step"] - shown} if "time/step" in metrics else {}
        self._table.step(step, num_steps, {**metrics, **rest})
        if failed := int(metrics.get("samples/failed", 0)):
            self._console.notice(f"step {step}: {failed} samples have no reward and were not trained on")
        if (fill := metrics.get("throughput/pass_fill", 1.0)) < 0.5 and len(self._step_seconds) == 1:
            self._console.notice(f"training passes are {100 * fill:.0f} % full: --micro_batch_tokens fills them")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        moment = f"after step {step}" if step else "before training"
        accuracy = metrics.get("eval/accuracy")
        if accuracy is None:
            said = "nothing scores responses" if "eval/response_tokens" in metrics else "no response came back"
            self._console.result(f"held-out accuracy {moment}: {said}", "bold red")
            return
        details = [f"{metrics['eval/response_tokens']:.1f} tokens per response"]
        if "eval/reward" in metrics:
            details.insert(0, f"reward {metrics['eval/reward']:.3f}")
        if name := _widest_pass("eval", metrics):
            details.insert(0, f"{name} {metrics[f'eval/{name}']:.3f}")
        self._console.result(f"held-out accuracy {moment}: {accuracy:.3f}  ({', '.join(details)})", "bold")
        if failed := metrics.get("eval/failed"):
            self._console.notice(f"{100 * failed:.3g} % of the held-out answers have no reward and count as wrong")
        self._sources(metrics)

    def _sources(self, metrics: Mapping[str, float]) -> None:
        """Write one line per data source, if there are several."""
        sources = [found[1] for name in metrics if (found := re.fullmatch(r"eval/([^/]*)/pass@1", name))]
        width = max(map(len, sources[:_MAX_SOURCES]), default=0)
        for source in sources[:_MAX_SOURCES]:
            prefix = f"eval/{source}"
            names = ("pass@1", _widest_pass(prefix, metrics))
            numbers = [f"{name} {metrics[f'{prefix}/{name}']:.3f}" for name in names if name]
            numbers.append(f"{metrics[f'{prefix}/response_tokens']:.1f} tokens per response")
            numbers.append(f"{metrics[f'{prefix}/truncated']:.0%} cut off")
            self._console.result(f"  {source.ljust(width)}  {', '.join(numbers)}")
        if len(sources) > _MAX_SOURCES:
            self._console.result(f"  and {len(sources) - _MAX_SOURCES} more")

    def samples(self, title: str, samples: Sequence[tuple[Prompt, Rollout]]) -> None:
        """See `Observer`."""
        self._console.result(f"\n{title}", "bold")
        for number, (prompt, rollout) in enumerate(samples, start=1):
            verdict = rollout.verdict
            judged = "not scored" if verdict is None else verdict.kind.value
            earned = "" if verdict is None or verdict.reward is None else f", reward {verdict.reward:g}"
            label = "" if prompt.label is None else f", label {_tail(prompt.label)}"
            style = "green" if judged == "ok" else "red"
            self._console.row([(f"  {number}. ", ""), (judged, style), (f"{earned}{label}", "")])
            self._console.result(f"     prompt    {_one_line(prompt.text)}", "dim")
            self._console.result(f"     response  {_one_line(rollout.text)}")
        self._console.result()


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the last `width` values as bars of eight heights, from the least of them to the largest."""
    shown = values[-width:]
    known = [value for value in shown if math.isfinite(value)]
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low or 1.0
    return "".join(_BARS[round((value - low) / span * 7)] if math.isfinite(value) else " " for value in shown)


def _widest_pass(prefix: str, metrics: Mapping[str, float]) -> str | None:
    """Return `pass@K` with the largest K that was measured, or None if it is 1."""
    start = f"{prefix}/pass@"
    most = max((int(name.removeprefix(start)) for name in metrics if name.startswith(start)), default=1)
    return f"pass@{most}" if most > 1 else None


def _cell(value: float | None, column: Column) -> str:
    if value is None:
        return "-".rjust(column.width)
    text = f"{value:.{column.decimals}f}"
    return (text if len(text) < column.width else f"{value:.1e}").rjust(column.width)


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ... ({len(text)} characters)"


def _tail(text: str) -> str:
    """Return the end of a label. In a worked solution the answer comes last."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_LABEL else f"... {text[-_MAX_LABEL:]}"


def _rich_console(file: TextIO) -> RichConsole:
    # Lines are never wrapped, and without a terminal have no colors, even where FORCE_COLOR is set.
    return RichConsole(file=file, soft_wrap=True, color_system="auto" if file.isatty() else None)
