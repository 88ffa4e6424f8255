"""The models of a run: loading one to train, its base as the reference, and writing it as a Hugging Face folder."""

import types
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rlhf_models.experts.routing_replay import replay_routes
from rlhf_models.loading import load_actor, load_critic, load_tokenizer
from rlhf_models.lora import adapters_off, add_lora, merge_adapter, save_adapter
from rlhf_models.reward import RewardModel
from rlhf_models.weights import check_saves, save_hf
from rlhf_rollout.engines.adapter_files import ADAPTER_FOLDER
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.specs import ModelSpec

# They draw experts at random in train mode (SparseMixer, arXiv:2409.12136). Engines take the best ones.
_DRAWING_ROUTERS = ("PhimoeTopKRouter",)


def load_model(kind: str, spec: ModelSpec) -> torch.nn.Module:
    """Return the model to train, with new adapters if `spec.lora` is given, and ready to be given experts.

    Args:
        kind: "actor" and "draft" for a language model, "reward" for a model that returns a score, "critic" for one with
            values.
        spec: its settings.

    Raises:
        ConfigError: it cannot be loaded, or what training makes of it could not be saved.
    """
    loaders = {"actor": load_actor, "draft": load_actor, "reward": _load_reward_model, "critic": load_critic}
    model = loaders[kind](spec.path, gradient_checkpointing=spec.gradient_checkpointing, **spec.load_options)
    check_saves(model)
    if kind in ("actor", "draft"):
        model.mask_ids(spec.masked_ids)
    if spec.lora is not None:
        add_lora(model, spec.lora)
    if spec.routing_replay:
        replay_routes(model.model.base_model)
    return model


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Disable dropout, and the noise of routers of experts, in `model` permanently, and return the model.

    Online training has neither. Old log-probs come from eval mode, and the engine has no dropout: with it in training,
    the ratio of the first update would not be 1. Running updates in eval mode is no alternative: gradient checkpointing
    needs train mode. Only routers that draw experts at random stay in eval mode.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if type(module).__name__ in _DRAWING_ROUTERS:
            module.eval()
            module.train = types.MethodType(lambda router, mode=True: router, module)
            continue  # its `router_jitter_noise` is no noise, but a bound below which an expert is left out
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def _load_reward_model(path: str, **options: Any) -> RewardModel:
    """Return a reward model with the value head of the folder, or a zero head if it has none."""
    critic = load_critic(path, **options)
    model = RewardModel(critic.model)
    model.value_head = critic.value_head
    return model


def own_base(engine: TrainEngine, *, has_adapters: bool = True) -> Callable[..., Any]:
    """Return a forward pass in eval mode that serves as the reference: the trained model without its adapters.

    Without adapters it runs the model itself, which equals the reference only before the first update.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = engine.module
        was_training = module.training
        module.eval()
        try:
            with adapters_off(module) if has_adapters else nullcontext():
                return engine.forward(*args, **kwargs)
        finally:
            module.train(was_training)

    return forward


def write_model(
    model: torch.nn.Module,
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    folder: Path,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder in the Hugging Face layout. An adapter is merged into the model, and also saved beside it.

    Args:
        model: from `load_model`.
        state: all its weights by name.
        spec: with which it was loaded.
        folder: an existing one is replaced.
        fields: further fields of config.json; see `rlhf_models.weights.save_hf`.
    """
    tokenizer = load_tokenizer(spec.path)
    if spec.chat_template is not None:
        tokenizer.chat_template = spec.chat_template
    if spec.lora is None:
        save_hf(model, state, tokenizer, folder, fields)
        return
    # New modules draw their first weights, which must not change what the training draws, such as dropout.
    with TemporaryDirectory() as scratch, torch.random.fork_rng(devices=[]):
        adapter = save_adapter(model, state, scratch, tokenizer, fields)
        merge_adapter(spec.path, adapter, folder, dtype=spec.dtype, load_in_4bit=spec.lora.load_in_4bit)
    save_adapter(model, state, folder / ADAPTER_FOLDER, tokenizer, fields)
