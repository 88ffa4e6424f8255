"""Models that read images: their class, and what they read beside tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_models.batch import TokenBatch, to_device

_ROWS = ("smolvlm", "idefics3")  # whose arrays have a row per sequence


def language_model_class(config: Any) -> Any:
    """Return the auto class of transformers that loads a model with its LM head.

    It is that of causal language models, or for a family without one that of models that read images.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    has_other = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if has_other else AutoModelForCausalLM


def image_arguments(base: Any, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the positions of a batch with images, and the other arguments of a forward pass.

    Args:
        base: a model of transformers without its LM head.
        batch: with images.

    Returns:
        Positions [B, T] int64; for the families of Qwen-VL [3, B, T], by time, row and column of an image, or if packed
        [4, 1, T], with those in the sequence before. And the arrays of the images, by the names of the model's
        arguments.
    """
    images = dict(batch.images or {})
    if base.config.model_type == "gemma3":  # tokens of an image see each other
        images["token_type_ids"] = (batch.input_ids == base.config.image_token_id).int()
    if not hasattr(base, "get_rope_index"):
        return batch.position_ids, images
    ids = batch.input_ids
    mask = batch.padding_mask
    if batch.is_packed:
        ids = pad_sequence(batch.split(ids), batch_first=True)
        lengths = torch.tensor(batch.lengths, device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    grids = images["image_grid_thw"]
    if batch.shown is not None:
        grids = grids[to_device(torch.tensor(batch.shown), grids.device)]
    positions, _ = base.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=(ids == base.config.image_token_id).int(),
        image_grid_thw=grids,
        attention_mask=mask,
    )
    if batch.is_packed:
        positions = torch.cat([batch.position_ids[None], positions[:, mask][:, None]])
    return positions, images


@contextmanager
def showing(base: Any, shown: Sequence[int] | None) -> Iterator[None]:
    """Have a model repeat the features of its images for all places that show them; see `TokenBatch.shown`.

    What reads images runs once per image, in the pass itself, and the gradients of an image's places add up.
    """
    if shown is None:
        yield
        return
    inner = base.get_image_features

    def repeated(*args: Any, **options: Any) -> Any:
        output = inner(*args, **options)
        if base.config.model_type in _ROWS and not isinstance(output.pooler_output, Tensor):
            # All tiles are in the first row, whose features are end to end.
            num_tiles = (args[0] if args else options["pixel_values"]).shape[1]
            output.pooler_output = torch.cat(list(output.pooler_output)).unflatten(0, (num_tiles, -1))
            output.pooler_output = [*_at(output.pooler_output, shown)]
            return output
        output.pooler_output = _at(output.pooler_output, shown)
        if (more := getattr(output, "deepstack_features", None)) is not None:  # those of each of several layers
            output.deepstack_features = [_at(features, shown) for features in more]
        return output

    base.get_image_features = repeated
    try:
        yield
    finally:
        del base.get_image_features  # of the object, which hid that of its class


def _at(features: Any, shown: Sequence[int]) -> Any:
    """Return features, a tensor or one per image, at indices. Their gradients are added up in a fixed order."""
    if isinstance(features, Tensor):
        return features[to_device(torch.tensor(shown), features.device)]
    return [features[index] for index in shown]
