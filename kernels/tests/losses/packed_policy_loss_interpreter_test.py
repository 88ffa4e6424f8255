"""The Triton kernel of `packed_policy_loss` in Triton's interpreter, on the CPU, against the twin in float64."""

import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_packed_policy_loss_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=76)

else:
    import torch

    from rlhf_kernels import POLICY_METRICS, PolicyObjective, PolicyStream
    from rlhf_kernels.objective import PolicyLossName
    from rlhf_kernels.ops.packed_policy_loss import triton as fused
    from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference

    @pytest.fixture(autouse=True)
    def small_blocks(monkeypatch):
        """Blocks that sequences fill more than once."""
        sizes = {"BLOCK_SIZE": 16, "PROGRAMS": 3, "SEQUENCE_BLOCK_SIZE": 16, "SUMS_BLOCK_SIZE": 2}
        for name, size in (sizes | {"SCALE_BLOCK_SIZE": 8, "SCALE_PROGRAMS": 2}).items():
            monkeypatch.setattr(fused, name, size)

    NAMES = {"old": "old_logprobs", "ref": "ref_logprobs"}

    def columns_of(num_tokens=100, dtype=torch.float32):
        """Random columns; other log-probs are near the current ones and far from them, some equal; NaN where masked."""
        logprobs = -3 * torch.rand(num_tokens)
        old, ref = (logprobs + scale * torch.randn(num_tokens) for scale in (0.4, 0.3))
        old[::7] = logprobs[::7]
        old[1::23] -= 30.0
        ref[5::23] -= 30.0
        ref[9::23] += 5.0  # its k3 is bounded, its log ratio is not
        mask = torch.rand(num_tokens) < 0.8
        columns = {"old": old, "advantages": torch.randn(num_tokens), "ref": ref}
        columns |= {"logprobs": logprobs, "entropy": torch.rand(num_tokens), "weights": 2 * torch.rand(num_tokens)}
        columns["penalties"] = torch.rand(num_tokens)
        columns = {name: column.masked_fill(~mask, float("nan")).to(dtype) for name, column in columns.items()}
        third = num_tokens // 3
        bounds = torch.tensor([0, third, third, third + min(third, 1), num_tokens])
        mask[third : third + 1] = False  # a sequence of which nothing is trained, after an empty one
        return columns | {"mask": mask, "bounds": bounds}

    def check(objective, columns, names=("old", "ref"), tolerance=2e-6):
        """Compare loss, metrics and gradients with the twin in float64."""
        results = []
        for function, wide in ((fused.packed_policy_loss_triton, False), (packed_policy_loss_reference, True)):
            given = {key: x.double() if wide and x.is_floating_point() else x for key, x in columns.items()}
            chosen = {NAMES.get(name, name): given[name] for name in names}
            stream = PolicyStream(
                advantages=given["advantages"],
                loss_mask=given["mask"],
                cu_seqlens=given["bounds"],
                num_tokens=61,
                num_sequences=5,
                max_tokens=9,
                **chosen,
            )
            logprobs, entropy = (given[name].detach().requires_grad_() for name in ("logprobs", "entropy"))
            loss, metrics = function(logprobs, entropy, stream, objective)
            (-0.5 * loss).backward()
            results.append((loss.detach(), metrics, logprobs.grad, entropy.grad))
        rounding = torch.finfo(columns["logprobs"].dtype).eps
        assert results[0][1].shape == (len(POLICY_METRICS),)
        for out, want in zip(*results, strict=True):
            want = torch.zeros_like(out, dtype=torch.float64) if want is None else want
            torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=max(4 * rounding, 5e-6))

    REDUCTIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("policy_loss", get_args(PolicyLossName))
    def test_triton_packed_policy_loss_every_loss_and_reduction_equals_float64(policy_loss, reduction):
        numbers = {"clip_low": 0.03, "clip_high": 0.06, "sapo_tau": (2.0, 3.0), "log_ratio_coef": 0.3}
        objective = PolicyObjective(policy_loss=policy_loss, reduction=reduction, **numbers)
        objective = replace(objective, kl_coef=0.1, entropy_coef=0.01)
        check(objective, columns_of(), ("old", "ref", "weights"))

    @pytest.mark.parametrize("policy_loss", ["ppo", "gmpo", "vespo"])
    def test_triton_packed_policy_loss_off_policy_mask_equals_float64(policy_loss):
        columns = columns_of()
        columns["old"][::3] += 0.2  # the sequences have become less likely, and more so the shorter one
        columns["old"][:33] += 1.0
        for limit in (0.0, 0.2, 5.0):
            objective = PolicyObjective(policy_loss=policy_loss, clip_low=0.03, mask_off_policy=limit, kl_coef=0.1)
            check(objective, columns, ("old", "ref", "weights", "penalties"))

    @pytest.mark.parametrize("unbiased", [False, True])
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_triton_packed_policy_loss_every_kl_equals_float64(estimator, unbiased):
        check(
            PolicyObjective(kl_coef=0.7, kl_estimator=estimator, kl_unbiased_gradient=unbiased, entropy_coef=0.3),
            columns_of(),
        )

    def test_triton_packed_policy_loss_dual_clip_equals_float64():
        columns = columns_of()
        check(PolicyObjective(dual_clip=1.1), columns)
        check(PolicyObjective(dual_clip=3), columns)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_packed_policy_loss_half_columns_equal_float64_of_the_same(dtype):
        check(PolicyObjective(kl_coef=0.1, entropy_coef=0.1), columns_of(dtype=dtype), tolerance=1e-5)

    @pytest.mark.parametrize("num_tokens", [0, 1, 16, 63])
    @pytest.mark.parametrize("reduction", REDUCTIONS[:2])
    def test_triton_packed_policy_loss_odd_sizes_equal_float64(num_tokens, reduction):
        check(PolicyObjective(reduction=reduction, kl_coef=0.1, entropy_coef=0.1), columns_of(num_tokens))

    @pytest.mark.parametrize("names", [(), ("weights",), ("old", "ref", "weights")])
    def test_triton_packed_policy_loss_optional_columns_equal_float64(names):
        check(PolicyObjective(entropy_coef=0.1), columns_of(), names)

    def test_triton_packed_policy_loss_small_log_ratios_keep_the_digits_of_k3():
        columns = columns_of()
        columns["old"] = columns["ref"] = columns["logprobs"] - 2.0**-12
        check(PolicyObjective(kl_coef=1.0, kl_estimator="k3"), columns, tolerance=1e-12)

    def test_triton_packed_policy_loss_strided_columns_equal_float64():
        columns = columns_of()
        columns |= {name: columns[name].repeat_interleave(2)[::2] for name in ("logprobs", "old", "advantages", "mask")}
        check(PolicyObjective(), columns)

    @pytest.mark.parametrize("wanted", ["logprobs", "entropy", "both"])
    @pytest.mark.parametrize("factor", [1.0, -3.0])
    def test_triton_packed_policy_loss_gradients_are_scaled_where_they_are_wanted(factor, wanted):
        columns = columns_of(61)
        constants = {"advantages": columns["advantages"], "loss_mask": columns["mask"], "cu_seqlens": columns["bounds"]}
        stream = PolicyStream(**constants, num_tokens=50, num_sequences=4)
        results = []
        for function, dtype in ((fused.packed_policy_loss_triton, torch.float32), (packed_policy_loss_reference, None)):
            leaves = [columns[name].detach().to(dtype or torch.float64) for name in ("logprobs", "entropy")]
            for name, leaf in zip(("logprobs", "entropy"), leaves, strict=True):
                leaf.requires_grad_(wanted in (name, "both"))
            loss, _ = function(*leaves, stream, PolicyObjective(entropy_coef=0.1))
            (factor * loss).backward()
            results.append([leaf.grad for leaf in leaves])
        for out, want in zip(*results, strict=True):
            assert (out is None) == (want is None)
            if out is not None:
                torch.testing.assert_close(out.double(), want, atol=1e-8, rtol=1e-5)

    def test_triton_packed_policy_loss_second_backward_pass_raises():
        columns = columns_of()
        constants = {"advantages": columns["advantages"], "loss_mask": columns["mask"], "cu_seqlens": columns["bounds"]}
        stream = PolicyStream(**constants, num_tokens=1, num_sequences=1)
        logprobs = columns["logprobs"].requires_grad_()
        loss, _ = fused.packed_policy_loss_triton(logprobs, None, stream, PolicyObjective())
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="runs once"):
            loss.backward()
