"""Every flag of the commands over fixed examples reaches the part of the job that it is about."""

import json
from operator import attrgetter
from pathlib import Path

import pytest

from rlhf_cli.commands import offline
from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.commands.offline import _prepare
from rlhf_cli.config.output import OutputSection
from rlhf_cli.console.views import Console
from rlhf_cli.preflight.launcher import Launch
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import options
from rlhf_data.own_code import TrustedModel

PAIR = {"chosen": "\n\nHuman: a\n\nAssistant: good", "rejected": "\n\nHuman: a\n\nAssistant: bad", "margin": 0.5}
STEP = {
    "steps": "one<|endoftext|> two<|endoftext|>",
    "verdicts": [1, 0],
    "signs": ["y", "n"],
    "step": "one w",
    "verdict": [1],
}
ROWS = [
    {"input": f"input {n}", "output": f"answer {n}", "text": f"text {n}" + 9 * n * "!", "label": n % 2, **PAIR, **STEP}
    for n in range(4)
]
TURNS = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ROWS = [row | {"turns": TURNS, "tools": TOOLS, "better": "yes", "worse": "no", "by": 2.0, "good": 1} for row in ROWS]
NEEDED = {
    "kd": "--teacher_model OTHER",
    "prm": "--placeholder_token <|endoftext|> --input_key steps --label_key verdicts",
}
EVAL, LORA, CHAT, PROMPTED = "--eval_dataset x.jsonl", "--lora_rank 2", "--apply_chat_template", "--prompt_key input"
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]<|im_end|>{% endfor %}"
TURNED = f"{CHAT} --input_key turns --output_key None"

