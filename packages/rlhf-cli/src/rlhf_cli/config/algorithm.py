"""Options of the objective of `ppo`: advantage estimator, policy loss, KL, teacher and off-policy correction."""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat

from rlhf_cli.config.paths import OWN_CODE, read_own_code
from rlhf_cli.config.terms import EntropySection, OnPolicyTeacherSection
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import flag, flag_of, matching, one_of
from rlhf_kernels import PolicyObjective
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.table import (
    ALGORITHMS,
    GROUP_BY,
    KL_ESTIMATORS,
    OLD_LOGPROBS,
    OWN_ROW,
    POLICY_LOSSES,
    REDUCTIONS,
    AlgorithmRow,
    AlgorithmSpec,
    make_algorithm,
)
from rlhf_train.algorithms.token_specs import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    REJECTIONS,
    CorrectionSpec,
    CovarianceSpec,
)

Estimator = one_of(ALGORITHMS, {name: row.title for name, row in ALGORITHMS.items()})
PolicyLoss = one_of(POLICY_LOSSES, {name: row.title for name, row in POLICY_LOSSES.items()})
KlEstimatorName = one_of(KL_ESTIMATORS)
GroupBy = one_of(GROUP_BY)
OldLogprobs = one_of(OLD_LOGPROBS)
CorrectionLevel = one_of(CORRECTION_LEVELS)
CorrectionMode = one_of(CORRECTION_MODES)
Rejection = one_of(REJECTIONS)

_DEFAULTS = AlgorithmSpec()
_OBJECTIVE = _DEFAULTS.objective
_CLIP_RANGE = (_OBJECTIVE.clip_low, _OBJECTIVE.clip_high)
# Clip ranges of losses whose ratio has another scale than PPO's. With PPO's range, they would never be clipped, or
# nearly always.
_CLIP_RANGES = {row.name: row.clip_range for row in POLICY_LOSSES.values() if row.clip_range not in (None, _CLIP_RANGE)}
# Truncation only limits large weights: a small one adds little variance. A mask drops tokens on which trainer and
# engine disagree in either direction.
_CORRECTION_BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0), "filter": (0.5, 2.0)}
# Each inner tuple is one way to set the same two numbers. If a way is used in a higher layer (flags over file over
# preset), the other ways in lower layers are dropped, so that a preset's clip range does not conflict with a flag.
_CLIP_SPELLINGS = (("eps_clip",), ("eps_clip_low_high",), ("clip_eps_low", "clip_eps_high"))
_CLIP_OPTIONS = tuple(name for names in _CLIP_SPELLINGS for name in names)
# Options without effect for algorithms without a critic.
_CRITIC_OPTIONS = (
    "critic_pretrain",
    "critic_lora_rank",
    "critic_learning_rate",
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "lambd",
    "value_clip",
    "bootstrap_truncated",
    "save_value_network",
)
# Options without effect when there is no reference model.
_REFERENCE_OPTIONS = ("kl_estimator", "ref_num_nodes", "ref_num_gpus_per_node", "colocate_actor_ref")
_DISTRIBUTION_OPTIONS = ("kd_divergence", "jsd_beta")
_TEACHER_OPTIONS = (
    *("teacher_coef", "teacher_top_k", *_DISTRIBUTION_OPTIONS),
    *("teacher_num_nodes", "teacher_num_gpus_per_node"),
)
_CORRECTION_OPTIONS = ("is_correction_mode", "is_correction_threshold")
# Options of the user's own code to the options of what it replaces.
_REPLACED = {
    "policy_loss_path": (
        *("policy_loss_type", *_CLIP_OPTIONS, "dual_clip", "sapo_tau", "log_ratio_coef"),
        *("mask_off_policy", "clip_cov", "kl_cov"),
    ),
    "advantage_path": (
        *("advantage_estimator", "gamma", "turn_gamma", "group_by", "state_coef", "lambd", "bootstrap_truncated"),
        *("no_advantage_std_norm", "reward_normalize"),
    ),
}
# A larger clip range is meant for the ratios of tokens: the geometric mean over a response stays within it.
_WIDE_FOR_GSPO = 0.1


def _underscored(value: Any) -> Any:
    """Return `token_mean` for `token-mean`: verl and OpenRLHF write reductions with hyphens."""
    return value.replace("-", "_") if isinstance(value, str) else value


def _other_ways(own: str) -> list[str]:
    """Return the options that set the clip range in another way than `own` does."""
    return [name for names in _CLIP_SPELLINGS if own not in names for name in names]


