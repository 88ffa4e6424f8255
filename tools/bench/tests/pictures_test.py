"""The pictures show what runs said: steps, evaluations and their heights, and who worked when."""

import json
import re
from xml.etree import ElementTree

import pytest

from pictures import COLORS, curve, main, shown_lines, terminal, two_sides

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


def test_terminal_holds_the_lines_as_text():
    texts = [element.text for element in ElementTree.fromstring(terminal(shown_lines(LOG))).iter(f"{SVG}text")]
    assert texts == shown_lines(LOG)


def test_curve_is_higher_for_higher_values():
    svg = ElementTree.fromstring(curve([(1, 0.25), (2, 0.75)], [(0, 0.0), (2, 1.0)]))
    points = next(svg.iter(f"{SVG}polyline")).get("points").split()
    (x0, y0), (x1, y1) = ([float(number) for number in point.split(",")] for point in points)
    assert x0 < x1 and y0 > y1
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in svg.iter(f"{SVG}circle")]
    assert dots[0][0] < x0 and dots[0][1] > y0
    assert dots[1] == (x1, min(y1, dots[1][1])) and dots[1][1] < y1


def test_picture_draws_spans_to_scale_within_the_window():
    run = {
        "name": "synchronous & slow",
        "steps": [0.0, 5.0, 20.0],
        "generation": [[0.0, 2.0, "generating"], [7.0, 12.0, "generating"], [11.0, 12.0, "generating"]],
        "learner": [[2.0, 4.0, "training"], [4.0, 5.0, "weights"]],
    }
    svg = ElementTree.fromstring(two_sides([run, run]))
    boxes = [each for each in svg.iter(f"{SVG}rect") if each.get("fill") in COLORS.values() and each.get("y") != "10"]
    assert len(boxes) == 2 * 4  # one span lies behind the window
    generating, cut, training, weights = boxes[:4]
    assert [each.get("fill") for each in boxes[:4]] == [
        COLORS[name] for name in ("generating", "generating", "training", "weights")
    ]
    assert generating.get("y") == cut.get("y") < training.get("y") == weights.get("y")
    assert float(generating.get("width")) == pytest.approx(2 * float(weights.get("width")), abs=0.2)
    assert float(cut.get("width")) == pytest.approx(float(weights.get("width")), abs=0.2)
    assert float(training.get("x")) == pytest.approx(
        float(generating.get("x")) + float(generating.get("width")), abs=0.2
    )
    assert len(list(svg.iter(f"{SVG}line"))) == 2 * 2
    assert "synchronous & slow" in [each.text for each in svg.iter(f"{SVG}text")]


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
    assert "$ rlhf ppo" in (tmp_path / "images/terminal.svg").read_text(encoding="utf-8")
    curve = (tmp_path / "images/learning.svg").read_text(encoding="utf-8")
    assert re.findall(r">(0\.\d\d)</text>", curve)[-2:] == ["0.25", "0.75"]
