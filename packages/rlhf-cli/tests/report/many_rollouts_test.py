"""The report in a real browser with more rollouts than it holds at once."""

import json

from record_testing import write_jsonl
from report_testing import write_run
from rlhf_cli.commands.report import main


def report(*folders, path, more=()):
    assert main([*map(str, folders), "--output_path", str(path), *more]) == 0
    return path


def test_thousands_of_rollouts_open(browse, tmp_path):
    folder = write_run(tmp_path / "run", 1)
    [right, wrong] = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
    records = []
    for step in range(1, 1201):
        for at, record in enumerate((right, wrong)):
            ids = {"group_id": f"g{step}", "rollout_id": f"g{step}/{at}", "episode_id": f"g{step}/{at}"}
            records.append({**record, "step": step, **ids})
    write_jsonl(folder / "rollouts.jsonl", records)
    found = browse(
        report(folder, path=tmp_path / "report.html"),
        """
        document.getElementById("f-verdict").value = "ok"; applyFilters();
        browser.list.scrollTop = 1100 * ROW_HEIGHT; drawRows();
        const result = [browser.items.length, browser.shown.length, browser.rows.childElementCount];
        result.push(browser.rows.innerText.includes("1,101"));
        """,
        part="#rollouts",
    )
    assert found[:2] == [2400, 1200]
    assert found[2] < 100  # only rows that can be seen are elements
    assert found[3]
