"""Names that users' files import from OpenRLHF: the same classes and functions, found without OpenRLHF."""

import sys
import types
from importlib.util import find_spec
from typing import Any

from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards import math


def provide(name: str, **contents: Any) -> None:
    """Let `from NAME import ...` find `contents` in a module of OpenRLHF, such as `openrlhf.utils`."""
    for package in ("openrlhf", "openrlhf.utils"):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(contents)


def provide_utils() -> None:
    """Let `from openrlhf.utils import extract_boxed_answer, grade_answer` work where OpenRLHF is not installed."""
    loaded = sys.modules.get("openrlhf")
    spec = find_spec("openrlhf") if loaded is None else loaded.__spec__
    if spec is None:
        provide("openrlhf.utils", extract_boxed_answer=math.last_boxed, grade_answer=grade_answer)


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer is right, as `rlhf_rollout.rewards.math.grade` decides; None is not."""
    if given_answer is None or not str(given_answer).strip():
        return False
    return math.grade(f"{math.MARKER} {given_answer}", str(ground_truth)) is VerdictKind.OK
