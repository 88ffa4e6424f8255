"""Speed of memory-bound operators, relative to the bandwidth of a copy in the same run.

    python kernels/bench/elementwise.py --out elementwise.json

Bytes count each input read once and each result written once. Calls cycle over several sets of inputs, together larger
than the cache, and are replayed from one CUDA graph, because launching a call of microseconds takes longer than running
it. The report compares each operator with a copy of 2 GiB and with a copy of as many bytes as the operator moves, which
suffers from launch latency in the same way. The copy is the faster of the driver's and of a kernel. Before an operator
is timed, its results are compared with float64.

Without a GPU, tiny sizes run as a test of the script; their times mean nothing.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harness import Call, attempt, median_ms, operator, options_parser, print_table, relative_error, require, write

CACHE_BYTES = 64 << 20  # larger than the 50 MB L2 cache of an H100 or H200
LENGTHS = (100, 8000)
MAX_ERROR = 1e-5
MAX_HALF_ERROR = 1e-2


@dataclass(frozen=True)
class Work:
    """One call with its own inputs.

    Attributes:
        call: the call to time.
        num_bytes: bytes that it must move.
        check: returns errors by name; each must be below `limit`.
        limit: bound of the errors.
    """

    call: Call
    num_bytes: int
    check: Callable[[], dict[str, float]]
    limit: float = MAX_ERROR


def copy(num_bytes: int, device: str, *, by_kernel: bool) -> Work:
    """Read num_bytes / 2 and write as many, by the driver's copy or by a kernel that negates."""
    source = torch.randn(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    move = partial(torch.neg, source, out=target) if by_kernel else partial(target.copy_, source)

    def check() -> dict[str, float]:
        move()
        return {"copy": float(not torch.equal(target, -source if by_kernel else source))}

    return Work(move, num_bytes, check)


def fastest_copy(num_bytes: int, device: str, seconds: float) -> dict[str, Any]:
    """Return the faster of the two copies."""
    ways = [attempt(partial(speed, partial(copy, num_bytes, device, by_kernel=way), seconds)) for way in (False, True)]
    return min(ways, key=lambda result: result.get("ms", float("inf")))


def token_logprobs(rows: int, vocab_size: int, device: str, *, backward: bool) -> Work:
    """Log-probs and entropies of logits, and optionally their gradient, which reads and writes as many bytes again."""
    compute = operator("token_logprobs")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits = torch.randn(rows, vocab_size, device=device, dtype=dtype).requires_grad_(backward)
    ids = torch.randint(0, vocab_size, (rows,), device=device)
    weights = torch.randn(rows, device=device)

    def run() -> tuple[Tensor, ...]:
        results = compute(logits, ids)
        return torch.autograd.grad(results[:2], logits, (weights, weights)) if backward else tuple(results[:2])

    def check() -> dict[str, float]:
        got = run()
        some = logits.detach()[:8].double().requires_grad_()
        logp = some.log_softmax(dim=-1)
        want = (logp.gather(1, ids[:8, None])[:, 0], -(logp.exp() * logp).sum(dim=1))
        if backward:
            want = torch.autograd.grad(want, some, (weights[:8].double(),) * 2)
        return {str(index): relative_error(part[:8], want[index]) for index, part in enumerate(got)}

    return Work(run, logits.nbytes * (3 if backward else 1), check, MAX_HALF_ERROR if backward else MAX_ERROR)


def stream(tokens: int, device: str) -> tuple[Tensor, list[int]]:
    """Return bounds of sequences of 100 to 8,000 tokens, `tokens` in total, as a tensor and as a list."""
    shortest, longest = LENGTHS if tokens > LENGTHS[1] else (1, max(2, tokens // 4))
    bounds = [0]
    while bounds[-1] < tokens:
        bounds.append(min(tokens, bounds[-1] + int(torch.randint(shortest, longest + 1, ()))))
    return torch.tensor(bounds, dtype=torch.int32, device=device), bounds


def scanned(values: Tensor, decays: Tensor, bounds: Sequence[int]) -> Tensor:
    """Return the solution of the recurrence for the first sequences in float64, computed token by token."""
    numbers = values[: bounds[-1]].tolist()
    factors = decays[: bounds[-1]].tolist()
    solved = [0.0] * len(numbers)
    for start, end in pairwise(bounds):
        x = 0.0
        for token in reversed(range(start, end)):
            solved[token] = x = numbers[token] + factors[token] * x
    return torch.tensor(solved, dtype=torch.float64, device=values.device)


def segmented_scan(tokens: int, device: str) -> Work:
    """A linear recurrence: reads two numbers per token and writes one."""
    compute = operator("segmented_scan")
    cu_seqlens, bounds = stream(tokens, device)
    values = torch.randn(tokens, device=device)
    decays = torch.rand(tokens, device=device)

    def check() -> dict[str, float]:
        got = compute(values, decays, cu_seqlens)
        want = scanned(values, decays, bounds[:5])  # token by token in Python is slow, so only the first sequences
        return {"solution": relative_error(got[: bounds[:5][-1]], want)}

    return Work(lambda: compute(values, decays, cu_seqlens), 12 * tokens, check)


def packed_gae(tokens: int, device: str) -> Work:
    """Advantages and returns: reads two numbers and a mask per token and writes two numbers."""
    compute = operator("packed_gae")
    cu_seqlens, bounds = stream(tokens, device)
    rewards = torch.randn(tokens, device=device)
    values = torch.randn(tokens, device=device)
    mask = torch.rand(tokens, device=device) < 0.8
    run = partial(compute, rewards, values, mask, cu_seqlens, gamma=0.99, lambd=0.95)

    def check() -> dict[str, float]:
        want = torch.zeros(bounds[:5][-1], dtype=torch.float64)
        for start, end in pairwise(bounds[:5]):
            value = advantage = 0.0
            for token in reversed([token for token in range(start, end) if mask[token]]):
                delta = float(rewards[token]) + 0.99 * value - float(values[token])
                value = float(values[token])
                advantage = delta + 0.99 * 0.95 * advantage
                want[token] = advantage
        return {"advantages": relative_error(run()[0][: len(want)].cpu(), want)}

    return Work(run, 17 * tokens, check)


def packed_policy_loss(tokens: int, device: str) -> Work:
    """PPO with KL and entropy terms, forward and backward: reads five numbers and a mask per token and writes two."""
    objective = operator("PolicyObjective")(kl_coef=0.01, kl_estimator="k3", entropy_coef=0.01)
    compute = operator("packed_policy_loss")
    cu_seqlens, bounds = stream(tokens, device)
    old = -torch.rand(tokens, device=device)
    advantages, entropy = torch.randn(2, tokens, device=device)
    logprobs, reference = (old + 0.1 * torch.randn(tokens, device=device) for _ in range(2))
    mask = torch.rand(tokens, device=device) < 0.8
    count = int(mask.sum())
    leaves = [logprobs.requires_grad_(), entropy.requires_grad_()]
    constants = {"old_logprobs": old, "ref_logprobs": reference, "num_tokens": count, "num_sequences": len(bounds) - 1}
    stream_of = operator("PolicyStream")
    packed = stream_of(advantages=advantages, loss_mask=mask, cu_seqlens=cu_seqlens, **constants)

    def run() -> tuple[Tensor, ...]:
        loss, _ = compute(logprobs, packed, objective, entropy=entropy)
        return loss, *torch.autograd.grad(loss, leaves)

    def check() -> dict[str, float]:
        x, h = (leaf.detach().double().requires_grad_() for leaf in leaves)
        ratio = (x - old).exp()
        distance = x - reference
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = ((terms + 0.01 * (torch.expm1(-distance) + distance) - 0.01 * h) * mask).sum() / count
        want = (loss, *torch.autograd.grad(loss, (x, h)))
        return {str(index): relative_error(got, want[index]) for index, got in enumerate(run())}

    return Work(run, 29 * tokens, check)


def accumulate(size: int, device: str) -> Work:
    """A sum of bfloat16 and float32 in place: reads both and writes the float32."""
    compute = operator("accumulate_")
    total = torch.zeros(size, device=device)
    part = torch.randn(size, device=device).bfloat16()

    def check() -> dict[str, float]:
        before = total.double()
        compute(total, part)
        return {"sum": relative_error(total, before + part.double())}

    return Work(lambda: compute(total, part), 10 * size, check)


def adamw_bf16_moments(size: int, device: str) -> Work:
    """An update of AdamW: reads 12 bytes per weight and writes 8."""
    compute = operator("adamw_bf16_moments_")
    weight, gradient = torch.randn(2, size, device=device)
    moments = torch.zeros(2, size, dtype=torch.bfloat16, device=device)
    run = partial(
        compute, weight, gradient, *moments, num_updates=1, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )

    def check() -> dict[str, float]:
        moments.zero_()
        wanted = weight.double() - 0.1 * gradient.sign()  # the first update
        run()
        return {"weight": relative_error(weight, wanted)}

    return Work(run, 20 * size, check)


def works(device: str, quick: bool) -> dict[str, Callable[[], Work]]:
    """Return the operators to measure, by name."""
    on_gpu = device == "cuda"
    rows, vocab_size = (2048 if quick else 8192, 151_936) if on_gpu else (9, 101)
    size, tokens = (1 << 26, 1 << 20) if on_gpu else (1000, 300)
    return {
        "token_logprobs, forward": partial(token_logprobs, rows, vocab_size, device, backward=False),
        "token_logprobs, forward and backward": partial(token_logprobs, rows, vocab_size, device, backward=True),
        "packed_policy_loss, forward and backward": partial(packed_policy_loss, tokens, device),
        "segmented_scan": partial(segmented_scan, tokens, device),
        "packed_gae": partial(packed_gae, tokens, device),
        "accumulate_": partial(accumulate, size, device),
        "adamw_bf16_moments_": partial(adamw_bf16_moments, size, device),
    }


def speed(build: Callable[[], Work], seconds: float) -> dict[str, Any]:
    """Check a call, then time it over enough sets of inputs to exceed the cache."""
    torch.manual_seed(0)
    first = build()
    errors = first.check()
    require(errors, dict.fromkeys(errors, first.limit))
    others = [build() for _ in range(min(15, 2 * CACHE_BYTES // first.num_bytes))] if torch.cuda.is_available() else []
    calls = [first.call, *(other.call for other in others)]
    milliseconds = median_ms(calls, seconds=seconds, graph=True)
    gbs = first.num_bytes / milliseconds / 1e6
    return {"ms": milliseconds, "bytes": first.num_bytes, "gb_a_second": gbs, "errors": errors}


def main() -> None:
    """Measure the copy and every operator, write the report, and print the table."""
    parser = options_parser(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(works(device, False))
    parser.add_argument("--only", nargs="+", choices=names, help="what to measure")
    options: argparse.Namespace = parser.parse_args()
    seconds = min(options.seconds, 0.2) if options.quick else options.seconds
    large = fastest_copy(2 << 30 if device == "cuda" else 1000, device, seconds)
    results: dict[str, dict[str, Any]] = {}
    chosen = works(device, options.quick)
    for name in options.only or names:
        results[name] = result = attempt(partial(speed, chosen[name], seconds))
        if result["status"] == "ok":
            same = fastest_copy(result["bytes"], device, seconds)
            for share, against in (("share_of_copy", large), ("share_of_same_copy", same)):
                if against["status"] == "ok":
                    result[share] = result["gb_a_second"] / against["gb_a_second"]
        write(options, "elementwise", copy=large, operators=results)
    print(f"\ncopy of 2 GiB: {large.get('gb_a_second', large)} GB/s" if device == "cuda" else "\nno GPU: only run")
    columns = ("ms", "gb_a_second", "share_of_copy", "share_of_same_copy")
    rows = [[name, *map(result.get, columns), result.get("note", "ok")] for name, result in results.items()]
    print_table(["", *(column.replace("_", " ") for column in columns), ""], rows)


if __name__ == "__main__":
    main()
