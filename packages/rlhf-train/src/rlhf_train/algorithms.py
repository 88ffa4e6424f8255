"""The table of algorithms: an algorithm is an estimator, its loss terms, a reduction and whether it needs a critic.

A row is plain data, so it travels to Ray workers; what the names stand for is in `advantages`, `losses` and `kl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rlhf_data.errors import ConfigError, unknown

KlEstimator = Literal["k1", "k2", "k3"]
Baseline = Literal["none", "group_mean", "group_mean_std", "leave_one_out"]
Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmRow:
    """What sets one algorithm apart.

    Attributes:
        name: the value of --advantage_estimator.
        title: what papers call it.
        uses_critic: whether values are learned.
        baseline: what a rollout's reward is compared with, see `group_rewards`.
        whiten: whether advantages are whitened over the tokens of the whole rollout batch.
        reduction: how token losses become one number.
        source: the paper.
    """

    name: str
    title: str
    uses_critic: bool
    baseline: Baseline
    whiten: bool
    reduction: Reduction
    source: str

    @property
    def uses_group(self) -> bool:
        """Whether the samples of one prompt are compared, so that one sample a prompt cannot work."""
        return self.baseline != "none"

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation, of the batch or of the group."""
        return self.whiten or self.baseline == "group_mean_std"


ALGORITHMS: Mapping[str, AlgorithmRow] = MappingProxyType(
    {
        "gae": AlgorithmRow(
            name="gae",
            title="PPO",
            uses_critic=True,
            baseline="none",
            whiten=True,
            reduction="token_mean",
            source="Schulman et al. 2017, arXiv:1707.06347; Schulman et al. 2016, arXiv:1506.02438",
        ),
        "reinforce": AlgorithmRow(
            name="reinforce",
            title="REINFORCE++",
            uses_critic=False,
            baseline="none",
            whiten=True,
            reduction="token_mean",
            source="Hu et al. 2025, arXiv:2501.03262",
        ),
        "reinforce_baseline": AlgorithmRow(
            name="reinforce_baseline",
            title="REINFORCE++-baseline",
            uses_critic=False,
            baseline="group_mean",
            whiten=True,
            reduction="token_mean",
            source="Hu et al. 2025, arXiv:2501.03262",
        ),
        "group_norm": AlgorithmRow(
            name="group_norm",
            title="GRPO",
            uses_critic=False,
            baseline="group_mean_std",
            whiten=False,
            reduction="seq_mean_token_mean",
            source="Shao et al. 2024, arXiv:2402.03300",
        ),
        "dr_grpo": AlgorithmRow(
            name="dr_grpo",
            title="Dr. GRPO",
            uses_critic=False,
            baseline="group_mean",
            whiten=False,
            reduction="seq_mean_token_sum_norm",
            source="Liu et al. 2025, arXiv:2503.20783",
        ),
        "rloo": AlgorithmRow(
            name="rloo",
            title="RLOO",
            uses_critic=False,
            baseline="leave_one_out",
            whiten=False,
            reduction="seq_mean_token_sum",
            source="Ahmadian et al. 2024, arXiv:2402.14740",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm with its numbers.

    Attributes:
        estimator: a row of `ALGORITHMS`.
        gamma: discount a token, in [0, 1].
        lambd: GAE's trade of bias for variance, in [0, 1].
        clip_low: largest decrease of the ratio below 1, in [0, 1).
        clip_high: largest increase above 1, >= 0.
        value_clip: largest move of a value from its old one that still lowers the loss; None for no limit.
        kl_coef: weight of the KL to the reference, >= 0; 0 means there is no reference.
        kl_estimator: k1, k2 or k3.
        use_kl_loss: the KL is a term of the loss instead of a part of the reward.
        whiten_std: False only centres: no division by the batch's deviation where the row whitens, nor by the group's
            where it does not.
    """

    estimator: str = "gae"
    gamma: float = 1.0
    lambd: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_clip: float | None = 0.5
    kl_coef: float = 0.01
    kl_estimator: KlEstimator = "k1"
    use_kl_loss: bool = False
    whiten_std: bool = True

    def __post_init__(self) -> None:
        if self.estimator not in ALGORITHMS:
            raise ConfigError(unknown("advantage estimator", self.estimator, ALGORITHMS))
        for name in ("gamma", "lambd"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must lie in [0, 1]")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ConfigError(f"clip range ({self.clip_low}, {self.clip_high}): low must lie in [0, 1), high be >= 0")
        if self.kl_coef < 0:
            raise ConfigError(f"init_kl_coef is {self.kl_coef}; it must be >= 0")
        if self.value_clip is not None and self.value_clip <= 0:
            raise ConfigError(f"value_clip is {self.value_clip}; it must be > 0")

    @property
    def row(self) -> AlgorithmRow:
        """The algorithm's row."""
        return ALGORITHMS[self.estimator]

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl_coef > 0
