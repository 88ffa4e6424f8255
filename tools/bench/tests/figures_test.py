"""Figures in pages: found, computed, compared, rewritten; and those of this repository's pages."""

import json
from pathlib import Path

import pytest

from figures import ROOT, FigureError, main, pages, read_tables, render, renew, table

DATA = {
    "mean": 0.98765,
    "count": 1234567,
    "gap": 1.4e-4,
    "large": 2.5e11,
    "none": None,
    "time/step": 3.0,
    "0.5b": {"seconds": 4.0},
    "with, space": 5.0,
    "runs": [{"gap": 0.25, "seed": 1}, {"gap": 0.5, "seed": 2}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tools/bench/results"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text(json.dumps(DATA), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x.json mean .2f", "0.99"),
        ("x.json mean .1f x100", "98.8"),
        ("x.json count ,d", "1,234,567"),
        ("x.json gap .1e", "1.4e-4"),
        ("x.json large .1e", "2.5e11"),
        ("x.json time/step .1f", "3.0"),
        ("x.json 0.5b.seconds .1f", "4.0"),
        ("x.json with,%20space .1f", "5.0"),
        ("x.json runs.1.seed d", "2"),
        ("x.json max(runs.*.gap) .2f", "0.50"),
        ("x.json mean(runs.*.gap) .3f", "0.375"),
        ("x.json 0.5b.seconds / runs.0.gap .0f", "16"),
        ("x.json max(runs.*.gap) / min(runs.*.gap) .1f x10", "20.0"),
        ("x.json 0.5b.seconds / runs.0.gap / runs.1.seed .1f", "8.0"),
    ],
)
def test_render_marker_gives_the_measured_text(root: Path, source: str, text: str) -> None:
    assert render(source, root) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("y.json mean .2f", "there is no y.json in tools/bench/results"),
        ("x.json mean", "not REPORT VALUE FORMAT"),
        ("x.json nothing .2f", "no 'nothing' in mean, count"),
        ("x.json runs.2.gap .2f", "no '2.gap' in a list"),
        ("x.json runs.*.gap .2f", "not one number"),
        ("x.json none .2f", "not one number"),
        ("x.json mode(runs.*.gap) .2f", "no reduction; there are max"),
        ("x.json mean .2q", "format '.2q'"),
        ("x.json mean * gap .2f", "neither VALUE nor VALUE / VALUE"),
    ],
)
def test_render_marker_that_names_nothing_is_an_error(root: Path, source: str, message: str) -> None:
    with pytest.raises(FigureError, match=message.replace("*", r"\*")):
        render(source, root)


def test_paragraph_with_other_numbers_is_renewed_with_its_list(root: Path) -> None:
    page = (
        "One 0.95 above.\n\nFrom 7 to **0.95**, and 98.8%, on 0.95 W1 of\n3-4 s, gap 5e-5\n<!-- figures\n"
        "0.95 = x.json mean .2f\n98.8 = x.json mean .1f x100\n0.95 = x.json runs.0.gap .2f\n"
        "4 = x.json 0.5b.seconds .0f\n5e-5 = x.json gap .1e\n-->\nBelow 4.\n"
    )
    assert renew(page, {}, root) == (
        "One 0.95 above.\n\nFrom 7 to **0.99**, and 98.8%, on 0.25 W1 of\n3-4 s, gap 1.4e-4\n<!-- figures\n"
        "0.99 = x.json mean .2f\n98.8 = x.json mean .1f x100\n0.25 = x.json runs.0.gap .2f\n"
        "4 = x.json 0.5b.seconds .0f\n1.4e-4 = x.json gap .1e\n-->\nBelow 4.\n"
    )


def test_figures_of_a_list_item_are_those_of_this_item_alone(root: Path) -> None:
    page = "- one 0.95\n- two 0.95\n  and more\n  <!-- figures\n  0.95 = x.json mean .2f\n  -->\n- three 0.95\n"
    assert renew(page, {}, root) == page.replace("two 0.95", "two 0.99").replace("0.95 =", "0.99 =")


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "as fast as ever\n<!-- figures\n0.99 = x.json mean .2f\n-->\n",
            "has 0.99 0 times, its list of figures 1 times",
        ),
        ("0.99 and 0.99\n<!-- figures\n0.99 = x.json mean .2f\n-->\n", "has 0.99 2 times, its list of figures 1 times"),
        ("0.99\n<!-- figures\n0.99 x.json mean .2f\n-->\n", "is not a list of `NUMBER = SOURCE`"),
        ("0.99 <!-- figure: x.json mean .2f -->\n", "is not a list of figures after a paragraph"),
        ("0.99\n<!-- figures\n0.99 = x.json mean .2f\n", "is not a list of figures after a paragraph"),
    ],
)
def test_mark_that_does_not_fit_its_paragraph_is_an_error(root: Path, page: str, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        renew(page, {}, root)


@pytest.mark.parametrize(
    ("entry", "lines"),
    [
        ({"columns": ["x.json runs.0", "x.json runs.1"], "rows": [["gap", "{@.gap .2f}"]]}, ["| gap | 0.25 | 0.50 |"]),
        (
            {
                "cells": ["{@.gap .2f} + {@.seed d}", "{@.seed d}"],
                "rows": [["a", "x.json runs.0"], ["", "x.json runs.1"]],
            },
            ["| a | 0.25 + 1 | 1 |", "| | 0.50 + 2 | 2 |"],
        ),
        (
            {"report": "x.json", "rows": [["a", "{@ mean .1f} s", "b"], ["c", "", "-"]]},
            ["| a | 1.0 s | b |", "| c | | - |"],
        ),
    ],
)
def test_table_has_the_cells_of_its_entry(root: Path, entry: dict[str, object], lines: list[str]) -> None:
    made = table({"head": ["", "one", "two"], **entry}, root)
    assert made.split("\n") == ["| | one | two |", "|---|---|---|", *lines]


def test_check_fails_and_writing_mends_the_pages(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tools/bench/tables.toml").write_text(
        '[mine]\nhead = ["a", "b"]\nreport = "x.json"\nrows = [["c", "{@ mean .2f}"]]\n', encoding="utf-8"
    )
    page = root / "docs/measured.md"
    page.parent.mkdir()
    tables = "<!-- table: {} -->\n| a |\n<!-- end of the table -->\n"
    page.write_text(tables.format("mine") + tables.format("another's"), encoding="utf-8")
    assert main(["--check"], root) == 1
    assert "+| c | 0.99 |" in capsys.readouterr().out
    assert main([], root) == 0
    mended = tables.replace("| a |", "| a | b |\n|---|---|\n| c | 0.99 |").format("mine")
    assert page.read_text(encoding="utf-8") == mended + tables.format("another's")
    assert main(["--check"], root) == 0


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_of_a_page_are_those_of_the_committed_measurements(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert renew(text, read_tables()) == text, "run: python tools/bench/figures.py"


def test_pages_are_found_and_hold_every_table_once() -> None:
    names = {str(path.relative_to(ROOT)) for path in pages()}
    assert names >= {"README.md", "kernels/README.md", "packages/rlhf-train/README.md", "tools/bench/README.md"}
    text = "".join(path.read_text(encoding="utf-8") for path in pages())
    assert {name: text.count(f"<!-- table: {name} -->\n") for name in read_tables()} == dict.fromkeys(read_tables(), 1)
