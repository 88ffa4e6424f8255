"""The picture of two sides shows who worked when."""

from xml.etree import ElementTree

import pytest

from two_sides import COLORS, engine_spans, learner_spans, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_learner_spans_join_phases_and_leave_out_waiting():
    phases = [(0.0, "generate"), (2.0, "load"), (2.5, "train"), (4.0, "sync"), (4.5, "generate"), (6.0, "write")]
    assert learner_spans(phases, end=6.5) == [(2.0, 4.0, "training"), (4.0, 4.5, "weights"), (6.0, 6.5, "other")]


def test_engine_spans_are_where_a_core_is_used():
    # A sample says what was used since the one before it.
    load = [(0.0, 0.0), (0.1, 0.9), (0.2, 0.8), (0.3, 0.1), (0.4, 1.0)]
    assert engine_spans(load) == [(0.0, pytest.approx(0.2), "generating"), (0.3, 0.4, "generating")]


def test_picture_draws_spans_to_scale_within_the_window():
    run = {
        "name": "synchronous & slow",
        "steps": [0.0, 5.0, 20.0],
        "generation": [[0.0, 2.0, "generating"], [9.0, 12.0, "generating"], [11.0, 12.0, "generating"]],
        "learner": [[2.0, 4.0, "training"], [4.0, 5.0, "weights"]],
    }
    svg = ElementTree.fromstring(picture([run, run], window_s=10.0))
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
