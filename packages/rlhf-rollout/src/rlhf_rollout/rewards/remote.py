"""Rewards from HTTP servers: rollouts of several prompts share requests, which are retried on other servers.

A server takes a POST of `{"query": [...], "prompts": [...], "labels": [...]}`, one text per rollout, with further lists
under the run's extra keys, and answers
`{"rewards": [one number per query]}` and optionally `scores`, `extra_logs` and `verdicts`, as a reward function does.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import httpx

from rlhf_data.errors import RewardError
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.http.batcher import Batcher, Sample
from rlhf_rollout.http.breaker import Breaker, Failure
from rlhf_rollout.http.client import Client, RequestFailure, check_passing, insist, unusable
from rlhf_rollout.http.tokens import TOKEN_VARIABLE, check_url
from rlhf_rollout.rewards.function import NUM_TRIED, check_finite, extra_cells, reward_arguments, trial_samples
from rlhf_rollout.rewards.outcomes import judge
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions
from rlhf_rollout.rewards.user_function import Scored, read_result

_MAX_FAILURES = 4  # slow failures in a row after which a server is asked only now and then
_WANTED = "the server must accept a POST of query, prompts and labels; check the path, such as /get_reward"
_SKELETON = 'answer {"rewards": [one number per query]}'


class RemoteReward:
    """A `RewardFunction` that asks equivalent servers in turn. Failures become verdicts.

    After a temporary failure (no connection, a timeout, status 408, 425, 429 or 5xx) a request is repeated on the next
    server, after a pause; see `insist`. A second timeout ends the tries. If a server answers a batch with
    an error that one sample may have caused, with an unusable answer, or not in time, the samples are sent one by one,
    so that only the samples at fault get a failed verdict. A server that fails slowly several times in a row is asked
    only now and then while there are others. Use it from one event loop.

    Args:
        urls: full addresses of the requests, one per server.
        calls: how they are asked. `timeout_s` is the limit of one request, from its start to the end of the answer.
        num_retries: further tries of a request.
        transport: replaces the network, for tests.

    Raises:
        ConfigError: a URL is invalid, or `tokens_of` refuses the token in the environment variable
            RLHF_REMOTE_RM_TOKEN.
    """

    def __init__(
        self,
        urls: Sequence[str],
        calls: CallOptions = DEFAULT_CALLS,
        *,
        num_retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._urls = [check_url(url) for url in urls]
        self._client = Client(self._urls, timeout_s=calls.timeout_s, transport=transport)
        self._num_retries = num_retries
        self._turns = itertools.count()
        self._breakers = [Breaker(_MAX_FAILURES) for _ in urls]
        judging = partial(judge, ask=self._ask, success_threshold=calls.success_threshold)
        self._batcher = Batcher(judging, max_batch=calls.batch_size)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        return await asyncio.gather(*[self._batcher.submit((prompt, rollout)) for rollout in rollouts])

    async def close(self) -> None:
        """Cancel the requests in flight and close the connections."""
        await self._batcher.close()
        await self._client.close()

    async def _ask(self, samples: Sequence[Sample], failure: Failure | None) -> Scored | Failure:
        """Return the rewards of the first server that gives them, or the failure of the last try."""
        turn = next(self._turns)
        # A call for a single sample follows a failed one for the batch, which has used up the patience already.
        num_retries = self._num_retries if failure is None else min(self._num_retries, 1)
        are_hung = all(breaker.is_open for breaker in self._breakers)
        if are_hung or (failure is not None and failure.kind is VerdictKind.TIMEOUT):
            num_retries = 0

        async def ask(attempt: int) -> Scored | RequestFailure:
            index = self._choose(turn + attempt)
            started = time.monotonic()
            outcome = await self.ask_server(self._urls[index], samples)
            is_passing = isinstance(outcome, RequestFailure) and outcome.passing
            self._breakers[index].note(outcome if is_passing else None, time.monotonic() - started)
            return outcome

        outcome, _ = await insist(ask, num_retries=num_retries)
        if not (isinstance(outcome, RequestFailure) and outcome.kind is VerdictKind.TIMEOUT):
            return outcome
        return replace(outcome, of_sample=not are_hung)

    def _choose(self, turn: int) -> int:
        """Return the index of the first server from `turn` on that is not held back, or of the first if all are."""
        order = [(turn + step) % len(self._urls) for step in range(len(self._urls))]
        return next((index for index in order if self._breakers[index].refusal() is None), order[0])

    async def ask_server(self, url: str, samples: Sequence[Sample]) -> Scored | RequestFailure:
        """Send one request to one server."""
        queries, prompts, labels = reward_arguments(samples)
        body = {"query": queries, "prompts": prompts, "labels": labels}
        body |= extra_cells([prompt for prompt, _ in samples])
        response = await self._client.send(url, body)
        if isinstance(response, RequestFailure):
            return response
        try:
            return read_result(response.json(), len(samples), giver="the reward server")
        except (ValueError, RecursionError):
            problem = f"no JSON: {self._client.shown(response.text)}"
        except RewardError as error:
            problem = str(error).partition("\n")[0]  # its hint is about functions
        return unusable(url, response, problem)


def check_reward_server(
    urls: Sequence[str],
    prompts: Sequence[Prompt] = (),
    calls: CallOptions = DEFAULT_CALLS,
) -> str | None:
    """Ask each server once, before anything expensive starts. Must not be called from within an event loop.

    The request holds each of the first four `prompts` twice: with its label and with an empty text as the response.
    Without prompts only the URLs are checked.

    Returns:
        The problem of a server that was late or reported a temporary error; None without a problem.

    Raises:
        ConfigError: `RemoteReward` refuses the arguments, or a server cannot be reached.
        RewardError: a server refuses the request, or its answer has no `rewards`, another number of rewards than
            queries, or a reward that is not finite.
    """
    samples = trial_samples(prompts[:NUM_TRIED])

    async def ask_all() -> list[Scored | RequestFailure]:
        reward = RemoteReward(urls, calls)
        try:
            return await asyncio.gather(*[reward.ask_server(url, samples) for url in urls if samples])
        finally:
            await reward.close()

    problems = []
    for url, outcome in zip(urls, asyncio.run(ask_all()), strict=bool(samples)):
        if isinstance(outcome, Scored):
            check_finite(url, outcome)
        else:
            check_passing(
                url, outcome, giver="reward server", wanted=_WANTED, skeleton=_SKELETON, variable=TOKEN_VARIABLE
            )
            problems.append(outcome.detail)
    return "; ".join(problems) or None
