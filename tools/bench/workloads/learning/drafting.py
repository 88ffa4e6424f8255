"""Share of drafted tokens that the policy accepts, by step, with a draft model that is trained along or stays as it is.

    python tools/bench/run.py drafting --out drafting.json

The policy is the built-in model, which `rlhf ppo` trains on its task; the draft model is its first layer with its
embedding. The first step is the same for both: the draft model learns from the responses of each step, and engines get
its weights after the step.
"""

import shutil
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_cli.builtin import MODEL_DIR
from runner import progress, run_ppo

DRAFTS = {"frozen": "", "trained": "--draft_learning_rate 3e-3"}
FLAGS = {"seeds": [1, 2, 3]}
COMMON = "--train_steps 20 --eval_steps -1 --actor_learning_rate 1e-3 --disable_ds_ckpt --vllm_draft_model draft"
METRICS = ("throughput/accepted_drafts", "throughput/accepted_length", "draft/loss")


def write_draft(folder: Path) -> None:
    """Write the model of the first layer of the built-in model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(MODEL_DIR, folder)
    config = AutoConfig.from_pretrained(MODEL_DIR)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    draft = AutoModelForCausalLM.from_config(config)
    policy = AutoModelForCausalLM.from_pretrained(MODEL_DIR).state_dict()
    draft.load_state_dict({name: policy[name] for name in draft.state_dict()})
    draft.save_pretrained(folder)


def run(flags: str, folder: Path) -> dict[str, Any]:
    """Run the job with `folder` as its --save_path; return the accuracies, and what was accepted by step."""
    words = [str(folder.parent / "draft") if word == "draft" else word for word in flags.split()]
    metrics = run_ppo(words, folder)
    by_step = {name: [step[name] for step in metrics.steps] for name in METRICS if name in metrics.steps[0]}
    return {"flags": flags, **metrics.accuracies(), "by_step": by_step}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run each draft model with every seed."""
    write_draft(folder / "draft")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in DRAFTS}
    for seed in options.seeds:
        for name, own in runs.items():
            own.append(run(f"{COMMON} {DRAFTS[name]} --seed {seed}", folder / f"{name}-{seed}"))
            progress(own[-1])
        yield {name: {"mean_accepted_by_step": _means(own), "runs": own} for name, own in runs.items()}


def _means(runs: list[dict[str, Any]]) -> list[float]:
    curves = [each["by_step"]["throughput/accepted_drafts"] for each in runs]
    return [statistics.mean(step) for step in zip(*curves, strict=True)]
