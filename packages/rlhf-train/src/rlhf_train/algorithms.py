"""The tables of algorithms: an algorithm is an estimator, its loss terms, a reduction and whether it needs a critic.

A row is plain data, so it travels to Ray workers. `advantages`, `baselines`, `kl` and `rlhf_kernels.packed_policy_loss`
say what the names stand for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rlhf_data.errors import ConfigError, unknown
from rlhf_kernels import PolicyObjective
from rlhf_kernels.objective import KlEstimator, Reduction

KL_ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
Baseline = Literal["none", "group_mean", "group_mean_std", "leave_one_out"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
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
        """Whether the samples of one prompt are compared, so that one sample per prompt cannot work."""
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
        uses_ratio: whether the ratio to the old policy is in it, so that it allows for several updates per batch.
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
    """One algorithm with its numbers; `make_algorithm` gives it the defaults of its rows.

    Attributes:
        estimator: a row of `ALGORITHMS`.
        objective: the actor's loss. Its `kl_coef` is the first one when the coefficient adapts.
        kl_reward_coef: weight of the KL to the reference as a part of the reward, in reward units per nat, >= 0; it is
            0 where the KL is a term of the loss. The first one when the coefficient adapts.
        kl_target: nats per token that an adaptive coefficient steers to; None keeps the coefficient fixed.
        kl_horizon: rollouts over which an adaptive coefficient can move by a fifth.
        gamma: discount per token, in [0, 1].
        lambd: GAE's trade of bias for variance, in [0, 1].
        value_clip: largest move of a value from its old one that still lowers the loss; None for no limit.
        bootstrap_truncated: a rollout that the length limit ended goes on with the critic's value of its last state.
        old_logprobs: "recompute" runs the trainer's model once before the update, "rollout" takes the engine's,
            "skip" takes those of the update itself, which must then be the only one of its batch.
        correction: of the gap between engine and trainer.
        whiten_std: False only centres: no division by the batch's deviation where the row whitens, nor by the group's
            where it does not.
    """

    estimator: str = "gae"
    objective: PolicyObjective = field(default_factory=PolicyObjective)
    kl_reward_coef: float = 0.01
    kl_target: float | None = None
    kl_horizon: int = 10_000
    gamma: float = 1.0
    lambd: float = 1.0
    value_clip: float | None = 0.5
    bootstrap_truncated: bool = False
    old_logprobs: str = "recompute"
    correction: CorrectionSpec = CorrectionSpec()
    whiten_std: bool = True

    def __post_init__(self) -> None:
        _check_names(
            ("advantage estimator", self.estimator, ALGORITHMS),
            ("source of old log-probs", self.old_logprobs, OLD_LOGPROBS),
        )
        for name, is_right, wanted in (
            ("gamma", 0 <= self.gamma <= 1, "lie in [0, 1]"),
            ("lambd", 0 <= self.lambd <= 1, "lie in [0, 1]"),
            ("value_clip", self.value_clip is None or self.value_clip > 0, "be > 0"),
            ("kl_reward_coef", self.kl_reward_coef >= 0, "be >= 0"),
            ("kl_target", self.kl_target is None or self.kl_target > 0, "be > 0"),
            ("kl_horizon", self.kl_horizon >= 1, "be >= 1"),
        ):
            if not is_right:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must {wanted}")
        if self.use_kl_loss and self.kl_reward_coef:
            weights = f"{self.objective.kl_coef:g} and {self.kl_reward_coef:g}"
            raise ConfigError(f"the KL has the weights {weights}: it is a term of the loss or a part of the reward")
        if self.old_logprobs == "skip" and self.kl_reward_coef:
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
        return POLICY_LOSSES[self.objective.policy_loss]

    @property
    def use_kl_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.objective.kl_coef > 0

    @property
    def kl_coef(self) -> float:
        """Weight of the KL to the reference, wherever it is; the first one when it adapts."""
        return self.objective.kl_coef or self.kl_reward_coef

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl_coef > 0


def make_algorithm(
    estimator: str = "gae",
    *,
    policy_loss: str = "ppo",
    reduction: str | None = None,
    kl_coef: float = AlgorithmSpec().kl_reward_coef,
    use_kl_loss: bool = False,
    **numbers: Any,
) -> AlgorithmSpec:
    """Return an algorithm with the defaults of its rows.

    Args:
        estimator: a row of `ALGORITHMS`.
        policy_loss: a row of `POLICY_LOSSES`.
        reduction: None for the policy loss's own, or else the estimator's.
        kl_coef: weight of the KL to the reference; 0 for no reference.
        use_kl_loss: the KL is a term of the loss instead of a part of the reward.
        numbers: fields of `PolicyObjective` and `AlgorithmSpec`.

    Raises:
        ConfigError: an unknown name, a number out of bounds, or options that exclude each other.
    """
    _check_names(
        ("advantage estimator", estimator, ALGORITHMS),
        ("policy loss", policy_loss, POLICY_LOSSES),
        ("reduction", reduction or REDUCTIONS[0], REDUCTIONS),
    )
    if use_kl_loss and not kl_coef:
        message = "the KL is a loss and its coefficient is 0: there is no KL"
        raise ConfigError(message, hint="set --init_kl_coef above 0, or drop --use_kl_loss")
    loss = POLICY_LOSSES[policy_loss]
    if numbers.get("dual_clip") is not None and not loss.dual_clip:
        message = f"--dual_clip {numbers['dual_clip']:g} belongs to the PPO loss, and the policy loss is {loss.title}"
        raise ConfigError(message, hint="drop --dual_clip, or use --policy_loss_type ppo")
    terms = {item.name: numbers.pop(item.name) for item in fields(PolicyObjective) if item.name in numbers}
    terms |= {"policy_loss": policy_loss, "reduction": reduction or loss.reduction or ALGORITHMS[estimator].reduction}
    try:
        objective = PolicyObjective(**terms, kl_coef=kl_coef if use_kl_loss else 0.0)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    kl_reward_coef = 0.0 if use_kl_loss else kl_coef
    return AlgorithmSpec(estimator=estimator, objective=objective, kl_reward_coef=kl_reward_coef, **numbers)
