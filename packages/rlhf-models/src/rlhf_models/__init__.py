"""Actor, critic, reward and reference models over Hugging Face models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_models.actor import Actor, ActorOutput, PolicyOutput
    from rlhf_models.batch import TokenBatch
    from rlhf_models.critic import Critic
    from rlhf_models.loading import (
        check_reward_model,
        check_same_tokenizer,
        check_tokenizer_fits,
        load_actor,
        load_config,
        load_critic,
        load_reference,
        load_reward_model,
        load_tokenizer,
    )
    from rlhf_models.reward import RewardModel, score_sequences
    from rlhf_models.weights import hf_named_weights, save_hf

__all__ = [
    "Actor",
    "ActorOutput",
    "Critic",
    "PolicyOutput",
    "RewardModel",
    "TokenBatch",
    "check_reward_model",
    "check_same_tokenizer",
    "check_tokenizer_fits",
    "hf_named_weights",
    "load_actor",
    "load_config",
    "load_critic",
    "load_reference",
    "load_reward_model",
    "load_tokenizer",
    "save_hf",
    "score_sequences",
]

_MODULES = ("actor", "batch", "critic", "loading", "reward", "weights")


def __getattr__(name: str) -> Any:
    """Import the modules on first use, so that importing the package does not import torch."""
    if name in __all__:
        modules = (import_module(f"rlhf_models.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
