"""The page of metrics has what the product says of them, and the report finds the same by the names of curves."""

import pytest

from metrics_page import PAGE, markdown
from rlhf_cli.report.metrics import meanings, tables


def test_tables_of_the_page_are_those_of_the_declarations():
    page = PAGE.read_text(encoding="utf-8")
    assert markdown(page) == page, "run: python tools/docs/metrics_page.py"
    assert markdown(page.replace("| count |", "| weeks |")) == page
    with pytest.raises(AssertionError, match="too few tables"):
        markdown("# Metrics\n")


def test_every_metric_is_declared_once_and_a_curve_is_explained_by_the_row_of_its_name():
    names = [name for rows in tables() for row in rows for name in row["names"]]
    assert len(names) == len(set(names)) > 100
    said = meanings([*names, "rollout/verdict_ok", "rollout/steps_taken", "eval/gsm8k/truncated", "nobody/knows"])
    assert said["rollout/response_tokens"] == "mean length in tokens (tokens)"
    assert said["value/loss"].endswith("(reward²)") and said["value/mean"].endswith("(reward)")
    assert said["async/cut"].endswith("(share)") and said["eval/gsm8k/truncated"].endswith("(share)")
    assert said["rollout/verdict_ok"].startswith("number of episodes by verdict, such as ok")  # without its link
    assert said["rollout/steps_taken"].startswith("mean of a number in extra_logs")
    assert "nobody/knows" not in said
