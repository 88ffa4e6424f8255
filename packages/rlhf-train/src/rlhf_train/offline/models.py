"""The models of offline runs: loading one to train, and writing it as a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from rlhf_models.loading import load_actor, load_critic, load_tokenizer
from rlhf_models.lora import LoraSpec, add_lora, merge_adapter, save_adapter
from rlhf_models.reward import store_moments
from rlhf_models.weights import save_hf
from rlhf_train.offline.reward_models import load_trainable_reward_model
from rlhf_train.specs import ModelSpec

ADAPTER_FOLDER = "adapter"  # within a saved model


def load_model(kind: str, spec: ModelSpec, lora: LoraSpec | None) -> torch.nn.Module:
    """Return the model to train, with new adapters if `lora` is given.

    Args:
        kind: "actor" for a language model, "reward" for a model that returns a score, "critic" for one with values.
        spec: its settings.
        lora: the adapters to train; None for all weights.
    """
    loaders = {"actor": load_actor, "reward": load_trainable_reward_model, "critic": load_critic}
    model = loaders[kind](spec.path, gradient_checkpointing=spec.gradient_checkpointing, **spec.load_options)
    if lora is not None:
        add_lora(model, lora)
    return model


def write_model(
    model: torch.nn.Module,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    lora: LoraSpec | None,
    folder: Path,
    moments: tuple[float, float] | None,
) -> None:
    """Write a folder in the Hugging Face layout. An adapter is merged into the model, and also saved beside it.

    Args:
        model: from `load_model`.
        state: all its weights by name.
        spec, lora: with which it was loaded.
        folder: an existing one is replaced.
        moments: mean and standard deviation of a reward model's scores; None to store none.
    """
    if lora is None:
        save_hf(model, state, load_tokenizer(spec.path), folder)
    else:
        # New modules draw their first weights, which must not change what the training draws, such as dropout.
        with TemporaryDirectory() as scratch, torch.random.fork_rng(devices=[]):
            adapter = save_adapter(model, state, scratch)
            merge_adapter(spec.path, adapter, folder, dtype=spec.dtype)
        save_adapter(model, state, folder / ADAPTER_FOLDER)
    if moments is not None:
        store_moments(folder, *moments)
