import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_kernels import linear_token_logprobs
from rlhf_models import actor as actor_module
from rlhf_models.actor import Actor
from rlhf_models.attention import PACKED_ATTENTION
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir


def expected_logprobs(folder, sequences, temperature):
    """One sequence at a time through plain transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    results = []
    for sequence in sequences:
        ids = torch.as_tensor(sequence)[None]
        logprobs = torch.log_softmax(model(input_ids=ids).logits / temperature, dim=-1)[0, :-1]
        results.append((logprobs.gather(1, ids[0, 1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)))
    return results


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_actor_each_token_has_the_logprob_and_entropy_of_plain_transformers(model_dir, sequences, packing):
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, pad_id=0)
    output = load_actor(model_dir, dtype="float32", packing=packing)(batch, temperature=0.7)
    assert output.logprobs.dtype == output.entropy.dtype == torch.float32
    expected = expected_logprobs(model_dir, sequences, 0.7)
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


def test_actor_sequences_packed_together_do_not_see_each_other(model_dir, sequences):
    actor = load_actor(model_dir, dtype="float32", packing=True)
    before = actor(TokenBatch.packed(sequences)).logprobs
    changed = [sequences[0][::-1].copy(), *sequences[1:]]
    after = actor(TokenBatch.packed(changed)).logprobs
    own = len(sequences[0])
    assert not torch.equal(before[:, :own], after[:, :own])
    assert torch.equal(before[:, own:], after[:, own:])


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


def learned(actor, batch):
    actor.zero_grad()
    output = actor(batch, temperature=0.7)
    (output.logprobs.sum() + 0.3 * output.entropy.sum()).backward()
    return [output.logprobs.detach(), output.entropy.detach(), *(weight.grad for weight in actor.parameters())]


def test_actor_large_logits_go_to_the_operator_that_makes_them_in_blocks(model_dir, sequences, monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return linear_token_logprobs(*args, **kwargs)

    monkeypatch.setattr(actor_module, "linear_token_logprobs", counted)
    actor, batch = load_actor(model_dir, dtype="float32"), TokenBatch.padded(sequences, pad_id=0)
    whole = learned(actor, batch)
    assert not calls
    monkeypatch.setattr(actor_module, "MAX_LOGITS_BYTES", 0)
    for got, want in zip(learned(actor, batch), whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert len(calls) == 1


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
