"""The policy: a causal language model that says how probable the tokens of a batch are."""

from typing import NamedTuple

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
from rlhf_models.backbone import last_hidden_state, run_backbone
from rlhf_models.batch import TokenBatch, to_device

# Config fields of models that change the logits after the LM head, which is therefore not enough for them.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# On CUDA, logits that take more are made block by block, and once more for the gradient: a product in memory's place.
MAX_LOGITS_BYTES = 4 << 30

Terms = tuple[PolicyStream, PolicyObjective]


class ActorOutput(NamedTuple):
    """What the policy says of each token, given the tokens before it.

    Attributes:
        logprobs: [B, T] float32, nats, of the token at the same index; 0.0 where none was asked for.
        entropy: [B, T] float32, nats, of the distribution that token was drawn from; 0.0 likewise.
    """

    logprobs: Tensor
    entropy: Tensor


class PolicyOutput(NamedTuple):
    """What the policy is to learn of its tokens.

    Attributes:
        loss: float32 scalar, the batch's share of the policy loss; alone carries the gradient.
        metrics: [13] float32, named by `rlhf_kernels.POLICY_METRICS`.
        logprobs, entropy: [B, T] float32, nats, as those of `ActorOutput`, of the tokens that the stream trains.
    """

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor


class Actor(nn.Module):
    """A causal language model of transformers, under the name `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        logits_mask: Tensor | None = None,
        logits_after: Tensor | None = None,
        stream: PolicyStream | None = None,
        objective: PolicyObjective | None = None,
    ) -> ActorOutput | PolicyOutput | Tensor:
        """Return log-probs and entropies; the first token of a sequence and padding have 0.0.

        Args:
            batch: padded or packed.
            temperature: > 0; of the distribution asked about.
            logits_mask: [B, T] bool, the tokens asked about; all when None. Others have 0.0 and cost no LM head. One
                on the CPU spares waiting for the device.
            logits_after: [N] int64, positions in the flattened batch. When given, the result is the plain logits
                [N, V] of what follows the tokens there, and nothing else.
            stream, objective: together, what the policy loss is of: the result is then a `PolicyOutput`. The stream's
                tokens are those of `logits_mask` but for first ones and padding, in the order of the flattened batch;
                there may be none, and the loss is then 0.0 with a gradient of zeros.

        Raises:
            ConfigError: a packed batch for a model that does not hand the bounds on to its attention.
            ValueError: a stream without an objective, of other tokens than those asked about, or without what it needs.
        """
        if (stream is None) != (objective is None):
            raise ValueError("stream and objective say together what the policy loss is of; only one of them is given")
        if logits_after is not None:
            return self._logits(batch, logits_after)
        if logits_mask is None or logits_mask.device.type == "cpu":
            wanted = batch.host_target_mask if logits_mask is None else batch.host_target_mask & logits_mask
        else:
            wanted = batch.target_mask & logits_mask
        # Found before the layers are queued, so that the device is not waited for after them.
        index = to_device(wanted.flatten().nonzero()[:, 0], batch.input_ids.device)
        token_ids = batch.input_ids.flatten()[index]
        if stream is None:
            values = self._after(batch, index - 1, token_ids, temperature)
            return ActorOutput(*(_spread(column, index, wanted) for column in values))
        loss, metrics, *values = self._learn(batch, index - 1, token_ids, temperature, (stream, objective))
        return PolicyOutput(loss, metrics, *(_spread(column.detach(), index, wanted) for column in values))

    def _learn(
        self, batch: TokenBatch, index: Tensor, token_ids: Tensor, temperature: float, terms: Terms
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the policy loss of tokens [N] after flat positions [N], its metrics, and what `_after` does."""
        if self._is_fused(len(index), index.device):
            weight = self.model.get_output_embeddings().weight
            # One rounding of the weight's gradient, however many blocks it is summed over.
            options = {"temperature": temperature, "weight_grad_dtype": torch.float32}
            return linear_policy_loss(self._hidden(batch, index), weight, token_ids, *terms, **options)
        logprobs, entropy = self._after(batch, index, token_ids, temperature)
        bonus = entropy if terms[1].entropy_coef else entropy.detach()  # a gradient of zeros costs as much as another
        return *packed_policy_loss(logprobs, *terms, entropy=bonus), logprobs, entropy

    def _is_fused(self, num_tokens: int, device: torch.device) -> bool:
        """Whether the loss is made from the head's input: not on CPUs, where that would round logits differently."""
        is_large = device.type == "cuda" and self._needs_blocks(num_tokens)
        return is_large and self.model.get_output_embeddings().bias is None

    def _after(self, batch: TokenBatch, index: Tensor, token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probs of tokens [N] after flat positions [N], and the entropies there."""
        # Whether or not there is a gradient: of one batch both give the same numbers, and a ratio of exactly 1. So do
        # the fused head's on Hopper GPUs, up to the order of a sum; elsewhere its products round at other places.
        if self._needs_blocks(len(index)):
            hidden, head = self._hidden(batch, index), self.model.get_output_embeddings()
            return linear_token_logprobs(hidden, head.weight, token_ids, temperature=temperature, bias=head.bias)[:2]
        logits = self._logits(batch, index)
        # The head keeps its input, not its logits, and no one else sees these: their memory becomes their gradient's.
        return token_logprobs(logits, token_ids, temperature=temperature, inplace_backward=True)[:2]

    def _needs_blocks(self, num_tokens: int) -> bool:
        """Whether the logits of so many tokens are too large to be whole, and can be made from the head's weight."""
        num_bytes = num_tokens * self.model.config.get_text_config().vocab_size * self.model.dtype.itemsize
        is_plain = _is_plain(self.model.get_output_embeddings()) and not self._changes_logits
        return num_bytes > MAX_LOGITS_BYTES and is_plain

    @property
    def _changes_logits(self) -> bool:
        config = self.model.config.get_text_config()
        return any(getattr(config, name, None) is not None for name in _LOGIT_TRANSFORMS)

    def _hidden(self, batch: TokenBatch, index: Tensor) -> Tensor:
        """Return the hidden states [N, D] at flat positions [N]."""
        return last_hidden_state(self.model.base_model, batch).flatten(0, 1).index_select(0, index)

    def _logits(self, batch: TokenBatch, index: Tensor) -> Tensor:
        """Return the logits [N, V] at flat positions [N]."""
        if self._changes_logits:
            return run_backbone(self.model, batch).logits.flatten(0, 1).index_select(0, index)
        # As a module, never by its weight: ZeRO-3 gathers parameters when modules are called.
        return self.model.get_output_embeddings()(self._hidden(batch, index))


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is its weight and bias: no adapter beside it, and not split up by ZeRO-3."""
    return type(head) is nn.Linear and not any(hasattr(weight, "ds_id") for weight in head.parameters())


def _spread(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Return values [N] at flat positions [N] of a tensor shaped as `like`, 0.0 elsewhere."""
    flat = torch.zeros(like.numel(), dtype=values.dtype, device=values.device)
    return flat.index_copy(0, index, values).view(like.shape)
