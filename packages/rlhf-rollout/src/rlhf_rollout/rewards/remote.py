"""Rewards from HTTP servers: rollouts of several prompts share requests, which are retried on other servers.

A server takes a POST of `{"query": [...], "prompts": [...], "labels": [...]}`, one text per rollout, with further lists
under the run's extra keys, and answers
`{"rewards": [one number per query]}` and optionally `scores`, `extra_logs` and `verdicts`, as a reward function does.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_data.safety import MASK, without_secrets
from rlhf_rollout import answers
from rlhf_rollout.rewards.batcher import Batcher, Sample
from rlhf_rollout.rewards.breaker import Breaker
from rlhf_rollout.rewards.function import check_finite, extra_cells, reward_arguments, trial_samples
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.user_function import SUCCESS_THRESHOLD, Scored, read_result
from rlhf_rollout.tokens import TOKEN_VARIABLE, tokens_of, unproxied

_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)  # another try may succeed
_STATUS_OF_A_SAMPLE = (400, 413, 422, 500)  # one sample of a batch may be the reason for these
_MAX_TIMEOUTS = 2
_MAX_FAILURES = 4  # slow failures in a row after which a server is asked only now and then
_MAX_RETRY_WAIT_S = 30.0
_CONNECT_TIMEOUT_S = 10.0
_SKELETON = 'answer {"rewards": [one number per query]}'


@dataclass(frozen=True, slots=True)
class RequestFailure(Failure):
    """A request that gave no rewards.

    Attributes:
        passing: whether another try may succeed.
        status: HTTP status of the answer; None without an answer.
        retry_after: what the server says about when to try again.
    """

    of_sample: bool = False
    passing: bool = False
    status: int | None = None
    retry_after: str = ""


class RemoteReward:
    """A `RewardFunction` that asks equivalent servers in turn. Failures become verdicts.

    After a temporary failure (no connection, a timeout, status 408, 425, 429 or 5xx) a request is repeated on the next
    server. The pause before it doubles each time, and a second timeout ends the tries. If a server answers a batch with
    an error that one sample may have caused, with an unusable answer, or not in time, the samples are sent one by one,
    so that only the samples at fault get a failed verdict. A server that fails slowly several times in a row is asked
    only now and then while there are others. Use it from one event loop.

    Args:
        urls: full addresses of the requests, one per server.
        timeout_s: time limit of one request in seconds, from its start to the end of the answer.
        batch_size: rollouts per request at most; they may belong to different prompts.
        token: sent as a bearer token to the server that it belongs to, see `tokens_of`; None for the value of the
            environment variable RLHF_REMOTE_RM_TOKEN, if set.
        num_retries: further tries of a request.
        retry_wait_s: pause before the first retry; it doubles with each further one, to at most 30 s.
        max_wait_s: seconds that a rollout waits for others at most.
        success_threshold: see `verdict_of`.
        transport: replaces the network, for tests.

    Raises:
        ConfigError: a URL is invalid, a number is not positive, or `tokens_of` refuses the token.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 30.0,
        batch_size: int = 64,
        token: str | None = None,
        num_retries: int = 3,
        retry_wait_s: float = 0.5,
        max_wait_s: float = 0.005,
        success_threshold: float = SUCCESS_THRESHOLD,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._urls = [check_url(url) for url in urls]
        if not urls or timeout_s <= 0 or num_retries < 0:
            raise ConfigError(f"{len(urls)} reward servers, timeout_s {timeout_s} and num_retries {num_retries}")
        self._tokens = tokens_of(self._urls, os.environ.get(TOKEN_VARIABLE, "") if token is None else token)
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._retry_wait_s = retry_wait_s
        self._turns = itertools.count()
        self._breakers = [Breaker(_MAX_FAILURES) for _ in urls]
        self._batcher = Batcher(
            partial(judge, ask=self._ask, success_threshold=success_threshold),
            max_batch=batch_size,
            max_wait_s=max_wait_s,
        )
        self._client = httpx.AsyncClient(
            # Shorter than the request's own limit, so that a server that is not there is told from one that is late.
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s / 2, _CONNECT_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            mounts=unproxied(urls),
        )

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        return await asyncio.gather(*[self._batcher.submit((prompt, rollout)) for rollout in rollouts])

    async def close(self) -> None:
        """Cancel the requests in flight and close the connections."""
        await self._batcher.close()
        await self._client.aclose()

    async def _ask(self, samples: Sequence[Sample], failure: Failure | None) -> Scored | Failure:
        """Return the rewards of the first server that gives them, or the failure of the last try."""
        turn = next(self._turns)
        num_timeouts = 0
        # A call for a single sample follows a failed one for the batch, which has used up the patience already.
        num_retries = self._num_retries if failure is None else min(self._num_retries, 1)
        are_hung = all(breaker.is_open for breaker in self._breakers)
        if are_hung or (failure is not None and failure.kind is VerdictKind.TIMEOUT):
            num_retries = 0
        for attempt in range(num_retries + 1):
            if attempt:
                await asyncio.sleep(min(self._retry_wait_s * 2 ** (attempt - 1), _MAX_RETRY_WAIT_S))
            index = self._choose(turn + attempt)
            started = time.monotonic()
            outcome = await self.ask_server(self._urls[index], samples)
            is_passing = isinstance(outcome, RequestFailure) and outcome.passing
            self._breakers[index].note(outcome if is_passing else None, time.monotonic() - started)
            if not is_passing:
                return outcome
            num_timeouts += outcome.kind is VerdictKind.TIMEOUT
            if num_timeouts == _MAX_TIMEOUTS:
                break
        is_late = outcome.kind is VerdictKind.TIMEOUT
        return replace(outcome, of_sample=not are_hung) if is_late else outcome

    def _choose(self, turn: int) -> int:
        """Return the index of the first server from `turn` on that is not held back, or of the first if all are."""
        order = [(turn + step) % len(self._urls) for step in range(len(self._urls))]
        return next((index for index in order if self._breakers[index].refusal() is None), order[0])

    async def ask_server(self, url: str, samples: Sequence[Sample]) -> Scored | RequestFailure:
        """Send one request to one server."""
        queries, prompts, labels = reward_arguments(samples)
        body = {"query": queries, "prompts": prompts, "labels": labels}
        body |= extra_cells([prompt for prompt, _ in samples])
        token = self._tokens.get(url)
        response = await send(self._client, url, body, token, self._timeout_s)
        if isinstance(response, RequestFailure):
            return response
        try:
            return read_result(response.json(), len(samples), giver="the reward server")
        except (ValueError, RecursionError):
            problem = f"no JSON: {excerpt(response.text, token)}"
        except RewardError as error:
            problem = str(error).partition("\n")[0]  # its hint is about functions
        said = f"{without_secrets(url)}: {problem}"
        return RequestFailure(VerdictKind.CRASH, said, of_sample=True, status=response.status_code)


