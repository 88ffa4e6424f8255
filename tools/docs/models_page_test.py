import json

import models_page


def test_page_has_what_was_found():
    page = models_page.PAGE.read_text(encoding="utf-8")
    found = json.loads(models_page.FOUND.read_text(encoding="utf-8"))
    assert page == models_page.with_table(page, found), "run: python tools/docs/models_page.py"
    row = next(line for line in page.splitlines() if line.startswith("| `llama` |"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        found["llama"].get(name, "-") for name in models_page.COLUMNS
    ]


def test_column_of_the_gpu_is_what_pytest_reports(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase name="test_packs[a, b]"/>'
        '<testcase name="test_compiled_layers[a, b]"><skipped message="it has no GPU"/></testcase>'
        '<testcase name="test_packs[c]"><skipped message="it is not packed"/></testcase>'
        '<testcase name="test_packs[e]"><skipped message="this version does not have it"/></testcase>'
        '<testcase name="test_packs[d]"/><testcase name="test_shared_prompts[d]"><failure message="far"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert models_page.on_gpu(report) == {"a, b": "packs", "c": "refused", "d": "wrong: shared prompts", "e": "-"}
