"""Every family of models: what happens with it is what the page says, and no family is wrong without an error."""

from dataclasses import astuple

import pytest

from families import FAMILIES, Findings, examine, text_type
from page_commands import ROOT
from rlhf_models.backbone import PACKED_FAMILIES


def rows() -> dict[str, tuple[str, ...]]:
    """The rows of the page's table by family."""
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    lines = page.partition("<!-- table: families -->")[2].partition("<!-- end of the table -->")[0].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {family: tuple(findings) for family, *findings in cells}


ROWS = rows()


def test_page_has_a_row_for_every_family():
    assert list(ROWS) == list(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_equal_to_plain_transformers_or_refused_as_the_page_says(family):
    found = examine(family)
    assert set(astuple(found)) <= {"equal", "refused"}
    assert found == Findings(*ROWS[family][:6])
    assert (found.padded, found.saved, found.sent) == ("equal", "equal", "equal")


def test_families_that_are_not_checked_when_they_are_loaded_are_those_whose_variants_are_all_equal():
    packed = {family: row[1] for family, row in ROWS.items()}
    kinds = {family: text_type(family) for family in FAMILIES}
    unequal = {kinds[family] for family in FAMILIES if packed[family] != "equal"}
    assert set(kinds.values()) - unequal == PACKED_FAMILIES
