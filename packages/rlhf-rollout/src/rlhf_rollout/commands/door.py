"""What the servers share: who may connect, how much they may send, and how uvicorn runs.

A request without a valid token is refused before its body is read. `GET /health` needs no token.
"""

import asyncio
import copy
import os
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_data.errors import ConfigError
from rlhf_data.safety import is_loopback
from rlhf_rollout.commands.configs import ServerSection
from rlhf_rollout.commands.terminal import TERMINAL

_SHUTDOWN_S = 10.0  # for requests in flight, when the server ends
Body = TypeVar("Body", bound=BaseModel)


def token_for(server: ServerSection, variable: str) -> str:
    """Return the token in an environment variable, or "". Raises ConfigError if others reach the server without one."""
    token = os.environ.get(variable, "").strip()
    if not token and not is_loopback(server.host):
        message = f"--host {server.host} lets other machines use this server, and no token is set"
        raise ConfigError(message, hint=f"set {variable} here and for the clients, or leave --host at 127.0.0.1")
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
        self._refusal = JSONResponse(
            {"detail": f"the request has no valid token; clients take it from {variable}"}, status_code=401
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if self._expected is not None and scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                return await self._refusal(scope, receive, send)
        return await self._app(scope, receive, send)


async def read_body(
    request: Request, take: Callable[[bytes], object], *, limit_bytes: int, timeout_s: float, advice: str
) -> None:
    """Give the body of a request to `take`, piece by piece. Raises HTTPException for a body that is too long, with
    `advice`, or too slow."""
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


async def read_json(request: Request, kind: type[Body], **limits: Any) -> Body:
    """Return the body of a request as a `kind`. The keywords are those of `read_body`.

    Raises HTTPException for a body that is too long, too slow, or no `kind`.
    """
    body = bytearray()
    await read_body(request, body.extend, **limits)
    return parse(kind, body)


def parse(kind: type[Body], text: bytearray) -> Body:
    """Return JSON as a `kind`, or raise HTTPException. pydantic refuses deep nesting, and texts that are not UTF-8."""
    try:
        return kind.model_validate_json(bytes(text))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise HTTPException(422, problems[:3]) from None


def listen(app: FastAPI, server: ServerSection) -> None:
    """Serve until interrupted. What uvicorn says goes to the terminal, because it concerns the user."""
    log_config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    log_config["handlers"]["default"]["stream"] = TERMINAL.err
    options = {"log_level": "warning", "log_config": log_config, "timeout_graceful_shutdown": _SHUTDOWN_S}
    uvicorn.run(app, host=server.host, port=server.port, **options)
