"""Engines and agents run the code of a model only if its name says that it is trusted."""

import json
import socket
from types import SimpleNamespace

import pytest

from own_code_testing import own_code_model_dir
from rlhf_data.errors import ConfigError
from rlhf_data.own_code import TrustedModel, is_trusted
from rlhf_data.pretrained import load_tokenizer
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.model_files import read_config, resolve_model_dir
from rlhf_rollout.engines.spec import EngineSpec


@pytest.mark.parametrize("trust", [False, True])
def test_vllm_gets_whether_code_may_run(monkeypatch, tmp_path, trust):
    pytest.importorskip("vllm")
    from rlhf_rollout.engines.vllm import core, names

    monkeypatch.setattr(names, "EngineArgs", lambda **given: SimpleNamespace(create_engine_config=lambda: given))
    monkeypatch.setattr(core, "kv_cache_bytes", lambda *_, **__: 1)
    spec = EngineSpec(model=TrustedModel(tmp_path) if trust else str(tmp_path))
    given = core._engine_config(spec, tmp_path, {}, "transformers", {}, is_eager=True, on_gpu=False)
    assert given["trust_remote_code"] is trust
    assert given["model_impl"] == "transformers"


def test_config_that_leaves_fields_to_the_code_is_read_only_with_trust(tmp_path):
    folder = own_code_model_dir(tmp_path / "mine", tmp_path / "was-run")
    content = json.loads((folder / "config.json").read_text())
    del content["vocab_size"]
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="needs Python code of its own"):
        read_config(resolve_model_dir(str(folder)))
    assert not (tmp_path / "was-run").exists()
    assert read_config(resolve_model_dir(TrustedModel(folder)), may_run=True)["vocab_size"] == 151936


@pytest.mark.parametrize("trust", [False, True])
def test_hub_model_is_downloaded_with_its_code_only_if_that_may_run(monkeypatch, tmp_path, trust):
    asked = {}

    def download(name, *, allow_patterns, **_):
        asked["patterns"] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("rlhf_data.pretrained.hub_answers", lambda: False)
    assert resolve_model_dir(TrustedModel("owner/name") if trust else "owner/name") == tmp_path
    assert ("*.py" in asked["patterns"]) is trust


@pytest.mark.parametrize("trust", [False, True])
def test_an_agents_process_learns_whether_the_tokenizers_code_may_run(monkeypatch, trust):
    from rlhf_rollout.agents import user_agent

    seen = []

    def stop(target, tokenizer):
        seen.append(tokenizer)
        raise SystemExit

    monkeypatch.setattr(user_agent, "load_agent", stop)
    first = {"target": {"module": "m", "name": "f"}, "tokenizer": "a", "trust_remote_code": trust}
    connection, other = socket.socketpair()
    with connection, other:
        user_agent.serve(connection, first)
    assert seen == ["a"]
    assert is_trusted(seen[0]) is trust


@pytest.mark.parametrize("trust", [False, True])
def test_agents_load_the_tokenizer_of_a_trusted_model(tmp_path, trust):
    from rlhf_rollout.agents.user_agent import LazyTokenizer

    folder = own_code_model_dir(tmp_path / "mine", tmp_path / "was-run")
    tokenizer = LazyTokenizer(TrustedModel(folder) if trust else str(folder))
    if trust:
        assert type(tokenizer._load()).__name__ == "MineTokenizer"
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            len(tokenizer)
    assert (tmp_path / "was-run").exists() is trust


@pytest.mark.parametrize("tokenizer", ["", "mine", "plain"])
def test_transformers_engine_decodes_with_a_tokenizer_as_trusted_as_its_name(tmp_path, tokenizer):
    from rlhf_rollout.engines.stopping import decoder
    from rlhf_rollout.engines.transformers import TransformersEngine

    mine = TrustedModel(own_code_model_dir(tmp_path / "mine", tmp_path / "was-run"))
    names = {"": None, "mine": mine, "plain": str(tiny_model_dir(tmp_path / "plain"))}
    engine = TransformersEngine(EngineSpec(model=mine, tokenizer=names[tokenizer]))
    assert type(engine._model).__name__ == "MineForCausalLM"
    assert is_trusted(engine._tokenizer_dir) is (tokenizer != "plain")
    assert decoder(engine._tokenizer_dir)([70, 71])


def test_engine_of_a_command_reads_the_config_by_the_code_of_a_trusted_model(tmp_path):
    from rlhf_rollout.commands.parts import EngineJob

    folder = own_code_model_dir(tmp_path / "mine", tmp_path / "was-run")
    content = json.loads((folder / "config.json").read_text())
    del content["num_key_value_heads"]
    del content["vocab_size"]
    (folder / "config.json").write_text(json.dumps(content))
    job = EngineJob(kind="transformers", spec=EngineSpec(model=TrustedModel(folder)), tokenizer=None)
    tokenizer = load_tokenizer(TrustedModel(folder))
    [masked] = job.masked_spec(tokenizer).masked_ids
    assert masked.stop == 151936
    with pytest.raises(ConfigError, match="needs Python code of its own"):
        EngineJob(kind="transformers", spec=EngineSpec(model=str(folder)), tokenizer=None).masked_spec(tokenizer)
