import numpy as np
import pytest
import torch

from rlhf_data.errors import DataError
from rlhf_models.batch import TokenBatch

SEQUENCES = [np.array([5, 6, 7], np.int32), [8]]


def test_padded_two_sequences_lie_in_rows_filled_up_on_the_right():
    batch = TokenBatch.padded(SEQUENCES, pad_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.padding_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.lengths == (3, 1)
    assert not batch.is_packed


def test_packed_two_sequences_lie_end_to_end():
    batch = TokenBatch.packed(SEQUENCES)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.is_packed


def test_target_mask_leaves_out_padding_and_the_first_token_of_each_sequence():
    assert TokenBatch.padded(SEQUENCES, 0).target_mask.tolist() == [[False, True, True], [False, False, False]]
    assert TokenBatch.packed(SEQUENCES).target_mask.tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("batch", [TokenBatch.padded(SEQUENCES, 0), TokenBatch.packed(SEQUENCES)])
def test_lay_out_then_split_gives_the_arrays_back(batch):
    laid_out = batch.lay_out([[0.5, 1.5, 2.5], [3.5]], torch.float32)
    assert laid_out.shape == batch.input_ids.shape
    assert [part.tolist() for part in batch.split(laid_out)] == [[0.5, 1.5, 2.5], [3.5]]


def test_lay_out_padded_holds_zeros_beyond_the_tokens():
    batch = TokenBatch.padded(SEQUENCES, 9)
    assert batch.lay_out([[True] * 3, [True]], torch.bool).tolist() == [[True] * 3, [True, False, False]]


def test_lay_out_wrong_length_names_both():
    with pytest.raises(DataError, match=r"\(2, 1\) for sequences of \(3, 1\)"):
        TokenBatch.packed(SEQUENCES).lay_out([[1, 2], [3]], torch.int64)


@pytest.mark.parametrize("sequences", [[], [[1], []]])
@pytest.mark.parametrize("make", [TokenBatch.packed, lambda sequences: TokenBatch.padded(sequences, 0)])
def test_token_batch_without_tokens_is_refused(sequences, make):
    with pytest.raises(DataError, match="at least one token"):
        make(sequences)


@pytest.mark.parametrize("batch", [TokenBatch.padded(SEQUENCES, 0), TokenBatch.packed(SEQUENCES)])
def test_last_index_is_where_the_last_tokens_lie(batch):
    assert batch.input_ids.flatten()[batch.last_index].tolist() == [7, 8]
    assert batch.last_index.dtype == torch.int64
