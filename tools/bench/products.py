"""The matrix products of a training pass alone: the practical bound of its speed on a GPU."""

import math
from collections.abc import Sequence

import torch

SECONDS = 3.0  # long enough that the clock settles, as in training


def products_seconds(products: Sequence[tuple[Sequence[int], int]]) -> float:
    """Return the seconds of bfloat16 matrix products on the GPU, forward and backward.

    They run one after the other, again and again for `SECONDS`.

    Args:
        products: ([out, in], the shape of a weight; the number of tokens that go through it).
    """
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(*shape, **options) * 0.02 for shape, _ in products]
    counts = [num_tokens for _, num_tokens in products]
    sides = {
        key: torch.randn(*key, **options) for shape, count in products for key in ((count, size) for size in shape)
    }
    seconds = SECONDS / 5
    for _ in range(2):  # the first round warms up, and shows how many rounds fill the time
        num_rounds = math.ceil(SECONDS / seconds)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(num_rounds):
            for weight, count in zip(weights, counts, strict=True):
                above, below = (sides[count, size] for size in weight.shape)
                below @ weight.T, above @ weight, above.T @ below
        ended.record()
        torch.cuda.synchronize()
        seconds = started.elapsed_time(ended) / 1e3 / num_rounds
    return seconds
