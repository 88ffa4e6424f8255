"""The page about OpenRLHF has the table of flags that the commands read."""

import pytest

from openrlhf_page import PAGE, markdown, with_table
from write import parser, write


def test_page_has_the_table_of_the_commands():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python tools/docs/openrlhf_page.py"


def test_rows_say_what_becomes_of_a_flag():
    lines = markdown().splitlines()
    assert "| `--colocate_all_models`, `--train.colocate_all` | ppo | `--colocate_all_models` |" in lines
    [eps] = [line for line in lines if line.startswith("| `--actor.adam.eps`")]
    assert eps.endswith("| training | not available: another epsilon of AdamW; accepted with `1e-8` or `1e-08` |")
    [betas] = [line for line in lines if line.startswith("| `--adam_betas`")]
    assert betas.endswith("| `--adam_betas`, one for all models |")
    [flash] = [line for line in lines if line.startswith("| `--flash_attn`")]
    assert flash.startswith("| `--flash_attn` | all | no effect: ")


def test_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        with_table("no table")


def test_check_reports_a_difference_and_writes_nothing(tmp_path):
    page = tmp_path / "page.md"
    check, renew = parser("").parse_args(["--check"]), parser("").parse_args([])
    assert write(page, lambda old: old + "new", check) == 1 and not page.exists()
    assert write(page, lambda old: old + "new", renew) == 0 and page.read_text() == "new"
    assert write(page, lambda old: old, check) == 0