# Command, flag, the words that follow it, further flags, the part of the job, and what it must be there. The parts
# `count`, `text` and `learned` are the number of examples, the first one's text, and what of it is trained.
REACHES = [
    ("sft", "pretrain", "OTHER", "", "model.path", "OTHER"),
    ("sft", "bf16", "", "", "model.dtype", "bfloat16"),
    ("sft", "trust_remote_code", "", "", "model.path.__class__", TrustedModel),
    ("dpo", "trust_remote_code", "", "--ref_pretrain OTHER", "reference.path.__class__", TrustedModel),
    ("sft", "attn_implementation", "sdpa", "", "model.attn_implementation", "sdpa"),
    ("sft", "gradient_checkpointing", "", "", "model.gradient_checkpointing", True),
    ("sft", "packing_samples", "", "", "model.packing", True),
    ("rm", "sequence_parallel_size", "2", "--packing_samples", "model.sequence_parallel_size", 2),
    (
        "dpo",
        "ds_tensor_parallel_size",
        "2",
        "--pretrain FOUR_HEADS --ref_pretrain FOUR_HEADS",
        "reference.tensor_parallel_size",
        2,
    ),
    ("sft", "expert_parallel_size", "2", "--pretrain MOE", "model.expert_parallel_size", 2),
    ("sft", "torch_compile", "off", "", "model.torch_compile", "off"),
    ("dpo", "torch_compile", "on", "--ref_pretrain OTHER", "reference.torch_compile", "on"),
    ("sft", "aux_loss_coef", "0.01", "--pretrain MOE", "model.aux_loss_coef", 0.01),
    ("dpo", "aux_loss_coef", "0.01", "--pretrain MOE --ref_pretrain OTHER", "reference.aux_loss_coef", 0.0),
    ("sft", "lora_rank", "2", "", "model.lora.rank", 2),
    ("sft", "lora_alpha", "4", LORA, "model.lora.alpha", 4.0),
    ("sft", "lora_dropout", "0.1", LORA, "model.lora.dropout", 0.1),
    ("sft", "target_modules", "q_proj,v_proj", LORA, "model.lora.target_modules", ("q_proj", "v_proj")),
    ("sft", "load_in_4bit", "", LORA, "model.lora.load_in_4bit", True),
    ("dpo", "ref_pretrain", "OTHER", "", "reference.path", "OTHER"),
    ("dpo", "precompute_reference", "", "", "precompute_reference", True),
    ("kd", "teacher_model", "OTHER", "", "reference.path", "OTHER"),
    ("sft", "dataset", "x.jsonl,x.jsonl", "", "count", 8),
    ("sft", "dataset_probs", "1,99", "--dataset x.jsonl,x.jsonl --max_samples 1", "repeats", True),
    ("sft", "dataset_split", "part", "--dataset saved", "text", "input 1answer 1<|im_end|>"),
    ("sft", "eval_split", "part", "--eval_dataset saved", "eval_count", 1),
    ("sft", "streaming", "", "--dataset saved", "count", 4),
    ("sft", "max_samples", "3", "", "count", 3),
    ("sft", "preset_data", "hh", "", "learned", "good<|im_end|>"),
    ("dpo", "preset_data", "hh", "--eval_dataset x.jsonl", "rejected", "bad<|im_end|>"),
    ("sft", "skip_bad_rows", "", "--dataset x.jsonl,bad.jsonl", "count", 4),
    ("sft", "eval_dataset", "x.jsonl", "", "eval_count", 4),
    ("sft", "max_len", "24", "--input_key text", "count", 2),  # of 13, 22, 31 and 40 tokens
    ("dpo", "max_len", "48", "--ref_pretrain OTHER", "reference.max_length", 48),
    ("sft", "data_num_workers", "1", "", "count", 4),
    ("sft", "data_cache", "cache", "", "cached", 1),
    ("sft", "input_key", "text", "", "text", "text 0answer 0<|im_end|>"),
    ("sft", "output_key", "text", "", "learned", "text 0<|im_end|>"),
    ("sft", "input_template", "<{}>", "", "text", "<input 0>answer 0<|im_end|>"),
    ("sft", "apply_chat_template", "", "", "learned", "answer 0<|im_end|>"),
    ("sft", "apply_chat_template", "", "", "model.chat_template", None),  # the model's own stays in its files
    ("sft", "tokenizer_chat_template", "chat.jinja", CHAT, "text", "[input 0]<|im_end|>[answer 0]<|im_end|>"),
    ("sft", "tokenizer_chat_template", "chat.jinja", CHAT, "model.chat_template", TEMPLATE),
    (
        "sft",
        "tools_key",
        "tools",
        f"{CHAT} --tokenizer_chat_template tools.jinja",
        "text",
        "add input 0answer 0<|im_end|>",
    ),
    (
        "sft",
        "chat_template_kwargs",
        '{"word":"yes"}',
        f"{CHAT} --tokenizer_chat_template word.jinja",
        "text",
        "yes input 0answer 0<|im_end|>",
    ),
    ("sft", "multiturn", "", TURNED, "learned", "b<|im_end|>d<|im_end|>"),
    ("sft", "pretrain_mode", "", "", "learned", "put 0answer 0<|im_end|>"),  # nothing predicts `in`
    ("rm", "prompt_key", "input", "", "text", "input 0\n\nHuman: a\n\nAssistant: good<|im_end|>"),
    ("rm", "chosen_key", "better", PROMPTED, "learned", "yes<|im_end|>"),
    ("dpo", "rejected_key", "worse", PROMPTED, "rejected", "no<|im_end|>"),
    ("rm", "margin_loss", "", "", "objective.margin_loss", True),
    ("rm", "margin_key", "by", "--margin_loss", "margin", 2.0),
    ("rm", "loss", "sigmoid", "", "objective.margin_loss", False),
    ("kto", "label_key", "good", "", "verdict", True),
    ("prm", "label_key", "signs", "--reward_tokens y n", "labels", [1.0, 0.0]),
    ("prm", "reward_tokens", "y n", "", "verdict_tokens", "yn"),
    ("prm", "placeholder_token", "w", "--input_key step --label_key verdict", "steps", 1),
    ("sft", "train_batch_size", "2", "", "schedule.train_batch_size", 2),
    ("sft", "micro_train_batch_size", "2", "", "schedule.micro_train_batch_size", 2),
    ("sft", "micro_batch_tokens", "50", "--packing_samples", "schedule.micro_batch_tokens", 50),
    ("sft", "max_epochs", "3", "", "schedule.max_epochs", 3),
    ("sft", "seed", "7", "", "schedule.seed", 7),
    ("sft", "optim", "muon", "", "model.optimizer.muon_momentum", 0.95),
    ("sft", "muon_momentum", "0.8", "--optim muon", "model.optimizer.muon_momentum", 0.8),
    ("sft", "adam_betas", "0.8 0.9", "", "model.optimizer.betas", (0.8, 0.9)),
    ("sft", "l2", "0.1", "", "model.optimizer.weight_decay", 0.1),
    ("sft", "max_norm", "2", "", "model.optimizer.max_norm", 2.0),
    ("sft", "lr_scheduler", "linear", "", "model.optimizer.scheduler", "linear"),
    ("sft", "lr_warmup_ratio", "1", "--train_batch_size 1", "model.optimizer.warmup_steps", 4),
    ("sft", "min_lr_ratio", "0.5", "", "model.optimizer.min_lr_ratio", 0.5),
    ("sft", "learning_rate", "0.5", "", "model.optimizer.learning_rate", 0.5),
    ("sft", "zero_stage", "3", "", "model.zero_stage", 3),
    ("sft", "zpg", "2", "--zero_stage 3", "model.zpg", 2),
    ("sft", "overlap_comm", "", "--zero_stage 3", "model.overlap_comm", True),
    ("sft", "adam_offload", "", "--bf16", "model.optimizer.offload", True),
    ("sft", "adam_offload_path", "/disk", "--adam_offload --bf16", "model.optimizer.offload_path", "/disk"),
    ("sft", "bf16_moments", "", "", "model.optimizer.bf16_moments", True),
    ("dpo", "ref_reward_offload", "", "--ref_pretrain OTHER", "reference.offload", True),
    ("kto", "ref_reward_offload", "", "", "model.offload", True),
    ("kd", "ref_reward_offload", "", "", "reference.offload", True),
    ("sft", "eval_steps", "2", EVAL, "eval_steps", 2),
    ("sft", "best_metric_key", "eval/entropy", EVAL, "best_metric", "entropy"),
    ("sft", "save_path", "here", "", "model_path", Path("/out/model")),
    ("sft", "save_steps", "7", "", "checkpoints.every", 7),
    ("dpo", "ckpt_path", "/c", "", "checkpoints.folder", "/c"),
    ("rm", "max_ckpt_num", "2", "--save_steps 7", "checkpoints.max_num", 2),
    ("kto", "max_ckpt_mem", "2", "--save_steps 7", "checkpoints.max_bytes", 2 * 1024**3),
    ("prm", "save_hf_ckpt", "", "--save_steps 7", "checkpoints.hf_model", True),
    ("kd", "disable_ds_ckpt", "", "--save_steps 7 --save_hf_ckpt", "checkpoints.full", False),
    ("sft", "load_checkpoint", "", "--save_path r", "checkpoints.resume", True),
    ("sft", "resume", "r", "", "checkpoints.resume", True),
    ("dpo", "loss_type", "orpo", "", "objective.loss_type", "orpo"),
    ("dpo", "ipo", "", "", "objective.loss_type", "ipo"),
    ("dpo", "beta", "0.5", "", "objective.beta", 0.5),
    ("dpo", "label_smoothing", "0.2", "", "objective.label_smoothing", 0.2),
    ("dpo", "nll_loss_coef", "0.2", "", "objective.nll_loss_coef", 0.2),
    ("dpo", "simpo_gamma", "0.2", "--loss_type simpo", "objective.simpo_gamma", 0.2),
    ("dpo", "discopop_tau", "0.2", "--loss_type discopop", "objective.discopop_tau", 0.2),
    ("dpo", "length_average", "", "", "objective.length_average", True),
    ("sft", "dft", "", "", "objective.dft", True),
    ("kto", "beta", "0.5", "", "objective.beta", 0.5),
    ("kto", "desirable_loss_weight", "2", "", "objective.desirable_loss_weight", 2.0),
    ("kto", "undesirable_loss_weight", "2", "", "objective.undesirable_loss_weight", 2.0),
    ("kd", "kd_coef", "0.7", "", "objective.kd_coef", 0.7),
    ("kd", "kd_divergence", "reverse_kl", "", "objective.kd_divergence", "reverse_kl"),
    ("kd", "jsd_beta", "0.1", "--kd_divergence jsd", "objective.jsd_beta", 0.1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from datasets import Dataset, DatasetDict

    from rlhf_models.testing import tiny_model_dir

    path = tmp_path_factory.mktemp("run")
    tiny_model_dir(path / "TINY")
    tiny_model_dir(path / "OTHER", seed=1)
    tiny_model_dir(path / "FOUR_HEADS", num_attention_heads=4, num_key_value_heads=2)
    tiny_model_dir(path / "MOE", architecture="qwen3_moe")
    (path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "bad.jsonl").write_text(json.dumps(ROWS[0] | {"output": ""}) + "\n")
    (path / "chat.jinja").write_text(TEMPLATE)
    template = "{{ tools[0].function.name if tools }} {% for m in messages %}{{ m['content'] }}{% endfor %}"
    (path / "tools.jinja").write_text(template)
    (path / "word.jinja").write_text("{{ word }} {% for m in messages %}{{ m['content'] }}{% endfor %}")
    train, part = [{"input": "i", "output": "o"}] * 4, [{"input": "input 1", "output": "answer 1"}]
    DatasetDict(train=Dataset.from_list(train), part=Dataset.from_list(part)).save_to_disk(path / "saved")
    return path


def part_of(folder: Path, job, tokenizer, name: str):
    first = job.examples[0]
    chosen = getattr(first, "chosen", first)
    found = {
        "count": lambda: len(job.examples),
        "repeats": lambda: len(job.examples) > 2,
        "eval_count": lambda: len(job.eval_examples),
        "cached": lambda: len(list((folder / "cache").iterdir())),
        "text": lambda: tokenizer.decode(chosen.token_ids),
        "learned": lambda: tokenizer.decode(chosen.token_ids[chosen.loss_mask]),
        "rejected": lambda: tokenizer.decode(first.rejected.token_ids[first.rejected.loss_mask]),
        "margin": lambda: first.margin,
        "verdict": lambda: first.is_desirable,
        "labels": lambda: first.labels.tolist(),
        "steps": lambda: len(first.labels),
        "verdict_tokens": lambda: tokenizer.decode(list(job.objective.reward_tokens)),
    }
    value = found[name]() if name in found else attrgetter(name)(job)
    return value.removeprefix(f"{folder}/") if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("command", "flag", "words", "others", "part", "expected"), REACHES, ids=lambda part: str(part)[:30]
)
def test_flag_reaches_its_part_of_the_job(folder, monkeypatch, command, flag, words, others, part, expected):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(folder))
    argv = f"--pretrain TINY --dataset x.jsonl --max_len 64 {NEEDED.get(command, '')} {others} --{flag} {words}".split()
    if flag in ("sequence_parallel_size", "ds_tensor_parallel_size", "expert_parallel_size", "zpg"):
        monkeypatch.setattr(offline, "launch", lambda: Launch(num_ranks=2))
    made = COMMANDS[command]
    parsed = CommandLine(config=made.config, prog="").parse(argv)
    assert not [notice for notice in parsed.notices if "has no effect" in notice]
    job, tokenizer = _prepare(made, parsed.config, Path("/out"), Console())
    assert part_of(folder, job, tokenizer, part) == expected


