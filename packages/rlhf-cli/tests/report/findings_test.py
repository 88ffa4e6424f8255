"""What needs a look in a run: curves made by hand, on both sides of each bound."""

import pytest

from rlhf_cli.report import findings
from rlhf_cli.report.findings import StepCounts, ends, from_counts


def curve(*values, start=1):
    return [(step, value) for step, value in enumerate(values, start)]


def test_ends_are_means_of_the_first_and_the_last_quarter():
    assert ends(curve(1, 2, 3, 4, 5, 6, 7, 8)) == (1.5, 7.5, (7, 8))
    assert ends(curve(1, None, 3, 4, 5, 7)) == (1.0, 7.0, (6, 6))  # five values
    assert ends(curve(1, 2, 3)) is None
    assert ends(None) is None
    assert ends(curve(1, 2, 3), least_points=1) == (1.0, 3.0, (3, 3))
    assert ends(curve(None), least_points=1) is None


def test_held_out_result_that_falls_while_the_reward_rises():
    reward = curve(0.1, 0.2, 0.6, 0.8)
    fell = findings.held_out_falls({"rollout/reward": reward, "eval/accuracy": [(0, 0.2), (2, 0.5), (4, 0.4)]})
    assert fell.steps == (2, 4)
    assert fell.metrics == ("eval/accuracy", "rollout/reward")
    # 0.15 = mean of 0.1 and 0.2; 0.7 = mean of 0.6 and 0.8
    assert fell.text.startswith(
        "eval/accuracy fell from 0.5 at step 2 to 0.4 at step 4, and the mean reward in training rose from 0.15 to 0.7."
    )
    assert findings.held_out_falls({"rollout/reward": reward, "eval/reward": [(2, 0.5), (4, 0.4)]}).metrics[0] == (
        "eval/reward"
    )


@pytest.mark.parametrize(
    ("reward", "held_out"),
    [
        (curve(0.8, 0.7, 0.2, 0.1), [(2, 0.5), (4, 0.4)]),  # the reward falls, too
        (curve(0.1, 0.2, 0.6, 0.8), [(2, 0.5), (4, 0.485)]),  # within the larger of 0.02 and 5 %
        (curve(0.1, 0.2, 0.6, 0.8), [(2, 0.5), (4, 0.6)]),
        (curve(0.1, 0.2, 0.6, 0.8), [(4, 0.4)]),
        (curve(0.1, 0.2, 0.6, 0.8), []),
        ([], [(2, 0.5), (4, 0.4)]),
    ],
)
def test_held_out_result_that_does_not_fall(reward, held_out):
    assert findings.held_out_falls({"rollout/reward": reward, "eval/accuracy": held_out}) is None


@pytest.mark.parametrize(
    ("check", "metric", "bad", "good"),
    [
        (findings.length_runs_away, "rollout/response_tokens", (100, 150, 190, 200), (100, 150, 190, 199)),
        (findings.entropy_collapses, "policy/entropy", (0.5, 0.3, 0.2, 0.05), (0.5, 0.3, 0.2, 0.06)),
        (findings.many_are_truncated, "rollout/truncated", (0, 0, 0.1, 0.2), (0.9, 0.9, 0.5, 0.19)),
        (findings.gap_grows, "mismatch/logprob_gap_mean", (0.01, 0.01, 0.02, 0.03), (0.02, 0.02, 0.03, 0.039)),
        (findings.much_is_clipped, "policy/clip_fraction", (0, 0, 0.2, 0.3), (0.5, 0.5, 0.5, 0.29)),
        (findings.kl_is_large, "kl/reference", (0, 0.2, 0.7, 1.0), (2, 2, 2, 0.99)),
        (findings.kl_is_large, "policy/kl_to_old", (0, 0, 0.05, 0.1), (0, 0, 0.05, 0.09)),
        (findings.values_are_not_finite, "policy/loss", (0.1, None, 0.1, 0.1), (0.1, 0.2, 0.1, 0.1)),
    ],
)
def test_a_curve_on_both_sides_of_its_bound(check, metric, bad, good):
    found = check({metric: curve(*bad)})
    assert metric in found.metrics
    assert found.steps is not None
    assert check({metric: curve(*good)}) is None
    assert check({}) is None


