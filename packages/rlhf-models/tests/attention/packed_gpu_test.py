"""Packed batches on a GPU: FlashAttention in half precision, one call per sequence in float32."""

import logging

import numpy as np
import pytest
import torch

from rlhf_kernels import PolicyObjective, PolicyStream
from rlhf_models import actor
from rlhf_models.actor import Actor
from rlhf_models.attention import packed as attention
from rlhf_models.attention.flash import flash_4_unavailable_reason
from rlhf_models.backbone import replay_full_packs
from rlhf_models.batch import TokenBatch
from rlhf_models.fast import pack_graph
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor, load_critic
from rlhf_models.testing import tiny_model_dir

LENGTHS = (300, 1, 77, 512, 2, 129)
ATTENTION = {}  # of packed batches, by the model's folder


@pytest.fixture(scope="module", params=[(None, "rlhf_packed"), (64, "rlhf_packed"), (None, "rlhf_packed_4")])
def folder(request, tmp_path_factory):
    """A model of 8 heads of 64 on 2 key-value heads, once with a sliding window in its first layer."""
    window, name = request.param
    if name == attention.PACKED_ATTENTION_4 and (reason := flash_4_unavailable_reason(64)):
        pytest.skip(reason)
    sliding = {"use_sliding_window": True, "sliding_window": window} if window else {}
    made = tiny_model_dir(
        tmp_path_factory.mktemp("model"),
        vocab_size=1003,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        layer_types=["sliding_attention" if window else "full_attention", "full_attention"],
        **sliding,
    )
    ATTENTION[made] = name
    return made


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 1003, length) for length in LENGTHS]


def run(model, batch):
    """Outputs of each token in order, and the gradient of a weighted sum of them."""
    outputs = model(batch)
    first = outputs.logprobs if isinstance(model, Actor) else outputs
    flat = torch.cat(batch.split(first))
    torch.manual_seed(0)
    (flat * torch.randn(flat.shape, device=flat.device)).sum().backward()
    return flat.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def load(kind, folder, dtype, packing, **options):
    name = ATTENTION[folder] if packing else "auto"
    model = kind(folder, dtype=dtype, packing=packing, attn_implementation=name, **options)
    if kind is load_critic:
        torch.manual_seed(0)
        torch.nn.init.normal_(model.value_head.weight, std=0.1)
    return model.cuda()


@pytest.mark.parametrize("kind", [load_actor, load_critic])
def test_packed_float32_on_cuda_equals_padded(kind, folder):
    padded = run(load(kind, folder, "float32", False), TokenBatch.padded(sequences(), 0, "cuda"))
    packed = run(load(kind, folder, "float32", True), TokenBatch.packed(sequences(), "cuda"))
    torch.testing.assert_close(packed[0], padded[0], atol=1e-3, rtol=0)
    assert (packed[1] - padded[1]).norm() < 1e-3 * padded[1].norm()


@pytest.mark.parametrize("kind", [load_actor, load_critic])
def test_packed_bfloat16_on_cuda_is_as_near_to_float32_as_padded(kind, folder):
    truth = run(load(kind, folder, "float32", False), TokenBatch.padded(sequences(), 0, "cuda"))
    padded = run(load(kind, folder, "bfloat16", False), TokenBatch.padded(sequences(), 0, "cuda"))
    packed = run(load(kind, folder, "bfloat16", True), TokenBatch.packed(sequences(), "cuda"))
    for got, other, want in zip(packed, padded, truth, strict=True):
        assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm()


def test_packed_bfloat16_on_cuda_takes_the_varlen_kernel(folder, caplog):
    attention._log_fallback_once.cache_clear()
    with caplog.at_level(logging.INFO), torch.no_grad():
        load(load_actor, folder, "bfloat16", True)(TokenBatch.packed(sequences(), "cuda"))
    assert attention.varlen_unavailable_reason(torch.device("cuda", 0), torch.bfloat16, 64, 0.0) is None
    assert "sequence by sequence" not in caplog.text


def test_packed_float32_on_cuda_logs_the_fallback_once(folder, caplog):
    attention._log_fallback_once.cache_clear()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(2):
            load(load_actor, folder, "float32", True)(TokenBatch.packed(sequences(), "cuda"))
    assert len([record for record in caplog.records if "sequence by sequence" in record.message]) == 1


