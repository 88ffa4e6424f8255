"""Supervised fine-tuning: learns the completions of demonstrations."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_data.examples.sft import SftExample
from rlhf_models.batch import to_device
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import token_mean
from rlhf_train.losses.preference import dft_loss
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics, trained_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedObjective(Objective[SftExample]):
    """Negative log-likelihood of the completions, averaged over trained tokens.

    loss = - sum_i sum_t [mask_it] log p(token_it | tokens before it) / num_tokens

    Attributes:
        dft: weigh each token by its probability; see `dft_loss`. The metric `sft/loss` stays the log-likelihood.
    """

    dft: bool = False

    def loss(self, engine: TrainEngine, items: Sequence[SftExample], denominators: Denominators) -> LossShare:
        """See `Objective`. Metrics: `sft/loss` and `sft/entropy`, in nats per trained token."""
        batch = lay_out(self, items, engine.device)
        mask = trained_mask(batch, items)
        output = engine.forward(batch, logits_mask=mask)
        # The model returns 0.0 for both at masked tokens, so plain sums count trained tokens only.
        metrics = mean_metrics("sft", int(mask.sum()), loss=-output.logprobs.sum(), entropy=output.entropy.sum())
        losses = dft_loss(output.logprobs) if self.dft else -output.logprobs
        return token_mean(losses, to_device(mask, engine.device), denominators), metrics
