"""Records: views over spans, validation where they are made, pickling."""

import dataclasses
import math
import pickle
from types import MappingProxyType

import numpy as np
import pytest

from record_testing import make_group, make_prompt, make_rollout
from rlhf_data.errors import DataError
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


def two_turns() -> Rollout:
    """Prompt [1 2], policy [3], environment [4 5], policy [6]."""
    return Rollout(
        "g/0",
        "g",
        (
            Span(SpanSource.PROMPT, [1, 2]),
            Span(SpanSource.POLICY, [3], [-0.5], 7),
            Span(SpanSource.ENVIRONMENT, [4, 5]),
            Span(SpanSource.POLICY, [6], [-0.25], 9),
        ),
        FinishReason.LENGTH,
        "answer",
        Verdict(VerdictKind.OK, 1.0),
    )


def test_rollout_views_join_the_spans():
    rollout = two_turns()
    assert rollout.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert rollout.tokens_before_policy.tolist() == [1, 2]
    assert rollout.loss_mask.tolist() == [False, False, True, False, False, True]
    assert rollout.rollout_logprobs.tolist() == [0, 0, -0.5, 0, 0, -0.25]
    assert (rollout.num_tokens, rollout.num_response_tokens, rollout.policy_version) == (6, 2, 7)
    assert rollout.policy_versions.tolist() == [-1, -1, 7, -1, -1, 9]
    assert rollout.turn_ends.tolist() == [2, 5]


def test_rollout_without_prompt_first_is_refused():
    with pytest.raises(DataError, match="does not begin with its prompt"):
        Rollout("g/0", "g", (Span(SpanSource.POLICY, [3], [-0.5], 0),), FinishReason.STOP)


@pytest.mark.parametrize(
    "arguments",
    [
        (SpanSource.POLICY, [1], None, 0),
        (SpanSource.POLICY, [1], [-1.0], None),
        (SpanSource.PROMPT, [1], [-1.0], 0),
        (SpanSource.POLICY, [1, 2], [-1.0], 0),
        (SpanSource.PROMPT, [[1]], None, None),
    ],
)
def test_span_that_contradicts_itself_is_refused(arguments):
    with pytest.raises(DataError):
        Span(*arguments)


def test_span_arrays_are_read_only_and_the_callers_is_not():
    own = np.array([1, 2], dtype=np.int32)
    span = Span(SpanSource.PROMPT, own)
    with pytest.raises(ValueError, match="read-only"):
        span.token_ids[0] = 9
    own[0] = 9


def test_verdict_of_a_scorer_that_abstained_has_no_reward():
    assert (Verdict(VerdictKind.ABSTAINED).reward, VerdictKind.ABSTAINED.failed) == (None, False)
    with pytest.raises(DataError, match="a verdict `abstained` has the reward"):
        Verdict(VerdictKind.ABSTAINED, 0.0)


@pytest.mark.parametrize("kind", [kind for kind in VerdictKind if kind is not VerdictKind.ABSTAINED])
def test_verdict_has_a_reward_unless_the_scorer_failed(kind):
    assert Verdict(kind, -1.0).reward == -1.0  # also for a failure: a user may have set a reward for it
    if kind.failed:
        assert Verdict(kind).reward is None
    else:
        with pytest.raises(DataError, match=f"a verdict `{kind}` without a reward"):
            Verdict(kind)


def test_verdict_score_is_the_reward_unless_given():
    assert Verdict(VerdictKind.OK, 0.5).score == 0.5
    assert Verdict(VerdictKind.OK, 0.5, 1.0).score == 1.0
    assert Verdict(VerdictKind.TIMEOUT).score is None
    with pytest.raises(DataError, match="the reward is nan"):
        Verdict(VerdictKind.OK, float("nan"))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({1}, "it has a set"),
        (np.float32(1), "it has a float32"),
        (np.arange(3), "it has a ndarray"),
        (b"1", "it has a bytes"),
        (object(), "it has a object"),
        (math.nan, "Out of range float values are not JSON compliant.*"),
        (-math.inf, "Out of range float values are not JSON compliant.*"),
    ],
)
def test_values_that_no_file_can_hold_are_refused_with_a_hint(value, named):
    for make in (
        lambda: Prompt("p", [1], "", label=value),
        lambda: Prompt("p", [1], "", messages=({"role": "user", "content": value},)),
        lambda: Prompt("p", [1], "", extra={"a": [value]}),
        lambda: Verdict(VerdictKind.OK, 1.0, extra={"a": value}),
    ):
        with pytest.raises(DataError, match=f"is no JSON value: {named}\\n\\nhint: give texts"):
            make()


