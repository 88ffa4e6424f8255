"""All ways that a CPU can run compute the same, and the report says how their seconds compare."""

import json

import pytest

import zero3


def test_all_ways_compute_the_same(tmp_path, monkeypatch):
    out = tmp_path / "report.json"
    on_cpu = [way for way in zero3.WAYS if way != "compiled"]
    words = ["zero3.py", "--shape", "tiny", "--num_tokens", "16", "--passes", "2", "--turns", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*words, "--ways", *on_cpu])
    zero3.main()
    ways = json.loads(out.read_text())["ways"]
    assert [*ways] == on_cpu
    parts, layers, *others = ways.values()
    assert parts["ratio"] == 1
    assert layers["ratio"] == pytest.approx(layers["seconds"] / parts["seconds"])
    for other in (layers, *others):
        assert other["loss"] == pytest.approx(parts["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(parts["grad_norm"], rel=1e-5)
    assert parts["grad_norm"] > 0


def test_compiled_layers_are_refused_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["zero3.py", "--out", str(tmp_path / "report.json"), "--ways", "layers", "compiled"]
    )
    with pytest.raises(SystemExit):
        zero3.main()
    assert "compiled layers need a GPU" in capsys.readouterr().err
