"""The tables of advantage estimators and policy losses, and the settings of one algorithm.

A row is plain data, which can be sent to Ray workers. The functions behind the names are in `gae`, `group`,
`kl` and `rlhf_kernels.packed_policy_loss`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError, check_name
from rlhf_kernels import PolicyObjective
from rlhf_kernels.objective import KlEstimator, Reduction
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.token_specs import CorrectionSpec, CovarianceSpec, DistributionSpec, EntropySpec

if TYPE_CHECKING:
    from rlhf_rollout.protocols import SamplingParams

KL_ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
Baseline = Literal[
    "none",
    "group_mean",
    "group_mean_std",
    "leave_one_out",
    "group_mean_batch_std",
    "group_mean_ratio",
    "group_mean_by_length",
    "group_max",
    "best_and_worst",
    "greedy",
]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
GROUP_BY = ("episode", "turn", "state")
OLD_LOGPROBS = ("recompute", "rollout", "skip")


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """One advantage estimator with the defaults of its paper.

    Attributes:
        name: the value of `estimator` in `make_algorithm`.
        title: its name in papers.
        baseline: subtracted from each rollout's reward; see `group`.
        reduction: how the losses of tokens become one number.
        whiten: whether advantages are whitened over all tokens of the rollout batch.
        uses_critic: whether a critic learns values.
    """

    name: str
    title: str
    baseline: Baseline
    reduction: Reduction
    whiten: bool = False
    uses_critic: bool = False

    @property
    def full_name(self) -> str:
        """Its name in papers, and here."""
        return f"{self.title} ({self.name})"

    def check_group(self, num_samples: int) -> None:
        """Raise ConfigError for groups of one rollout if rewards are compared within a group."""
        if self.uses_group and num_samples < 2:
            message = f"``n_samples_per_prompt`` is {num_samples}, and {self.full_name} compares the samples of one"
            raise ConfigError(f"{message} prompt", hint="use ``n_samples_per_prompt=4`` or more")

    @property
    def uses_group(self) -> bool:
        """Whether rewards are compared within a group; the algorithm then needs several samples per prompt."""
        return self.baseline not in ("none", "greedy")

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation, of the batch or of the group."""
        return self.whiten or self.baseline.endswith("_std")

    @property
    def compares_responses(self) -> bool:
        """Whether the baseline says something of whole responses alone, and not of their turns and steps."""
        return self.baseline in ("group_mean_by_length", "group_max", "best_and_worst", "greedy")

    @property
    def prefers(self) -> bool:
        """Whether rewards only say which of two responses is better, and log-ratios to the reference say how much."""
        return self.baseline == "best_and_worst"


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
        # Liu et al. 2025, arXiv:2508.08221
        AlgorithmRow("lite_ppo", "Lite PPO", "group_mean_batch_std", "token_mean"),
        # Tajwar et al. 2026, arXiv:2602.02710
        AlgorithmRow("maxrl", "MaxRL", "group_mean_ratio", "seq_mean_token_sum"),
        # Hao et al. 2025, arXiv:2505.23585
        AlgorithmRow("opo", "OPO", "group_mean_by_length", "seq_mean_token_sum"),
        # Li et al. 2023, arXiv:2310.10505
        AlgorithmRow("remax", "ReMax", "greedy", "seq_mean_token_sum"),
        # Tang et al. 2025, arXiv:2503.19595
        AlgorithmRow("max_at_k", "max@k", "group_max", "seq_mean_token_sum"),
        # Guo et al. 2024, arXiv:2402.04792
        AlgorithmRow("online_dpo", "online DPO", "best_and_worst", "seq_mean_token_sum"),
    )
}


# In place of an estimator: `AlgorithmSpec.own_advantages`.
OWN_ROW = AlgorithmRow("own", "your advantage function", "none", "token_mean")


@dataclass(frozen=True, slots=True)
class PolicyLossRow:
    """One policy loss. `rlhf_kernels.packed_policy_loss` has the formulas and sources.

    Attributes:
        name: the value of `policy_loss` in `make_algorithm`.
        title: its name in papers.
        reduction: how the losses of tokens become one number; None for the estimator's.
        uses_ratio: whether it includes the ratio to the old policy, which keeps several updates per batch valid.
        dual_clip: whether `dual_clip` applies.
        clip_range: `clip_low` and `clip_high` by default; None if the loss has neither.
    """

    name: str
    title: str
    reduction: Reduction | None = None
    uses_ratio: bool = True
    dual_clip: bool = False
    clip_range: tuple[float, float] | None = (0.2, 0.2)