def test_rewards_that_fail_in_a_step():
    curves = {
        "rollout/verdict_ok": curve(90, 95, 96),
        "rollout/verdict_wrong": [(1, 5)],
        "rollout/verdict_timeout": curve(2, 5, 4),
        "rollout/verdict_crash": [(1, 3)],
    }
    # Step 1: 5 of 100; step 2: 5 of 100; step 3: 4 of 100, below 5 %.
    found = findings.verdicts_fail(curves)
    assert found.steps == (1, 2)
    assert found.text.startswith("Rewards failed in 2 of 3 steps, most at step 1: 5%.")
    assert findings.verdicts_fail({"rollout/verdict_ok": curve(1), "rollout/verdict_wrong": curve(99)}) is None
    assert findings.verdicts_fail({}) is None


def test_a_held_out_loss_that_rises():
    assert findings.held_out_loss_rises({"eval/loss": [(0, 2.0), (10, 1.0), (20, 1.06)]}).steps == (10, 20)
    assert findings.held_out_loss_rises({"eval/loss": [(0, 2.0), (10, 1.0), (20, 1.05)]}) is None
    assert findings.held_out_loss_rises({"eval/loss": [(0, 2.0)]}) is None


def counted(*steps):
    """Return the counts of steps; each is a list of groups, and a group a list of (text, reward)."""
    counts = {}
    for step, groups in enumerate(steps, 1):
        counts[step] = StepCounts()
        for number, group in enumerate(groups):
            named = [(f"s{step}g{number}/{at}", text, reward) for at, (text, reward) in enumerate(group)]
            counts[step].add(named)
    return counts


GOOD = [[("a", 0.0), ("b", 1.0)], [("c", 0.0), ("d", 1.0)]]


def test_groups_of_equal_rewards():
    half = [[("a", 1.0), ("b", 1.0)], [("c", 0.0), ("d", 1.0)]]
    [found] = from_counts(counted(GOOD, GOOD, GOOD, half))
    assert (found.name, found.steps, found.rollouts) == ("equal", (4, 4), ("s4g0/0",))
    assert "In 50% of the groups all rewards are the same (0% at first)." in found.text
    assert from_counts(counted(GOOD, GOOD, half, GOOD)) == []
    assert [found.name for found in from_counts(counted(half))] == ["equal"]
    assert from_counts({}) == []


def test_answers_that_repeat_each_other():
    same = [[("a", 0.0), ("a", 1.0)], [("c", 0.0), ("c", 1.0)]]  # two of four repeat another one
    [found] = from_counts(counted(GOOD, GOOD, GOOD, same))
    assert (found.name, found.steps, found.rollouts) == ("duplicates", (4, 4), ("s4g0/0", "s4g1/0"))
    assert found.text.startswith("50% of the answers repeat") and found.text.endswith("(0% at first).")
    [alone] = from_counts(counted(same))
    assert alone.steps == (1, 1)
    many = [[(word, 0.0), (word, 1.0)] for word in "abcd"]
    [found] = from_counts(counted(*[GOOD] * 6, *[many] * 6))
    # At most three of a step, and six in all, from the last steps.
    assert found.rollouts == tuple(f"s{step}g{number}/0" for step in (12, 11) for number in range(3))
    across = [[("a", 0.0), ("b", 1.0)], [("a", 0.0), ("b", 1.0)]]  # the same words for two prompts
    assert from_counts(counted(GOOD, GOOD, GOOD, across)) == []


def test_answers_with_template_markers():
    marked = [[("a<|im_start|>user", 0.0), ("b", 1.0)]]
    [found] = from_counts(counted(GOOD, marked, GOOD))
    assert (found.name, found.steps, found.rollouts) == ("markers", (2, 2), ("s2g0/0",))
    assert found.text.startswith("1 of 10 answers contain")
    many = [[(f"{n}", n % 2) for n in range(200)]]
    assert from_counts(counted(many, marked, GOOD)) == []  # 1 of 206
