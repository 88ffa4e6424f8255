"""Reads the answers of HTTP servers up to a size: a server that is not trusted could fill the memory."""

import httpx

MAX_BYTES = 2**28


async def post(client: httpx.AsyncClient, url: str, *, content: bytes, headers: dict[str, str]) -> httpx.Response:
    """Return the answer to a POST request.

    Args:
        client: sends the request; its timeouts apply.
        url: of the request.
        content: its body, in JSON.
        headers: further headers.

    Raises:
        httpx.HTTPError: there is no answer, it cannot be unpacked, or it has more than `MAX_BYTES` when unpacked.
    """
    headers = {"Content-Type": "application/json", **headers}
    body = bytearray()
    async with client.stream("POST", url, content=content, headers=headers) as response:
        async for piece in response.aiter_bytes():  # unpacked
            body += piece
            if len(body) > MAX_BYTES:
                raise httpx.ReadError(f"the answer is longer than {MAX_BYTES} bytes", request=response.request)
    kind = {"Content-Type": response.headers.get("Content-Type", "")}
    return httpx.Response(response.status_code, headers=kind, content=bytes(body), request=response.request)
