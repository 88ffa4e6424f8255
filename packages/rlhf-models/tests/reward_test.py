from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2AudioConfig,
    Qwen2Config,
)

from rlhf_data.errors import ConfigError, DataError
from rlhf_models import reward
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.files import write_fields
from rlhf_models.loading import load_reward_model
from rlhf_models.reward import (
    InputLimits,
    RewardModel,
    check_sequences,
    has_packed_kernel,
    moments_fields,
    score_sequences,
    stored_moments,
)
from rlhf_models.testing import tiny_reward_model_dir


class TokenAndPosition(torch.nn.Module):
    """A backbone whose hidden state is the token's id and its position."""

    dtype = torch.float32

    def __init__(self, **fields):
        super().__init__()
        text = SimpleNamespace(hidden_size=2)
        self.config = SimpleNamespace(get_text_config=lambda: text, _attn_implementation="sdpa", **fields)

    def forward(self, input_ids, position_ids, **_):
        return SimpleNamespace(last_hidden_state=torch.stack([input_ids, position_ids], -1).float())


def by_hand(*, normalize=False, **fields):
    """Scores 2 x the last token - 10 x its position."""
    model = RewardModel(TokenAndPosition(**fields), normalize=normalize)
    model.value_head.weight.data = torch.tensor([[2.0, -10.0]])
    return model


SEQUENCES = [[7, 8, 9], [4], [1, 30]]
# 2 * 9 - 10 * 2, 2 * 4 - 0, 2 * 30 - 10 * 1
SCORES = [-2.0, 8.0, 50.0]


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def reward_dir(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"reward-{request.param}")
    return tiny_reward_model_dir(folder, architecture=request.param)


@pytest.mark.parametrize("batch", [TokenBatch.padded(SEQUENCES, 99), TokenBatch.packed(SEQUENCES)])
def test_reward_model_scores_by_hand_are_of_the_last_token(batch):
    scores = by_hand()(batch)
    assert scores.tolist() == SCORES
    assert scores.dtype == torch.float32


def test_reward_model_with_stored_moments_divides_only_when_asked():
    batch = TokenBatch.packed(SEQUENCES)
    # (-2 - 3) / 5, (8 - 3) / 5, (50 - 3) / 5
    assert by_hand(normalize=True, mean=3.0, std=5.0)(batch).tolist() == pytest.approx([-1.0, 1.0, 9.4])
    assert by_hand(mean=3.0, std=5.0)(batch).tolist() == SCORES
    assert by_hand(normalize=True)(batch).tolist() == SCORES
    assert by_hand(normalize=True, mean=3.0).moments is None


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_stored_moments_that_cannot_be_divided_by_are_refused(mean, std):
    with pytest.raises(
        ConfigError, match=rf"mean {mean} and the deviation {std}[^\n]*\n\nhint: .*``RewardModel.normalize``"
    ):
        stored_moments(SimpleNamespace(mean=mean, std=std))


