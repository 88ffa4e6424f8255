"""The tables of algorithms: an algorithm is an estimator, its loss terms, a reduction and whether it needs a critic.

A row is plain data, so it travels to Ray workers; what the names stand for is in `advantages`, `baselines`, `kl`
and `rlhf_kernels.packed_policy_loss`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rlhf_data.errors import ConfigError, unknown

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
Baseline = Literal["none", "group_mean", "group_mean_std", "leave_one_out"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
OLD_LOGPROBS = ("recompute", "rollout", "skip")
CORRECTION_LEVELS = ("off", "token", "sequence", "geometric")
CORRECTION_MODES = ("truncate", "mask")


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """What sets one algorithm apart.

    Attributes:
        name: the value of --advantage_estimator.
        title: what papers call it.
        baseline: what a rollout's reward is compared with, see `baselines`.
        reduction: how token losses become one number.
        whiten: whether advantages are whitened over the tokens of the whole rollout batch.
        uses_critic: whether values are learned.
    """

    name: str
    title: str
    baseline: Baseline
    reduction: Reduction
    whiten: bool = False
    uses_critic: bool = False

    @property
    def uses_group(self) -> bool:
        """Whether the samples of one prompt are compared, so that one sample a prompt cannot work."""
        return self.baseline != "none"

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation, of the batch or of the group."""
        return self.whiten or self.baseline == "group_mean_std"


ALGORITHMS: Mapping[str, AlgorithmRow] = {
    row.name: row
    for row in (
        # Schulman et al. 2017, arXiv:1707.06347; Schulman et al. 2016, arXiv:1506.02438
        AlgorithmRow("gae", "PPO", "none", "token_mean", whiten=True, uses_critic=True),
        # Hu et al. 2025, arXiv:2501.03262, both
        AlgorithmRow("reinforce", "REINFORCE++", "none", "token_mean", whiten=True),
        AlgorithmRow("reinforce_baseline", "REINFORCE++-baseline", "group_mean", "token_mean", whiten=True),
        # Shao et al. 2024, arXiv:2402.03300
        AlgorithmRow("group_norm", "GRPO", "group_mean_std", "seq_mean_token_mean"),
        # Liu et al. 2025, arXiv:2503.20783
        AlgorithmRow("dr_grpo", "Dr. GRPO", "group_mean", "seq_mean_token_sum_norm"),
        # Ahmadian et al. 2024, arXiv:2402.14740
        AlgorithmRow("rloo", "RLOO", "leave_one_out", "seq_mean_token_sum"),
    )
}


@dataclass(frozen=True, slots=True)
class PolicyLossRow:
    """A policy loss; `rlhf_kernels.packed_policy_loss` has their formulas and sources.

    Attributes:
        name: the value of --policy_loss_type.
        title: what papers call it.
        reduction: how its token losses become one number; None leaves that to the estimator.
        uses_ratio: whether the ratio to the old policy is in it, so that it allows for several optimizer steps a batch.
        dual_clip: whether --dual_clip applies.
    """

    name: str
    title: str
    reduction: Reduction | None = None
    uses_ratio: bool = True
    dual_clip: bool = False


POLICY_LOSSES: Mapping[str, PolicyLossRow] = {
    row.name: row
    for row in (
        PolicyLossRow("ppo", "PPO clip", dual_clip=True),
        PolicyLossRow("gspo", "GSPO", "seq_mean_token_mean"),
        PolicyLossRow("cispo", "CISPO", "token_mean"),
        PolicyLossRow("reinforce", "REINFORCE", uses_ratio=False),
    )
}


