"""The data of a report: what is read of a run's folder, chosen of its rollouts and written into the page."""

import base64
import io
import json
import math
import os
import re
import struct

import pytest
from PIL import Image

from report_testing import write_run, write_timeline, write_token_values
from rlhf_cli.commands.report import main
from rlhf_cli.report.page import html, report_data
from rlhf_cli.report.rollouts import Row
from rlhf_cli.report.runs import read_run, thinned
from rlhf_cli.report.samples import choose, recorded
from rlhf_cli.report.timeline import timeline_data
from rlhf_data.errors import DataError


def data_of(*folders, max_rollouts=100, max_tokens=1000):
    runs = []
    for folder in folders:
        files = recorded(folder)
        for file in files:
            file.read()
        runs.append((read_run(folder), files))
    return report_data(runs, max_rollouts, max_tokens)


def stored(page: str):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.parametrize("suffix", [".jsonl", ".columns"])
def test_the_data_of_a_run(suffix, tmp_path):
    [run] = data_of(write_run(tmp_path / "a", suffix=suffix))["runs"]
    assert (run["name"], run["command"], run["last_step"]) == ("a", "ppo", 3)
    assert run["curves"] == {
        "eval/accuracy": [[0], [0.25]],
        "policy/entropy": [[1, 2, 3], [0.5, None, 0.5]],
        "rollout/reward": [[1, 2, 3], [0.5, 1.0, 1.5]],
        "time/total": [[3], [12.5]],
    }
    assert run["config"] == [
        ("model", "pretrain", "2+2=", "set"),
        ("model", "bf16", False, "default"),
        ("training", "actor_learning_rate", 1e-3, "set"),
    ]
    assert [finding["name"] for finding in run["findings"]] == ["finite"]
    [file] = run["files"]
    # An answer of one byte has two tokens, one of two bytes three.
    assert (file["kind"], file["num_rollouts"], file["num_tokens"]) == ("training", 6, 15)
    assert [group["step"] for group in run["groups"]] == [1, 2, 3]
    group = run["groups"][1]
    assert (group["id"], group["prompt"], group["label"], group["kept"]) == ("step2/0", "2+2=", "4", True)
    assert group["prompt_tokens"] == [2, *b"2+2="]
    right, wrong = group["rollouts"]
    assert (right["id"], right["text"], right["reward"], right["verdict"], right["length"]) == (
        *("step2/0/0", "4", 2.0, "ok", 2),
    )
    assert (right["shared"], right["tokens"], right["logprobs"]) == (5, [ord("4"), 0], [-1.0, -1.0])
    assert (wrong["detail"], wrong["spans"]) == ("no 4", [["prompt", 5, None], ["policy", 3, 2]])


def test_the_picture_of_a_timeline_has_the_longest_bars_of_the_newest_file(tmp_path):
    folder = write_run(tmp_path / "a")
    assert data_of(folder)["runs"][0]["timeline"] is None
    os.utime(write_timeline(folder, num_passes=1), (1, 1))
    with write_timeline(folder, "timeline.2.json").open("a") as file:
        for change in ({"ts": math.nan}, {"dur": math.inf}, {"args": [7]}, {"tid": None}, {"dur": 10**400}):
            event = {"name": "bad", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 99_000_000} | change
            file.write(f"\n{json.dumps(event)},")
    html(data_of(folder))
    found = data_of(folder)["runs"][0]["timeline"]
    assert (found["file"], found["left_out"]) == ("timeline.2.json", 0)
    assert found["tracks"] == [["controller", "steps"], ["actor: rank 0", "calls"]]
    shown = [
        (track, begin, size, *(found["words"][at] for at in words), depth)
        for track, begin, size, *words, depth in found["bars"]
    ]
    assert shown == [
        (0, 0, 10e6, "step 1", "", 0),
        (1, 0, 2e6, "wait", "waits for: generate 2.000 s", 0),
        (1, 2e6, 6e6, "update actor", "", 0),
        *((1, at * 1e6, 1e6, "pass", "tokens: 7", 1) for at in (2, 3, 4)),
        (1, 9e6, 0.5e6, "<b>open</b>", "ended: no", 0),  # when the run was killed
    ]
    longest = timeline_data(folder, 3)
    assert [bar[2] for bar in longest["bars"]] == [10e6, 2e6, 6e6] and longest["left_out"] == 4


