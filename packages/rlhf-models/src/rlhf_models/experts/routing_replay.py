"""Routing replay: the tokens of a mixture of experts go through the experts that the rollout engine chose for them.

Engine and trainer round differently, so that a router may send a token to other experts in one than in the other, and
its log-prob is then another one. With the engine's experts, only the rounding is left. The router still says how much
each of them counts, and learns from that.

Source: Rollout Routing Replay (R3), arXiv:2510.11370.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError, DataError
from rlhf_models.experts.routing import num_experts

# Models of transformers whose routers weigh experts by a softmax over all, and return logits, weights and experts.
_MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")
_HINT = "drop ``routing_replay``"


def replayed_choice(logits: Tensor, own: Tensor, routes: Tensor, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return what a router says if the experts are given.

        weights = softmax(logits)[experts], with `normalize` divided by their sum

    The experts of a token come in descending order of weight, as the router itself orders them. If they are the
    router's own choice, in whatever order, the result equals that of the router bit by bit.

    Args:
        logits: [N, E]; the gradient of the weights flows to them.
        own: [N, top_k] int64, the router's choice.
        routes: [N, top_k] integers, the experts of each token; -1 for the router's choice.
        normalize: whether the weights of a token add up to 1.

    Returns:
        Weights [N, top_k] float32, and experts [N, top_k] int64.
    """
    experts = torch.where(routes < 0, own, routes)
    weights, order = logits.softmax(-1, dtype=torch.float32).gather(1, experts).sort(-1, descending=True)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts.gather(1, order)


class RouterReplay:
    """Gives the routers of a backbone their experts; the backbone stores it as `router_replay`."""

    def __init__(self, backbone: nn.Module) -> None:
        text = backbone.config.get_text_config()
        self._shape = (text.num_hidden_layers, text.num_experts_per_tok)
        self._num_experts = num_experts(text)
        # It stays until the next pass, because gradient checkpointing runs layers again in the backward pass.
        self._routes: Tensor | None = None
        router_class = backbone._can_record_outputs["router_logits"].target_class
        for index, layer in enumerate(backbone.layers):
            for module in layer.modules():
                if isinstance(module, router_class):
                    module.register_forward_hook(partial(self._choose, index))

    def begin_pass(self, routes: Tensor | None) -> None:
        """Say where the tokens of the next pass go: [B, T, layers, top_k] as in `TokenBatch`; None: own choice."""
        self._routes = None if routes is None else routes.flatten(0, 1)

    def check(self, routes: Any) -> None:
        """Raise DataError unless routes, a numpy array [M, layers, top_k], fit the model."""
        if routes.shape[1:] != self._shape or routes.max(initial=0) >= self._num_experts:
            found = "{} layers with {} expert(s) per token".format(*routes.shape[1:])
            own = "{} layers with {} per token".format(*self._shape)
            message = f"the engine's routes have {found} and numbers up to {routes.max(initial=0)}, the model has {own}"
            raise DataError(f"{message}, of {self._num_experts}", hint="generate with the model that is trained")

    def _choose(self, layer: int, router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._routes is None:
            return output
        logits, weights, own = output
        normalize = getattr(router, "norm_topk_prob", True)  # Mixtral's always do
        replayed, experts = replayed_choice(logits, own, self._routes[:, layer].to(own.dtype), normalize=normalize)
        return logits, replayed.to(weights.dtype), experts


def replay_routes(backbone: nn.Module) -> None:
    """Have a transformers backbone send tokens through the experts that come with a batch (`TokenBatch.routes`).

    Raises ConfigError as `check_replays`.
    """
    check_replays(backbone.config)
    backbone.router_replay = RouterReplay(backbone)


def check_replays(config: Any) -> None:
    """Raise ConfigError unless routers of models of a transformers config can be given their experts."""
    if not num_experts(config.get_text_config()):
        message = f"``routing_replay`` replays the choice of experts, and a {config.model_type} model has none"
        raise ConfigError(message, hint=_HINT)
    if config.model_type not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        message = f"``routing_replay`` knows the routers of {known}, not those of a {config.model_type} model"
        raise ConfigError(message, hint=_HINT)
