"""Samples that are written, reported in parts, and finished by another engine."""

import contextlib
import copy
import pickle

import numpy as np
import pytest

from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason, Span, SpanSource
from rlhf_rollout.engines.remote_engine import Report
from rlhf_rollout.engines.requests import StalledError, rest_of
from rlhf_rollout.protocols import Completion, Draft, SamplingParams
from rlhf_rollout.router import _MAX_ATTEMPTS, EngineRouter
from simulated import simulate


def rows(*numbers):
    return np.array(numbers, np.uint8).reshape(-1, 1, 1)


def write(draft, version, *token_ids):
    draft.go_on(version)
    for token in token_ids:
        draft.token_ids.append(token)
        draft.logprobs.append(-token / 10)


def spans(draft, num_prompt_tokens=2):
    found = draft.completion(num_prompt_tokens).spans
    return [(span.policy_version, span.token_ids.tolist(), span.logprobs.tolist()) for span in found]


def test_spans_are_the_versions_that_wrote_something():
    draft = Draft(finish_reason=FinishReason.STOP)
    draft.go_on(1)
    write(draft, 2, 5)
    write(draft, 2, 10)
    draft.go_on(3)
    write(draft, 4, 20)
    assert spans(draft) == [(2, [5, 10], [-0.5, -1.0]), (4, [20], [-2.0])]
    empty = Draft(finish_reason=FinishReason.LENGTH)
    empty.go_on(6)
    assert spans(empty) == [(6, [], [])]


def test_reports_hold_the_newest_token_back_until_it_is_known_not_to_be_the_last():
    there, here = Draft(), Draft()
    heard = []

    def report():
        new = Report()
        new.add(there.after(len(here.token_ids), len(here.routes)))
        new.give_to([here])
        heard.append(list(here.token_ids))

    report()
    write(there, 3, 1, 2)
    there.routes.append(rows(7, 8, 9))
    report()
    report()
    write(there, 4, 3)
    there.num_cached_tokens = 1
    there.routes.append(rows(10))
    report()
    # The log-prob of a token may come after it.
    there.token_ids.append(4)
    report()
    there.logprobs.append(-0.4)
    there.routes.append(rows(11))
    there.finish_reason = FinishReason.STOP
    report()
    assert heard == [[], [1], [1], [1, 2], [1, 2], [1, 2, 3, 4]]
    found = here.completion(2)
    assert spans(here) == [(3, [1, 2], pytest.approx([-0.1, -0.2])), (4, [3, 4], pytest.approx([-0.3, -0.4]))]
    assert found.routes[:, 0, 0].tolist() == [7, 8, 9, 10, 11]
    assert (found.finish_reason, found.num_cached_tokens) == (FinishReason.STOP, 1)


def test_report_gives_each_draft_its_own_part_and_leaves_out_what_has_ended_or_is_unknown():
    parts = [
        Draft([1, 2], [-0.5, -1.5], [(0, 3)], [rows(7), rows(8, 9)], num_cached_tokens=5),
        Draft([3], [-2.5], [(0, 3)], [rows(4)]),
        Draft(),
        Draft([4, 5], [-3.5, -4.5], [(0, 3), (2, 4)], [rows(5)], finish_reason=FinishReason.LENGTH),
    ]
    report = Report()
    for part in parts:
        report.add(part)
    whole = Draft([6], [-5.5], [(0, 2)], finish_reason=None, num_cached_tokens=1)
    old = Draft([8, 9], [-6.5, -7.5], [(0, 3)], num_cached_tokens=2)
    last = Draft([10], [-8.5], [(0, 3)])
    assert pickle.loads(pickle.dumps(report)).give_to([whole, None, old, last])
    assert (whole.token_ids.tolist(), whole.logprobs.tolist()) == ([6, 1, 2], [-5.5, -0.5, -1.5])
    assert (whole.versions, whole.num_cached_tokens, whole.finish_reason) == ([(0, 3)], 5, None)
    assert [part[:, 0, 0].tolist() for part in whole.routes] == [[7], [8, 9]]
    assert (old.token_ids.tolist(), old.versions, old.num_cached_tokens) == ([8, 9], [(0, 3)], 2)
    assert (last.token_ids.tolist(), last.logprobs.tolist()) == ([10, 4, 5], [-8.5, -3.5, -4.5])
    assert (last.versions, last.finish_reason) == ([(0, 3), (2, 4)], FinishReason.LENGTH)
    assert ([part[:, 0, 0].tolist() for part in last.routes], last.num_cached_tokens) == ([[5]], None)
    again = Report()
    again.add(Draft([], [], [(0, 3)]))
    assert not again.give_to([old])


