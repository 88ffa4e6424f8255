"""A run's parts together, with engines of this process and ranks that answer what a test tells them to."""

import dataclasses
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, EngineError, RewardError, RlhfError
from rlhf_data.records import FinishReason, Prompt, Verdict, VerdictKind
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.protocols import Completion
from rlhf_train.algorithms import make_algorithm
from rlhf_train.online.generation import make_reward
from rlhf_train.online.job import BatchSizes, DynamicSampling
from rlhf_train.online.ranks import RankSet
from rlhf_train.online.rewards import RewardShaper
from rlhf_train.online.run import assemble, train_and_save
from rlhf_train.run.metrics import Mean, Sum
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from trainer_testing import tiny_job


def test_online_job_plan_without_a_place_for_a_model_is_refused(tmp_path):
    job = tiny_job("model", tmp_path)
    with pytest.raises(ConfigError, match="places for actor, critic, reference, the models are actor, reference"):
        dataclasses.replace(
            job,
            models={role: job.models[role] for role in ("actor", "reference")},
            algorithm=make_algorithm("group_norm"),
        )


class World:
    """An engine and the ranks of one set, with everything that happened to them in order.

    Attributes:
        failing: prompts with a first token below this, modulo 2, fail in the engine.
        lost: rollouts that a role's ranks do not train, by role.
        kl: what the ranks measure.
        delay_s: of every call.
        log: the calls, without those for completions.
    """

    def __init__(self) -> None:
        self.failing = 0
        self.lost: dict[str, int] = {}
        self.kl = 0.0
        self.delay_s = 0.0
        self.engine_version = 0
        self.log: list[str] = []
        self.kl_coefs: list[float] = []
        self.rollouts: list = []
        self.rewards: list[float] = []

    # the engine

    async def generate(self, token_ids, sampling, *_, **__):
        if token_ids[0] % 2 < self.failing:
            raise EngineError("the GPU is on fire")
        time.sleep(self.delay_s)
        completion = Completion.single(np.arange(5), np.full(5, -1.0), FinishReason.STOP, self.engine_version)
        return [completion] * sampling.num_samples

    # the ranks

    def start(self, method, *arguments, **options):
        time.sleep(self.delay_s)
        if method == "work":
            name, *arguments = arguments
            self.log.append(" ".join([name, *[part for part in arguments if isinstance(part, str)]]))
            return [getattr(self, f"on_{name}", lambda *_, **__: {})(*arguments, **options)]
        return []

    def on_load_rollouts(self, rollouts, rewards, plan, policy_version):
        assert len(rollouts) == len(rewards) == len(plan.rows)
        self.rollouts.append(rollouts)
        self.rewards = rewards

    def on_assign_advantages(self, kl_coef):
        self.kl_coefs.append(kl_coef)
        return {"kl/reference": Mean(self.kl, 1)}

    def on_update(self, role, *, max_epochs, seed, kl_coef):
        assert kl_coef == self.kl_coefs[-1]
        passes = len(self.rollouts[-1]) * max_epochs - self.lost.get(role, 0)
        name = {"actor": "policy", "critic": "value"}[role]
        return {f"{name}/rollout_passes": Sum(passes), f"{name}/loss": Mean(0.5, 1)}

    def on_peak_memory_bytes(self):
        return 7

    def send(self, engines, policy_version):
        self.log.append(f"send {policy_version} to {len(engines)}")
        self.engine_version = policy_version
        return 11


class FakeRanks(RankSet):
    """The ranks of a `World`: its results stand for the references to them."""

    def __init__(self, world: World) -> None:
        super().__init__(("actor", "critic", "reference"), [world])
        self.world = world

    def start(self, method, *arguments, **options):
        return self.world.start(method, *arguments, **options)

    def start_each(self, method, arguments):
        if method == "send_weights":
            return [self.world.send(*each) for each in arguments]
        return [result for each in arguments for result in self.world.start(method, *each)]


