"""What is optimised."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from rlhf_cli.config.base import Instead, Section, flag, one_of
from rlhf_train.algorithms import (
    ALGORITHMS,
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    OLD_LOGPROBS,
    POLICY_LOSSES,
    REDUCTIONS,
    AlgorithmSpec,
    CorrectionSpec,
)

Estimator = one_of(ALGORITHMS, {name: row.title for name, row in ALGORITHMS.items()})
PolicyLoss = one_of(POLICY_LOSSES, {name: row.title for name, row in POLICY_LOSSES.items()})
KlEstimatorName = one_of(("k1", "k2", "k3"))
OldLogprobs = one_of(OLD_LOGPROBS)
CorrectionLevel = one_of(CORRECTION_LEVELS)
CorrectionMode = one_of(CORRECTION_MODES)

_DEFAULTS = AlgorithmSpec()
_CLIP_RANGE = (_DEFAULTS.clip_low, _DEFAULTS.clip_high)
_CLIP_RANGES = {
    "gspo": (3e-4, 4e-4),  # of the mean log-ratio's exponential, which hardly leaves 1
    "cispo": (0.999, _DEFAULTS.clip_high),  # no lower bound, or as good as none
}
_CORRECTION_BOUNDS = {"truncate": (0.0, 2.0), "mask": (0.5, 5.0)}
_CLIP_SPELLINGS = (("eps_clip",), ("eps_clip_low_high",), ("clip_eps_low", "clip_eps_high"))
CLIP_OPTIONS = tuple(name for names in _CLIP_SPELLINGS for name in names)


def _underscored(value: Any) -> Any:
    return value.replace("-", "_") if isinstance(value, str) else value  # `token-mean`, as verl writes it


def _instead(own: str) -> Instead:
    return Instead(tuple(name for names in _CLIP_SPELLINGS if own not in names for name in names))


ReductionName = Annotated[one_of(REDUCTIONS), BeforeValidator(_underscored)]


class AlgorithmSection(Section, title="algorithm"):
    """Estimator, losses, KL and corrections."""

    advantage_estimator: Estimator = flag(
        _DEFAULTS.estimator, "; ".join(f"{row.name}: {row.title}" for row in ALGORITHMS.values())
    )
    gamma: float = flag(_DEFAULTS.gamma, "discount a token", ge=0, le=1)
    lambd: float = flag(_DEFAULTS.lambd, "GAE's lambda: 0 trusts the critic, 1 the rewards", ge=0, le=1)
    bootstrap_truncated: bool = flag(
        False, "a response that --generate_max_len ended goes on with the critic's value of its last state"
    )
    no_advantage_std_norm: bool = flag(
        False, "do not divide advantages by their standard deviation (of the batch, or of the group)"
    )
    policy_loss_type: PolicyLoss = flag(
        _DEFAULTS.policy_loss, "; ".join(f"{row.name}: {row.title}" for row in POLICY_LOSSES.values())
    )
    loss_agg_mode: ReductionName | None = flag(
        None, "how token losses become one number; None: the policy loss's or the estimator's own"
    )
    eps_clip: Annotated[float | None, _instead("eps_clip")] = flag(
        None,
        f"the policy ratio is clipped to 1 -+ this; None: {_DEFAULTS.clip_low:g}"
        + "".join(f", for {loss} {low:g} below and {high:g} above" for loss, (low, high) in _CLIP_RANGES.items()),
        gt=0,
        lt=1,
    )
    eps_clip_low_high: Annotated[tuple[float, float] | None, _instead("eps_clip_low_high")] = flag(
        None, "two different bounds instead of --eps_clip: LOW below 1, HIGH above"
    )
    clip_eps_low: Annotated[float | None, _instead("clip_eps_low")] = flag(
        None, "the LOW of --eps_clip_low_high alone", ge=0, lt=1
    )
    clip_eps_high: Annotated[float | None, _instead("clip_eps_high")] = flag(
        None, "the HIGH of --eps_clip_low_high alone", ge=0
    )
    dual_clip: float | None = flag(
        None, "with a negative advantage A the PPO loss is at most this times |A|; None: no limit", gt=1
    )
    entropy_loss_coef: float = flag(_DEFAULTS.entropy_coef, "weight of the entropy bonus", ge=0)
    value_clip: float | None = flag(
        _DEFAULTS.value_clip, "a value may move that far from its old one; None: as far as it likes", gt=0
    )
    init_kl_coef: float = flag(
        _DEFAULTS.kl_coef, "weight of the KL to the reference, in reward a nat; 0: no reference model", ge=0
    )
    kl_target: float | None = flag(
        None, "nats a token that the weight of the KL is steered to; None: the weight stays", gt=0
    )
    kl_horizon: int = flag(
        _DEFAULTS.kl_horizon, "responses over which --kl_target may move the weight by a fifth", ge=1
    )
    kl_estimator: KlEstimatorName = flag(_DEFAULTS.kl_estimator, "estimate of the KL of a token")
    use_kl_loss: bool = flag(False, "the KL is a term of the loss instead of a part of the reward")
    kl_unbiased_gradient: bool = flag(
        False, "the gradient of the KL loss is the KL's own, whatever the estimator; with --use_kl_loss"
    )
    old_logprobs: OldLogprobs = flag(
        _DEFAULTS.old_logprobs,
        "log-probs before the update: recompute with the trainer's model, take the engine's (rollout), or"
        " skip, when there is one optimizer step a step",
    )
    is_correction_level: CorrectionLevel = flag(
        _DEFAULTS.correction.level,
        "weigh by trainer probability / engine probability: of each token, of the whole response (sequence)"
        " or as its geometric mean",
    )
    is_correction_mode: CorrectionMode = flag(
        _DEFAULTS.correction.mode, "truncate weights at the threshold, or mask what lies beyond it"
    )
    is_correction_threshold: tuple[float, float] | None = flag(
        None,
        "smallest and largest weight; None: "
        + ", ".join(f"{low:g} {high:g} to {mode}" for mode, (low, high) in _CORRECTION_BOUNDS.items()),
    )

    @property
    def clip_spellings(self) -> tuple[str, ...]:
        """The options that set the clip range, the first one of each way to do so."""
        given = ([name for name in names if getattr(self, name) is not None] for names in _CLIP_SPELLINGS)
        return tuple(names[0] for names in given if names)

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 the policy ratio may go."""
        if self.eps_clip_low_high is not None:
            return self.eps_clip_low_high
        if self.eps_clip is not None:
            return self.eps_clip, self.eps_clip
        low, high = _CLIP_RANGES.get(self.policy_loss_type, _CLIP_RANGE)
        return (
            low if self.clip_eps_low is None else self.clip_eps_low,
            high if self.clip_eps_high is None else self.clip_eps_high,
        )

    def spec(self) -> AlgorithmSpec:
        """Return the algorithm with its numbers. Raises ConfigError for numbers or options that cannot work."""
        clip_low, clip_high = self.clip_range
        low, high = self.is_correction_threshold or _CORRECTION_BOUNDS[self.is_correction_mode]
        return AlgorithmSpec(
            estimator=self.advantage_estimator,
            policy_loss=self.policy_loss_type,
            reduction=self.loss_agg_mode,
            gamma=self.gamma,
            lambd=self.lambd,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=self.dual_clip,
            entropy_coef=self.entropy_loss_coef,
            value_clip=self.value_clip,
            bootstrap_truncated=self.bootstrap_truncated,
            kl_coef=self.init_kl_coef,
            kl_target=self.kl_target,
            kl_horizon=self.kl_horizon,
            kl_estimator=self.kl_estimator,
            use_kl_loss=self.use_kl_loss,
            kl_unbiased_gradient=self.kl_unbiased_gradient,
            old_logprobs=self.old_logprobs,
            correction=CorrectionSpec(level=self.is_correction_level, mode=self.is_correction_mode, low=low, high=high),
            whiten_std=not self.no_advantage_std_norm,
        )
