"""Data sets of the `datasets` library: their rows and cells, and those that cannot be opened."""

import datetime
import json
import sys
from decimal import Decimal

import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.rows.sources import open_sources

CHAT = [{"role": "user", "content": "x"}]


def test_open_sources_without_the_library_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"needs the `datasets` library.*\n\nhint: in a checkout, pip install './packages/rlhf-data\[datasets\]'",
    ):
        open_sources(tmp_path / "a.parquet")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A folder with one table in every format that the `datasets` library reads here."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("tables")
    table = datasets.Dataset.from_list([{"q": "a", "m": CHAT, "n": 1}, {"q": "b", "m": CHAT, "n": 2}])
    table.to_parquet(folder / "t.parquet")
    table.save_to_disk(folder / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(folder / "splits")
    (folder / "saved" / "data-00000-of-00001.arrow").rename(folder / "t.arrow")
    table.save_to_disk(folder / "saved")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "two.py").write_text(SCRIPT + SCRIPT.replace("class Sums", "class More"))
    return folder


SCRIPT = """
import datasets

class Sums(datasets.GeneratorBasedBuilder):
    BUILDER_CONFIGS = [datasets.BuilderConfig(name="x"), datasets.BuilderConfig(name="y")]

    def _info(self):
        return datasets.DatasetInfo(features=datasets.Features({"q": datasets.Value("string")}))

    def _split_generators(self, manager):
        return [datasets.SplitGenerator(name="train", gen_kwargs={"count": 2})]

    def _generate_examples(self, count):
        yield from ((n, {"q": self.config.name + str(n)}) for n in range(count))
"""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "saved", "splits"])
def test_open_sources_tables_of_the_library_know_their_rows(tables, name, streaming):
    rows = open_sources(str(tables / name), split="test", streaming=streaming)
    values = [(row.origin, row.row_id, row.text("q"), row.cell("m"), row.text("n")) for row in rows]
    path = tables / name
    assert values == [(f"{path}#0", f"{name}#0", "a", CHAT, "1"), (f"{path}#1", f"{name}#1", "b", CHAT, "2")]
    assert (rows.fingerprint() is None) == streaming
    by_default = open_sources(str(path), split="test", max_samples=1)
    assert len(list(by_default)) == 1 and by_default.fingerprint() is not None  # not streamed


@pytest.mark.parametrize("streaming", [False, True])
def test_open_sources_script_builds_the_subset(tables, tmp_path, monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    rows = open_sources(f"{tables / 'script.py'}@y", streaming=streaming)
    assert [row.values["q"] for row in rows] == ["y0", "y1"]
    assert rows.name == f"{tables / 'script.py'}@y"


def test_open_sources_tables_that_cannot_be_opened_name_themselves(tables):
    with pytest.raises(ConfigError, match=r"splits: unknown split `train`; known: test"):
        open_sources(tables / "splits")
    with pytest.raises(ConfigError, match=r"two\.py must define one builder class of `datasets`, found 2"):
        open_sources(tables / "two.py")
    (tables / "broken.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be opened"):
        open_sources(tables / "broken.parquet")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be (opened|read)"):
        list(open_sources(tables / "broken.parquet", streaming=True))
    (tables / "mixed").mkdir()
    (tables / "mixed" / "a.jsonl.gz").touch()
    (tables / "t.parquet").rename(tables / "mixed" / "t.parquet")
    with pytest.raises(DataError, match=r"mixed holds files of several kinds, \.json, \.parquet\n\nhint: name"):
        open_sources(tables / "mixed")


def test_cells_of_tables_are_what_json_knows(tmp_path):
    """Each cell is written to Parquet by pyarrow and compared with what JSON has for it."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    day = datetime.date(2024, 2, 29)
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    cells = {
        "when": (moment, "2024-02-29T12:30:00+00:00"),
        "day": (day, "2024-02-29"),
        "time": (datetime.time(12, 30), "12:30:00"),
        "whole": (Decimal("72.00"), 72),
        "part": (Decimal("0.50"), 0.5),
        "text": ("é".encode(), "é"),
        "raw": (b"\xff\x00", "/wA="),
        "nan": (float("nan"), None),
        "number": (0.25, 0.25),
        "none": (None, None),
        "list": ([1.5, float("nan")], [1.5, None]),
        "messages": (
            [{"role": "user", "content": "q", "at": moment}],
            [{"role": "user", "content": "q", "at": "2024-02-29T12:30:00+00:00"}],
        ),
    }
    table = pa.Table.from_pylist([{name: value for name, (value, _) in cells.items()}])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    [row] = open_sources(tmp_path / "t.parquet")
    assert row.values == {name: wanted for name, (_, wanted) in cells.items()}
    assert json.loads(json.dumps(row.values, allow_nan=False)) == row.values
    assert row.label("when") == "2024-02-29T12:30:00+00:00" and row.label("whole") == "72"
    with pytest.raises(DataError, match="the label `nan` is null"):
        row.label("nan")