def test_values_that_files_can_hold_are_kept():
    extra = MappingProxyType({"a": [1, 2.5, None, True, "b", (1,), {"c": 1e300}], "d": MappingProxyType({})})
    assert Prompt("p", [1], "", extra=extra).extra is extra


def test_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="'p' has no tokens"):
        Prompt("p", [], "")


def test_verdict_turn_rewards_add_up_to_the_reward():
    assert Verdict(VerdictKind.OK, 1.0, turn_rewards=[0.25, 0.75]).turn_rewards == (0.25, 0.75)
    # 0.1 + 0.2 is not 0.3, and 1e9 - 1e9 + 1 loses more digits than 1 has.
    Verdict(VerdictKind.OK, 0.3, turn_rewards=(0.1, 0.2))
    Verdict(VerdictKind.OK, 1.0, turn_rewards=(1e9, -1e9 + 1.01))
    # Other rollouts of the episode earned the rest.
    assert Verdict(VerdictKind.OK, 1.0, turn_rewards=(0.5,), earned_elsewhere=(0.75, -0.25)).reward == 1.0
    with pytest.raises(DataError, match=r"add up to 1\.25, the reward is 1\.0"):
        Verdict(VerdictKind.OK, 1.0, turn_rewards=(0.5,), earned_elsewhere=(0.75, 0.0))
    for rewards in [(0.25, 0.76), (float("nan"), 1.0), (float("inf"),)]:
        with pytest.raises(DataError, match="turns add up to"):
            Verdict(VerdictKind.OK, 1.0, turn_rewards=rewards)
    with pytest.raises(DataError, match="the reward is None"):
        Verdict(VerdictKind.TIMEOUT, turn_rewards=(0.0,))


def test_verdict_token_rewards_are_a_part_of_the_reward_at_ascending_places():
    verdict = Verdict(VerdictKind.OK, 2.0, token_rewards=[(np.int64(3), np.float32(0.5)), (7, 0.25)])
    assert verdict.token_rewards == ((3, 0.5), (7, 0.25)) and type(verdict.token_rewards[0][0]) is int
    assert pickle.loads(pickle.dumps(verdict)) == verdict != Verdict(VerdictKind.OK, 2.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_rewards": [(3, 0.5), (3, 0.5)]}, r"are \[3, 3\]; they must be ascending, from 0"),
        ({"token_rewards": [(-1, 0.5)]}, "must be ascending, from 0"),
        ({"token_rewards": [(1, float("nan"))]}, "they must be finite"),
        ({"token_rewards": [(1, 0.5)], "turn_rewards": (2.0,)}, "no rewards of turns"),
        ({"token_rewards": [(1, 0.5)], "kind": VerdictKind.CRASH, "reward": None}, "need a reward"),
    ],
)
def test_verdict_token_rewards_that_cannot_be_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        Verdict(**{"kind": VerdictKind.OK, "reward": 2.0, **fields})


def test_rollout_token_rewards_lie_within_it():
    rollout = two_turns()
    last = rollout.num_tokens - 1
    dataclasses.replace(rollout, verdict=Verdict(VerdictKind.OK, 1.0, token_rewards=((last, 1.0),)))
    with pytest.raises(DataError, match=f"has {last + 1} tokens and a reward at {last + 1}"):
        dataclasses.replace(rollout, verdict=Verdict(VerdictKind.OK, 1.0, token_rewards=((last + 1, 1.0),)))


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_verdict_seconds_are_finite_and_not_negative(seconds):
    with pytest.raises(DataError, match="scoring took"):
        Verdict(VerdictKind.OK, 1.0, seconds=seconds)


def test_verdicts_that_took_different_times_are_equal():
    assert Verdict(VerdictKind.OK, 1.0, seconds=2.5) == Verdict(VerdictKind.OK, 1.0)
    assert Verdict(VerdictKind.OK, 1.0, turn_rewards=(1.0,)) != Verdict(VerdictKind.OK, 1.0)


def test_rollout_turn_rewards_are_one_per_turn():
    rollout = two_turns()
    dataclasses.replace(rollout, verdict=Verdict(VerdictKind.OK, 1.0, turn_rewards=(0.0, 1.0)))
    with pytest.raises(DataError, match="has 2 turns and 3 turn rewards"):
        dataclasses.replace(rollout, verdict=Verdict(VerdictKind.OK, 1.0, turn_rewards=(0.0, 1.0, 0.0)))


