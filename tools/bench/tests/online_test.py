"""The settings of the online benchmark are command lines that `rlhf ppo` takes, and its figures are the steps'."""

import argparse
import json
import subprocess
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


@pytest.mark.parametrize("num_steps", [1, 3])
def test_run_that_takes_too_long_is_interrupted_and_its_steps_are_reported(tmp_path, num_steps):
    script = f"""
import pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
run.mkdir()
def end(*_):
    run.joinpath("interrupted").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
run.joinpath("metrics.jsonl").write_text('{{"time/step": 2, "time/train": 1}}\\n' * {num_steps} + '{{"time/st')
time.sleep(600)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    if num_steps == 1:
        with pytest.raises(TimeoutError, match="1 steps have ended within 5 s"):
            online.run(command, tmp_path / "run", 5)
    else:
        result = online.run(command, tmp_path / "run", 5)
        assert len(result["steps"]) == 3 and result["median"]["time/step"] == 2
    assert (tmp_path / "run/interrupted").exists()


def test_run_that_fails_has_no_report(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        online.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "run", 60)


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


def test_a_reward_model_scores_where_it_is_asked_for(tmp_path):
    sizes = {"prompts": 1, "steps": 1, "prompt_tokens": 4, "mean_response_tokens": None}
    flags = online.write_inputs(argparse.Namespace(shape="tiny", reward_model=True, **sizes), tmp_path)
    assert flags[-2:] == ["--reward_pretrain", str(tmp_path / "reward_model")]
    [kind] = json.loads((tmp_path / "reward_model/config.json").read_text())["architectures"]
    assert kind.endswith("ForSequenceClassification")
