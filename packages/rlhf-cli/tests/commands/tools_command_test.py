"""The tools as `rlhf` has them: quick help, the model and data that ship, and a merge that changes no number."""

import json
import os

import numpy as np
import pytest
import torch

from rlhf_cli.builtin import BUILTIN
from rlhf_cli.main import main
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_reward_model
from rlhf_models.lora import LoraSpec, add_lora, merge_adapter, save_adapter
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir

BATCH = TokenBatch.padded([np.arange(5, 12)], 0, "cpu")


def test_generate_writes_data_for_sft_with_the_model_that_ships(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    words = ["generate", "--engine", "transformers", f"--pretrain={BUILTIN}", "--prompt_data", BUILTIN]
    more = ["--input_key", "prompt", "--max_samples", "2", "--generate_max_len", "4", "--output_path", str(out)]
    more += ["--post_processor", "plain"]
    assert main([*words, *more]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) <= 2
    assert all(row["input"] and row["output"] and row["finish_reason"] in ("stop", "length") for row in rows)


def test_lora_combiner_writes_the_model_with_its_adapter(tmp_path, capsys, monkeypatch):
    base = tiny_model_dir(tmp_path / "base")
    model = load_actor(base, dtype="float32")
    add_lora(model, LoraSpec(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, so that the merge would change nothing
                parameter.normal_(std=0.05)
    expected = model.eval()(BATCH).logprobs.detach()
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    words = ["--model_path", str(base), "--lora_path", str(tmp_path / "adapter"), "--output_path"]

    def merge_loudly(*args, **kwargs):
        os.write(2, b"a library speaks\n")  # as libraries in C do
        return merge_adapter(*args, **kwargs)

    monkeypatch.setattr("rlhf_models.lora.merge_adapter", merge_loudly)
    assert main(["lora_combiner", *words, str(tmp_path / "merged"), "--bf16", "false"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == f"written to {tmp_path / 'merged'}"
    assert "a library speaks" in (tmp_path / "merged.log").read_text()
    assert f"are in {tmp_path / 'merged.log'}" in shown.err
    merged = load_actor(tmp_path / "merged", dtype="float32").eval()(BATCH).logprobs.detach()
    plain = load_actor(base, dtype="float32").eval()(BATCH).logprobs.detach()
    assert torch.allclose(merged, expected, atol=1e-5)
    assert not torch.allclose(merged, plain, atol=1e-3)
    assert main(["lora_combiner", *words, str(tmp_path / "merged")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    pytest.importorskip("bitsandbytes")
    assert main(["lora_combiner", *words, str(tmp_path / "rounded"), "--bf16", "false", "--load_in_4bit"]) == 0
    add_lora(rounded := load_actor(base, dtype="float32"), LoraSpec(rank=2, load_in_4bit=True))
    rounded.load_state_dict(
        {name: weight for name, weight in model.state_dict().items() if "lora" in name}, strict=False
    )
    found = load_actor(tmp_path / "rounded", dtype="float32").eval()(BATCH).logprobs.detach()
    assert torch.allclose(found, rounded.eval()(BATCH).logprobs.detach(), atol=1e-5)
    assert not torch.allclose(found, merged, atol=1e-3)


def test_lora_combiner_of_a_reward_model_keeps_the_head_of_the_adapter(tmp_path):
    from rlhf_models.loading import load_critic

    base = tiny_reward_model_dir(tmp_path / "base")
    model = load_critic(base, dtype="float32")
    add_lora(model, LoraSpec(rank=2))
    with torch.no_grad():
        model.value_head.weight.fill_(0.125)
    save_adapter(model, model.state_dict(), tmp_path / "adapter")
    words = ["--model_path", str(base), "--lora_path", str(tmp_path / "adapter"), "--output_path"]
    assert main(["lora_combiner", *words, str(tmp_path / "merged")]) == 0
    assert (load_reward_model(tmp_path / "merged", dtype="bfloat16").value_head.weight == 0.125).all()


def test_lora_combiner_names_a_flag_without_effect_and_what_is_missing(capsys):
    assert main(["lora_combiner", "--dry_run", "--is_rm", "--lora_path", "y"]) == 0
    printed = capsys.readouterr()
    assert 'lora_path = "y"' in printed.out
    assert "notice: --is_rm has no effect" in printed.err
    assert "still missing: --model_path is missing" in printed.err
