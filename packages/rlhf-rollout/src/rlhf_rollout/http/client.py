"""The client of all HTTP servers: which token a request carries, how long it may take, and when it is sent again."""

import asyncio
import itertools
import json
import math
import os
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import httpx

from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_data.safety import MASK, without_secrets
from rlhf_rollout.http.breaker import Failure
from rlhf_rollout.http.tokens import TOKEN_VARIABLE, origin, tokens_of, unproxied

MAX_BYTES = 2**28  # largest answer: a server that is not trusted could fill the memory
_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)  # another try may succeed
_STATUS_OF_A_SAMPLE = (400, 413, 422, 500)  # one sample of a batch may be the reason for these
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0  # less than uvicorn's 5 s, so that no call meets a connection that the server is closing
_MAX_TIMEOUTS = 2
_MAX_PAUSE_S = 30.0
_MAX_DOUBLINGS = 60  # more than it ever takes, and a number that a float can hold
_MAX_EXCERPT = 300

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure(Failure):
    """A request without an answer that can be used.

    Attributes:
        problem: the detail without the URL.
        passing: whether another try may succeed.
        response: the answer; None if there is none.
    """

    of_sample: bool = False
    problem: str = ""
    passing: bool = False
    response: httpx.Response | None = None

    @property
    def status(self) -> int | None:
        """The answer's HTTP status; None without an answer."""
        return self.response.status_code if self.response is not None else None


Outcome = httpx.Response | RequestFailure
Headers = dict[str, str] | None
TimeLimit = AbstractAsyncContextManager[Any] | None
Connections = dict[asyncio.AbstractEventLoop, httpx.AsyncClient]


@dataclass(eq=False, repr=False)
class Client:
    """Sends JSON to servers. May be used from several event loops, which have connections of their own.

    Args:
        urls: the servers' addresses. Those on this machine are asked without a proxy.
        timeout_s: time limit of a request in seconds, from its start to the end of the answer.
        variable: the environment variable that holds the bearer token, see `tokens_of`.
        token: replaces the variable's value if not None.
        max_bytes: limit of an answer when unpacked; None for `MAX_BYTES`.
        transport: replaces the network, for tests.

    Raises:
        ConfigError: `tokens_of` refuses the token.
    """

    urls: Sequence[str]
    _: KW_ONLY
    timeout_s: float
    variable: str = TOKEN_VARIABLE
    token: str | None = None
    max_bytes: int | None = None
    transport: httpx.AsyncBaseTransport | None = None
    _opened: Connections = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        given = os.environ.get(self.variable, "") if self.token is None else self.token
        self._tokens = {origin(url): found for url, found in tokens_of(self.urls, given, self.variable).items()}

    async def send(self, url: str, body: Any = None, *, headers: Headers = None, within: TimeLimit = None) -> Outcome:
        """Send one request; return the answer to it if its status is a success.

        Args:
            url: the address. Messages show it without its secrets.
            body: JSON to POST, or pieces of bytes; None for a GET request.
            headers: further ones.
            within: ends the request by a TimeoutError; None for the client's time limit.
        """
        try:
            async with within or asyncio.timeout(self.timeout_s):  # httpx's timeout limits each read, not the request
                response = await self._exchange(url, body, headers)
        except (TimeoutError, httpx.HTTPError) as error:
            is_late = isinstance(error, TimeoutError | httpx.TimeoutException)
            if is_late and not isinstance(error, httpx.ConnectTimeout):
                problem = f"no answer within {self.timeout_s:g} s"
                return _failed(VerdictKind.TIMEOUT, url, problem, passing=True)
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return _failed(VerdictKind.CRASH, url, problem, passing=True)
        if response.is_success:
            return response
        status = response.status_code
        return _failed(
            VerdictKind.CRASH,
            url,
            f"status {status}: {self.shown(response.text)}",
            response=response,
            passing=status in _PASSING_STATUS,
            of_sample=status in _STATUS_OF_A_SAMPLE,
        )

    def shown(self, value: object) -> str:
        """Return the beginning of what a server said on one line, without the secrets of requests."""
        text = str(value)
        for token in self._tokens.values():
            text = text.replace(token, MASK)
        text = without_secrets(" ".join(text.split()))
        return text if len(text) <= _MAX_EXCERPT else text[:_MAX_EXCERPT] + " ..."

    async def close(self) -> None:
        """Close the connections of the running event loop; those of loops that have ended are closed already."""
        if connections := self._opened.pop(asyncio.get_running_loop(), None):
            await connections.aclose()

    async def _exchange(self, url: str, body: Any, headers: Headers) -> httpx.Response:
        """Return an answer, unpacked and read up to the limit."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        if token := self._tokens.get(origin(url)):
            headers["Authorization"] = f"Bearer {token}"
        content = body if body is None or isinstance(body, AsyncIterable) else json.dumps(body).encode()
        max_bytes = self.max_bytes or MAX_BYTES
        received = bytearray()
        method = "GET" if body is None else "POST"
        async with self._connections.stream(method, url, content=content, headers=headers) as response:
            async for piece in response.aiter_bytes():
                received += piece
                if len(received) > max_bytes:
                    raise httpx.ReadError(f"the answer is longer than {max_bytes} bytes")
        kept = {name: value for name, value in response.headers.items() if name in ("content-type", "retry-after")}
        return httpx.Response(response.status_code, headers=kept, content=bytes(received))

    @property
    def _connections(self) -> httpx.AsyncClient:
        """The connections of the running event loop. Those of one loop cannot be used in another."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            self._opened = {other: client for other, client in self._opened.items() if not other.is_closed()}
            self._opened[loop] = httpx.AsyncClient(
                # Shorter than the limit of a request, to tell a server that is not there from one that is late.
                timeout=httpx.Timeout(None, connect=min(self.timeout_s / 2, _CONNECT_TIMEOUT_S)),
                limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
                transport=self.transport,
                mounts=unproxied(self.urls),
            )
        return self._opened[loop]


