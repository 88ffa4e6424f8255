"""The training side's traffic: what is dealt to which rank, which columns go where, and who sends weights to whom."""

import dataclasses
import math

import pytest
import torch

from online_fakes import FakeRanks, World
from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_train.advantages import generalized_advantages, placed_rewards, turn_starts
from rlhf_train.algorithms import CorrectionSpec, make_algorithm
from rlhf_train.experience import Experience
from rlhf_train.online.job import AsyncSpec
from rlhf_train.online.learner import Learner
from rlhf_train.online.places import Place, PlacementPlan, ProcessPlan
from rlhf_train.online.ranks import RankSet
from rlhf_train.run.metrics import Sum
from trainer_testing import random_rollouts, tiny_job


class Ranks(RankSet):
    """Ranks that note their calls in `log`; a call of several has a result per rank."""

    def __init__(self, log: list, *roles: str, count: int = 1) -> None:
        super().__init__(roles, range(count))
        self.log = log
        self.shards: list[tuple] = []

    def start(self, method, *arguments, **options):
        name = arguments[0] if method == "work" else method
        self.log.append((self.roles, *arguments[(method == "work") :]))
        if name == "update":
            prefix = {"actor": "policy", "critic": "value"}[arguments[1]]
            return [{f"{prefix}/rollout_passes": Sum(3.0)} for _ in self.handles]
        if name == "export_columns":
            return [f"part {rank}" for rank in self.handles]
        if name == "peak_memory_bytes":
            return [10 * len(self.roles) + rank for rank in self.handles]
        return [{} for _ in self.handles]

    def start_each(self, method, arguments):
        self.log.append((self.roles, method))
        self.shards += arguments
        if method == "send_weights":
            return [
                (1000 + rank, {number: "full" for number in mine if number == 2})
                for rank, (mine, _) in enumerate(arguments)
            ]
        return [{} for _ in self.handles]


@pytest.fixture
def job(tmp_path):
    return tiny_job("model", tmp_path)


@pytest.fixture(autouse=True)
def results_stand_for_references(monkeypatch):
    for module in ("learner", "ranks"):
        monkeypatch.setattr(f"rlhf_train.online.{module}.wait", list)


def test_columns_go_between_models_in_processes_apart(job):
    log: list = []
    job = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, bootstrap_truncated=True))
    actor, critic, reference = Ranks(log, "actor", count=2), Ranks(log, "critic", count=3), Ranks(log, "reference")
    learner = Learner(job, [actor, critic, reference])
    learner.fill_columns()
    # All models are started before any is waited for.
    assert log == [
        (("actor",), "actor"),
        (("reference",), "reference"),
        (("critic",), "critic"),
        (("reference",), ["ref_logprobs"]),
        (("actor",), "part 0"),
        (("critic",), ["values", "last_values"]),
        (("actor",), "part 0", "part 1", "part 2"),
    ]
    log.clear()
    learner.assign_advantages()
    assert log == [
        (("actor",), learner.kl_coef),
        (("actor",), ["returns", "trained"]),
        (("critic",), "part 0", "part 1"),
    ]


def test_teachers_logprobs_go_to_the_actor(job):
    log: list = []
    learner = Learner(job, [Ranks(log, "actor", "critic", "reference"), Ranks(log, "teacher", count=2)])
    learner.fill_columns()
    assert [entry for entry in log if entry[0] == ("teacher",) or entry[1:] == ("part 0", "part 1")] == [
        (("teacher",), "teacher"),
        (("teacher",), ["teacher_logprobs"]),
        (("actor", "critic", "reference"), "part 0", "part 1"),
    ]
    # The teacher is frozen, so that a checkpoint has no file of it.
    models = {**job.models, "teacher": job.models["reference"]}
    plan = dataclasses.replace(job.plan, trainers=(ProcessPlan("train", tuple(models), (Place(),)),))
    algorithm = dataclasses.replace(job.algorithm, teacher_coef=1.0)
    job = dataclasses.replace(job, models=models, plan=plan, algorithm=algorithm)
    learner = Learner(job, [Ranks(log, *models)])
    assert [name.partition("-")[0] for name in learner.save_state("folder")] == ["actor", "critic"]


