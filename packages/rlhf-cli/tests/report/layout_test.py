"""The report in a real browser: on narrow and wide, light and dark screens, and with more rollouts than it holds."""

import json

import pytest

from record_testing import write_jsonl
from report_testing import write_run, write_timeline
from rlhf_cli.commands.report import main


def report(*folders, path, more=()):
    assert main([*map(str, folders), "--output_path", str(path), *more]) == 0
    return path


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_texts_stand_out_from_what_is_behind_them(scheme, is_dark, browse, tmp_path):
    """WCAG 2.1, AA: the larger luminance + 0.05 is at least 4.5 times the smaller one + 0.05."""
    script = """
        const luminance = (text) => {
          const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
          const [r, g, b] = parts.map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const behind = (node) => {
          const bar = node.previousElementSibling;
          if (node.tagName === "text" && bar?.tagName === "rect") return luminance(getComputedStyle(bar).fill);
          for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (/^rgb\\(/.test(colour)) return luminance(colour);
          }
          return null;
        };
        const result = {page: behind(document.querySelector("main")), texts: 0, faint: []};
        for (const part of PARTS) {
          show(part.name);
          for (const node of document.querySelectorAll(`header *, #part-${part.name} *`)) {
            if (![...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim())) continue;
            if (!node.getClientRects().length || node.classList.contains("t")) continue;
            const style = getComputedStyle(node);
            const colour = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
            if (!/^rgb\\(/.test(colour) || /^(OPTION|TITLE)$/i.test(node.tagName)) continue;
            const [dark, light] = [luminance(colour), behind(node)].sort((a, b) => a - b);
            const ratio = (light + 0.05) / (dark + 0.05);
            result.texts += 1;
            if (ratio < 4.5) result.faint.push([part.name, node.outerHTML.slice(0, 90), ratio]);
          }
        }
    """
    run = write_run(tmp_path / "run")
    write_timeline(run)
    (run / "log.txt").write_text("WARNING hot\n")
    found = browse(report(run, path=tmp_path / "report.html"), script, scheme=scheme)
    assert (found["page"] < 0.1, found["texts"] > 100) == (is_dark, True)
    assert found["faint"] == []


@pytest.mark.parametrize("size", ["390,800", "1920,1000"])
def test_nothing_is_wider_than_the_screen(size, browse, tmp_path):
    run = write_run(tmp_path / "run")
    write_timeline(run)
    path = report(run, write_run(tmp_path / ("o" * 100)), path=tmp_path / "report.html")
    script = """
        const result = {width: innerWidth, over: [], tabs: []};
        const tabs = document.getElementById("tabs");
        for (const part of [...PARTS, ...PARTS.toReversed()]) {
          show(part.name);
          const tab = tabs.querySelector("[aria-selected=true]").getBoundingClientRect();
          const box = tabs.getBoundingClientRect();
          result.tabs.push(tab.left >= box.left - 1 && tab.right <= box.right + 1);
          result.over.push(document.documentElement.scrollWidth - innerWidth);
        }
    """
    found = browse(path, script, size=size)
    assert found["width"] == int(size.partition(",")[0])
    assert max(found["over"]) <= 0
    assert found["tabs"] == [True] * 12  # the part that is shown is named, there and back


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
