"""An online run in one process: an engine and ranks that answer what a test tells them to."""

import asyncio
import dataclasses
import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason, Prompt, Verdict, VerdictKind
from rlhf_rollout.protocols import Completion, EngineHealth
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.batching import BatchSizes
from rlhf_train.learning.rank_actor import RankActor
from rlhf_train.learning.ranks import RankSet
from rlhf_train.run.checkpoint import write_receipt
from rlhf_train.run.metrics import METRIC_PREFIXES, Mean, Sum
from rlhf_train.run.observer import Observer
from rlhf_train.run.rank_state import file_name
from rlhf_train.run.recorder import Recorder
from rlhf_train.tracing.token_values import COLUMNS, TokenValues
from rlhf_train.tracing.trace import WorkLog


class Dealt(NamedTuple):
    """A rollout as the ranks get it."""

    rollout_id: str
    reward: float
    token_ids: np.ndarray
    rollout_logprobs: np.ndarray
    policy_versions: np.ndarray
    token_rewards: np.ndarray

    @property
    def policy_version(self):
        return min(self.policy_versions[self.policy_versions >= 0].tolist(), default=0)


class World:
    """An engine and the ranks of one set, with everything that happened to them in order.

    Attributes:
        failing: prompts with a first token below this, modulo 2, fail in the engine.
        dead: every call of the engine fails until it is restarted.
        asleep, has_weights: the engine generates if it is awake and has weights, and takes weights if it is awake.
        paused: requests wait.
        lost: rollouts that a role's ranks do not train, by role.
        kl: what the ranks measure.
        delay_s: of every call.
        blocks: the rollouts of each block that the models ran on early.
        log: the calls, without those for completions and those that only wait or ask.
    """

    def __init__(self) -> None:
        self.failing = 0
        self.dead = False
        self.asleep = False
        self.has_weights = True
        self.paused = False
        self.lost: dict[str, int] = {}
        self.kl = 0.0
        self.delay_s = 0.0
        self.engine_version = 0
        self.log: list[str] = []
        self.kl_coefs: list[float] = []
        self.rollouts: list = []
        self.blocks: list[tuple[str, ...]] = []
        self.rewards: list[float] = []
        self.work = WorkLog()

    # the engine

    async def generate(self, token_ids, sampling, *_, **__):
        while self.paused and not self.dead:
            await asyncio.sleep(0.001)
        self._check_alive()
        assert self.has_weights and not self.asleep
        if token_ids[0] % 2 < self.failing:
            raise EngineError("the GPU is on fire")
        time.sleep(self.delay_s)
        completion = Completion.single(np.arange(5), np.full(5, -1.0), FinishReason.STOP, self.engine_version)
        return [completion] * sampling.num_samples

    def _check_alive(self):
        if self.dead:
            raise EngineError("the engine is gone")

    def kill(self):
        self.dead = True

    def restart(self):
        self.log.append("restart")
        self.dead = self.asleep = self.paused = False
        self.has_weights = True
        self.engine_version = -1

    async def ready(self):
        pass

    async def pause(self, mode):
        self._check_alive()
        assert mode == "keep"
        self.paused = True
        return 0

    async def resume(self):
        self._check_alive()
        self.paused = False

    async def sleep(self, keep_weights):
        self.asleep = True
        self.has_weights = keep_weights

    async def wake_up(self):
        self.asleep = False

    async def health(self):
        self._check_alive()
        return EngineHealth(policy_version=self.engine_version, num_in_flight=0, is_paused=self.paused, is_asleep=False)

    # the ranks

    def start(self, method, *arguments, **options):
        time.sleep(self.delay_s)
        name = method.__name__
        if name not in ("peak_memory_bytes", "finish_state", "take_work", "token_values"):
            self.log.append(" ".join([name, *[part for part in arguments if isinstance(part, str)]]))
        with self.work.doing(name) if name != "take_work" else nullcontext():
            return [getattr(self, f"on_{name}", lambda *_, **__: {})(*arguments, **options)]

    def on_load_rollouts(self, columns, plan, step_versions):
        assert len(columns.rollout_ids) == len(plan.rows)
        flat = (columns.token_ids, columns.rollout_logprobs, columns.policy_versions, columns.token_rewards)
        parts = [np.split(part, columns.lengths.cumsum())[:-1] for part in flat]
        self.rollouts.append(list(map(Dealt, columns.rollout_ids, columns.rewards, *parts)))
        self.rewards = columns.rewards.tolist()

    def on_run_block(self, roles, names, columns, plan):
        assert len(names) == len(roles) and len(columns.rollout_ids) == len(plan.rows)
        self.log.append(f"run_block {' '.join(roles)}")
        self.blocks.append(columns.rollout_ids)
        return {}, ([], 0.5)

    def on_assign_advantages(self, kl_coef):
        self.kl_coefs.append(kl_coef)
        return {"kl/reference": Mean(self.kl, 1)}

    def on_update(self, role, *, max_epochs, seed, kl_coef, entropy_coef):
        assert (kl_coef, entropy_coef) == (self.kl_coefs[-1], 0.0)
        passes = len(self.rollouts[-1]) * max_epochs - self.lost.get(role, 0)
        name = {"actor": "policy", "critic": "value"}[role]
        return {f"{name}/rollout_passes": Sum(passes), f"{name}/loss": Mean(0.5, 1)}

    def on_token_values(self):
        ids = [rollout.rollout_id for rollout in self.rollouts[-1]]
        counts = np.array([(rollout.policy_versions >= 0).sum() for rollout in self.rollouts[-1]])
        return TokenValues(ids, counts, dict.fromkeys(COLUMNS, np.full(counts.sum(), len(self.rollouts), np.float16)))

    def on_save_state(self, folder):
        self.saved = folder
        for role in ("actor", "critic"):
            path = Path(folder, file_name(role, 0, 1))
            path.write_text(f"{role} after {self.engine_version} updates")
            write_receipt(path)
        return [file_name(role, 0, 1) for role in ("actor", "critic")]

    def on_load_state(self, folder):
        self.loaded = folder

    def on_peak_memory_bytes(self):
        return 7

    def on_take_work(self):
        return self.work.take()

    def send(self, engines, policy_version):
        self.log.append(f"send {policy_version} to {len(engines)}")
        if self.dead:
            return 11, dict.fromkeys(engines, "gone in the middle of a bucket")
        if engines:
            assert not self.asleep
            self.has_weights = True
        self.engine_version = policy_version
        return 11, {}


