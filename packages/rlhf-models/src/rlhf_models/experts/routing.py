"""Which experts the tokens of a mixture-of-experts model go through, summed up as its load-balancing loss needs it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_models.attention.sequence_parallel import SequencePart
from rlhf_models.batch import TokenBatch

_HINT = "drop ``aux_loss_coef``"


class RouterSums(NamedTuple):
    """Sums over the tokens of a pass and over the layers with experts. They add up over passes.

    Attributes:
        counts: [E] float64, how often each expert was chosen.
        probs: [E] float64, the router's probabilities of each expert; only these carry a gradient.
        num_rows: float64 scalar, tokens times layers.
    """

    counts: Tensor
    probs: Tensor
    num_rows: Tensor


def router_sums(router_logits: Sequence[Tensor], top_k: int, mask: Tensor | None = None) -> RouterSums:
    """Sum up which experts tokens are sent to.

    Args:
        router_logits: per layer with experts [N, E], of N tokens.
        top_k: experts per token.
        mask: [N] bool, False for padding, which is left out; None if there is none.
    """
    weights = torch.ones_like(router_logits[0][:, 0], dtype=torch.float64) if mask is None else mask.double()
    counts, probs = weights.new_zeros(2, router_logits[0].shape[1])
    for logits in router_logits:
        layer_probs = logits.float().softmax(-1)
        chosen = layer_probs.topk(top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen.flatten(), weights.repeat_interleave(top_k))
        # The product is in float64, because sums over passes must not depend on how tokens are split over them.
        probs = probs + weights @ layer_probs.double()
    return RouterSums(counts, probs, weights.sum() * len(router_logits))


class RouterWatch:
    """Keeps the sums of a backbone's last pass in training mode; the backbone stores it as `router_watch`.

    Attributes:
        sums: the sums of the last pass; None before the first.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.sums: RouterSums | None = None

    def see(self, router_logits: Sequence[Tensor] | None, part: TokenBatch | SequencePart) -> None:
        """Sum up the router logits of a pass over a batch, or this rank's part of one.

        Args:
            router_logits: one tensor [N, E] per layer with experts, of the N tokens of `part`, padding included.
            part: what the pass ran on.

        Raises:
            ConfigError: there are no logits.
        """
        if not router_logits:
            message = "``aux_loss_coef``: the model has no layers with experts, or does not return what its routers say"
            raise ConfigError(message, hint=_HINT)
        mask = None if part.padding_mask is None else part.padding_mask.flatten()
        self.sums = router_sums(router_logits, self._top_k, mask)


def watch_routers(backbone: nn.Module) -> RouterWatch:
    """Have the training passes of a transformers backbone summed up from now on.

    Raises ConfigError as `check_balances`.
    """
    check_balances(backbone.config)
    config = backbone.config.get_text_config()
    backbone.router_watch = RouterWatch(config.num_experts_per_tok)
    return backbone.router_watch


def check_balances(config: Any) -> None:
    """Raise ConfigError unless models of a transformers config have routers with a load-balancing loss."""
    text = config.get_text_config()
    if not num_experts(text):
        raise ConfigError(f"``aux_loss_coef`` balances experts, and a {config.model_type} model has none", hint=_HINT)
    if not hasattr(text, "router_aux_loss_coef"):
        message = f"``aux_loss_coef``: transformers has no load-balancing loss for a {config.model_type} model"
        raise ConfigError(message, hint=_HINT)


def num_experts(config: Any) -> int:
    """Return the number of experts per layer, 0 for a model without experts."""
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
