"""Images of requests to vLLM: read here, and given with the tokens that stand for them.

vLLM's own processors would tokenize the prompt again and need torchvision, and its memory profile would draw images of
the largest size. Engines replace them by classes that say only what vLLM needs to start.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_data.images.reader import ImageReader


class _Info:
    """What vLLM asks about the images of a model. An image may fill a prompt."""

    skip_prompt_length_check = False
    supported_mm_limits: Mapping[str, int | None] = {"image": None}
    allowed_mm_limits: Mapping[str, int] = {"image": 999}

    def __init__(self, context: Any) -> None:
        self.ctx = context

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
        return {"image": seq_len}


class _Processor:
    """Has no more than `info`: requests come with what a processor would make."""

    def __init__(self, info: _Info, dummy_inputs: Any, cache: Any = None) -> None:
        self.info = info


def replace_processors(classes: Sequence[type]) -> dict[str, Any]:
    """Keep vLLM's classes of models from using processors, and return the arguments of an engine that takes images."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    register = MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=lambda info: None)
    for kind in classes:
        register(kind)
    options = {"skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    if hasattr(EngineArgs, "mm_device_do_normalize"):  # versions without it never normalize colours a second time
        options["mm_device_do_normalize"] = False
    return options


def features(reader: ImageReader, token_ids: np.ndarray, images: Sequence[str]) -> list[Any]:
    """Return vLLM's description of the images of a prompt [P], which holds all of their tokens.

    Raises DataError for an image that cannot be read.
    """
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    places = np.flatnonzero(np.asarray(token_ids) == reader.image_id)
    found = []
    for path in images:
        arrays = reader.arrays([path])
        num_tokens, num_parts = reader.sizes(arrays)
        own, places = places[:num_tokens], places[num_tokens:]
        fields = {name: MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([num_parts])) for name in arrays}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if "image_grid_thw" in arrays:
            fields["image_grid_thw"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        elif "image_sizes" in arrays:
            fields = dict.fromkeys(arrays, MultiModalFieldConfig.batched("image"))
        else:
            if reader.has_rows:
                tensors = {name: tensor[0] for name, tensor in tensors.items()}
            counts = {"num_patches": num_parts}
            if reader.family == "internvl":
                counts = {"image_num_patches": num_parts, "image_token_id": reader.image_id}
            for count, value in counts.items():
                tensors[count] = torch.tensor([value])
                fields[count] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        [item] = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
        # vLLM keeps prefixes of images by this name.
        name = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()
        first, end = int(own[0]), int(own[-1]) + 1
        is_image = torch.from_numpy(np.asarray(token_ids)[first:end] == reader.image_id)
        place = PlaceholderRange(first, end - first, None if is_image.all() else is_image)
        spec = MultiModalFeatureSpec(data=item, modality="image", identifier=name, mm_position=place, mm_hash=name)
        found.append(spec)
    return found
