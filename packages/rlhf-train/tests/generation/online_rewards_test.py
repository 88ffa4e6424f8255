"""From raw rewards to those that are learned from, in their order, and which groups are worth training."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from record_testing import ManualClock, make_group, short_rollout
from rlhf_data.errors import ConfigError
from rlhf_data.records import FinishReason, Prompt, Rollout, RolloutGroup, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.ray_actors import RayScorer
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.generation.baseline import subtract_baseline
from rlhf_train.generation.run_spec import DynamicSampling, RewardSpec
from rlhf_train.generation.scoring import RewardShaper, is_worth_training, make_reward
from rlhf_train.generation.summaries import scored
from rlhf_train.run.timeline import Timeline
from rlhf_train.tracing.trace import Trace
from trace_events import check


def rollout(reward: float | None, *, length: int = 1, truncated: bool = False, score: float | None = None) -> Rollout:
    kind = VerdictKind.CRASH if reward is None else VerdictKind.OK
    reason = FinishReason.LENGTH if truncated else FinishReason.STOP
    return short_rollout(tokens=length, reason=reason, verdict=Verdict(kind, reward, score))


def shaper(**options) -> RewardShaper:
    return RewardShaper(RewardSpec(sources=(), **options), max_tokens=10)


def test_rewards_that_nothing_is_done_to_stay_as_they_are_without_metrics():
    rewards, metrics = shaper().shape([rollout(3.0), rollout(-20.0, length=10, truncated=True)])
    assert (rewards.tolist(), metrics) == ([3.0, -20.0], {})


def test_rewards_are_normalised_then_clipped_then_shaped_by_length():
    # Seen: 0, 0, 6, 6 -> mean 3, sample deviation sqrt(36 / 3) = sqrt(12).
    made = shaper(
        running_reward_norm=True,
        reward_clip_range=(-0.5, 0.5),
        overlong_buffer=4,
        overlong_penalty_factor=2.0,
        stop_properly_penalty_coef=0.25,
    )
    seen = [rollout(0.0), rollout(0.0), rollout(6.0, length=8), rollout(6.0, length=10, truncated=True)]
    made.observe(seen)
    rewards, metrics = made.shape(seen)
    # Normalised +-3 / sqrt(12) = +-0.866, clipped to +-0.5; 8 tokens are half way into the buffer: -1; 10 all of it: -2
    # makes -1.5, and stopping there costs 0.75 of its size more: -2.625.
    assert rewards.tolist() == pytest.approx([-0.5, -0.5, -0.5, -2.625])
    assert metrics == pytest.approx(
        {"train/reward_clipped": 1.0, "train/length_penalty": (1 + 3.125) / 4, "train/shaped_reward": -4.125 / 4}
    )


def test_clip_is_of_the_raw_reward_so_that_a_penalty_goes_beyond_it():
    rewards, metrics = shaper(reward_clip_range=(-1, 1), overlong_buffer=10).shape([rollout(-5.0, length=10)])
    assert (rewards.tolist(), metrics["train/shaped_reward"]) == ([-2.0], -2.0)


def test_truncated_rollout_keeps_its_share_of_a_reward_or_has_at_most_a_negative_one():
    cut, whole = rollout(2.0, truncated=True), rollout(2.0)
    assert shaper(stop_properly_penalty_coef=0.25).shape([cut, whole])[0].tolist() == [0.5, 2.0]
    assert shaper(stop_properly_penalty_coef=-0.5).shape([cut, whole])[0].tolist() == [-0.5, 2.0]


def test_normalisation_is_by_all_rewards_so_far():
    made = shaper(running_reward_norm=True)
    made.observe([rollout(0.0), rollout(2.0)])
    made.observe([rollout(4.0)])
    # 0, 2, 4: mean 2, sample deviation 2
    rewards, metrics = made.shape([rollout(6.0)])
    assert (rewards.tolist(), metrics) == ([2.0], {"train/shaped_reward": 2.0})


def test_shaping_of_no_rollouts_gives_no_rewards():
    made = shaper(
        running_reward_norm=True, reward_clip_range=(-1, 1), overlong_buffer=4, stop_properly_penalty_coef=0.5
    )
    made.observe([])
    rewards, metrics = made.shape([])
    assert rewards.shape == (0,) and all(value == 0.0 for value in metrics.values())


def group(*rollouts: Rollout) -> RolloutGroup:
    return make_group("g", Prompt("p", [1], "1"), rollouts)


@pytest.mark.parametrize(
    ("rewards", "bounds", "expected"),
    [
        ((0.0, 1.0), None, True),
        ((1.0, 1.0), None, False),  # nothing to compare
        ((0.0, 1.0), (0.2, 0.8), True),  # mean 0.5
        ((0.0, 0.4), (0.2, 0.8), False),  # mean 0.2: strictly between is meant
        ((0.6, 1.0), (0.2, 0.8), False),
        ((0.5, 0.5), (0.2, 0.8), False),  # equal, whatever the bounds
        ((0.0, None, 1.0), None, True),  # what has no score is left out of account
        ((1.0, None, 1.0), None, False),
        ((1.0, None), None, False),
        ((None, None), None, False),
    ],
)
def test_groups_worth_training_differ_in_score_with_a_mean_within_bounds(rewards, bounds, expected):
    made = group(*(rollout(reward) for reward in rewards))
    assert is_worth_training(made, DynamicSampling(reward_range=bounds)) is expected


def test_groups_are_compared_by_score_not_by_reward():
    assert not is_worth_training(group(rollout(0.0, score=1.0), rollout(5.0, score=1.0)), DynamicSampling())
    assert is_worth_training(group(rollout(5.0, score=0.0), rollout(5.0, score=1.0)), DynamicSampling())


@pytest.mark.parametrize(
    ("sources", "worth"),
    [
        (((1.0, 0.0), (0.0, 1.0)), True),  # equal sums of rewards that differ
        (((1.0, 0.0), (1.0, 0.0)), False),
        (((1.0, 0.0), ()), True),  # one of them has the fixed reward of a failure
        (((), ()), False),
    ],
)
def test_groups_are_compared_by_the_rewards_of_each_source(sources, worth):
    rollouts = []
    for rewards in sources:
        made = rollout(1.0)
        rollouts.append(replace(made, verdict=replace(made.verdict, source_rewards=rewards)))
    assert is_worth_training(group(*rollouts), DynamicSampling(by_source=True)) is worth
    assert not is_worth_training(group(*rollouts), DynamicSampling())


def test_source_that_abstains_is_no_part_of_rewards_that_are_compared_one_by_one():
    rollouts = []
    # The second source knows two of the four responses; the last one has the fixed reward of a failure from both.
    for name, rewards in (("a", (0.0, None)), ("a", (2.0, None)), ("b", (1.0, 4.0)), ("b", ())):
        made = rollout(1.0)
        rollouts.append(replace(made, group_id=name, verdict=replace(made.verdict, source_rewards=rewards)))
    sources = tuple(RewardSource(kind="function", targets=(name,)) for name in ("a.py", "b.py"))
    algorithm = make_algorithm("reinforce_baseline", kl_coef=0.0)
    spec = RewardSpec(sources=sources, reward_normalize="each")
    found = subtract_baseline(rollouts, np.ones(4), algorithm, spec)
    assert found.earned == [[]] * 4
    assert found.rewards == pytest.approx([-1.0, 1.0, 1.0, -1.0], abs=1e-5)


def test_greedy_baseline_is_subtracted_from_whole_responses_alone():
    spec, algorithm = RewardSpec(sources=(), reward_normalize="none"), make_algorithm("remax", kl_coef=0.0)
    rollouts = [rollout(3.0), rollout(5.0)]
    made = [replace(each, verdict=replace(each.verdict, extra={"greedy_reward": 2.5})) for each in rollouts]
    assert subtract_baseline(made, np.array([3.0, 5.0]), algorithm, spec).rewards == [0.5, 2.5]
    step = replace(made[0], verdict=replace(made[0].verdict, token_rewards=((1, 1.0),)))
    with pytest.raises(ConfigError, match=r"ReMax \(remax\) compares whole responses, and a reward source scores"):
        subtract_baseline([step], np.zeros(1), algorithm, spec)
    algorithm.check_rewards("together")
    with pytest.raises(
        ConfigError, match=r"running_reward_norm`` changes the rewards that are trained.*\n\nhint: drop it"
    ):
        algorithm.check_rewards("together", RewardSpec(sources=(), running_reward_norm=True).changes)


def test_baseline_by_length_weighs_rewards_by_the_tokens_of_the_policy():
    rollouts = [rollout(0.0, length=3), rollout(4.0, length=1)]
    spec, algorithm = RewardSpec(sources=()), make_algorithm("opo", kl_coef=0.0)
    assert subtract_baseline(rollouts, np.array([0.0, 4.0]), algorithm, spec).rewards == [-1.0, 3.0]
    step = replace(rollouts[0], verdict=replace(rollouts[0].verdict, token_rewards=((2, 1.0),)))
    with pytest.raises(ConfigError, match=r"OPO \(opo\) compares whole responses, and a reward source scores"):
        subtract_baseline([step], np.zeros(1), algorithm, spec)


def test_reward_model_of_a_job_has_its_deadline(monkeypatch, tmp_path):
    cancelled = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    call = SimpleNamespace(remote=lambda *arguments: asyncio.get_running_loop().create_future())
    source = RewardSource(kind="model", targets=("model",))
    spec = RewardSpec(sources=(source,), model_timeout_s=0.05)
    reward = make_reward(spec, [[RayScorer(SimpleNamespace(call=call))]], tmp_path / "reward.log")
    [verdict] = asyncio.run(asyncio.wait_for(reward.score(Prompt("p", [1], "one"), [rollout(None)]), 30))
    assert verdict.kind is VerdictKind.TIMEOUT
    assert "within 0.05 s" in verdict.detail
    assert len(cancelled) == 1


def test_batches_of_a_reward_model_are_on_the_timeline_with_their_size_and_waits(tmp_path):
    clock = ManualClock()
    trace = Trace(clock)
    trace.open(tmp_path / "timeline.json")

    class Slow:
        async def score(self, token_ids):
            clock.now += 2
            if len(token_ids) == 1:
                raise OSError("gone")
            return [0.5] * len(token_ids)

    source = RewardSource(kind="model", targets=("models/rm",))
    reward = make_reward(RewardSpec(sources=(source,)), [[Slow()]], tmp_path / "reward.log", trace)
    timeline = Timeline(clock, trace=trace)
    with timeline.phase("generate"):
        asyncio.run(reward.score(Prompt("p", [1], "one"), [rollout(None)] * 3))
        clock.now += 1
        asyncio.run(reward.score(Prompt("p", [1], "one"), [rollout(None)]))
    trace.close()
    first, wait, *failed = check(tmp_path / "timeline.json").of("reward model rm", "replica 0")
    assert (first.name, first.begin, first.end, first.args) == ("scores", 0, 2_000_000, {"sequences": 3})
    assert (wait.name, wait.end, wait.args) == ("wait", 3_000_000, {"waits for": "generate 1.000 s"})
    assert failed and all(each.args == {"sequences": 1, "failed": "OSError"} for each in failed)


def test_reward_models_score_by_turn_if_the_job_says_so_except_those_that_judge_steps(tmp_path, monkeypatch):
    made = []

    def make(replicas, calls, **options):
        made.append(options)

    monkeypatch.setattr("rlhf_train.generation.scoring.ModelReward", make)
    monkeypatch.setattr("rlhf_train.generation.scoring.ProcessReward", make)
    monkeypatch.setattr(
        "rlhf_train.generation.scoring.build_reward", lambda sources, calls, **options: options["models"]
    )
    sources = tuple(RewardSource(kind="model", targets=(name,)) for name in ("scores", "steps"))
    spec = RewardSpec(sources=sources, reward_by_turn=True, process_models=("steps",))
    make_reward(spec, [[None], [None]], tmp_path / "reward.log")
    assert [options.get("by_turn") for options in made] == [True, None]


def test_run_without_a_reward_gives_every_rollout_zero_and_says_that_nothing_scored_it(tmp_path):
    reward = make_reward(RewardSpec(sources=()), [], tmp_path / "reward.log")
    verdicts = asyncio.run(reward.score(Prompt("p", [1], "one"), [rollout(None), rollout(None)]))
    assert [(verdict.kind, verdict.reward) for verdict in verdicts] == [(VerdictKind.UNSCORED, 0.0)] * 2
    asyncio.run(reward.close())


@pytest.mark.parametrize("failed_reward", [None, -1.0])
def test_failed_reward_masks_a_rollout_unless_the_job_has_a_reward_for_it(tmp_path, failed_reward):
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels, *, responses): return 1 / 0\n")
    source = RewardSource(kind="function", targets=(str(tmp_path / "reward.py"),))
    spec = RewardSpec(sources=(source,), calls=CallOptions(failed_reward=failed_reward))
    reward = make_reward(spec, [], tmp_path / "reward.log")

    async def run() -> list[Verdict]:
        try:
            return await reward.score(Prompt("p", [1], "one"), [rollout(None)])
        finally:
            await reward.close()

    [verdict] = asyncio.run(run())
    assert verdict.kind is VerdictKind.CRASH
    kept = scored([group(replace(rollout(None), verdict=verdict))])
    assert [each.verdict.reward for each in kept] == ([] if failed_reward is None else [failed_reward])


def test_overlong_penalty_is_of_the_longest_answer_not_of_the_whole_conversation():
    def answer(size: int) -> Span:
        return Span(SpanSource.POLICY, [2] * size, [-1.0] * size, policy_version=0)

    question, environment = Span(SpanSource.PROMPT, [1]), Span(SpanSource.ENVIRONMENT, [3] * 50)
    verdict = Verdict(VerdictKind.OK, 1.0)
    short = (question, answer(6), environment, answer(5), environment, answer(6))
    # An answer during which the weights changed has two spans.
    long = (question, answer(2), environment, answer(5), replace(answer(4), policy_version=1), environment, answer(1))
    silent = (question, environment)
    rollouts = [Rollout("r", "g", spans, FinishReason.STOP, verdict=verdict) for spans in (short, long, silent)]
    rewards, _ = shaper(overlong_buffer=4, overlong_penalty_factor=2.0).shape(rollouts)
    # 6 of 10 tokens are just outside the buffer of 4; 9 are three quarters into it.
    assert rewards.tolist() == [1.0, 1.0 - 1.5, 1.0]
