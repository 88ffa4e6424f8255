"""A finding about this machine, and how the errors of checks become findings."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_data.errors import RlhfError, first_line
from rlhf_data.options.exits import with_flags
from rlhf_data.safety import MASK, visible, without_secrets

OK, NOTICE, FAULT = "ok", "notice", "fault"

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)  # in names of variables
_SHORTEST_SECRET = 6  # characters; shorter values, such as `token` of RAY_AUTH_MODE, are words


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at.
        level: "ok"; "notice" for what costs something; "fault" for what ends runs.
        found: what there is.
        costs: what it costs; empty if nothing.
        hint: what to type; empty if nothing.
    """

    check: str
    level: Literal["ok", "notice", "fault"]
    found: str
    costs: str = ""
    hint: str = ""

    def shown(self, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
        """Return its fields as they may be shown to others; see `public`."""
        return {name: public(text, environ) for name, text in asdict(self).items()}


def of_error(check: str, error: BaseException, costs: str, level: Literal["notice", "fault"] = FAULT) -> Finding:
    """Return the finding of a check that raised `error`, with the hint of the error if it has one."""
    if isinstance(error, RlhfError):
        return of_message(check, str(error), costs, level)
    return Finding(check, level, first_line(error), costs, "add `rlhf doctor --json` to a report of this")


def of_message(check: str, message: str, costs: str, level: Literal["notice", "fault"] = FAULT) -> Finding:
    """Return the finding of an error's message, which may end with a hint."""
    found, _, hint = with_flags(message).partition("\n\nhint: ")
    return Finding(check, level, " ".join(found.split()), costs, " ".join(hint.split()))


def public(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` with `***` for the user and password of an address and for values of variables that are called
    secret, with `~` for the home folder, and with escape sequences as text."""
    for name, value in environ.items():
        if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, MASK)
    home = environ.get("HOME") or str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    # Proxies may be named without a scheme.
    return visible(re.sub(r"[^\s/@:,]+:[^\s/@]+@", f"{MASK}@", without_secrets(text)))
