"""The pictures show what runs said: steps, evaluations and their heights, and who worked when."""

import json
import re
from xml.etree import ElementTree

from matplotlib.colors import to_hex

from pictures import COLORS, WINDOW_S, as_svg, main, shown_lines, terminal, two_sides

SVG = "{http://www.w3.org/2000/svg}"
LOG = (
    "\x1b[2K\u280b starting Ray\r\x1b[2Kplacement: no GPU\n"
    "notice: something\n"
    "Held-out samples before training\n  1. ok, reward 1\n     prompt    hello\n"
    "  step     32 prompts\n"
    "  step reward  KL\n  1/40  \x1b[1;32m0.273\x1b[0m\n  6/40  0.300\n  step reward  KL\n 40/40  1.000\n"
    "held-out accuracy after step 40: 0.980 & more\n"
)


def test_shown_lines_leave_out_spinners_samples_and_most_steps():
    expected = ["placement: no GPU", "  step     32 prompts", "  step reward  KL", "  1/40  0.273", " 40/40  1.000"]
    assert shown_lines(LOG) == [*expected, "held-out accuracy after step 40: 0.980 & more"]


def test_terminal_holds_the_lines_as_text_and_loads_nothing():
    picture = terminal(shown_lines(LOG))
    rows: dict[str, str] = {}
    for text in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        rows[text.get("y")] = rows.get(text.get("y"), "") + text.text.replace("\xa0", " ")
    assert [row.rstrip() for row in rows.values() if row.strip()] == shown_lines(LOG)
    assert picture.count("://") == 1  # the name of the format


def test_two_sides_draw_what_each_did_in_its_color():
    run = {
        "name": "synchronous & slow",
        "steps": [0.0, 5.0, 20.0],
        "generation": [[0.0, 2.0, "generating"], [7.0, 12.0, "generating"]],
        "learner": [[2.0, 4.0, "training"], [4.0, 5.0, "weights"]],
    }
    figure = two_sides([run, {**run, "name": "fast"}])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["synchronous & slow", "fast"]
    drawn = set()
    for bars in figure.axes[0].collections[:-1]:  # the last one has the lines between steps
        boxes = [path.get_extents() for path in bars.get_paths()]
        drawn |= {(to_hex(bars.get_facecolor()[0]), box.x0, box.x1, box.y0 < 1) for box in boxes}
    spans = {(COLORS[what], begin, end, True) for begin, end, what in run["generation"]}
    spans |= {(COLORS[what], begin, end, False) for begin, end, what in run["learner"]}
    assert drawn == spans
    assert figure.axes[0].get_xlim() == (0, WINDOW_S)  # what lies behind is cut off
    assert "synchronous &amp; slow" in as_svg(figure)


def test_main_draws_a_run(tmp_path):
    records = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "rollout/reward": 0.5},
        {"step": 1, "eval/accuracy": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (tmp_path / "log").write_text(LOG, encoding="utf-8")
    flags = ["--log", str(tmp_path / "log"), "--run", str(tmp_path), "--command", "rlhf ppo"]
    main([*flags, "--out", str(tmp_path / "images")])
    assert "$&#160;rlhf&#160;ppo" in (tmp_path / "images/terminal.svg").read_text(encoding="utf-8")
    texts = re.findall(r">(0\.\d\d)</text>", (tmp_path / "images/learning.svg").read_text(encoding="utf-8"))
    assert {"0.25", "0.75"} <= set(texts)