def judged(name: str, steps: tuple[tuple[int, float], ...], rest: float) -> Rollout:
    """A rollout of one prompt token and four of the policy: what its steps earned, and what it earned as a whole."""
    spans = (Span(SpanSource.PROMPT, [1]), Span(SpanSource.POLICY, [2] * 4, [-1.0] * 4, policy_version=0))
    verdict = Verdict(VerdictKind.OK, sum(value for _, value in steps) + rest, token_rewards=steps)
    return Rollout(name, "g", spans, FinishReason.STOP, verdict=verdict)


# Steps 0.9, 0.5 and 0.1 have the mean 0.5 and the deviation sqrt(0.32 / 3), which makes 1.2247 of 0.4. The rest of the
# rewards, 1 and 0, has the mean 0.5 and the deviation 0.5. Advantages are sums from a token on, discounted by gamma.
STEP = 0.4 / (math.sqrt(0.32 / 3) + 1e-6)
REST = 0.5 / (0.5 + 1e-6)


@pytest.mark.parametrize(
    ("estimator", "gamma", "expected"),
    [
        ("group_norm", 1.0, [[STEP + REST, REST, REST, REST], [-STEP - REST, -STEP - REST, -REST, -REST]]),
        ("dr_grpo", 1.0, [[0.9, 0.5, 0.5, 0.5], [-0.9, -0.9, -0.5, -0.5]]),
        # Minus the mean of the other's steps, 0.1 and 0.7, and minus the other's rest: 0.8, 0.4 and 1; -0.6 and -1.
        ("rloo", 1.0, [[2.2, 1.4, 1.4, 1.4], [-1.6, -1.6, -1.0, -1.0]]),
        ("reinforce", 0.5, [[0.9 + 1.5 / 8, 1.5 / 4, 1.5 / 2, 1.5], [0.05, 0.1, 0.0, 0.0]]),
    ],
)
def test_rewards_of_steps_and_the_rest_are_each_compared_within_the_group(job, estimator, gamma, expected):
    models = {"actor": job.models["actor"]}
    plan = dataclasses.replace(job.plan, trainers=(ProcessPlan("train", ("actor",), (Place(),)),))
    algorithm = make_algorithm(estimator, kl_coef=0, gamma=gamma)
    ranks = Ranks([], "actor")
    learner = Learner(dataclasses.replace(job, models=models, plan=plan, algorithm=algorithm), [ranks])
    learner.deal([judged("a", ((1, 0.9), (4, 0.5)), 1.0), judged("b", ((2, 0.1),), 0.0)], 1)
    [(_, columns, _, _)] = ranks.shards
    experience = Experience.from_columns(columns)
    placed = placed_rewards(experience.rewards, experience.token_rewards, experience.loss_mask)
    zeros = torch.zeros(2, 5)
    advantages, _ = generalized_advantages(placed, zeros, experience.loss_mask, gamma=gamma, lambd=1.0)
    found = dict(zip(experience.rollout_ids, advantages[:, 1:].tolist(), strict=True))
    for name, wanted in zip("ab", expected, strict=True):
        assert found[name] == pytest.approx(wanted, abs=1e-6), name


def spoken(name: str, lengths: tuple[int, ...], reward: float, **verdict) -> Rollout:
    """A rollout of turns of these lengths in tokens, with a token of the environment before each later one."""
    turns = [Span(SpanSource.POLICY, [2] * length, [-1.0] * length, policy_version=0) for length in lengths]
    between = [span for turn in turns for span in (Span(SpanSource.ENVIRONMENT, [3]), turn)][1:]
    scored = Verdict(VerdictKind.OK, reward, **verdict)
    return Rollout(name, "g", (Span(SpanSource.PROMPT, [1]), *between), FinishReason.STOP, verdict=scored)


