"""Supervised fine-tuning: the completions of demonstrations, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data.sft import SftExample
from rlhf_models.batch import to_device
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.offline.loop import LossShare, Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics, trained_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective(Objective[SftExample]):
    """The completions of demonstrations are to become likely: the loss is the negative log-likelihood a trained token.

    loss = - sum_i sum_t [mask_it] log p(token_it | tokens before it) / num_tokens
    """

    def loss(self, engine: TrainEngine, items: Sequence[SftExample], denominators: Denominators) -> LossShare:
        """See `Objective`. Metrics: `sft/loss` and `sft/entropy`, nats a trained token."""
        batch = lay_out([item.token_ids for item in items], packing=self.packing, device=engine.device)
        mask = trained_mask(batch, items)
        output = engine.forward(batch, logits_mask=mask)
        # Both are 0.0 outside of the mask.
        metrics = mean_metrics("sft", int(mask.sum()), loss=-output.logprobs.sum(), entropy=output.entropy.sum())
        return token_mean(-output.logprobs, to_device(mask, engine.device), denominators), metrics
