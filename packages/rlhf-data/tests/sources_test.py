"""Rows of data files: values, line numbers, and every way a file can be broken."""

import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.sources import read_rows
from rlhf_data.testing import write_jsonl


def test_read_rows_jsonl_keeps_order_and_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"q": "one"}\n\n  {"q": "zwei ä"}  \r\n{"q": 3}', encoding="utf-8")
    rows = read_rows(path)
    assert [(row.line, row.values["q"]) for row in rows] == [(1, "one"), (3, "zwei ä"), (4, 3)]
    assert rows[1].origin == f"{path}:3"


def test_read_rows_json_list_knows_the_line_of_each_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n[\n  {"q": 1},\n  {\n "q": 2}\n , {"q": 3}]\n')
    assert [(row.line, row.values["q"]) for row in read_rows(path)] == [(3, 1), (4, 2), (6, 3)]


def test_read_rows_max_rows_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": 1}\n{"q": 2}\nbroken\n')
    assert len(read_rows(path, max_rows=2)) == 2
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        read_rows(path, max_rows=0)


@pytest.mark.parametrize(
    ("name", "content", "line", "says"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q": \n', 2, "malformed JSON: Expecting value"),
        ("a.jsonl", b'{"q": 1}\n\n[1, 2]\n', 3, "must be a JSON object, got a list"),
        ("a.jsonl", b'{"q": 1}\n"text"\n', 2, "got text"),
        ("a.jsonl", b'{"q": 1}\nnull\n', 2, "got null"),
        ("a.jsonl", b'{"q": NaN}\n', 1, "NaN is not JSON"),
        ("a.jsonl", b'{"q": 1} {"q": 2}\n', 1, "Extra data"),
        ("a.jsonl", b'{"q": "ok"}\n{"q": "\xff"}\n', 2, "not UTF-8"),
        ("a.jsonl", b"[" * 100_000, 1, "nested too deeply"),
        ("a.json", b'[\n{"q": 1},\n{"q": }\n]', 3, "Expecting value"),
        ("a.json", b'[\n{"q": 1}\n{"q": 2}\n]', 3, "a comma"),
        ("a.json", b'[\n{"q": 1},\n]', 3, "a row"),
        ("a.json", b'[\n{"q": 1}\n', 3, "the end of the list is missing"),
        ("a.json", b'[{"q": 1}]\n{}', 2, "text after the end"),
        ("a.json", b'[{"q": 1},\n 7]', 2, "must be a JSON object, got a number"),
        ("a.json", b'[{"q": 1},\n {"q": "\xff"}]', 2, "not UTF-8"),
    ],
)
def test_read_rows_broken_content_names_file_and_line(tmp_path, name, content, line, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_read_rows_missing_file_suggests_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"q": 1}])
    with pytest.raises(DataError, match=r"trian\.jsonl does not exist\n\nhint: did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"hint: there is no folder .*nowhere"):
        read_rows(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read_rows(tmp_path)


def test_read_rows_unknown_type_lists_the_known(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("q\n1\n")
    with pytest.raises(DataError, match=r"ends in `\.csv`; known: \.json, \.jsonl"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("a.json", "[]"), ("b.json", "[ ]\n")]
)
def test_read_rows_without_rows_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"has no rows\n\nhint: "):
        read_rows(tmp_path / name)


def test_read_rows_jsonl_content_in_a_json_file_is_explained(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"q": 1}\n{"q": 2}\n')
    with pytest.raises(DataError, match=r"not a JSON list of objects\n\nhint: .*\.jsonl"):
        read_rows(path)


def test_row_missing_key_lists_the_keys_there_are(tmp_path):
    row = read_rows(write_jsonl(tmp_path / "a.jsonl", [{"question": "2+2", "answer": "4"}]))[0]
    with pytest.raises(DataError) as caught:
        row.text("qestion")
    assert str(caught.value) == (
        f"{tmp_path / 'a.jsonl'}:1: unknown key `qestion`; known: answer, question\n\nhint: did you mean `question`?"
    )


def test_row_text_converts_numbers_and_refuses_the_rest(tmp_path):
    values = {"s": "x", "i": 7, "f": 0.5, "b": True, "n": None, "l": ["x"], "o": {"x": 1}, "half": "\ud800"}
    row = read_rows(write_jsonl(tmp_path / "a.jsonl", [values]))[0]
    assert [row.text(key) for key in "sif"] == ["x", "7", "0.5"]
    for key, kind in {"b": "a boolean", "n": "null", "l": "a list", "o": "an object"}.items():
        with pytest.raises(DataError, match=rf"a\.jsonl:1: `{key}` must be text or a number, got {kind}"):
            row.text(key)
    with pytest.raises(DataError, match="surrogate"):
        row.text("half")


def test_row_label_writes_structures_as_json_and_refuses_null(tmp_path):
    values = {"s": "4", "i": 4, "b": True, "l": ["assert f(1) == 1", "ä"], "n": None}
    row = read_rows(write_jsonl(tmp_path / "a.jsonl", [values]))[0]
    assert [row.label(key) for key in "sibl"] == ["4", "4", "true", '["assert f(1) == 1", "ä"]']
    with pytest.raises(DataError, match=r"a\.jsonl:1: the label `n` is null"):
        row.label("n")
