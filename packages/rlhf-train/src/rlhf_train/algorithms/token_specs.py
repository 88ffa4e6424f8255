"""The settings of what is corrected, left out or held token by token, without torch."""

from dataclasses import dataclass
from math import inf

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError, check_name

CORRECTION_LEVELS = ("off", "token", "sequence", "geometric")
CORRECTION_MODES = ("truncate", "mask", "filter")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # of distillation; see `losses.preference.distillation_loss`
REJECTIONS = ("off", "geometric", "token_k2", "token_k3", "mean_k2", "mean_k3", "max_k2", "max_k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSpec:
    """How importance weights correct the gap between engine and trainer; see `correction`.

    Attributes:
        level: "off", "token" (a weight per token), "sequence" (the product over a rollout's tokens) or "geometric"
            (their geometric mean).
        mode: "truncate" bounds the weights; "mask" takes tokens with weights out of bounds out of the policy loss;
            "filter" does so, and the other tokens have the weight 1.
        low: smallest weight, >= 0.
        high: largest weight, > low.
        reject: what else decides which tokens are taken out of the policy loss, beside the weights or without them:
            "off", or a name of `correction.rejection_statistic`.
        reject_low: smallest value of it, >= 0.
        reject_high: its largest value, > reject_low.
        drops_masked: whether tokens that `mode` or `reject` takes out are also taken out of KL and entropy terms and of
            the counts by which losses are divided, so that the others weigh more.
    """

    level: str = "off"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    reject: str = "off"
    reject_low: float = 0.0
    reject_high: float = inf
    drops_masked: bool = False

    def __post_init__(self) -> None:
        check_name("correction level", self.level, CORRECTION_LEVELS)
        check_name("correction mode", self.mode, CORRECTION_MODES)
        if not 0 <= self.low < self.high:
            message = f"``CorrectionSpec.low/high`` is {self.low:g} {self.high:g}: 0 <= low < high is needed"
            raise ConfigError(message, hint="give LOW before HIGH, two numbers, such as 0.5 2")
        check_name("rejection", self.reject, REJECTIONS)
        if self.reject != "off" and not 0 <= self.reject_low < self.reject_high < inf:
            message = f"``CorrectionSpec.reject_low/reject_high`` is {self.reject_low:g} {self.reject_high:g}"
            hint = "give LOW before HIGH, two numbers: 0.5 5 for the geometric mean of weights, 0 0.01 for a KL in nats"
            raise ConfigError(f"{message}: 0 <= low < high < inf is needed", hint=hint)

    @property
    def is_on(self) -> bool:
        """Whether tokens are weighed or rejected, which takes the trainer's log-probs before the update."""
        return self.level != "off" or self.reject != "off"

    @property
    def masks(self) -> bool:
        """Whether tokens are taken out of the policy loss."""
        return (self.level != "off" and self.mode != "truncate") or self.reject != "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceSpec:
    """What happens to tokens whose log-prob and advantage have a large covariance; see `covariance`.

    Attributes:
        clip_cov: which share of the tokens, in (0, 1), and between which two covariances, Clip-Cov leaves out of the
            actor's loss. None leaves none out.
        kl_cov: which share of the tokens, in (0, 1), KL-Cov holds to the old policy, and the weight of |log ratio|
            there, in reward units per nat, > 0. None holds none.
    """

    clip_cov: tuple[float, float, float] | None = None
    kl_cov: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        share, low, high = self.clip_cov or (0.5, 0, 1)
        if not (0 < share < 1 and low < high):
            message = f"``clip_cov`` is {share:g} {low:g} {high:g}: a share in (0, 1) and LOW below HIGH are needed"
            raise ConfigError(message, hint="verl uses 2e-4 1 5")
        share, coef = self.kl_cov or (0.5, 1)
        if not (0 < share < 1 and coef > 0):
            message = f"``kl_cov`` is {share:g} {coef:g}: a share in (0, 1) and a coefficient above 0 are needed"
            raise ConfigError(message, hint="verl's default is 2e-4 0.1")

    @property
    def is_on(self) -> bool:
        """Whether any token is treated."""
        return self.clip_cov is not None or self.kl_cov is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropySpec:
    """What the policy's entropy before the updates of a step decides.

    Attributes:
        top_quantile: share of the tokens that the policy loss keeps, those with the highest entropy; None for all. See
            `entropy.num_kept`.
        target: nats per token towards which the weight of the entropy bonus adapts; None keeps it. See
            `entropy.adapted_entropy_coef`.
        coef_step: by how much the weight changes in a step.
    """

    top_quantile: float | None = bounded(None, gt=0, lt=1)
    target: float | None = bounded(None, gt=0)
    coef_step: float = bounded(1e-4, gt=0)

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def is_on(self) -> bool:
        """Whether anything depends on the entropy, which takes a pass of the policy before the updates."""
        return self.top_quantile is not None or self.target is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionSpec:
    """How a teacher's distributions are compared with the policy's; see `losses.teacher`.

    Attributes:
        top_k: the teacher's most likely tokens that are compared one by one; all others count as one.
        divergence: "forward_kl", "reverse_kl" or "jsd"; see `losses.preference.distillation_loss`.
        jsd_beta: weight of the teacher in the mean distribution of "jsd".
    """

    top_k: int = bounded(64, ge=1)
    divergence: str = "reverse_kl"
    jsd_beta: float = bounded(0.5, gt=0, lt=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("divergence", self.divergence, DIVERGENCES)

    @property
    def num_columns(self) -> int:
        """Numbers per token that are kept of a teacher; see `losses.teacher.most_likely`."""
        return 2 * self.top_k + 1
