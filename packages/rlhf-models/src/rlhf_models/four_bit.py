"""Frozen linear layers with weights of 4 bits (NF4), under adapters. The only file that imports bitsandbytes."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError, installs

BLOCK_SIZE = 64  # weights with one scale
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel for CPUs that is not used here


class _Product(torch.autograd.Function):
    """x W^T + b, which keeps of W only its 4 bits for the backward pass. W and b get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Linear4bit") -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.whole(), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.whole(), None


class Linear4bit(nn.Linear):
    """A linear layer that restores its weights from 4 bits for each product.

    Each block of `BLOCK_SIZE` weights is divided by the largest of their absolute values, and each quotient is stored
    as the nearest of 16 quantiles of a normal distribution (NF4). The divisors take 8 bits each, in blocks of 256 with
    a float32 divisor of their own: 0.516 bytes per weight.

    The forward pass of `bitsandbytes.nn.Linear4bit` is not used: with and without gradients it has kernels that round
    differently, so that the ratio of the first update would not be 1, and it stores weights in another form in eval
    mode on a CPU.

    Attributes:
        weight: the 4 bits, in the data type of the whole weights, because DeepSpeed wants one type for all.
        shape: of the whole weights, [out, in].

    Source: Dettmers et al. 2023, arXiv:2305.14314, sec. 3.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Take the weights of `layer`, whose number must be a multiple of `BLOCK_SIZE`. A GPU packs them, if any."""
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.shape = tuple(layer.weight.shape)
        whole = layer.weight.detach().to("cuda" if torch.cuda.is_available() else layer.weight.device)
        options = {"quant_type": "nf4", "blocksize": BLOCK_SIZE, "compress_statistics": True}
        packed, self._scales = import_bitsandbytes().quantize_4bit(whole, quant_storage=whole.dtype, **options)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.to(layer.weight.device)

    def _apply(self, fn: Any, recurse: bool = True) -> "Linear4bit":
        super()._apply(fn, recurse)
        self._scales.to(self.weight.device)  # they are no buffers, which a change of the data type would round
        return self

    @torch.no_grad()
    def whole(self) -> Tensor:
        """Return the weights that the layer computes with, [out, in]."""
        return import_bitsandbytes().dequantize_4bit(self.weight.detach(), self._scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, of shape [..., out], for x of shape [..., in]."""
        return _Product.apply(x, self)


def pack_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear layers of a model by ones of 4 bits. Those whose weights are no whole blocks stay.

    A model without memory (meta) stays as it is. Raises ConfigError if bitsandbytes is missing.
    """
    for name, layer in _packable(model, names):
        model.set_submodule(name, Linear4bit(layer))


def round_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Give linear layers of a model the weights that `pack_layers` would have them compute with. Raises likewise."""
    for _, layer in _packable(model, names):
        layer.weight.data = Linear4bit(layer).whole()


def _packable(model: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Linear]]:
    import_bitsandbytes()
    layers = [(name, model.get_submodule(name)) for name in names]
    return [
        (name, layer) for name, layer in layers if layer.weight.numel() % BLOCK_SIZE == 0 and not layer.weight.is_meta
    ]


def packed_layers(model: nn.Module) -> dict[Tensor, Linear4bit]:
    """Return the layers of 4 bits in a model by their `weight`."""
    return {layer.weight: layer for layer in model.modules() if isinstance(layer, Linear4bit)}


def import_bitsandbytes() -> Any:
    """Return the functions of bitsandbytes. Raises ConfigError if it cannot be imported."""
    try:
        from bitsandbytes import functional
    except (ImportError, OSError, RuntimeError) as error:
        hint = f"{installs('rlhf-models[4bit]')}, or drop ``load_in_4bit``"
        message = f"``load_in_4bit`` needs bitsandbytes, which cannot be imported ({error})"
        raise ConfigError(message, hint=hint) from None
    return functional