def test_a_prompt_with_images_has_small_copies_of_them(tmp_path):
    folder = write_run(tmp_path / "a")
    Image.new("RGB", (900, 300), "red").save(tmp_path / "red.png")
    file = folder / "rollouts.jsonl"
    images = {"images": [str(tmp_path / "red.png"), "gone.png", "/dev/zero"]}
    file.write_text("".join(json.dumps(json.loads(line) | images) + "\n" for line in file.read_text().splitlines()))
    [run] = data_of(folder)["runs"]
    shown, *others = run["groups"][0]["images"]
    assert others == [{"path": "gone.png"}, {"path": "/dev/zero"}]
    kind, _, content = shown["src"].partition(",")
    copy = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (kind, copy.format, copy.size) == ("data:image/jpeg;base64", "JPEG", (128, 43))
    assert copy.getpixel((64, 20))[0] > 240 > 20 > copy.getpixel((64, 20))[1]
    assert all("images" not in rollout for rollout in run["groups"][0]["rollouts"])

    # An agent has shown two more.
    file.write_text(file.read_text().replace('"images": [', '"prompt_images": ["gone.png"], "images": ['))
    [run] = data_of(folder)["runs"]
    assert run["groups"][0]["images"] == [{"path": "gone.png"}]
    assert [one["path"] for one in run["groups"][0]["rollouts"][0]["images"]] == images["images"]


def test_token_values_are_those_of_the_step_where_they_fit(tmp_path):
    folder = write_run(tmp_path / "a", answer="42")
    write_token_values(folder, 2)
    [run] = data_of(folder)["runs"]
    one, [right, wrong], _ = [group["rollouts"] for group in run["groups"]]
    assert all("values" not in rollout and "gap" not in rollout for rollout in (*one, wrong))
    assert right["gap"] == 0.375
    assert right["values"].keys() == {"gap", "log_ratio", "advantage", "entropy"}
    assert right["values"]["advantage"] == -1.5
    gap = struct.unpack("<3e", base64.b64decode(right["values"]["gap"]))
    assert gap[:2] == (0.5, -0.25) and gap[2] != gap[2]


def test_nothing_in_the_data_ends_its_element(tmp_path):
    hostile = "</script><script>alert(1)</script><!--\u202e\x1b[31m\ud800"
    data = data_of(write_run(tmp_path / "a", answer=hostile.replace("\ud800", "")))
    page = html(data)
    assert page.isascii() or hostile not in page
    assert "</script><script>alert" not in page
    [run] = stored(page)["runs"]
    assert run["groups"][0]["rollouts"][0]["text"] == hostile.replace("\ud800", "")
    data["runs"][0]["name"] = hostile
    assert stored(html(data))["runs"][0]["name"] == hostile


def test_the_page_loads_nothing(tmp_path):
    page = html(data_of(write_run(tmp_path / "a")))
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["'](?!data:,|#)""", page)
    assert set(re.findall(r"https?://[^\s\"'<>]*", page)) == {"http://www.w3.org/2000/svg"}


def rows(sizes):
    """Return one row per (step, group, tokens)."""
    rest = {"reward": None, "score": None, "verdict": None, "num_turns": 1, "finish_reason": "stop", "kept": None}
    return [
        Row(step=step, group_id=f"{step}/{group}", rollout_id=f"{step}/{group}/{at}", prompt_id="p", source="",
            num_tokens=size, versions=(0, 0), start=at, place=0, **rest)
        for at, (step, group, size) in enumerate(sizes)
    ]  # fmt: skip


def test_rows_that_fit_are_all_chosen():
    listed = rows([(1, 0, 5), (1, 0, 5), (2, 0, 5)])
    assert choose(listed, 3, 15) == listed
    assert [row.step for row in choose(listed, 2, 15)] == [1, 1]
    assert [row.step for row in choose(listed, 3, 9)] == [2]  # the group of ten tokens does not fit
    assert [row.step for row in choose(listed, 3, 10)] == [1, 1]
    assert choose(listed, 3, 4) == choose(listed, 0, 15) == []


