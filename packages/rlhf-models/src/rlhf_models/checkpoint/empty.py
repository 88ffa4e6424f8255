"""Models without memory: their tensors have names, shapes and types, on torch's meta device."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, device

from rlhf_data.own_code import entrust, is_trusted
from rlhf_data.pretrained import clear_errors
from rlhf_models.checkpoint.files import quiet_transformers, weight_files

logger = logging.getLogger(__name__)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder without their memory. Reads the headers of safetensors files only."""
    from transformers.modeling_utils import load_state_dict

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder) or []:
        tensors |= load_state_dict(str(file), map_location="meta")
    return tensors


def load_empty(
    auto_class: Any, config: Any, tensors: Mapping[str, Tensor], dtype: Any
) -> tuple[Any, dict[str, list[str]]] | None:
    """Load a model of empty `tensors` exactly as transformers loads one from a folder.

    A model that transformers cannot load without memory gives None, and a warning in the log.

    Args:
        auto_class: such as AutoModelForCausalLM.
        config: the folder's config.
        tensors: the folder's tensors by name, on the meta device.
        dtype: data type of the weights; "auto" for the config's.

    Returns:
        The model, and what did not fit by kind, such as "missing_keys": names of tensors.

    Raises:
        ConfigError: the model needs a package that is not installed.
    """
    name = config.name_or_path  # which loading without a folder forgets
    try:
        with device("meta"), quiet_transformers():
            made = auto_class.from_config(config, trust_remote_code=is_trusted(name))
        with quiet_transformers():
            model, report = type(made).from_pretrained(
                None,
                config=made.config,
                state_dict=dict(tensors),
                device_map={"": "meta"},
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ImportError:  # as it would when the model is loaded with its numbers
        with clear_errors("model", name):
            raise
    except Exception as error:  # what cannot be looked at here may well load with its numbers, which has its own errors
        logger.warning("a %s cannot be loaded without memory, and is not checked: %s", config.model_type, error)
        return None
    entrust(model.config, name)
    # Tensors of another shape come with both shapes.
    names = {kind: sorted({key if isinstance(key, str) else key[0] for key in found}) for kind, found in report.items()}
    return model, names
