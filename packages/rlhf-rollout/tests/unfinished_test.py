"""Samples of groups that are not complete go from one process to another through JSON and a file of arrays."""

import base64
import json

import numpy as np
import pytest

from rlhf_data.records import FinishReason, Prompt
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.unfinished import UnfinishedGroups

PROMPT = np.array([4, 5, 6], np.int32)
SAMPLING = SamplingParams(num_samples=2, seed=3)


def write(draft, version, token_ids, reason=None):
    draft.go_on(version)
    draft.token_ids.extend(token_ids)
    draft.logprobs.extend(-token / 8 for token in token_ids)
    draft.finish_reason = reason


def continued(groups, *group_ids):
    """What another process has of these groups, to which JSON values and arrays come."""
    arrays = []

    def encode(value):
        arrays.append(value if isinstance(value, np.ndarray) else value.copy())
        return {"at": len(arrays) - 1}

    text = json.dumps(groups.state(group_ids), default=encode)
    other = UnfinishedGroups()
    other.restore(json.loads(text, object_hook=lambda value: arrays[value["at"]] if "at" in value else value))
    return other


def told(draft):
    return (
        draft.token_ids.tolist(),
        draft.logprobs.tolist(),
        draft.versions,
        draft.finish_reason,
        draft.num_cached_tokens,
    )


def test_samples_go_on_behind_what_is_known():
    groups = UnfinishedGroups()
    first, second = groups.drafts("g", None, PROMPT, SAMPLING)
    write(first, 1, [7, 8])
    write(first, 2, [9, 10])
    write(second, 1, [1, 2], FinishReason.STOP)
    second.num_cached_tokens = 2
    found = continued(groups, "g").drafts("g", None, PROMPT.tolist(), SAMPLING)
    assert told(found[0]) == ([7, 8, 9, 10], [-7 / 8, -1.0, -9 / 8, -10 / 8], [(0, 1), (2, 2)], None, None)
    assert told(found[1]) == ([1, 2], [-1 / 8, -2 / 8], [(0, 1)], FinishReason.STOP, 2)
    assert all(draft.routes == [] for draft in found)


def test_experts_of_tokens_that_are_drawn_again_are_dropped():
    groups = UnfinishedGroups()
    draft, _ = groups.drafts("g", None, PROMPT, SAMPLING)
    write(draft, 1, [7, 8])
    routes = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    draft.routes += [routes[:4], routes[4:]]
    found, _ = continued(groups, "g").drafts("g", None, PROMPT, SAMPLING)
    [kept] = found.routes
    assert kept.tolist() == routes[:4].tolist()  # of the prompt and the first token


def test_state_is_that_of_its_time_though_samples_grow():
    groups = UnfinishedGroups()
    draft, _ = groups.drafts("g", None, PROMPT, SAMPLING)
    write(draft, 1, [7, 8])
    draft.token_ids.append(9)  # its log-prob comes later
    draft.go_on(5)
    state = groups.state(["g"])
    draft.logprobs.append(-9 / 8)
    write(draft, 2, [10, 11], FinishReason.STOP)
    other = UnfinishedGroups()
    other.restore(state)
    assert told(other.drafts("g", None, PROMPT, SAMPLING)[0]) == ([7, 8], [-7 / 8, -1.0], [(0, 1)], None, None)
    assert told(draft)[0] == [7, 8, 9, 10, 11]


def test_state_of_an_older_version_has_numbers_in_base64():
    def packed(values, dtype):
        data = base64.b64encode(np.array(values, dtype).tobytes()).decode()
        return {"shape": list(np.shape(values)), "dtype": dtype, "data": data}

    groups = UnfinishedGroups()
    groups.drafts("g", None, PROMPT, SAMPLING)
    state = json.loads(json.dumps({"g": [[groups.state(["g"])["g"][0][0], []]]}))
    sample = {"versions": [[0, 1], [1, 2]], "num_cached_tokens": 3, "finish_reason": "stop"}
    numbers = {"token_ids": packed([7, 8], "int32"), "logprobs": packed([-0.5, -1.5], "float32")}
    state["g"][0][1].append({**sample, **numbers, "routes": packed([[[1]], [[2]]], "uint8")})
    other = UnfinishedGroups()
    other.restore(state)
    [draft] = other.drafts("g", None, PROMPT, SAMPLING)
    assert told(draft) == ([7, 8], [-0.5, -1.5], [(0, 1), (1, 2)], FinishReason.STOP, 3)
    assert [rows.tolist() for rows in draft.routes] == [[[[1]], [[2]]]]


