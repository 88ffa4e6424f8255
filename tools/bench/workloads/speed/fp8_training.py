"""What linear layers in FP8 change in a training pass: seconds, memory and log-probs, compared with bfloat16.

    python tools/bench/run.py fp8_training --shape qwen2-1.5b --num_tokens 16384 --out fp8_training.json
    python tools/bench/run.py fp8_training --model FOLDER --rows gsm8k/test.jsonl --out fp8_training.json

A random model, or a published one on real rows (`question` and `answer`), runs forward and backward over one pack with
the fused policy loss, in compiled layers. All linear layers of the decoder layers compute in FP8 (e4m3), the head and
all else in bfloat16. Operands are scaled by the largest absolute value of a row: of a token, of an output channel.
So do engines with `--vllm_quantization fp8`. The variants differ in which products are in FP8:

    forward              the outputs; both gradients are computed in bfloat16
    forward_input        outputs, and gradients of inputs
    all                  outputs, and gradients of inputs and weights
    torchao_RECIPE       all, by `torchao.float8`: tensorwise, rowwise or rowwise_with_gw_hp (weights in bfloat16)

With `:mlp` behind its name, a variant leaves attention in bfloat16. Variants share their weights. Each takes turns with
bfloat16, and "ratio" is that of both medians: of the "whole" pass, of the "layers" without the head, and of their
forward part. "ratio_at_full_depth" is that of whole passes for all layers of the shape, from those that ran.

Log-probs are compared with those in bfloat16: `gap` in nats, and `ratio_off`, the mean of |ratio - 1|. "from_eager" are
those of the same variant in layers that are not compiled: as an engine does, they round at other places. Those of
"from_no_grad", with `--rows`, are of passes without gradients, which compute a policy's old ones. Gradients are those
of the decoder layers. `gradient_error` is relative to the norm of those in float32, and `loss_error` that of the mean
of log-probs, over `--check_tokens`.
"""

import copy
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models import SHAPES, in_turn, peak_of, place, random_model
from rlhf_models.actor import Actor
from rlhf_models.backbone import last_hidden_state
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor, load_tokenizer
from runner import progress
from workloads.speed.shared_prompts import run

