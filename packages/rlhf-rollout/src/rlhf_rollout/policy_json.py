"""Reads JSON that a policy wrote: whatever it wrote, reading it gives a plain value or a ValueError."""

import json
from typing import Any

_MAX_DEPTH = 64
_DECODER = json.JSONDecoder()


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is no JSON, is nested more than 64 deep, or has something that does not survive being sent
            on: NaN, an infinite number, half of a surrogate pair.
    """
    value, end = read_json_start(text)
    if text[end:].strip():
        raise ValueError(f"there is more after its end: {text[end:].strip():.80}")
    return value


def read_json_start(text: str) -> tuple[Any, int]:
    """Return the JSON value that a text begins with, and where it ends in the text. Raises ValueError: `read_json`."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep") from None
    # The decoder's own limit depends on how deep its caller is; what passes it there may fail where it is written.
    if _depth(value) > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value, end


def _depth(value: Any) -> int:
    """Return how many lists and objects are inside one another, from 0 for a number or a text."""
    depth = 0
    level = [value]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth
