"""Keys that rows do not have: the error shows those that they have and the flag to type."""

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import DataError
from rlhf_data.keys import check_extra_keys, check_keys, check_section_keys
from rlhf_data.options.sections import PairKeySection, RowSection
from rlhf_data.rows.sources import open_sources


def failure(tmp_path, row, keys, optional=()):
    with pytest.raises(DataError) as caught:
        check_keys(open_sources(write_jsonl(tmp_path / "data.jsonl", [row])), keys, optional)
    text, _, hint = str(caught.value).partition("\n\nhint: ")
    return text.replace(f"{tmp_path}/", ""), hint


@pytest.mark.parametrize(
    ("keys", "text", "hint"),
    [
        # The columns of GSM8K, beside what guides to it call them.
        ({"input_key": "question", "label_key": "answers"}, "label_key: data.jsonl:1: unknown key `answers`", "answer"),
        ({"input_key": "inputs", "label_key": "answer"}, "input_key: data.jsonl:1: unknown key `inputs`", "question"),
        ({"input_key": "question", "label_key": "target"}, "label_key: data.jsonl:1: unknown key `target`", "answer"),
        ({"prompt_key": "prompt"}, "prompt_key: data.jsonl:1: unknown key `prompt`", "question"),
    ],
)
def test_missing_key_names_the_flag_to_type(tmp_path, keys, text, hint):
    option = text.partition(":")[0]
    row = {"question": "1 + 1?", "answer": "#### 2"}
    expected = (f"--{text}; known: answer, question", f"did you mean --{option} {hint}?")
    assert failure(tmp_path, row, keys) == expected


@pytest.mark.parametrize(
    ("row", "preset", "guess"),
    [
        ({"question": "1 + 1?", "answer": "#### 2"}, "gsm8k", "question"),
        ({"prompt": "q", "completions": ["a"], "labels": [True]}, "stepwise", "prompt"),
    ],
)
def test_missing_key_that_a_preset_gives_names_the_preset(tmp_path, row, preset, guess):
    _, hint = failure(tmp_path, row, {"input_key": "input"})
    assert hint == f"--preset_data {preset} reads rows of this form; or did you mean --input_key {guess}?"
    with pytest.raises(DataError) as caught:  # another preset is given already
        check_keys(open_sources(write_jsonl(tmp_path / "data.jsonl", [row]), preset=preset), {"input_key": "inputs"})
    assert "preset_data" not in str(caught.value)


def test_missing_key_without_a_guess_asks_for_one_and_may_be_none(tmp_path):
    assert failure(tmp_path, {"x": 1, "y": 2}, {"input_key": "input"}) == (
        "--input_key: data.jsonl:1: unknown key `input`; known: x, y",
        "name one of these keys with --input_key KEY",
    )
    _, hint = failure(tmp_path, {"x": 1}, {"source_key": "set"}, optional=["source_key"])
    assert hint == "name one of these keys with --source_key KEY, or --source_key None if rows have none"


class PairRows(PairKeySection, RowSection, title="data"):
    """A section with a key that may be None and one that may not."""


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"prompt_key": "z"}, "name one of these keys with --prompt_key KEY, or --prompt_key None if rows have none"),
        ({"rejected_key": "z"}, "did you mean --rejected_key rejected?"),
    ],
)
def test_only_a_key_of_a_section_that_may_be_none_may_be_left_out(tmp_path, given, hint):
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [{"rejected": "x", "y": 1}]))
    names = ["prompt_key", "rejected_key"]
    check_section_keys(PairRows(), rows, names)
    with pytest.raises(DataError) as caught:
        check_section_keys(PairRows(**given), rows, names)
    assert str(caught.value).partition("\n\nhint: ")[2] == hint


def test_each_of_several_extra_keys_is_looked_for(tmp_path):
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [{"level": 1, "tests": ""}]))
    check_extra_keys(rows, ["level", "tests"])
    with pytest.raises(DataError, match=r"^--extra_keys: .*a\.jsonl:1: unknown key `test`;"):
        check_extra_keys(rows, ["level", "test"])


def test_key_that_another_option_names_is_not_proposed(tmp_path):
    _, hint = failure(tmp_path, {"question": "q", "z": 1}, {"input_key": "question", "prompt_key": "questions"})
    assert hint == "name one of these keys with --prompt_key KEY"


def test_every_source_is_looked_at_and_none_is_no_key(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"input": "q"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"question": "q"}])
    check_keys(open_sources(first), {"input_key": "input", "label_key": None})
    with pytest.raises(DataError, match=r"b.jsonl:1: unknown key `input`"):
        check_keys(open_sources(f"{first},{second}"), {"input_key": "input"})
