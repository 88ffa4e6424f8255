"""Held-out accuracy by seconds of `rlhf ppo` and of TRL's GRPOTrainer, on one GPU and one after the other.

    python tools/bench/run.py beside_trl --model SmolLM2-135M-Instruct --out beside_trl.json

Both train one model by GRPO on the prompts and the reward function of examples/instructions.py: 64 prompts x 8
responses of at most 64 tokens per step, one update with all of them at a constant learning rate, no reference, sampling
at temperature 1. TRL has its defaults besides: vLLM in its own process (`colocate`), float32 weights with autocast to
bfloat16, its correction of the engine's log-probs. It runs without gradient checkpointing, which costs time that this
model need not spend, and computes --trl_batch sequences per pass.

Both answer the same 300 held-out prompts greedily every --eval_steps. The seconds are those of training: starts and
evaluations are left out, and the report has them beside.

TRL must be installed, which it is not by this project.
"""

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, ROOT, Metrics, progress, read_lines, run_ppo

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model"},
    "seeds": [1],
    "prompts": (64, "per step, each with 8 responses"),
    "steps": 60,
    "eval_steps": 10,
    "held_out": 300,
    "only": {"choices": ("rlhf", "trl"), "help": "run this one alone"},
    "trl_seconds": (240.0, "of training, after which TRL ends if it has not made its steps"),
    "trl_batch": (128, "sequences per pass of TRL"),
    "trl_memory": (0.3, "share of the GPU for TRL's engine"),
    "flags": MORE_FLAGS,
}
SCRIPT = ROOT / "examples/instructions.py"
SAMPLES = 8
TOKENS = 64
LEARNING_RATE = 2e-5
_GRPO = (
    "--apply_chat_template --label_key label --prompt_max_len 128 --advantage_estimator group_norm --init_kl_coef 0"
    " --old_logprobs skip --eval_temperature 0 --packing_samples --micro_batch_tokens 16384 --lr_scheduler constant"
    " --lr_warmup_ratio 0 --disable_ds_ckpt --num_episodes 100"
)


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run both for every seed."""
    return beside(options, folder, "trl", run_trl)


def beside(options: Namespace, folder: Path, peer: str, run_peer: Callable[..., dict[str, Any]]) -> Iterator[Any]:
    """Run `rlhf ppo` and a peer for every seed; yield the curves of each by its name and the seed."""
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    subprocess.run([sys.executable, SCRIPT, train, held_out], check=True)
    rows = held_out.read_text(encoding="utf-8").splitlines(keepends=True)[: options.held_out]
    held_out.write_text("".join(rows), encoding="utf-8")
    report: dict[str, Any] = {"rlhf": {}, peer: {}}
    for seed in options.seeds:
        for name, run in (("rlhf", run_here), (peer, run_peer)):
            if options.only in (None, name):
                report[name][seed] = run(options, seed, train, held_out, folder / f"{name}{seed}")
                progress(report[name][seed])
                yield report


def run_here(options: Namespace, seed: int, train: Path, held_out: Path, folder: Path) -> dict[str, Any]:
    """Return the curve of `rlhf ppo`."""
    on_gpu = ["--bf16", "--colocate_all_models"] if local_gpus() else []
    number = options.prompts
    sizes = [
        "--rollout_batch_size",
        number,
        "--n_samples_per_prompt",
        SAMPLES,
        "--train_batch_size",
        SAMPLES * number,
    ]
    sizes += ["--train_steps", options.steps, "--eval_steps", options.eval_steps, "--generate_max_len", TOKENS]
    data = ["--pretrain", options.model, "--prompt_data", train, "--eval_data", held_out, "--remote_rm_url", SCRIPT]
    words = [*_GRPO.split(), *data, *sizes, "--actor_learning_rate", LEARNING_RATE, "--seed", seed, *on_gpu]
    flags = [*map(str, words), *options.flags]
    began = time.time()
    found = run_ppo(flags, folder)
    seconds = time.time() - began
    return curve_of(found) | {"seconds_total": seconds, "flags": " ".join(flags).replace(str(folder.parent), "FOLDER")}


def curve_of(found: Metrics) -> dict[str, Any]:
    """Return the held-out accuracy by seconds of training, the seconds per step, and what was left out of them."""
    step_seconds = [step["time/step"] - step.get("time/evaluate", 0.0) for step in found.steps]
    accuracy = {line["step"]: line["eval/accuracy"] for line in found.lines if "eval/accuracy" in line}
    return {
        "curve": [{"step": at, "seconds": sum(step_seconds[:at]), "accuracy": accuracy[at]} for at in sorted(accuracy)],
        "step_seconds": step_seconds,
        "response_tokens": [step["rollout/response_tokens"] for step in found.steps],
        "train_accuracy": [step["rollout/score"] for step in found.steps],
        "seconds_startup": found.final["time/startup"],
    }


def run_trl(options: Namespace, seed: int, train: Path, held_out: Path, folder: Path) -> dict[str, Any]:
    """Return the curve of TRL, which runs in a process of its own."""
    folder.mkdir()
    began = time.time()
    process = multiprocessing.get_context("spawn").Process(
        target=train_by_trl, args=(options, seed, train, held_out, folder)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise subprocess.CalledProcessError(process.exitcode, "TRL")
    return json.loads((folder / "curve.json").read_text(encoding="utf-8")) | {"seconds_total": time.time() - began}


def train_by_trl(options: Namespace, seed: int, train: Path, held_out: Path, folder: Path) -> None:
    """Train by TRL and write its curve to `folder`/curve.json."""
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    began = time.time()
    rules = load_script(SCRIPT)
    on_gpu = bool(local_gpus())
    updates = SAMPLES * options.prompts // options.trl_batch
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=SAMPLES,
        per_device_train_batch_size=options.trl_batch,
        gradient_accumulation_steps=updates,
        max_completion_length=TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=options.steps,
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=options.trl_memory,
        vllm_max_model_length=256,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        seed=seed,
        dataloader_num_workers=0,
    )

    def score(completions: Sequence[Any], label: Sequence[str], **_: Any) -> list[float]:
        found = [rules.met(each[0]["content"].strip(), wanted) for each, wanted in zip(completions, label, strict=True)]
        return [sum(each) / len(each) for each in found]

    trainer = GRPOTrainer(model=str(options.model), reward_funcs=score, args=config, train_dataset=_rows(train))
    meter = _Meter(trainer, read_lines(held_out), rules, options.eval_steps)

    class Callback(TrainerCallback):
        """Reads the clock around steps, and evaluates between them."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Evaluate the start."""
            meter.evaluate(0)
            meter.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Take the time of the step; evaluate where it is due."""
            meter.end_step(state.global_step)
            control.should_training_stop |= sum(meter.step_seconds) > options.trl_seconds

    trainer.add_callback(Callback())
    startup = time.time() - began
    trainer.train()
    logged = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    found = {
        "curve": meter.curve,
        "step_seconds": meter.step_seconds,
        "response_tokens": [line["completions/mean_length"] for line in logged],
        "seconds_startup": startup,
        "evaluation_seconds": meter.evaluation_seconds,
        "settings": {name: getattr(config, name) for name in ("loss_type", "per_device_train_batch_size", "bf16")},
    }
    (folder / "curve.json").write_text(json.dumps(found), encoding="utf-8")


class _Meter:
    """The seconds of TRL's steps, without those of evaluations, and the curve."""

    def __init__(self, trainer: Any, rows: Sequence[dict[str, str]], rules: ModuleType, eval_steps: int) -> None:
        self._trainer, self._rows, self._rules, self._eval_steps = trainer, rows, rules, eval_steps
        self._began = 0.0
        self.step_seconds: list[float] = []
        self.evaluation_seconds: list[float] = []
        self.curve: list[dict[str, float]] = []

    def start(self) -> None:
        """Begin to count the seconds of a step."""
        _wait_for_gpu()
        self._began = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Count a step, and evaluate after each that is due."""
        _wait_for_gpu()
        self.step_seconds.append(time.perf_counter() - self._began)
        if step % self._eval_steps == 0:
            self.evaluate(step)
        self.start()

    def evaluate(self, step: int) -> None:
        """Answer the held-out prompts greedily with the trainer's engine, which gets the current weights first."""
        from vllm import SamplingParams

        began = time.perf_counter()
        generation = self._trainer.vllm_generation
        generation.sync_weights()
        chats = [[{"role": "user", "content": row["input"]}] for row in self._rows]
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
        outputs = generation.llm.chat(chats, greedy, use_tqdm=False)
        texts = [output.outputs[0].text.strip() for output in outputs]
        right = [all(self._rules.met(text, row["label"])) for text, row in zip(texts, self._rows, strict=True)]
        accuracy = sum(right) / len(right)
        self.curve.append({"step": step, "seconds": sum(self.step_seconds), "accuracy": accuracy})
        self.evaluation_seconds.append(time.perf_counter() - began)
        progress({"trl": self.curve[-1]})


def _rows(path: Path) -> Any:
    """Return the rows as TRL's conversations, with `label` beside."""
    from datasets import Dataset

    rows = read_lines(path)
    chats = [{"prompt": [{"role": "user", "content": row["input"]}], "label": row["label"]} for row in rows]
    return Dataset.from_list(chats)


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load_script(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
