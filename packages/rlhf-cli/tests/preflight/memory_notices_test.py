"""What `ppo` says about the memory of GPUs: a table in dry runs, and notices about sleep. The GPU is a made-up one."""

import json
from pathlib import Path

import pytest

from rlhf_cli.commands.ppo import main
from rlhf_cli.preflight.memory import gpu_memory_bytes
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train import run_memory

APART = ["--colocate_all_models", "false", "--zero_stage", "2", "--actor_num_gpus_per_node", "2", "--plan_gpus", "4"]
TURNS = ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]


class Started(BaseException):
    """A run would start now."""


def started(job, view):
    raise Started


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """Return a function that makes this machine have a GPU of so many MiB, by a driver that only says so."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr("rlhf_train.online.run_online", started)

    def make(said: str, devices: str = "0") -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        driver = programs / "nvidia-smi"
        driver.write_text(f"#!/bin/sh\n{said}\n")
        driver.chmod(0o755)

    return make


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model of 114,992,128 weights: the states of its training, of 18 bytes per weight, take 1.9 GiB."""
    sizes = {"vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 1024}
    return tiny_model_dir(tmp_path_factory.mktemp("model"), tied=False, **sizes)


def flags(folder: Path, model: Path, *more: str) -> list[str]:
    (folder / "prompts.jsonl").write_text(json.dumps({"input": "What is 1 + 1?"}) + "\n")
    code = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
    (folder / "reward.py").write_text(code)
    options = {"pretrain": model, "prompt_data": "prompts.jsonl", "remote_rm_url": "reward.py"}
    options |= {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "train_batch_size": 32, "micro_train_batch_size": 4}
    options |= {"prompt_max_len": 64, "generate_max_len": 64, "init_kl_coef": 0, "vllm_max_num_seqs": 8}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*words, "--advantage_estimator", "group_norm", "--bf16", "--colocate_all_models", *more]


def dry_run(capsys, *argv: str) -> tuple[list[str], list[str]]:
    """Return the lines of the table without its title, and the notices about memory."""
    assert main([*argv, "--dry_run"]) == 0
    printed = capsys.readouterr()
    found = printed.out.partition("memory per process and GPU, estimated, in GiB\n")[2]
    return found.partition("results will be in")[0].splitlines(), notices(printed.out + printed.err)


def notices(text: str) -> list[str]:
    return [line for line in text.splitlines() if "fit together" in line or "at their peaks" in line]


def test_dry_run_shows_what_each_side_needs_by_hand(gpu, model, tmp_path, capsys):
    gpu("echo 143771")  # an H200, in MiB
    # 2 layers: attention 2 * 1024 * 512 * (2 + 1) and MLP 3 * 1024 * 1024, biases 512 * 4, norms 2 * 1024; two tables
    # of 50,000 * 1024, and a norm. 2 bytes each are 0.21 GiB, 4 bytes 0.43 and 8 bytes 0.86.
    weights = 2 * (3_145_728 + 3_145_728 + 2048 + 2048) + 2 * 51_200_000 + 1024
    assert [round(size * weights / 2**30, 1) for size in (2, 4, 8)] == [0.2, 0.4, 0.9]
    # Its logits are 4 * 64 * 50,000 * 2 bytes, with a gradient of the head of 51,200,000 * 2: 0.12 GiB. A bucket has
    # 256 MiB. The engine has 2 GiB fixed, for 8 slots of 128 tokens 8 * 128 * (4 + 3) * 1024 * 2 = 0.01 GiB of
    # activations, as much for pieces of CUDA graphs, and 0.01 of logits.
    table, said = dry_run(capsys, *flags(tmp_path, model))
    train = "moments 0.9, gradients 0.4, master weights 0.4, sync bucket 0.2, weights 0.2, logits 0.1"
    assert table == [
        f"  train           2.3  {train}",
        "  engines         2.3  work 2.0, weights 0.2",
        "  fullest GPU     4.6 of 140.4, fits; 4.3 if engines and trainers sleep in turn",
    ]
    assert said == []
    # With adapters the policy is its own reference.
    table, _ = dry_run(capsys, *flags(tmp_path, model, "--lora_rank", "8", "--init_kl_coef", "0.1"))
    assert table[0] == "  train           0.5  sync bucket 0.2, weights 0.2"


def test_two_gpus_two_engines_on_each_and_reward_models(gpu, model, tmp_path, capsys):
    reward = tiny_reward_model_dir(tmp_path / "reward", hidden_size=1024, vocab_size=50_000, intermediate_size=1024)
    # The smaller of two GPUs counts.
    gpu("echo 143771\necho 81559", "0,1")
    more = ("--actor_num_gpus_per_node", "2", "--vllm_num_engines", "4", "--zero_stage", "3")
    table, _ = dry_run(capsys, *flags(tmp_path, model, *more, "--reward_pretrain", str(reward)))
    train, engines, rewards, last = table
    # Half of 4 + 4 + 8 + 2 bytes per weight are 0.92 GiB; buckets of 5e8 float32 gradients are 1.86; and 0.2 gathered.
    assert "reduction 1.9, moments 0.4" in train and "gathered 0.2" in train
    # 2 layers and a table are 0.12 GiB. A pass of 64 x 128 tokens works on one layer: 2 * (4 * 1024 + 2 * 512 * 3
    # + 3 * 1024) + 2 * 1024 * 6 + 2 * 1024 = 34,816 bytes per token, 0.27 GiB.
    assert rewards.split(maxsplit=2)[1:] == ["0.4", "working 0.3, frozen weights 0.1"]
    sizes = [float(line.split()[1]) for line in (train, engines, rewards)]
    assert float(last.split()[2]) == pytest.approx(sizes[0] + 2 * sizes[1] + sizes[2], abs=0.21)
    assert "of 79.6, fits" in last


