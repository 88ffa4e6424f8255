"""Dynamic sampling in a whole run: what it draws, keeps and counts, and how the run ends when nothing is kept."""

import dataclasses
import math

import pytest

from online_fakes import BrokenReward, Run, SpreadReward, by_step, tiny_batch
from rlhf_data.errors import ConfigError, RewardError
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.run_spec import DynamicSampling
from rlhf_train.generation.scoring import RewardShaper
from rlhf_train.online import train_and_save


@pytest.fixture
def dynamic_run(make_run):
    """Half of the sixteen prompts are worth training; a step wants eight groups and may draw `max_batches` times it."""

    def make(reward=None, save_path=None, **dynamic) -> Run:
        sampling = DynamicSampling(**dynamic)
        options = {"save_path": save_path} if save_path else {}
        options |= {"batch": tiny_batch(8), "dynamic_sampling": sampling, "num_steps": 9, "seed": 3}
        return make_run(reward or SpreadReward(), **options)

    return make


def test_dynamic_sampling_refills_until_the_batch_is_full_and_counts_what_it_drew(dynamic_run):
    run = dynamic_run(max_batches=10)
    assert run.step(1)
    assert len(run.world.rollouts[0]) == 32
    assert all(rollout.token_ids[0] % 2 == 0 for rollout in run.world.rollouts[0])
    assert not run.listener.warnings
    [line] = run.lines()
    drawn = line["samples/generated"] / 4
    assert 8 < drawn <= 16
    assert (line["samples/filtered"], line["samples/trained"]) == (4 * (drawn - 8), 32)
    assert line["rollout/kept_groups"] == pytest.approx(8 / drawn)
    # Groups that are left out are not progress, and the last one is kept.
    assert [total for _, total in run.listener.done] == [8] * int(drawn)
    assert [done for done, _ in run.listener.done] == sorted(done for done, _ in run.listener.done)
    assert run.listener.done[-1] == (8, 8)
    run.recorder.close()
    assert len(run.recorder.path("rollouts").read_text().splitlines()) == 4 * drawn


def test_rewards_are_normalised_by_those_of_groups_that_are_not_trained_too(dynamic_run):
    run = dynamic_run(max_batches=1)
    reward = dataclasses.replace(run.job.reward, running_reward_norm=True)
    run.controller.learner._shaper = RewardShaper(reward, max_tokens=12)
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
    train_and_save(run.job, run.controller, run.recorder)
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
    with pytest.raises(RewardError, match=r"3 step\(s\) in a row: .*server down"):
        run.step(3)


def own_filter(condition):
    return OwnCode("keep_group", "/nowhere/mine.py", f"def keep_group(group): return {condition}")


def test_filter_of_the_users_own_takes_the_place_of_the_built_in_one_or_acts_beside_it(dynamic_run, tmp_path):
    run = dynamic_run(scores_differ=False, own_filter=own_filter("group.scores.max() == 0"))
    assert run.step(1)
    assert len(run.world.rollouts[0]) == 32
    assert all(rollout.token_ids[0] % 2 == 1 for rollout in run.world.rollouts[0])  # which have equal scores
    [line] = run.lines()
    assert line["samples/filtered"] == line["samples/generated"] - 32 > 0
    assert line["rollout/kept_groups"] == pytest.approx(32 / line["samples/generated"])
    options = {"max_batches": 1, "save_path": str(tmp_path / "both")}
    both = dynamic_run(own_filter=own_filter("group.scores.max() == 0"), **options)
    assert not both.step(1)
    assert [(line["samples/filtered"], line["samples/trained"]) for line in both.lines()] == [(32, 0)]


def test_filter_of_the_users_own_that_fails_ends_the_run_with_its_words_after_the_model_is_saved(dynamic_run):
    run = dynamic_run(scores_differ=False, own_filter=own_filter("1 / int(group.is_right.sum()) < 9"))
    with pytest.raises(ConfigError, match=r"keep_group of /nowhere/mine.py failed for prompt .*: ZeroDivisionError"):
        train_and_save(run.job, run.controller, run.recorder)
    assert [entry for entry in run.world.log if entry.startswith("save actor")]


def test_metrics_of_the_users_own_are_those_of_a_step_and_their_failure_is_a_warning(make_run, tmp_path):
    source = (
        "def step_metrics(groups, left_out):\n"
        "    return {'kept': len(groups), 'left': len(left_out), 'of': 1 / (32 - len(groups) - len(left_out))}"
    )
    options = {"batch": tiny_batch(8), "seed": 3, "own_metrics": OwnCode("step_metrics", "/nowhere/mine.py", source)}
    run = make_run(SpreadReward(), dynamic_sampling=DynamicSampling(), **options)
    assert run.step(1)
    [line] = run.lines()
    drawn = line["samples/generated"] / 4
    assert (line["own/kept"], line["own/left"], line["own/of"]) == (8, drawn - 8, 1 / (32 - drawn))
    run = make_run(SpreadReward(), **options | {"batch": tiny_batch(32), "save_path": str(tmp_path / "other")})
    assert run.step(1)
    assert not any(name.startswith("own/") for name in run.lines()[0])
    [text] = run.listener.warnings
    assert "this step has no metrics of your own: step_metrics of /nowhere/mine.py failed" in text