def test_rows_of_math_shepherd_become_steps(folder, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(folder))
    row = {"input": "2+2? Step 1: 4. ки\nStep 2: 5. ки", "label": "2+2? Step 1: 4. +\nStep 2: 5. -", "task": "MATH"}
    (folder / "shepherd.jsonl").write_text(json.dumps(row))
    argv = "--pretrain TINY --dataset shepherd.jsonl --preset_data math_shepherd --max_len 64"
    parsed = CommandLine(config=COMMANDS["prm"].config, prog="").parse(argv.split())
    assert not parsed.missing and parsed.config.data.placeholder_token == "ки"
    argv += " --placeholder_token <|endoftext|>"
    config = CommandLine(config=COMMANDS["prm"].config, prog="").parse(argv.split()).config
    job, tokenizer = _prepare(COMMANDS["prm"], config, Path("/out"), Console())
    [example] = job.examples
    assert tokenizer.decode(example.token_ids) == row["input"].replace("ки", "<|endoftext|>")
    assert example.labels.tolist() == [1.0, 0.0]


def test_every_flag_of_every_command_is_tested():
    trackers = {name for name in OutputSection.model_fields if name != "save_path"}  # see output_section_test.py
    of_images = {"image_key", "freeze_visual_encoder"}  # see offline_images_test.py
    tested = {row[1] for row in REACHES} | trackers | of_images
    for command in COMMANDS:
        config = COMMANDS[command].config
        assert {option.name for option in options(config)} <= tested