ClipRange = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0)]]
ReductionName = Annotated[one_of(REDUCTIONS), BeforeValidator(_underscored)]


class AlgorithmSection(OnPolicyTeacherSection, EntropySection):
    """Estimator, policy loss, KL, teacher and corrections."""

    advantage_estimator: Estimator = flag(
        _DEFAULTS.estimator, "; ".join(f"{row.name}: {row.title}" for row in ALGORITHMS.values())
    )
    gamma: float = flag_of(AlgorithmSpec.gamma, "discount per token")
    turn_gamma: float | None = flag_of(
        AlgorithmSpec.turn_gamma,
        "discount from one turn of an agent to the next, in place of --gamma; 0: each turn is an episode of its own",
    )
    group_by: GroupBy = flag(
        _DEFAULTS.group_by,
        "what the estimator's baseline compares within a group. episode: the episodes' rewards; turn: the rewards from"
        " the k-th turn of an agent on, with those from the k-th turn on of the other episodes; state: the"
        " episodes' rewards, and the rewards from a turn on with those from all turns on that follow the same"
        " observation (GiGPO)",
    )
    state_coef: float = flag_of(
        AlgorithmSpec.state_coef, "with --group_by state, the weight of turns in the same state; that of episodes is 1"
    )
    lambd: float = flag_of(AlgorithmSpec.lambd, "GAE's lambda: 0 trusts the critic, 1 the rewards")
    bootstrap_truncated: bool = flag(
        False,
        "when --generate_max_len cuts a response, count the critic's value of its last state as further return",
    )
    no_advantage_std_norm: bool = flag(
        False, "do not divide advantages by their standard deviation (of the batch, or of the group)"
    )
    policy_loss_type: PolicyLoss = flag(
        _OBJECTIVE.policy_loss, "; ".join(f"{row.name}: {row.title}" for row in POLICY_LOSSES.values())
    )
    policy_loss_path: str | None = flag(
        None,
        "FILE.py with `policy_loss`, your own loss of a token, in place of --policy_loss_type",
        instead_of=_REPLACED["policy_loss_path"],
    )
    advantage_path: str | None = flag(
        None,
        "FILE.py with `advantages`, your own function of rewards, in place of --advantage_estimator",
        instead_of=_REPLACED["advantage_path"],
    )
    loss_agg_mode: ReductionName | None = flag(
        None, "how token losses are combined into one; None: the default of the policy loss or of the estimator"
    )
    eps_clip: float | None = flag(
        None,
        "clip the policy ratio to [1 - X, 1 + X], or, with dppo_tv and dppo_kl, leave tokens out whose divergence is"
        f" above X; None: {_OBJECTIVE.clip_low:g}"
        + "".join(f", for {loss} {low:g} below and {high:g} above" for loss, (low, high) in _CLIP_RANGES.items()),
        gt=0,
        lt=1,
        instead_of=_other_ways("eps_clip"),
    )
    eps_clip_low_high: ClipRange | None = flag(
        None,
        "LOW HIGH: clip the policy ratio to [1 - LOW, 1 + HIGH], instead of --eps_clip",
        instead_of=_other_ways("eps_clip_low_high"),
    )
    clip_eps_low: float | None = flag(
        None, "LOW of --eps_clip_low_high, without setting HIGH", ge=0, lt=1, instead_of=_other_ways("clip_eps_low")
    )
    clip_eps_high: float | None = flag(
        None, "HIGH of --eps_clip_low_high, without setting LOW", ge=0, instead_of=_other_ways("clip_eps_high")
    )
    dual_clip: float | None = flag(
        None, "limit the PPO loss of a token with negative advantage A to X times |A|; None: no limit", gt=1
    )
    sapo_tau: tuple[PositiveFloat, PositiveFloat] = flag(
        _OBJECTIVE.sapo_tau, "POSITIVE NEGATIVE: how soon SAPO's gradient fades with the ratio, by the advantage's sign"
    )
    log_ratio_coef: float = flag(
        _OBJECTIVE.log_ratio_coef, "weight of the squared log ratio in --policy_loss_type kimi", ge=0
    )
    entropy_loss_coef: float = flag(_OBJECTIVE.entropy_coef, "weight of the entropy bonus", ge=0)
    value_clip: float | None = flag_of(
        AlgorithmSpec.value_clip, "clip each value to its old value -+ X in the value loss; None: no clipping"
    )
    init_kl_coef: float = flag_of(
        AlgorithmSpec.kl_reward_coef, "coefficient of the KL to the reference, in reward per nat; 0: no reference model"
    )
    kl_target: float | None = flag_of(
        AlgorithmSpec.kl_target, "adapt the KL coefficient until the KL per token is X nats; None: keep the coefficient"
    )
    kl_horizon: int = flag_of(
        AlgorithmSpec.kl_horizon, "responses over which --kl_target changes the KL coefficient by at most about 20 %"
    )
    kl_estimator: KlEstimatorName = flag(_OBJECTIVE.kl_estimator, "estimator of the KL per token")
    use_kl_loss: bool = flag(False, "add the KL to the loss, instead of subtracting it from the reward")
    kl_unbiased_gradient: bool = flag(
        False, "with --use_kl_loss: use the exact gradient of the KL in expectation, for every --kl_estimator"
    )
    old_logprobs: OldLogprobs | None = flag(
        None,
        "log-probs of the policy before the first update of a step: recompute them with the trainer, take those of the"
        " engine (rollout), or skip them, which needs one update per step; None: rollout where only the policy ratio"
        " can correct for responses of older weights (--async_train), skip where the update is the only one of its"
        " step and nothing else needs them (KL in the reward, teacher, correction, agent), else recompute",
    )
    is_correction_level: CorrectionLevel | None = flag(
        None,
        "weigh losses by trainer probability / engine probability: per token, per response (sequence), or by the"
        " geometric mean over a response's tokens; None: token with --vllm_quantization, unless --old_logprobs is"
        " rollout; else off",
    )
    is_correction_mode: CorrectionMode = flag(
        _DEFAULTS.correction.mode,
        "truncate weights at the threshold, mask tokens whose weight is beyond it, or filter: mask them, and weigh no"
        " token; with --old_logprobs rollout a policy ratio weighs already, and truncate is not possible",
    )
    is_correction_threshold: tuple[float, float] | None = flag(
        None,
        "smallest and largest weight; None: "
        + ", ".join(f"{low:g} {high:g} to {mode}" for mode, (low, high) in _CORRECTION_BOUNDS.items()),
    )
    is_reject: Rejection = flag(
        _DEFAULTS.correction.reject,
        "leave tokens out of the policy loss whose log-probs of trainer and engine are too far apart by the estimate k2"
        " or k3 of the KL, or responses by its mean or largest value over their tokens, or by the geometric mean of"
        " trainer probability / engine probability; beside --is_correction_level or without it",
    )
    is_reject_threshold: tuple[float, float] | None = flag(
        None, "LOW HIGH: the values of --is_reject between which tokens are kept, in nats, or a ratio for geometric"
    )
    is_correction_drop_masked: bool = flag(
        False,
        "leave masked tokens out of the KL and entropy terms, too, and out of the counts that losses are divided by",
    )
    mask_stale: int | None = flag_of(
        AlgorithmSpec.mask_stale,
        "leave tokens out of the policy loss that were sampled more than N training steps before; None: train on all",
    )
    mask_off_policy: float | None = flag(
        None,
        "leave tokens with a negative advantage out of the policy loss in responses that have become less likely by"
        " more than X nats per token on average since --old_logprobs; None: train on all",
        ge=0,
    )
    clip_cov: tuple[float, float, float] | None = flag(
        None,
        "SHARE LOW HIGH: leave this share of the tokens out of the policy loss, at random among those whose share of"
        " the covariance of log-probs and advantages is between LOW and HIGH (Clip-Cov; verl uses 2e-4 1 5)",
    )
    kl_cov: tuple[float, float] | None = flag(
        None,
        "SHARE COEF: for this share of the tokens, those with the largest share of the covariance of log-probs and"
        " advantages, add COEF times |log ratio| to the policy loss (KL-Cov; verl's default is 2e-4 0.1, and its"
        " recipe's 2e-4 1)",
    )
    mask_truncated: bool = flag(
        False, "leave out of the policy loss the responses that --generate_max_len ended (overlong filtering)"
    )

    @property
    def clip_spellings(self) -> tuple[str, ...]:
        """The options that were used to set the clip range: one name per way in `_CLIP_SPELLINGS`."""
        given = ([name for name in names if getattr(self, name) is not None] for names in _CLIP_SPELLINGS)
        return tuple(names[0] for names in given if names)

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the policy ratio may be below 1 and above 1 before it is clipped."""
        if self.eps_clip_low_high is not None:
            return self.eps_clip_low_high
        if self.eps_clip is not None:
            return self.eps_clip, self.eps_clip
        low, high = _CLIP_RANGES.get(self.policy_loss_type, _CLIP_RANGE)
        return (
            low if self.clip_eps_low is None else self.clip_eps_low,
            high if self.clip_eps_high is None else self.clip_eps_high,
        )

    @property
    def row(self) -> AlgorithmRow:
        """The estimator's row in the table of algorithms."""
        return ALGORITHMS[self.advantage_estimator] if self.advantage_path is None else OWN_ROW

    @cached_property
    def own_code(self) -> dict[str, OwnCode]:
        """See `read_own_code`."""
        return read_own_code(self)

    def spec(self, *, stale: bool = False, quantized: bool = False, single_update: bool = False) -> AlgorithmSpec:
        """Return the algorithm with all its numbers. Raises ConfigError for values that cannot work.

        Facts of the run decide the defaults of `old_logprobs` and `is_correction_level`: whether it trains on responses
        of older weights (`stale`) or of `quantized` ones, and whether every step has exactly one update of the policy
        (`single_update`).
        """
        clip_low, clip_high = self.clip_range
        reject_low, reject_high = self.is_reject_threshold or (0.0, inf)
        low, high = self.is_correction_threshold or _CORRECTION_BOUNDS[self.is_correction_mode]
        by_default = "token" if quantized and self.old_logprobs != "rollout" else "off"
        level = self.is_correction_level or by_default
        own = self.own_code
        spec = make_algorithm(
            self.advantage_estimator,
            policy_loss=self.policy_loss_type,
            reduction=self.loss_agg_mode,
            clip_low=clip_low,
            clip_high=clip_high,
            entropy_coef=self.entropy_loss_coef,
            kl_coef=self.init_kl_coef,
            correction=CorrectionSpec(
                level=level,
                mode=self.is_correction_mode,
                low=low,
                high=high,
                reject=self.is_reject,
                reject_low=reject_low,
                reject_high=reject_high,
                drops_masked=self.is_correction_drop_masked,
            ),
            covariance=CovarianceSpec(clip_cov=self.clip_cov, kl_cov=self.kl_cov),
            whiten_std=not self.no_advantage_std_norm,
            use_kl_loss=self.use_kl_loss,
            own_policy_loss=own.get("policy_loss_path"),
            own_advantages=own.get("advantage_path"),
            **matching(PolicyObjective, self),
            **matching(AlgorithmSpec, self)
            | {
                "teacher_coef": self.teacher_coef if self.teacher_model else 0.0,
                "old_logprobs": self.old_logprobs or _DEFAULTS.old_logprobs,
            },
        )
        if self.old_logprobs is not None:
            return spec
        # The mask is meant for the distance to the policy that drew the tokens.
        is_off_policy = stale or quantized or self.mask_off_policy is not None
        if is_off_policy and spec.loss.uses_ratio and spec.correction.level == "off":
            return replace(spec, old_logprobs="rollout")
        if single_update and not is_off_policy and not spec.needs_old_logprobs:
            return replace(spec, old_logprobs="skip")
        return spec

    def check(self, given: Collection[str], spec: AlgorithmSpec, num_updates: int) -> list[str]:
        """Check the objective; return notices.

        Args:
            given: names of the options that the user set to a value other than the default.
            spec: the algorithm of the run.
            num_updates: updates per step.

        Raises:
            ConfigError: for options that cannot work together.
        """
        if len(self.clip_spellings) > 1:
            names = " and ".join(f"--{name}" for name in self.clip_spellings)
            raise ConfigError(f"{names} set the same clip range", hint="give one of them")
        for own, others in _REPLACED.items():
            if getattr(self, own) is not None and (found := [name for name in others if name in given]):
                message = f"--{own} takes the place of what --{found[0]} belongs to"
                raise ConfigError(message, hint=f"drop one of them; your {OWN_CODE[own]} can do what --{found[0]} does")
        # Where old log-probs are skipped, the current ones stand for them. The ratio is then exactly 1, and options
        # that limit it have no effect.
        skips = spec.old_logprobs == "skip"
        loss = f"--policy_loss_type {spec.objective.policy_loss}"
        no_ratio = not skips and not spec.loss.uses_ratio
        without_mask = "level off" if spec.correction.level == "off" else "mode truncate"
        notices = without_effect(
            given,
            (skips, (*_CLIP_OPTIONS, "dual_clip"), "with one update per step the policy ratio is 1"),
            (no_ratio, _CLIP_OPTIONS, f"{loss} does not use the policy ratio"),
            (not no_ratio and spec.loss.clip_range is None, _CLIP_OPTIONS, f"{loss} does not clip"),
            (self.policy_loss_type != "sapo", ["sapo_tau"], f"{loss} has no gate"),
            (self.policy_loss_type != "kimi", ["log_ratio_coef"], f"{loss} has no squared log ratio"),
            (not spec.uses_reference, _REFERENCE_OPTIONS, "--init_kl_coef is 0, so there is no reference model"),
            (
                spec.old_logprobs == "recompute" and num_updates == 1,
                ["mask_off_policy"],
                "the only update of a step begins with the policy of --old_logprobs recompute",
            ),
            (self.kl_target is None, ["kl_horizon"], "there is no --kl_target"),
            (self.entropy_target is None, ["entropy_coef_step"], "there is no --entropy_target"),
            (self.group_by != "state", ["state_coef"], f"--group_by is {self.group_by}"),
            (not spec.uses_teacher, _TEACHER_OPTIONS, "there is no --teacher_model"),
            (spec.teaches_advantages, _DISTRIBUTION_OPTIONS, "there is no --teacher_top_k"),
            (
                spec.distribution is not None and self.kd_divergence != "jsd",
                ["jsd_beta"],
                f"--kd_divergence is {self.kd_divergence}",
            ),
            (not self.row.uses_critic, _CRITIC_OPTIONS, f"{self.row.full_name} has no critic"),
            (
                not self.row.divides_by_std,
                ["no_advantage_std_norm"],
                f"{self.row.full_name} divides by no standard deviation",
            ),
            (spec.correction.level == "off", _CORRECTION_OPTIONS, "--is_correction_level is off"),
            (
                not spec.correction.masks,
                ["is_correction_drop_masked"],
                f"--is_correction_{without_mask} masks nothing, and --is_reject is off",
            ),
            (spec.correction.reject == "off", ["is_reject_threshold"], "--is_reject is off"),
        )
        if no_ratio and num_updates > 1:
            notices.append(
                f"{loss} does not use the policy ratio, so nothing corrects for samples of an older policy: of the"
                f" {num_updates} updates per step, all but the first are off-policy"
            )
        if spec.old_logprobs == "rollout" and spec.runs_actor:
            notices.append(f"--old_logprobs rollout saves no forward pass with {self._use_of_pass(spec)}")
        # k1 is log p - log q. Its gradient is that of log p alone, whose expectation under p is zero.
        if self.use_kl_loss and self.kl_estimator == "k1" and not self.kl_unbiased_gradient:
            notices.append(
                "--use_kl_loss with --kl_estimator k1: the gradient of k1 averages to 0, so the term does not keep the"
                " policy near the reference; use k2 or k3"
            )
        return notices if skips else notices + self._clip_notices(loss)

    def _use_of_pass(self, spec: AlgorithmSpec) -> str:
        """Return which options take the trainer's pass before the updates, and why."""
        if not spec.correction.is_on:
            names = [f"--{name}" for name in ("top_entropy_quantile", "entropy_target") if getattr(self, name)]
            return f"{' and '.join(names)}: the entropy is that of the trainer's policy before the updates"
        level = spec.correction.level
        option = f"--is_reject {self.is_reject}" if level == "off" else f"--is_correction_level {level}"
        return f"{option}: the correction compares the engine's log-probs with the trainer's"

    def _clip_notices(self, loss: str) -> list[str]:
        (low, high), given = self.clip_range, self.clip_spellings
        bounds = f"1 - {low:g} and 1 + {high:g}"
        if self.policy_loss_type == "gspo" and not given:
            return [f"{loss} clips the ratio to {bounds}, as in its paper"]
        if self.policy_loss_type == "gspo" and max(low, high) > _WIDE_FOR_GSPO:
            hint = "its paper uses 3e-4 and 4e-4"
            return [f"{loss}: the mean ratio of a response hardly ever reaches {bounds}; {hint}"]
        if self.policy_loss_type == "cispo" and self.clip_eps_high is None and given in ((), ("clip_eps_low",)):
            return [f"{loss}: --clip_eps_high is {high:g}; its paper tunes it and does not print the value"]
        return []
