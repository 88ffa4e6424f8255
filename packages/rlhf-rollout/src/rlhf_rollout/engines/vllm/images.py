"""Images of requests to vLLM: read here, and given with the tokens that stand for them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_data.images.reader import ImageReader
from rlhf_rollout.engines.vllm.internals import image_feature


def features(reader: ImageReader, token_ids: np.ndarray, images: Sequence[str]) -> list[Any]:
    """Return vLLM's description of the images of a prompt [P], which holds all of their tokens.

    Raises DataError for an image that cannot be read.
    """
    import torch

    is_image = torch.from_numpy(np.asarray(token_ids) == reader.image_id)
    places = is_image.nonzero().flatten().tolist()
    found = []
    for path in images:
        arrays = reader.arrays([path])
        num_tokens, num_parts = reader.sizes(arrays)
        own, places = places[:num_tokens], places[num_tokens:]
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        rows: dict[str, int | None] = dict.fromkeys(arrays, num_parts)
        on_host = {"image_grid_thw"} & arrays.keys()
        if on_host:
            rows["image_grid_thw"] = None
        elif "image_sizes" in arrays:
            rows = dict.fromkeys(arrays)
        else:
            if reader.has_rows:
                tensors = {name: tensor[0] for name, tensor in tensors.items()}
            counts = {"num_patches": num_parts}
            if reader.family == "internvl":
                counts = {"image_num_patches": num_parts, "image_token_id": reader.image_id}
            tensors |= {name: torch.tensor([value]) for name, value in counts.items()}
            rows |= dict.fromkeys(counts)
            on_host = counts.keys()
        # vLLM keeps prefixes of images by this name.
        name = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()
        first = own[0]
        found.append(image_feature(name, tensors, rows, on_host, first, is_image[first : own[-1] + 1]))
    return found
