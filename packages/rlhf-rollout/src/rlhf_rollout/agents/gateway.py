"""The door: an HTTP server in front of the router, for agents that speak the protocols of OpenAI or Anthropic.

Each episode has a session, which is part of its URL:

    http://127.0.0.1:PORT/session/ID/v1/{chat/completions, completions, responses, messages, models}

The id is random and is the authorization; keys in headers are not read. The server listens on this machine only.

- Answers are recorded token by token; `conversation.py` says how requests become tokens.
- Sampling is the run's. A request may shorten its answer by `max_tokens` and `stop`. Other sampling parameters are
  ignored, because the policy learns as it was sampled. So are a `tool_choice` that demands a call, and a number of
  alternatives to each token. The header `x-ignored-parameters` names them, and a warning does so once each.
- A last message of the assistant is the beginning of the answer, unless `add_generation_prompt` is true.
- A text of `stop`, of the run or the request, ends the answer at the token that completes it. This token is recorded,
  and the engine draws none after it.
- A request whose client leaves is answered all the same, and the same request again gets that answer. An answer that no
  client gets is no part of the episode.
- While the policy writes, a connection is kept alive: by comments in a stream, by white space before a JSON value.
- An episode without tokens, turns or seconds left answers once with an empty text that was cut by its length. Later
  requests are refused with status 400.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError, EngineError, installs
from rlhf_rollout.agents.conversation import History
from rlhf_rollout.agents.dialects.anthropic_dialect import MESSAGES
from rlhf_rollout.agents.dialects.dialect import Answer, Dialect, Event, Request
from rlhf_rollout.agents.dialects.openai_dialect import CHAT, COMPLETIONS, openai_error
from rlhf_rollout.agents.dialects.responses_dialect import RESPONSES
from rlhf_rollout.agents.door import Asked, DoorSession, RefusedError
from rlhf_rollout.agents.recorder import EpisodeRecorder
from rlhf_rollout.agents.tools.tool_calls import make_parser
from rlhf_rollout.workers.rpc import Activity

try:
    import uvicorn
except ImportError as error:
    raise ConfigError(f"the door for agents needs uvicorn: {error}", hint=installs("rlhf-rollout[server]")) from None

MAX_BODY_BYTES = 32 * 2**20
DIALECTS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
READ_TIMEOUT_S = 60.0  # for the body of a request
KEEP_ALIVE_S = 5.0  # clients stop reading, some after 10 s, when nothing arrives
_LEAVING_S = 0.02  # until a connection that was closed before a retry is noticed, when both are read at once
_NUM_LOOKS = 50  # for a connection whose end comes behind the retry
_BACKLOG = 2048
_EXIT_TIMEOUT_S = 5.0
_PATH = re.compile(r"/session/([\w-]+)/(?:v1/)?(chat/completions|completions|responses|messages|models)/?")
_LOGGER = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gateway:
    """The server of the door. Use it from one event loop.

    Args:
        tokenizer: of the policy, loaded.
        history: see `Conversations`.
        tool_parser: form of the tool calls; see `make_parser`.

    Raises:
        RewardError: nobody knows the parser.

    Attributes:
        port: where the server listens, after `start`.
    """

    def __init__(self, tokenizer: Tokenizer, *, history: History = "append", tool_parser: str = "hermes") -> None:
        self._tokenizer = tokenizer
        self._history: History = history
        self._parse = make_parser(tool_parser, tokenizer)
        self._sessions: dict[str, DoorSession] = {}
        self._ignored: set[str] = set()
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        if self._serving is not None:
            return
        # With the protocol by name: asyncio turns off Nagle's algorithm, which costs 40 ms, for such sockets only.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)  # before the server runs: clients may come at once
        self.port = listener.getsockname()[1]
        options: dict[str, Any] = {
            "interface": "asgi3",
            "lifespan": "off",
            "ws": "none",
            "log_config": None,
            "access_log": False,
        }
        config = uvicorn.Config(self.app, log_level="error", backlog=_BACKLOG, timeout_graceful_shutdown=1, **options)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=_EXIT_TIMEOUT_S)
            self._serving.cancel()

    @contextlib.contextmanager
    def session(self, recorder: EpisodeRecorder, activity: Activity) -> Any:
        """Yield the `DoorSession` of an episode, which ends with the context."""
        name = secrets.token_urlsafe(24)
        session = DoorSession(
            f"http://127.0.0.1:{self.port}/session/{name}",
            recorder,
            activity,
            tokenizer=self._tokenizer,
            history=self._history,
            parse=self._parse,
        )
        self._sessions[name] = session
        try:
            yield session
        finally:
            self._sessions.pop(name, None)
            session.close()

    async def app(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification."""
        path = _PATH.fullmatch(scope["path"])
        dialect = DIALECTS.get(path[2]) if path else None
        try:
            session = self._sessions.get(path[1]) if path else None
            if session is None:
                raise RefusedError(
                    404, "not_found_error", "no such session: its episode has ended, or the URL is wrong"
                )
            if dialect is None:
                await _send_models(scope, send)
            else:
                await self._exchange(scope, session, dialect, receive, send)
        except RefusedError as refusal:
            write = dialect.error if dialect else openai_error
            # The clients of OpenAI and Anthropic would send the request again after some of these errors.
            headers = {"x-should-retry": "false"}
            if refusal.status == 408:  # otherwise the rest of the body is read, so that the client gets to the answer
                headers["connection"] = "close"
            await _send_json(send, refusal.status, write(refusal.kind, str(refusal)), headers)

    async def _exchange(
        self, scope: Mapping[str, Any], session: DoorSession, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        """Read a request and answer it, unless its client leaves before the answer."""
        if scope["method"] != "POST":
            raise RefusedError(405, "invalid_request_error", f"the method is {scope['method']}; it must be POST")
        try:
            request = dialect.read(await _read_body(receive))
            is_retry = _is_retry(scope)
            for _ in range(_NUM_LOOKS if is_retry else 0):
                await asyncio.sleep(_LEAVING_S)
                if not session.is_waited_for(request):
                    break
            asked = session.ask(request, is_retry=is_retry)
        except (DataError, RecursionError) as error:
            raise RefusedError(400, "invalid_request_error", str(error)) from None
        response = _Response(send, dialect, request, self._headers(request))
        leaving = asyncio.create_task(_left(receive))
        try:
            with session.waiting(asked):
                while not asked.task.done():
                    await asyncio.wait([asked.task, leaving], timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if leaving.done():
                        return
                    if not asked.task.done():
                        await response.keep_alive()
                content = response.content(_answer_of(asked))
                if not leaving.done():
                    # Before it is sent, because the next request may follow at once. From here on, nothing waits.
                    session.deliver(asked)
                    await response.end(content)
        except RefusedError as refusal:
            if not response.has_begun:
                raise
            await response.fail(refusal)
        finally:
            leaving.cancel()

    def _headers(self, request: Request) -> dict[str, str]:
        if not request.ignored:
            return {}
        new = [name for name in request.ignored if name not in self._ignored]
        if new:
            self._ignored.update(new)
            _LOGGER.warning(
                "agents ask for %s, which is ignored: answers are sampled as the run says, without alternatives",
                ", ".join(new),
            )
        return {"x-ignored-parameters": ", ".join(request.ignored)}


class _Server(uvicorn.Server):
    """A server that leaves the signals to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def _read_body(receive: Receive) -> dict[str, Any]:
    """Return the body of a request. Raises `RefusedError` for one that is too long or too slow, and DataError."""
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in _chunks(receive):
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RefusedError(413, "invalid_request_error", f"the body is longer than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        message = f"the body did not arrive within {READ_TIMEOUT_S:g} s"
        raise RefusedError(408, "invalid_request_error", message) from None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is no JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise DataError(f"the body must be a JSON object, got {value!r:.80}")
    return value


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "invalid_request_error", "the client closed the connection")
        yield message.get("body", b"")
        is_more = message.get("more_body", False)


def _is_retry(scope: Mapping[str, Any]) -> bool:
    """Return whether the client says that it sends a request again, as those of OpenAI and Anthropic do."""
    return dict(scope["headers"]).get(b"x-stainless-retry-count", b"0") != b"0"


def _answer_of(asked: Asked) -> Answer:
    """Return the answer of a request that has ended. Raises RefusedError if it has none."""
    try:
        return asked.task.result()
    except (ValueError, RecursionError) as error:  # also DataError
        raise RefusedError(400, "invalid_request_error", str(error)) from None
    except EngineError as error:
        raise RefusedError(500, "server_error", str(error)) from None
    except asyncio.CancelledError:
        raise RefusedError(404, "not_found_error", "the session has ended") from None


async def _left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_models(scope: Mapping[str, Any], send: Send) -> None:
    if scope["method"] != "GET":
        raise RefusedError(405, "invalid_request_error", f"the method is {scope['method']}; it must be GET")
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlhf"}
    await _send_json(send, 200, {"object": "list", "data": [model]}, {})


async def _send_json(send: Send, status: int, value: Any, headers: Mapping[str, str]) -> None:
    content = json.dumps(value).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    await _begin(send, status, headers)
    await send({"type": "http.response.body", "body": content})


class _Response:
    """The response to a request, whose headers are sent when the policy writes for long.

    Attributes:
        has_begun: the headers are sent, with status 200.
    """

    def __init__(self, send: Send, dialect: Dialect, request: Request, headers: Mapping[str, str]) -> None:
        self._send = send
        self._dialect = dialect
        self._request = request
        kind = {"content-type": "application/json"}
        if request.stream:
            kind = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        self._headers = {**kind, **headers}
        self.has_begun = False

    def content(self, answer: Answer) -> bytes:
        """Return the body that tells an answer."""
        if self._request.stream:
            return b"".join(map(_event, self._dialect.events(self._request, answer)))
        return json.dumps(self._dialect.write(self._request, answer)).encode()

    async def keep_alive(self) -> None:
        """Send something without a meaning."""
        await self._begin({})
        nothing = b": the policy writes\n\n" if self._request.stream else b" "
        await self._send({"type": "http.response.body", "body": nothing, "more_body": True})

    async def end(self, content: bytes) -> None:
        """Send what `content` returned."""
        await self._begin({} if self._request.stream else {"content-length": str(len(content))})
        await self._send({"type": "http.response.body", "body": content})

    async def fail(self, refusal: RefusedError) -> None:
        """Tell an error after the headers, by an event. Without events, the server ends the connection.

        The client then sends its request again, and gets the error with its status.
        """
        if self._request.stream:
            content = _event(("error", self._dialect.error(refusal.kind, str(refusal))))
            await self._send({"type": "http.response.body", "body": content})

    async def _begin(self, more: Mapping[str, str]) -> None:
        if not self.has_begun:
            self.has_begun = True
            await _begin(self._send, 200, {**self._headers, **more})


def _event(event: Event) -> bytes:
    name, value = event
    data = value if isinstance(value, str) else json.dumps(value)
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()


async def _begin(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