@pytest.mark.parametrize(
    ("verdict", "earned"),
    [
        (None, []),
        (Verdict(VerdictKind.OK, 1.0), []),
        (Verdict(VerdictKind.OK, 1.0, turn_rewards=(0.25, 0.75)), [(2, 0.25), (5, 0.75)]),  # the last token of each
        (Verdict(VerdictKind.OK, 1.0, token_rewards=((2, 0.5),)), [(2, 0.5)]),
    ],
)
def test_rollout_says_what_single_tokens_earned(verdict, earned):
    assert dataclasses.replace(two_turns(), verdict=verdict).earned == earned


def test_rollout_turn_is_one_though_an_update_split_it():
    spans = (
        Span(SpanSource.PROMPT, [1]),
        Span(SpanSource.POLICY, [3, 4], [-0.5, -0.5], 7),
        Span(SpanSource.POLICY, [5], [-0.5], 8),
    )
    rollout = Rollout("g/0", "g", spans, FinishReason.LENGTH)
    assert rollout.turn_ends.tolist() == [3]
    assert rollout.policy_versions.tolist() == [-1, 7, 7, 8]
    assert rollout.policy_version == 7
    assert Rollout("g/0", "g", spans[:1], FinishReason.ABORT).turn_ends.tolist() == []


def test_episode_verdict_is_that_of_its_last_rollout():
    prompt = make_prompt()
    first = make_rollout(prompt, "4", verdict=Verdict(VerdictKind.WRONG, 0.0))
    last = make_rollout(prompt, "5", index=1, verdict=Verdict(VerdictKind.OK, 1.0))
    assert Episode("e", "g0", (first, last)).verdict is last.verdict
    assert Episode("e", "g0", (make_rollout(prompt, "4"),)).verdict is None


def test_episode_without_rollouts_or_with_a_stray_is_refused():
    with pytest.raises(DataError, match="'e' has no rollout"):
        Episode("e", "g0", ())
    with pytest.raises(DataError, match=r"rollouts \['other/0'\] do not belong to group 'g0'"):
        Episode("e", "g0", (make_rollout(make_prompt(), "5", group_id="other"),))


def test_rollout_group_flattens_its_episodes_in_order_and_refuses_a_stray():
    prompt = make_prompt()
    rollouts = [make_rollout(prompt, str(index), index=index) for index in range(3)]
    episodes = (Episode("a", "g0", tuple(rollouts[:2])), Episode("b", "g0", (rollouts[2],)))
    assert RolloutGroup("g0", prompt, episodes).rollouts == tuple(rollouts)
    with pytest.raises(DataError, match=r"episodes \['a', 'b'\] do not belong to group 'g1'"):
        RolloutGroup("g1", prompt, episodes)


def test_rollout_routes_are_read_only_of_the_smallest_type_and_of_its_first_tokens():
    plain = two_turns()
    assert plain.routes is None and plain.num_routed == 0
    given = np.arange(5 * 3 * 2).reshape(5, 3, 2)
    rollout = dataclasses.replace(plain, routes=given)
    assert rollout.routes.dtype == np.uint8 and rollout.routes.tolist() == given.tolist() and rollout.num_routed == 5
    with pytest.raises(ValueError, match="read-only"):
        rollout.routes[0] = 1
    given[0] = 1  # the caller's own
    for largest, dtype in ((255, np.uint8), (256, np.uint16)):
        assert dataclasses.replace(plain, routes=np.full((1, 1, 1), largest)).routes.dtype == dtype
    assert dataclasses.replace(plain, routes=np.zeros((0, 3, 2), np.uint8)).num_routed == 0
    assert pickle.loads(pickle.dumps(rollout)).routes.tolist() == rollout.routes.tolist()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((5, 3), int), r"routes must be numbers of experts \[R, layers, top_k\], got shape \(5, 3\)"),
        (np.zeros((5, 3, 2)), "and type float64"),
        (np.full((5, 3, 2), -1), "and type int64"),
        (np.zeros((7, 3, 2), int), "'g/0' has 6 tokens and routes of 7"),
    ],
)
def test_rollout_routes_that_cannot_be_are_refused(routes, message):
    with pytest.raises(DataError, match=message):
        dataclasses.replace(two_turns(), routes=routes)


def test_records_pickle_round_trip():
    rollout = two_turns()
    group = make_group("g", make_prompt(), (rollout,))
    again = pickle.loads(pickle.dumps(group))
    assert again.prompt.token_ids.tolist() == group.prompt.token_ids.tolist()
    assert again.rollouts[0].rollout_logprobs.tolist() == rollout.rollout_logprobs.tolist()
    assert again.rollouts[0].verdict == rollout.verdict
    assert again.rollouts[0].spans[1].policy_version == 7
