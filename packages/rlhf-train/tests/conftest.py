"""What tests of this package share: a run in this process, and torch as it was before each test."""

import pytest
import torch

from online_runs import make_run, model_path

__all__ = ["make_run", "model_path"]


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what DeepSpeed's ZeRO stage 3 does to the whole process; no layer is compiled after it."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
