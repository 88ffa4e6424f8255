from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_kernels import (
    POLICY_METRICS,
    PolicyObjective,
    PolicyStream,
    linear_policy_loss,
    token_logprobs,
)
from rlhf_kernels.ops.packed_policy_loss.reference import packed_policy_loss_reference
from rlhf_models import actor as actor_module
from rlhf_models.actor import Actor
from rlhf_models.attention.packed import PACKED_ATTENTION
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir


def expected_logprobs(model, sequences, temperature, masked=()):
    """One sequence at a time through a model of plain transformers in float64, and a softmax without `masked` ids."""
    kept = torch.tensor([index not in masked for index in range(512)])
    results = []
    for sequence in sequences:
        ids = torch.as_tensor(sequence)[None]
        logits = model(input_ids=ids).logits[0, :-1, kept]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        places = (kept.cumsum(0) - 1)[ids[0, 1:, None]]
        results.append((logprobs.gather(1, places)[:, 0], -(logprobs.exp() * logprobs).sum(-1)))
    return results


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_actor_each_token_has_the_logprob_and_entropy_of_plain_transformers(model_dir, sequences, packing):
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, pad_id=0)
    output = load_actor(model_dir, dtype="float32", packing=packing)(batch, temperature=0.7)
    assert output.logprobs.dtype == output.entropy.dtype == torch.float32
    expected = expected_logprobs(AutoModelForCausalLM.from_pretrained(model_dir).double(), sequences, 0.7)
    for values, wanted in zip(output, zip(*expected, strict=True), strict=True):
        for one, want in zip(batch.split(values), wanted, strict=True):
            close(one[1:], want)
            assert one[0] == 0.0


def test_actor_padding_is_zero_and_changes_nothing(model_dir, sequences):
    actor = load_actor(model_dir, dtype="float32")
    first, second = (TokenBatch.padded(sequences, pad_id=pad) for pad in (0, 17))
    outputs = actor(first).logprobs, actor(second).logprobs
    assert torch.equal(*outputs)
    assert not outputs[0][~first.padding_mask].any()


