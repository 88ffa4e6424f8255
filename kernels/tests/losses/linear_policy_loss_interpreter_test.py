"""The Triton kernels of `linear_policy_loss` in Triton's interpreter, on the CPU, against the twin in float64."""

import itertools
import math
import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_triton_linear_policy_loss_interpreted_passes_all_cases(interpret):
        interpret(Path(__file__).resolve(), num_cases=64)

else:
    import torch

    from rlhf_kernels import PolicyObjective, PolicyStream
    from rlhf_kernels.ops.linear_policy_loss import triton as fused
    from rlhf_kernels.ops.linear_policy_loss.reference import linear_policy_loss_reference
    from rlhf_kernels.ops.linear_token_logprobs import product
    from rlhf_kernels.ops.packed_policy_loss import triton as packed
    from rlhf_kernels.ops.token_logprobs import triton as token_logprobs

    # For cases that are never multiplied by tiles: both forms would take the logits.
    without_product = pytest.mark.parametrize("form", ["product"], indirect=True)

    @pytest.fixture(autouse=True)
    def small_blocks(form, monkeypatch):
        """Several blocks per row and chunks per stream."""
        monkeypatch.setattr(token_logprobs, "MAX_BLOCK_SIZE", 32)
        monkeypatch.setattr(packed, "SCALE_BLOCK_SIZE", 256)
        monkeypatch.setattr(packed, "SCALE_PROGRAMS", 2)
        monkeypatch.setattr(product, "MAX_ROWS", 16)  # a tile
        monkeypatch.setattr(fused, "CHUNK_BYTES", 32 * (4 * (128 + 24) + 12 * 3))  # two tiles of float32 rows
        monkeypatch.setattr(fused, "BLOCK_SIZE", 64)
        for name in ("BLOCK_SIZE", "SEQUENCE_BLOCK_SIZE"):
            monkeypatch.setattr(packed, name, 16)
        # On CPUs with AMX, oneDNN's products in bfloat16 read beyond the rows of a matrix, where NaN is, too.
        with torch.backends.mkldnn.flags(enabled=False):
            yield

    def problem(num_tokens=20, vocab_size=70, hidden_size=24, dtype=torch.float32, spread=1.0):
        """Arguments by name; the old log-probs are near the current ones, and one token in five is not trained."""
        hidden = (spread * torch.randn(num_tokens, hidden_size)).to(dtype)
        weight = (torch.randn(vocab_size, hidden_size) / 3).to(dtype)
        token_ids = torch.randint(0, vocab_size, (num_tokens,))
        logits = hidden.float() @ weight.float().t() / 0.7
        current = torch.log_softmax(logits, dim=-1).gather(1, token_ids[:, None])[:, 0]
        old, ref = (current + scale * torch.randn(num_tokens) for scale in (0.4, 0.3))
        mask = torch.rand(num_tokens) < 0.8
        third = num_tokens // 3
        return {
            "hidden": hidden,
            "weight": weight,
            "token_ids": token_ids,
            "old": old,
            "advantages": torch.randn(num_tokens),
            "mask": mask,
            "bounds": torch.tensor([0, third, third, num_tokens]),
            "ref": ref,
        }

    def several_chunks(**options):
        """Arguments that take two chunks. The first has two blocks of partial sums."""
        return problem(num_tokens=35, **options)

    def stream_of(given, names=("old", "ref"), num_tokens=7):
        columns = {f"{name}_logprobs": given[name] for name in names}
        constants = {"advantages": given["advantages"], "loss_mask": given["mask"], "cu_seqlens": given["bounds"]}
        return PolicyStream(**constants, num_tokens=num_tokens, num_sequences=3, **columns)

    def run(function, given, objective, more=(None,), num_tokens=7, scale=-0.5, **options):
        """Return results and gradients."""
        hidden, weight = (given[name].detach().requires_grad_() for name in ("hidden", "weight"))
        stream = stream_of(given, num_tokens=num_tokens)
        token_ids = given["token_ids"].masked_fill(~given["mask"], -1)
        outputs = function(hidden, weight, token_ids, 0.7, stream, objective, *more, **options)
        (scale * outputs[0]).backward()
        return [output.detach() for output in outputs], hidden.grad, weight.grad

    def check(objective, given, tolerance=3e-6, weight_grad_dtype=None, **options):
        """Compare everything with the twin in float64."""
        wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        expected = run(linear_policy_loss_reference, wide, objective, more=(), **options)
        results = run(fused.linear_policy_loss_triton, given, objective, more=(weight_grad_dtype,), **options)
        for out, want in zip(results[0], expected[0], strict=True):
            assert out.dtype == torch.float32
            torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=max(tolerance, 1e-5))
        for out, want in zip(results[1:], expected[1:], strict=True):
            assert out.dtype == given["hidden"].dtype
            assert (out.double() - want).norm() <= tolerance * want.norm() + 1e-6  # of one token's sure choice it is 0

    # The loss of log-probs and entropies is that of packed_policy_loss, which is tested with every loss. Here, losses
    # differ whose tokens share a ratio: it takes the log-probs of other chunks.
    @pytest.mark.parametrize(
        ("policy_loss", "form", "entropy_coef"),
        [
            *itertools.product(["gmpo", "topr", "vespo"], ["product"], [0.2]),
            *itertools.product(["ppo", "gspo"], ["product"], [0.0, 0.2]),
            *itertools.product(["ppo", "gspo"], ["logits"], [0.2]),
        ],
        indirect=["form"],
    )
    def test_triton_linear_policy_loss_in_chunks_equals_float64(policy_loss, entropy_coef):
        objective = PolicyObjective(policy_loss=policy_loss, kl_coef=0.1, entropy_coef=entropy_coef)
        check(objective, several_chunks())

    @pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
    def test_triton_linear_policy_loss_sequence_means_equal_float64(policy_loss):
        check(PolicyObjective(policy_loss=policy_loss, reduction="seq_mean_token_mean"), several_chunks())

    @pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
    def test_triton_linear_policy_loss_bias_that_leaves_tokens_out_equals_a_head_without_them(entropy_coef):
        given, objective = several_chunks(), PolicyObjective(kl_coef=0.1, entropy_coef=entropy_coef)
        kept = torch.ones(70, dtype=torch.bool)
        kept[[3, 4, *range(24, 66)]] = False  # a gap, and all columns of a tile
        chosen = torch.randint(0, int(kept.sum()), (35,))
        given["token_ids"] = kept.nonzero()[:, 0][chosen]
        wide = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        small = wide | {"weight": wide["weight"][kept], "token_ids": chosen}
        expected = run(linear_policy_loss_reference, small, objective, more=())
        bias = torch.zeros(70).masked_fill(~kept, -math.inf)
        results = run(fused.linear_policy_loss_triton, given, objective, bias=bias)
        for out, want in zip(results[0], expected[0], strict=True):
            torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=1e-5)
        for out, want in ((results[1], expected[1]), (results[2][kept], expected[2])):
            torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        assert not results[2][~kept].any()

    @pytest.mark.parametrize("num_tokens", [0, 1, 17, 32])
    @pytest.mark.parametrize("vocab_size", [1, 65])
    def test_triton_linear_policy_loss_odd_sizes_equal_float64(num_tokens, vocab_size):
        check(PolicyObjective(kl_coef=0.1, entropy_coef=0.2), problem(num_tokens, vocab_size))

    @without_product
    @pytest.mark.parametrize("weight_grad_dtype", [None, torch.float32])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_triton_linear_policy_loss_half_states_are_near_float64(dtype, weight_grad_dtype):
        rounding = torch.finfo(dtype).eps
        given = problem(dtype=dtype)
        check(PolicyObjective(clip_low=0.9, clip_high=99.0), given, 4 * rounding, weight_grad_dtype)

    @without_product
    def test_triton_linear_policy_loss_float16_keeps_gradients_of_large_batches():
        # By a loss scale of 2^16, and that comes after they are made.
        objective = PolicyObjective(policy_loss="reinforce", entropy_coef=0.1)
        check(objective, problem(dtype=torch.float16), 4e-3, num_tokens=10**6, scale=65536.0)

    @pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
    def test_triton_linear_policy_loss_ignored_rows_are_not_read_and_get_zeros(entropy_coef):
        given = problem()
        given["hidden"][[3, 17]] = float("nan")
        given["mask"][[3, 17]] = False
        hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
        objective = PolicyObjective(entropy_coef=entropy_coef)
        loss, _, logprobs, entropy = fused.linear_policy_loss_triton(
            hidden,
            weight,
            given["token_ids"].masked_fill(~given["mask"], -1),
            1.0,
            stream_of(given, ()),
            objective,
            None,
        )
        loss.backward()
        assert loss.isfinite() and hidden.grad.isfinite().all() and hidden.grad.any()
        assert weight.grad.isfinite().all() and weight.grad.any()
        for out in (hidden.grad, logprobs, entropy):
            assert not out[~given["mask"]].any()

    def add_to_logits(given, column):
        """Add the same numbers [V] to the logits of every row; rows stay at multiples of 16 bytes."""
        rows = len(given["hidden"])
        given["hidden"] = torch.cat([given["hidden"], torch.ones(rows, 1), torch.zeros(rows, 3)], dim=1)
        given["weight"] = torch.cat([given["weight"], column[:, None].expand(-1, 4)], dim=1)

    @pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
    def test_triton_linear_policy_loss_large_logits_keep_their_digits(entropy_coef):
        # The same shift of all logits of a row changes nothing: of ten thousand it leaves a few of float32's digits.
        given, objective = problem(spread=4.0), PolicyObjective(entropy_coef=entropy_coef)
        expected = run(fused.linear_policy_loss_triton, given, objective)
        add_to_logits(given, torch.full((70,), 128.0 * 64.0))
        shifted = run(fused.linear_policy_loss_triton, given, objective)
        for out, want in zip(shifted[0], expected[0], strict=True):
            torch.testing.assert_close(out, want, atol=5e-3, rtol=1e-3)

    @pytest.mark.parametrize("levels", [(0, 99, 198, 297), (0, 58, 62, 62), (0, -80, 0, 59)])
    def test_triton_linear_policy_loss_logits_that_rise_from_block_to_block_keep_their_digits(levels):
        # In bits: where a block is too far above what came before, that is taken down to it.
        given = problem(vocab_size=101)
        add_to_logits(given, torch.tensor(levels).repeat_interleave(32)[:101] * 0.7 * math.log(2))
        check(PolicyObjective(policy_loss="reinforce"), given, 2e-5)

    @without_product
    @pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
    def test_triton_linear_policy_loss_strided_arguments_equal_float64(entropy_coef):
        given = several_chunks()
        given["hidden"] = given["hidden"].repeat_interleave(2, dim=0)[::2].T.contiguous().T
        given["weight"] = given["weight"].repeat_interleave(2, dim=1)[:, ::2]
        check(PolicyObjective(kl_coef=0.1, entropy_coef=entropy_coef), given)

    @pytest.mark.parametrize(
        ("form", "wanted", "entropy_coef"),
        # Only after the product does the entropy bonus decide what becomes of a gradient.
        [
            *itertools.product(["product"], ["hidden", "weight"], [0.0, 0.2]),
            ("logits", "hidden", 0.2),
            ("logits", "weight", 0.0),
        ],
        indirect=["form"],
    )
    def test_triton_linear_policy_loss_one_gradient_is_that_of_both(wanted, entropy_coef):
        given, objective = problem(), PolicyObjective(kl_coef=0.1, entropy_coef=entropy_coef)
        both = run(fused.linear_policy_loss_triton, given, objective, (None,))
        leaves = {name: given[name].detach().requires_grad_(name == wanted) for name in ("hidden", "weight")}
        token_ids = given["token_ids"].masked_fill(~given["mask"], -1)
        outputs = fused.linear_policy_loss_triton(*leaves.values(), token_ids, 0.7, stream_of(given), objective, None)
        (-0.5 * outputs[0]).backward()
        assert torch.equal(leaves[wanted].grad, both[1 if wanted == "hidden" else 2])

    def test_triton_linear_policy_loss_without_gradient_makes_none():
        given = problem()
        arguments = (given["weight"], given["token_ids"], 0.7, stream_of(given), PolicyObjective(), None)
        loss = fused.linear_policy_loss_triton(given["hidden"], *arguments)[0]
        assert not loss.requires_grad
        again = fused.linear_policy_loss_triton(given["hidden"].clone().requires_grad_(), *arguments)[0]
        assert torch.equal(loss, again.detach())

    def test_triton_linear_policy_loss_second_backward_pass_raises():
        given = problem()
        hidden = given["hidden"].requires_grad_()
        arguments = (given["weight"], given["token_ids"], 0.7, stream_of(given), PolicyObjective(), None)
        loss = fused.linear_policy_loss_triton(hidden, *arguments)[0]
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="runs once"):
            loss.backward()