# Three episodes of turns that earn 1, 0, 2; 0, 4; and 3 as a whole, in one turn. The first one is one rollout, or two
# of one turn and two. By turn, what follows is 3, 4, 3 from the first turn on, 2, 4 from the second, 2 from the third.
OTHERS = [spoken("b", (1, 2), 4.0, turn_rewards=(0.0, 4.0)), spoken("c", (2,), 3.0)]
UNSPLIT = [spoken("a", (2, 1, 2), 3.0, turn_rewards=(1.0, 0.0, 2.0))]
SPLIT = [
    spoken("a.0", (2,), 3.0, turn_rewards=(1.0,), earned_elsewhere=(0.0, 2.0)),
    spoken("a.1", (1, 2), 3.0, turn_rewards=(0.0, 2.0), earned_elsewhere=(1.0, 0.0)),
]
BY_TURN = {"dr_grpo": (-1 / 3, -1.0, 0.0, 2 / 3, 1.0, -1 / 3), "rloo": (-0.5, -2.0, 0.0, 1.0, 2.0, -0.5)}


@pytest.mark.parametrize("first", [UNSPLIT, SPLIT])
@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        ("dr_grpo", {"group_by": "turn"}, BY_TURN["dr_grpo"]),
        ("dr_grpo", {"group_by": "turn", "turn_gamma": 1.0}, BY_TURN["dr_grpo"]),
        ("rloo", {"group_by": "turn"}, BY_TURN["rloo"]),
        # By episode, every turn is charged with the mean 10 / 3 of whole episodes.
        ("dr_grpo", {}, (-1 / 3, 2 - 10 / 3, 2 - 10 / 3, 2 / 3, 2 / 3, -1 / 3)),
        ("reinforce", {}, (3.0, 2.0, 2.0, 4.0, 4.0, 3.0)),
        # Each turn is an episode of its own.
        ("dr_grpo", {"group_by": "turn", "turn_gamma": 0.0}, None),
    ],
)
def test_turns_are_compared_with_the_same_turn_however_many_rollouts_an_episode_became(
    job, first, estimator, options, expected
):
    if expected is None:
        # A rollout that ends before the episode does earns what the episode earned after it.
        a = (1.0, 0.0, 2.0) if first is UNSPLIT else (3.0, 0.0, 2.0)
        mean = (a[0] + 0 + 3) / 3
        expected = (a[0] - mean, -2.0, 0.0, 0 - mean, 2.0, 3 - mean)
    rollouts = [*first, *OTHERS]
    algorithm = make_algorithm(estimator, kl_coef=0, **options)
    plan = dataclasses.replace(job.plan, trainers=(ProcessPlan("train", ("actor",), (Place(),)),))
    job = dataclasses.replace(job, models={"actor": job.models["actor"]}, plan=plan, algorithm=algorithm)
    ranks = Ranks([], "actor")
    Learner(job, [ranks]).deal(rollouts, 1, [rollout.rollout_id[0] for rollout in rollouts])
    [(_, columns, _, _)] = ranks.shards
    experience = Experience.from_columns(columns)
    mask = experience.loss_mask
    placed = placed_rewards(experience.rewards, experience.token_rewards, mask)
    starts = turn_starts(experience.policy_versions, mask)
    turn_gamma = 1.0 if algorithm.turn_gamma is None else algorithm.turn_gamma
    advantages, _ = generalized_advantages(
        placed, torch.zeros(mask.shape), mask, gamma=1.0, lambd=1.0, starts=starts, turn_gamma=turn_gamma
    )
    found: dict[str, list[float]] = {}
    for rollout_id, row, kept in sorted(zip(experience.rollout_ids, advantages, mask, strict=True), key=lambda x: x[0]):
        found.setdefault(rollout_id[0], []).extend(row[kept].tolist())
    first_turn, second, third, other_first, other_second, single = expected
    assert found["a"] == pytest.approx([first_turn] * 2 + [second] + [third] * 2, abs=1e-6)
    assert found["b"] == pytest.approx([other_first] + [other_second] * 2, abs=1e-6)
    assert found["c"] == pytest.approx([single] * 2, abs=1e-6)


