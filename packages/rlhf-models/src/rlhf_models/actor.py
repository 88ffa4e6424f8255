"""The policy: a causal language model that returns log-probs of the tokens of a batch, or their policy loss."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlhf_kernels import (
    PolicyObjective,
    PolicyStream,
    linear_policy_loss,
    linear_token_logprobs,
    packed_policy_loss,
    token_logprobs,
)
from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_models.backbone import changes_logits, last_hidden_state, run_backbone
from rlhf_models.batch import TokenBatch, to_device

# Above this, compute logits in blocks and recompute them in the backward pass: slower, less memory.
MAX_LOGITS_BYTES = 4 << 30


class VocabularyTerm(Protocol):
    """A term of the loss that compares log-probs of other tokens than the one that was written.

    Attributes:
        ids: [N, K] int64, the tokens to compare, for each token of the stream.
        coef: weight of the term, which is reduced like the policy loss.
    """

    ids: Tensor
    coef: float

    def __call__(self, logprobs: Tensor) -> Tensor:
        """Return the term of each token, [N] float32, from the log-probs [N, K] float32 of `ids`."""


class ActorOutput(NamedTuple):
    """Log-probs and entropies per token, given the tokens before it.

    Attributes:
        logprobs: [B, T] float32, nats, of the token at the same index. 0.0 where none was requested.
        entropy: [B, T] float32, nats, of the distribution of the token at the same index. 0.0 where none was requested.
    """

    logprobs: Tensor
    entropy: Tensor


Terms = tuple[PolicyStream, PolicyObjective, VocabularyTerm | None]


class PolicyOutput(NamedTuple):
    """The policy loss of a batch. Only `loss` carries a gradient.

    Attributes:
        loss: float32 scalar, the batch's share of the policy loss.
        metrics: [8] float32, named by `rlhf_kernels.POLICY_METRICS`.
        logprobs, entropy: [B, T] float32, nats, as in `ActorOutput`, for the tokens that the stream trains.
    """

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor


class Actor(nn.Module):
    """A causal language model of transformers, stored as `model`.

    Attributes:
        sequence_group: the ranks that divide the tokens of a batch; None if this one has all. See `divide_sequences`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sequence_group: SequenceGroup | None = None
        self._changes_logits = changes_logits(model)
        self._masked_ids: tuple[range, ...] = ()

    def mask_ids(self, ids: Sequence[range]) -> None:
        """Give ids of the vocabulary the probability 0 from now on: log-probs and entropies are those of a softmax
        over the other ids, and the head's rows of these ids get a gradient of exactly 0.

        Engines that sample for this model mask the same ids (`rlhf_data.pretrained.ids_without_token`).
        """
        self._masked_ids = tuple(ids)

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        logits_mask: Tensor | None = None,
        logits_after: Tensor | None = None,
        stream: PolicyStream | None = None,
        objective: PolicyObjective | None = None,
        term: VocabularyTerm | None = None,
        max_tokens: int | None = None,
    ) -> ActorOutput | PolicyOutput | Tensor:
        """Return log-probs and entropies, 0.0 for the first token of a sequence and for padding.

        Args:
            batch: padded or packed.
            temperature: > 0. Results are those of the distribution sampled at this temperature.
            logits_mask: [B, T] bool, the tokens to compute; None means all. Others get 0.0 and are left out of the LM
                head. A mask on the CPU saves waiting for the device.
            logits_after: [N] int64, indices into the flattened batch. If given, the result is the logits [N, V] of the
                token after each of these, and nothing else. They must ascend if ranks divide the batch.
            stream, objective: if given, both, the result is a `PolicyOutput`. The tokens of the stream are those of
                `logits_mask`, without first tokens and padding, in the order of the flattened batch. With no tokens
                the loss is 0.0, with a gradient of zeros.
            term: with a stream, what its loss has besides. All logits are then computed at once.
            max_tokens: tokens of the largest pass whose log-probs are compared with those of this one; None for this
                pass alone. It decides whether logits are computed in blocks, which round differently from whole ones.

        Raises:
            ConfigError: a packed batch for a model that does not pass the bounds on to its attention.
            ValueError: a stream without an objective, of other tokens than requested, or with a missing column.
        """
        if (stream is None) != (objective is None):
            raise ValueError("stream and objective must be given together; got only one of them")
        group = self.sequence_group
        if logits_after is not None and group is None:
            return self._logits(batch, logits_after)
        if logits_after is not None:
            own, counts = group.divide(logits_after, batch)
            return group.gather(self._logits(batch, own), counts)
        if logits_mask is None or logits_mask.device.type == "cpu":
            wanted = batch.host_target_mask if logits_mask is None else batch.host_target_mask & logits_mask
        else:
            wanted = batch.target_mask & logits_mask
        # Find the indices before the layers are queued: afterwards, `nonzero` would wait for all of them.
        found = wanted.flatten().nonzero()[:, 0]
        index = to_device(found, batch.input_ids.device)
        token_ids = batch.input_ids.flatten()[index]
        before = (index if group is None else found) - 1  # what is divided over ranks is read on the host
        in_blocks = term is None and self._needs_blocks(len(index) if max_tokens is None else max_tokens)
        if stream is None:
            values = self._after(batch, before, token_ids, temperature, in_blocks)
            return ActorOutput(*(_spread(column, index, wanted) for column in values))
        terms = stream, objective, term
        loss, metrics, *values = self._learn(batch, before, token_ids, temperature, terms, in_blocks)
        return PolicyOutput(loss, metrics, *(_spread(column.detach(), index, wanted) for column in values))

    def _learn(
        self, batch: TokenBatch, index: Tensor, token_ids: Tensor, temperature: float, terms: Terms, in_blocks: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the policy loss of tokens [N] after flat positions [N], its metrics, log-probs and entropies."""
        if in_blocks and terms[0].own_loss is None and self._is_fused(index.device):
            head = self.model.get_output_embeddings()
            # float32 rounds the weight's gradient once, not once per block.
            options = {"temperature": temperature, "weight_grad_dtype": torch.float32}
            options["bias"] = self._bias(head)
            return linear_policy_loss(self._hidden(batch, index), head.weight, token_ids, *terms[:2], **options)
        stream, objective, term = terms
        ids = None if term is None else term.ids
        logprobs, entropy, *others = self._after(batch, index, token_ids, temperature, in_blocks, ids)
        # Without an entropy bonus, detach: a gradient of zeros would cost as much as any other.
        bonus = entropy if objective.entropy_coef else entropy.detach()
        loss, metrics = packed_policy_loss(logprobs, stream, objective, entropy=bonus)
        if term is not None:
            found = term(*others)
            alone = replace(
                stream, own_loss=lambda _: found, weights=None, penalties=None, old_logprobs=None, ref_logprobs=None
            )
            by_itself = PolicyObjective(reduction=objective.reduction)
            loss = loss + term.coef * packed_policy_loss(logprobs.detach(), alone, by_itself)[0]
        return loss, metrics, logprobs, entropy

    def _is_fused(self, device: torch.device) -> bool:
        """Whether to compute a loss in blocks from the head's input. On CPUs that would round logits differently.

        A rank that has a part of the tokens has no loss of its own.
        """
        has_all = self.sequence_group is None
        return has_all and device.type == "cuda" and self.model.get_output_embeddings().bias is None

    def _after(
        self,
        batch: TokenBatch,
        index: Tensor,
        token_ids: Tensor,
        temperature: float,
        in_blocks: bool,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the log-probs of tokens [N] after flat positions [N], and the entropies there.

        With other `ids` [N, K], also their log-probs [N, K] there. These are not computed in blocks.
        """
        group = self.sequence_group
        if group is None:
            return self._own_after(batch, index, token_ids, temperature, in_blocks, ids)
        own, counts = group.divide(index, batch)
        own_ids, others = (None if each is None else each.split(counts)[group.rank] for each in (token_ids, ids))
        parts = self._own_after(batch, own, own_ids, temperature, in_blocks, others)
        values = torch.cat([part if part.ndim == 2 else part[:, None] for part in parts], dim=1)
        values = group.gather(values, counts)
        return *values[:, :2].unbind(1), *([] if ids is None else [values[:, 2:]])

    def _own_after(
        self,
        batch: TokenBatch,
        index: Tensor,
        token_ids: Tensor,
        temperature: float,
        in_blocks: bool,
        ids: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Do as `_after` for positions among the tokens that this rank has."""
        # The choice does not depend on whether gradients are wanted: old and current log-probs of a batch then come
        # from the same code, and their ratio is exactly 1. The fused policy loss on Hopper GPUs gives the same numbers
        # up to the order of a sum; on other GPUs it rounds logits that this code does not.
        if in_blocks:
            hidden = self._hidden(batch, index)
            head = self.model.get_output_embeddings()
            options = {"temperature": temperature, "bias": self._bias(head)}
            return linear_token_logprobs(hidden, head.weight, token_ids, **options)[:2]
        logits = self._logits(batch, index)
        # Autograd keeps the head's input, not its logits. If nothing else reads them, the gradient may overwrite them.
        values = token_logprobs(logits, token_ids, temperature=temperature, inplace_backward=ids is None)[:2]
        if ids is None:
            return values
        own, others = (logits.gather(1, each).float() / temperature for each in (token_ids[:, None], ids))
        return *values, values[0][:, None] + others - own

    def _needs_blocks(self, num_tokens: int) -> bool:
        """Whether the logits of `num_tokens` exceed `MAX_LOGITS_BYTES` and can be computed from the head's weight."""
        num_bytes = num_tokens * self.model.config.get_text_config().vocab_size * self.model.dtype.itemsize
        is_plain = _is_plain(self.model.get_output_embeddings()) and not self._changes_logits
        return num_bytes > MAX_LOGITS_BYTES and is_plain

    def _hidden(self, batch: TokenBatch, index: Tensor) -> Tensor:
        """Return the hidden states [N, D] at flat positions [N] among the tokens that this rank has.

        Mamba adds up its layers in float32, for any dtype of the weights. The head takes the dtype of the weights.
        """
        states = batch.states_at(last_hidden_state(self.model.base_model, batch, self.sequence_group), index)
        return states.to(self.model.dtype)

    def _logits(self, batch: TokenBatch, index: Tensor) -> Tensor:
        """Return the logits [N, V] at flat positions [N] among the tokens that this rank has."""
        if self._changes_logits:
            logits = batch.states_at(run_backbone(self.model, batch, self.sequence_group).logits, index)
        else:
            # Call the module instead of using its weight: ZeRO-3 gathers parameters when a module is called.
            logits = self.model.get_output_embeddings()(self._hidden(batch, index))
        for ids in self._masked_ids:
            # Hidden from autograd, which would copy the gradient of all logits: no layer reads the logits backward, and
            # where the probability is 0, so is the gradient.
            logits.detach()[:, ids.start : ids.stop] = -torch.inf
        return logits

    def _bias(self, head: nn.Linear) -> Tensor | None:
        """Return the bias [V] of the head, with -inf for masked ids; None if there is nothing to add."""
        if not self._masked_ids:
            return head.bias
        mask = torch.zeros(len(head.weight), dtype=torch.bool, device=head.weight.device)
        for ids in self._masked_ids:
            mask[ids.start : ids.stop] = True
        bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
        return bias.masked_fill(mask, -torch.inf)


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is a plain linear layer, without adapter and not sharded by ZeRO-3."""
    return type(head) is nn.Linear and not any(hasattr(weight, "ds_id") for weight in head.parameters())


def _spread(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Put values [N] at flat positions [N] into a tensor of the shape of `like`, with 0.0 elsewhere."""
    flat = torch.zeros(like.numel(), dtype=values.dtype, device=values.device)
    return flat.index_copy(0, index, values).view(like.shape)
