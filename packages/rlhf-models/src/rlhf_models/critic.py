"""The critic: the expected return of a sequence from each token on."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhf_models.attention.sequence_parallel import SequenceGroup
from rlhf_models.backbone import last_hidden_state
from rlhf_models.batch import TokenBatch


class ValueHead(nn.Linear):
    """A linear layer to one scalar per token, initialized with zeros and computed in float32 for any weight dtype.

    It has a bias only if a trained head with one is taken.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weight to zero: a random head would add noise to the first advantages."""
        nn.init.zeros_(self.weight)

    def take(self, head: Mapping[str, Tensor]) -> None:
        """Take the `weight` [1, D] and, if there is one, the `bias` [1] of a trained head."""
        if "bias" in head:
            self.bias = nn.Parameter(torch.zeros_like(self.weight[0, :1]))
        self.load_state_dict(head)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [..., 1] float32 of hidden states [..., D]."""
        return linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class Critic(nn.Module):
    """A transformers backbone without LM head, stored as `model`, with a `value_head`.

    Attributes:
        sequence_group: the ranks that divide the tokens of a batch; None if this one has all. See `divide_sequences`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.config.get_text_config().hidden_size, model.dtype)
        self.sequence_group: SequenceGroup | None = None

    def forward(self, batch: TokenBatch, *, after_token: bool = False) -> Tensor:
        """Return the value of the state before each token, that is, of the tokens that precede it.

        Args:
            batch: padded or packed.
            after_token: return the value of the state after each token in its place.

        Returns:
            [B, T] float32, in reward units, 0.0 for the first token of a sequence and for padding. With `after_token`
            every token has a value, and padding holds arbitrary numbers.
        """
        group = self.sequence_group
        after = self.value_head(last_hidden_state(self.model, batch, group)).squeeze(-1)
        if group is not None:
            after = group.gather_tokens(after, batch)
        after = batch.at_every_token(after)
        if after_token:
            return after
        before = torch.cat([after.new_zeros(after.shape[0], 1), after[:, :-1]], dim=1)
        return before.masked_fill(~batch.target_mask, 0.0)
