"""The controller of a run with many engines and long answers: its processor time and memory.

    python tools/bench/run.py fleet --out fleet-cpu.json

Router, supervisor, service, stream, ledger and recorder are those of `rlhf ppo`, and engines are called through Ray.
Behind Ray, `--actors` processes stand for `--engines` engines. They write `--tokens_per_s` tokens per second and
engine, each with its log-prob. Reports of what is written, and answers, have the pieces and types of real engines.
Nothing is trained. The states that a checkpoint would save are taken in each step, as in a run.

Answers have `--answer_tokens` tokens. In a run that has gone on for long, each is at another token. So the first ones
are written faster up to a random token, which takes `--fill_s`; the tokens of that time, divided by the controller's
processor time, are what one core carries ("fill"). `--seconds` at the usual speed follow ("steady"). Memory is flat if
the last third of them needs no more of it than the first third.
"""

import asyncio
import itertools
import os
import sys
import threading
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray

from rlhf_data.records import FinishReason, Prompt, Rollout, Verdict, VerdictKind
from rlhf_models.testing import tiny_tokenizer
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, SamplingParams
from rlhf_rollout.ray_actors import EngineActor, RayEngine
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.cluster.ray_session import started_cluster
from rlhf_train.generation.rollouts import Rollouts
from rlhf_train.generation.run_spec import AsyncSpec
from rlhf_train.generation.stream import SampleStream
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.run.timeline import Timeline

FLAGS = {
    "engines": 100,
    "actors": (4, "processes that stand for the engines"),
    "prompts": (10_000, "in flight, one answer each"),
    "prompt_tokens": 200,
    "answer_tokens": 65_536,
    "tokens_per_s": (2_000.0, "of an engine"),
    "fill_s": (60.0, "in which answers get to where they are at first"),
    "seconds": (180.0, "that are measured then"),
    "batch": (32, "prompts per step"),
    "record_format": ("columns", "see `rlhf ppo --record_format`"),
}
GOAL_CORES = 0.5
GOAL_GROWTH = 0.02  # of the memory
VOCABULARY = 8_000
SAMPLE_S = 1.0


@dataclass(slots=True, eq=False)
class Paced:
    """An answer as a `Draft` that is written by the clock: its tokens are made up when they are asked for."""

    fleet: "PacedEngine"
    ahead: int  # tokens that are written at first, quickly
    since: float
    version: int
    max_tokens: int

    @property
    def size(self) -> int:
        """Tokens that are written."""
        seconds = time.monotonic() - self.since
        fill_s = self.fleet.fill_s
        written = self.ahead * min(seconds / fill_s, 1.0) + max(seconds - fill_s, 0.0) * self.fleet.speed
        return min(int(written), self.max_tokens)

    @property
    def left_s(self) -> float:
        """Seconds until it ends."""
        end = self.since + self.fleet.fill_s + (self.max_tokens - self.ahead) / self.fleet.speed
        return end - time.monotonic()

    def after(self, num_tokens: int, num_parts: int) -> Draft:
        """See `Draft.after`."""
        part = slice(num_tokens, max(self.size - 1, num_tokens))
        return Draft(self.fleet.token_ids[part], self.fleet.logprobs[part], [(0, self.version)])