def test_size_of_a_gpu_is_left_out_where_it_is_not_known(gpu, model, tmp_path, capsys):
    gpu("exit 1", devices="")
    table, said = dry_run(capsys, *flags(tmp_path, model, *TURNS), "--plan_gpus", "1")
    assert table[2] == "  fullest GPU     4.3; 4.6 without sleep"
    assert said == [] and gpu_memory_bytes() is None
    for answer in ("exit 1", "echo unknown", "echo"):
        gpu(answer)
        assert gpu_memory_bytes() is None
    gpu("echo 100\necho 99")
    assert gpu_memory_bytes() == 99 << 20
    assert dry_run(capsys, *flags(tmp_path, model, *TURNS), "--plan_gpus", "0")[0] == []


@pytest.mark.parametrize(
    ("size", "more", "notice"),
    [
        (143_771, TURNS, "fit together: 4.6 of 140.4 GiB; without --vllm_enable_sleep and --deepspeed_enable_sleep"),
        (143_771, TURNS[:1], "fit together: 4.6 of 140.4 GiB; without --vllm_enable_sleep, and with"),
        (5_350, TURNS, "and with --vllm_gpu_memory_utilization 0.5 or less, no time goes into sleep and waking"),
        (4_900, TURNS, None),  # 4.6 of 4.8 GiB: less than 10 % to spare
        (4_900, [], None),
        (4_500, [], "need 4.6 of 4.4 GiB, and 4.3 if engines and trainers take turns: add --vllm_enable_sleep --deep"),
        (4_500, TURNS[:1], "if engines and trainers take turns: add --deepspeed_enable_sleep"),
        (4_500, TURNS, None),  # they help
        (4_000, TURNS, "need 4.6 of 3.9 GiB, and 4.3 if engines and trainers take turns: lower --micro_train_batch"),
        (3_000, [*TURNS, "--bf16_moments"], "or add --gradient_checkpointing, --adam_offload, --zero_stage 3 on more"),
        (
            2_000,
            [*TURNS, "--adam_offload", "--advantage_estimator", "gae", "--init_kl_coef", "0.1"],
            "or add --gradient_checkpointing, --bf16_moments, --critic_lora_rank 64, --ref_reward_offload",
        ),
        (2_000, [*TURNS, "--zero_stage", "3"], "lower --micro_train_batch_size or --vllm_max_num_seqs, or add"),
        (
            2_000,
            [*TURNS, "--gradient_checkpointing", "--optim", "muon", "--zero_stage", "3"],
            "lower --micro_train_batch_size or --vllm_max_num_seqs, or add GPUs",
        ),
        (
            2_000,
            [*APART, "--advantage_estimator", "gae"],  # the actor has two ranks and the critic one
            "or add --gradient_checkpointing, --bf16_moments, --critic_lora_rank 64, --zero_stage 3 on more GPUs",
        ),
        (4_500, ["--async_train"], "need 4.6 of 4.4 GiB: lower --micro_train_batch_size"),  # it cannot sleep
    ],
)
def test_notices_say_which_flags_help_and_which_are_not_needed(gpu, model, tmp_path, capsys, size, more, notice):
    gpu(f"echo {size}")
    _, said = dry_run(capsys, *flags(tmp_path, model, *more))
    assert len(said) == (notice is not None)
    assert notice is None or notice in said[0]


def test_passes_are_as_large_as_the_flags_allow(gpu, model, tmp_path, monkeypatch):
    """The largest passes that reach the memory function, by hand: rows of 64 + 64 tokens, 4 to a prompt."""
    gpu("echo 143771")
    found = []
    compute = run_memory.trainer_memory
    monkeypatch.setattr(run_memory, "trainer_memory", lambda *w, **more: found.append(w) or compute(*w, **more))

    def passes(*more: str) -> tuple:
        assert main([*flags(tmp_path, model, *more), "--dry_run"]) == 0
        _, largest, num_ranks, copies = found[-1]
        return largest.train, largest.forward, largest.most_targets, num_ranks, copies

    rows = ("--micro_rollout_batch_size", "16")
    assert passes(*rows) == ((4 * 128, 4 * 64), (16 * 128, 16 * 64), 16 * 64, 1, 1)
    # 6 rows are of 2 prompts.
    shared = ("--packing_samples", "--share_prompts", "--micro_train_batch_size", "6", *rows)
    assert passes(*shared) == ((6 * 64 + 2 * 64, 6 * 64), (16 * 64 + 4 * 64, 16 * 64), 16 * 64, 1, 1)
    # No more rows than a rank has: 32 in a step, and 8 in an update.
    large = ("--micro_train_batch_size", "64", "--micro_rollout_batch_size", "64", "--train_batch_size", "8")
    assert passes(*large) == ((8 * 128, 8 * 64), (32 * 128, 32 * 64), 32 * 64, 1, 1)
    budget = ("--packing_samples", "--micro_batch_tokens", "1000")
    assert passes(*budget) == ((1000, 1000), (1000, 1000), 1000, 1, 1)
    budget = ("--packing_samples", "--micro_batch_tokens", "9999")
    assert passes(*budget) == ((32 * 128, 32 * 64), (32 * 128, 32 * 64), 32 * 64, 1, 1)
    # Turns of an agent may fill the context after a prompt of one token.
    (tmp_path / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    assert passes("--agent_func_path", "agent.py")[:2] == ((4 * 128, 4 * 127), (8 * 128, 8 * 127))
