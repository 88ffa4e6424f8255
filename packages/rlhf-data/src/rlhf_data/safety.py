"""What comes from outside, made safe to show; and what must stay inside, kept out of what is written."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path

# Stands in written text for a secret.
MASK = "***"

_LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Characters that a terminal obeys instead of showing them: controls other than newline and tab, marks that turn the
# direction of text, and halves of surrogate pairs, which no terminal can encode.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_REST = r"(?:(?!,\w+://)[^\s{}])*"  # the rest of a URL; in a list, a comma and a scheme begin the next one
_USER = re.compile(rf"(?<=://){_REST.format('/?#')}@")
_QUERY = re.compile(rf"(://{_REST.format('?#')}\?){_REST.format('')}")


def visible(text: str) -> str:
    """Return `text` with escape sequences as text: what a model, a server or a file wrote must not steer a terminal."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def without_secrets(text: str) -> str:
    """Return `text` with `***` in place of the user, password and query of each URL in it."""
    return _QUERY.sub(rf"\g<1>{MASK}", _USER.sub(f"{MASK}@", text)) if "://" in text else text


def open_to_others(path: Path) -> None:
    """Let whoever may read a file's folder read the file: safetensors creates files for the owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def is_utf8(text: str) -> bool:
    """Return whether `text` can be written in UTF-8. Python reads other bytes as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`: `localhost` or an address such as 127.0.0.1 and ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_unproxied(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which programs ask this machine itself without the proxy that `environ` may name."""
    given = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    hosts = [host.strip() for host in given.split(",")]
    added = [] if "*" in hosts else [host for host in _LOOPBACK if host not in hosts]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*([given] if given else []), *added]))