@pytest.mark.parametrize(
    ("group_id", "conversation", "token_ids", "sampling"),
    [
        ("h", "c", PROMPT, SAMPLING),
        ("g", "d", PROMPT, SAMPLING),
        ("g", "c", PROMPT[:2], SAMPLING),
        ("g", "c", PROMPT, SamplingParams(num_samples=2, seed=4)),
        ("g", "c", PROMPT, SamplingParams(num_samples=2, seed=3, temperature=0.5)),
        (None, "c", PROMPT, SAMPLING),
    ],
)
def test_other_requests_begin_anew(group_id, conversation, token_ids, sampling):
    groups = UnfinishedGroups()
    write(groups.drafts("g", "c", PROMPT, SAMPLING)[0], 1, [7])
    other = continued(groups, "g")
    assert [draft.token_ids.tolist() for draft in other.drafts(group_id, conversation, token_ids, sampling)] == [[], []]
    assert other.drafts("g", "c", PROMPT, SAMPLING)[0].token_ids.tolist() == [7]


def test_equal_requests_have_a_sample_each():
    groups = UnfinishedGroups()
    for token in (7, 8):
        write(groups.drafts("g", "c", PROMPT, SAMPLING)[0], 1, [token])
    other = continued(groups, "g")
    found = [other.drafts("g", "c", PROMPT, SAMPLING)[0].token_ids.tolist() for _ in range(3)]
    assert found == [[7], [8], []]


def test_what_nobody_has_asked_for_again_goes_on_to_the_next_process():
    groups = UnfinishedGroups()
    write(groups.drafts("g", None, PROMPT, SAMPLING)[0], 1, [7])
    later = continued(continued(groups, "g"), "g")
    assert later.drafts("g", None, PROMPT, SAMPLING)[0].token_ids.tolist() == [7]


def test_complete_groups_and_requests_without_a_group_are_not_kept():
    groups = UnfinishedGroups()
    groups.drafts("g", None, PROMPT, SAMPLING)
    groups.drafts("h", None, PROMPT, SAMPLING)
    groups.drafts(None, None, PROMPT, SAMPLING)
    other = continued(groups, "g", "h")
    for one in (groups, other):
        one.forget("g")
        one.forget("unknown")
        state = one.state(["g", "h"])
        assert (len(state["g"]), len(state["h"])) == (0, 1)


class Counting(FakeEngine):
    num_asked = 0

    async def generate(self, *arguments, **options):
        self.num_asked += 1
        return await super().generate(*arguments, **options)


async def ask(router, *conversation):
    recorder = EpisodeRecorder(
        router,
        Prompt("p", PROMPT, "p"),
        SamplingParams(max_tokens=8),
        name="g/0",
        group_id="g",
        limits=EpisodeLimits(max_turns=9, max_length=999, max_seconds=60),
        decode=str,
    )
    answers = []
    token_ids = PROMPT.tolist()
    for said in conversation:
        token_ids += said
        completion = await recorder.generate(token_ids)
        answers.append(completion.token_ids.tolist())
        token_ids += answers[-1]
    return answers


async def test_episode_that_begins_again_has_its_answers_until_its_environment_says_something_else():
    router = EngineRouter([Counting()])
    had = await ask(router, [1], [2], [3])
    engine = Counting()
    again = EngineRouter([engine])
    again.unfinished = continued(router.unfinished, "g")
    assert (await ask(again, [1], [2], [9]))[:2] == had[:2]
    assert engine.num_asked == 1
