"""Rows of data files: values, line numbers, and every way a file can be broken."""

import gzip
from dataclasses import replace

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.rows.row import RowErrors
from rlhf_data.rows.sources import open_sources, parse_probs, split_sources


def write(path, content, is_compressed):
    """Write bytes, under a name with .gz when they are to be compressed, and return the path."""
    path = path.with_name(f"{path.name}.gz") if is_compressed else path
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    return path


def read_rows(path):
    return list(open_sources(path))


def test_read_rows_jsonl_keeps_order_and_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"q": "one"}\n\n  {"q": "zwei ä"}  \r\n{"q": 3}', encoding="utf-8")
    rows = read_rows(path)
    assert [(row.number, row.values["q"]) for row in rows] == [(1, "one"), (3, "zwei ä"), (4, 3)]
    assert rows[1].origin == f"{path}:3"


def test_read_rows_json_list_knows_the_line_of_each_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n[\n  {"q": 1},\n  {\n "q": 2}\n , {"q": 3}]\n')
    assert [(row.number, row.values["q"]) for row in read_rows(path)] == [(3, 1), (4, 2), (6, 3)]


def test_open_sources_max_samples_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": 1}\n{"q": 2}\nbroken\n')
    assert len(list(open_sources(path, max_samples=2))) == 2
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        open_sources(path, max_samples=0)


@pytest.mark.parametrize(
    ("name", "content", "line", "says"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q": \n', 2, "malformed JSON: Expecting value"),
        ("a.jsonl", b'{"q": 1}\n\n[1, 2]\n', 3, "must be a JSON object, got a list"),
        ("a.jsonl", b'{"q": NaN}\n', 1, "NaN is not JSON"),
        ("a.jsonl", b'{"q": "ok"}\n{"q": "\xff"}\n', 2, "not UTF-8"),
        ("a.jsonl", b"[" * 100_000, 1, "nested too deeply"),
        ("a.json", b'[\n{"q": 1},\n{"q": }\n]', 3, "Expecting value"),
        ("a.json", b'[\n{"q": 1},\n]', 3, "a row"),
        ("a.json", b'[\n{"q": 1}\n', 3, "the end of the list is missing"),
        ("a.json", b'[{"q": 1}]\n{}', 2, "text after the end"),
        ("a.json", b'[{"q": 1},\n 7]', 2, "must be a JSON object, got a number"),
        ("a.json", b'[{"q": 1},\n {"q": "\xff"}]', 2, "not UTF-8"),
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True])
def test_read_rows_broken_content_names_file_and_line(tmp_path, name, content, line, says, is_compressed):
    path = write(tmp_path / name, content, is_compressed)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_read_rows_missing_file_suggests_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"q": 1}])
    with pytest.raises(DataError, match=r"trian\.jsonl does not exist\n\nhint: did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "trian.jsonl")
    for path in (tmp_path / "nowhere" / "train.jsonl", "/nowhere/train"):  # neither is taken for a hub name
        with pytest.raises(DataError, match=r"data file .* does not exist\n\nhint: there is no folder .*nowhere"):
            open_sources(path)


@pytest.mark.parametrize("pattern", ["*.jsonl", "train-?.jsonl", "[ab].jsonl", "*"])
def test_open_sources_pattern_does_not_lead_to_one_of_its_files(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-1.jsonl", [{"q": 1}])
    with pytest.raises(DataError, match="is a pattern, and patterns are not read\n\nhint: name its files") as caught:
        open_sources(f"data/{pattern}")
    assert f"data source data/{pattern} " in str(caught.value)
    write_jsonl(tmp_path / "data" / "[b].jsonl", [{"q": 2}])
    assert [row.values["q"] for row in open_sources("data/[b].jsonl")] == [2]


def test_read_rows_unknown_type_lists_the_known(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("q\n1\n")
    with pytest.raises(DataError, match=r"ends in `\.tsv`; known: \.json, \.jsonl, \.csv, \.json\.gz, .*, \.py"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("a.json", "[]"), ("b.json", "[ ]\n")]
)
def test_read_rows_without_rows_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"has no rows\n\nhint: "):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"train": []}', """`jq '.["train"]' a.json > rows.json`"""),
        ('{"version": 1, "my data": [{"q": 1}], "test": []}\n', """`jq '.["my data"]' a.json > rows.json`"""),
        ('{"q": 1}', "one object per line"),
        ('{"q": [1]}\n{"q": [2]}\n', "one object per line"),
    ],
)
def test_read_rows_json_object_says_how_to_make_a_list_of_it(tmp_path, content, says):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "a.json")
    assert says in str(caught.value).partition("hint: ")[2]


