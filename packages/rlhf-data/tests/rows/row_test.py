"""Rows: their cells as text, and counts of those that cannot be used."""

import numpy as np
import pytest

from record_testing import write_jsonl
from rlhf_data.errors import DataError
from rlhf_data.rows.row import Row, RowErrors, json_value
from rlhf_data.rows.sources import open_sources


def read_row(path):
    [row] = open_sources(path)
    return row


def test_row_missing_key_lists_the_keys_there_are(tmp_path):
    row = read_row(write_jsonl(tmp_path / "a.jsonl", [{"question": "2+2", "answer": "4"}]))
    with pytest.raises(DataError) as caught:
        row.text("qestion")
    assert str(caught.value) == (
        f"{tmp_path / 'a.jsonl'}:1: unknown key `qestion`; known: answer, question\n\nhint: did you mean `question`?"
    )


def test_row_text_converts_numbers_and_refuses_the_rest(tmp_path):
    values = {"s": "x", "i": 7, "f": 0.5, "b": True, "n": None, "l": ["x"], "o": {"x": 1}, "half": "\ud800"}
    row = read_row(write_jsonl(tmp_path / "a.jsonl", [values]))
    assert [row.text(key) for key in "sif"] == ["x", "7", "0.5"]
    for key, kind in {"b": "a boolean", "n": "null", "l": "a list", "o": "an object"}.items():
        with pytest.raises(DataError, match=rf"a\.jsonl:1: `{key}` must be text or a number, got {kind}"):
            row.text(key)
    with pytest.raises(DataError, match="surrogate"):
        row.text("half")


@pytest.mark.parametrize("label", ["\ud800", {"a": "\ud800"}, ["\udfff"], {"\ud800": 1}])
def test_row_label_with_half_of_a_surrogate_pair_is_refused(label):
    with pytest.raises(DataError, match="x:7: `a` holds half of a surrogate pair"):
        Row({"a": label}, "x", 7).label("a")
    with pytest.raises(DataError, match="x:7: `a` holds half of a surrogate pair"):
        Row({"a": label}, "x", 7).plain("a")


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"b": -float("inf")}])
def test_row_with_a_number_that_json_lacks_is_refused(value):
    with pytest.raises(DataError, match=r"x:7: `a` cannot be written as JSON: .*\n\nhint: JSON has texts"):
        Row({"a": value}, "x", 7).plain("a")


def test_row_label_writes_structures_as_json_and_refuses_null(tmp_path):
    values = {"s": "4", "i": 4, "b": True, "l": ["assert f(1) == 1", "ä"], "n": None}
    row = read_row(write_jsonl(tmp_path / "a.jsonl", [values]))
    assert [row.label(key) for key in "sibl"] == ["4", "4", "true", '["assert f(1) == 1", "ä"]']
    with pytest.raises(DataError, match=r"a\.jsonl:1: the label `n` is null\n\nhint: remove the row, or wr"):
        row.label("n")


def test_row_errors_above_one_percent_are_refused_unless_skipped():
    errors = RowErrors()
    for line in range(4):
        errors.add(DataError(f"a.jsonl:{line}: broken"))
    errors.check(400)  # exactly 1 %
    with pytest.raises(DataError) as caught:
        errors.check(399)
    assert str(caught.value) == (
        "4 of 399 rows cannot be used; the first:\na.jsonl:0: broken\na.jsonl:1: broken\n"
        "a.jsonl:2: broken\n\nhint: repair them, or leave all of them out with ``skip_bad_rows`` (1 % is tolerated)"
    )
    skipping = RowErrors(skip_bad_rows=True)
    skipping.add("a.jsonl:1: broken")
    skipping.check(2)
    with pytest.raises(
        DataError, match=r"^1 of 1 rows .*; the first:\na\.jsonl:1: broken\n\nhint: repair them, or check"
    ):
        skipping.check(1)


def test_values_without_a_json_form_are_left_and_named_where_they_are_used():
    image = object()
    assert json_value({"image": image})["image"] is image
    assert json_value(np.array([[1, 2]])) == [[1, 2]] and json_value(np.float32(0.5)) == 0.5
    assert json_value(float("inf")) == "inf" and json_value({1: (2, 3)}) == {"1": [2, 3]}
    assert [json_value(value) for value in (None, True, 7, "ä")] == [None, True, 7, "ä"]
    row = Row({"image": image}, "x", 1)
    with pytest.raises(DataError, match="`image` must be text or a number, got a value of type object"):
        row.text("image")
    with pytest.raises(DataError, match="x:1: `image` cannot be written as JSON: a value of type object"):
        row.plain("image")


def test_row_decoded_reads_text_as_json_and_leaves_other_values():
    row = Row({"text": "[1, null]", "list": [2], "half": "[1,"}, "x", 7)
    assert (row.decoded("text"), row.decoded("list")) == ([1, None], [2])
    with pytest.raises(DataError, match="x:7: `half` is not JSON: Expecting value"):
        row.decoded("half")
