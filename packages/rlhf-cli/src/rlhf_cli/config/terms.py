"""Options of the objective of `ppo` beside the policy loss: teacher and entropy. `kd` shares those of divergences."""

from typing import Any

from rlhf_cli.config.paths import EMA, model_path, teacher_models
from rlhf_data.errors import ConfigError
from rlhf_data.options.declare import Section, flag, flag_of, one_of
from rlhf_train.algorithms.token_specs import DIVERGENCES, DistributionSpec, EntropySpec

Divergence = one_of(DIVERGENCES)


def divergence_flag(default: str, cross_entropy: str = "") -> Any:
    """Return --kd_divergence; `cross_entropy` says what forward_kl adds."""
    return flag(
        default,
        f"how far the student is from the teacher. forward_kl: {cross_entropy or 'KL(teacher, student)'}, which covers"
        " what the teacher may say; reverse_kl: KL(student, teacher), which avoids what it would not say; jsd: between"
        " both, by --jsd_beta",
    )


def jsd_beta_flag() -> Any:
    """Return --jsd_beta."""
    return flag_of(DistributionSpec.jsd_beta, "with jsd: 0 is next to forward_kl, 1 to reverse_kl")


class OnPolicyTeacherSection(Section, title="algorithm"):
    """The teacher of a policy that learns on its own responses."""

    teacher_model: str | None = flag(
        None,
        "on-policy distillation: a model folder or hub name with the same tokenizer, towards which the policy's own"
        " responses are trained; with a reward beside it, or without. SOURCE=MODEL,SOURCE=MODEL,MODEL: one for the"
        " prompts of each file or data set of --prompt_data, by its name without folders, and one for all others. The"
        " MODEL ema is the average of --enable_ema, with which the policy learns from itself",
        names_model=True,
    )
    teacher_coef: float = flag(
        1.0,
        "weight of the log-ratio teacher / policy in a token's advantage, or with --teacher_top_k of --kd_divergence in"
        " the loss, in reward per nat",
        gt=0,
    )
    teacher_top_k: int | None = flag(
        None,
        "compare the teacher's N most likely tokens, and all others as one, with what the policy would have written, by"
        " --kd_divergence in the loss; as many as the tokenizer has is the whole vocabulary. None: compare the tokens"
        " that were sampled, in the advantages",
        ge=1,
    )
    kd_divergence: Divergence = divergence_flag(DistributionSpec().divergence)
    jsd_beta: float = jsd_beta_flag()

    @property
    def teachers(self) -> dict[str, str]:
        """The folders or hub names of the teachers by data source, "" for all sources that are not named."""
        models = teacher_models(self.teacher_model)
        return {source: model if model == EMA else model_path(model) for source, model in models.items()}

    @property
    def teacher_paths(self) -> list[str]:
        """The folders or hub names of the teachers, each once, without the average of the policy."""
        return [path for path in dict.fromkeys(self.teachers.values()) if path != EMA]

    def check_average(self, *, has_average: bool, is_scored: bool) -> None:
        """Raise ConfigError for a policy that is its own teacher but has no average, or nothing else to learn from."""
        if EMA not in self.teachers.values():
            return
        if not has_average:
            message = "--teacher_model ema is the average of the policy's weights, and --enable_ema is off"
            raise ConfigError(message, hint="add --enable_ema; --ema_beta is its decay")
        if not (is_scored or self.teacher_paths):
            message = "--teacher_model ema begins as the policy, and without a reward both stay what they are"
            raise ConfigError(
                message, hint="add --remote_rm_url, with a weight that is not 0, or another teacher for some sources"
            )

    @property
    def distribution(self) -> DistributionSpec | None:
        """How the teacher's distributions are compared; None if they are not."""
        if self.teacher_model is None or self.teacher_top_k is None:
            return None
        return DistributionSpec(top_k=self.teacher_top_k, divergence=self.kd_divergence, jsd_beta=self.jsd_beta)


class EntropySection(Section, title="algorithm"):
    """What the entropy of the policy decides."""

    top_entropy_quantile: float | None = flag_of(
        EntropySpec.top_quantile,
        "leave all tokens out of the policy loss but this share, those with the highest entropy of all responses of the"
        " step; the paper's is 0.2. None: train on all",
    )
    entropy_target: float | None = flag_of(
        EntropySpec.target,
        "adapt the weight of the entropy bonus, which begins at --entropy_loss_coef, step by step until the entropy is"
        " X nats per token; above it there is no bonus. Skywork-OR1's scripts have 0.2, and steps of 1e-4. None: keep"
        " the weight",
    )
    entropy_coef_step: float = flag_of(
        EntropySpec.coef_step, "by how much --entropy_target changes the weight of the entropy bonus in a step"
    )

    @property
    def entropy(self) -> EntropySpec:
        """The options as a record."""
        return EntropySpec(
            top_quantile=self.top_entropy_quantile, target=self.entropy_target, coef_step=self.entropy_coef_step
        )
