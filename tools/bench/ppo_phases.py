"""Seconds by phase of one PPO step at the shape of a real model with random weights.

    python tools/bench/ppo_phases.py --out ppo_phases.json

Default: the shape of Qwen2-0.5B (494 M parameters, vocabulary 151,936, tied head), PPO with a critic of the same size
and a reference, 64 prompts x 8 samples, 256 + 512 tokens, everything on one GPU with engine and optimizer states
sleeping in turn. Random weights hardly ever draw an end token, so nearly every response has full length.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from environment import command_line, environment
from rlhf_data.records import Prompt
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.host import local_gpus
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards import RewardSource
from rlhf_train.algorithms import ALGORITHMS, make_algorithm
from rlhf_train.online.controller import run_online
from rlhf_train.online.job import BatchSizes, OnlineJob, RewardSpec
from rlhf_train.online.placement import PlacementRequest, plan_placement
from rlhf_train.run.observer import Observer
from rlhf_train.specs import ModelSpec, OptimizerSpec
from shapes import SHAPES

REWARD = 'def reward_func(queries, prompts, labels):\n    return {"rewards": [len(query) % 7 for query in queries]}\n'


class Printer(Observer):
    """Prints one line a step."""

    def starting(self, text: str) -> None:
        """See `Observer`."""
        print(f"starting {text}", file=sys.stderr, flush=True)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """See `Observer`."""
        seconds = {name.removeprefix("time/"): round(v, 2) for name, v in metrics.items() if name.startswith("time/")}
        gap = metrics["mismatch/logprob_gap_max"]
        print(f"step {step}/{num_steps} {seconds} gap max {gap:.4f}", file=sys.stderr, flush=True)


def build_job(options: argparse.Namespace, folder: Path) -> OnlineJob:
    """Return the job the options describe, its model and reward written under `folder`."""
    import torch

    on_gpu = local_gpus() > 0
    dtype = "bfloat16" if on_gpu else "float32"
    path = str(tiny_model_dir(folder / "model", dtype=getattr(torch, dtype), **SHAPES[options.shape]))
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    optimizer = OptimizerSpec(learning_rate=1e-6, scheduler="constant")
    frozen = ModelSpec(path=path, dtype=dtype, zero_stage=2, packing=options.packing)
    trained = ModelSpec(path=path, dtype=dtype, zero_stage=2, packing=options.packing, optimizer=optimizer)
    models = {"actor": trained}
    if ALGORITHMS[options.estimator].uses_critic:
        models["critic"] = trained
    if options.kl_coef:
        models["reference"] = frozen
    rng = np.random.default_rng(0)
    prompts = tuple(
        Prompt(f"prompt{i}", rng.integers(300, 400, options.prompt_tokens), "random") for i in range(options.prompts)
    )
    sleep = on_gpu and not options.no_sleep
    request = PlacementRequest(ranks=dict.fromkeys(models, 1), colocate_all_models=True)
    return OnlineJob(
        models=models,
        algorithm=make_algorithm(options.estimator, kl_coef=options.kl_coef),
        engine=EngineSpec(
            model=path,
            dtype=dtype,
            max_model_len=options.prompt_tokens + options.response_tokens,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=16384,
            gpu_memory_utilization=0.3,
            enable_sleep=sleep,
            weight_transfer="ipc" if on_gpu else "shared_memory",
        ),
        sampling=SamplingParams(num_samples=options.samples, max_tokens=options.response_tokens),
        eval_sampling=SamplingParams(max_tokens=1),
        prompts=prompts,
        reward=RewardSpec(sources=(RewardSource(kind="function", targets=(str(reward),)),)),
        plan=plan_placement(request, local_gpus()),
        batch=BatchSizes(
            rollout_batch_size=options.prompts,
            num_samples_per_prompt=options.samples,
            train_batch_size=options.prompts * options.samples,
            micro_train_batch_size=options.micro_batch,
            micro_rollout_batch_size=2 * options.micro_batch,
        ),
        num_steps=options.steps,
        save_path=str(folder / "run"),
        engine_sleep=sleep,
        trainer_sleep=sleep,
    )


def main() -> None:
    """Run the steps and write their phases; the first step, which warms up, is left out of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--estimator", choices=ALGORITHMS, default="gae")
    parser.add_argument("--kl_coef", type=float, default=0.01)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--response_tokens", type=int, default=512)
    parser.add_argument("--micro_batch", type=int, default=16, help="rollouts a forward-backward pass")
    parser.add_argument("--max_num_seqs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--no_sleep", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(options, Path(folder))
        summary = run_online(job, Printer())
        lines = map(json.loads, Path(job.save_path, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        steps: list[dict[str, Any]] = [line for line in lines if "time/step" in line]
    measured = steps[1:]
    names = sorted({name for step in measured for name in step})
    medians = {name: statistics.median(step[name] for step in measured if name in step) for name in names}
    report = {
        "benchmark": "ppo_phases",
        "command": command_line(options.out),
        "environment": environment(),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "median": medians,
        "steps": steps,
        "summary": dict(summary.metrics),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: round(v, 3) for name, v in medians.items() if name.startswith("time/")}, indent=2))


if __name__ == "__main__":
    main()
