import pytest
import torch

from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_critic


def with_random_head(folder, **options):
    critic = load_critic(folder, dtype="float32", **options)
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.value_head.weight)
    return critic


def test_critic_new_head_values_every_state_at_zero(model_dir, sequences):
    critic = load_critic(model_dir, dtype="bfloat16")
    values = critic(TokenBatch.padded(sequences, 0))
    assert values.dtype == torch.float32
    assert not values.any()
    values.sum().backward()
    assert critic.value_head.weight.grad.abs().sum() > 0


def test_critic_value_is_of_the_state_before_the_token(model_dir, sequences):
    critic = with_random_head(model_dir)
    batch = TokenBatch.padded(sequences, 0)
    values = critic(batch)
    hidden = critic.model(input_ids=batch.input_ids).last_hidden_state
    expected = (hidden[:, :-1] @ critic.value_head.weight[0]).masked_fill(~batch.target_mask[:, 1:], 0.0)
    torch.testing.assert_close(values[:, 1:], expected, atol=1e-4, rtol=0)
    assert not values[:, 0].any()
    assert not values[~batch.padding_mask].any()


def test_critic_value_does_not_depend_on_the_token_at_its_index_or_later(model_dir, sequences):
    critic = with_random_head(model_dir)
    changed = sequences[3].copy()
    changed[10:] = changed[10:][::-1]
    assert changed[10] != sequences[3][10]
    one, other = (critic(TokenBatch.padded([tokens], 0))[0] for tokens in (sequences[3], changed))
    torch.testing.assert_close(one[:11], other[:11], atol=1e-5, rtol=0)
    assert (one[11:] - other[11:]).abs().min() > 1e-4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_critic_packed_equals_padded_in_loss_and_gradients(model_dir, sequences, checkpointing):
    padded = with_random_head(model_dir)
    packed = with_random_head(model_dir, packing=True, gradient_checkpointing=checkpointing)
    losses = []
    for critic, batch in ((padded, TokenBatch.padded(sequences, 0)), (packed, TokenBatch.packed(sequences))):
        losses.append((torch.tanh(critic(batch)) ** 2).sum() / 47)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=0)
    for one, other in zip(padded.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)