@pytest.mark.parametrize(
    ("command", "argv", "notice"),
    [
        ("sft", "--lora_alpha 4", "--lora_alpha has no effect: --lora_rank is 0"),
        ("sft", "--eval_steps 5", "--eval_steps has no effect: there is no --eval_dataset"),
        ("sft", '--chat_template_kwargs {"x":1}', "--chat_template_kwargs has no effect: --apply_chat_template is off"),
        ("sft", "--tokenizer_chat_template x", "--tokenizer_chat_template has no effect: --apply_chat_template is off"),
        ("sft", "--lr_scheduler linear --min_lr_ratio 0.5", "--min_lr_ratio has no effect: --lr_scheduler is linear"),
        (
            "sft",
            "--packing_samples --micro_batch_tokens 9 --micro_train_batch_size 2",
            "--micro_train_batch_size has no effect: --micro_batch_tokens takes its place",
        ),
        (
            "sft",
            "--eval_dataset e --best_metric_key eval/loss",
            "--best_metric_key can only choose between the first and the last evaluation: --eval_steps is -1",
        ),
        ("kd", "--teacher_model t --jsd_beta 0.1", "--jsd_beta has no effect: --kd_divergence is forward_kl"),
        ("rm", "--margin_key by", "--margin_key has no effect: --margin_loss is off"),
        ("dpo", "--simpo_gamma 1", "--simpo_gamma has no effect: the loss is dpo"),
        ("dpo", "--ipo --label_smoothing 0.1", "--label_smoothing has no effect: the loss is ipo"),
        ("dpo", "--loss_type orpo --nll_loss_coef 1", "--nll_loss_coef has no effect: the loss is orpo"),
        ("dpo", "--loss_type cpo --discopop_tau 0.1", "--discopop_tau has no effect: the loss is cpo"),
        ("dpo", "--loss_type simpo --ref_pretrain m", "--ref_pretrain has no effect: the loss is simpo"),
        ("dpo", "--loss_type simpo --precompute_reference", "--precompute_reference has no effect: the loss is simpo"),
        ("dpo", "--loss_type simpo --ref_reward_offload", "--ref_reward_offload has no effect: the loss is simpo"),
        (
            "kto",
            "--precompute_reference --ref_reward_offload",
            "--ref_reward_offload has no effect: --precompute_reference drops the reference before the first update",
        ),
        (
            "dpo",
            "--lora_rank 2 --ref_reward_offload",
            "--ref_reward_offload has no effect: with --lora_rank the reference is the model without its adapters",
        ),
    ],
    ids=lambda part: part[:40],
)
def test_option_without_effect_is_a_notice(command, argv, notice):
    config = COMMANDS[command].config
    parsed = CommandLine(config=config, prog="").parse(["--pretrain", "m", "--dataset", "d", *argv.split()])
    assert parsed.notices == (notice,)
