"""Supervised fine-tuning: the completions of demonstrations, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf_data.sft import SftExample
from rlhf_models.batch import to_device
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.metrics import Metric
from rlhf_train.offline.loop import Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics, trained_mask


def supervised_loss(logprobs: Tensor, loss_mask: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the negative log-likelihood a trained token.

        loss = - sum_i sum_t [mask_it] log p(token_it | tokens before it) / num_tokens

    Args:
        logprobs: [B, T] float, nats; carries the gradient.
        loss_mask: [B, T] bool, True where the token is trained.
        denominators: global counts; the loss is per token of the whole batch, however it was split.

    Returns:
        Scalar, nats a token.
    """
    return token_mean(-logprobs, loss_mask, denominators)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective(Objective[SftExample]):
    """The completions of demonstrations are to become likely."""

    def loss(
        self, engine: TrainEngine, items: Sequence[SftExample], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """See `Objective`. Metrics: `sft/loss` and `sft/entropy`, nats a trained token."""
        batch = lay_out([item.token_ids for item in items], packing=self.packing, device=engine.device)
        mask = trained_mask(batch, items)
        output = engine.forward(batch, logits_mask=mask)
        # Both are 0.0 outside of the mask.
        metrics = mean_metrics("sft", int(mask.sum()), loss=-output.logprobs.sum(), entropy=output.entropy.sum())
        return supervised_loss(output.logprobs, to_device(mask, engine.device), denominators), metrics
