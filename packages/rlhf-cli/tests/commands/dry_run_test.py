"""Dry runs of `ppo` of what is not on this machine: models, data, rewards, GPUs."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_cli.commands.ppo import main

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's folder, with prompts, a reward and a model; without GPUs or a network."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("socket.socket.connect", lambda *words: pytest.fail("a dry run used the network"))
    rows = [{"input": f"What is {n} + 1?"} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    return tmp_path


def flags(**changes: object) -> list[str]:
    options: dict[str, object] = {"pretrain": "./model", "prompt_data": "prompts.jsonl", "remote_rm_url": "reward.py"}
    options |= {"rollout_batch_size": 8, "train_batch_size": 8, "prompt_max_len": 64, "generate_max_len": 16}
    pairs = ((name, value) for name, value in (options | changes).items() if value is not None)
    return [word for name, value in pairs for word in (f"--{name}", str(value))]


def lists(capsys) -> dict[str, list[str]]:
    """Return what was printed under each of the last titles, without hints."""
    out = capsys.readouterr().out
    assert "placement: " in out
    found: dict[str, list[str]] = {}
    for block in out.partition("results will be in")[2].split("\n\n")[1:]:
        title, *lines = block.splitlines()
        found[title] = [line.strip() for line in lines if "hint: " not in line]
    return found


def test_line_without_prompts_shows_its_plan_and_that_one_thing(folder, capsys):
    assert main([*flags(prompt_data=None), "--dry_run"]) == 0
    assert lists(capsys) == {
        "still missing": ["--prompt_data is missing: --pretrain ./model needs prompts to train on"],
    }
    assert main(flags(prompt_data=None)) == 2  # a run refuses
    assert "--prompt_data is missing" in capsys.readouterr().err


def test_reward_that_compares_with_labels_lacks_their_key(folder, capsys):
    line = flags(remote_rm_url="math")
    assert main([*line, "--dry_run"]) == 0
    what = "--label_key is missing: the reward math compares a response with the label of its row"
    assert lists(capsys) == {"still missing": [what]}
    assert main(line) == 2
    assert f"error: {what}" in capsys.readouterr().err


def test_names_on_the_hub_are_not_looked_at(folder, capsys):
    changes = {"pretrain": "meta/llama", "prompt_data": "gsm8k", "reward_pretrain": "a/b", "critic_pretrain": "c/d"}
    changes["vllm_draft_model"] = "e/f"
    assert main([*flags(**changes), "--dry_run"]) == 0
    found = lists(capsys)
    assert [line.split(":")[0] for line in found.pop("not looked at")] == [
        "--pretrain meta/llama",
        "--prompt_data gsm8k",
        "--reward_pretrain a/b",
        "--critic_pretrain c/d",
        "--vllm_draft_model e/f",
    ]
    assert found == {}


def test_files_and_folders_that_do_not_exist_are_missing(folder, capsys):
    changes = {"pretrain": "./output", "prompt_data": "absent.jsonl", "reward_pretrain": "/rm", "remote_rm_url": "r.py"}
    assert main([*flags(**changes), "--dry_run", "--eval_data", "./held"]) == 0
    assert lists(capsys) == {
        "still missing": [
            f"--pretrain ./output: there is no folder {folder / 'output'}",
            f"--prompt_data absent.jsonl: there is no file {folder / 'absent.jsonl'}",
            "--reward_pretrain /rm: there is no folder /rm",
            f"--remote_rm_url r.py: there is no file {folder / 'r.py'}",
        ]
    }


def test_what_is_here_is_looked_at_though_something_else_is_not(folder, capsys):
    assert main([*flags(remote_rm_url="absent.py", num_episodes=3), "--dry_run"]) == 0
    assert "3 steps x 1 = 3 updates; 24 prompts drawn from 8, 3.00 passes" in capsys.readouterr().out
    assert main([*flags(remote_rm_url="absent.py", input_key="question"), "--dry_run"]) == 2
    assert "unknown key `question`; known: input" in capsys.readouterr().err
    assert main([*flags(remote_rm_url="absent.py", generate_max_len=4096), "--dry_run"]) == 2
    assert "the model has a context of 2048" in capsys.readouterr().err
    assert main([*flags(remote_rm_url="absent.py", aux_loss_coef=0.1), "--dry_run"]) == 2
    assert "--aux_loss_coef balances experts" in capsys.readouterr().err


def test_gpus_are_those_that_the_flags_name_or_plan_gpus(folder, capsys):
    shared = ["--colocate_all_models", "--actor_num_gpus_per_node", "4", "--vllm_num_engines", "4", "--dry_run"]
    assert main([*flags(), *shared]) == 0
    out = capsys.readouterr().out
    assert (
        "placement: 4 GPU(s)\n  train    4 x actor + critic + reference, GPU 0-3\n  engines  4 x vLLM, GPU 0-3" in out
    )
    assert "not looked at\n  GPUs: there are none here; planned for the 4 that the flags name" in out
    assert main([*flags(), *shared, "--plan_gpus", "8"]) == 0
    assert lists(capsys) == {"not looked at": ["GPUs: planned for --plan_gpus 8"]}
    assert main([*flags(), *shared, "--plan_gpus", "0"]) == 0
    assert "placement: no GPU, everything shares the CPU\n  train    4 x actor" in capsys.readouterr().out
    assert main([*flags(), *shared, "--plan_gpus", "2"]) == 2
    assert "models on shared GPUs need 4 GPUs (train 4, engines 4), and there are 2" in capsys.readouterr().err


def test_gpus_that_are_not_enough_are_missing(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main([*flags(), "--dry_run"]) == 0
    numbers = "actor 1, critic 1, reference 1, engines 1"
    assert lists(capsys) == {"still missing": [f"models apart need 4 GPUs ({numbers}), and there are 2"]}
    assert main([*flags(), "--dry_run"]) == 0
    hint = "--colocate_all_models --actor_num_gpus_per_node 2 --vllm_num_engines 2 shares all 2 GPUs"
    assert f"\n    hint: {hint}\n" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main([*flags(), "--dry_run"]) == 0
    assert "note: models apart need 4 GPUs and there is 1: all models share it" in capsys.readouterr().out


def test_cluster_that_does_not_answer_is_not_looked_at(folder, capsys, monkeypatch):
    refused = Mock(side_effect=ConnectionRefusedError("nobody there"))
    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr("ray.init", refused)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main([*flags(), "--dry_run"]) == 0
    (line,) = lists(capsys)["not looked at"]
    assert "127.0.0.1:1" in line


@pytest.mark.parametrize("lacking", ["nothing", "prompts"])
def test_model_that_vllm_computes_otherwise_than_the_trainer_is_refused(folder, capsys, lacking):
    file = folder / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["DogeForCausalLM"]}))
    changes = {"prompt_data": None} if lacking == "prompts" else {}
    assert main([*flags(**changes), "--dry_run"]) == 2
    assert "error: vLLM computes a doge model without the mask" in capsys.readouterr().err


def test_model_that_vllm_does_not_compute_on_a_cpu_is_refused_there(folder, capsys):
    file = folder / "model" / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"architectures": ["JambaForCausalLM"]}))
    assert main([*flags(plan_gpus=1), "--dry_run"]) == 0
    capsys.readouterr()
    for words in (["--dry_run"], []):
        assert main([*flags(), *words]) == 2
        assert "vLLM has no kernel for the Mamba layers of JambaForCausalLM on a CPU" in capsys.readouterr().err
    file.write_text(json.dumps(fields | {"architectures": ["Qwen3NextForCausalLM"]}))
    assert main([*flags(), "--dry_run"]) == 2
    assert "not in float32\n\nhint: add --bf16" in capsys.readouterr().err
    assert main([*flags(), "--bf16", "--dry_run"]) == 0