async def insist(
    ask: Callable[[int], Awaitable[Answer | RequestFailure]],
    *,
    num_retries: int | None = None,
    first_pause_s: float = 0.5,
    deadline: float = math.inf,
) -> tuple[Answer | RequestFailure, list[RequestFailure]]:
    """Ask until the outcome is no passing failure; return the last outcome, and the passing failures.

    A pause is as long as the server says in `Retry-After`. Otherwise it is `first_pause_s` to twice that long, so that
    requests that failed together do not come back together, and doubles each time up to 30 s.

    Args:
        ask: sends a request; it gets the number of tries before.
        num_retries: further tries; None for any number. A second timeout ends the tries in any case.
        first_pause_s: see above.
        deadline: time of the event loop that no pause may reach. Without one, pauses are 30 s at most.
    """
    clock = asyncio.get_running_loop().time
    failures: list[RequestFailure] = []
    for attempt in itertools.count():
        outcome = await ask(attempt)
        if not (isinstance(outcome, RequestFailure) and outcome.passing):
            break
        failures.append(outcome)
        num_timeouts = sum(failure.kind is VerdictKind.TIMEOUT for failure in failures)
        if attempt == num_retries or num_timeouts == _MAX_TIMEOUTS:
            break
        pause_s = min(first_pause_s * 2 ** min(attempt, _MAX_DOUBLINGS), _MAX_PAUSE_S / 2) * random.uniform(1, 2)
        pause_s = _asked_pause(outcome.response, pause_s)
        if deadline == math.inf:
            pause_s = min(pause_s, _MAX_PAUSE_S)
        if clock() + pause_s >= deadline:
            break
        await asyncio.sleep(pause_s)
    return outcome, failures


def check_passing(
    url: str, failure: RequestFailure, *, giver: str, wanted: str, skeleton: str | None = None, variable: str
) -> None:
    """Raise ConfigError or RewardError for a failure of a `giver` that another try cannot mend.

    `wanted` is the hint for a request that was refused, `skeleton` the one for an answer that cannot be used, and
    `variable` the environment variable that holds the token.
    """
    if failure.response is None and failure.kind is VerdictKind.CRASH:
        message = f"the {giver} does not answer: {failure.detail}"
        raise ConfigError(message, hint=f"start it, and check that this machine reaches {httpx.URL(url).host}")
    if failure.passing or failure.response is None:
        return
    hint = wanted
    if failure.status in (401, 403):
        hint = f"set the token that the server expects in the environment variable {variable}"
    elif failure.response.is_success:
        hint = skeleton
    raise RewardError(f"the {giver} refuses the trial request: {failure.detail}", hint=hint)


def unusable(url: str, response: httpx.Response, problem: str) -> RequestFailure:
    """Return the failure of a request that was answered, with success, by something that cannot be used."""
    return _failed(VerdictKind.CRASH, url, problem, response=response, of_sample=True)


def _failed(kind: VerdictKind, url: str, problem: str, **more: Any) -> RequestFailure:
    return RequestFailure(kind, f"{without_secrets(url)}: {problem}", problem=problem, **more)


def _asked_pause(response: httpx.Response | None, otherwise: float) -> float:
    """Return the seconds that a server asks to wait, or `otherwise` when it names none."""
    try:
        seconds = otherwise if response is None else float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return otherwise
    return seconds if 0 < seconds < math.inf else otherwise