class FakeRanks(RankSet):
    """The ranks of a `World`: its results stand for the references to them."""

    def __init__(self, world: World) -> None:
        super().__init__(("actor", "critic", "reference"), [world])
        self.world = world

    def start(self, method, *arguments, **options):
        return self.world.start(method, *arguments, **options)

    def start_on(self, rank, method, *arguments):
        return getattr(self.world, f"on_{method.__name__}")(*arguments)

    def start_each(self, method, arguments):
        if method.__name__ == "send_weights":
            return [self.world.send(*each) for each in arguments]
        return [result for each in arguments for result in self.world.start(method, *each)]


class LocalRanks(RankSet):
    """Ranks in this process: all handles are the same worker, so that each call of all of them is made once.

    Attributes:
        blocks: of each block that was sent, its rank, its rollouts and its plan.
    """

    def __init__(self, roles, worker, count=1):
        super().__init__(roles, range(count))
        self.actor = RankActor.__new__(RankActor)
        self.actor._worker = worker
        self.blocks: list[tuple] = []

    def start(self, method, *arguments, **options):
        return [self.call_on(method)(*arguments, **options)]

    def start_each(self, method, arguments):
        return [self.call_on(method)(*each) for each in arguments]

    def start_on(self, rank, method, *arguments):
        *_, columns, plan = arguments
        self.blocks.append((rank, columns.rollout_ids, plan))
        return self.call_on(method)(*arguments)

    def call_on(self, method):
        """Return the method of the actor, or of its worker."""
        own = getattr(self.actor, method.__name__, None)
        return own or partial(self.actor.work, method.__name__)