def policy_lesson(folder):
    """A packed batch, where it is trained, and a stream of those tokens, whose ratios are near 1."""
    batch = TokenBatch.packed(sequences(), "cuda")
    with torch.no_grad():
        model = load(load_actor, folder, "float32", True)
        current = model(batch, temperature=0.7).logprobs.flatten()[batch.host_target_mask.flatten()]
    torch.manual_seed(0)
    advantages, old, reference = torch.randn(3, len(current), device="cuda")
    stream = PolicyStream(
        advantages=advantages,
        loss_mask=torch.ones_like(advantages, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *np.cumsum([length - 1 for length in LENGTHS])], device="cuda"),
        num_tokens=len(advantages),
        num_sequences=len(LENGTHS),
        old_logprobs=current + 0.3 * old,
        ref_logprobs=current + 0.3 * reference,
    )
    return batch, batch.host_target_mask, stream


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_fused_head_is_as_near_to_float32_as_whole_logits_and_agrees_with_passes_without_gradient(
    folder, policy_loss, monkeypatch
):
    batch, mask, stream = policy_lesson(folder)
    objective = PolicyObjective(
        policy_loss=policy_loss, reduction="seq_mean_token_mean", kl_coef=0.1, entropy_coef=0.01
    )
    results = []
    for dtype, is_fused in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        monkeypatch.setattr(actor, "MAX_LOGITS_BYTES", 0 if is_fused else 4 << 30)
        model = load(load_actor, folder, dtype, True)
        assert model._is_fused(batch.input_ids.device)
        assert model._needs_blocks(len(stream.advantages)) == is_fused
        output = model(batch, temperature=0.7, logits_mask=mask, stream=stream, objective=objective)
        output.loss.backward()
        scaled = torch.cat([output.metrics[:3], output.metrics[3:] / len(stream.advantages)])
        gradient = torch.cat([weight.grad.flatten().float() for weight in model.parameters()])
        results.append((output.loss.detach(), scaled, gradient, output.logprobs, output.entropy))
        with torch.no_grad():
            expected = model(batch, temperature=0.7, logits_mask=mask)
        assert (output.logprobs - expected.logprobs).abs().max() < 1e-5
    truth, whole, fused = results
    for got, want in zip(fused[:2], whole[:2], strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
    for got, other, want in zip(fused[2:], whole[2:], truth[2:], strict=True):
        assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_are_as_near_to_float32_as_plain_ones(folder, packing, checkpointing):
    def batch():
        return TokenBatch.packed(sequences(), "cuda") if packing else TokenBatch.padded(sequences(), 0, "cuda")

    truth = run(load(load_actor, folder, "float32", False), TokenBatch.padded(sequences(), 0, "cuda"))
    plain, compiled = (
        load(load_actor, folder, "bfloat16", packing, gradient_checkpointing=checkpointing) for _ in range(2)
    )
    assert compile_unavailable_reason(compiled.model, torch.device("cuda", 0)) is None
    compile_layers(compiled.model)
    for got, other, want in zip(run(compiled, batch()), run(plain, batch()), truth, strict=True):
        assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_replayed_packs_are_as_near_to_float32_as_launched_ones(folder, is_compiled, caplog):
    truth = run(load(load_actor, folder, "float32", False), TokenBatch.padded(sequences(), 0, "cuda"))
    plain = run(load(load_actor, folder, "bfloat16", True), TokenBatch.packed(sequences(), "cuda"))
    model = load(load_actor, folder, "bfloat16", True)
    if is_compiled:
        compile_layers(model.model)
    sums = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in model.parameters()}

    def add(weight):  # of the head, which is not replayed
        sums[weight].add_(weight.grad)

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)
    replay_full_packs(model.model.base_model, sum(LENGTHS) + 50, sums)
    for _ in range(20):
        model.zero_grad()
        for total in sums.values():
            total.zero_()
        logprobs, _ = run(model, TokenBatch.packed(sequences(), "cuda"))
    replayed = logprobs, torch.cat([total.flatten() for total in sums.values()])
    for got, other, want in zip(replayed, plain, truth, strict=True):
        assert (got - want).norm() < 1.5 * (other - want).norm() + 1e-3 * want.norm()
    assert model.model.base_model.pack_graph._passes
    assert "CUDA graphs" not in caplog.text


def replaying(folder, num_tokens):
    """A model whose passes are replayed, its gradients' sums, and what learns from a batch of such lengths."""
    model = load(load_actor, folder, "bfloat16", True)
    sums = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in model.parameters()}

    def add(weight):
        sums[weight].add_(weight.grad)
        weight.grad = None

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)
    replay_full_packs(model.model.base_model, num_tokens, sums)

    def learn(lengths):
        for total in sums.values():
            total.zero_()
        rng = np.random.default_rng(sum(lengths))
        batch = TokenBatch.packed([rng.integers(3, 1003, length) for length in lengths], "cuda")
        logprobs = model(batch).logprobs
        logprobs.sum().backward()
        return logprobs.detach().clone(), torch.cat([total.flatten() for total in sums.values()])

    return model, learn


SIZES = [(512, 300, 200), (512, 100), (400, 300, 77), (512, 100), (512, 300, 200), (400, 300, 77)]


def test_replayed_sizes_share_memory_and_follow_the_weights(folder, monkeypatch):
    for name in ("_CAPTURE_PASSES", "_CAPTURE_FLOP"):
        monkeypatch.setattr(pack_graph, name, 1e-6)  # any filler is worth a capture
    model, learn = replaying(folder, 1024)
    graph = model.model.base_model.pack_graph
    for _ in range(16):
        learn((512, 300, 200))
    plain, plain_learn = replaying(folder, 1)  # a budget that no pack meets
    for turn, lengths in enumerate(SIZES):
        for got, want in zip(learn(lengths), plain_learn(lengths), strict=True):
            assert (got - want).norm() < 2e-2 * want.norm()
        with torch.no_grad():
            model(TokenBatch.packed(sequences(), "cuda"))
            for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
                change = torch.randn_like(weight) * 1e-3 * turn
                weight += change
                other += change
    assert sorted(shape.num_tokens for shape in graph._passes) == [616, 784, 1016, 1024]
    assert not plain.model.base_model.pack_graph._passes


def test_passes_that_wait_for_the_device_are_not_captured_and_leave_no_memory(folder, caplog):
    for turn in range(2):  # at the first, cuBLAS takes memory for the stream
        model, learn = replaying(folder, 1024)
        norm = model.model.base_model.norm
        norm.register_forward_hook(lambda module, inputs, output: output * float(output.isfinite().all()))
        for _ in range(15):
            learn((512, 300, 200))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            learn((512, 300, 200))
        assert caplog.text.count("capturing CUDA graphs failed") == turn + 1
    assert torch.cuda.memory_allocated() - before < 8 << 20
