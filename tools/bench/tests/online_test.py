"""The settings of the online benchmark are command lines that `rlhf ppo` takes, and its figures are the steps'."""

import argparse
import json
import sys

import pytest
from transformers import AutoTokenizer

from rlhf_cli.commands.ppo import COMMAND_LINE
from workloads.speed import online


@pytest.mark.parametrize("setting", online.SETTINGS)
def test_flags_of_a_setting_are_those_of_the_command(setting, tmp_path):
    sizes, flags = online.SETTINGS[setting]
    options = argparse.Namespace(samples=8, prompt_tokens=256, steps=6, **sizes)
    named = ["--pretrain", "model", "--prompt_data", "prompts.jsonl", "--remote_rm_url", "reward.py"]
    always = [*online.size_flags(options), *online._NO_CHECKPOINT, *online._ON_GPU]
    config = COMMAND_LINE.parse([*named, *always, *flags]).config
    assert not config.checkpoint.spec().full
    assert config.batch.num_updates == 1
    assert config.batch.num_rollouts == (256 if setting == "W4" else 512)
    assert config.rollout.generate_max_len == sizes["response_tokens"]
    assert (config.algorithm.old_logprobs == "skip") == (setting != "W3")
    assert config.model.packing_samples == (setting != "W2")
    assert config.training.adam_offload == (setting == "W4")


def test_figures_leave_out_the_first_step_and_add_up_the_phases(tmp_path):
    script = "import json, pathlib, sys; run = pathlib.Path(sys.argv[1]); run.mkdir()\n"
    script += (
        "lines = [{'time/step': s, 'time/train': s - 1, 'time/other': 1} for s in (9, 2, 4)] + [{'time/total': 20}]\n"
    )
    script += "run.joinpath('metrics.jsonl').write_text(''.join(json.dumps(line) + chr(10) for line in lines))\n"
    result = online.run([sys.executable, "-c", script, str(tmp_path / "run")], tmp_path / "run", 60)
    assert result["median"] == {"time/step": 3, "time/train": 2, "time/other": 1}
    assert (result["sum_of_phases"], result["seconds_first_step"], result["end"]) == (3, 9, {"time/total": 20})


def test_prompts_have_the_tokens_asked_for_and_responses_end_at_the_rate_asked_for(tmp_path):
    sizes = {"prompts": 3, "steps": 2, "prompt_tokens": 40, "mean_response_tokens": 8}
    flags = online.write_inputs(argparse.Namespace(shape="tiny", reward_model=False, **sizes), tmp_path)
    assert flags[-2:] == ["--remote_rm_url", str(tmp_path / "reward.py")]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line)["input"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == len(set(rows)) == 6
    assert {len(tokenizer.encode(row)) for row in rows} == {40}
    config = json.loads((tmp_path / "model/generation_config.json").read_text())
    ends = config["eos_token_id"]
    assert len(set(ends)) == len(ends) == 64 and tokenizer.eos_token_id in ends  # an eighth of 512 tokens
    assert max(ends) < 512
