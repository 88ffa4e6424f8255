"""The server's side of HTTP: who may connect, how much they may send, and how an application listens.

A request without a valid token is refused before its body is read. `GET /health` needs no token.
"""

import asyncio
import contextlib
import copy
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_data.errors import ConfigError
from rlhf_data.safety import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_BODY_BYTES = 32 * 2**20
READ_TIMEOUT_S = 60.0  # for the body of a request
_SHUTDOWN_S = 10.0  # for requests in flight, when the server ends
_BACKLOG = 2048
_EXIT_TIMEOUT_S = 5.0
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


def token_for(host: str, variable: str) -> str:
    """Return the token in an environment variable, or "". Raises ConfigError if others reach the server without one."""
    token = os.environ.get(variable, "").strip()
    if not token and not is_loopback(host):
        message = f"``host={host}`` lets other machines use this server, and no token is set"
        raise ConfigError(message, hint=f"set {variable} here and for the clients, or leave ``host`` at 127.0.0.1")
    return token


class TokenCheck:
    """ASGI middleware that refuses requests without the bearer token, also those to apps that are mounted.

    Args:
        app: answers the other requests.
        token: the token; "" lets every request through.
        variable: the environment variable from which clients take it, for the answer to a refused request.
    """

    def __init__(self, app: ASGIApp, *, token: str, variable: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None
        detail = f"the request has no valid token; clients take it from {variable}"
        self._refusal = JSONResponse({"detail": detail}, status_code=401)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if self._expected is not None and scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                return await self._refusal(scope, receive, send)
        return await self._app(scope, receive, send)


def application(
    title: str, resources: AbstractAsyncContextManager[Any], *, token: str = "", variable: str
) -> "FastAPI":
    """Return an application without routes.

    Args:
        title: its name.
        resources: open while the server runs.
        token: the bearer token that requests must carry; empty if they need none.
        variable: see `TokenCheck`.
    """
    from fastapi import FastAPI

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with resources:
            yield

    app = FastAPI(title=title, lifespan=lifespan, openapi_url=None)
    app.add_middleware(TokenCheck, token=token, variable=variable)
    return app


async def read_body(
    request: Request,
    take: Callable[[bytes], object],
    *,
    advice: str,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Give the body of a request to `take`, piece by piece.

    Raises HTTPException for a body that is longer than `limit_bytes`, with `advice`, or slower than `timeout_s`; None
    stands for `MAX_BODY_BYTES` and `READ_TIMEOUT_S`.
    """
    limit_bytes = MAX_BODY_BYTES if limit_bytes is None else limit_bytes
    timeout_s = READ_TIMEOUT_S if timeout_s is None else timeout_s
    size_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size_bytes += len(chunk)
                if size_bytes > limit_bytes:
                    raise HTTPException(413, f"the body is longer than {limit_bytes} bytes; {advice}")
                take(chunk)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client closed the connection") from None


async def read_json(request: Request, kind: type[Body], *, advice: str) -> Body:
    """Return the body of a request as a `kind`; see `read_body`. Raises HTTPException for one that is no `kind`."""
    body = bytearray()
    await read_body(request, body.extend, advice=advice)
    return parse(kind, body)


def parse(kind: type[Body], text: bytearray) -> Body:
    """Return JSON as a `kind`, or raise HTTPException. pydantic refuses deep nesting, and texts that are not UTF-8."""
    try:
        return kind.model_validate_json(bytes(text))
    except ValidationError as error:
        problems: Any = error.errors(include_url=False, include_context=False, include_input=False)
        raise HTTPException(422, problems[:3]) from None


async def left(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, call: Awaitable[Result]) -> Result:
    """Return the result of a call, which is cancelled when the client closes the connection.

    Raises HTTPException when the client has left, or if the call was cancelled by somebody else.
    """
    calling = asyncio.ensure_future(call)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise HTTPException(499, "the client closed the connection")
        if calling.cancelled():
            raise HTTPException(410, "the session of the request has ended")
        return calling.result()
    finally:
        calling.cancel()
        leaving.cancel()
        await asyncio.gather(calling, leaving, return_exceptions=True)


def listen(app: ASGIApp, host: str, port: int, *, log: TextIO | None = None) -> None:
    """Serve until interrupted. What uvicorn says goes to `log`, or to standard error, because it concerns the user."""
    log_config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    if log is not None:
        log_config["handlers"]["default"]["stream"] = log
    options = {"log_level": "warning", "log_config": log_config, "timeout_graceful_shutdown": _SHUTDOWN_S}
    uvicorn.run(app, host=host, port=port, **options)


class LocalServer:
    """Serves an ASGI application on a free port of this machine, by the event loop that runs.

    Args:
        app: the application.

    Attributes:
        port: where it listens, after `start`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. A second call does nothing."""
        if self._serving is not None:
            return
        # With the protocol by name: asyncio turns off Nagle's algorithm, which costs 40 ms, for such sockets only.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)  # before the server runs: clients may come at once
        self.port = listener.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listener]))

    async def close(self) -> None:
        """Stop listening, and end the requests in flight."""
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=_EXIT_TIMEOUT_S)
            self._serving.cancel()


class _Server(uvicorn.Server):
    """A server that leaves the signals to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
