"""The report in a real browser: no error on its console, all parts drawn, texts of models shown as texts."""

import json
import threading

import pytest

from report_testing import write_run, write_timeline, write_token_values
from rlhf_cli.commands.report import main
from rlhf_cli.report.server import Report, open_server

HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[31m\u202eabc&lt;"
)
SHOWN = HOSTILE.replace("\x1b", "\u241b").replace("\u202e", "⟨U+202E⟩")


def report(*folders, path):
    assert main([*map(str, folders), "--output_path", str(path)]) == 0
    return path


def test_all_parts_of_two_runs_are_drawn(browse, tmp_path):
    one = write_run(tmp_path / "one", 5)
    write_timeline(one)
    two = write_run(tmp_path / "two", 4, learning_rate=2e-3, suffix=".columns")
    log = ["WARNING hot", 'environment: {"torch": "2.11"}', "step 1 of 5 ended", "notice: a", "step 3 of 5 ended"]
    (one / "log.txt").write_text("\n".join([*log, "error: it ends", ""]))
    path = report(one, two, path=tmp_path / "report.html")
    found = browse(
        path,
        """
        const result = {};
        result.lines = document.querySelectorAll("#part-curves .chart path.line").length;
        const charts = [...document.querySelectorAll("#part-curves .chart figcaption")];
        result.charts = charts.map((each) => each.innerText.replace(/\\s+/g, " "));
        const marks = [...document.querySelectorAll("#part-curves .mark")];
        result.marks = marks.map((mark) => mark.classList[1]);
        result.mark = marks.at(-1).textContent;
        result.places = marks.map((mark) => Math.round(mark.getBBox().x));
        for (const name of ["rollouts", "warnings", "config", "log"]) {
          show(name);
          result[name] = document.getElementById("part-" + name).innerText;
        }
        show("timeline");
        const bars = () => [...document.querySelectorAll("#part-timeline g title")].map((each) => each.textContent);
        result.whole = bars();
        const pick = document.querySelector("#part-timeline select");
        pick.value = "0";
        pick.dispatchEvent(new Event("change"));
        result.step = document.querySelectorAll("#part-timeline rect").length;
        const [step, wait] = document.querySelectorAll("#part-timeline rect");
        result.share = wait.getAttribute("width") / step.getAttribute("width");
        document.querySelector("#part-timeline svg").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        result.read = document.querySelector("#part-timeline [aria-live]").textContent;
        result.title = document.title;
        """,
    )
    assert found["title"] == "rlhf report: one, two"
    # Two metrics of the main group have more than one point, each in two runs.
    assert found["lines"] == 4
    assert found["charts"] == ["rollout/reward 2.5 2", "policy/entropy 0.5 0.5"]
    assert "18 of 18 rollouts" in found["rollouts"]
    assert "Group of 2, mean reward 0.5" in found["rollouts"]
    assert found["warnings"].count("Metrics are not finite") == 2
    assert "actor_learning_rate" in found["config"]
    assert "0.002" in found["config"]
    assert "pretrain" not in found["config"]  # the same in both
    assert "0: WARNING hot\n1: notice: a\n3: error: it ends" in found["log"]
    # In each of two charts at the steps 1 (of the curve, which begins there), 1 and 3; only one run has a log.
    assert found["marks"] == ["warning", "notice", "error"] * 2
    assert found["mark"] == "after 3: error: it ends"
    assert found["places"][0] == found["places"][1] < found["places"][2]
    assert "torch\t2.11" in found["config"]
    assert found["whole"][:3] == ["step 1, 10 s", "wait, 2 s, waits for: generate 2.000 s", "update actor, 6 s"]
    assert found["whole"][3:] == ["pass, 1 s, tokens: 7"] * 3 + ["<b>open</b>, 0.5 s, ended: no"]
    assert (found["step"], found["share"]) == (7, pytest.approx(0.2))
    assert found["read"] == "step 1, 10 s"


