"""Which code a model folder names, and that none of it runs without trust."""

import json
from types import SimpleNamespace

import pytest

from rlhf_data.errors import ConfigError
from rlhf_data.own_code import TrustedModel, admit_code, code_files, copy_code, entrust, is_trusted, trusted
from rlhf_data.pretrained import check_code, located


@pytest.mark.parametrize(
    ("auto_map", "files"),
    [
        (None, []),
        ({}, []),
        ({"AutoConfig": "a.Config", "AutoModel": "b.Model"}, ["a.py", "b.py"]),
        ({"AutoTokenizer": ["slow.Slow", "fast.Fast"]}, ["slow.py", "fast.py"]),
        ({"AutoTokenizer": [None, "fast.Fast"]}, ["fast.py"]),
        (["slow.Slow", None], ["slow.py"]),
        ({"AutoConfig": "owner/name--a.Config", "AutoModel": "b.Model"}, ["b.py"]),
    ],
)
def test_files_that_a_config_names(auto_map, files):
    assert list(code_files({"auto_map": auto_map})) == files
    assert list(code_files({})) == []


def test_code_is_copied_with_what_it_imports_and_replaces_nothing(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    for path in (source, folder):
        path.mkdir()
        (path / "config.json").write_text("{}")
    (source / "model.py").write_text("from .layers import Layer\n")
    (source / "layers.py").write_text("from .norm import Norm\n")
    (source / "norm.py").write_text("class Norm: pass\n")
    (source / "kept.py").write_text("of the source\n")
    (source / "other.py").write_text("named by nothing\n")
    (folder / "kept.py").write_text("of the folder\n")
    config = SimpleNamespace(auto_map={"AutoModel": "kept.Model", "AutoConfig": "model.Config"})
    config.name_or_path = str(source)
    copy_code(config, folder)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.py", "layers.py", "norm.py", "kept.py"}
    assert (folder / "kept.py").read_text() == "of the folder\n"
    assert (folder / "norm.py").read_text() == "class Norm: pass\n"
    copy_code(SimpleNamespace(name_or_path="no/where"), folder)


def test_only_the_code_of_a_trusted_model_is_copied_to_where_it_is_imported_from(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils as modules

    copied = []
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(modules, "get_cached_module_file", lambda *args, **options: copied.append((*args, options)))
    name = str(tmp_path / "model")
    (tmp_path / "model").mkdir()
    assert admit_code(TrustedModel(name), is_local=True)  # a model without code
    for file, auto_map in (
        ("config.json", {"AutoConfig": "mine.Config"}),
        ("tokenizer_config.json", ["tok.Slow", None]),
    ):
        (tmp_path / "model" / file).write_text(json.dumps({"auto_map": auto_map}))
    assert not admit_code(name, is_local=True)
    assert copied == []
    assert admit_code(TrustedModel(name), is_local=True)
    assert copied == [(name, "mine.py", {"local_files_only": True}), (name, "tok.py", {"local_files_only": True})]


def test_trust_stays_with_the_name_that_transformers_gets(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_data.pretrained.hub_answers", lambda: False)
    for name in (str(tmp_path), "owner/name"):
        assert is_trusted(located(TrustedModel(name))[0])
        assert not is_trusted(located(name)[0])
    assert not is_trusted(located(tmp_path)[0])
    assert is_trusted(trusted("a"))


def test_a_config_keeps_the_trust_of_its_model():
    from transformers import PretrainedConfig

    config = PretrainedConfig()
    entrust(config, TrustedModel("a"))
    assert is_trusted(config.name_or_path)
    entrust(config, "a")
    assert not is_trusted(config.name_or_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_check_code_finds_code_and_runs_none(tmp_path, file):
    auto_class = {"config.json": "AutoConfig", "tokenizer_config.json": "AutoTokenizer"}[file]
    for name in ("mine", "plain"):
        (tmp_path / name).mkdir()
    content = {"model_type": "mine", "auto_map": {auto_class: "mine.Class"}}
    content["tokenizer_class"] = "Class"
    (tmp_path / "mine" / file).write_text(json.dumps(content))
    (tmp_path / "mine" / "mine.py").write_text("raise SystemExit('this code was run')")
    (tmp_path / "plain" / file).write_text("{}")
    names = f"{tmp_path / 'plain'}, {tmp_path / 'mine'}"
    check_code("")
    check_code("owner/name,/no/where")
    check_code(str(tmp_path / "plain"))
    check_code(TrustedModel(names))
    with pytest.raises(
        ConfigError, match=rf"{tmp_path / 'mine'} needs Python code of its own[^\n]*\n\nhint: use a model of"
    ):
        check_code(names)