def test_report_leaves_out_versions_of_which_no_token_is_known_yet():
    there = Draft()
    write(there, 3, 1, 2, 3)
    write(there, 4, 4, 5)
    assert there.after(0, 0).versions == [(0, 3), (3, 4)]
    there = Draft([1, 2, 3], [-1.0] * 3, [(0, 3)])
    write(there, 4, 4)
    assert there.after(0, 0).versions == [(0, 3), (3, 4)] and there.after(0, 0).token_ids.tolist() == [1, 2, 3]
    there = Draft([1, 2, 3], [-1.0] * 3, [(0, 3), (3, 4)])
    assert there.after(0, 0).versions == [(0, 3)] and there.after(0, 0).token_ids.tolist() == [1, 2]


def test_sample_and_completion_are_whole_in_another_process():
    there = Draft(
        [1, 2, 3], [-0.5, -1.5, -2.5], [(0, 3), (2, 4)], [rows(7), rows(8, 9, 5)], 2, FinishReason.STOP, (4, 3, 2)
    )
    for here in (pickle.loads(pickle.dumps(there)), copy.deepcopy(there)):
        assert spans(here) == [(3, [1, 2], [-0.5, -1.5]), (4, [3], [-2.5])]
        assert (here.num_cached_tokens, here.finish_reason, here.drafts) == (2, FinishReason.STOP, (4, 3, 2))
        assert [part[:, 0, 0].tolist() for part in here.routes] == [[7], [8, 9, 5]]
        write(here, 4, 4)
        assert (len(here.token_ids), len(there.token_ids), len(there.versions)) == (4, 3, 2)
    found = pickle.loads(pickle.dumps(there.completion(2)))
    parts = [
        (span.source, span.policy_version, span.token_ids.tolist(), span.logprobs.tolist()) for span in found.spans
    ]
    assert parts == [(SpanSource.POLICY, 3, [1, 2], [-0.5, -1.5]), (SpanSource.POLICY, 4, [3], [-2.5])]
    assert (found.num_cached_tokens, found.finish_reason, found.drafts) == (2, FinishReason.STOP, (4, 3, 2))
    assert found.routes[:, 0, 0].tolist() == [7, 8, 9, 5]
    empty = pickle.loads(pickle.dumps(Draft()))
    assert (list(empty.token_ids), list(empty.logprobs), empty.versions, empty.finish_reason) == ([], [], [], None)


@pytest.mark.parametrize(
    ("numbers", "found"), [([7, 8, 9], [7, 8, 9]), ([7, 8], None), ([7, 8, 9, 10], None), ([], None)]
)
def test_completion_has_routes_if_there_is_one_for_each_token_but_the_last(numbers, found):
    draft = Draft([1, 2], [-1.0] * 2, [(0, 3)], [rows(number) for number in numbers], finish_reason=FinishReason.STOP)
    routes = draft.completion(2).routes
    assert (None if routes is None else routes[:, 0, 0].tolist()) == found


def test_answer_without_a_token_has_no_routes():
    assert Draft(versions=[(0, 3)], finish_reason=FinishReason.LENGTH).completion(1).routes is None


def test_reopened_draft_has_no_routes_of_lost_tokens_and_no_end_by_an_abort():
    draft = Draft([1, 2], [-1.0] * 2, [(0, 3)], [rows(7, 8), rows(9, 10, 11)], finish_reason=FinishReason.ABORT)
    draft.reopen(2)
    assert np.concatenate(draft.routes)[:, 0, 0].tolist() == [7, 8, 9]
    assert draft.finish_reason is None
    draft.finish_reason = FinishReason.LENGTH
    draft.reopen(2)
    assert np.concatenate(draft.routes)[:, 0, 0].tolist() == [7, 8, 9]
    assert draft.finish_reason is FinishReason.LENGTH


def test_rest_of_a_sample_has_the_rest_of_the_budget_and_other_random_numbers():
    sampling = SamplingParams(num_samples=4, max_tokens=10, min_tokens=3, temperature=0.7, seed=1)
    whole = rest_of(sampling, 0, 77)
    assert (whole.num_samples, whole.max_tokens, whole.min_tokens, whole.seed) == (1, 10, 3, 77)
    rests = [rest_of(sampling, size, 77) for size in (1, 2, 5)]
    assert [(rest.max_tokens, rest.min_tokens, rest.temperature) for rest in rests] == [
        (9, 2, 0.7),
        (8, 1, 0.7),
        (5, 0, 0.7),
    ]
    assert len({77, *(rest.seed for rest in rests)}) == 4
    assert rest_of(sampling, 5, None).seed is None