class Listener(Observer):
    """Keeps the warnings, and the titles of samples that were shown."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.titles: list[str] = []

    def samples(self, title: str, samples: object) -> None:
        self.titles.append(title)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


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
    parts: object

    @property
    def controller(self):
        return self.parts.controller

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
        return learns

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.recorder.path("metrics").read_text().splitlines()]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_run(tmp_path, model_path, monkeypatch):
    """Return a function that makes a run of sixteen prompts per step, eight of them even, four samples each."""
    for module in ("learner", "ranks"):
        monkeypatch.setattr(f"rlhf_train.online.{module}.wait", list)
    runs: list[Run] = []

    def make(reward=None, zero_stage=0, **changes) -> Run:
        job = tiny_job(model_path, tmp_path, eval_prompts=())
        models = {role: dataclasses.replace(model, zero_stage=zero_stage) for role, model in job.models.items()}
        prompts = tuple(
            dataclasses.replace(prompt, token_ids=np.array([index, 1])) for index, prompt in enumerate(job.prompts)
        )
        batch = dataclasses.replace(job.batch, rollout_batch_size=16)
        job = dataclasses.replace(
            job, **{"models": models, "prompts": prompts, "batch": batch, "num_steps": 3, **changes}
        )
        world, listener = World(), Listener()
        recorder = Recorder(job.save_path, "")
        reward = reward or make_reward(job, [], recorder.folder / "reward.log")
        parts = assemble(job, [world], [FakeRanks(world)], reward, recorder, listener, time.perf_counter())
        runs.append(Run(job, world, listener, recorder, parts))
        return runs[-1]

    yield make
    for run in runs:
        run.parts.rollouts.close()
        run.recorder.close()


def by_step(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "time/step" in line]


def test_step_generates_learns_and_sends_weights_in_this_order(make_run):
    run = make_run(SpreadReward())
    run.controller.start()
    assert run.step(1)
    assert run.world.log == [
        "send 0 to 1", "load_rollouts", "run_model actor", "run_model reference", "run_model critic",
        "assign_advantages", "update critic", "update actor", "send 4 to 1",
    ]  # fmt: skip
    [line] = run.lines()
    # 64 rollouts of five tokens in four updates; rewards are 1 for the first of four samples of every second prompt.
    assert (line["samples/generated"], line["samples/trained"], line["rollout/reward"]) == (64, 64, 1 / 8)
    assert (line["policy/loss"], line["sync/size_bytes"], line["rollout/kept_groups"]) == (0.5, 11, 1.0)
    assert line["throughput/response_tokens"] * line["time/step"] == pytest.approx(64 * 5)


def test_groups_that_an_engine_failed_are_said_with_the_reason_and_wrote_no_tokens(make_run):
    run = make_run(SpreadReward())
    run.world.failing = 1
    assert run.step(1)
    assert len(run.listener.warnings) == 1
    assert "step1: 8 of 16 rollout groups failed" in run.listener.warnings[0]
    assert "on fire" in run.listener.warnings[0]
    [line] = run.lines()
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 32, 32)
    # Eight groups of four wrote five tokens each; what the failed ones would have written does not count.
    assert line["throughput/response_tokens"] * line["time/step"] == pytest.approx(8 * 4 * 5)


def test_step_in_which_every_group_fails_ends_the_run_with_the_engines_words(make_run):
    run = make_run(SpreadReward())
    run.world.failing = 2
    with pytest.raises(EngineError, match="on fire"):
        run.controller.generate(1)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_rollout_that_no_rank_trained_is_missed(make_run, role):
    run = make_run(SpreadReward(), batch=dataclasses.replace(tiny_batch(16), max_epochs=2))
    run.world.lost = {role: 1}
    with pytest.raises(RlhfError, match=r"64 requested, 63\.5 trained"):
        run.step(1)


def tiny_batch(prompts: int):
    """Batch sizes of `prompts` groups of four and updates of sixteen rollouts."""
    return BatchSizes(
        rollout_batch_size=prompts, num_samples_per_prompt=4, train_batch_size=16, micro_train_batch_size=8,
        micro_rollout_batch_size=16,
    )  # fmt: skip


def test_rollouts_without_a_reward_are_counted_as_failed_and_the_others_make_fewer_updates(make_run):
    run = make_run(BrokenReward(), batch=tiny_batch(16))
    run.controller.start()
    assert run.step(1)
    [line] = run.lines()
    assert (line["samples/generated"], line["samples/failed"], line["samples/trained"]) == (64, 48, 16)
    assert [len(rollouts) for rollouts in run.world.rollouts] == [16]
    # One update of sixteen rollouts in place of four.
    assert run.world.log[-1] == "send 1 to 1" and run.parts.learner.policy_version == 1


def test_steps_without_rewards_teach_nothing_and_the_third_in_a_row_ends_the_run_with_its_models_saved(make_run):
    run = make_run(CrashingReward(), num_steps=9, ema_beta=0.5, save_critic=True)
    with pytest.raises(RewardError, match=r"3 steps in a row: no rollout has a reward.*no disk"):
        train_and_save(run.job, run.parts, run.recorder)
    assert len(run.listener.warnings) == 2 and "no disk" in run.listener.warnings[0]
    counts = [(line["samples/generated"], line["samples/failed"], line["samples/trained"]) for line in run.lines()]
    assert counts == [(64, 64, 0)] * 2
    paths = {name: run.recorder.path(name) for name in ("final model", "averaged model", "critic")}
    assert run.world.log == [
        "send 0 to 1",
        f"save actor {paths['final model']}",
        f"save_average {paths['averaged model']}",
        f"save critic {paths['critic']}",
    ]


def test_engine_that_fails_for_good_ends_the_run_without_models(make_run):
    run = make_run(SpreadReward())
    run.world.failing = 2
    with pytest.raises(EngineError):
        train_and_save(run.job, run.parts, run.recorder)
    assert run.world.log == ["send 0 to 1"]


def test_barren_steps_count_only_in_a_row(make_run):
    run = make_run(CrashingReward(), num_steps=9)
    for step in (1, 2):
        assert not run.step(step)
    run.parts.rollouts._generation._reward = SpreadReward()
    assert run.step(3)
    run.parts.rollouts._generation._reward = CrashingReward()
    for step in (4, 5):
        assert not run.step(step)
    with pytest.raises(RewardError):
        run.step(6)


def test_run_ends_with_its_models_and_a_summary(make_run):
    run = make_run(SpreadReward(), num_steps=2)
    summary = train_and_save(run.job, run.parts, run.recorder)
    assert run.world.log[-2:] == [f"save actor {run.recorder.path('final model')}", "peak_memory_bytes"]
    assert summary.metrics["memory/trainer_peak_bytes"] == 7.0
    assert summary.metrics["time/total"] > summary.metrics["time/startup"] > 0
    assert "final model" not in summary.artifacts and summary.artifacts["metrics"] == "metrics.jsonl"


def test_first_and_last_samples_are_shown_when_there_are_no_held_out_prompts(make_run):
    run = make_run(SpreadReward())
    for step in (1, 2, 3):
        run.step(step)
    assert run.listener.titles == ["Samples of step 1", "Samples of step 3"]


@pytest.fixture
def dynamic_run(make_run):
    """Half of the sixteen prompts are worth training; a step wants eight groups and may draw `max_batches` times it."""

    def make(reward=None, **dynamic) -> Run:
        sampling = DynamicSampling(**dynamic)
        return make_run(reward or SpreadReward(), batch=tiny_batch(8), dynamic_sampling=sampling, num_steps=9, seed=3)

    return make


def test_dynamic_sampling_refills_until_the_batch_is_full_and_counts_what_it_drew(dynamic_run):
    run = dynamic_run(max_batches=10)
    assert run.step(1)
    assert len(run.world.rollouts[0]) == 32
    assert all(rollout.spans[0].token_ids[0] % 2 == 0 for rollout in run.world.rollouts[0])
    assert not run.listener.warnings
    [line] = run.lines()
    drawn = line["samples/generated"] / 4
    assert 8 < drawn <= 16
    assert (line["samples/filtered"], line["samples/trained"]) == (4 * (drawn - 8), 32)
    assert line["rollout/kept_groups"] == pytest.approx(8 / drawn)
    run.recorder.close()
    assert len(run.recorder.path("rollouts").read_text().splitlines()) == 4 * drawn


def test_rewards_are_normalised_by_those_of_groups_that_are_not_trained_too(dynamic_run):
    run = dynamic_run(max_batches=1)
    reward = dataclasses.replace(run.job.reward, running_norm=True)
    run.parts.learner._shaper = RewardShaper(reward, max_tokens=12)
    assert run.step(1)
    num_kept = len(run.world.rollouts[0]) // 4
    # Of 32 rewards one per kept group is 1, the others are 0.
    mean = num_kept / 32
    deviation = math.sqrt(mean * (1 - mean) * 32 / 31)
    assert max(run.world.rewards) == pytest.approx((1 - mean) / deviation)


def test_dynamic_sampling_goes_on_with_what_it_has_at_its_cap(dynamic_run):
    run = dynamic_run(max_batches=1)
    assert run.step(1)
    num_kept = len(run.world.rollouts[0]) // 4
    assert 0 < num_kept < 8
    assert f"only {num_kept} of 8 rollout groups are worth training" in run.listener.warnings[0]
    assert run.step(2)  # and the next step has room for a whole batch
    assert [line["samples/generated"] for line in run.lines()] == [32, 32]


def test_dynamic_sampling_that_keeps_nothing_three_times_in_a_row_ends_the_run_well(dynamic_run):
    run = dynamic_run(max_batches=2, reward_range=(0.9, 1.0))  # group means are 0 and 1/4
    train_and_save(run.job, run.parts, run.recorder)
    lines = by_step(run.lines())
    assert [(n["samples/generated"], n["samples/filtered"], n["samples/trained"]) for n in lines] == [(64, 64, 0)] * 3
    assert "nothing is learned from this step: all 64 scored rollouts" in run.listener.warnings[0]
    assert "the run ends here" in run.listener.warnings[2] and len(run.listener.warnings) == 3


def test_reward_that_fails_under_dynamic_sampling_ends_the_run_with_its_own_words(dynamic_run):
    run = dynamic_run(BrokenReward(), max_batches=1)
    for step in (1, 2):
        assert not run.step(step)
    assert [(line["samples/filtered"], line["samples/failed"]) for line in run.lines()] == [(8, 24)] * 2
    assert "server down" in run.listener.warnings[0]
    with pytest.raises(RewardError, match=r"3 steps in a row: .*server down"):
        run.step(3)


def test_frozen_actor_is_not_updated_and_its_weights_keep_their_version(make_run):
    algorithm = make_algorithm(kl_target=0.5, kl_horizon=64)
    run = make_run(SpreadReward(), num_frozen_steps=1, algorithm=algorithm)
    run.controller.start()
    run.step(1)
    assert [entry for entry in run.world.log if entry.startswith(("update", "send"))] == [
        "send 0 to 1",
        "update critic",
    ]
    assert run.parts.learner.kl_coef == 0.01  # the KL of a policy that has not moved tells nothing
    run.step(2)
    assert run.world.log[-3:] == ["update critic", "update actor", "send 4 to 1"]
    assert [line["samples/trained"] for line in run.lines()] == [64, 64]


def test_adaptive_kl_coefficient_follows_the_kl_of_its_own_batch(make_run):
    run = make_run(SpreadReward(), algorithm=make_algorithm(kl_coef=0.1, kl_target=0.5, kl_horizon=640))
    run.controller.start()
    run.world.kl = 5.0  # ten times the target: the error is held at 0.2
    run.step(1)
    # 64 rollouts of a horizon of 640: 0.1 exp(0.2 x 64 / 640)
    run.world.kl = 0.45  # 10 % below: the error is -0.1
    run.step(2)
    run.step(3)
    coefs = [0.1, 0.1 * math.exp(0.02), 0.1 * math.exp(0.01)]
    assert run.world.kl_coefs == pytest.approx(coefs)
    assert [line["kl/coef"] for line in run.lines()] == pytest.approx(coefs)


def test_engine_that_missed_a_sync_has_its_rollouts_left_out_and_counted(make_run):
    run = make_run(SpreadReward())
    run.controller.start()
    run.step(1)
    run.world.engine_version = 0
    assert not run.step(2)
    assert "64 rollouts are of an older policy" in run.listener.warnings[0]
    assert [(line["samples/trained"], line["samples/stale"]) for line in run.lines()] == [(64, 0), (0, 64)]


def test_evaluations_come_first_last_and_between_and_keep_the_best_weights(make_run):
    run = make_run(SpreadReward(), num_steps=5, eval_steps=2, best_metric="eval/reward", eval_prompts=held_out())
    best = run.recorder.path("best model")
    run.world.on_save = lambda role, path: Path(path).mkdir(parents=True)
    summary = train_and_save(run.job, run.parts, run.recorder)
    evaluations = [line for line in run.lines() if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 5]
    assert json.loads((best / "state.json").read_text())["step"] == 0  # the fake policy never changes
    assert run.listener.titles == ["Held-out samples before training", "Held-out samples after training"]
    assert summary.metrics["eval/reward_before"] == summary.metrics["eval/reward_after"] == 0.5
    seconds = {line["step"]: line for line in by_step(run.lines())}
    assert [step for step, line in seconds.items() if "time/evaluate" in line] == [2, 4, 5]


def held_out():
    """Two prompts, one even and one odd."""
    return (Prompt("even", np.array([2]), "even"), Prompt("odd", np.array([3]), "odd"))


def test_evaluation_without_the_metric_of_the_best_model_is_warned_of(make_run):
    run = make_run(CrashingReward(), eval_prompts=held_out(), best_metric="eval/reward")
    run.controller.evaluate(0)
    assert "has no eval/reward" in run.listener.warnings[0]
    assert not run.recorder.path("best model").exists()


def test_phases_of_a_run_add_up_to_its_wall_clock(make_run):
    run = make_run(
        SpreadReward(), eval_prompts=held_out(), eval_steps=1, zero_stage=2, engine_sleep=True, trainer_sleep=True
    )
    run.world.delay_s = 0.01
    for name in ("sleep", "wake_up"):
        setattr(run.world, name, nothing)
    run.controller.start()
    started = time.perf_counter()
    for step in (1, 2, 3):
        run.step(step)
        run.controller.evaluate(step)
    run.controller.record(4)
    elapsed = time.perf_counter() - started
    lines = by_step(run.lines())
    assert sum(line["time/step"] for line in lines) == pytest.approx(elapsed, abs=0.02)
    for line in lines:
        phases = {name: value for name, value in line.items() if name.startswith("time/") and name != "time/step"}
        assert sum(phases.values()) == pytest.approx(line["time/step"], abs=1e-9)
    named = {"generate", "reward", "load", "experience", "train", "sync", "write", "offload", "wake", "sleep", "reload"}
    assert named | {"evaluate"} <= {name.removeprefix("time/") for line in lines for name in line}
    # 16 prompts of 10 ms one after the other, a call per rank set for dealing, three models, two updates.
    first = lines[0]
    assert first["time/generate"] >= 0.16 and first["time/load"] >= 0.01 and first["time/train"] >= 0.02
    assert first["time/experience"] >= 0.04 and first["time/offload"] >= 0.01
    assert first["time/other"] < 0.25 * first["time/step"]


async def nothing() -> None:
    """What an engine's sleep and wake do here."""