@pytest.mark.parametrize("attn_implementation", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_actor_packed_equals_padded_in_loss_and_gradients(model_dir, sequences, attn_implementation, checkpointing):
    padded = load_actor(model_dir, dtype="float32")
    packed = load_actor(
        model_dir,
        dtype="float32",
        packing=True,
        attn_implementation=attn_implementation,
        gradient_checkpointing=checkpointing,
    )
    assert (packed.model.config._attn_implementation == PACKED_ATTENTION) == (attn_implementation == "auto")
    losses = []
    for actor, batch in ((padded, TokenBatch.padded(sequences, 0)), (packed, TokenBatch.packed(sequences))):
        output = actor(batch, temperature=0.7)
        weights = batch.lay_out([torch.linspace(-1, 1, len(s)).numpy() for s in sequences], torch.float32)
        losses.append((weights * (output.logprobs + 0.1 * output.entropy)).sum())
        losses[-1].backward()
    close(losses[0], losses[1], 1e-4)
    for (name, one), other in zip(padded.named_parameters(), packed.parameters(), strict=True):
        assert one.grad.abs().sum() > 0, name
        close(one.grad, other.grad, 5e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_actor_logits_mask_gives_the_same_values_and_asks_the_head_for_no_others(model_dir, sequences, packing):
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    actor = load_actor(model_dir, dtype="float32", packing=packing)
    wanted = batch.lay_out([[i % 3 == 0 for i in range(len(s))] for s in sequences], torch.bool)
    rows = []
    actor.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    everything, some = actor(batch), actor(batch, logits_mask=wanted)
    close(some.logprobs, everything.logprobs.masked_fill(~wanted, 0.0))
    close(some.entropy, everything.entropy.masked_fill(~wanted, 0.0))
    # Every third token but the first: 2 of 7, none of 1, 3 of 12, 9 of 30, none of 2.
    assert rows == [6 + 0 + 11 + 29 + 1, 14]


def test_actor_nothing_wanted_gives_zeros_and_zero_gradients(model_dir, sequences):
    batch = TokenBatch.padded(sequences, 0)
    actor = load_actor(model_dir, dtype="float32")
    output = actor(batch, logits_mask=torch.zeros_like(batch.padding_mask))
    (output.logprobs.sum() + output.entropy.sum()).backward()
    assert not output.logprobs.any()
    assert all(not parameter.grad.any() for parameter in actor.parameters())


@pytest.mark.parametrize("how", ["whole", "blocks", "bias", "bias, no mask", "capped"])
def test_actor_masked_ids_have_probability_zero_and_get_no_gradient(qwen2_dir, sequences, monkeypatch, how):
    masked = set(range(512)) - set(np.concatenate(sequences).tolist())  # the last ids, and many gaps
    if how == "bias, no mask":
        masked = set()
    if how in ("blocks", "bias", "bias, no mask"):
        monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", 0)
    plain = AutoModelForCausalLM.from_pretrained(qwen2_dir).double()
    actor = load_actor(qwen2_dir, dtype="float32", packing=True)
    if how.startswith("bias"):
        bias = torch.linspace(-2, 2, 512)
        actor.model.get_output_embeddings().bias = torch.nn.Parameter(bias.clone())
        plain.get_output_embeddings().bias = torch.nn.Parameter(bias.double())
    if how == "capped":  # the actor then takes the logits of the whole model
        actor._changes_logits = True
    actor.mask_ids([range(index, index + 1) for index in sorted(masked)])
    batch = TokenBatch.packed(sequences)
    output = actor(batch, temperature=0.7)
    expected = [torch.cat(values) for values in zip(*expected_logprobs(plain, sequences, 0.7, masked), strict=True)]
    for values, want in zip(output, expected, strict=True):
        close(torch.cat([one[1:] for one in batch.split(values)]), want)
    for logprobs, entropy in (output, expected):
        (logprobs.sum() - 0.3 * entropy.sum()).backward()
    for (name, one), other in zip(actor.model.named_parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad, 1e-5 + 1e-4 * other.grad.abs().max().item())
        if name.startswith("lm_head"):
            assert not one.grad[sorted(masked)].any()
            assert one.grad.any()


def test_actor_mask_is_no_step_of_the_backward_pass(qwen2_dir, sequences, monkeypatch):
    # One would copy the gradient of all logits, or of the head's weight.
    made_by = []

    def noting(logits, *args, **options):
        made_by.append(logits.grad_fn.name())
        return token_logprobs(logits, *args, **options)

    monkeypatch.setattr(actor_module, "token_logprobs", noting)
    actor = load_actor(qwen2_dir, dtype="float32")
    for masked in ((), (range(505, 512),)):
        actor.mask_ids(masked)
        actor(TokenBatch.padded([sequence % 505 for sequence in sequences], pad_id=0))
    assert made_by[0] == made_by[1]


def test_actor_sliding_window_packed_equals_padded(tmp_path, sequences):
    folder = tiny_model_dir(
        tmp_path,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    padded, packed = (load_actor(folder, dtype="float32", packing=packing) for packing in (False, True))
    batch = TokenBatch.padded(sequences, 0)
    close(torch.cat(batch.split(padded(batch).logprobs)), packed(TokenBatch.packed(sequences)).logprobs[0])
    full = load_actor(tiny_model_dir(tmp_path / "full"), dtype="float32")
    assert not torch.allclose(full(batch).logprobs, padded(batch).logprobs, atol=1e-3)


@pytest.mark.parametrize("packing", [False, True])
def test_actor_head_in_bfloat16_reads_states_in_float32(tmp_path, sequences, packing):
    config = MambaConfig(vocab_size=512, hidden_size=32, state_size=4, num_hidden_layers=2, pad_token_id=0)
    model = MambaForCausalLM(config).to(torch.bfloat16)
    assert model.base_model(torch.as_tensor(sequences[0])[None]).last_hidden_state.dtype == torch.float32
    model.save_pretrained(tmp_path)
    actor = load_actor(tmp_path, dtype="bfloat16", packing=packing)
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    values = batch.split(actor(batch).logprobs)
    for one, (want, _) in zip(values, expected_logprobs(model.double(), sequences, 1.0), strict=True):
        close(one[1:], want, 0.05)
    sum(one.sum() for one in values).backward()
    assert all(weight.grad.any() for weight in actor.parameters())


def test_actor_logits_that_the_model_caps_after_its_head_are_capped(sequences):
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        final_logit_softcapping=0.5,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config)
    batch = TokenBatch.padded(sequences, 0)
    logprobs = torch.log_softmax(model(input_ids=batch.input_ids).logits, -1)[:, :-1]
    expected = logprobs.gather(2, batch.input_ids[:, 1:, None])[..., 0]
    close(Actor(model)(batch).logprobs[:, 1:], expected.masked_fill(~batch.target_mask[:, 1:], 0.0))


def test_actor_model_that_drops_the_bounds_is_refused_not_mixed_up(model_dir, sequences):
    actor = load_actor(model_dir, dtype="float32", packing=True)
    attention = actor.model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, cu_seq_lens_q, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ConfigError, match="would mix them\n\nhint: turn packing off"):
        actor(TokenBatch.packed(sequences))


@pytest.mark.parametrize("packing", [False, True])
def test_actor_logits_after_tokens_are_those_its_logprobs_are_made_of(model_dir, sequences, packing):
    actor = load_actor(model_dir, dtype="float32", packing=packing)
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    index = batch.target_mask.flatten().nonzero()[:, 0]
    logits = actor(batch, logits_after=index - 1)
    assert logits.shape == (len(index), 512)
    logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids.flatten()[index, None])[:, 0]
    torch.testing.assert_close(logprobs, actor(batch).logprobs.flatten()[index])
    # The last token has something after it too, which no log-prob speaks of.
    assert actor(batch, logits_after=batch.last_index).shape == (len(sequences), 512)


