"""Steps of `rlhf ppo` and `rlhf generate` on a published chat model and real rows: natural lengths, a reward model.

    python tools/bench/run.py real_work --model SFT_MODEL --reward_model REWARD_MODEL --questions gsm8k/train.jsonl \
        --chats chats.jsonl --out real_work.json

Everything runs on one GPU in bfloat16, without a reference for the first two:

    answers   `rlhf ppo`: GRPO on rows with `question` and `answer`, 128 prompts x 8 responses of at most 300 tokens,
              scored by the built-in reward `math`, one update per step
    file      `rlhf generate`: one response to each of 1,319 questions, scored by `math`
    chats     `rlhf ppo`: PPO with critic, reference and reward model of one size on rows with `prompt`, a list of
              messages of at most 512 tokens: 256 responses of at most 128 tokens

Responses end where the model ends them, so a model that was fine-tuned on such answers is what this is for. Medians
leave out the first step. Flags behind `--` go to every command: `-- --vllm_max_num_seqs 1024`.
"""

import re
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, run_ppo

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model"},
    "reward_model": {"type": Path, "help": "folder of a reward model, also the critic's start; needed by `chats`"},
    "questions": {"type": Path, "required": True, "help": "JSON lines with `question` and `answer`"},
    "chats": {"type": Path, "help": "JSON lines with `prompt`, a list of messages; None: leave `chats` out"},
    "prompts": 128,
    "response_tokens": 300,
    "file_prompts": 1319,
    "steps": 4,
    "flags": MORE_FLAGS,
}
_ANSWERS = "--input_key question --label_key answer --apply_chat_template --remote_rm_url math --prompt_max_len 300"
_GRPO = "--advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 --old_logprobs skip --share_prompts"
_PPO = "--advantage_estimator gae --init_kl_coef 0.01 --prompt_max_len 512 --generate_max_len 128"
_PACKED = "--packing_samples --micro_batch_tokens 65536 --actor_learning_rate 1e-6 --disable_ds_ckpt"


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the report after each workload."""
    on_gpu = ["--bf16"] if local_gpus() else []
    shared = [
        *_PACKED.split(),
        *on_gpu,
        *(["--colocate_all_models"] if on_gpu else []),
        "--train_steps",
        str(options.steps),
    ]
    report: dict[str, Any] = {}
    questions = ["--prompt_data", str(options.questions)]
    number = options.prompts
    flags = [*_ANSWERS.split(), *_GRPO.split(), *shared, "--generate_max_len", str(options.response_tokens), *questions]
    sizes = ["--rollout_batch_size", str(number), "--train_batch_size", str(8 * number)]
    report["answers"] = steps_of(options, [*flags, *sizes], folder / "answers")
    yield report
    report["file"] = generate(options, [*_ANSWERS.split(), *on_gpu, *questions], folder)
    yield report
    if options.chats is None:
        return
    models = ["--reward_pretrain", str(options.reward_model), "--critic_pretrain", str(options.reward_model)]
    rows = ["--prompt_data", str(options.chats), "--input_key", "prompt", "--apply_chat_template"]
    sizes = ["--rollout_batch_size", str(2 * number), "--train_batch_size", str(2 * number)]
    report["chats"] = steps_of(options, [*_PPO.split(), *shared, *models, *rows, *sizes], folder / "chats")
    yield report


def steps_of(options: Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """Return the times of the steps of `rlhf ppo`, and their medians without the first step."""
    found = run_ppo(["--pretrain", str(options.model), *flags, *options.flags], folder)
    later = found.steps[1:] or found.steps
    names = sorted({name for step in later for name in step if name.startswith("time/")})
    medians = {name: statistics.median(step.get(name, 0.0) for step in later) for name in names}
    return {"flags": " ".join([*flags, *options.flags]), "median": medians, "steps": found.steps}


def generate(options: Namespace, flags: list[str], folder: Path) -> dict[str, Any]:
    """Return the seconds of `rlhf generate` from its first request to its last record, as the command says them."""
    sizes = ["--max_samples", str(options.file_prompts), "--generate_max_len", str(options.response_tokens)]
    words = [*flags, *sizes, *options.flags]
    command = [sys.executable, "-m", "rlhf_cli.main", "generate", "--pretrain", str(options.model), *words]
    output = ["--output_path", str(folder / "responses.jsonl")]
    # What it says of its speed is on stderr.
    done = subprocess.run([*command, *output], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    print(done.stdout, file=sys.stderr)
    rollouts, seconds, rate = re.search(r"(\d+) rollouts in ([\d.]+) s, (\d+) tokens/s", done.stdout).groups()
    return {"flags": " ".join(words), "rollouts": int(rollouts), "seconds": float(seconds), "tokens_per_s": int(rate)}