def test_file_with_a_comma_in_its_name_is_to_be_renamed(tmp_path, monkeypatch):
    for name in ("a,b.jsonl", "c.jsonl", "x, y, z.jsonl"):
        write_jsonl(tmp_path / name, [{"q": 1}])
    monkeypatch.chdir(tmp_path)
    for text, name in (
        ("a,b.jsonl", "a,b.jsonl"),
        ("c.jsonl,a,b.jsonl", "a,b.jsonl"),
        ("c.jsonl, x, y, z.jsonl", "x, y, z.jsonl"),
        (f"{tmp_path}/a,b.jsonl", f"{tmp_path}/a,b.jsonl"),
    ):
        with pytest.raises(ConfigError, match=f"the data file {name} has a comma, .*\n\nhint: rename the file"):
            open_sources(text)
    assert split_sources("c.jsonl, owner/name,,") == ["c.jsonl", "owner/name"]
    assert split_sources(",".join(["name"] * 100)) == ["name"] * 100  # a file's name cannot be as long
    assert read_rows(tmp_path / "a,b.jsonl")  # a path is one file


def origins(rows):
    return [row.origin for row in rows]


def test_open_sources_csv_cells_are_text_and_know_their_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffq,a\r\n"two\nlines",1\r\n\r\nlast,"say ""hi"""\r\n'.encode())
    rows = list(open_sources(path))
    assert [(row.number, dict(row.values)) for row in rows] == [
        (2, {"q": "two\nlines", "a": "1"}),
        (5, {"q": "last", "a": 'say "hi"'}),
    ]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_open_sources_csv_with_another_separator_is_refused(tmp_path, sign):
    (tmp_path / "a.csv").write_text(f"\nq{sign}a\n1{sign}2\n")
    says = f"a.csv:2: the header of the table has one column, {f'q{sign}a'!r}\n\nhint: write commas in the place of "
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "a.csv")
    assert f"{says}{sign!r} between its columns" in str(caught.value)
    (tmp_path / "b.csv").write_text(f"q\n1{sign}2\n")
    assert [row.values for row in open_sources(tmp_path / "b.csv")] == [{"q": f"1{sign}2"}]


@pytest.mark.parametrize(
    ("name", "content", "bad", "good"),
    [
        # Three usable rows, and in their midst one that is not.
        ("a.jsonl", b'{"q": 1}\n{"q": \n{"q": 2}\n{"q": 3}\n', 2, [1, 3, 4]),
        ("a.jsonl", b'{"q": 1}\n[1]\n{"q": 2}\n{"q": 3}\n', 2, [1, 3, 4]),
        ("a.jsonl", b'{"q": 1}\n{"q": "\xff"}\n{"q": 2}\n{"q": 3}\n', 2, [1, 3, 4]),
        ("a.json", b'[{"q": 1},\n{"q": "\xff"},\n{"q": 2},\n{"q": 3}]\n', 2, [1, 3, 4]),
        ("a.json", b'[{"q": 1},\n7,\n{"q": 2},\n{"q": 3}]\n', 2, [1, 3, 4]),
        ("a.csv", b"q\n1\n2,2\n3\n4\n", 3, [2, 4, 5]),
        ("a.csv", b"q\n1\n\xff\n3\n4\n", 3, [2, 4, 5]),
        ("a.csv", b'q\n1\n"2" x\n3\n4\n', 3, [2, 4, 5]),
        ("a.csv", b'\n\nq\n"1\n1"\n"\xff\n2"\n3\n4\n', 6, [4, 8, 9]),
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True])
def test_rows_read_counts_a_broken_row_and_goes_on(tmp_path, name, content, bad, good, is_compressed):
    path = write(tmp_path / name, content, is_compressed)
    errors = RowErrors()
    assert [row.number for row in open_sources(path).read(errors)] == good
    assert errors.num_bad == 1
    assert errors.first[0].startswith(f"{path}:{bad}: ")
    with pytest.raises(DataError, match=rf"{path.name}:{bad}: "):
        list(open_sources(path))


def test_open_sources_csv_without_a_readable_header_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"q\xff\n1\n")
    with pytest.raises(DataError, match=r"a\.csv:1: the header of the table cannot be read: not UTF-8"):
        list(open_sources(tmp_path / "a.csv").read(RowErrors()))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '\ufeff{"q": "ä\\nö"}\n\n{"q": "2"}\n'),
        ("a.json", '[\n{"q": "ä\\nö"},\n\n{"q": "2"}]'),
        ("A.CSV", 'q\n"ä\nö"\n2\n'),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_open_sources_compressed_file_is_read_like_its_plain_form(tmp_path, name, content, streaming):
    plain, packed = (write(tmp_path / name, content.encode(), is_compressed) for is_compressed in (False, True))
    rows = list(open_sources(str(plain)))
    assert [row.values for row in rows] == [{"q": "ä\nö"}, {"q": "2"}]
    found = open_sources(f"{packed}", streaming=streaming)
    assert [(row.number, row.values) for row in found] == [(row.number, row.values) for row in rows]
    assert next(iter(found)).row_id == f"{name}.gz:{rows[0].number}"
    assert found.fingerprint() == open_sources(str(packed)).fingerprint()


