"""OpenRLHF's flags: each is accepted, says that it has no effect, or names the feature that is not available."""

from pathlib import Path

import pytest

from rlhf_cli.main import command_line
from rlhf_cli.openrlhf.flags import flags_of, table
from rlhf_data.errors import ConfigError, FeatureError
from rlhf_data.options.command_line import Parsed

HERE = Path(__file__).parent
MODEL = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--remote_rm_url", "r.py")
DATA = ("--pretrain", "m", "--dataset", "d.jsonl")
GENERATE = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--output_path", "o.jsonl")
SCORE = ("--pretrain", "m", "--dataset", "d.jsonl", "--output_path", "o.jsonl")
NAMES = {
    block.split()[0]: block.split()[1:]
    for block in (HERE / "openrlhf_flag_names.txt").read_text().split("\n\n")
    if not block.startswith("#")
}


def parse(command: str, *argv: str) -> Parsed:
    given = {"ppo": MODEL, "generate": GENERATE, "score": SCORE}.get(command, DATA)
    return command_line(command).parse([*given, *argv])


def option(parsed: Parsed, name: str):
    sections = (getattr(parsed.config, section) for section in type(parsed.config).model_fields)
    return next(getattr(section, name) for section in sections if hasattr(section, name))


@pytest.mark.parametrize("command", NAMES)
def test_every_flag_of_openrlhf_is_known(command):
    parser = command_line(command).parser()
    known = {name for action in parser._actions for name in action.option_strings}
    assert [name for name in NAMES[command] if f"--{name}" not in known] == []


def test_table_has_no_flag_twice_for_a_command_and_names_options_that_exist():
    for command in NAMES:
        names = [name for row in table() if command in row.commands for name in row.names]
        assert sorted(set(names)) == sorted(names)
    options = {
        name
        for command in NAMES
        for section in command_line(command).config.model_fields.values()
        for name in section.annotation.model_fields
    }
    for row in table():
        if row.kind.startswith("option") and not {"generate", "score", "serve_rm", "chat"} & set(row.commands):
            assert row.text in options, row
    assert {row.kind for row in table()} == {
        "option",
        "option of all models",
        "special",
        "no effect",
        "not available",
    }


@pytest.mark.parametrize(
    ("command", "argv", "name", "value"),
    [
        ("ppo", "--actor.model_name_or_path org/model", "pretrain", "org/model"),
        ("ppo", "--actor.adam.lr 2e-6", "actor_learning_rate", 2e-6),
        ("ppo", "--actor.adam.betas 0.8 0.9 --critic.adam.betas 0.8 0.9", "adam_betas", (0.8, 0.9)),
        ("ppo", "--actor.optim muon --critic.optim muon --muon.momentum 0.9", "muon_momentum", 0.9),
        ("ppo", "--actor.adam.weight_decay 0.1 --l2 0.1", "l2", 0.1),
        ("ppo", "--entropy_coef 0.02", "entropy_loss_coef", 0.02),
        ("ppo", "--actor.loss_agg_mode seq-mean-token-mean", "loss_agg_mode", "seq_mean_token_mean"),
        ("ppo", "--algo.kl.use_loss --algo.kl.estimator k3", "use_kl_loss", True),
        ("ppo", "--enable_vllm_is_correction", "is_correction_level", "token"),
        ("ppo", "--use_kl_loss --use_kl_estimator_k3", "kl_estimator", "k3"),
        ("generate", "--iter 3 --rollout_batch_size 10240", "skip_samples", 30720),
        ("generate", "--iter 3 --rollout_batch_size 10240", "max_samples", 10240),
        ("generate", "--iter 1", "skip_samples", 2048),
        ("generate", "--rollout_batch_size 10240", "max_samples", None),
        ("score", "--micro_batch_size 4", "reward_batch_size", 4),
        ("ppo", "--vllm_is_correction_type tis", "is_correction_mode", "truncate"),
        ("ppo", "--enable_vllm_is_correction --vllm_is_correction_type icepop", "is_correction_mode", "mask"),
        ("ppo", "--vllm_is_correction_type icepop", "is_correction_level", "token"),
        ("ppo", "--algo.advantage.is_correction_level token", "is_correction_level", "token"),
        ("ppo", "--algo.advantage.is_correction_mode clip", "is_correction_mode", "truncate"),
        ("ppo", "--vllm_is_truncated_threshold 0.5 4", "is_correction_threshold", (0.5, 4)),
        ("ppo", "--algo.advantage.is_correction_threshold 3", "is_correction_threshold", (0, 3)),
        ("ppo", "--reward.clip_range -5 5", "reward_clip_range", (-5, 5)),
        ("ppo", "--reward_clip_range 10.0", "reward_clip_range", (-10, 10)),
        ("ppo", "--data.max_len 4096 --rollout.max_new_tokens 1000", "prompt_max_len", 3096),
        ("ppo", "--data.max_len 4096", "prompt_max_len", 3072),
        ("ppo", "--data.max_len 512", "generate_max_len", 256),
        ("ppo", "--max_len 4096 --prompt_max_len 100", "prompt_max_len", 100),
        ("ppo", "--use_dynamic_batch --packing_samples", "micro_batch_tokens", 16192),
        (
            "ppo",
            "--train.dynamic_batch_enable --train.max_tokens_per_gpu 4096 --packing_samples",
            "micro_batch_tokens",
            4096,
        ),
        ("ppo", "--train_max_tokens_per_gpu 4096", "micro_batch_tokens", None),
        ("ppo", "--ring_attn_size 2 --ring_head_stride 2 --packing_samples", "sequence_parallel_size", 2),
        ("sft", "--ds.ring_attn_size 4 --ds.packing_samples", "sequence_parallel_size", 4),
        ("ppo", "--vllm.sync_backend gloo", "vllm_sync_backend", "host"),
        ("ppo", "--ds.param_dtype bf16", "bf16", True),
        ("ppo", "--ref.offload --reward.offload", "ref_reward_offload", True),
        ("kd", "--teacher_model t --teacher_offload", "ref_reward_offload", True),
        ("ppo", "--async_train --async_queue_size 2", "max_staleness", 2),
        ("ppo", "--async_train --partial_rollout", "at_update", "keep"),
        ("ppo", "--ckpt.best_metric_key none", "best_metric_key", None),
        ("dpo", "--model.ipo_enable", "ipo", True),
    ],
)
def test_flag_sets_the_option_that_it_stands_for(command, argv, name, value):
    parsed = parse(command, *argv.split())
    assert option(parsed, name) == value
    assert not [notice for notice in parsed.notices if "not available" in notice]


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("ppo", "--flash_attn"),
        ("ppo", "--rollout.max_tokens_per_gpu 4096"),
        ("ppo", "--vllm_sync_with_ray"),
        ("ppo", "--actor.gradient_checkpointing_reentrant"),
        ("ppo", "--ds.lora.dropout 0.1"),
        ("ppo", "--perf"),
        ("rm", "--model.compute_fp32_loss_enable"),
        ("sft", "--data.dataloader_num_workers 4"),
        ("dpo", "--ds.use_liger_kernel"),
    ],
)
def test_flag_with_nothing_left_to_choose_is_one_notice(command, argv):
    flag = argv.split()[0]
    parsed = parse(command, *argv.split(), *argv.split())
    assert len([notice for notice in parsed.notices if notice.startswith(f"{flag} has no effect: ")]) == 1
    assert parsed.config == parse(command).config