def test_rewards_normalised_each_by_itself_count_an_episode_once(job):
    # Episode a has two rollouts. Means 1 and 2: counted by rollout they would be 2 / 3 and 4 / 3.
    rollouts = [spoken(name, (1,), 0.0, source_rewards=(0.0, 0.0)) for name in ("a.0", "a.1")]
    rollouts.append(spoken("b", (1, 1), 6.0, turn_rewards=(2.0, 4.0), source_rewards=(2.0, 4.0)))
    sources = tuple(RewardSource(kind="function", targets=(name,)) for name in ("a.py", "b.py"))
    reward = dataclasses.replace(job.reward, sources=sources, normalize="each")
    plan = dataclasses.replace(job.plan, trainers=(ProcessPlan("train", ("actor",), (Place(),)),))
    algorithm = make_algorithm("reinforce_baseline", kl_coef=0)
    models = {"actor": job.models["actor"]}
    job = dataclasses.replace(job, models=models, plan=plan, algorithm=algorithm, reward=reward)
    ranks = Ranks([], "actor")
    Learner(job, [ranks]).deal(rollouts, 1, ["a", "a", "b"])
    [(_, columns, _, _)] = ranks.shards
    found = dict(zip(columns.rollout_ids, columns.rewards.tolist(), strict=True))
    assert found == pytest.approx({"a.0": -2.0, "a.1": -2.0, "b": 2.0}, abs=1e-5)
    assert not columns.token_rewards.any()  # the whole sum is the last token's


def test_models_in_the_same_processes_exchange_nothing(job):
    log: list = []
    learner = Learner(job, [Ranks(log, "actor", "critic", "reference")])
    learner.fill_columns()
    learner.assign_advantages()
    assert log == [(("actor", "critic", "reference"), part) for part in ("actor", "reference", "critic", 0.01)]


def test_columns_without_a_use_are_not_made(job):
    log: list = []
    plain = dataclasses.replace(job.algorithm, old_logprobs="rollout")
    learner = Learner(dataclasses.replace(job, algorithm=plain), [Ranks(log, "actor"), Ranks(log, "critic")])
    learner.fill_columns()
    assert log == [(("critic",), "critic"), (("critic",), ["values"]), (("actor",), "part 0")]
    corrected = dataclasses.replace(plain, correction=CorrectionSpec(level="token", mode="mask"))
    job = dataclasses.replace(job, algorithm=corrected)  # compares the engine's log-probs with the actor's
    log.clear()
    Learner(job, [Ranks(log, "actor"), Ranks(log, "critic")]).fill_columns()
    assert log[:2] == [(("actor",), "actor"), (("critic",), "critic")]


def test_every_set_is_dealt_every_rollout_once_with_its_own_number_of_ranks(job):
    log: list = []
    actor, critic = Ranks(log, "actor", "reference", count=2), Ranks(log, "critic", count=3)
    rollouts = random_rollouts(32, vocab_size=64)
    learner = Learner(job, [actor, critic])
    for learner.policy_version in (2, 2, 6):  # two updates, none, and four
        actor.shards.clear()
        critic.shards.clear()
        learner.deal(rollouts, step=2)
    earned = {rollout.rollout_id: rollout.verdict.reward for rollout in rollouts}
    for ranks in (actor, critic):
        assert len(ranks.shards) == len(ranks.handles)
        dealt: dict[str, float] = {}
        for name, columns, plan, versions in ranks.shards:
            assert (name, versions, len(plan.mini_batches)) == ("load_rollouts", (0, 2, 6), 2)
            assert tuple(rollouts[row].rollout_id for row in plan.rows) == columns.rollout_ids
            dealt |= zip(columns.rollout_ids, columns.rewards.tolist(), strict=True)
        assert dealt == pytest.approx(earned)


@pytest.mark.parametrize("size", ["sequence_parallel_size", "tensor_parallel_size"])
def test_ranks_that_divide_sequences_or_weights_are_dealt_the_same_rollouts_and_their_columns_go_once(job, size):
    models = {role: dataclasses.replace(spec, **{size: 2}) for role, spec in job.models.items()}
    [placed] = job.plan.trainers
    trainers = (dataclasses.replace(placed, places=(Place(),) * 2),)
    job = dataclasses.replace(job, models=models, plan=dataclasses.replace(job.plan, trainers=trainers))
    for role in ("critic", "reference"):
        with pytest.raises(ConfigError, match="all models must divide sequences and weights over as many processes"):
            dataclasses.replace(job, models=models | {role: dataclasses.replace(models[role], **{size: 1})})
    log: list = []
    actor, critic = Ranks(log, "actor", "reference", count=4), Ranks(log, "critic", count=2)
    rollouts = random_rollouts(32, vocab_size=64)
    learner = Learner(job, [actor, critic])
    learner.deal(rollouts, step=1)
    plans = [plan.rows for _, _, plan, _ in actor.shards]
    assert plans[0] == plans[1] and plans[2] == plans[3]
    assert sorted(plans[0] + plans[2]) == list(range(32))
    assert [sorted(plan.rows) for _, _, plan, _ in critic.shards] == [list(range(32))] * 2
    log.clear()
    learner.assign_advantages()
    assert log[1:] == [(("actor", "reference"), ["returns", "trained"]), (("critic",), "part 0", "part 2")]


