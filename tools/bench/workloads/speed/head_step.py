"""What the operators of the LM head change in a whole training step: seconds and memory.

    python tools/bench/run.py head_step --shape qwen2-1.5b --num_tokens 16384 --out head_step.json

A random model with compiled layers runs forward and backward over one full pack. All tokens are trained, by -log p and
an entropy bonus. Only the head and its loss differ:

    torch                    log-softmax of float32 logits, and the entropy from it, as usually written in PyTorch
    token_logprobs           the gradient overwrites the logits
    linear_token_logprobs    logits are computed block by block, in the forward pass and again in the backward pass
    linear_policy_loss       logits are computed once, chunk by chunk, together with the gradients

They take turns; seconds are medians. Log-probs and gradients are compared with those of the first before anything is
timed.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import SHAPES, in_turn, peak_of, place, random_model
from rlhf_kernels import PolicyObjective, PolicyStream, linear_policy_loss, linear_token_logprobs, token_logprobs
from rlhf_models.backbone import last_hidden_state
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor

FLAGS = {
    "num_tokens": (2048, "tokens of the pack"),
    "repeats": 7,
    "shape": {"choices": SHAPES, "default": "tiny"},
}
SEQUENCE_TOKENS = 512
MAX_ERROR = 2e-2  # relative to the norm, in bfloat16
ENTROPY_COEF = 0.01

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # hidden, weight and tokens to loss and log-probs


def loss_of(logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and, unchanged, the log-probs."""
    return -logprobs.mean() - ENTROPY_COEF * entropy.mean(), logprobs


def plain(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss as it is usually written in PyTorch."""
    logp = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return loss_of(logp.gather(1, token_ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1))


def with_the_loss(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss with `linear_policy_loss`."""
    count = len(token_ids)
    ones = torch.ones(count, device=hidden.device)
    bounds = torch.arange(0, count + 1, count, dtype=torch.int32, device=hidden.device)
    stream = PolicyStream(advantages=ones, loss_mask=ones.bool(), cu_seqlens=bounds, num_tokens=count, num_sequences=1)
    objective = PolicyObjective(policy_loss="reinforce", entropy_coef=ENTROPY_COEF)
    loss, _, logprobs, _ = linear_policy_loss(hidden, weight, token_ids, stream, objective)
    return loss, logprobs


HEADS: dict[str, Head] = {
    "torch": plain,
    "token_logprobs": lambda hidden, weight, ids: loss_of(
        *token_logprobs(hidden @ weight.T, ids, inplace_backward=True)[:2]
    ),
    "linear_token_logprobs": lambda hidden, weight, ids: loss_of(*linear_token_logprobs(hidden, weight, ids)[:2]),
    "linear_policy_loss": with_the_loss,
}


def step(model: nn.Module, head: Head, batch: TokenBatch, index: Tensor) -> Tensor:
    """Compute the gradients of one step, trained on the tokens at flat positions `index`. Return their log-probs."""
    model.zero_grad()
    hidden = last_hidden_state(model.base_model, batch)[0].index_select(0, index - 1)
    loss, logprobs = head(hidden, model.get_output_embeddings().weight, batch.input_ids[0, index])
    loss.backward()
    return logprobs.detach()


def errors(model: nn.Module, batch: TokenBatch, index: Tensor) -> dict[str, dict[str, float]]:
    """Return the relative error of each head's log-probs and gradients compared with the first head.

    Raises:
        RuntimeError: an error of `MAX_ERROR` or more.
    """
    found: dict[str, dict[str, float]] = {}
    wanted: list[Tensor] = []
    for name, head in HEADS.items():
        logprobs = step(model, head, batch, index)
        results = [logprobs, torch.cat([weight.grad.flatten() for weight in model.parameters()])]
        wanted = wanted or [part.clone() for part in results]
        relative = [float((got - want).norm() / want.norm()) for got, want in zip(results, wanted, strict=True)]
        found[name] = dict(zip(("logprobs", "gradient"), relative, strict=True))
        if not max(relative) < MAX_ERROR:
            raise RuntimeError(f"{name} is wrong: {found[name]}")
    return found


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Compare the heads, and time them in turn."""
    here = place()
    path = random_model(options.shape, folder / "model")
    model = load_actor(path, dtype=here.dtype_name, packing=True).model.to(here.device)
    if compile_unavailable_reason(model, here.device) is None:
        compile_layers(model)
    rng = np.random.default_rng(0)
    lengths = [SEQUENCE_TOKENS] * (options.num_tokens // SEQUENCE_TOKENS)
    batch = TokenBatch.packed([rng.integers(5, 500, length) for length in lengths], here.device)
    index = batch.host_target_mask[0].nonzero()[:, 0].to(here.device)
    relative = errors(model, batch, index)
    steps = {name: partial(step, model, head, batch, index) for name, head in HEADS.items()}
    heads = in_turn(steps, options.repeats)
    for name, found in heads.items():
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        peak = peak_of(steps[name])
        found["peak_gib_above_weights"] = (peak - before) / 2**30 if peak else None
        found["errors"] = relative[name]
    yield {"num_tokens": sum(lengths), "dtype": here.dtype_name, "heads": heads}
