"""The gateway: an HTTP server in front of the router, for agents that speak the protocols of OpenAI or Anthropic.

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
from collections.abc import Mapping
from typing import Any

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError, EngineError, installs
from rlhf_rollout.agents.conversation import History
from rlhf_rollout.agents.dialects.anthropic_dialect import MESSAGES
from rlhf_rollout.agents.dialects.dialect import Answer, Dialect, Event, Request
from rlhf_rollout.agents.dialects.openai_dialect import CHAT, COMPLETIONS, RESPONSES, openai_error
from rlhf_rollout.agents.gateway_session import Asked, GatewaySession, RefusedError
from rlhf_rollout.agents.recorder import EpisodeRecorder
from rlhf_rollout.agents.tools.tool_calls import make_parser
from rlhf_rollout.workers.rpc import Activity

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from rlhf_rollout.http.server import LocalServer, left, read_body
except ImportError as error:
    raise ConfigError(f"the gateway for agents needs uvicorn: {error}", hint=installs("rlhf-rollout[server]")) from None

DIALECTS = {"chat/completions": CHAT, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES}
KEEP_ALIVE_S = 5.0  # clients stop reading, some after 10 s, when nothing arrives
_LEAVING_S = 0.02  # until a connection that was closed before a retry is noticed, when both are read at once
_NUM_LOOKS = 50  # for a connection whose end comes behind the retry
_PATH = re.compile(r"/session/([\w-]+)/(?:v1/)?(chat/completions|completions|responses|messages|models)/?")
_MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rlhf"}]}
_LOGGER = logging.getLogger(__name__)


class Gateway(LocalServer):
    """The server. Use it from one event loop.

    Args:
        tokenizer: the policy's, loaded.
        history: see `Conversations`.
        tool_parser: form of the tool calls; see `make_parser`.

    Raises:
        RewardError: nobody knows the parser.
    """

    def __init__(self, tokenizer: Tokenizer, *, history: History = "append", tool_parser: str = "hermes") -> None:
        super().__init__(self.app)
        self._tokenizer = tokenizer
        self._history: History = history
        self._parse = make_parser(tool_parser, tokenizer)
        self._sessions: dict[str, GatewaySession] = {}
        self._ignored: set[str] = set()

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        await super().close()

    @contextlib.contextmanager
    def session(self, recorder: EpisodeRecorder, activity: Activity) -> Any:
        """Yield the `GatewaySession` of an episode, which ends with the context."""
        name = secrets.token_urlsafe(24)
        session = GatewaySession(
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

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification."""
        http = HttpRequest(scope, receive)
        path = _PATH.fullmatch(scope["path"])
        dialect = DIALECTS.get(path[2]) if path else None
        try:
            session = self._sessions.get(path[1]) if path else None
            if session is None:
                message = "no such session: its episode has ended, or the URL is wrong"
                raise RefusedError(404, "not_found_error", message)
            wanted = "GET" if dialect is None else "POST"
            if http.method != wanted:
                message = f"the method is {http.method}; it must be {wanted}"
                raise RefusedError(405, "invalid_request_error", message)
            if dialect is None:
                await _json_response(200, _MODELS)(scope, receive, send)
            else:
                await self._exchange(http, session, dialect, send)
        except RefusedError as refusal:
            write = dialect.error if dialect else openai_error
            # The clients of OpenAI and Anthropic would send the request again after some of these errors.
            headers = {"x-should-retry": "false"}
            if refusal.status == 408:  # otherwise the rest of the body is read, so that the client gets to the answer
                headers["connection"] = "close"
            response = _json_response(refusal.status, write(refusal.kind, str(refusal)), headers)
            await response(scope, receive, send)

    async def _exchange(self, http: HttpRequest, session: GatewaySession, dialect: Dialect, send: Send) -> None:
        """Read a request and answer it, unless its client leaves before the answer."""
        try:
            request = dialect.read(await _read_object(http))
            # The clients of OpenAI and Anthropic say so when they send a request again.
            is_retry = http.headers.get("x-stainless-retry-count", "0") != "0"
            for _ in range(_NUM_LOOKS if is_retry else 0):
                await asyncio.sleep(_LEAVING_S)
                if not session.is_waited_for(request):
                    break
            asked = session.ask(request, is_retry=is_retry)
        except (DataError, RecursionError) as error:
            raise RefusedError(400, "invalid_request_error", str(error)) from None
        response = _Writing(send, dialect, request, self._headers(request))
        leaving = asyncio.create_task(left(http.receive))
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
                    await response.send(content)
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
            text = "agents ask for %s, which is ignored: answers are sampled as the run says, without alternatives"
            _LOGGER.warning(text, ", ".join(new))
        return {"x-ignored-parameters": ", ".join(request.ignored)}


async def _read_object(http: HttpRequest) -> dict[str, Any]:
    """Return the body of a request. Raises `RefusedError` for one that is too long or too slow, and DataError."""
    body = bytearray()
    try:
        await read_body(http, body.extend, advice="send a shorter conversation")
        value = json.loads(body)
    except HTTPException as error:
        raise RefusedError(error.status_code, "invalid_request_error", error.detail) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is no JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise DataError(f"the body must be a JSON object, got {value!r:.80}")
    return value


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


def _json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    # JSONResponse would fail for halves of surrogate pairs, which models write.
    return Response(json.dumps(value), status, headers, "application/json")


class _Writing:
    """The answer to a request on its way, whose headers are sent when the policy writes for long.

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
        await self.send(b": the policy writes\n\n" if self._request.stream else b" ", is_end=False)

    async def fail(self, refusal: RefusedError) -> None:
        """Tell an error after the headers, by an event. Without events, the server ends the connection.

        The client then sends its request again, and gets the error with its status.
        """
        if self._request.stream:
            await self.send(_event(("error", self._dialect.error(refusal.kind, str(refusal)))))

    async def send(self, content: bytes, *, is_end: bool = True) -> None:
        """Send a part of the body, such as what `content` returned."""
        if not self.has_begun:
            self.has_begun = True
            size = {"content-length": str(len(content))} if is_end and not self._request.stream else {}
            pairs = [(name.encode(), value.encode()) for name, value in (self._headers | size).items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": pairs})
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_end})


def _event(event: Event) -> bytes:
    name, value = event
    data = value if isinstance(value, str) else json.dumps(value)
    return (f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n").encode()
