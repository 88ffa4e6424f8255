"""Compiled layers at ZeRO stage 3 on one or two GPUs: every gradient is as near to float32 as without."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_models.actor import Actor
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

LENGTHS = ((300, 1, 77), (129, 200, 64), (5, 31, 8))  # of sequences, by pass
SIZES = {"vocab_size": 1003, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
# Matrices of more than 100,000 weights: DeepSpeed leaves smaller ones gathered between passes.
DEEP = SIZES | {"intermediate_size": 1024, "num_hidden_layers": 4}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sequences_of(number: int, rank: int) -> list[Any]:
    rng = np.random.default_rng([number, rank])
    return [rng.integers(3, 1003, length + rank) for length in LENGTHS[number]]


def loss_of(actor: Any, batch: TokenBatch, logprobs: list[Any]) -> torch.Tensor:
    flat = torch.cat(batch.split(actor(batch).logprobs)).float()
    logprobs.append(flat.tolist())
    return (flat * torch.linspace(-1, 1, len(flat), device=flat.device)).sum()


def run(rank: int, num_ranks: int, master: tuple[str, int], folder: str, checkpointing: bool) -> list[Any]:
    """Log-probs of all passes, and the gradients after them, without and with compilation."""
    from deepspeed.utils import safe_get_full_grad

    from rlhf_train.engine.accelerate import start_engine
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cuda")
    results = []
    for torch_compile in ("off", "on"):
        settings = {"dtype": "bfloat16", "packing": True, "gradient_checkpointing": checkpointing}
        optimizer = OptimizerSpec(learning_rate=1e-3, scheduler="constant", max_norm=1e9)
        spec = ModelSpec(path=folder, zero_stage=3, torch_compile=torch_compile, optimizer=optimizer, **settings)
        actor = load_actor(folder, gradient_checkpointing=checkpointing, **spec.load_options)
        engine = start_engine(actor, spec, num_ranks=num_ranks, device="cuda", pack_tokens=None)
        logprobs: list[Any] = []
        for number in range(len(LENGTHS)):
            batch = TokenBatch.packed(sequences_of(number, rank), "cuda")
            engine.backward(loss_of(engine.forward, batch, logprobs), is_last=number == len(LENGTHS) - 1)
        gathered = {name: safe_get_full_grad(weight) for name, weight in actor.named_parameters()}
        results.append((logprobs, {name: grad.float().cpu().numpy() for name, grad in gathered.items()}))
    return results


def in_float32(folder: Path, num_ranks: int) -> tuple[list[Any], dict[str, Any]]:
    """Log-probs by rank, and gradients summed over the ranks, of padded batches in one process."""
    actor = load_actor(folder, dtype="float32").cuda()
    assert isinstance(actor, Actor)
    logprobs = []
    for rank in range(num_ranks):
        logprobs.append([])
        for number in range(len(LENGTHS)):
            loss_of(actor, TokenBatch.padded(sequences_of(number, rank), 0, "cuda"), logprobs[-1]).backward()
    return logprobs, {name: weight.grad.cpu().numpy() for name, weight in actor.named_parameters()}


@pytest.mark.parametrize("checkpointing", [True, False])
def test_compiled_layers_are_as_near_to_float32_as_others(tmp_path: Path, checkpointing: bool) -> None:
    folder = tiny_model_dir(tmp_path / "model", **DEEP)
    num_ranks = min(2, torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environs = [{"CUDA_VISIBLE_DEVICES": visible[rank]} for rank in range(num_ranks)]
    found = run_ranks(run, num_ranks, str(folder), checkpointing, environs=environs)
    wanted, gradients = in_float32(folder, num_ranks)
    for of_rank, want in zip(found, wanted, strict=True):
        plain, compiled = (np.concatenate(logprobs) for logprobs, _ in of_rank)
        far = np.linalg.norm(plain - np.concatenate(want))
        assert np.linalg.norm(compiled - np.concatenate(want)) < 1.5 * far
    for (_, plain), (_, compiled) in found:
        assert {*plain} == {*compiled} == {*gradients}
        for name, want in gradients.items():
            far, size = np.linalg.norm(plain[name] - want), np.linalg.norm(want)
            assert far < 0.5 * size, name
            assert np.linalg.norm(compiled[name] - want) < 1.5 * far + 1e-3 * size, name