class PacedEngine:
    """The engine in an actor. It has no model, and writes all answers at the same speed.

    Args:
        speed: tokens per second of an answer.
        fill_s: seconds in which the first answers get to where they are at first.
        max_tokens: of an answer.
        seed: of the tokens, and of where answers are at first.
    """

    def __init__(self, speed: float, fill_s: float, max_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.speed = speed
        self.fill_s = fill_s
        self.begun = time.monotonic()
        self.rng = rng
        self.token_ids = array("i", np.minimum(rng.zipf(1.25, max_tokens), VOCABULARY - 1).astype(np.int32).tobytes())
        self.logprobs = array("f", (-rng.gamma(0.25, 2.0, max_tokens)).astype(np.float32).tobytes())
        self.version = 0
        self.num_in_flight = 0

    def begin(self, max_tokens: int) -> Paced:
        """Return an answer that begins now."""
        is_first = time.monotonic() < self.begun + self.fill_s / 2
        ahead = int(self.rng.integers(max_tokens)) if is_first else 0
        since = time.monotonic() - (0.0 if is_first else self.fill_s)
        return Paced(self, ahead, since, self.version, max_tokens)

    async def generate(
        self, token_ids: np.ndarray, sampling: SamplingParams, *, timeout_s: float | None, drafts: Sequence[Paced]
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        self.num_in_flight += len(drafts)
        await asyncio.sleep(max(draft.left_s for draft in drafts))
        self.num_in_flight -= len(drafts)
        whole = self.token_ids[: sampling.max_tokens], self.logprobs[: sampling.max_tokens]
        return [Completion.single(*whole, FinishReason.LENGTH, draft.version) for draft in drafts]

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        state = {"num_in_flight": self.num_in_flight, "is_paused": False, "is_asleep": False}
        return EngineHealth(policy_version=self.version, **state)

    async def pause(self, mode: str) -> int:
        """See `RolloutEngine.pause`. An answer is of the version with which it began."""
        return self.num_in_flight

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""

    async def advance(self, version: int) -> None:
        """Take weights of a version."""
        self.version = version


class FleetActor(EngineActor):
    """The process of several engines. Takes the arguments of `PacedEngine`."""

    def __init__(self, *shape: Any) -> None:
        super(EngineActor, self).__init__(lambda: PacedEngine(*shape), ())
        self._drafts = {}

    @ray.method(concurrency_group="requests")
    async def generate(self, request: Sequence[Any]) -> list[Completion]:
        """See `EngineHost.generate`."""
        token_ids, sampling, name, drafts, *others = request
        paced = [self.part.begin(sampling.max_tokens) for _ in drafts]
        return await super().generate((token_ids, sampling, name, paced, *others))


class Scores:
    """A reward that costs nothing."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """See `RewardFunction.score`."""
        return [Verdict(VerdictKind.OK, 1.0) for _ in rollouts]

    async def close(self) -> None:
        """There is nothing to close."""


class Samples:
    """Notes processor time, memory and threads of this process each second, on a thread of its own."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []  # time, seconds of processors, MiB
        self.threads: list[dict[int, float]] = []  # seconds of processors by thread
        self._names: dict[int, str] = {}  # of threads
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            memory = self._process.memory_info()
            self._names |= {thread.native_id: thread.name for thread in threading.enumerate()}
            self.rows.append((time.monotonic(), time.process_time(), (memory.rss - memory.shared) / 2**20))
            self.threads.append({one.id: one.user_time + one.system_time for one in self._process.threads()})

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Return what the time from `start` to `end` took: cores, memory at first and at last, and busy threads."""
        chosen = [number for number, row in enumerate(self.rows) if start <= row[0] < end]
        rows = np.array([self.rows[number] for number in chosen])
        seconds = rows[-1, 0] - rows[0, 0]
        third = max(len(rows) // 3, 1)
        first, last = (self.threads[chosen[place]] for place in (0, -1))
        spent: dict[str, float] = {}
        for number, total in last.items():
            name = self._names.get(number, "others")
            spent[name] = spent.get(name, 0.0) + (total - first.get(number, 0.0)) / seconds
        return {
            "seconds": float(seconds),
            "cores": float((rows[-1, 1] - rows[0, 1]) / seconds),
            "cores_by_thread": {name: share for name, share in spent.items() if share > 0.001},
            "memory_first_mib": float(rows[:third, 2].mean()),
            "memory_last_mib": float(rows[-third:, 2].mean()),
            "memory_peak_mib": float(rows[:, 2].max()),
        }


def make_job(options: Namespace, folder: Path) -> Any:
    """Return what `Rollouts` needs to know of a run."""
    tiny_tokenizer(VOCABULARY).save_pretrained(folder)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, VOCABULARY, (1000, options.prompt_tokens))
    return SimpleNamespace(
        engine=EngineSpec(model=str(folder), max_model_len=options.prompt_tokens + options.answer_tokens),
        agent=None,
        reward=SimpleNamespace(sources=("scores",)),
        algorithm=AlgorithmSpec(),
        asynchronous=AsyncSpec(at_update="keep"),
        max_staleness=-(-options.prompts // options.batch) + 1,
        batch=SimpleNamespace(rollout_batch_size=options.batch, num_rollouts=options.batch),
        sampling=SamplingParams(max_tokens=options.answer_tokens, min_tokens=options.answer_tokens),
        prompts=tuple(Prompt(f"p{number}", row, "prompt") for number, row in enumerate(ids)),
        prompts_digest="",
        eval_prompts=(),
        seed=1,
        max_in_flight=options.prompts,
        dynamic_sampling=None,
        difficulty=None,
        reuse=None,
    )


def start_actors(options: Namespace) -> list[Any]:
    """Start the processes of the engines; return their handles."""
    groups = {"requests": 2 * options.prompts, "control": 1000}
    kind = ray.remote(concurrency_groups=groups, num_cpus=0)(FleetActor)
    speed = options.tokens_per_s * options.engines / options.prompts
    shape = speed, options.fill_s, options.answer_tokens
    handles = [kind.remote(*shape, seed) for seed in range(options.actors)]
    ray.get([handle.ready.remote() for handle in handles])
    return handles


def train(rollouts: Rollouts, recorder: Recorder, end: float) -> int:
    """Take batches until `end`, as a controller does; return how many."""
    ledger = Ledger()
    rollouts.synchronize(0)
    rollouts.release(0)
    step = 0
    while time.monotonic() < end:
        step += 1
        drawn = rollouts.next_batch(step)
        taken = sum(len(group.rollouts) for group in drawn.kept)
        ledger.add(requested=drawn.num_requested, failed=drawn.num_failed)
        ledger.check(outstanding=rollouts.num_outstanding + taken)
        recorder.rollouts("rollouts", step, drawn.groups)
        ledger.add(trained=taken)
        after_update = rollouts.state()  # kept until the next one, for a checkpoint if the run is interrupted
        rollouts.synchronize(step)
        rollouts.release(step)
        recorder.step(step, ledger.close_step())
        after_update = rollouts.state()
        assert after_update["num_failed"] == 0, after_update["failure"]
    return step


def run(options: Namespace, folder: Path) -> dict[str, Any]:
    """Run the controller and return what it needed."""
    handles = start_actors(options)

    versions = itertools.count()

    async def send(engines: Mapping[int, Any]) -> Mapping[int, str]:
        version = next(versions)
        await asyncio.gather(*[handle.call.remote("advance", version) for handle in handles])
        return {}

    async def sent() -> None:
        """Nothing is sent when the supervision of engines ends."""

    job = make_job(options, folder / "tokenizer")
    engines = [RayEngine(handles[number % options.actors], job.engine) for number in range(options.engines)]
    stream = SampleStream(options.batch, 10**6, job.max_staleness)
    samples = Samples()
    started = time.monotonic()
    end = started + options.fill_s + options.seconds
    trainers = SimpleNamespace(send_weights=send, weights_sent=sent)
    rollouts = Rollouts(job, engines, trainers, Scores(), stream, Timeline(), Observer())
    with Recorder(str(folder / "run"), "", record_format=options.record_format) as recorder:
        steps = train(rollouts, recorder, end)
        rollouts.close()
    samples.close()
    filled = started + options.fill_s
    # The first seconds start all requests; they come once in a run.
    fill = samples.between(started + 0.1 * options.fill_s, filled)
    steady = samples.between(filled + 0.2 * options.seconds, end)  # reports of the fill come late, and batches too
    fill_rate = options.prompts * options.answer_tokens / 2 / options.fill_s
    rate = options.tokens_per_s * options.engines
    return {
        "steps": steps,
        "tokens_in_flight": options.prompts * options.answer_tokens // 2,
        "fill": {"tokens_per_s": fill_rate, "tokens_per_s_of_a_core": fill_rate / fill["cores"], **fill},
        "steady": {"tokens_per_s": rate, **steady},
    }


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure one run."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the actors import this file
    with started_cluster(2, 0):
        found = run(options, folder)
    steady = found["steady"]
    growth = steady["memory_last_mib"] / steady["memory_first_mib"] - 1
    found["steady"]["memory_growth"] = growth
    goals = {"cores": (steady["cores"], GOAL_CORES), "memory_growth": (growth, GOAL_GROWTH)}
    missed = [f"{name} is {got:.3g}, the goal is {goal:g}" for name, (got, goal) in goals.items() if got >= goal]
    yield {"goals": {name: goal for name, (_, goal) in goals.items()}, **found, "missed": missed}
