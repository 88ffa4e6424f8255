"""Layers that carry a state from token to token, such as Mamba's and those of linear attention, over packed sequences.

Only such a layer needs its sequences apart. It gets them as batches that are padded on the right, where it never looks.
All others, such as attention, experts and the LM head, run on the pack. So results are those of each sequence alone,
whatever kernels compute the layer.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_models.batch import TokenBatch, to_device

STATEFUL_LAYERS = frozenset(("conv", "hybrid", "linear_attention", "mamba", "recurrent"))  # as configs call them
# What tells a layer that its sequences are packed, or which tokens are padding: after all others, where no layer looks.
_OF_PACKS = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def stateful_layers(config: Any) -> int:
    """Return how many layers for text of a transformers model carry a state from token to token."""
    return sum(kind in STATEFUL_LAYERS for kind in getattr(config.get_text_config(), "layer_types", None) or ())


class StatesApart:
    """Keeps packed sequences apart in the layers of a backbone that carry a state; it is `states_apart` there.

    Attributes:
        in_one_batch: give a layer all sequences of a pack at once, however long the longest is. By default, each batch
            has those whose lengths have the same number of binary digits, so that at most half of it is padding.
    """

    def __init__(self, mixers: list[nn.Module]) -> None:
        self.in_one_batch = False
        # It stays until the next pass, because gradient checkpointing runs layers again in the backward pass.
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._order = torch.empty(0)
        for mixer in mixers:
            mixer.forward = partial(self._run, mixer.forward)

    def begin_pass(self, batch: TokenBatch) -> None:
        """Say which sequences the next pass is over."""
        self._rows = []
        if not batch.is_packed:
            return
        groups = defaultdict(list)
        ends = list(accumulate(batch.lengths))
        for end, length in zip(ends, batch.lengths, strict=True):
            groups[0 if self.in_one_batch else length.bit_length()].append((end - length, length))
        order = []
        device = batch.input_ids.device
        for members in groups.values():
            starts, lengths = torch.tensor(members)[:, :, None].unbind(1)
            columns = torch.arange(int(lengths.max()))
            is_token = columns < lengths
            index = starts + torch.where(is_token, columns, 0)
            order.append(index[is_token])
            self._rows.append((to_device(index, device), to_device(is_token.flatten().nonzero()[:, 0], device)))
        self._order = to_device(torch.cat(order).argsort(), device)

    def _run(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a layer's own `forward` with its first argument, the hidden states [1, T, D], as padded batches."""
        if not self._rows:
            return forward(*args, **kwargs)
        hidden, *args = args or (kwargs.pop("hidden_states"),)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKS}
        outputs = [forward(hidden[0][index], *args, **kwargs).flatten(0, 1)[tokens] for index, tokens in self._rows]
        return torch.cat(outputs)[self._order][None]


def keep_states_apart(model: nn.Module) -> bool:
    """Keep packed sequences apart in all layers of a transformers model that carry a state.

    Known are those that have a convolution over the tokens. Return False if the model has others.
    """
    backbone = getattr(model, "base_model", model)
    has_parts = model.config.get_text_config() is not model.config  # such as one for sounds, which text does not reach
    layers = backbone.get_decoder() if has_parts else backbone
    mixers = [module for module in layers.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]
    if mixers:
        backbone.states_apart = StatesApart(mixers)
    return len(mixers) >= stateful_layers(model.config)