async def send(
    client: httpx.AsyncClient, url: str, body: Any, token: str | None, timeout_s: float, max_bytes: int | None = None
) -> httpx.Response | RequestFailure:
    """Send one POST request of JSON; return the answer to it if its status is a success.

    Args:
        client: sends the request.
        url: of the request; without its secrets in messages.
        body: of the request.
        token: the bearer token, if any.
        timeout_s: time limit from the start of the request to the end of the answer, in seconds.
        max_bytes: limit of the answer; None for `answers.MAX_BYTES`.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    shown = without_secrets(url)
    try:
        async with asyncio.timeout(timeout_s):  # httpx's timeout limits each read, not the request
            content = json.dumps(body).encode()
            response = await answers.post(client, url, content=content, headers=headers, max_bytes=max_bytes)
    except (TimeoutError, httpx.TimeoutException, httpx.HTTPError) as error:
        is_late = isinstance(error, TimeoutError | httpx.TimeoutException)
        if is_late and not isinstance(error, httpx.ConnectTimeout):
            return RequestFailure(VerdictKind.TIMEOUT, f"{shown}: no answer within {timeout_s:g} s", passing=True)
        problem = f"{shown}: {type(error).__name__}: {' '.join(str(error).split())}"
        return RequestFailure(VerdictKind.CRASH, problem, passing=True)
    status = response.status_code
    if response.is_success:
        return response
    said = f"{shown}: status {status}: {excerpt(response.text, token)}"
    whose = {"passing": status in _PASSING_STATUS, "of_sample": status in _STATUS_OF_A_SAMPLE}
    retry_after = response.headers.get("Retry-After", "")
    return RequestFailure(VerdictKind.CRASH, said, status=status, retry_after=retry_after, **whose)


def check_reward_server(
    urls: Sequence[str],
    prompts: Sequence[Prompt] = (),
    *,
    timeout_s: float = 30.0,
    transport: httpx.AsyncBaseTransport | None = None,
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
    samples = trial_samples(prompts[:4])

    async def ask_all() -> list[Scored | RequestFailure]:
        reward = RemoteReward(urls, timeout_s=timeout_s, transport=transport)
        try:
            return await asyncio.gather(*[reward.ask_server(url, samples) for url in urls if samples])
        finally:
            await reward.close()

    problems = []
    for url, outcome in zip(urls, asyncio.run(ask_all()), strict=bool(samples)):
        if isinstance(outcome, Scored):
            check_finite(url, outcome)
        else:
            check_passing(url, outcome)
            problems.append(outcome.detail)
    return "; ".join(problems) or None


def check_url(
    url: str,
    *,
    giver: str = "reward server",
    example: str = "give one such as http://host:5000/get_reward",
    variable: str = TOKEN_VARIABLE,
) -> str:
    """Return the URL of a `giver`. Raises ConfigError for an invalid URL and for one that holds a password.

    `example` is the hint for an invalid URL, and `variable` the environment variable that a token belongs into.
    """
    shown = without_secrets(url)
    try:
        parsed = httpx.URL(url)
        port = parsed.port
    except httpx.InvalidURL as error:
        raise ConfigError(f"{giver} {shown}: {error}", hint=example) from None
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"{giver} {shown}: port {port} is not within 1 to 65535", hint=example)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{giver} {shown} is no URL", hint=example)
    if parsed.userinfo:
        message = f"the {giver}'s URL at {parsed.host} holds a password"
        raise ConfigError(message, hint=f"set a token in the environment variable {variable} instead")
    return url


def check_passing(
    url: str,
    failure: RequestFailure,
    *,
    giver: str = "reward server",
    wanted: str = "the server must accept a POST of query, prompts and labels; check the path, such as /get_reward",
    variable: str = TOKEN_VARIABLE,
) -> None:
    """Raise ConfigError or RewardError for a failure of a `giver` that another try cannot mend.

    `wanted` is the hint for a request that was refused, and `variable` the environment variable that holds the token.
    """
    if failure.status is None and failure.kind is VerdictKind.CRASH:
        message = f"the {giver} does not answer: {failure.detail}"
        raise ConfigError(message, hint=f"start it, and check that this machine reaches {httpx.URL(url).host}")
    if failure.passing or failure.kind is VerdictKind.TIMEOUT:
        return
    hint = _SKELETON
    if failure.status in (401, 403):
        hint = f"set the token that the server expects in the environment variable {variable}"
    elif failure.status >= 300:
        hint = wanted
    raise RewardError(f"the {giver} refuses the trial request: {failure.detail}", hint=hint)


def excerpt(text: str, token: str | None) -> str:
    """Return the beginning of what a server said, without the secrets of the request."""
    text = without_secrets(" ".join((text.replace(token, MASK) if token else text).split()))
    return text if len(text) <= 200 else text[:200] + " ..."
