"""Right answers that are kept: which ones, for which groups, and for how long."""

import numpy as np
import pytest

from rlhf_data.errors import ConfigError
from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_train.generation.reuse import ReuseSpec, SolvedAnswers
from rlhf_train.run.saved.state import read_state, write_state

KINDS = {"o": VerdictKind.OK, "w": VerdictKind.WRONG, "t": VerdictKind.TIMEOUT}


def group(name, letters, prompt="p", logprobs=None, rewards=None, version=0):
    """A group whose answers have verdicts by their first letters: ok, wrong, timeout."""
    asked = Prompt(prompt, [1, 2], prompt)
    episodes = []
    for index, letter in enumerate(letters):
        reward = None if letter == "t" else float(letter == "o") if rewards is None else rewards[index]
        written = np.full(3, -1.0 if logprobs is None else logprobs[index])
        spans = (
            Span(SpanSource.PROMPT, [1, 2]),
            Span(SpanSource.POLICY, [3, 4, 10 + index], written, policy_version=version),
        )
        own = f"{name}/{index}"
        rollout = Rollout(own, name, spans, FinishReason.STOP, letter, Verdict(KINDS[letter], reward))
        episodes.append(Episode(own, name, (rollout,)))
    return RolloutGroup(name, asked, tuple(episodes))


def answers(**settings):
    return SolvedAnswers(ReuseSpec(**{"reuse_solved": 9, **settings}))


def last_tokens(filled):
    return [int(rollout.token_ids[-1]) for rollout in filled.rollouts]


def test_kept_answer_takes_the_place_of_a_wrong_one_with_all_that_it_was_sampled_with():
    one = answers()
    [same], metrics = one.settle([group("step1/0", "wwow", version=7)], [])
    assert last_tokens(same) == [10, 11, 12, 13] and metrics == {"reuse/answers": 0, "reuse/kept": 1}
    one.settle([], [])
    [filled], metrics = one.settle([group("step3/0", "www", rewards=[0.1, 0.0, 0.0], version=9)], [])
    assert metrics == {"reuse/answers": 1, "reuse/age": 2, "reuse/kept": 1}
    assert last_tokens(filled) == [10, 12, 12]  # in the place of the first of the worst
    reused = filled.rollouts[1]
    assert (reused.rollout_id, reused.group_id, reused.policy_version) == ("step3/0/reused", "step3/0", 7)
    assert (reused.verdict.kind, reused.verdict.reward, reused.text) == (VerdictKind.OK, 1.0, "o")
    assert reused.rollout_logprobs.tolist() == [0, 0, -1, -1, -1] and filled.episodes[1].episode_id == "step3/0/reused"
    assert [r.policy_version for r in filled.rollouts] == [9, 7, 9]


@pytest.mark.parametrize(
    ("seen", "options", "kept"),
    [
        ("ww", {}, None),
        ("owww", {}, 10),
        ("ooww", {}, 11),  # the likelier one
        ("oowt", {}, None),  # two of three
        ("oowt", {"reuse_pass_rate": 0.7}, 11),
        ("oo", {"reuse_pass_rate": 0.9}, None),
        ("tt", {}, None),
    ],
)
def test_answer_is_kept_of_prompts_that_are_hardly_ever_solved(seen, options, kept):
    one = answers(**options)
    one.settle([], [group("step1/0", seen, logprobs=[-2.0, -0.5, -0.1, -0.1][: len(seen)])])  # trained or not
    tokens = last_tokens(one.filled(group("step2/0", "ww")))
    assert tokens == ([10, 11] if kept is None else [kept, 11])


def test_best_answer_is_that_of_the_highest_reward():
    one = answers()
    one.settle([group("step1/0", "oowww", logprobs=[-0.1, -2.0, -1, -1, -1], rewards=[0.8, 1.0, 0.2, 0, 0])], [])
    assert last_tokens(one.filled(group("step2/0", "w"))) == [11]


@pytest.mark.parametrize(
    ("letters", "prompt", "is_filled"), [("wwt", "p", True), ("wo", "p", False), ("tt", "p", False), ("ww", "q", False)]
)
def test_groups_without_a_right_answer_are_filled(letters, prompt, is_filled):
    one = answers()
    one.settle([group("step1/0", "owww")], [])
    wanted = group("step2/0", letters, prompt)
    assert (one.filled(wanted) is not wanted) == is_filled
    assert [e.verdict.kind for e in one.filled(wanted).episodes].count(VerdictKind.TIMEOUT) == letters.count("t")


def test_newest_visit_age_and_number_decide_what_stays_kept():
    def kept(one, *prompts):
        return [one.filled(asked := group("g", "w", prompt)) is not asked for prompt in prompts]

    one = answers(reuse_solved=2, reuse_max_age=3)
    one.settle([], [group("step1/2", "ow", "c"), group("step1/0", "ow", "a"), group("step1/1", "ow", "b")])
    assert kept(one, "a", "b", "c") == [False, True, True]  # by the order of admission, whenever they were complete
    one.settle([group("step2/0", "wo", "b"), group("step2/1", "ww", "c")], [])
    assert last_tokens(one.filled(group("g", "w", "b"))) == [11]  # the newer answer
    one.settle([], [])
    one.settle([], [])
    assert kept(one, "b", "c") == [True, False]  # three steps are the limit
    one.settle([group("step5/0", "ow", "b"), group("step5/1", "ow", "c")], [])
    one.settle([group("step6/0", "oo", "b")], [])
    assert kept(one, "b", "c") == [False, True]  # it is solved


def test_saved_answers_are_those_that_are_restored(tmp_path):
    one = answers(reuse_max_age=2)
    one.settle([group("step1/0", "ow", "a", logprobs=[-0.25, -1], version=3)], [])
    one.settle([group("step2/0", "wo", "b")], [])
    write_state(tmp_path, {"solved": one.state()})
    other = answers(reuse_max_age=2)
    other.restore(read_state(tmp_path)["solved"])
    for name in "ab":
        mine, same = [each.filled(group("g", "ww", name)).rollouts[0] for each in (one, other)]
        assert mine.rollout_id == same.rollout_id == "g/reused" and mine.policy_version == same.policy_version
        assert np.array_equal(mine.token_ids, same.token_ids)
        assert np.array_equal(mine.rollout_logprobs, same.rollout_logprobs)
    _, metrics = other.settle([group("step3/0", "ww", "b")], [])
    assert metrics == {"reuse/answers": 1, "reuse/age": 1, "reuse/kept": 1}  # the older one has reached its age
    for lower in ({"reuse_max_age": 1}, {"reuse_solved": 1}):  # of the run that goes on
        other = answers(**lower)
        other.restore(read_state(tmp_path)["solved"])
        filled = [other.filled(asked := group("step3/0", "ww", name)) is not asked for name in "ab"]
        assert filled == [False, True]


@pytest.mark.parametrize("settings", [{"reuse_solved": 0}, {"reuse_max_age": 0}, {"reuse_pass_rate": 1.0}])
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ConfigError, match="``reuse_"):
        ReuseSpec(**{"reuse_solved": 1, **settings})
