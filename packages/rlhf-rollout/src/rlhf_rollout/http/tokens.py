"""The addresses of servers: which are valid, which bearer token goes to which, and which are asked without a proxy."""

import ipaddress
import re
import socket
from collections.abc import Sequence

import httpx

from rlhf_data.errors import ConfigError
from rlhf_data.safety import is_loopback, without_secrets

TOKEN_VARIABLE = "RLHF_REMOTE_RM_TOKEN"  # the environment variable with the token of reward servers
ENGINE_TOKEN_VARIABLE = "RLHF_ENGINE_TOKEN"  # the one with the token of servers that generate

_NAMED = re.compile(r"(https?://[^=]+)=(.+)", re.DOTALL)
_PORTS = {"http": 80, "https": 443}


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


def tokens_of(urls: Sequence[str], text: str, variable: str = TOKEN_VARIABLE) -> dict[str, str]:
    """Return the token of each of the `urls` that has one.

    Args:
        urls: addresses of servers.
        text: `TOKEN`, which belongs to the one server of all `urls`; or `SERVER=TOKEN,SERVER=TOKEN`, in which a SERVER
            is an address such as https://host:5000 and gets its own token only. Empty for no token.
        variable: the environment variable that `text` comes from, for messages.

    Raises:
        ConfigError: one token for several servers, a token that would go to another machine without encryption, unless
            that server is named in `text`, or one that no header can carry.
    """
    text = text.strip()
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(f"the token in {variable} has characters that no header can carry")
    origins = {url: origin(url) for url in urls}
    if not text or not urls:
        return {}
    if text.startswith(("http://", "https://")):
        named = [_NAMED.fullmatch(entry.strip()) for entry in text.split(",")]
        if not all(named):
            hint = f"write {variable}=SERVER=TOKEN,SERVER=TOKEN with servers such as https://host:5000"
            raise ConfigError(f"{variable} begins with a server, and an entry has no `=` and token", hint=hint)
        tokens = {origin(entry[1]): entry[2] for entry in named if entry}
        return {url: tokens[origin] for url, origin in origins.items() if origin in tokens}
    servers = sorted(set(origins.values()))
    if len(servers) > 1:
        hint = f"say which server gets which: {variable}={','.join(f'{server}=TOKEN' for server in servers)}"
        raise ConfigError(f"{variable} is one token for {len(servers)} servers: {', '.join(servers)}", hint=hint)
    if servers[0].startswith("http://") and not is_loopback(httpx.URL(servers[0]).host):
        hint = f"use https, or set {variable}={servers[0]}=TOKEN if nobody listens on the way"
        raise ConfigError(f"the token of {variable} would go to {servers[0]} without encryption", hint=hint)
    return dict.fromkeys(urls, text)


def unproxied(urls: Sequence[str]) -> dict[str, None]:
    """Return httpx's `mounts` that keep requests to those of the `urls` on this machine from the environment's proxy.

    A proxy would not find the server, and would see the token.
    """
    hosts = {httpx.URL(url).host for url in urls}
    return {f"all://{f'[{host}]' if ':' in host else host}": None for host in hosts if _is_here(host)}


def _is_here(host: str) -> bool:
    """Return whether a host of a URL is this machine: a loopback address, an address that it has, or its name."""
    if is_loopback(host) or host == socket.gethostname().lower():
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
    except (ValueError, OSError):
        return False
    return True


def origin(url: str) -> str:
    """Return the scheme, host and port of a URL."""
    parsed = httpx.URL(url)
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return f"{parsed.scheme}://{host}:{parsed.port or _PORTS.get(parsed.scheme, 0)}"
