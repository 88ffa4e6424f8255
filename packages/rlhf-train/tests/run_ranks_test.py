"""The tests' own way to run ranks: a rank that dies is an error at once, not a wait."""

import os
import time
from typing import Any

import pytest

from trainer_testing import RANK_TIMEOUT_S, run_ranks


def die(rank: int, num_ranks: int, master: Any) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def test_run_ranks_a_rank_that_dies_is_named_at_once():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] died"):
        run_ranks(die, 2)
    assert time.monotonic() - started < RANK_TIMEOUT_S / 2