def test_open_sources_compressed_file_is_read_as_its_rows_are_used(tmp_path):
    whole = gzip.compress(b"".join(b'{"q": %d}\n' % number for number in range(100_000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-100])
    assert len(list(open_sources(tmp_path / "cut.jsonl.gz", max_samples=1000))) == 1000
    says = r"cut\.jsonl\.gz cannot be decompressed: .*\n\nhint: copy it again"
    with pytest.raises(DataError, match=says):
        list(open_sources(tmp_path / "cut.jsonl.gz").read(RowErrors()))
    (tmp_path / "plain.json.gz").write_bytes(b'[{"q": 1}]')
    with pytest.raises(DataError, match=r"plain\.json\.gz cannot be decompressed: Not a gzipped file"):
        list(open_sources(tmp_path / "plain.json.gz"))


def test_open_sources_several_come_one_after_the_other_with_max_samples_of_each(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"q": n} for n in range(3)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"q": n} for n in range(2)])
    rows = open_sources(f"{a}, {b}", max_samples=2)
    assert origins(rows) == [f"{a}:1", f"{a}:2", f"{b}:1", f"{b}:2"]
    assert origins(rows) == origins(rows)
    assert (rows.name, next(iter(rows)).row_id) == (f"{a}, {b}", "a.jsonl:1")


def test_open_sources_probabilities_draw_until_every_source_has_ended(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"q": n} for n in range(300)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"q": n} for n in range(20)])
    rows = list(open_sources(f"{a},{b}", probs=[3, 1], seed=1))
    numbers = {path: [row.number for row in rows if row.source == str(path)] for path in (a, b)}
    # a is the last to end, so it is there once, and b again and again, each time in order.
    assert numbers[a] == list(range(1, 301))
    assert numbers[b] == [n % 20 + 1 for n in range(len(numbers[b]))]
    # a ends after 300 / 0.75 = 400 draws, 100 of them b's; the standard deviation is sqrt(300 * 0.25) / 0.75 = 11.5.
    assert abs(len(numbers[b]) - 100) < 40
    assert origins(rows) == origins(open_sources(f"{a},{b}", probs=[3, 1], seed=1))
    assert origins(rows) != origins(open_sources(f"{a},{b}", probs=[3, 1], seed=2))


def test_open_sources_options_out_of_range_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": 1}])
    for text, options, says in (
        (" , ", {}, "no data source is named"),
        (str(path), {"probs": [0.5] * 2}, "1 data sources need as many probabilities, got 2\n\nhint: 1 draws from all"),
        (f"{path},{path}", {"probs": [1]}, "2 data sources need as many probabilities, got 1\n\nhint: 1,1 draws from"),
        (f"{path},{path}", {"probs": [1, 0]}, r"must be above 0, got \[1, 0\]\n\nhint: leave out the source"),
        (f"{path}@sub", {}, "has no subsets, got `@sub`"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_sources(text, **options)
    with pytest.raises(
        ConfigError, match="``probs`` is 1;2; it must be numbers separated by commas\n\nhint: write one"
    ):
        parse_probs("probs", "1;2")


def test_rows_fingerprint_changes_with_content_and_options(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": 1}])
    before = open_sources(path).fingerprint()
    assert before == open_sources(path).fingerprint() != open_sources(path, max_samples=1).fingerprint()
    write_jsonl(path, [{"q": 2}])
    assert open_sources(path).fingerprint() != before


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["a/train.jsonl", "b/train.jsonl"], ["a/train.jsonl:1", "b/train.jsonl:1"]),
        (["a/train.jsonl", "b/test.jsonl"], ["train.jsonl:1", "test.jsonl:1"]),
        (
            ["a/x/train.jsonl", "b/x/train.jsonl", "c/test.jsonl"],
            ["a/x/train.jsonl:1", "b/x/train.jsonl:1", "test.jsonl:1"],
        ),
        (["a/train.jsonl", "a/train.jsonl"], None),
    ],
)
@pytest.mark.parametrize("probs", [None, "equal"])
def test_ids_of_rows_are_unique_over_sources(tmp_path, names, ids, probs):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"q": 1}\n')
    rows = open_sources(",".join(f"{tmp_path}/{name}" for name in names), probs=probs and [1.0] * len(names))
    found = {row.row_id for row in rows}
    assert len(found) == len(names)
    assert ids is None or found == set(ids)


def test_skip_samples_leaves_out_the_first_rows_of_each_source(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"q": "{name}{i}"}}\n' for i in range(5)))
    rows = open_sources(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", max_samples=2)
    sliced = replace(rows, skip_samples=2)
    assert [row.values["q"] for row in sliced] == ["a2", "a3", "b2", "b3"]
    assert [row.values["q"] for row in replace(rows, skip_samples=4)] == ["a4", "b4"]
    assert sliced.fingerprint() != rows.fingerprint()
    with pytest.raises(DataError, match="no rows behind the first 5"):
        list(replace(rows, skip_samples=5))