def test_chosen_groups_are_spread_over_the_steps():
    listed = rows([(step, group, 1) for step in range(1, 10) for group in range(4)])
    assert [(row.step, row.group_id[2:]) for row in choose(listed, 3, 99)] == [(1, "0"), (5, "0"), (9, "0")]
    every = choose(listed, 18, 99)
    assert [row.step for row in every] == [step for step in range(1, 10) for _ in range(2)]
    assert {row.group_id[2:] for row in every} == {"0", "3"}
    wanted = choose(listed, 2, 99, ["4/2/14", "nothing"])
    assert [row.group_id for row in wanted] == ["1/0", "4/2"]
    assert [row.group_id for row in choose(listed, 1, 99, ["8/0/28", "4/2/14"])] == ["4/2"]  # the earlier one
    assert [row.group_id for row in choose(listed, 9, 2, ["8/0/28", "4/2/14"])] == ["4/2", "8/0"]


def test_a_long_curve_becomes_means():
    assert thinned([(step, float(step)) for step in range(1, 6)], 2) == [(3, 2.0), (5, 4.5)]
    assert thinned([(1, None), (2, 4.0), (3, None), (4, None)], 2) == [(2, 4.0), (4, None)]
    assert thinned([(1, 1.0), (2, 2.0)], 2) == [(1, 1.0), (2, 2.0)]
    assert thinned([], 2) == []


def test_damaged_lines_are_counted(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nothing\n{"step": "x"}\n[1]\n{"step": 9, "a": "text"}\n{"step": 1e999}\n{"step": 9, "unfini')
    run = read_run(folder)
    assert (run.num_damaged, run.last_step) == (5, 3)


def test_the_log_gives_its_last_warnings_with_their_steps_and_the_environment(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = ["INFO fine", "WARNING hot", 'environment: {"torch": "1"}', *["ERROR bad"] * 250, "step 1 of 3 ended"]
    lines += ["notice: all is well", "a step 2 of 3 ended", 'environment: {"torch": "2", "CPU": "2 x"}']
    lines += ["environment: nothing", "step 3 of 3 ended", "error: it ends"]
    (folder / "log.txt").write_text("\n".join([*lines, ""]))
    run = read_run(folder)
    assert (run.num_log_lines, len(run.log)) == (253, 200)
    assert run.log[-3:] == [(0, "ERROR bad"), (1, "notice: all is well"), (3, "error: it ends")]
    assert run.environment == {"torch": "2", "CPU": "2 x"}


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"it does not exist\n\nhint: name the folder of a run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"it has no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "config.toml").write_text("[[[")
    with pytest.raises(DataError, match=r"config\.toml is not TOML: (.|\n)*hint: "):
        read_run(tmp_path)


def test_the_command_writes_a_page_into_the_first_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    other = write_run(tmp_path / "b", suffix=".columns")
    assert main([str(folder), str(other), "--max_rollouts", "4"]) == 0
    out, err = capsys.readouterr()
    page = folder / "report.html"
    assert f"report in {page}" in out
    assert f"{folder}: metrics are not finite" in out
    assert f"notice: {folder}: 2 of the 6 rollouts in rollouts.jsonl are in the page" in err
    assert [run["folder"] for run in stored(page.read_text())["runs"]] == [str(folder), str(other)]
    assert main(["--run", f"{folder},{other}", "--output_path", str(tmp_path / "new" / "x.html")]) == 0
    assert len(stored((tmp_path / "new" / "x.html").read_text())["runs"]) == 2


def test_the_command_replaces_only_reports(tmp_path, capsys):
    folder = write_run(tmp_path / "a")
    precious = tmp_path / "notes.html"
    precious.write_text("mine")
    for path in (precious, tmp_path):
        assert main([str(folder), "--output_path", str(path)]) == 2
        assert "exists and is no report\n\nhint: name a new file" in capsys.readouterr().err
    assert precious.read_text() == "mine"
    assert main([str(folder)]) == main([str(folder)]) == 0


def test_the_command_needs_a_run(tmp_path, capsys):
    assert main([]) == 2
    assert "hint: write `rlhf report RUN_DIR`" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err
