"""The reward of examples/instructions.py for OpenRLHF, which asks for one response at a time."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

HELD_OUT = "held_out"  # an entry of the labels of held-out prompts
# OpenRLHF divides by the deviation of a group + 1e-9, in float32. Eight rewards of 1/3 differ from their mean by
# rounding, and each would get an advantage of 0.9. This factor makes sixths whole, and changes no other advantage.
_SCALE = 6
_SPECIAL = re.compile(r"<\|\w+\|>")  # OpenRLHF decodes them into the text of a response
_spec = importlib.util.spec_from_file_location("instructions", Path(__file__).parents[5] / "examples/instructions.py")
_rules = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_rules)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Score one response: sixths that it meets of what is asked, and for a held-out prompt 1 or 0 for all of it."""
    [query], [prompt], [label] = queries, prompts, labels
    found = _rules.met(_SPECIAL.sub("", query[len(prompt) :]).strip(), label)
    right = float(all(found))
    return {"rewards": right if HELD_OUT in json.loads(label) else _SCALE * sum(found) / len(found), "scores": right}
