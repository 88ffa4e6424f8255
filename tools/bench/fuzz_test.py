"""The fuzz campaign finds a defect that is there, and none in the parsers of this repository."""

import time

import pytest

import fuzz
from rlhf_data.errors import DataError


@pytest.mark.parametrize("name", fuzz.seeds())
def test_parser_reads_broken_input_or_refuses_it_properly(name, monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_S", 60)  # the machine may stand still for seconds
    parse, inputs = fuzz.seeds()[name]
    for data in inputs:
        assert fuzz.fuzz(parse, [data], seed=0, seconds=60, most=1)["inputs"] == 1
    run = fuzz.fuzz(parse, inputs, seed=1, seconds=60, most=60)
    assert run["inputs"] == 60 or run["seconds"] >= 60
    assert run["defects"] == {}


def test_campaign_tells_refusals_from_tracebacks_and_hangs(monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.05)

    def parse(data, folder):
        if len(data) % 3 == 0:
            raise DataError("no")
        if len(data) % 3 == 1:
            raise KeyError("key")
        time.sleep(20)

    run = fuzz.fuzz(parse, [b"{}", b'{"a": [1, 2]}'], seed=0, seconds=60, most=60)
    assert run["inputs"] == 60 and 0 < run["refused"] < 60
    assert sorted(run["defects"]) == ["HangError in fuzz.py:ring", "KeyError in fuzz_test.py:parse"]