def _check_names(*names: tuple[str, str, Collection[str]]) -> None:
    """Raise ConfigError for a name that is not among the known ones of its kind."""
    for kind, name, known in names:
        if name not in known:
            raise ConfigError(unknown(kind, name, known))


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSpec:
    """How the gap between the engine's and the trainer's probabilities is corrected; see `corrections`.

    Attributes:
        level: "off", or over what the importance weight is taken: "token", "sequence" (the product of its tokens') or
            "geometric" (their geometric mean).
        mode: "truncate" bounds the weights; "mask" leaves out of the actor's loss what lies beyond the bounds, KL and
            entropy terms included.
        low: smallest weight, >= 0.
        high: largest weight, > low.
    """

    level: str = "off"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        _check_names(
            ("correction level", self.level, CORRECTION_LEVELS), ("correction mode", self.mode, CORRECTION_MODES)
        )
        if not 0 <= self.low < self.high:
            message = f"--is_correction_threshold is {self.low:g} {self.high:g}: 0 <= low < high is needed"
            raise ConfigError(message, hint="give LOW before HIGH, two numbers, such as 0.5 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm with its numbers.

    Attributes:
        estimator: a row of `ALGORITHMS`.
        policy_loss: a row of `POLICY_LOSSES`.
        reduction: of the policy loss, the KL loss and the entropy; None for the policy loss's or the estimator's own.
        gamma: discount a token, in [0, 1].
        lambd: GAE's trade of bias for variance, in [0, 1].
        clip_low: largest decrease of the ratio below 1, in [0, 1).
        clip_high: largest increase above 1, >= 0.
        dual_clip: with a negative advantage A, the loss is at most this times |A|; > 1, None for no limit.
        entropy_coef: weight of the entropy bonus, >= 0.
        value_clip: largest move of a value from its old one that still lowers the loss; None for no limit.
        bootstrap_truncated: a rollout that the length limit ended goes on with the critic's value of its last state.
        kl_coef: weight of the KL to the reference, >= 0; 0 means there is no reference. The first one, when adaptive.
        kl_target: nats a token that an adaptive coefficient steers to; None keeps the coefficient fixed.
        kl_horizon: rollouts over which an adaptive coefficient can move by a fifth.
        kl_estimator: k1, k2 or k3.
        use_kl_loss: the KL is a term of the loss instead of a part of the reward.
        kl_unbiased_gradient: the gradient of the KL loss is the true one, whatever the estimator.
        old_logprobs: "recompute" runs the trainer's model once before the update, "rollout" takes the engine's,
            "skip" takes those of the update itself, which must then be the only one of its batch.
        correction: of the gap between engine and trainer.
        whiten_std: False only centres: no division by the batch's deviation where the row whitens, nor by the group's
            where it does not.
    """

    estimator: str = "gae"
    policy_loss: str = "ppo"
    reduction: Reduction | None = None
    gamma: float = 1.0
    lambd: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    value_clip: float | None = 0.5
    bootstrap_truncated: bool = False
    kl_coef: float = 0.01
    kl_target: float | None = None
    kl_horizon: int = 10_000
    kl_estimator: KlEstimator = "k1"
    use_kl_loss: bool = False
    kl_unbiased_gradient: bool = False
    old_logprobs: str = "recompute"
    correction: CorrectionSpec = CorrectionSpec()
    whiten_std: bool = True

    def __post_init__(self) -> None:
        _check_names(
            ("advantage estimator", self.estimator, ALGORITHMS),
            ("policy loss", self.policy_loss, POLICY_LOSSES),
            ("reduction", self.reduction or REDUCTIONS[0], REDUCTIONS),
            ("source of old log-probs", self.old_logprobs, OLD_LOGPROBS),
            ("KL estimator", self.kl_estimator, KL_ESTIMATORS),
        )
        for name, is_right, wanted in (
            ("gamma", 0 <= self.gamma <= 1, "lie in [0, 1]"),
            ("lambd", 0 <= self.lambd <= 1, "lie in [0, 1]"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "be > 1"),
            ("entropy_coef", self.entropy_coef >= 0, "be >= 0"),
            ("value_clip", self.value_clip is None or self.value_clip > 0, "be > 0"),
            ("kl_coef", self.kl_coef >= 0, "be >= 0"),
            ("kl_target", self.kl_target is None or self.kl_target > 0, "be > 0"),
            ("kl_horizon", self.kl_horizon >= 1, "be >= 1"),
        ):
            if not is_right:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must {wanted}")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            given = f"--eps_clip_low_high is {self.clip_low:g} {self.clip_high:g}"
            hint = "the policy ratio is kept between 1 - LOW and 1 + HIGH: try 0.2 0.28"
            raise ConfigError(f"{given}: low must lie in [0, 1), high be >= 0", hint=hint)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.dual_clip is not None and not self.loss.dual_clip:
            message = f"--dual_clip {self.dual_clip:g} belongs to the PPO loss"
            hint = "drop --dual_clip, or use --policy_loss_type ppo"
            raise ConfigError(f"{message}, and the policy loss is {self.loss.title}", hint=hint)
        if self.use_kl_loss and not self.uses_reference:
            message = "the KL is a loss and its coefficient is 0: there is no KL"
            raise ConfigError(message, hint="set --init_kl_coef above 0, or drop --use_kl_loss")
        if self.old_logprobs == "skip" and self.kl_coef > 0 and not self.use_kl_loss:
            hint = "add --use_kl_loss, or set --init_kl_coef 0 or --old_logprobs recompute"
            raise ConfigError("without old log-probs there is no KL that could be a part of the reward", hint=hint)
        if self.old_logprobs != "recompute" and self.correction.level != "off":
            message = f"a correction compares the trainer's old log-probs, which are `{self.old_logprobs}`"
            raise ConfigError(message, hint="use --old_logprobs recompute")

    @property
    def row(self) -> AlgorithmRow:
        """The estimator's row."""
        return ALGORITHMS[self.estimator]

    @property
    def loss(self) -> PolicyLossRow:
        """The policy loss's row."""
        return POLICY_LOSSES[self.policy_loss]

    @property
    def loss_reduction(self) -> Reduction:
        """How the actor's token losses become one number."""
        return self.reduction or self.loss.reduction or self.row.reduction

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl_coef > 0
