"""Time and memory of drawing one token per row from an LM head: the product, the draw and the token's log-prob.

    python kernels/bench/sampling.py --out sampling.json

Beside `linear_sample` are the matrix product alone, and what an engine computes without it: logits in bfloat16, then
the Gumbel maximum, the log-softmax of the drawn token and its rank, in eager PyTorch and compiled. Log-probs are
compared with float64 before they are timed; the tests check the distribution. Calls are replayed from one CUDA graph.

Without a GPU, a tiny size runs as a test of the script; its times mean nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness import attempt, extra_gib, median_ms, operator, options_parser, print_table, require, write

SIZES = ((151_936, 896), (49_152, 576), (151_936, 2048), (151_936, 4096))  # vocabulary, width
ROWS = (256, 512, 1024)
NUM_SETS = 3
MAX_ERROR = 1e-3  # of log-probs from float32 logits
MAX_ROUNDED_ERROR = 0.05  # of log-probs from logits in bfloat16


@dataclass(frozen=True)
class Inputs:
    """A head and one number per row: see `linear_sample`."""

    hidden: Tensor
    weight: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor


Draw = Callable[[Inputs], Sequence[Tensor]]  # returns tokens and their log-probs


def ours() -> Draw:
    """The operator."""
    compute = operator("linear_sample")
    return lambda inputs: compute(*tensors_of(inputs))[:2]


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the arguments of `linear_sample`."""
    return inputs.hidden, inputs.weight, inputs.temperature, inputs.seeds, inputs.positions


def plain_draw(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from logits in memory."""
    logits = torch.mm(inputs.hidden, inputs.weight.T).float() / inputs.temperature[:, None]
    token_ids = (logits - torch.empty_like(logits).exponential_().log_()).argmax(1, keepdim=True)
    logprobs = logits.log_softmax(1)
    own = logprobs.gather(1, token_ids)
    return token_ids[:, 0], own[:, 0], (logprobs >= own).sum(1)


CONTENDERS: dict[str, Callable[[], Draw]] = {
    "linear_sample": ours,
    "torch": lambda: plain_draw,
    "torch.compile": lambda: torch.compile(plain_draw),
}


def draw_inputs(rows: int, vocab_size: int, width: int) -> list[Inputs]:
    """Return sets of inputs that share the weight."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if on_gpu else None}
    weight = torch.randn(vocab_size, width, **options) * width**-0.5
    sets = []
    for _ in range(NUM_SETS):
        seeds = torch.randint(0, 2**62, (rows,), device=device)
        temperature = 0.5 + torch.rand(rows, device=device)
        positions = torch.arange(rows, device=device)
        sets.append(Inputs(torch.randn(rows, width, **options), weight, temperature, seeds, positions))
    return sets


def measure(build: Callable[[], Draw], sets: Sequence[Inputs], seconds: float, limit: float) -> dict[str, Any]:
    """Check the log-probs of a contender, then measure its time and memory."""
    torch._dynamo.reset()
    draw = build()
    inputs = sets[0]
    token_ids, logprobs = draw(inputs)[:2]
    logits = torch.cat([inputs.hidden.double() @ part.double().T for part in inputs.weight.split(16_384)], dim=1)
    expected = (logits / inputs.temperature[:, None]).log_softmax(1).gather(1, token_ids[:, None])[:, 0]
    errors = {"logprob_error": float((logprobs - expected).abs().max())}
    del logits
    require(errors, {"logprob_error": limit})
    milliseconds = median_ms([partial(draw, inputs) for inputs in sets], seconds=seconds, graph=True)
    return {"ms": milliseconds, "extra_gib": extra_gib(partial(draw, inputs)), **errors}


def product(sets: Sequence[Inputs], seconds: float) -> dict[str, Any]:
    """Time the matrix product alone."""
    weight = sets[0].weight
    logits = torch.empty(len(sets[0].hidden), len(weight), dtype=weight.dtype, device=weight.device)
    calls = [partial(torch.mm, inputs.hidden, weight.T, out=logits) for inputs in sets]
    return {"ms": median_ms(calls, seconds=seconds, graph=True)}


def measure_size(rows: int, vocab_size: int, width: int, seconds: float) -> dict[str, Any]:
    """Measure the product and each contender."""
    sets = draw_inputs(rows, vocab_size, width)
    results = {"product alone": attempt(partial(product, sets, seconds))}
    for name, build in CONTENDERS.items():
        if name == "torch.compile" and not torch.cuda.is_available():
            continue
        limit = MAX_ERROR if name == "linear_sample" else MAX_ROUNDED_ERROR
        results[name] = attempt(partial(measure, build, sets, seconds, limit))
    return {"rows": rows, "vocabulary": vocab_size, "hidden": width, "contenders": results}


def main() -> None:
    """Measure every size, write the report after each, and print a table."""
    options = options_parser(__doc__).parse_args()
    on_gpu = torch.cuda.is_available()
    sizes = [(rows, *size) for size in SIZES for rows in ROWS] if on_gpu else [(4, 150, 16)]
    if options.quick and on_gpu:
        sizes = [(512, 151_936, 896)]
    seconds = min(options.seconds, 0.2) if options.quick else options.seconds
    reports: list[dict[str, Any]] = []
    for size in sizes:
        reports.append(measure_size(*size, seconds))
        write(options, "sampling", dtype="bfloat16" if on_gpu else "float32", sizes=reports)
    names = list(reports[0]["contenders"])
    rows = [
        [
            report["rows"],
            report["hidden"],
            report["vocabulary"],
            *(report["contenders"][name].get("ms") for name in names),
        ]
        for report in reports
    ]
    print_table(["rows", "width", "vocabulary", *(f"{name}, ms" for name in names)], rows)
    for report in reports:
        for name, result in report["contenders"].items():
            if result["status"] != "ok":
                print(f"{name} at {report['rows']} rows: {result['note']}")


if __name__ == "__main__":
    main()