class Stumbling:
    """Fails each time after as many tokens as `sizes` say."""

    def __init__(self, sizes, finishes=False):
        self.sizes = list(sizes)
        self.finishes = finishes
        self.begun = []

    async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
        self.begun.append([len(draft.token_ids) for draft in drafts])
        size = self.sizes.pop(0) if self.sizes else 0
        for draft in drafts:
            write(draft, 1, *[9] * size)
            draft.finish_reason = FinishReason.STOP if self.finishes else None
        raise EngineError("gone")


def ask(engine):
    return simulate(EngineRouter([engine]).generate(np.array([4, 5]), SamplingParams(num_samples=2, max_tokens=999)))


def test_router_asks_as_long_as_answers_grow_and_then_twice():
    engine = Stumbling([3, 1, 2, 0, 4])
    with pytest.raises(EngineError, match="gone"):
        ask(engine)
    assert engine.begun == [[0, 0], [3, 3], [4, 4], [6, 6], [6, 6], [10, 10], [10, 10]]


def test_router_does_not_ask_for_ever():
    engine = Stumbling([1] * 999)
    with pytest.raises(EngineError, match="gone"):
        ask(engine)
    assert len(engine.begun) == _MAX_ATTEMPTS


def test_router_takes_answers_that_were_finished_before_the_engine_failed():
    engine = Stumbling([3], finishes=True)
    completions = ask(engine)
    assert [completion.token_ids.tolist() for completion in completions] == [[9, 9, 9]] * 2
    assert len(engine.begun) == 1


class Stalling(Stumbling):
    """Writes nothing from some token on."""

    async def generate(self, *arguments, **options):
        with contextlib.suppress(EngineError):
            await super().generate(*arguments, **options)
        raise StalledError("a request took longer than 5 s without a new token")


def test_answer_that_no_engine_gets_further_with_is_cut_by_its_length():
    engine = Stalling([3, 2])
    completions = ask(engine)
    assert [completion.token_ids.tolist() for completion in completions] == [[9] * 5] * 2
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    assert engine.begun == [[0, 0], [3, 3], [5, 5], [5, 5]]


def test_answer_of_which_nothing_is_written_fails():
    with pytest.raises(EngineError, match="without a new token"):
        ask(Stalling([]))


class Uneven:
    """Writes one token of the first sample, which ends by `reason`, and after `late` attempts one of the second."""

    def __init__(self, reason, error, late=99):
        self.reason = reason
        self.error = error
        self.late = late
        self.num_asked = 0

    async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
        first, second = drafts
        if not first.token_ids:
            write(first, 1, 7)
            first.finish_reason = self.reason
        if self.num_asked == self.late:
            write(second, 1, 8)
        self.num_asked += 1
        raise self.error


GONE, STALLED = EngineError("gone"), StalledError("no new token")


@pytest.mark.parametrize("error", [GONE, STALLED])
def test_request_fails_when_nothing_is_written_of_one_of_its_answers(error):
    engine = Uneven(FinishReason.STOP, error)
    with pytest.raises(EngineError, match=str(error)):
        ask(engine)
    assert engine.num_asked == 3  # one that gets further, and two that do not


@pytest.mark.parametrize(
    ("reason", "told"), [(FinishReason.STOP, FinishReason.STOP), (FinishReason.ABORT, FinishReason.LENGTH)]
)
def test_answers_that_are_cut_keep_the_end_that_the_policy_chose(reason, told):
    engine = Uneven(reason, STALLED, late=1)
    completions = ask(engine)
    assert engine.num_asked == 4  # the two attempts that get further, and two that do not
    assert [completion.token_ids.tolist() for completion in completions] == [[7], [8]]
    assert [completion.finish_reason for completion in completions] == [told, FinishReason.LENGTH]


def test_engines_that_know_conversations_are_told_theirs_and_others_are_not():
    class Knowing:
        takes_conversation = True

        async def generate(self, token_ids, sampling, **options):
            told.append(options.get("conversation"))
            return [Completion((Span(SpanSource.POLICY, [9], [-1.0], 1),), FinishReason.STOP, num_cached_tokens=1)]

    told = []
    router = EngineRouter([Knowing()])
    for conversation in ("c", None):
        simulate(router.generate(np.array([4, 5, 6]), SamplingParams(), conversation=conversation))
    assert told == ["c", None]
    assert router.prompt_tokens.tolist() == [6, 2]  # two prompts of three tokens, one of which was cached
