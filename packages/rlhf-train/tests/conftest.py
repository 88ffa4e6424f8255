"""What all tests of this package share: torch as it was before each test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what DeepSpeed's ZeRO stage 3 does to the whole process; no layer is compiled after it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
