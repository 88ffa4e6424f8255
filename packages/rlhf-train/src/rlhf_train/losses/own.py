"""Calls a user's own policy loss and advantages with the tensors of a rank; see `algorithms.own_code`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_train.algorithms.own_code import OwnCode


class OwnTokenLoss:
    """A user's policy loss of the packed tokens of a micro-batch, as `PolicyStream.own_loss`.

    The function gets the trained tokens of each rollout side by side, padded at the end.

    Args:
        code: the function.
        lengths: [B] int64 in host memory, trained tokens per rollout.
        constants: name to [N] float of the packed tokens. Without "old_logprobs" the current ones take their place.

    Attributes:
        metrics: those that the last call returned beside the loss, by `own_NAME`, [N] float each.
    """

    def __init__(self, code: OwnCode, lengths: Tensor, constants: Mapping[str, Tensor]) -> None:
        self._code, self._lengths, self._constants = code, lengths, dict(constants)
        self.metrics: dict[str, Tensor] = {}

    def __call__(self, logprobs: Tensor) -> Tensor:
        """Return the loss of each token, [N] float32, with the gradient to `logprobs` [N]."""
        if not len(logprobs):
            return logprobs * 0.0  # a rank without rollouts
        width = int(self._lengths.max())
        mask = (torch.arange(width) < self._lengths[:, None]).to(logprobs.device)
        columns = {"logprobs": logprobs, "old_logprobs": logprobs.detach()} | self._constants
        inputs = {name: _padded(column, mask) for name, column in columns.items()}
        loss, metrics = self._code.call({**inputs, "loss_mask": mask.clone()})
        _check_finite(self._code, loss[mask], [tensor[mask] for tensor in inputs.values()])
        self.metrics = {f"own_{name}": values.detach()[mask] for name, values in metrics.items()}
        return loss[mask]


def _padded(column: Tensor, mask: Tensor) -> Tensor:
    """Return packed values [N] at the places of `mask` [B, T], and 0.0 elsewhere."""
    return column.new_zeros(mask.shape).masked_scatter(mask, column)


def own_advantages(code: OwnCode, rows: Sequence[int], own: Mapping[str, Any], *, counts: bool) -> Tensor:
    """Return a user's advantages of this rank's rollouts, [B, T] float32 in host memory. Collective.

    Each rank computes the advantages of the whole batch, in the order in which its rollouts were dealt, so that the
    split over ranks does not matter.

    Args:
        code: the function.
        rows: places of this rank's rollouts in the batch.
        own: `INPUTS["advantages"]` of these rollouts, in host memory; `group_ids` is a list of texts.
        counts: whether this rank's rollouts belong to the batch; another rank has the same ones if not.
    """
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (list(rows), dict(own)) if counts else None)
    parts = [part for part in parts if part is not None]
    place = np.concatenate([np.array(rows, np.int64) for rows, _ in parts])
    order = np.argsort(place)

    def whole(name: str) -> Tensor:
        tensors = [values[name] for _, values in parts]
        if tensors[0].ndim == 1:
            return torch.cat(tensors)[order]
        return pad_sequence([row for tensor in tensors for row in tensor], batch_first=True)[order]

    groups = np.array([group for _, values in parts for group in values["group_ids"]])[order]
    batch = {name: whole(name) for name in own if name != "group_ids"}
    batch["group_ids"] = torch.from_numpy(np.unique(groups, return_inverse=True)[1])
    result, _ = code.call(batch)
    trained = batch["loss_mask"]
    used = result[trained if result.ndim == 2 else trained.any(1)]
    _check_finite(code, used, [tensor[trained] if tensor.ndim == 2 else tensor for tensor in batch.values()])
    mask = own["loss_mask"]
    mine = result.detach()[np.searchsorted(place[order], np.array(rows, np.int64))]
    spread = mine[:, None].expand(mask.shape) if mine.ndim == 1 else mine[:, : mask.shape[1]]
    return spread.masked_fill(~mask, 0.0)


def _check_finite(code: OwnCode, used: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise OwnCodeError if a function made NaN or infinity of finite numbers: learning from it would blame the model.

    Args:
        code: the function.
        used: what is learned from of its result.
        inputs: what it was given, without masked places. If these are not finite, the function is not to blame.
    """
    if used.isfinite().all() or not all(tensor.isfinite().all() for tensor in inputs):
        return
    hint = "mend it there: divisors may be 0, as deviations of equal rewards are; `rlhf check` looks for that"
    raise code.error("gave NaN or infinity for finite tensors", hint)