def test_texts_are_shown_as_texts(browse, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = write_run(tmp_path / "run", prompt=HOSTILE, answer=HOSTILE)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, f"rollout/{HOSTILE}": 1.0}) + "\n")
    (folder / "log.txt").write_text(f"ERROR {HOSTILE}\n")
    (folder / "model").mkdir()
    Tokenizer(WordLevel({HOSTILE: ord("<"), "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "model/tokenizer.json"))
    path = report(folder, path=tmp_path / "report.html")
    found = browse(
        path,
        """
        const result = {};
        show("rollouts"); show("warnings"); show("config"); show("log"); show("curves");
        result.title = document.title;
        result.elements = document.querySelectorAll("main img, main script").length;
        result.prompt = document.querySelector(".prompt pre").textContent;
        result.plain = document.querySelector("details pre").textContent;
        result.token = document.querySelector(".t").textContent;
        result.values = document.querySelector(".t").values;
        result.log = document.querySelector("pre.log").textContent;
        result.detail = document.querySelector(".detail").textContent;
        """,
    )
    assert found["title"] == "rlhf report: run"
    assert found["elements"] == 0
    assert found["prompt"] == found["plain"] == found["token"] == SHOWN
    assert found["values"].startswith("token 60 · ")
    assert found["values"].endswith("policy · log-prob -1 · probability 0.3679 · version 0")
    assert found["log"] == f"0: ERROR {SHOWN}"


def test_the_browser_filters_sorts_and_links(browse, tmp_path):
    path = report(write_run(tmp_path / "run", 12), path=tmp_path / "report.html")
    found = browse(
        path,
        """
        const result = {};
        const set = (id, value) => { document.getElementById(id).value = value; applyFilters(); };
        const ids = () => browser.shown.map((item) => item.rollout.id);
        result.opened = browser.key;
        set("f-verdict", "ok"); result.ok = ids().length;
        set("f-step0", "11"); result.late = ids();
        set("f-verdict", ""); set("f-reward1", "0"); result.zero = ids();
        set("f-step0", ""); set("f-reward1", ""); set("f-text", "4!"); result.text = ids().length;
        set("f-text", "2+2"); result.prompt = ids().length;
        sortBy("reward"); result.best = ids().slice(0, 2);
        sortBy("reward"); result.worst = ids()[0];
        browser.list.dispatchEvent(new KeyboardEvent("keydown", {key: "End"}));
        result.hash = decodeURIComponent(location.hash);
        """,
        part="#rollouts/0~training~7~step7%2F0%2F1",
    )
    assert found["opened"] == "0~training~7~step7/0/1"
    assert found["ok"] == 12
    assert found["late"] == ["step11/0/0", "step12/0/0"]
    assert found["zero"] == ["step11/0/1", "step12/0/1"]
    assert (found["text"], found["prompt"]) == (12, 24)
    assert found["best"] == ["step12/0/0", "step11/0/0"]
    assert found["worst"] == "step1/0/1"
    assert found["hash"] == "#rollouts/0~training~12~step12/0/0"


def test_tokens_have_the_trainers_values_and_a_legend(browse, tmp_path):
    folder = write_run(tmp_path / "run", 2, answer="42")
    write_token_values(folder, 2)
    found = browse(
        report(folder, path=tmp_path / "report.html"),
        """
        const all = (selector, of) => [...document.querySelectorAll(selector)].map(of);
        const colour = (token) => token.style.background.match(/--[a-z0-9-]+\\) \\d+/)?.[0] ?? "";
        const result = {tokens: all(".t", (token) => token.values), legends: {}, colours: {}, read: []};
        for (const key of ["ArrowRight", "End", "ArrowRight", "ArrowLeft"]) {
          document.querySelector(".response").dispatchEvent(new KeyboardEvent("keydown", {key}));
          result.read.push(document.getElementById("reading").textContent);
        }
        const select = () => document.getElementById("colour");
        for (const name of Object.keys(VALUES)) {
          if ([...select().options].find((each) => each.value === name).disabled) continue;
          select().value = name;
          select().dispatchEvent(new Event("change"));
          result.legends[name] = all(".legend .key", (key) => key.innerText);
          result.colours[name] = all(".t", colour);
        }
        document.getElementById("f-gap0").value = "0.3"; applyFilters();
        result.shown = browser.shown.map((item) => item.rollout.id);
        """,
        part="#rollouts/0~training~2~step2%2F0%2F0",
    )
    values = [token.split(" · version 0 · ")[1] for token in found["tokens"]]
    assert values == [
        "gap to the engine 0.5 · ratio 2 · advantage -1.5 · entropy 9.54e-7",
        "gap to the engine -0.25 · ratio 1 · advantage -1.5 · entropy 3.5",
        "gap to the engine none, left out of the loss · ratio none, left out of the loss · advantage -1.5"
        " · entropy none, left out of the loss",
    ]
    assert found["legends"] == {
        "gap": ["≤ -1", "-0.5", "0", "0.5", "≥ 1"],
        "log_ratio": ["≤ 0.5", "0.7071", "1", "1.414", "≥ 2"],
        "advantage": ["-1.5", "-0.75", "0", "0.75", "1.5"],
        "entropy": ["0", "0.75", "1.5", "2.25", "≥ 3"],
    }
    assert found["colours"] == {
        "gap": ["--heat) 50", "--run-0) 25", ""],
        "log_ratio": ["--heat) 100", "", ""],
        "advantage": ["--run-0) 100"] * 3,
        "entropy": ["", "--heat) 100", ""],
    }
    assert found["read"] == [found["tokens"][at] for at in (0, 2, 2, 1)]
    assert found["shown"] == ["step2/0/0"]


def test_a_served_page_follows_its_run_and_finds_rollouts(visit, with_script, tmp_path):
    folder = write_run(tmp_path / "run", 2)
    more = write_run(tmp_path / "more", 5)

    class Probe(Report):
        def page(self):
            text = super().page()
            for name in ("metrics.jsonl", "rollouts.jsonl"):  # the run goes on once the page is there
                (folder / name).write_bytes((more / name).read_bytes())
            script = """
                const result = {runs: document.getElementById("runs").innerText, items: browser.items.length};
                show("rollouts");
                searchAll().then(() => {
                  result.found = browser.items.length;
                  result.said = browser.number.innerText;
                  answer(result);
                });
                return;
            """
            return with_script(text, script, after_ms=7000)

    server, address = open_server(Probe([folder], (100, 1000)), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        found = visit(address)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert found["runs"].split() == ["run", "ppo,", "5", "steps"]
    assert (found["items"], found["found"]) == (4, 10)
    assert found["said"] == "10 of 10 rollouts; 10 found in all files"