@pytest.mark.parametrize(("mask_stale", "num_kept"), [(None, 128), (3, 128), (200, 202)])
def test_versions_of_the_last_steps_are_kept_and_restored(job, mask_stale, num_kept):
    job = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, mask_stale=mask_stale))
    ranks = Ranks([], "actor", "critic", "reference")
    learner = Learner(job, [ranks])
    for learner.policy_version in range(0, 600, 2):
        learner.deal(random_rollouts(32, vocab_size=64), step=1)
    assert ranks.shards[-1][3] == tuple(range(600 - 2 * num_kept, 600, 2))
    resumed = Learner(job, [ranks])
    resumed.restore(learner.state())
    assert resumed.state() == learner.state()
    for one in (learner, resumed):
        one.policy_version = 600
        one.deal(random_rollouts(32, vocab_size=64), step=1)
    assert ranks.shards[-1][3] == ranks.shards[-2][3] == tuple(range(602 - 2 * num_kept, 602, 2))


@pytest.mark.parametrize(("asynchronous", "names"), [(None, {"b"}), (AsyncSpec(max_staleness=1), {"async/a", "b"})])
def test_metrics_of_asynchronous_training_are_left_out_of_other_runs(job, monkeypatch, asynchronous, names):
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, colocated=False), asynchronous=asynchronous)
    ranks = Ranks([], "actor", "critic", "reference")
    monkeypatch.setattr(ranks, "call", lambda *_: [{"async/a": Sum(1.0), "b": Sum(2.0)}])
    assert Learner(job, [ranks]).assign_advantages().keys() == names


