"""The page about OpenRLHF has the table of flags that the commands read."""

import pytest

from openrlhf_page import PAGE, markdown, with_table


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
