"""What rollouts are worth once they are dealt: rewards of steps, turns and sources, compared within their group."""

import dataclasses
import math

import pytest
import torch

from online_fakes import LoggedRanks
from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_train.algorithms.gae import generalized_advantages, rewards_at_tokens, turn_starts
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.learning.experience import Experience
from rlhf_train.learning.learner import Learner
from trainer_testing import actor_alone, random_rollouts, tiny_job

pytestmark = pytest.mark.usefixtures("results_stand_for_references")


@pytest.fixture
def job(tmp_path):
    return tiny_job("model", tmp_path)


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
    ranks = LoggedRanks([], "actor")
    learner = Learner(actor_alone(job, algorithm=make_algorithm(estimator, kl_coef=0, gamma=gamma)), [ranks])
    learner.deal([judged("a", ((1, 0.9), (4, 0.5)), 1.0), judged("b", ((2, 0.1),), 0.0)], 1)
    [(columns, _, _)] = ranks.shards
    experience = Experience(columns)
    placed = rewards_at_tokens(experience.rewards, experience.token_rewards, experience.loss_mask)
    zeros = torch.zeros(2, 5)
    advantages, _ = generalized_advantages(placed, zeros, experience.loss_mask, gamma=gamma, lambd=1.0)
    found = dict(zip(experience.rollout_ids, advantages[:, 1:].tolist(), strict=True))
    for name, wanted in zip("ab", expected, strict=True):
        assert found[name] == pytest.approx(wanted, abs=1e-6), name


def spoken(name: str, lengths: tuple[int, ...], reward: float, reads=(3, 3, 3), group="g", **verdict) -> Rollout:
    """A rollout of turns of these lengths in tokens, with a token that the policy `reads` before each later one."""
    turns = [Span(SpanSource.POLICY, [2] * length, [-1.0] * length, policy_version=0) for length in lengths]
    observed = [Span(SpanSource.ENVIRONMENT, [token]) for token in reads]
    between = [span for pair in zip([None, *observed], turns, strict=False) for span in pair][1:]
    scored = Verdict(VerdictKind.OK, reward, **verdict)
    return Rollout(name, group, (Span(SpanSource.PROMPT, [1]), *between), FinishReason.STOP, verdict=scored)


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
    found = advantages_by_episode(job, [*first, *OTHERS], make_algorithm(estimator, kl_coef=0, **options))
    first_turn, second, third, other_first, other_second, single = expected
    assert found["a"] == pytest.approx([first_turn] * 2 + [second] + [third] * 2, abs=1e-6)
    assert found["b"] == pytest.approx([other_first] + [other_second] * 2, abs=1e-6)
    assert found["c"] == pytest.approx([single] * 2, abs=1e-6)


def test_turns_are_compared_in_equal_states_beside_their_episodes(job):
    # With a discount of 0.5, what follows is 1, 2, 4 in a; 1, 2 in b; 3, 0 in c. After the prompt 1, 1, 3 are compared,
    # after token 5 the numbers 2, 4 and 2; token 6 is read once in its group. The episodes earn 4, 2 and 3.
    rollouts = [
        spoken("a", (2, 1, 2), 4.0, (5, 5), turn_rewards=(0.0, 0.0, 4.0)),
        spoken("b", (1, 2), 2.0, (5,), turn_rewards=(0.0, 2.0)),
        spoken("c", (1, 1), 3.0, (6,), turn_rewards=(3.0, 0.0)),
        spoken("d", (1, 1), 7.0, (6,), "h", turn_rewards=(7.0, 0.0)),
    ]
    algorithm = make_algorithm("dr_grpo", kl_coef=0, group_by="state", state_coef=2.0, turn_gamma=0.5)
    found = advantages_by_episode(job, rollouts, algorithm)
    assert found["a"] == pytest.approx([1 - 4 / 3] * 2 + [1 - 4 / 3] + [1 + 8 / 3] * 2, abs=1e-6)
    assert found["b"] == pytest.approx([-1 - 4 / 3] + [-1 - 4 / 3] * 2, abs=1e-6)
    assert found["c"] == pytest.approx([8 / 3, 0], abs=1e-6)
    assert found["d"] == [0, 0]


def advantages_by_episode(job, rollouts, algorithm) -> dict[str, list[float]]:
    """Return the advantages of the trained tokens of each episode, as the trainer computes them from dealt rewards."""
    job = actor_alone(job, algorithm=algorithm)
    ranks = LoggedRanks([], "actor")
    Learner(job, [ranks]).deal(rollouts, 1, [rollout.rollout_id[0] for rollout in rollouts])
    [(columns, _, _)] = ranks.shards
    experience = Experience(columns)
    mask = experience.loss_mask
    placed = rewards_at_tokens(experience.rewards, experience.token_rewards, mask)
    starts = turn_starts(experience.policy_versions, mask)
    turn_gamma = 1.0 if algorithm.turn_gamma is None else algorithm.turn_gamma
    advantages, _ = generalized_advantages(
        placed, torch.zeros(mask.shape), mask, gamma=1.0, lambd=1.0, starts=starts, turn_gamma=turn_gamma
    )
    found: dict[str, list[float]] = {}
    for rollout_id, row, kept in sorted(zip(experience.rollout_ids, advantages, mask, strict=True), key=lambda x: x[0]):
        found.setdefault(rollout_id[0], []).extend(row[kept].tolist())
    return found


