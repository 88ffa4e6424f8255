"""The classical pipeline on pairs of answers: `rlhf sft`, `rm`, `ppo` at several KL coefficients, and `dpo` beside it.

    python tools/bench/run.py preferences --model SmolLM2-135M-Instruct --pairs hh-harmless/pairs.jsonl.gz --out hh.json

The pairs have the form of Anthropic/hh-rlhf. The policy is fine-tuned on the preferred answers. A reward model learns
from the pairs, and a judge from the same pairs with another seed. PPO with a critic learns from the reward model, and
DPO from the pairs. Each policy then answers held-out prompts at temperature 1, scored by the reward model and by the
judge, which no policy was trained with. Seeds take their turns. Jobs share one GPU, if there is one: `--at_once` of
them. Flags behind `--` go to `rlhf ppo` and `rlhf generate`: `-- --vllm_gpu_memory_utilization 0.1`.
"""

import gzip
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, OWN_CLUSTER, Metrics, progress, read_lines, run_ppo_in_turn

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model"},
    "pairs": {"type": Path, "required": True, "help": "JSON lines with `chosen` and `rejected`, gzip"},
    "held_out": (200, "pairs that nothing is trained on"),
    "seeds": [1, 2, 3],
    "kl": [0.01, 0.05, 0.2],
    "steps": 40,
    "at_once": (1, "policies that are trained or judged at the same time"),
    "flags": MORE_FLAGS,
}
_TRAINED = "--preset_data hh --packing_samples --micro_batch_tokens 16384 --train_batch_size 64"
_SFT = f"{_TRAINED} --max_len 1024 --learning_rate 5e-5 --max_epochs 2"
_RM = f"{_TRAINED} --max_len 1024 --learning_rate 3e-5 --max_epochs 2"
_DPO = f"{_TRAINED} --max_len 1024 --learning_rate 1e-5 --max_epochs 2 --beta 0.1"
_LENGTHS = "--preset_data hh --prompt_max_len 768 --generate_max_len 128"
_PPO = (
    f"{_LENGTHS} --advantage_estimator gae --rollout_batch_size 256 --train_batch_size 128 --num_episodes 100"
    " --packing_samples --micro_batch_tokens 16384 --actor_learning_rate 5e-6 --critic_learning_rate 2e-5"
    " --lr_scheduler constant --disable_ds_ckpt"
)


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the pipeline with each seed in turn; yield the runs after each policy that was judged."""
    train, held_out = write_pairs(options.pairs, options.held_out, folder)
    done: list[dict[str, Any]] = []
    for seed in options.seeds:
        for found in pipeline(options, folder / f"seed{seed}", (train, held_out), seed):
            yield {"runs": [*done, found]}
        done.append(found)


def pipeline(options: Namespace, folder: Path, rows: tuple[Path, Path], seed: int) -> Iterator[dict[str, Any]]:
    """Run the pipeline with one seed on rows for training and held-out ones; yield it after each judged policy."""
    train, held_out = rows
    folder.mkdir()
    data = ["--dataset", str(train), "--eval_dataset", str(held_out)]
    rlhf = partial(run, folder, seed)
    start = rlhf("sft", "sft", [*_SFT.split(), *data, "--pretrain", str(options.model)])
    with ThreadPoolExecutor(options.at_once) as pool:
        scorers = [
            pool.submit(run, folder, own_seed, "rm", name, [*_RM.split(), *data, "--pretrain", str(start)])
            for name, own_seed in (("reward", seed), ("judge", seed + 100))
        ]
        dpo = pool.submit(rlhf, "dpo", "dpo", [*_DPO.split(), *data, "--pretrain", str(start)])
        folders = {"sft": start, "dpo": dpo.result()}
        reward, judge = (job.result() for job in scorers)
        models = ["--pretrain", str(start), "--reward_pretrain", str(reward), "--critic_pretrain", str(reward)]
        sizes = ["--prompt_data", str(train), "--train_steps", str(options.steps), "--seed", str(seed)]
        more = [*(["--bf16", "--colocate_all_models"] if local_gpus() else []), *options.flags]
        runs = {
            f"ppo{kl}": pool.submit(
                run_ppo_in_turn, [*_PPO.split(), *models, *sizes, "--init_kl_coef", str(kl), *more], folder / f"ppo{kl}"
            )
            for kl in options.kl
        }
        learned = {name: curves(job.result()) for name, job in runs.items()}
    folders |= {name: folder / name / "model" for name in runs}
    table = {}
    for name, model in folders.items():  # one after the other: an engine measures the memory that others leave
        table[name] = judged(options, model, (reward, judge), held_out, folder / f"answers_{name}.jsonl")
        progress({name: {key: table[name][key] for key in ("reward", "judge")}})
        accuracies = {scorer: accuracy(folder / scorer) for scorer in ("reward", "judge")}
        yield {"seed": seed, "accuracy": accuracies, "policies": table, "curves": learned}


def write_pairs(source: Path, num_held_out: int, folder: Path) -> tuple[Path, Path]:
    """Write the pairs for training and the last ones, which are held out; return both files."""
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        pairs = list(lines)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    train.write_text("".join(pairs[:-num_held_out]), encoding="utf-8")
    held_out.write_text("".join(pairs[-num_held_out:]), encoding="utf-8")
    return train, held_out


def run(folder: Path, seed: int, command: str, name: str, flags: list[str]) -> Path:
    """Run a command that trains; return the folder of its model."""
    _rlhf(command, [*flags, "--seed", str(seed), "--save_path", str(folder / name)])
    return folder / name / "model"


def judged(options: Namespace, model: Path, scorers: tuple[Path, Path], rows: Path, out: Path) -> dict[str, Any]:
    """Answer the held-out prompts; return the mean of each scorer, lengths, and the share of answers that were cut."""
    models = ["--pretrain", str(model), "--reward_pretrain", ",".join(map(str, scorers)), "--reward_weights", "1,1"]
    flags = [*_LENGTHS.split(), *models, "--prompt_data", str(rows), "--seed", "1", "--output_path", str(out)]
    _rlhf("generate", [*flags, *options.flags])
    answers = read_lines(out)
    reward, judge = zip(*(answer["source_rewards"] for answer in answers), strict=True)
    return {
        "reward": statistics.mean(reward),
        "judge": statistics.mean(judge),
        "characters": statistics.mean(len(answer["text"]) for answer in answers),
        "cut": statistics.mean(answer["finish_reason"] == "length" for answer in answers),
        "answers": len(answers),
    }


def curves(metrics: Metrics) -> dict[str, list[float | None]]:
    """Return the rewards, KL, lengths and seconds of each step of a run of PPO."""
    wanted = ("kl/", "rollout/reward", "rollout/response", "value/", "time/step")
    names = [name for name in metrics.steps[-1] if name.startswith(wanted)]
    return {name: [step.get(name) for step in metrics.steps] for name in names}


def accuracy(folder: Path) -> float:
    """Return the held-out accuracy of a reward model at the end of its training."""
    return next(
        line["eval/accuracy"] for line in reversed(read_lines(folder / "metrics.jsonl")) if "eval/accuracy" in line
    )


def _rlhf(command: str, flags: list[str]) -> None:
    on_gpu = ["--bf16"] if local_gpus() else []
    words = [sys.executable, "-m", "rlhf_cli.main", command, *flags, *on_gpu]
    subprocess.run(words, check=True, env={**os.environ, **OWN_CLUSTER}, stdout=sys.stderr)
