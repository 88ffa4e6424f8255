"""Figures in pages: found, computed, compared, rewritten; and those of this repository's pages."""

import json
from pathlib import Path

import pytest

from figures import ROOT, FigureError, differences, main, pages, render, rewrite

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
    (tmp_path / "x.json").write_text(json.dumps(DATA), encoding="utf-8")
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
        ("y.json mean .2f", "there is no y.json"),
        ("x.json mean", "not FILE VALUE FORMAT"),
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


def test_page_with_other_numbers_names_their_lines_and_is_rewritten(root: Path) -> None:
    page = (
        "From 7 to **0.95** <!-- figure: x.json mean .2f -->, and 99% <!-- figure: x.json mean .0f x100 -->\n"
        "3-4 s <!-- figure: x.json 0.5b.seconds .0f --> at 1.5B, gap 5e-5\n<!-- figure: x.json gap .1e -->\n"
    )
    found = list(differences(page, root))
    assert [(each.line, each.written, each.measured) for each in found] == [(1, "0.95", "0.99"), (2, "5e-5", "1.4e-4")]
    mended = rewrite(page, root)
    assert mended == page.replace("0.95", "0.99").replace("5e-5", "1.4e-4")
    assert list(differences(mended, root)) == []


@pytest.mark.parametrize("page", ["as fast as <!-- figure: x.json mean .2f -->", "0.99 <!-- figure: x.json mean .2f"])
def test_marker_without_a_number_or_an_end_is_an_error_with_its_line(root: Path, page: str) -> None:
    with pytest.raises(FigureError, match="line 2: no number stands before"):
        list(differences(f"1.00 <!-- figure: x.json mean .2f -->\n{page}", root))


def test_check_fails_and_writing_mends_the_pages(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "docs/measured.md"
    page.parent.mkdir()
    page.write_text("It is 0.50 <!-- figure: x.json mean .2f -->.\n", encoding="utf-8")
    assert main(["--check"], root) == 1
    assert "docs/measured.md:1: 0.50 is 0.99" in capsys.readouterr().out
    assert main([], root) == 0
    assert page.read_text(encoding="utf-8") == "It is 0.99 <!-- figure: x.json mean .2f -->.\n"
    assert main(["--check"], root) == 0


def test_marker_that_cannot_be_read_fails_and_leaves_its_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "0.50 <!-- figure: x.json mean .2f -->, 1 <!-- figure: x.json median .2f -->\n"
    (root / "README.md").write_text(text, encoding="utf-8")
    assert main([], root) == 1
    assert "README.md: line 1: no 'median'" in capsys.readouterr().err
    assert (root / "README.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_of_a_page_are_those_of_the_committed_measurements(path: Path) -> None:
    found = list(differences(path.read_text(encoding="utf-8")))
    assert not found, "run: python tools/bench/figures.py"


def test_pages_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in pages()}
    assert names >= {"README.md", "kernels/README.md", "packages/rlhf-train/README.md", "tools/bench/README.md"}
