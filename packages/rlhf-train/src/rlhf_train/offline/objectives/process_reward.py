"""Process reward models: after each reasoning step of a solution, the model predicts whether the step is good."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhf_data.errors import ConfigError
from rlhf_data.examples.preference import ProcessExample
from rlhf_models.process_reward import StepFormat
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.preference import process_reward_loss
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRewardObjective(Objective[ProcessExample]):
    """Predicts a verdict token at the placeholder that ends each reasoning step.

    Attributes:
        reward_tokens: ids of the tokens for a good and for a bad step. The softmax is over these two.
        placeholder: id of the placeholder. With it, saved models say how they are asked (`StepFormat`).
    """

    reward_tokens: tuple[int, int]
    placeholder: int | None = None

    def __post_init__(self) -> None:
        if len(set(self.reward_tokens)) != 2:
            raise ConfigError(f"the reward tokens are {self.reward_tokens}; they must be two, of a good and a bad step")

    @property
    def saved_fields(self) -> dict[str, Any]:
        """See `Objective`."""
        return {} if self.placeholder is None else StepFormat(self.placeholder, *self.reward_tokens).fields

    def num_trained_tokens(self, item: ProcessExample) -> int:
        return len(item.positions)

    def loss(self, engine: TrainEngine, items: Sequence[ProcessExample], denominators: Denominators) -> LossShare:
        """See `Objective`. The loss is the mean over reasoning steps.

        Metrics: `prm/loss`, and `prm/accuracy`, the share of steps whose predicted probability is on the same side of
        one half as the label.
        """
        batch = lay_out(self, items, engine.device)
        starts = batch.last_index.cpu() + 1 - torch.tensor(batch.lengths)
        index = torch.cat([start + torch.tensor(item.positions) for start, item in zip(starts, items, strict=True)])
        logits = engine.forward(batch, logits_after=index.to(engine.device))[:, list(self.reward_tokens)]
        labels = torch.tensor(np.concatenate([item.labels for item in items]), device=engine.device)
        losses = process_reward_loss(logits, torch.stack([labels, 1 - labels], -1))
        right = (logits[:, 0] > logits[:, 1]) == (labels > 0.5)
        metrics = mean_metrics("prm", len(labels), loss=losses.sum(), accuracy=right.sum())
        return losses.sum() / max(denominators.num_tokens, 1), metrics
