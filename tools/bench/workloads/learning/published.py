"""Held-out accuracy of a published chat model before and after `rlhf ppo` on real prompts, by seed.

    python tools/bench/run.py published --model SmolLM2-135M-Instruct --out instructions.json
    python tools/bench/run.py published --model SmolLM2-135M-Instruct --task gsm8k --data gsm8k --out gsm8k.json

    instructions   GRPO on the prompts and the reward function of examples/instructions.py; held-out are other subjects
    gsm8k          two epochs of `rlhf sft` on the rows of --data's train.jsonl, with keys `question` and `answer`, then
                   GRPO on them with the built-in reward `math`; held-out is its test.jsonl

Held-out prompts are answered greedily. The runs share one GPU, if there is one, and start one after the other, because
an engine measures the memory that is left. Flags behind `--` go to `rlhf ppo`: `-- --actor_learning_rate 1e-5`.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, ROOT, Metrics, over_seeds, progress, run_ppo_in_turn

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model"},
    "task": {"choices": ["instructions", "gsm8k"], "default": "instructions"},
    "data": {"type": Path, "help": "of gsm8k: folder with train.jsonl and test.jsonl"},
    "seeds": [1, 2, 3],
    "prompts": (64, "per step, each with 8 responses"),
    "steps": 60,
    "eval_steps": 10,
    "at_once": (1, "runs that share the GPU"),
    "flags": MORE_FLAGS,
}
_GRPO = (
    "--advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 --old_logprobs skip"
    " --eval_temperature 0 --packing_samples --micro_batch_tokens 16384 --actor_learning_rate 2e-5"
    " --lr_scheduler constant --disable_ds_ckpt --apply_chat_template --num_episodes 100"
)
_ROWS = "--input_key question --label_key answer --remote_rm_url math --prompt_max_len 300 --generate_max_len 300"
_SFT = (
    "--input_key question --output_key answer --apply_chat_template --max_len 600 --micro_batch_tokens 16384"
    " --train_batch_size 32 --learning_rate 3e-4 --max_epochs 2"
)
_CURVES = ("rollout/reward", "rollout/accuracy", "rollout/response_tokens", "mismatch/logprob_gap_mean", "time/step")


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run every seed."""
    on_gpu = ["--bf16"] if local_gpus() else []
    if options.task == "instructions":
        script, train, held_out = ROOT / "examples/instructions.py", folder / "train.jsonl", folder / "held_out.jsonl"
        subprocess.run([sys.executable, script, train, held_out], check=True)
        task = [
            "--label_key",
            "label",
            "--remote_rm_url",
            str(script),
            "--prompt_max_len",
            "128",
            "--generate_max_len",
            "64",
        ]
    else:
        train, held_out = options.data / "train.jsonl", options.data / "test.jsonl"
        task = _ROWS.split()
    sizes = ["--rollout_batch_size", options.prompts, "--train_batch_size", 8 * options.prompts]
    sizes += ["--train_steps", options.steps, "--eval_steps", options.eval_steps]
    data = ["--prompt_data", train, "--eval_data", held_out]
    together = ["--colocate_all_models"] if on_gpu else []
    flags = [str(word) for word in (*_GRPO.split(), *task, *sizes, *data, *on_gpu, *together, *options.flags)]

    def one(seed: int) -> dict[str, Any]:
        start = options.model
        if options.task == "gsm8k":
            start = sft(
                options.model,
                ["--dataset", str(train), *_SFT.split(), *on_gpu, "--seed", str(seed)],
                folder / f"sft{seed}",
            )
        return run(["--pretrain", str(start), *flags, "--seed", str(seed)], folder / f"seed{seed}")

    with ThreadPoolExecutor(options.at_once) as pool:
        yield over_seeds(list(pool.map(one, options.seeds)))


def sft(model: Path, flags: Sequence[str], folder: Path) -> Path:
    """Fine-tune the model on demonstrations; return the folder of the result."""
    command = [sys.executable, "-m", "rlhf_cli.main", "sft", "--pretrain", str(model), "--packing_samples", *flags]
    subprocess.run([*command, "--save_path", str(folder)], check=True, stdout=sys.stderr)
    return folder / "model"


def run(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return its accuracies, curves by step and seconds."""
    found = results(run_ppo_in_turn(flags, folder)) | {"flags": " ".join(flags).replace(str(folder.parent), "FOLDER")}
    progress(found)
    return found


def results(metrics: Metrics) -> dict[str, Any]:
    """Return the accuracies, the held-out ones by step, and curves of training."""
    by_step = {line["step"]: line["eval/accuracy"] for line in metrics.lines if "eval/accuracy" in line}
    curves = {name: [step.get(name) for step in metrics.steps] for name in _CURVES}
    return {**metrics.accuracies(), "accuracy_by_step": by_step, "curves": curves}