@pytest.mark.parametrize("is_split", [False, True])
def test_actor_head_that_is_more_than_its_weight_is_called_as_a_module(model_dir, sequences, monkeypatch, is_split):
    monkeypatch.setattr(actor_module, "linear_token_logprobs", None)
    monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", 0)
    actor = load_actor(model_dir, dtype="float32")
    head = actor.model.get_output_embeddings()
    if is_split:
        head.weight.ds_id = 0  # as ZeRO-3 marks it
    else:
        actor.model.set_output_embeddings(torch.nn.Sequential(head))
    with torch.no_grad():
        actor(TokenBatch.padded(sequences, pad_id=0))


OBJECTIVES = {
    "ppo": PolicyObjective(dual_clip=1.5, kl_coef=0.2, kl_estimator="k3", entropy_coef=0.1),
    "gspo": PolicyObjective(policy_loss="gspo", reduction="seq_mean_token_mean", clip_low=0.3, clip_high=0.4),
    "cispo": PolicyObjective(policy_loss="cispo", kl_coef=0.1, kl_estimator="k3", kl_unbiased_gradient=True),
    "reinforce": PolicyObjective(policy_loss="reinforce", entropy_coef=0.3),
}


def lesson(sequences):
    """Where each sequence is trained, and a stream of those tokens: ratios of all sizes, one sequence not trained."""
    torch.manual_seed(0)
    trained = [np.arange(len(s)) % 3 != 0 if i != 2 else np.zeros(len(s), bool) for i, s in enumerate(sequences)]
    counts = torch.tensor([mask.sum() for mask in trained])
    columns = -6.2 + 0.5 * torch.randn(2, int(counts.sum()))
    stream = PolicyStream(
        advantages=torch.randn(columns.shape[1]),
        loss_mask=torch.ones(columns.shape[1], dtype=torch.bool),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        num_tokens=30,
        num_sequences=6,
        old_logprobs=columns[0],
        ref_logprobs=columns[1],
        weights=0.5 + torch.rand(columns.shape[1]),
    )
    return trained, stream


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_actor_policy_loss_and_gradients_are_those_of_plain_transformers_in_float64(
    model_dir, sequences, name, packing
):
    trained, stream = lesson(sequences)
    plain = AutoModelForCausalLM.from_pretrained(model_dir).double()
    pairs = [
        [values[torch.from_numpy(mask[1:])] for values in pair]
        for pair, mask in zip(expected_logprobs(plain, sequences, 0.7), trained, strict=True)
    ]
    expected = [torch.cat(values) for values in zip(*pairs, strict=True)]
    columns = ("advantages", "old_logprobs", "ref_logprobs", "weights")
    exact = replace(stream, **{column: getattr(stream, column).double() for column in columns})
    # Its own tests compare it with values by hand.
    want, _ = packed_policy_loss_reference(*expected, exact, OBJECTIVES[name])
    want.backward()

    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, pad_id=0)
    actor = load_actor(model_dir, dtype="float32", packing=packing)
    mask = batch.lay_out(trained, torch.bool)
    output = actor(batch, temperature=0.7, logits_mask=mask, stream=stream, objective=OBJECTIVES[name])
    output.loss.backward()
    close(output.loss, want.detach())
    for (label, weight), other in zip(actor.model.named_parameters(), plain.parameters(), strict=True):
        assert other.grad.any(), label
        close(weight.grad, other.grad, 1e-5 + 1e-4 * other.grad.abs().max().item())
    for values, wanted in zip(output[2:], expected, strict=True):
        assert not values.requires_grad and not values[~mask].any()
        close(values[mask], wanted.detach())
    metrics = dict(zip(POLICY_METRICS, output.metrics.tolist(), strict=True))
    assert metrics["tokens"] == mask.sum()


