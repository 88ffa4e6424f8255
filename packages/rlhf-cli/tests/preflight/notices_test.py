"""Notices of the checks across options that depend on sizes, on a recorded run, or on several options."""

import re

import pytest

from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.config.ppo import PpoConfig
from rlhf_data.options.command_line import CommandLine, Parsed
from rlhf_train.algorithms.table import ALGORITHMS

GRPO = "--advantage_estimator group_norm"
SKIP = "--old_logprobs skip --init_kl_coef 0"
ONE_UPDATE = "--train_batch_size 128"


def ppo(*argv: str) -> Parsed[PpoConfig]:
    return CommandLine(config=PpoConfig, prog="rlhf ppo", recipe=lowest_layer).parse(argv)


def notices_with(text: str, *argv: str) -> list[str]:
    return [notice for notice in ppo(*argv).notices if text in notice]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--train_batch_size 1024 --packing_samples", "makes 128 passes per update, of 8 packed samples .*"),
        (
            "--train_batch_size 1024 --packing_samples --generate_max_len 30000 --prompt_max_len 2000",
            "--micro_batch_tokens 32000, or ",
        ),
        ("--train_batch_size 1024", None),  # samples are padded
        ("--train_batch_size 1024 --packing_samples --actor_num_gpus_per_node 16", "makes 8 passes per update"),
        (
            "--train_batch_size 1024 --packing_samples --actor_num_gpus_per_node 16 --sequence_parallel_size 2",
            "makes 16 passes per update",
        ),
        ("--train_batch_size 1024 --packing_samples --micro_train_batch_size 4", None),
        ("--train_batch_size 1024 --packing_samples --micro_batch_tokens 4096", None),
    ],
)
def test_many_packed_passes_whose_size_nobody_chose_are_told(argv, says):
    # The recipe of the built-in task, which is left with a model, chooses a size.
    words = f"--pretrain m --prompt_data p.jsonl --remote_rm_url r.py --rollout_batch_size {argv.split()[1]} {argv}"
    found = notices_with("passes", *words.split())
    assert [bool(re.search(says or "", notice)) for notice in found] == [True] * (says is not None)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ("--reward_batch_size 8 --reward_num_gpus_per_node 2", "no effect"),
        ("--ref_reward_offload --init_kl_coef 0", "ref_reward_offload"),
        ("--ref_reward_offload --lora_rank 2", "ref_reward_offload"),
        ("--dynamic_filtering --dynamic_filtering_reward_range 0 1", "--dynamic_filtering"),
    ],
)
def test_check_ppo_reward_model_options_have_effect_with_one(argv, text):
    assert notices_with(text, *["--remote_rm_url", "None", "--reward_pretrain", "m"], *argv.split()) == []


def test_recorded_rollouts_of_a_quantized_engine_are_corrected_as_in_their_run(tmp_path):
    argv = ("--pretrain", "builtin", "--prompt_data", "builtin", "--remote_rm_url", "r.py", "--replay", str(tmp_path))
    (tmp_path / "config.toml").write_text('[engine]\nvllm_quantization = "fp8"\n[model]\nbf16 = true\n')
    replayed = ppo(*argv)
    assert replayed.config.objective.correction.level == "token"
    assert [notice for notice in replayed.notices if "no effect" in notice and "quantization" in notice] == []
    assert notices_with("early_forwards", *argv, "--early_forwards") == []


def test_check_ppo_option_without_effect_for_two_reasons_is_one_notice():
    argv = ["--colocate_actor_ref", "--init_kl_coef", "0", "--colocate_all_models"]
    (notice,) = [notice for notice in ppo(*argv).notices if notice.startswith("--colocate_actor_ref")]
    assert notice == "--colocate_actor_ref has no effect: --init_kl_coef is 0, so there is no reference model"


@pytest.mark.parametrize(
    "argv",
    [
        "--policy_loss_type gspo --clip_eps_high 0.001",
        "--policy_loss_type cispo --clip_eps_high 0.3",
        f"{GRPO} --running_reward_norm --reward_clip_range 1",
        f"{GRPO} --running_reward_norm --no_advantage_std_norm",
        "--running_reward_norm --dynamic_filtering",
        "--best_metric_key eval/accuracy --eval_steps 1",
        f"--policy_loss_type reinforce {ONE_UPDATE}",
        "--policy_loss_type sapo --sapo_tau 1 2",
        f"--mask_off_policy 0.5 {ONE_UPDATE}",
        "--policy_loss_type dppo_tv --eps_clip 0.2",
        f"{SKIP} {ONE_UPDATE}",
        "--old_logprobs rollout",
        "--async_train",
        "--async_train --max_staleness 2 --mask_stale 1 --old_logprobs rollout",
        "--async_train --is_correction_level token",
        "--async_train --max_staleness 0",
        "--reuse_solved 9",
        "--use_kl_loss --kl_unbiased_gradient",
        "--use_kl_loss --kl_estimator k2",
        "--use_kl_loss --kl_estimator k3",
        "--kl_target 0.1 --kl_horizon 500",
        "--is_correction_level sequence --is_correction_mode mask --is_correction_threshold 0.5 2",
        "--is_reject geometric --is_reject_threshold 0.5 2 --is_correction_drop_masked",
        "--overlong_buffer_len 32 --overlong_penalty_factor 2",
        # models that do not exist, or live with the policy
        "--ref_num_nodes 0",
        "--critic_num_gpus_per_node 0",
        "--reward_num_nodes 0 --reward_num_gpus_per_node 0",
        f"{GRPO} --critic_num_nodes 0 --critic_num_gpus_per_node 0",
        "--init_kl_coef 0 --ref_num_nodes 0 --ref_num_gpus_per_node 0",
        *(f"--advantage_estimator {name} --critic_pretrain None --critic_learning_rate 9e-6" for name in ALGORITHMS),
        *(
            f"--ref_reward_offload {others}"
            for others in ("", "--init_kl_coef 0 --teacher_model t", "--lora_rank 2 --teacher_model t")
        ),
    ],
    ids=str,
)
def test_check_ppo_what_works_gives_no_notice(argv):
    assert ppo(*argv.split()).notices == ()