POLICY_LOSSES: Mapping[str, PolicyLossRow] = {
    row.name: row
    for row in (
        PolicyLossRow("ppo", "PPO clip", dual_clip=True),
        # The geometric mean of a response's token ratios averages hundreds of tokens and stays close to 1.
        PolicyLossRow("gspo", "GSPO", "seq_mean_token_mean", clip_range=(3e-4, 4e-4)),
        # CISPO clips a weight, and only from above; 1 - 0.999 leaves nearly every small weight alone.
        PolicyLossRow("cispo", "CISPO", "token_mean", clip_range=(0.999, 0.2)),
        PolicyLossRow("reinforce", "REINFORCE", uses_ratio=False, clip_range=None),
        PolicyLossRow("sapo", "SAPO", "seq_mean_token_mean", clip_range=None),
        # Largest divergences of a token, in probability and in nats, from verl's recipe of the authors.
        PolicyLossRow("dppo_tv", "DPPO-TV", clip_range=(0.15, 0.15)),
        PolicyLossRow("dppo_kl", "DPPO-KL", clip_range=(0.05, 0.05)),
        PolicyLossRow("kimi", "Kimi K2.5", "token_mean"),
        # e^-0.4 to e^0.4
        PolicyLossRow("gmpo", "GMPO", "seq_mean_token_mean", clip_range=(0.33, 0.492)),
        PolicyLossRow("topr", "TOPR", "seq_mean_token_mean", clip_range=None),
        PolicyLossRow("vespo", "VESPO", "seq_mean_token_sum", clip_range=None),
    )
}
# In place of a policy loss: `AlgorithmSpec.own_policy_loss`.
OWN_LOSS_ROW = PolicyLossRow("own", "your policy loss", clip_range=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """One algorithm with its numbers. `make_algorithm` fills in the defaults of its rows.

    Attributes:
        estimator: name of a row of `ALGORITHMS`.
        objective: the actor's loss. Its `kl_coef` is the initial value when the coefficient adapts.
        kl_reward_coef: weight of the KL penalty in the reward, in reward units per nat, >= 0; 0 when the KL is a term
            of the loss. The initial value when the coefficient adapts.
        kl_target: KL in nats per token that an adaptive coefficient steers towards; None keeps the coefficient fixed.
        kl_horizon: rollouts over which an adaptive coefficient can change by about a fifth.
        teacher_coef: weight of the divergence from a teacher, in reward units per nat, >= 0; 0 for no teacher.
        distribution: compares the teacher's distributions in the loss; None compares sampled tokens in the advantages.
        gamma: discount per token, in [0, 1].
        turn_gamma: discount of the step from one turn to the next, in [0, 1]; None for `gamma`. 0 makes each turn an
            episode of its own.
        group_by: what the baseline compares within a group: "episode" their rewards, "turn" what follows from a turn on
            with that from the same turn of the other episodes, "state" both the episodes' rewards and what follows from
            a turn on with that from the turns in the same state; see `group.relative_turn_rewards`.
        state_coef: with `group_by` "state", the weight of the turns' advantages beside that of the episode, > 0.
        lambd: lambda of GAE, in [0, 1]: lower means more bias and less variance.
        value_clip: distance from the old value beyond which a value no longer lowers the loss; None for no limit.
        bootstrap_truncated: add the critic's value of the last state to the return of a rollout that the length limit
            ended.
        old_logprobs: where the old log-probs come from. "recompute" runs the trainer's model once before the updates,
            "rollout" takes the engine's, and "skip" takes those of the update itself, which must then be the only
            update of its batch.
        correction: of the gap between engine and trainer. With the engine's log-probs as the old ones it can mask, and
            the ratio does the weighing; see `weighs`.
        mask_stale: leave tokens out of the actor's loss that are stale by more training steps than this, >= 0; None
            trains on all. Steps in which the actor is frozen do not count.
        mask_truncated: leave rollouts that the length limit ended out of the actor's loss.
        covariance: tokens that lower the entropy the most are left out of the actor's loss, or held to the old policy.
        entropy: which tokens the actor's loss keeps by their entropy, and how the weight of the bonus adapts.
        whiten_std: False divides by no standard deviation: of the batch where the estimator whitens, else of the group.
        own_policy_loss: a user's loss of a token, in place of that of the objective, whose other terms and reduction
            stay; None without.
        own_advantages: a user's advantages, in place of those of the estimator; None without.
    """

    estimator: str = "gae"
    objective: PolicyObjective = field(default_factory=PolicyObjective)
    kl_reward_coef: float = bounded(0.01, ge=0)
    kl_target: float | None = bounded(None, gt=0)
    kl_horizon: int = bounded(10_000, ge=1)
    teacher_coef: float = bounded(0.0, ge=0)
    distribution: DistributionSpec | None = None
    gamma: float = bounded(1.0, ge=0, le=1)
    turn_gamma: float | None = bounded(None, ge=0, le=1)
    group_by: str = "episode"
    state_coef: float = bounded(1.0, gt=0)
    lambd: float = bounded(1.0, ge=0, le=1)
    value_clip: float | None = bounded(0.5, gt=0)
    bootstrap_truncated: bool = False
    old_logprobs: str = "recompute"
    correction: CorrectionSpec = field(default_factory=CorrectionSpec)
    mask_stale: int | None = bounded(None, ge=0)
    mask_truncated: bool = False
    covariance: CovarianceSpec = field(default_factory=CovarianceSpec)
    entropy: EntropySpec = field(default_factory=EntropySpec)
    whiten_std: bool = True
    own_policy_loss: OwnCode | None = None
    own_advantages: OwnCode | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        check_name("advantage estimator", self.estimator, ALGORITHMS)
        check_name("source of old log-probs", self.old_logprobs, OLD_LOGPROBS)
        check_name("what a baseline compares", self.group_by, GROUP_BY)
        by_turn = self.group_by != "episode"
        compares = f"``group_by={self.group_by}`` compares"
        if by_turn and not self.row.uses_group:
            message = f"{compares} turns within a group, and {self.row.title} has no baseline of a group"
            raise ConfigError(message, hint="use ``estimator=group_norm``, dr_grpo, rloo or reinforce_baseline")
        if by_turn and self.row.compares_responses:
            message = f"{compares} turns, and {self.row.full_name} compares whole responses"
            raise ConfigError(message, hint="drop ``group_by``, or use ``estimator=group_norm``")
        if by_turn and self.gamma != 1:
            message = f"{compares} what whole turns lead to, and ``gamma={self.gamma:g}`` discounts by token"
            raise ConfigError(message, hint="discount by turn with ``turn_gamma``, and drop ``gamma``")
        if self.row.prefers and not self.kl_reward_coef:
            message = f"{self.row.full_name} compares with a reference model, and ``kl_coef`` is the beta of its loss"
            raise ConfigError(message, hint="set ``kl_coef=0.1``, and drop ``use_kl_loss``")
        if self.row.prefers and (self.gamma != 1 or self.turn_gamma not in (None, 1)):
            message = f"``gamma`` and ``turn_gamma`` discount by token or turn, and {self.row.full_name} compares whole"
            raise ConfigError(f"{message} responses", hint="drop them")
        if not self.uses_reference and self.kl_target is not None:
            message = "``kl_target`` with ``kl_coef=0``: there is no KL"
            raise ConfigError(message, hint="set ``kl_coef`` above 0, or drop ``kl_target``")
        if self.use_kl_loss and self.kl_reward_coef:
            weights = f"{self.objective.kl_coef:g} and {self.kl_reward_coef:g}"
            message = f"the KL has weights in the loss and in the reward ({weights}); only one may be above 0"
            raise ConfigError(message)
        if self.old_logprobs == "skip" and self.kl_reward_coef:
            hint = "add ``use_kl_loss``, or set ``kl_coef=0`` or ``old_logprobs=recompute``"
            raise ConfigError("``old_logprobs=skip`` leaves nothing to compute the reward's KL penalty from", hint=hint)
        for use, is_on, other in (
            ("a teacher's log-ratio", self.teaches_advantages, "rollout"),
            ("``mask_off_policy``", self.objective.mask_off_policy is not None, "rollout"),
            ("Clip-Cov or KL-Cov", self.covariance.is_on, "rollout"),
            ("``EntropySpec.top_quantile`` or ``EntropySpec.target``", self.entropy.is_on, "rollout"),
            (
                "an importance correction",
                self.correction.is_on,
                "``CorrectionSpec.level=off`` ``CorrectionSpec.reject=off``",
            ),
        ):
            if self.old_logprobs == "skip" and is_on:
                message = f"{use} needs log-probs of the policy before the update, which ``old_logprobs=skip`` leaves"
                raise ConfigError(f"{message} out", hint=f"use ``old_logprobs=recompute``, or {other}")
        if self.correction.level != "off" and self.correction.mode == "truncate" and not self.weighs:
            message = (
                f"with ``old_logprobs=rollout`` the ratio of {self.loss.title} is current / engine, which holds the"
            )
            hint = "use ``CorrectionSpec.mode=mask``, or ``old_logprobs=recompute``"
            raise ConfigError(f"{message} weight that ``CorrectionSpec.mode=truncate`` would multiply again", hint=hint)

    def check_steps(self, *, num_rollouts: int, num_updates: int, num_frozen_steps: int, max_staleness: int) -> None:
        """Raise ConfigError for a run whose steps the algorithm cannot learn from.

        Args:
            num_rollouts, num_updates: per step.
            num_frozen_steps: steps at the start in which only the critic is updated.
            max_staleness: steps by which the weights of rollouts may be older than those that are trained.
        """
        if num_frozen_steps > 0 and not self.row.uses_critic:
            message = (
                f"``num_frozen_steps={num_frozen_steps}`` trains the critic only, and {self.row.full_name} has none"
            )
            raise ConfigError(message, hint="drop it, or use ``estimator=gae``")
        if self.old_logprobs != "skip":
            return
        if num_updates > 1:
            message = f"old log-probs are skipped, which needs one update per step, and there are {num_updates}"
            hint = f"use ``train_batch_size={num_rollouts}`` ``max_epochs=1``, or ``old_logprobs=recompute``"
            raise ConfigError(message, hint=hint)
        if max_staleness:
            message = "old log-probs are skipped, which needs rollouts of the newest weights, and rollouts may be stale"
            raise ConfigError(message, hint="use ``old_logprobs=recompute``, or rollout")

    def check_sampling(self, sampling: "SamplingParams", *, is_replay: bool = False) -> None:
        """Raise ConfigError for greedy sampling, and if log-probs of the engine that it makes differ from the trainer's
        are used, which a replay (`is_replay`) has from the run that it replays.

        They are those of the part of the distribution that the engine samples from, or those after the repetition
        penalty. As the old policy, or in a correction, they would be compared with log-probs of the whole distribution,
        as if the policy had changed.
        """
        if sampling.temperature <= 0:
            message = f"``temperature`` is {sampling.temperature:g}; it must be above 0 for training"
            raise ConfigError(message, hint="greedy responses to a prompt are all the same; evaluation may be greedy")
        neutral = {} if is_replay else sampling.changes
        uses = {
            "``old_logprobs=rollout``": self.old_logprobs == "rollout",
            f"``CorrectionSpec.level={self.correction.level}``": self.correction.level != "off",
            f"``CorrectionSpec.reject={self.correction.reject}``": self.correction.reject != "off",
        }
        for use in [use for use, is_on in uses.items() if is_on and neutral]:
            parts = " and ".join(f"``{name}={getattr(sampling, name):g}``" for name in neutral)
            values = " ".join(f"``{name}={value}``" for name, value in neutral.items())
            hint = f"use {values}; or ``old_logprobs=recompute`` ``CorrectionSpec.level=off``"
            hint += " ``CorrectionSpec.reject=off``" if self.correction.reject != "off" else ""
            message = f"{parts} {sampling.what_changes}, and {use} compares its log-probs with those of the whole"
            raise ConfigError(f"{message} distribution", hint=hint)

    def check_rewards(self, normalize: str, changes: Collection[str] = ()) -> None:
        """Raise ConfigError for a way of comparing rewards, `reward_normalize`, that contradicts this algorithm.

        `changes` names what changes rewards after they are given.
        """
        for name in changes if self.row.baseline == "greedy" else ():
            message = f"{name} changes the rewards that are trained, and not that of {self.row.title}'s greedy response"
            raise ConfigError(message, hint="drop it, or use ``estimator=rloo``")
        compares = f"``reward_normalize={normalize}``"
        if normalize == "none" and self.row.prefers:
            message = f"{compares} compares no rewards, and {self.row.full_name} learns from the best and the worst"
            raise ConfigError(message, hint="drop it")
        if normalize == "each" and not self.whiten_std:
            message = f"{compares} divides rewards by their deviation, and ``whiten_std=False`` forbids it"
            raise ConfigError(message, hint="drop one of them")
        own_scale = ("group_mean_ratio", "group_mean_batch_std")
        if normalize == "each" and (self.row.compares_responses or self.row.baseline in own_scale):
            message = f"{compares} divides each reward by its group's deviation, in place of what {self.row.title} does"
            raise ConfigError(message, hint="drop it, or use ``estimator=group_norm``")
        if self.group_by != "episode" and normalize != "together":
            what = "compares none" if normalize == "none" else "compares those of whole responses"
            message = f"``group_by={self.group_by}`` compares rewards turn by turn, and {compares} {what}"
            raise ConfigError(message, hint="drop one of them")

    @property
    def row(self) -> AlgorithmRow:
        """The row of the estimator."""
        return ALGORITHMS[self.estimator] if self.own_advantages is None else OWN_ROW

    @property
    def loss(self) -> PolicyLossRow:
        """The row of the policy loss."""
        return POLICY_LOSSES[self.objective.policy_loss] if self.own_policy_loss is None else OWN_LOSS_ROW

    @property
    def own_code(self) -> list[OwnCode]:
        """The user's functions."""
        return [code for code in (self.own_policy_loss, self.own_advantages) if code is not None]

    @property
    def runs_actor(self) -> bool:
        """Whether the actor runs before the updates: for old log-probs, for the correction, or for the entropy."""
        return self.old_logprobs == "recompute" or self.correction.is_on or self.entropy.is_on

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether something other than the policy ratio needs the trainer's log-probs before the update."""
        by_token = self.correction.is_on or self.covariance.is_on or self.entropy.is_on
        return self.kl_reward_coef > 0 or self.teaches_advantages or by_token

    @property
    def weighs(self) -> bool:
        """Whether the correction's weights multiply the loss.

        A ratio to the engine's policy includes them: current / engine = (old / engine) (current / old).
        """
        return self.old_logprobs == "recompute" or not self.loss.uses_ratio

    @property
    def use_kl_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.objective.kl_coef > 0

    @property
    def kl_coef(self) -> float:
        """Weight of the KL to the reference, in the loss or in the reward; the initial value when it adapts."""
        return self.objective.kl_coef or self.kl_reward_coef

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl_coef > 0

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher is needed."""
        return self.teacher_coef > 0

    @property
    def teaches_advantages(self) -> bool:
        """Whether the teacher's log-probs of the sampled tokens are part of the advantages."""
        return self.uses_teacher and self.distribution is None


def make_algorithm(
    estimator: str = "gae",
    *,
    policy_loss: str = "ppo",
    reduction: str | None = None,
    kl_coef: float = AlgorithmSpec().kl_reward_coef,
    use_kl_loss: bool = False,
    kl_unbiased_gradient: bool = False,
    **numbers: Any,
) -> AlgorithmSpec:
    """Return an algorithm with the defaults of its rows.

    Args:
        estimator: a row of `ALGORITHMS`.
        policy_loss: a row of `POLICY_LOSSES`.
        reduction: None for that of the policy loss, or that of the estimator if the policy loss has none.
        kl_coef: weight of the KL to the reference; 0 for no reference model.
        use_kl_loss: make the KL a term of the loss instead of a penalty in the reward.
        kl_unbiased_gradient: see `PolicyObjective`; with `use_kl_loss` only.
        numbers: fields of `PolicyObjective` and `AlgorithmSpec`.

    Raises:
        ConfigError: an unknown name, a number out of bounds, or options that exclude each other.
    """
    check_name("advantage estimator", estimator, ALGORITHMS)
    check_name("policy loss", policy_loss, POLICY_LOSSES)
    check_name("reduction", reduction or REDUCTIONS[0], REDUCTIONS)
    if use_kl_loss and not kl_coef:
        message = "``use_kl_loss`` adds a KL term to the loss, and the coefficient of the KL is 0"
        raise ConfigError(message, hint="set ``kl_coef`` above 0, or drop ``use_kl_loss``")
    if kl_unbiased_gradient and not use_kl_loss:
        message = "``kl_unbiased_gradient`` changes the gradient of the KL loss, and ``use_kl_loss`` is off"
        raise ConfigError(message, hint="add ``use_kl_loss``, or drop ``kl_unbiased_gradient``")
    loss = POLICY_LOSSES[policy_loss]
    if numbers.get("dual_clip") is not None and not loss.dual_clip:
        message = f"``dual_clip={numbers['dual_clip']:g}`` belongs to the PPO loss, and the policy loss is {loss.title}"
        raise ConfigError(message, hint="drop ``dual_clip``, or use ``policy_loss=ppo``")
    terms = {item.name: numbers.pop(item.name) for item in fields(PolicyObjective) if item.name in numbers}
    terms = dict(zip(("clip_low", "clip_high"), loss.clip_range or (), strict=False)) | terms
    terms |= {"policy_loss": policy_loss, "reduction": reduction or loss.reduction or ALGORITHMS[estimator].reduction}
    try:
        objective = PolicyObjective(
            **terms, kl_coef=kl_coef if use_kl_loss else 0.0, kl_unbiased_gradient=kl_unbiased_gradient
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    kl_reward_coef = 0.0 if use_kl_loss else kl_coef
    return AlgorithmSpec(estimator=estimator, objective=objective, kl_reward_coef=kl_reward_coef, **numbers)
