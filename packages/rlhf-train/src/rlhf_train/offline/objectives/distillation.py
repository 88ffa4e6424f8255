"""Knowledge distillation: a student learns from demonstrations and from a teacher's next-token distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlhf_data.errors import ConfigError, check_name
from rlhf_data.examples.sft import SftExample
from rlhf_kernels import token_logprobs
from rlhf_models.batch import to_device
from rlhf_train.algorithms.token_specs import DIVERGENCES
from rlhf_train.batching import Denominators
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.preference import distillation_loss
from rlhf_train.offline.epochs import LossShare, Objective
from rlhf_train.offline.sequences import lay_out, mean_metrics, trained_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationObjective(Objective[SftExample]):
    """For each trained token, loss = (1 - k) nll + k divergence(teacher, student).

    `nll` is the negative log-likelihood of the demonstrated token. The teacher is the `reference` and reads the same
    tokens. If the vocabularies differ in padding rows, the rows that both models have are used.

    Attributes:
        kd_coef: k, in (0, 1].
        kd_divergence: "forward_kl" (the cross-entropy), "reverse_kl" or "jsd"; see `distillation_loss`.
        jsd_beta: weight of the teacher in the mean distribution of "jsd", in (0, 1).
    """

    needs_teacher: ClassVar[bool] = True
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "nll", "distillation")

    kd_coef: float = 0.4
    kd_divergence: str = "forward_kl"
    jsd_beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.kd_coef <= 1:
            raise ConfigError(f"kd_coef is {self.kd_coef}; it must lie in (0, 1]")
        if not 0 < self.jsd_beta < 1:
            raise ConfigError(f"jsd_beta is {self.jsd_beta}; it must lie in (0, 1)")
        check_name("divergence", self.kd_divergence, DIVERGENCES)

    def loss(self, engine: TrainEngine, items: Sequence[SftExample], denominators: Denominators) -> LossShare:
        """See `Objective`. Metrics: `kd/loss`, `kd/nll` and `kd/distillation`, in nats per trained token."""
        batch = lay_out(self, items, engine.device)
        index = to_device(trained_mask(batch, items).flatten().nonzero()[:, 0], engine.device)
        with torch.no_grad():
            teacher = self.reference(batch, logits_after=index - 1)
        logits = engine.forward(batch, logits_after=index - 1)
        width = min(logits.shape[-1], teacher.shape[-1])
        logprobs, _, _ = token_logprobs(logits, batch.input_ids.flatten()[index])
        distillation = distillation_loss(
            logits[:, :width], teacher[:, :width], divergence=self.kd_divergence, jsd_beta=self.jsd_beta
        )
        losses = -(1 - self.kd_coef) * logprobs + self.kd_coef * distillation
        sums = {"loss": losses.sum(), "nll": -logprobs.sum(), "distillation": distillation.sum()}
        metrics = mean_metrics("kd", len(index), **sums)
        return losses.sum() / max(denominators.num_tokens, 1), metrics
