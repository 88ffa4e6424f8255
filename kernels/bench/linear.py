"""Log-probs and losses from hidden states and the LM head: this package, PyTorch and other libraries in one run.

    python kernels/bench/linear.py --out linear.json            # every size; minutes for each hidden width
    python kernels/bench/linear.py --quick --out linear.json    # one size, without contenders that compile for long

For each size (T tokens, H hidden, V vocabulary) in bfloat16, it measures the matrix products alone, and for each
contender the forward pass without gradient, the forward and backward pass ("step"), and the peak memory above inputs
and gradients. Times are medians of CUDA-event times, alternating between two sets of hidden states. Every contender
computes the mean of -log p of the tokens. Before it is timed, all but 64 rows are masked out, and loss and gradients
are compared with float64.

Without a GPU, a tiny size runs in float32 as a test of the script; its times mean nothing.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness import (
    Call,
    SkippedError,
    attempt,
    extra_gib,
    median_ms,
    operator,
    options_parser,
    print_table,
    relative_error,
    require,
    write,
)

VOCABULARIES = {896: 151_936, 1536: 151_936, 3584: 152_064, 8192: 152_064}
TOKENS = (1024, 4096, 16_384, 65_536)
CHECKED_ROWS = 64
NUM_SETS = 2
MAX_LOSS_ERROR = 1e-2  # nats; logits in bfloat16 are off by up to 2e-2 each
MAX_GRADIENT_ERROR = 2e-2  # relative to the norm
MAX_PEER_ERROR = 0.1  # looser for other libraries, because some drop small gradients; the report shows their errors


@dataclass(frozen=True)
class Inputs:
    """Inputs of a call.

    Attributes:
        hidden: [T, H].
        weight: [V, H].
        ids: [T] int64, -100 where masked out.
        count: number of rows that are not masked out.
        reference: hidden states [T, H] and weight [V, H] of another model.
        advantages: [T] float32, all 1.
        mask: [T] bool.
        cu_seqlens: [S + 1] int32.
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    count: int
    reference: tuple[Tensor, Tensor]
    advantages: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    cu_seqlens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        bounds = torch.arange(0, len(self.ids) + 1, max(1, len(self.ids) // 8), device=self.ids.device)
        object.__setattr__(self, "advantages", torch.ones(len(self.ids), device=self.ids.device))
        object.__setattr__(self, "mask", self.ids >= 0)
        object.__setattr__(self, "cu_seqlens", bounds.int())


Loss = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Contender:
    """One implementation of the loss.

    Attributes:
        build: returns the function from Inputs to a scalar; raises SkippedError or ImportError.
        products: number of matrix products of T x H x V to compare the forward pass with, and the forward and backward
            pass. A pass with None is not measured.
        ours: whether it belongs to this package: then small gradients must be right too, not only the norm.
        quick: whether it starts without compiling for long.
        gives: meaning of the scalar: nll, or k1 or kl to the reference.
    """

    build: Callable[[], Loss]
    products: tuple[int | None, int | None] = (1, 4)
    ours: bool = False
    quick: bool = True
    gives: str = "nll"

    @property
    def is_peer(self) -> bool:
        """Whether this package is compared with it."""
        return not self.ours and self.gives == "nll"


def plain_loss(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return the sum of -log p, with logits in the inputs' dtype and the log-sum-exp in float32."""
    logits = (hidden @ weight.T).float()
    picked = logits.gather(1, ids.clamp(min=0)[:, None])[:, 0]
    return ((torch.logsumexp(logits, dim=-1) - picked) * (ids >= 0)).sum()


def torch_eager() -> Loss:
    """PyTorch in eager mode."""
    return lambda inputs: plain_loss(inputs.hidden, inputs.weight, inputs.ids) / inputs.count


def torch_compiled() -> Loss:
    """PyTorch, compiled as one function."""
    needs_cuda()
    compiled = torch.compile(plain_loss)
    return lambda inputs: compiled(inputs.hidden, inputs.weight, inputs.ids) / inputs.count


def torch_chunked() -> Loss:
    """PyTorch, compiled, in 16 chunks whose logits are computed again for the backward pass."""
    needs_cuda()
    compiled = torch.compile(plain_loss)

    def loss(inputs: Inputs) -> Tensor:
        pairs = zip(inputs.hidden.chunk(16), inputs.ids.chunk(16), strict=True)
        parts = [checkpoint(compiled, hidden, inputs.weight, ids, use_reentrant=False) for hidden, ids in pairs]
        return torch.stack(parts).sum() / inputs.count

    return loss


def liger() -> Loss:
    """Liger's fused linear cross-entropy with its defaults: it sums the weight's gradient in the weight's dtype."""
    needs_cuda()
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda inputs: liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.ids)


def cut_cross_entropy() -> Loss:
    """Apple's cut-cross-entropy with its defaults: it drops blocks of small gradients."""
    needs_cuda()
    from cut_cross_entropy import linear_cross_entropy

    return lambda inputs: linear_cross_entropy(inputs.hidden, inputs.weight, inputs.ids)


def quack() -> Loss:
    """QuACK's chunked linear cross-entropy, which chooses its kernels itself."""
    needs_cuda()
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda inputs: chunked_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.ids)


def ours_logprobs() -> Loss:
    """`linear_token_logprobs`, which also computes the entropy."""
    compute = operator("linear_token_logprobs")
    return lambda inputs: -compute(inputs.hidden, inputs.weight, inputs.ids)[0].sum() / inputs.count


def ours_policy_loss() -> Loss:
    """`linear_policy_loss` with advantages of 1 and without clipping, which has the gradient of -log p."""
    compute = operator("linear_policy_loss")
    objective = operator("PolicyObjective")(policy_loss="reinforce")
    stream_of = operator("PolicyStream")

    def loss(inputs: Inputs) -> Tensor:
        counts = {"num_tokens": inputs.count, "num_sequences": len(inputs.cu_seqlens) - 1}
        stream = stream_of(advantages=inputs.advantages, loss_mask=inputs.mask, cu_seqlens=inputs.cu_seqlens, **counts)
        return compute(inputs.hidden, inputs.weight, inputs.ids, stream, objective)[0]

    return loss


def ours_kl(full_kl: bool) -> Loss:
    """`logprob_kl`: the estimate k1 from the token, or the full KL over the vocabulary."""
    compute = operator("logprob_kl")

    def divergence(inputs: Inputs) -> Tensor:
        result = compute(inputs.hidden, inputs.weight, *inputs.reference, inputs.ids, full_kl=full_kl)
        return (result.kl if full_kl else result.k1).sum() / inputs.count

    return divergence


CONTENDERS = {
    "linear_token_logprobs": Contender(ours_logprobs, ours=True),
    "linear_policy_loss": Contender(ours_policy_loss, products=(None, 3), ours=True),
    "logprob_kl": Contender(partial(ours_kl, False), products=(2, None), gives="k1"),
    "logprob_kl, full": Contender(partial(ours_kl, True), products=(2, None), gives="kl"),
    "torch": Contender(torch_eager, products=(1, 3)),
    "liger": Contender(liger, products=(1, 3)),
    "cut_cross_entropy": Contender(cut_cross_entropy),
    "torch.compile": Contender(torch_compiled, products=(1, 3), quick=False),
    "torch.compile, 16 chunks": Contender(torch_chunked, quick=False),
    "quack": Contender(quack, products=(1, 3), quick=False),
}


def needs_cuda() -> None:
    """Raise SkippedError without a GPU."""
    if not torch.cuda.is_available():
        raise SkippedError("needs CUDA")


def draw(tokens: int, width: int, vocab_size: int) -> list[Inputs]:
    """Return sets of inputs that share the weights. Logits have a standard deviation of about 1."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "dtype": torch.bfloat16 if on_gpu else None}
    weight, ref_weight = (torch.randn(vocab_size, width, **options) * width**-0.5 for _ in range(2))
    sets = []
    for _ in range(NUM_SETS):
        hidden, ref_hidden = (torch.randn(tokens, width, **options) for _ in range(2))
        ids = torch.randint(0, vocab_size, (tokens,), device=weight.device)
        sets.append(Inputs(hidden, weight, ids, tokens, (ref_hidden, ref_weight)))
    return sets


def with_gradient(inputs: Inputs) -> Inputs:
    """Return the same tensors as leaves that require gradients."""
    hidden, weight = (part.detach().requires_grad_() for part in (inputs.hidden, inputs.weight))
    return Inputs(hidden, weight, inputs.ids, inputs.count, inputs.reference)


def logprobs_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return all log-probs in float64, [rows, V]."""
    logits = [hidden.double() @ part.double().T for part in weight.split(16_384)]
    return torch.cat(logits, dim=1).log_softmax(dim=-1)


def check(loss: Loss, inputs: Inputs, contender: Contender, *, backward: bool) -> dict[str, float]:
    """Compare loss and gradients of 64 rows with float64. Raise WrongError if an error is too large.

    Checked are the gradients of these rows' hidden states, of the weights of their tokens, and of the weights of as
    many other tokens. The last are small, because the probabilities of other tokens are.
    """
    rows = torch.randperm(len(inputs.ids), device=inputs.ids.device)[:CHECKED_ROWS].sort().values
    masked = torch.full_like(inputs.ids, -100).index_copy(0, rows, inputs.ids[rows])
    leaves = Inputs(inputs.hidden, inputs.weight, masked, len(rows), inputs.reference)
    if backward:
        leaves = with_gradient(leaves)
    hidden = inputs.hidden[rows]
    tokens = inputs.ids[rows]
    logprobs = logprobs_of(hidden, inputs.weight)
    with torch.set_grad_enabled(backward):
        value = loss(leaves)
    errors = {"loss_error": abs(float(value.detach()) - true_value(contender.gives, inputs, rows, logprobs))}
    limits = {"loss_error": MAX_LOSS_ERROR}
    if backward:
        value.backward()
        gradient = logprobs.exp()
        gradient[torch.arange(len(rows), device=rows.device), tokens] -= 1
        gradient /= len(rows)
        pieces = zip(gradient.split(16_384, dim=1), inputs.weight.split(16_384), strict=True)
        errors["hidden_error"] = relative_error(leaves.hidden.grad[rows], sum(g @ part.double() for g, part in pieces))
        other = torch.randint(0, len(inputs.weight), (CHECKED_ROWS,), device=rows.device)
        chosen = {"weight_error": tokens.unique(), "small_gradient_error": other[~torch.isin(other, tokens)]}
        for name, columns in chosen.items():
            errors[name] = relative_error(leaves.weight.grad[columns], gradient[:, columns].T @ hidden.double())
        limits |= dict.fromkeys(("hidden_error", "weight_error"), MAX_PEER_ERROR)
        if contender.ours:
            limits |= dict.fromkeys(errors.keys() - {"loss_error"}, MAX_GRADIENT_ERROR)
    require(errors, limits)
    return errors


def true_value(of: str, inputs: Inputs, rows: Tensor, logprobs: Tensor) -> float:
    """Return the mean over rows in float64 of -log p of the token, the KL to the reference, or its estimate k1."""
    picked = logprobs.gather(1, inputs.ids[rows][:, None])
    if of == "nll":
        return -float(picked.mean())
    difference = logprobs - logprobs_of(inputs.reference[0][rows], inputs.reference[1])
    terms = difference.gather(1, inputs.ids[rows][:, None]) if of == "k1" else (logprobs.exp() * difference).sum(1)
    return float(terms.mean())


def measure(contender: Contender, sets: Sequence[Inputs], seconds: float, *, backward: bool) -> dict[str, Any]:
    """Check one pass of a contender, then measure its time and memory."""
    torch._dynamo.reset()
    loss = contender.build()
    errors = check(loss, sets[0], contender, backward=backward)
    sets = [with_gradient(inputs) for inputs in sets] if backward else sets
    milliseconds, gib = timed(loss, sets, seconds, backward=backward)
    return {"ms": milliseconds, "extra_gib": gib, **errors}


def timed(loss: Loss, sets: Sequence[Inputs], seconds: float, *, backward: bool) -> tuple[float, float | None]:
    """Return milliseconds and extra GiB of a forward pass without gradient, or of a forward and backward pass."""

    def run(inputs: Inputs) -> None:
        inputs.hidden.grad = inputs.weight.grad = None
        if backward:
            loss(inputs).backward()
        else:
            with torch.no_grad():
                loss(inputs)

    calls: list[Call] = [partial(run, inputs) for inputs in sets]
    milliseconds = median_ms(calls, seconds=seconds)
    for inputs in sets:
        inputs.hidden.grad = inputs.weight.grad = None
    return milliseconds, extra_gib(calls[0], (sets[0].hidden, sets[0].weight) if backward else ())


def products(sets: Sequence[Inputs], seconds: float) -> dict[str, Any]:
    """Time the matrix products alone: one (logits), three (with both gradients), four (with the logits twice)."""
    weight = sets[0].weight
    logits = torch.empty(len(sets[0].hidden), len(weight), dtype=weight.dtype, device=weight.device)
    grads = torch.empty_like(sets[0].hidden), torch.empty_like(weight)

    def run(inputs: Inputs, count: int) -> None:
        for _ in range(2 if count == 4 else 1):
            torch.mm(inputs.hidden, weight.T, out=logits)
        if count > 1:
            torch.mm(logits, weight, out=grads[0])
            torch.mm(logits.T, inputs.hidden, out=grads[1])

    run(sets[0], 1)
    wanted = sets[0].hidden[:CHECKED_ROWS].double() @ weight[:CHECKED_ROWS].double().T
    errors = {"logits_error": relative_error(logits[:CHECKED_ROWS, :CHECKED_ROWS], wanted)}
    require(errors, {"logits_error": MAX_GRADIENT_ERROR})
    times = {count: median_ms([partial(run, inputs, count) for inputs in sets], seconds=seconds) for count in (1, 3, 4)}
    return {**errors, "ms": times}


def measure_size(tokens: int, width: int, vocab_size: int, chosen: Sequence[str], seconds: float) -> dict[str, Any]:
    """Measure the products and both passes of each contender."""
    sets = draw(tokens, width, vocab_size)
    alone = attempt(partial(products, sets, seconds))
    known = alone.get("ms", {})
    results: dict[str, Any] = {}
    for name in chosen:
        contender = CONTENDERS[name]
        results[name] = {}
        for index, (key, count) in enumerate(zip(("forward", "step"), contender.products, strict=True)):
            if count is None:
                continue
            result = attempt(partial(measure, contender, sets, seconds, backward=bool(index)))
            against = 2 * known[1] if count == 2 and known else known.get(count)
            if "ms" in result and against:
                result["over_products"] = result["ms"] / against
            results[name][key] = result
    for key in ("forward", "step"):
        times = {name: passes[key]["ms"] for name, passes in results.items() if "ms" in passes.get(key, {})}
        peers = [spent for name, spent in times.items() if CONTENDERS[name].is_peer]
        for name in times:
            if CONTENDERS[name].ours and peers:
                results[name][key]["over_best_peer"] = times[name] / min(peers)
    return {"tokens": tokens, "hidden": width, "vocabulary": vocab_size, "products": alone, "contenders": results}


def print_size(size: dict[str, Any]) -> None:
    """Print one size's table."""
    alone = {count: round(spent, 3) for count, spent in size["products"].get("ms", {}).items()}
    alone_or_why = alone or size["products"]
    print(f"\nT {size['tokens']}, H {size['hidden']}, V {size['vocabulary']}; products alone, ms: {alone_or_why}")
    columns = ("ms", "over_products", "over_best_peer", "extra_gib")
    rows = []
    for name, results in size["contenders"].items():
        cells = [results.get(key, {}).get(column) for key in ("forward", "step") for column in columns]
        notes = {result.get("note", result["status"]) for result in results.values()}
        rows.append([name, *cells, "; ".join(sorted(notes))])
    heads = [f"{key} {column.replace('_', ' ')}" for key in ("forward", "step") for column in columns]
    print_table(["", *heads, ""], rows)


def main() -> None:
    """Measure every size, write the report after each, and print the tables."""
    parser = options_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="what to measure")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--vocabulary", type=int, help="default: that of a model of this width")
    options: argparse.Namespace = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    some = ((4096,), (1536,)) if options.quick else (TOKENS, tuple(VOCABULARIES))
    tokens, widths = (options.tokens or some[0], options.hidden or some[1]) if on_gpu else ((96,), (32,))
    seconds = min(options.seconds, 0.2) if options.quick else options.seconds
    unnamed = [name for name, contender in CONTENDERS.items() if contender.quick or not options.quick]
    sizes: list[dict[str, Any]] = []
    for width in widths:
        for count in tokens:
            vocab_size = options.vocabulary or VOCABULARIES.get(width, 151_936 if on_gpu else 101)
            sizes.append(measure_size(count, width, vocab_size, options.only or unnamed, seconds))
            write(options, "linear", dtype="bfloat16" if on_gpu else "float32", sizes=sizes)
            print_size(sizes[-1])


if __name__ == "__main__":
    main()
