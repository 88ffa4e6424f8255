"""What is optimised."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section, one_of
from rlhf_train.algorithms import ALGORITHMS, AlgorithmSpec

Estimator = one_of(ALGORITHMS, {name: row.title for name, row in ALGORITHMS.items()})
KlEstimatorName = one_of(("k1", "k2", "k3"))
_DEFAULTS = AlgorithmSpec()


class AlgorithmSection(Section):
    """Estimator, losses and KL."""

    TITLE: ClassVar[str] = "algorithm"

    advantage_estimator: Estimator = Field(
        _DEFAULTS.estimator,
        description="; ".join(f"{row.name}: {row.title}" for row in ALGORITHMS.values()),
    )
    gamma: float = Field(_DEFAULTS.gamma, ge=0, le=1, description="discount a token")
    lambd: float = Field(_DEFAULTS.lambd, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the rewards")
    no_advantage_std_norm: bool = Field(
        False, description="do not divide advantages by their standard deviation (of the batch, or of the group)"
    )
    init_kl_coef: float = Field(
        _DEFAULTS.kl_coef, ge=0, description="weight of the KL to the reference, in reward a nat; 0: no reference model"
    )
    kl_estimator: KlEstimatorName = Field(_DEFAULTS.kl_estimator, description="estimate of the KL of a token")
    use_kl_loss: bool = Field(False, description="the KL is a term of the loss instead of a part of the reward")
    eps_clip: float = Field(_DEFAULTS.clip_low, gt=0, lt=1, description="the policy ratio is clipped to 1 -+ this")
    eps_clip_low_high: tuple[float, float] | None = Field(
        None, description="two different bounds instead of --eps_clip: LOW below 1, HIGH above"
    )
    value_clip: float | None = Field(
        _DEFAULTS.value_clip, gt=0, description="a value may move that far from its old one; None: as far as it likes"
    )
