"""Seconds per phase of one step of `rlhf ppo` at the shape of a real model with random weights.

    python tools/bench/run.py online --setting W1 --out online.json

Settings, each with one optimizer update over all rollouts of a step and everything on one GPU:

    W1  GRPO, shape of Qwen2-0.5B, 64 prompts x 8 samples, 256 + 512 tokens; nothing sleeps, packed
    W2  GRPO, shape of Qwen2-1.5B, 64 x 8, 256 + 1024 tokens; nothing sleeps, padded, micro-batches of 8
    W3  PPO with critic and reference, sizes of W1; engine and optimizer states sleep in turn, packed
    W4  GRPO, shape of Qwen2-7B, 32 x 8, 256 + 1024; nothing sleeps, packed with shared prompts, the optimizer's states
        in host memory

W1, W2 and W4 have no reference model. They skip old log-probs, because the only update of a batch is exactly on-policy.

The command runs in a process of its own, as a user starts it; figures come from its `metrics.jsonl`. Random weights
hardly ever draw an end token, so nearly every response has full length. `--mean_response_tokens` makes end tokens of so
many tokens of the vocabulary that lengths are geometric with this mean, up to `--response_tokens`. Medians leave out
the first step, which compiles and warms up. `--gpu_time` records all kernels of the step before the last
(`gpu_time.py`), and adds up when the GPU worked for engines and for trainers. Flags behind `--` go to the command:
`-- --init_kl_coef 0.01`.

Without a GPU the times mean nothing, but the benchmark can be tried with `--shape tiny --prompts 4 --samples 2
--prompt_tokens 16 --response_tokens 8`.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from models import SHAPES, random_model
from rlhf_models.testing import tiny_reward_model_dir
from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, OWN_CLUSTER, UsageError
from workloads.speed import gpu_time

REWARD = 'def reward_func(queries, prompts, labels):\n    return {"rewards": [len(query) % 7 for query in queries]}\n'
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # one token each, in any order

_SIZES = {"shape": "qwen2-0.5b", "prompts": 64, "response_tokens": 512, "micro_batch": 16}
_GRPO = ["--advantage_estimator", "group_norm", "--init_kl_coef", "0", "--old_logprobs", "skip"]
_PPO = ["--advantage_estimator", "gae", "--init_kl_coef", "0.01"]
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "W1": (_SIZES, [*_GRPO, "--packing_samples"]),
    "W2": (_SIZES | {"shape": "qwen2-1.5b", "response_tokens": 1024, "micro_batch": 8}, _GRPO),
    "W3": (_SIZES, [*_PPO, "--packing_samples", "--vllm_enable_sleep", "--deepspeed_enable_sleep"]),
    "W4": (
        {"shape": "qwen2-7b", "prompts": 32, "response_tokens": 1024, "micro_batch": 8},
        [*_GRPO, "--packing_samples", "--share_prompts", "--adam_offload"],
    ),
}
FLAGS = {
    "setting": {"choices": SETTINGS, "default": "W1"},
    "shape": {"choices": SHAPES},
    "prompts": (int, "per step"),
    "samples": (8, "per prompt"),
    "prompt_tokens": 256,
    "response_tokens": int,
    "mean_response_tokens": (float, "of geometric lengths; default: full length"),
    "reward_model": (False, "score by a random model of the same shape"),
    "micro_batch": (int, "rollouts per forward and backward pass"),
    "steps": 6,
    "gpu_time": (False, "record what the GPU does in the step before the last"),
    "timeout_s": (3600.0, "until the run is interrupted"),
    "keep": {"type": Path, "metavar": "DIR", "help": "keep the run's folder here"},
    "flags": MORE_FLAGS,
}
_END_S = 120.0  # for a run that was interrupted
_POLL_S = 0.01
_NO_CHECKPOINT = ["--disable_ds_ckpt"]  # of a run that is interrupted: it may have tens of gigabytes
_ON_GPU = ["--bf16", "--colocate_all_models", "--vllm_gpu_memory_utilization", "0.3"]


def write_inputs(options: Namespace, folder: Path) -> list[str]:
    """Write model, prompts and reward into `folder`; return the flags that name them."""
    named = {"pretrain": "model", "prompt_data": "prompts.jsonl", "save_path": "run"}
    random_model(options.shape, folder / "model")
    if options.reward_model:
        random_model(options.shape, folder / "reward_model", tiny_reward_model_dir)
        named["reward_pretrain"] = "reward_model"
    else:
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        named["remote_rm_url"] = "reward.py"
    if options.mean_response_tokens:
        add_end_tokens(folder / "model", options.mean_response_tokens)
    draw = random.Random(0)
    rows = ["".join(draw.choices(SYMBOLS, k=options.prompt_tokens)) for _ in range(options.prompts * options.steps)]
    text = "".join(json.dumps({"input": row}) + "\n" for row in rows)
    (folder / "prompts.jsonl").write_text(text, encoding="utf-8")
    return [word for flag, name in named.items() for word in (f"--{flag}", str(folder / name))]


def add_end_tokens(model: Path, mean_tokens: float) -> None:
    """Make the model's every `mean_tokens`-th token an end token, as a uniform policy needs for this mean length."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    number = round(vocab_size / mean_tokens)
    config["eos_token_id"] = [config["eos_token_id"], *(vocab_size * index // number for index in range(1, number))]
    path.write_text(json.dumps(config), encoding="utf-8")


def size_flags(options: Namespace) -> list[str]:
    """Return the flags of the command that set batch sizes and lengths."""
    rollouts = options.prompts * options.samples
    flags = {
        "rollout_batch_size": options.prompts,
        "n_samples_per_prompt": options.samples,
        "train_batch_size": rollouts,
        "micro_train_batch_size": options.micro_batch,
        "micro_rollout_batch_size": 2 * options.micro_batch,
        "prompt_max_len": options.prompt_tokens,
        "generate_max_len": options.response_tokens,
        "vllm_max_num_seqs": rollouts,
        "zero_stage": 2,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run(command: Sequence[str], folder: Path, timeout_s: float, recorded_step: int | None = None) -> dict[str, Any]:
    """Run the command, with its output on stderr, and return its times and metrics.

    Args:
        command: the command, with `folder` as its --save_path.
        folder: of the run.
        timeout_s: seconds after which it is interrupted. What is returned is then that of the steps until there.
        recorded_step: the step, at least 5, whose GPU kernels are recorded; medians are then of the steps up to two
            before it.

    Raises:
        CalledProcessError: the command failed.
        TimeoutError: it was interrupted before its second step ended.
        RuntimeError: it ended before the recorded step.
    """
    started = time.perf_counter()
    recorder = gpu_time.Recorder(folder.parent / "gpu_time", recorded_step) if recorded_step else None
    environ = os.environ | OWN_CLUSTER | (recorder.environ if recorder else {})
    with subprocess.Popen(command, env=environ, stdout=sys.stderr) as process:
        try:
            while process.poll() is None and time.perf_counter() - started < timeout_s:
                time.sleep(_POLL_S)
                if recorder:
                    recorder.look(len(read_steps(folder)[0]))
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            elif process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            process.kill()
    steps, end = read_steps(folder)
    if len(steps) < 2:
        raise TimeoutError(f"{len(steps)} steps have ended within {timeout_s:g} s, and medians leave out the first")
    found = figures(steps[: recorded_step and recorded_step - 2])
    found |= {"seconds_wall": time.perf_counter() - started, "steps": steps, "end": end}
    if recorder:
        found["gpu"] = recorder.account() | {"step": recorded_step, "metrics": steps[recorded_step - 1]}
    return found


def figures(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the medians of all steps but the first one."""
    first, *others = steps
    names = sorted({name for step in others for name in step})
    medians = {name: statistics.median(step[name] for step in others if name in step) for name in names}
    phases = [value for name, value in medians.items() if name.startswith("time/") and name != "time/step"]
    return {"seconds_first_step": first["time/step"], "sum_of_phases": sum(phases), "median": medians}


def read_steps(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the metrics of the steps that have ended, and the last metrics of all."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "time/step" in line], lines[-1] if lines else {}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run one setting."""
    if options.steps < 2:
        raise UsageError("--steps must be at least 2: the first step is left out of the medians")
    if options.gpu_time and options.steps < 6:
        raise UsageError("--gpu_time needs --steps 6 or more: the first and the last three are left out of medians")
    sizes, flags = SETTINGS[options.setting]
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    folder = options.keep or folder
    folder.mkdir(parents=True, exist_ok=True)
    device_flags = _ON_GPU if local_gpus() else []
    shown = [*size_flags(options), *_NO_CHECKPOINT, *device_flags, *flags, *options.flags]
    command = [sys.executable, "-m", "rlhf_cli.main", "ppo", *write_inputs(options, folder), *shown]
    recorded_step = options.steps - 1 if options.gpu_time else None
    yield {"flags": " ".join(shown), **run(command, folder / "run", options.timeout_s, recorded_step)}
