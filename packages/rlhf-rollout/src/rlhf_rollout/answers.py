"""Reads the answers of HTTP servers up to a size: a server that is not trusted could fill the memory."""

from collections.abc import AsyncIterable

import httpx

MAX_BYTES = 2**28
_KEPT_HEADERS = ("Content-Type", "Retry-After")


async def post(
    client: httpx.AsyncClient,
    url: str,
    *,
    content: bytes | AsyncIterable[bytes],
    headers: dict[str, str],
    max_bytes: int | None = None,
) -> httpx.Response:
    """Return the answer to a POST request.

    Args:
        client: sends the request; its timeouts apply.
        url: of the request.
        content: its body, in JSON unless `headers` say otherwise.
        headers: further headers.
        max_bytes: limit of the answer when unpacked; None for `MAX_BYTES`.

    Raises:
        httpx.HTTPError: there is no answer, it cannot be unpacked, or it is longer than the limit.
    """
    max_bytes = max_bytes or MAX_BYTES
    headers = {"Content-Type": "application/json", **headers}
    body = bytearray()
    async with client.stream("POST", url, content=content, headers=headers) as response:
        async for piece in response.aiter_bytes():  # unpacked
            body += piece
            if len(body) > max_bytes:
                raise httpx.ReadError(f"the answer is longer than {max_bytes} bytes", request=response.request)
    kept = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
    return httpx.Response(response.status_code, headers=kept, content=bytes(body), request=response.request)
