"""Training, heads and generation with a family of each kind; `models_page.py` tries all of them."""

import json

import pytest

from families import write_tiny
from family_training import CHECKS, try_training
from page_commands import ROOT

FOUND = json.loads((ROOT / "tests/families/found.json").read_text(encoding="utf-8"))
# Experts beside shared ones, Mamba beside attention and alone, soft caps, windows, sinks, routers that are layers.
KINDS = ("deepseek_v3", "bamba", "mamba2", "gemma2", "gemma3_text", "gpt_oss", "llama4")
CASES = [(family, column) for family in KINDS for column in CHECKS if column != "ZeRO 3"]


@pytest.mark.parametrize(("family", "column"), [*CASES, ("deepseek_v3", "ZeRO 3")])
def test_family_is_trained_as_plain_transformers_is(family, column, tmp_path):
    write_tiny(family, tmp_path / "model")
    assert FOUND[family][column] == "equal"
    assert try_training(tmp_path / "model", column) == "equal"