@pytest.mark.parametrize("packing", [False, True])
def test_actor_policy_loss_of_no_tokens_is_zero_with_a_gradient_of_zeros(model_dir, sequences, packing):
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, pad_id=0)
    none = torch.zeros(0)
    stream = PolicyStream(
        advantages=none, loss_mask=none.bool(), cu_seqlens=torch.tensor([0]), num_tokens=9, num_sequences=2
    )
    for objective in (PolicyObjective(entropy_coef=0.1), OBJECTIVES["gspo"]):
        actor = load_actor(model_dir, dtype="float32", packing=packing)
        mask = torch.zeros_like(batch.input_ids, dtype=torch.bool)
        output = actor(batch, logits_mask=mask, stream=stream, objective=objective)
        output.loss.backward()
        assert output.loss.item() == 0.0 and not output.metrics.any() and not output.logprobs.any()
        assert all(not parameter.grad.any() for parameter in actor.parameters())


def test_actor_policy_loss_needs_a_stream_and_an_objective_and_the_streams_tokens(model_dir, sequences):
    actor, batch = load_actor(model_dir, dtype="float32"), TokenBatch.padded(sequences, pad_id=0)
    _, stream = lesson(sequences)
    for one in ({"stream": stream}, {"objective": PolicyObjective()}):
        with pytest.raises(ValueError, match="got only one of them"):
            actor(batch, **one)
    with pytest.raises(ValueError, match="advantages must be"):
        actor(batch, stream=stream, objective=PolicyObjective())


def test_actor_loss_is_fused_with_a_plain_head_of_large_logits_on_cuda_alone(model_dir, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    actor = load_actor(model_dir, dtype="float32")
    assert not actor._needs_blocks(100)
    monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", 100 * 512 * 4 - 1)
    assert actor._needs_blocks(100) and not actor._needs_blocks(99)
    assert actor._is_fused(cuda) and not actor._is_fused(cpu)
    head = actor.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(512))
    assert not actor._is_fused(cuda) and actor._needs_blocks(100)
    head.bias = None
    head.weight.ds_id = 0  # as ZeRO-3 marks it
    assert not actor._needs_blocks(100)
    del head.weight.ds_id
    actor._changes_logits = True
    assert not actor._needs_blocks(100)


def test_actor_pass_follows_the_largest_one_in_how_it_computes_logits(model_dir, sequences, monkeypatch):
    paths = []
    for name in ("linear_token_logprobs", "token_logprobs"):
        function = getattr(actor_module, name)
        noting = lambda *args, name=name, function=function, **options: paths.append(name) or function(*args, **options)  # noqa: E731
        monkeypatch.setattr(actor_module, name, noting)
    actor, batch = load_actor(model_dir, dtype="float32"), TokenBatch.padded(sequences, pad_id=0)
    num_tokens = int(batch.target_mask.sum())
    monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", num_tokens * 512 * 4)
    trained, stream = lesson(sequences)
    few = {"logits_mask": batch.lay_out(trained, torch.bool), "stream": stream, "objective": OBJECTIVES["ppo"]}
    for options in ({}, few):
        for max_tokens in (None, num_tokens, num_tokens + 1):
            actor(batch, max_tokens=max_tokens, **options)
    assert paths == ["token_logprobs", "token_logprobs", "linear_token_logprobs"] * 2


@pytest.mark.parametrize("masked", [(), (range(3), range(480, 512))], ids=["all", "masked"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("packing", [False, True])
def test_actor_fused_loss_equals_that_of_whole_logits(model_dir, sequences, monkeypatch, name, packing, masked):
    sequences = [3 + sequence % 477 for sequence in sequences]
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, pad_id=0)
    trained, stream = lesson(sequences)
    results, calls = [], []

    def counted(*args, **kwargs):
        calls.append(args)
        return linear_policy_loss(*args, **kwargs)

    monkeypatch.setattr(actor_module, "linear_policy_loss", counted)
    for is_fused in (False, True):
        monkeypatch.setattr(Actor, "_is_fused", lambda *args: True)
        monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", 0 if is_fused else 4 << 30)
        actor = load_actor(model_dir, dtype="float32", packing=packing)
        actor.mask_ids(masked)
        mask = batch.lay_out(trained, torch.bool)
        output = actor(batch, temperature=0.7, logits_mask=mask, stream=stream, objective=OBJECTIVES[name])
        output.loss.backward()
        results.append([*output, *(weight.grad for weight in actor.parameters())])
    assert len(calls) == 1
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
