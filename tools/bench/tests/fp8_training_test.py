"""The benchmark of training in FP8 rounds what it says, compared with matrices that are rounded by hand, in float64."""

import numpy as np
import torch

from workloads.speed import fp8_training


def by_hand(x):
    """Round each row to e4m3: 3 bits of mantissa, exponents from -6, and the row's largest value becomes 448."""
    x = x.float().numpy()
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(448)
    value = (x / scale).astype(float)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(value), 1e-30))), -6) - 3)
    return torch.from_numpy(np.round(value / step) * step * scale)  # round: ties to even


def test_fp8_training_rounds_the_products_that_a_variant_names(bench):
    torch.manual_seed(0)
    x, weight, above = (torch.randn(size, dtype=torch.bfloat16) for size in ((32, 16), (48, 16), (32, 48)))
    x[3] = 0
    whole = above.double() @ weight.double(), above.double().T @ x.double()
    rounded = by_hand(above) @ by_hand(weight.T).T, by_hand(above.T) @ by_hand(x.T).T
    for name, count in fp8_training.OWN.items():
        leaves = [each.clone().requires_grad_() for each in (x, weight)]
        y = fp8_training.Product.apply(*leaves, count)
        y.backward(above)
        wanted = by_hand(x) @ by_hand(weight).T, *rounded[: count - 1], *whole[count - 1 :]
        for got, want in zip((y.detach(), *(leaf.grad for leaf in leaves)), wanted, strict=True):
            torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=1e-2, msg=name)
    flags = ["--num_tokens", "32", "--check_tokens", "32", "--rounds", "1", "--variants", "forward", "all"]
    _, report = bench("fp8_training", *flags)
    errors = [variant["gradient_error"] for variant in report["variants"].values()]
    assert [*report["variants"]] == ["bfloat16", "forward", "all"]
    assert errors == sorted(errors)