def dealt(job, estimator: str, normalize: str) -> list[float]:
    """What four rollouts of two groups are worth; the sources' rewards have the weights 1 and 2."""
    sources = tuple(
        RewardSource(kind="function", targets=(name,), weight=w) for name, w in (("a.py", 1.0), ("b.py", 2.0))
    )
    reward = dataclasses.replace(job.reward, sources=sources, normalize=normalize)
    algorithm = make_algorithm(estimator, kl_coef=0.0)
    ranks = Ranks([], "actor")
    models = {"actor": job.models["actor"]}
    alone = PlacementPlan(
        "cpu", (0,), (ProcessPlan("actor", ("actor",), (Place(),)),), job.plan.engines, colocated=False
    )
    job = dataclasses.replace(job, reward=reward, algorithm=algorithm, models=models, plan=alone)
    # Rewards (0, 0) and (1, 1); (0, 1) and (1, 1). The second one of the first group failed and has the reward 1.
    parts = [(0.0, 0.0), (), (0.0, 1.0), (1.0, 1.0)]
    rollouts = []
    for index, (rollout, own) in enumerate(zip(random_rollouts(4, vocab_size=64), parts, strict=True)):
        total = own[0] + 2 * own[1] if own else 1.0
        kind = VerdictKind.OK if own else VerdictKind.TIMEOUT
        verdict = Verdict(kind, total, source_rewards=own)
        rollouts.append(dataclasses.replace(rollout, rollout_id=str(index), group_id="ab"[index // 2], verdict=verdict))
    Learner(job, [ranks]).deal(rollouts, step=1)
    [(_, columns, _, _)] = ranks.shards
    worth = dict(zip(columns.rollout_ids, columns.rewards.tolist(), strict=True))
    return [worth[str(index)] for index in range(4)]


@pytest.mark.parametrize(
    ("estimator", "normalize", "worth"),
    [
        # Sums 0 and 1 (the failed one), 2 and 3: each group has the deviation 0.5.
        ("group_norm", "together", [-1.0, 1.0, -1.0, 1.0]),
        ("group_norm", "none", [0.0, 1.0, 2.0, 3.0]),
        # Group a: -1 and 1 from both sources, so -3 and 3; group b: from the first one. All deviate by sqrt(5).
        ("group_norm", "each", [-3 / 5**0.5, 3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5]),
        ("rloo", "each", [-3 / 5**0.5, 3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5]),
        # These whiten advantages over the batch.
        ("reinforce_baseline", "each", [-3.0, 3.0, -1.0, 1.0]),
        ("reinforce", "each", [-3.0, 3.0, -1.0, 1.0]),
    ],
)
def test_rewards_are_compared_together_or_each_by_itself(job, estimator, normalize, worth):
    assert dealt(job, estimator, normalize) == pytest.approx(worth, abs=1e-5)


def test_order_of_a_deal_differs_by_step_and_seed_and_repeats(job):
    def rows(seed: int, step: int) -> tuple:
        ranks = Ranks([], "actor", "critic", "reference")
        Learner(dataclasses.replace(job, seed=seed), [ranks]).deal(random_rollouts(32, vocab_size=64), step)
        return ranks.shards[0][2].rows

    assert rows(1, 1) == rows(1, 1) != rows(1, 2)
    assert rows(1, 1) != rows(5, 1)


def test_updates_start_side_by_side_and_count_as_the_sum_of_their_ranks(job):
    log: list = []
    learner = Learner(job, [Ranks(log, "actor", count=8), Ranks(log, "critic", count=9)])
    metrics, num_trained = learner.update(1)
    assert [entry[1] for entry in log] == ["critic", "actor"]
    # Eight and nine ranks had three rollouts each.
    assert num_trained == 24
    assert metrics == {"kl/coef": 0.01}
    assert learner.policy_version == 2  # 24 rollouts in updates of 16


@pytest.mark.parametrize(
    ("transfer", "targets"),
    [
        ("shared_memory", [{0: "a", 1: "b", 2: "c"}, {}]),
        # Two engines on the first rank's GPU; the third is on both, and both ranks send to it.
        ("ipc", [{0: "a", 1: "b", 2: "c"}, {2: "c"}]),
    ],
)
def test_weights_go_to_the_engines_of_the_same_device_or_all_from_the_first_rank(job, transfer, targets):
    plan = PlacementPlan(
        "cuda", (2,), (ProcessPlan("actor", ("actor", "critic", "reference"), (Place(0, (0,)), Place(0, (1,)))),),
        ProcessPlan("engines", (), (Place(0, (0,)), Place(0, (0,)), Place(0, (0, 1)))), colocated=True,
    )  # fmt: skip
    engine = dataclasses.replace(job.engine, weight_transfer=transfer)
    ranks = Ranks([], "actor", "critic", "reference", count=2)
    learner = Learner(dataclasses.replace(job, plan=plan, engine=engine), [ranks])
    learner.policy_version = 4
    engines = {0: "a", 1: "b", 2: "c"}
    # The larger size of the two ranks, and the failures of both.
    assert learner.send_weights(engines) == (1001, {2: "full"})
    assert ranks.shards == [(engines, 4) for engines in targets]
    ranks.shards.clear()
    learner.send_weights({2: "c"})  # one engine that was restarted
    assert ranks.shards == [({number: name for number, name in mine.items() if number == 2}, 4) for mine in targets]


def test_sleep_and_peak_memory_are_of_all_sets(job):
    log: list = []
    learner = Learner(job, [Ranks(log, "actor", "reference", count=2), Ranks(log, "critic", count=3)])
    learner.sleep()
    learner.wake_up()
    assert log == [(("actor", "reference"),), (("critic",),)] * 2
    assert learner.peak_memory_bytes() == 21


def test_models_are_saved_by_the_ranks_that_hold_them(job):
    world = World()
    learner = Learner(job, [FakeRanks(world)])
    learner.save("critic", "there")
    learner.save_average("here")
    assert world.log == ["save critic there", "save_average here"]
