"""What all tests of this package share: torch as it was before each test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what DeepSpeed's ZeRO stage 3 does to the whole process; no layer is compiled after it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.fixture
def results_stand_for_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a learner's calls of ranks return what it waits for: results in place of Ray's references."""
    for module in ("forwards", "learner", "ranks"):
        monkeypatch.setattr(f"rlhf_train.learning.{module}.wait", lambda references, **_: list(references))
