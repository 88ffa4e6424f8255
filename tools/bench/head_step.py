"""Measure what the operators of the LM head change in a whole training step: seconds and memory.

    python tools/bench/head_step.py --shape qwen2-1.5b --num_tokens 16384 --out head_step.json

A random model with compiled layers runs forward and backward over one full pack. All tokens are trained, by -log p and
an entropy bonus. Only the head and its loss differ:

    torch                    log-softmax of float32 logits, and the entropy from it, as usually written in PyTorch
    token_logprobs           the gradient overwrites the logits
    linear_token_logprobs    logits are computed block by block, in the forward pass and again in the backward pass
    linear_policy_loss       logits are computed once, chunk by chunk, together with the gradients

They take turns; seconds are medians. Log-probs and gradients are compared with those of the first before anything is
timed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_kernels import PolicyObjective, PolicyStream, linear_policy_loss, linear_token_logprobs, token_logprobs
from rlhf_models.backbone import last_hidden_state
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor
from runner import arguments, write
from shapes import SHAPES, random_model

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


def given_logits(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss with `token_logprobs`."""
    return loss_of(*token_logprobs(hidden @ weight.T, token_ids, inplace_backward=True)[:2])


def in_blocks(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss with `linear_token_logprobs`."""
    return loss_of(*linear_token_logprobs(hidden, weight, token_ids)[:2])


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
    "token_logprobs": given_logits,
    "linear_token_logprobs": in_blocks,
    "linear_policy_loss": with_the_loss,
}


def step(model: nn.Module, name: str, batch: TokenBatch, index: Tensor) -> Tensor:
    """Compute the gradients of one step, trained on the tokens at flat positions `index`. Return their log-probs."""
    model.zero_grad()
    hidden = last_hidden_state(model.base_model, batch)[0].index_select(0, index - 1)
    loss, logprobs = HEADS[name](hidden, model.get_output_embeddings().weight, batch.input_ids[0, index])
    loss.backward()
    return logprobs.detach()


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_and_gib(model: nn.Module, name: str, batch: TokenBatch, index: Tensor) -> tuple[float, float | None]:
    """Return the seconds of one step, and its peak memory in GiB above the weights (None without a GPU)."""
    on_gpu = torch.cuda.is_available()
    model.zero_grad()
    wait()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step(model, name, batch, index)
    wait()
    spent = time.perf_counter() - started
    return spent, (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None


def errors(model: nn.Module, batch: TokenBatch, index: Tensor) -> dict[str, dict[str, float]]:
    """Return the relative error of each head's log-probs and gradients compared with the first head.

    Raises:
        RuntimeError: an error of `MAX_ERROR` or more.
    """
    found: dict[str, dict[str, float]] = {}
    wanted: list[Tensor] = []
    for name in HEADS:
        logprobs = step(model, name, batch, index)
        results = [logprobs, torch.cat([weight.grad.flatten() for weight in model.parameters()])]
        wanted = wanted or [part.clone() for part in results]
        relative = [float((got - want).norm() / want.norm()) for got, want in zip(results, wanted, strict=True)]
        found[name] = dict(zip(("logprobs", "gradient"), relative, strict=True))
        if not max(relative) < MAX_ERROR:
            raise RuntimeError(f"{name} is wrong: {found[name]}")
    return found


def main() -> None:
    """Compare the heads, time them in turn, and write the report."""
    parser = arguments(__doc__, num_tokens=(2048, "tokens of the pack"), repeats=7)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(options.shape, Path(folder, "model"))
        model = load_actor(path, dtype=dtype, packing=True).model.to(device)
    if compile_unavailable_reason(model, device) is None:
        compile_layers(model)
    rng = np.random.default_rng(0)
    lengths = [SEQUENCE_TOKENS] * (options.num_tokens // SEQUENCE_TOKENS)
    batch = TokenBatch.packed([rng.integers(5, 500, length) for length in lengths], device)
    index = batch.host_target_mask[0].nonzero()[:, 0].to(device)
    relative = errors(model, batch, index)
    turns = [{name: seconds_and_gib(model, name, batch, index) for name in HEADS} for _ in range(options.repeats)]
    heads = {
        name: {
            "seconds": statistics.median(turn[name][0] for turn in turns),
            "peak_gib_above_weights": turns[-1][name][1],
            "errors": relative[name],
        }
        for name in HEADS
    }
    report = {
        "num_tokens": sum(lengths),
        "dtype": dtype,
        "heads": heads,
    }
    write(options, "head_step", report)
    print(json.dumps(heads, indent=2))


if __name__ == "__main__":
    main()