FLAGS = {
    "num_tokens": (16_384, "tokens of the pack"),
    "sequence_tokens": 1024,
    "check_tokens": (2048, "tokens of the pack whose gradients are compared with those in float32; 0 for none"),
    "layers": (0, "decoder layers of a shape; 0 for all"),
    "rounds": 7,
    "variants": ["forward", "forward_input", "all", "torchao_tensorwise", "torchao_rowwise_with_gw_hp"],
    "shape": {"choices": SHAPES, "default": "tiny"},
    "model": (str, "folder of a published model, in place of --shape"),
    "rows": (str, "file of JSON lines with `question` and `answer`, for --model"),
    "gradient_checkpointing": False,
}
E4M3_MAX = 448.0
OWN = {"forward": 1, "forward_input": 2, "all": 3}  # products in FP8


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, N] in e4m3, and the float32 scales of its rows [M, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def product(left: Tensor, right: Tensor, *, fast: bool) -> Tensor:
    """Return left [M, K] times the transpose of right [N, K], both rounded to FP8."""
    a, a_scale = rounded(left)
    b, b_scale = rounded(right)
    scales = {"scale_a": a_scale, "scale_b": b_scale.t()}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


class Product(torch.autograd.Function):
    """x W^T for x [T, in] and W [out, in], with 1 to 3 of its products in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.count = count
        return product(x, weight, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = product(gradient, weight.t().contiguous(), fast=False) if ctx.count > 1 else gradient @ weight
        if ctx.count < 3:
            return of_x, gradient.t() @ x, None
        return of_x, product(gradient.t().contiguous(), x.t().contiguous(), fast=False), None


class Linear(nn.Linear):
    """A linear layer that computes `count` of its three products in FP8."""

    @classmethod
    def of(cls, layer: nn.Linear, count: int) -> "Linear":
        """Return one with the weights of `layer`."""
        with torch.device("meta"):
            made = cls(layer.in_features, layer.out_features, bias=False)
        made.weight, made.bias = layer.weight, layer.bias
        made.count = count
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [..., out], for x of shape [..., in]."""
        y = Product.apply(x.flatten(0, -2), self.weight, self.count).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def by_torchao(recipe: str) -> Callable[[nn.Linear], nn.Linear]:
    """Return the function that makes a layer of torchao from a linear layer."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe)
    if not torch.cuda.is_available():
        object.__setattr__(config, "emulate", True)
    return partial(Float8Linear.from_float, config=config)


def converted(actor: Actor, variant: str) -> Actor:
    """Return a copy of an actor that shares its weights, with linear layers of a variant."""
    made = copy.deepcopy(actor, {id(weight): weight for weight in actor.parameters()})
    name, _, part = variant.partition(":")
    if name == "bfloat16":
        return made
    recipe = name.removeprefix("torchao_")
    make = by_torchao(recipe) if recipe != name else partial(Linear.of, count=OWN[name])
    for path, layer in list(made.model.named_modules()):
        if isinstance(layer, nn.Linear) and ".layers." in path and (not part or f".{part}." in path):
            made.model.set_submodule(path, make(layer))
    return made


def pack(options: Namespace, num_tokens: int, device: torch.device) -> TokenBatch:
    """Return a pack of equal random sequences, or of the first rows that fit, cut to a multiple of 16 tokens."""
    if options.rows is None:
        draw = np.random.default_rng(0)
        length = min(options.sequence_tokens, num_tokens)
        return TokenBatch.packed([draw.integers(3, 500, length) for _ in range(num_tokens // length)], device)
    tokenizer = load_tokenizer(options.model)
    sequences: list[np.ndarray] = []
    left = num_tokens
    for line in Path(options.rows).read_text(encoding="utf-8").split("\n"):
        row = json.loads(line)
        found = tokenizer(f"{row['question']}\n{row['answer']}")["input_ids"][:left]
        sequences.append(np.array(found))
        left -= len(found)
        if left == 0:
            break
    return TokenBatch.packed(sequences, device)


def whole_pass(actor: Actor, batch: TokenBatch) -> Tensor:
    """Run both passes with the policy loss on all tokens but the first of each sequence; return log-probs."""
    return run(actor, batch, prompt_tokens=1)


def layers_pass(actor: Actor, batch: TokenBatch, backward: bool = True) -> None:
    """Run the layers, without the head."""
    actor.zero_grad()
    hidden = last_hidden_state(actor.model.base_model, batch)
    if backward:
        hidden.backward(hidden.detach())


WAYS = {"whole": whole_pass, "layers": layers_pass, "layers_forward": partial(layers_pass, backward=False)}


def gradients(actor: Actor) -> list[Tensor]:
    """Return the gradients of all weights of decoder layers, which the next pass leaves as they are."""
    return [weight.grad for name, weight in actor.named_parameters() if ".layers." in name]


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the norm of the difference between lists of tensors, relative to the norm of the second."""
    squares = [((a.float() - b).square().sum(), b.square().sum()) for a, b in zip(found, wanted, strict=True)]
    off, size = (float(sum(column)) for column in zip(*squares, strict=True))
    return (off / size) ** 0.5


def compared(logprobs: Tensor, wanted: Tensor) -> dict[str, float]:
    """Return how far log-probs are from others of the same tokens."""
    off = logprobs - wanted
    return {
        "gap_mean": float(off.abs().mean()),
        "gap_max": float(off.abs().max()),
        "ratio_off": float((off.exp() - 1).abs().mean()),
        "kl": float((off.exp() - 1 - off).mean()),
    }


def errors(actors: dict[str, Actor], wide: Actor, batch: TokenBatch) -> dict[str, dict[str, Any]]:
    """Return, for each actor, how far log-probs, their mean and gradients are from those in float32."""
    wanted = whole_pass(wide, batch)
    of_weights = gradients(wide)
    found = {}
    for name, actor in actors.items():
        logprobs = whole_pass(actor, batch)
        found[name] = {
            "from_float32": compared(logprobs, wanted),
            "loss_error": abs(float(logprobs.mean() / wanted.mean() - 1)),
            "gradient_error": relative(gradients(actor), of_weights),
        }
    return found


def prepare(options: Namespace, path: str) -> tuple[dict[str, Actor], dict[str, str]]:
    """Return the actors of all variants, which share their weights, and why others could not be made."""
    here = place()
    settings = {"packing": True, "gradient_checkpointing": options.gradient_checkpointing}
    actor = load_actor(path, dtype="bfloat16", **settings).to(here.device).train()
    actors, failed = {}, {}
    for name in ("bfloat16", *options.variants):
        try:
            actors[name] = converted(actor, name)
        except ImportError as error:
            failed[name] = str(error)
            continue
        if compile_unavailable_reason(actors[name].model, here.device) is None:
            compile_layers(actors[name].model)
    return actors, failed


def timed(actor: Actor, plain: Actor, batch: TokenBatch, rounds: int, depths: float) -> dict[str, Any]:
    """Return what passes take, in turn with those of `plain`, and for `depths` times as many layers."""
    found: dict[str, Any] = {}
    seconds = {}
    for way, call in WAYS.items():
        both = in_turn({"own": partial(call, actor, batch), "plain": partial(call, plain, batch)}, rounds)
        seconds[way] = own, bare = [both[name]["seconds"] for name in ("own", "plain")]
        found[way] = both["own"] | {"ratio": own / bare}
    head = seconds["whole"][1] - seconds["layers"][1]
    own, bare = (depths * each + head for each in seconds["layers"])
    return found | {"ratio_at_full_depth": own / bare, "peak_bytes": peak_of(partial(whole_pass, actor, batch))}


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Time the variants, and compare their log-probs and gradients afterwards."""
    here = place()
    depth = {"num_hidden_layers": options.layers} if options.layers else {}
    path = options.model or random_model(options.shape, folder / "model", **depth)
    actors, failed = prepare(options, path)
    plain = actors["bfloat16"]
    layers = plain.model.config.num_hidden_layers
    depths = 1.0 if options.model else SHAPES[options.shape].get("num_hidden_layers", layers) / layers
    batch = pack(options, options.num_tokens, here.device)
    found: dict[str, Any] = {name: {"error": reason} for name, reason in failed.items()}
    logprobs: dict[str, Tensor] = {}
    for name in list(actors):
        try:
            logprobs[name] = whole_pass(actors[name], batch)  # compiles
        except (RuntimeError, ValueError) as error:  # kernels of the GPU may lack a layout
            found[name] = {"error": str(error)[:500]}
            del actors[name]
            continue
        found[name] = timed(actors[name], plain, batch, options.rounds, depths)
        found[name]["from_bfloat16"] = compared(logprobs[name], logprobs["bfloat16"])
        progress({name: found[name]})
        yield {"num_hidden_layers": layers, "variants": found}
    for name, actor in actors.items():
        with torch.no_grad():
            found[name]["from_eager"] = compared(
                logprobs[name], converted(plain, name)(batch).logprobs[batch.target_mask]
            )
            if options.rows:
                found[name]["from_no_grad"] = compared(logprobs[name], actor(batch).logprobs[batch.target_mask])
        yield {"num_hidden_layers": layers, "variants": found}
    if options.check_tokens:
        wide = load_actor(path, dtype="float32", packing=True).to(here.device).train()
        for name, own in errors(actors, wide, pack(options, options.check_tokens, here.device)).items():
            found[name] |= own
        yield {"num_hidden_layers": layers, "variants": found}
