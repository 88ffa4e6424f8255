"""Routes on their way from completions to rollouts: of one turn, of turns and of rewritten ones."""

import asyncio
import dataclasses

import numpy as np
import pytest

from record_testing import make_prompt
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.records import FinishReason, SpanSource
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.agents.single_turn import SingleTurn
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter

decode = ByteTokenizer().decode


class TellingEngine(FakeEngine):
    """Writes 11 12 0, and gives each token but the last the route (token, number of the request), if asked to tell."""

    def __init__(self, tells=(True, True, True)):
        super().__init__(script=lambda prompt, seed: [11, 12, 0])
        self.tells = list(tells)
        self.number = 0

    async def _complete(self, token_ids, sampling, drafts):
        self.number += 1
        found = []
        for completion in await super()._complete(token_ids, sampling, drafts):
            tokens = np.concatenate([token_ids, completion.token_ids])[:-1]
            routes = np.stack([tokens, np.full_like(tokens, self.number)], axis=-1)[:, None]
            found.append(dataclasses.replace(completion, routes=routes if self.tells[self.number - 1] else None))
        return found


def routes_of(rollout):
    return [] if rollout.routes is None else [tuple(row) for [row] in rollout.routes.tolist()]


def test_rollouts_of_one_turn_have_the_routes_of_their_completions():
    prompt = make_prompt("ab")
    run = SingleTurn(EngineRouter([TellingEngine()]), decode).run(prompt, SamplingParams(num_samples=2), "g")
    tokens = [*prompt.token_ids.tolist(), 11, 12]
    for episode in asyncio.run(run):
        [rollout] = episode.rollouts
        assert routes_of(rollout) == [(token, 1) for token in tokens]


def recorded(engine, *requests):
    """Rollouts of an episode whose requests are functions of the tokens so far."""
    recorder = EpisodeRecorder(
        EngineRouter([engine]), make_prompt("ab"), SamplingParams(), name="e", group_id="g",
        limits=EpisodeLimits(), decode=decode,
    )  # fmt: skip

    async def episode():
        for request in requests:
            recorder.add(await recorder.sample(request(recorder.token_ids)))
        return recorder.episode((), None).rollouts

    return asyncio.run(episode())


def test_later_turns_add_the_routes_of_what_is_new_and_keep_those_that_answers_were_drawn_with():
    [rollout] = recorded(TellingEngine(), lambda seen: [2, 3], lambda seen: [*seen, 7, 8], lambda seen: [*seen, 9])
    assert rollout.token_ids.tolist() == [2, 3, 11, 12, 0, 7, 8, 11, 12, 0, 9, 11, 12, 0]
    first = [(2, 1), (3, 1), (11, 1), (12, 1)]
    second = [(0, 2), (7, 2), (8, 2), (11, 2), (12, 2)]
    assert routes_of(rollout) == [*first, *second, (0, 3), (9, 3), (11, 3), (12, 3)]


@pytest.mark.parametrize(
    ("tells", "expected"),
    [
        ((False, True), [(2, 2), (3, 2), (11, 2), (12, 2), (0, 2), (7, 2), (11, 2), (12, 2)]),
        ((True, False), [(2, 1), (3, 1), (11, 1), (12, 1)]),
        ((False, False), []),
    ],
)
def test_turns_without_routes_leave_those_of_the_others(tells, expected):
    [rollout] = recorded(TellingEngine(tells), lambda seen: [2, 3], lambda seen: [*seen, 7])
    assert routes_of(rollout) == expected


def test_a_history_that_was_rewritten_has_the_routes_of_its_own_request():
    one, other = recorded(TellingEngine(), lambda seen: [2, 3], lambda seen: [2, 4, *seen[2:]])
    assert routes_of(one) == [(2, 1), (3, 1), (11, 1), (12, 1)]
    assert other.spans[0].source is SpanSource.PROMPT
    assert routes_of(other) == [(2, 2), (4, 2), (11, 2), (12, 2), (0, 2), (11, 2), (12, 2)]


def test_completion_with_routes_that_cannot_be_is_refused():
    completion = Completion.single([1], [0.0], FinishReason.STOP, 0)
    assert dataclasses.replace(completion, routes=[[[1]]]).routes.dtype == np.uint8
    with pytest.raises(DataError, match=r"Completion.routes must be numbers of experts"):
        dataclasses.replace(completion, routes=[[-1]])


@pytest.mark.parametrize("kind", ["fake", "http", "transformers"])
def test_only_vllm_tells_routes(kind):
    spec = EngineSpec(model="m", return_routes=True, base_url="http://127.0.0.1:1" if kind == "http" else None)
    with pytest.raises(ConfigError, match=rf"(?s)engine {kind} does not tell .*hint: use engine vllm"):
        build_engine(kind, spec)