def test_rewards_normalised_each_by_itself_count_an_episode_once(job):
    # Episode a has two rollouts. Means 1 and 2: counted by rollout they would be 2 / 3 and 4 / 3.
    rollouts = [spoken(name, (1,), 0.0, source_rewards=(0.0, 0.0)) for name in ("a.0", "a.1")]
    rollouts.append(spoken("b", (1, 1), 6.0, turn_rewards=(2.0, 4.0), source_rewards=(2.0, 4.0)))
    sources = tuple(RewardSource(kind="function", targets=(name,)) for name in ("a.py", "b.py"))
    reward = dataclasses.replace(job.reward, sources=sources, reward_normalize="each")
    job = actor_alone(job, algorithm=make_algorithm("reinforce_baseline", kl_coef=0), reward=reward)
    ranks = LoggedRanks([], "actor")
    Learner(job, [ranks]).deal(rollouts, 1, ["a", "a", "b"])
    [(columns, _, _)] = ranks.shards
    found = dict(zip(columns.rollout_ids, columns.rewards.tolist(), strict=True))
    assert found == pytest.approx({"a.0": -2.0, "a.1": -2.0, "b": 2.0}, abs=1e-5)
    assert not columns.token_rewards.any()  # the whole sum is the last token's


def dealt(job, estimator: str, normalize: str) -> list[float]:
    """What four rollouts of two groups are worth; the sources' rewards have the weights 1 and 2."""
    sources = tuple(
        RewardSource(kind="function", targets=(name,), weight=w) for name, w in (("a.py", 1.0), ("b.py", 2.0))
    )
    reward = dataclasses.replace(job.reward, sources=sources, reward_normalize=normalize)
    ranks = LoggedRanks([], "actor")
    job = actor_alone(job, reward=reward, algorithm=make_algorithm(estimator, kl_coef=0.0))
    # Rewards (0, 0) and (1, 1); (0, 1) and (1, 1). The second one of the first group failed and has the reward 1.
    parts = [(0.0, 0.0), (), (0.0, 1.0), (1.0, 1.0)]
    rollouts = []
    for index, (rollout, own) in enumerate(zip(random_rollouts(4, vocab_size=64), parts, strict=True)):
        total = own[0] + 2 * own[1] if own else 1.0
        kind = VerdictKind.OK if own else VerdictKind.TIMEOUT
        verdict = Verdict(kind, total, source_rewards=own)
        rollouts.append(dataclasses.replace(rollout, rollout_id=str(index), group_id="ab"[index // 2], verdict=verdict))
    Learner(job, [ranks]).deal(rollouts, step=1)
    [(columns, _, _)] = ranks.shards
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


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_turns_are_compared_by_algorithms_with_a_group_only(estimator):
    with pytest.raises(ConfigError, match=r"has no baseline of a group\n\nhint: use ``estimator=group_norm``"):
        make_algorithm(estimator, group_by="turn")
    with pytest.raises(ConfigError, match=r"discounts by token\n\nhint: discount by turn with ``turn_gamma``"):
        make_algorithm("rloo", group_by="turn", gamma=0.9)
    with pytest.raises(ConfigError, match=r"compares turns, and max@k \(max_at_k\) compares whole responses\n\nhint"):
        make_algorithm("max_at_k", group_by="turn")


@pytest.mark.parametrize("estimator", ["lite_ppo", "maxrl", "opo", "max_at_k", "remax", "online_dpo"])
def test_estimators_that_compare_rewards_in_their_own_way_refuse_another(estimator):
    make_algorithm(estimator).check_rewards("together")
    with pytest.raises(ConfigError, match=r"each`` divides .* in place of what .* does\n\nhint: drop it"):
        make_algorithm(estimator).check_rewards("each")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kl_coef": 0.0}, r"compares with a reference model, .*\n\nhint: set ``kl_coef=0\.1``"),
        ({"use_kl_loss": True}, r"compares with a reference model, .* and drop ``use_kl_loss``"),
        ({"gamma": 0.9}, r"online DPO \(online_dpo\) compares whole responses\n\nhint: drop them"),
        ({"turn_gamma": 0.5}, "compares whole responses"),
        ({"group_by": "turn"}, "compares whole responses"),
        ({"old_logprobs": "skip"}, "``old_logprobs=skip`` leaves nothing"),
    ],
    ids=str,
)
def test_pairs_need_a_reference_and_whole_responses(changes, reason):
    with pytest.raises(ConfigError, match=rf"(?s){reason}"):
        make_algorithm("online_dpo", **changes)
    with pytest.raises(ConfigError, match=r"none`` compares no rewards, and online DPO .*\n\nhint: drop it"):
        make_algorithm("online_dpo").check_rewards("none")