@pytest.mark.parametrize(
    ("command", "argv", "feature"),
    [
        ("ppo", "--vllm_generate_batch_size 2048", "generating more prompts than a step trains"),
        ("prm", "--data.image_key images", "models that read images"),
        ("ppo", "--algo.advantage.estimator flash_reinforce", "FlashREINFORCE"),
        ("ppo", "--vllm_is_correction_type seq-mask-tis", "masking responses by their geometric mean"),
        ("ppo", "--algo.advantage.is_correction_level seq", "masking responses by their geometric mean"),
        ("ppo", "--algo.advantage.is_correction_gating tv", "a gate by binary KL or total variation"),
        ("ppo", "--ref_pretrain other", "a reference model other than the policy before the run"),
        ("ppo", "--actor.muon.lr 0.02", "a learning rate of its own for Muon"),
        ("ppo", "--ds.param_dtype fp16", "float16"),
        ("kto", "--vanilla_loss", "KTO on pairs"),
    ],
)
def test_flag_of_a_feature_that_is_not_available_names_the_feature(command, argv, feature):
    with pytest.raises(FeatureError) as caught:
        parse(command, *argv.split())
    assert str(caught.value).startswith(f"not available: {feature}")
    assert "unknown" not in str(caught.value)
    (error,) = parse(command, "--dry_run", *argv.split()).unavailable
    # A dry run names all such flags, and adds no hint to those that have none of their own.
    assert str(caught.value).startswith(str(error))


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("sft", "--save_steps -1 --ckpt.save_steps -1"),
        ("ppo", "--aux_loss_coef 0 --ring_attn_size 1 --ds.ring_attn_head_stride 1 --zpg 1"),
        ("ppo", "--async_train false --lora_rank 0 --ds_tensor_parallel_size 1"),
        ("ppo", "--actor.optim adam --actor.adam.eps 1e-8 --grad_accum_dtype fp32 --value_head_prefix score"),
        ("ppo", "--algo.advantage.is_correction_gating ratio --agent_func_path None"),
        ("sft", "--local_rank=0"),
        ("ppo", "--local_rank 3 --openrlhf"),
    ],
)
def test_words_that_ask_for_nothing_are_accepted_in_silence(command, argv):
    parsed = parse(command, *argv.split())
    assert parsed.config == parse(command).config
    assert not [notice for notice in parsed.notices if "no effect" in notice]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--actor.adam.betas 0.8 0.9 --critic.adam.betas 0.8 0.99", "set --adam_betas to"),
        ("--vllm_is_correction_type mask", "unknown value `mask`; known: icepop, tis"),
        ("--data.max_len 1024 --generate_max_len 1024", "have 1024 tokens together"),
        ("--data.max_len long", "--data.max_len is long; it must be a whole number"),
        ("--vllm_is_truncated_threshold 1 2 3", "it must be 2 numbers"),
        ("--ds.param_dtype int8", "unknown value `int8`"),
        ("--algo.advantage.estimator gea", "did you mean `gae`?"),
    ],
)
def test_words_that_mean_nothing_are_refused(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse("ppo", *argv.split())
    assert message in str(caught.value)
    assert not isinstance(caught.value, FeatureError)


def test_lora_combiner_takes_openrlhfs_spellings():
    paths = [word for name in ("model", "lora", "output") for word in (f"--{name}_path", name)]
    lora_combiner = command_line("lora_combiner")
    assert lora_combiner.parse([*paths, "--ds.param_dtype", "fp32"]).config.merge.dtype == "float32"
    assert lora_combiner.parse([*paths, "--bf16"]).config.merge.dtype == "bfloat16"
    (notice,) = lora_combiner.parse([*paths, "--is_rm"]).notices
    assert notice.startswith("--is_rm has no effect")


def test_flags_of_a_command_are_those_of_its_rows():
    assert "async_train" in flags_of("ppo") and "async_train" not in flags_of("sft")
    assert "adam.lr" in flags_of("sft") and "adam.lr" not in flags_of("ppo")
    assert flags_of("chat")["max_new_tokens"].options == ("generate_max_len",)
