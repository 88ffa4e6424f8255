"""Records: views over spans, validation where they are made, pickling."""

import pickle

import numpy as np
import pytest

from rlhf_data.errors import DataError
from rlhf_data.records import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_data.testing import make_prompt, make_rollout


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
    assert rollout.loss_mask.tolist() == [False, False, True, False, False, True]
    assert rollout.rollout_logprobs.tolist() == [0, 0, -0.5, 0, 0, -0.25]
    assert (rollout.num_tokens, rollout.num_response_tokens, rollout.policy_version) == (6, 2, 7)


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


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_verdict_has_a_reward_exactly_when_the_scorer_did_not_fail(kind):
    with pytest.raises(DataError, match=f"a verdict `{kind}`"):
        Verdict(kind, 1.0 if kind.failed else None)


def test_verdict_score_is_the_reward_unless_given():
    assert Verdict(VerdictKind.OK, 0.5).score == 0.5
    assert Verdict(VerdictKind.OK, 0.5, 1.0).score == 1.0
    assert Verdict(VerdictKind.TIMEOUT).score is None
    with pytest.raises(DataError, match="the reward is nan"):
        Verdict(VerdictKind.OK, float("nan"))


def test_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="'p' has no tokens"):
        Prompt("p", [], "")


def test_rollout_group_refuses_a_stray():
    prompt = make_prompt()
    with pytest.raises(DataError, match=r"\['other/0'\] do not belong to group 'g0'"):
        RolloutGroup("g0", prompt, (make_rollout(prompt, "4"), make_rollout(prompt, "5", group_id="other")))


def test_records_pickle_round_trip():
    rollout = two_turns()
    group = RolloutGroup("g", make_prompt(), (rollout,))
    again = pickle.loads(pickle.dumps(group))
    assert again.prompt.token_ids.tolist() == group.prompt.token_ids.tolist()
    assert again.rollouts[0].rollout_logprobs.tolist() == rollout.rollout_logprobs.tolist()
    assert again.rollouts[0].verdict == rollout.verdict
    assert again.rollouts[0].spans[1].policy_version == 7