def test_reward_model_gives_the_scores_of_transformers(reward_dir, sequences):
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_dir)
    batch = TokenBatch.padded(sequences, theirs.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(input_ids=batch.input_ids, attention_mask=batch.padding_mask.long()).logits[:, 0]
    scores = load_reward_model(reward_dir, dtype="float32")(batch)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert scores.std() > 0.1


def test_reward_model_packed_equals_padded(reward_dir, sequences):
    padded = load_reward_model(reward_dir, dtype="float32")(TokenBatch.padded(sequences, 0))
    model = load_reward_model(reward_dir, dtype="float32", packing=True)
    torch.testing.assert_close(model(TokenBatch.packed(sequences)), padded, atol=1e-5, rtol=1e-5)
    # Two sequences per pass, by length.
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    scores = score_sequences(model, sequences, batch_size=2, packing=True)
    torch.testing.assert_close(torch.tensor(scores), padded, atol=1e-5, rtol=1e-5)
    assert {batch.is_packed for batch in seen} == {True} and max(len(batch.lengths) for batch in seen) == 2


@pytest.mark.parametrize(
    ("model", "dtype", "has"),
    [
        (Qwen2Config(), "bfloat16", True),
        (LlamaConfig(), "float16", True),
        (Qwen2Config(), "float32", False),  # the kernel takes halves
        (LlamaConfig(head_dim=260), "bfloat16", False),
        (MistralConfig(sliding_window=64), "bfloat16", False),  # which the kernels of some versions do not know
        (Gemma2Config(sliding_window=None), "bfloat16", False),  # soft caps
        (MambaConfig(), "bfloat16", False),  # a state from token to token
        (BertConfig(), "bfloat16", False),  # not among the families that were examined
        (Qwen2AudioConfig(text_config=Qwen2Config()), "bfloat16", False),  # whose attention cannot be replaced
        (Qwen2Config(auto_map={"AutoModel": "mine.Model"}), "bfloat16", False),  # a model with code of its own
    ],
)
def test_packs_are_for_models_whose_sequences_a_kernel_keeps_apart(monkeypatch, model, dtype, has):
    assert not has_packed_kernel(model, dtype, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert has_packed_kernel(model, dtype, "cuda") is has


def test_reward_model_does_not_see_the_padding(reward_dir, sequences):
    model = load_reward_model(reward_dir, dtype="float32")
    one, other = (model(TokenBatch.padded(sequences, pad_id)) for pad_id in (0, 300))
    assert torch.equal(one, other)


def test_score_sequences_gives_each_its_score_whatever_the_order(reward_dir, sequences):
    model = load_reward_model(reward_dir, dtype="float32")
    together = score_sequences(model, sequences, batch_size=2)
    alone = [score_sequences(model, [tokens], batch_size=2)[0] for tokens in sequences]
    assert together == alone
    assert score_sequences(model, sequences[::-1], batch_size=64) == together[::-1]
    assert score_sequences(model, [], batch_size=2) == []


def test_score_sequences_beyond_the_context_is_refused(tmp_path):
    model = load_reward_model(tiny_reward_model_dir(tmp_path, max_position_embeddings=4), dtype="float32")
    assert len(score_sequences(model, [[5, 6, 7, 8]], batch_size=2)) == 1
    with pytest.raises(DataError, match="the reward model has a context of 4 tokens and got a sequence of 5"):
        score_sequences(model, [[5], [5, 6, 7, 8, 9]], batch_size=2)


def test_batches_hold_like_lengths_and_bounds(monkeypatch):
    monkeypatch.setattr(reward, "MAX_BATCH_TOKENS", 20)
    # By length: 1, 1, 3 | 8, 9 (2 x 9 = 18) | 30, which alone is already over the bound.
    assert list(reward.length_batches([8, 1, 30, 3, 9, 1], 3)) == [[1, 5, 3], [0, 4], [2]]
    # 3 x 7 = 21 tokens are too many, 2 x 7 are not.
    assert list(reward.length_batches([7, 7, 7], 3)) == [[0, 1], [2]]


def test_moments_replace_earlier_ones_and_are_what_loading_reads(tmp_path):
    folder = tiny_reward_model_dir(tmp_path, mean=9.0, std=9.0)
    write_fields(folder, moments_fields(3.0, 5.0))
    assert load_reward_model(folder, dtype="float32", normalize=True).moments == (3.0, 5.0)
    write_fields(folder, moments_fields(3.0, 0.0))  # nothing can be divided by it
    assert load_reward_model(folder, dtype="float32", normalize=True).moments is None


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([0, 5, 9], None),
        ([1, 2, 3, 4], None),
        ([-1, 5], r"it has 10 embedding rows and got the token id -1$"),
        ([5, 10], r"it has 10 embedding rows and got the token id 10$"),
        ([1, 2, 3, 4, 5], r"it has a context of 4 tokens and got a sequence of 5$"),
    ],
)
def test_ids_below_the_number_of_rows_and_sequences_up_to_the_context_can_be_read(sequence, message):
    with pytest.raises(DataError, match=message) if message else nullcontext():
        check_sequences([[1], sequence], InputLimits(num_rows=10, context=4), "it")
