"""Models that read images: their class, and what they read beside tokens."""

from typing import Any

from torch import Tensor

from rlhf_models.batch import TokenBatch


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


def reaching_images(base: Any, batch: TokenBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states of a pass, through which all trained weights that read images get a gradient.

    It is 0 in a batch without images. Ranks reduce the gradients of the same weights, whatever is in their batches.
    """
    weights = getattr(base, "image_weights", ())
    if batch.images is not None or not weights or not hidden.requires_grad:
        return hidden
    return hidden + 0 * sum(weight.flatten()[0] for weight in weights)


def image_arguments(base: Any, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the positions of a batch with images, and the other arguments of a forward pass.

    Args:
        base: a model of transformers without its LM head.
        batch: padded, with images.

    Returns:
        Positions [B, T] int64; for the families of Qwen-VL [3, B, T], by time, row and column of an image. And the
        arrays of the images, by the names of the model's arguments.
    """
    images = dict(batch.images or {})
    if not hasattr(base, "get_rope_index"):
        return batch.position_ids, images
    kinds = (batch.input_ids == base.config.image_token_id).int()
    positions, _ = base.get_rope_index(
        input_ids=batch.input_ids,
        mm_token_type_ids=kinds,
        image_grid_thw=images["image_grid_thw"],
        attention_mask=batch.padding_mask,
    )
    return positions, images