class LoggedRanks(RankSet):
    """Ranks that note their calls in `log`; a call of several has a result per rank."""

    def __init__(self, log: list, *roles: str, count: int = 1) -> None:
        super().__init__(roles, range(count))
        self.log = log
        self.shards: list[tuple] = []

    def start(self, method, *arguments, **options):
        name = method.__name__
        self.log.append((self.roles, *arguments))
        if name == "update":
            return [{f"{METRIC_PREFIXES[arguments[0]]}/rollout_passes": Sum(3.0)} for _ in self.handles]
        if name == "export_columns":
            return [f"part {rank}" for rank in self.handles]
        if name == "peak_memory_bytes":
            return [10 * len(self.roles) + rank for rank in self.handles]
        return [{} for _ in self.handles]

    def start_each(self, method, arguments):
        self.log.append((self.roles, method.__name__))
        self.shards += arguments
        if method.__name__ == "send_weights":
            return [
                (1000 + rank, {number: "full" for number in mine if number == 2})
                for rank, (mine, _) in enumerate(arguments)
            ]
        return [{} for _ in self.handles]


class Listener(Observer):
    """Keeps the warnings, the titles of samples that were shown, what was said to be done, and what was said after the
    last step."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.last_words: list[str] | None = None  # None before
        self.warnings: list[str] = []
        self.titles: list[str] = []

    def progress(self, done: int, total: int) -> None:
        self.done.append((done, total))

    def samples(self, title: str, samples: object) -> None:
        self.titles.append(title)

    def stopping(self) -> None:
        self.last_words = []

    def notice(self, text: str) -> None:
        if self.last_words is not None:
            self.last_words.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Forgets:
    """Solves each prompt in one of four samples, but only with the weights of the first step."""

    async def score(self, prompt, rollouts):
        is_right = [index == 2 and rollout.policy_version == 0 for index, rollout in enumerate(rollouts)]
        return [Verdict(VerdictKind.OK if right else VerdictKind.WRONG, float(right)) for right in is_right]

    async def close(self):
        pass


# It depends on the order of the groups, so that equal numbers need equal orders.
OWN_METRICS = OwnCode(
    "step_metrics",
    "/nowhere/mine.py",
    "from zlib import crc32\n"
    "def step_metrics(groups, left_out):\n"
    "    prompts = [group.prompt for group in (*groups, *left_out)]\n"
    "    return {'order': sum(place * crc32(prompt.encode()) for place, prompt in enumerate(prompts))}\n",
)


class SpreadReward:
    """Tells the samples of even prompts apart, gives all samples of odd ones the same."""

    async def score(self, prompt, rollouts):
        first = 1.0 if prompt.token_ids[0] % 2 == 0 else 0.0
        rewards = [first, *[0.0] * (len(rollouts) - 1)]
        return [Verdict(VerdictKind.OK if reward else VerdictKind.WRONG, reward) for reward in rewards]

    async def close(self):
        pass


class BrokenReward(SpreadReward):
    """Scores the last sample of a group only."""

    async def score(self, prompt, rollouts):
        scored = await super().score(prompt, rollouts)
        return [*[Verdict(VerdictKind.TIMEOUT, detail="server down")] * (len(rollouts) - 1), scored[-1]]


class CrashingReward(SpreadReward):
    """Scores nothing."""

    async def score(self, prompt, rollouts):
        return [Verdict(VerdictKind.CRASH, detail="no disk")] * len(rollouts)


@dataclasses.dataclass
class Run:
    """A run in this process and whoever watches it."""

    job: object
    world: World
    listener: Listener
    recorder: Recorder
    controller: object

    def step(self, step: int) -> bool:
        """Do a step as the loop does; return whether something was learned."""
        self.controller.generate(step)
        learns = self.controller.can_learn()
        if learns:
            self.controller.make_experience(step)
            self.controller.assign_advantages()
            self.controller.update(step)
            self.controller.sync_weights()
        self.controller.record(step)
        self.controller.checkpoint(step)
        return learns

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.recorder.path("metrics").read_text().splitlines()]


def by_step(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "time/step" in line]


def tiny_batch(prompts: int):
    """Batch sizes of `prompts` groups of four and updates of sixteen rollouts."""
    return BatchSizes(
        rollout_batch_size=prompts, n_samples_per_prompt=4, train_batch_size=16, micro_train_batch_size=8,
        micro_rollout_batch_size=16,
    )  # fmt: skip


def held_out():
    """Two prompts, one even and one odd."""
    return (Prompt("even", np.array([2]), "even"), Prompt("odd", np.array([3]), "odd"))
