"""The configurations of the commands that learn from fixed examples."""

from collections.abc import Collection
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rlhf_cli.config.base import Section, one_of
from rlhf_cli.config.checks import check_offline, missing, without_effect
from rlhf_cli.config.data import (
    ChatSection,
    DemonstrationSection,
    ExampleSection,
    MarginPairSection,
    PairSection,
    StepSection,
    VerdictSection,
)
from rlhf_cli.config.model import ComparedModelSection, OfflineModelSection, TaughtModelSection
from rlhf_cli.config.output import OutputSection
from rlhf_cli.config.training import (
    CautiousTrainingSection,
    OfflineEvaluationSection,
    OfflineTrainingSection,
    RewardTrainingSection,
)
from rlhf_data.errors import ConfigError, with_hint

RewardLoss = one_of(("sigmoid", "logexp"))
PreferenceLoss = one_of(("dpo", "ipo", "simpo", "orpo"))


class OfflineConfig(BaseModel):
    """What every such command is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: OfflineModelSection = Field(default_factory=OfflineModelSection)
    data: ExampleSection = Field(default_factory=ExampleSection)
    training: OfflineTrainingSection = Field(default_factory=OfflineTrainingSection)
    evaluation: OfflineEvaluationSection = Field(default_factory=OfflineEvaluationSection)
    output: OutputSection = Field(default_factory=OutputSection)

    def check(self, given: Collection[str]) -> list[str]:
        """Check what concerns several fields.

        Args:
            given: the options that somebody set to something else than the default.

        Returns:
            A notice for each option that has no effect.

        Raises:
            ConfigError: options that cannot work together, or one that is missing.
        """
        notices = check_offline(self, given)
        if isinstance(self.data, ChatSection) and not self.data.apply_chat_template:
            notices += without_effect(["tokenizer_chat_template"], given, "--apply_chat_template is off")
        return notices


class SftConfig(OfflineConfig):
    """Everything `sft` is told."""

    data: DemonstrationSection = Field(default_factory=DemonstrationSection)


class DistillationSection(Section):
    """What the student follows."""

    TITLE: ClassVar[str] = "objective"

    kd_coef: float = Field(0.4, gt=0, le=1, description="share of the teacher in the loss; the rest is the examples'")


class KdConfig(SftConfig):
    """Everything `kd` is told."""

    model: TaughtModelSection = Field(default_factory=TaughtModelSection)
    objective: DistillationSection = Field(default_factory=DistillationSection)

    def check(self, given: Collection[str]) -> list[str]:
        """See `OfflineConfig`."""
        if self.model.teacher_model is None:
            raise missing("teacher_model", "kd needs a model to learn from", "add --teacher_model FOLDER_OR_NAME")
        return super().check(given)


class RewardLossSection(Section):
    """How scores are to differ."""

    TITLE: ClassVar[str] = "objective"

    loss: RewardLoss = Field(
        "sigmoid",
        description="sigmoid: -log sigmoid(chosen - rejected - margin); logexp: log(1 + exp(rejected - chosen))",
    )
    margin_loss: bool = Field(False, description="scores are to differ by --margin_key at least")


class RmConfig(OfflineConfig):
    """Everything `rm` is told."""

    data: MarginPairSection = Field(default_factory=MarginPairSection)
    training: RewardTrainingSection = Field(default_factory=RewardTrainingSection)
    objective: RewardLossSection = Field(default_factory=RewardLossSection)

    def check(self, given: Collection[str]) -> list[str]:
        """See `OfflineConfig`."""
        notices = super().check(given)
        if self.objective.margin_loss and self.objective.loss == "logexp":
            raise ConfigError(with_hint("--loss logexp has no margin", "drop --margin_loss, or use --loss sigmoid"))
        if not self.objective.margin_loss:
            notices += without_effect(["margin_key"], given, "--margin_loss is off")
        return notices


class PreferenceSection(Section):
    """How likely the preferred answer is to be, against the other one."""

    TITLE: ClassVar[str] = "objective"

    loss_type: PreferenceLoss = Field(
        "dpo", description="dpo and ipo compare with a reference; simpo and orpo need none"
    )
    ipo: bool = Field(False, description="the same as --loss_type ipo")
    beta: float = Field(
        0.1,
        gt=0,
        description="the larger, the nearer to the reference; orpo: weight of the odds ratio; simpo: 2 or more",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="probability that a pair is the wrong way round (cDPO); of dpo"
    )
    nll_loss_coef: float = Field(
        0.0, ge=0, description="weight of the preferred answer's negative log-likelihood; orpo always has it, with 1"
    )
    simpo_gamma: float = Field(0.5, ge=0, description="margin that simpo aims at")
    length_average: bool = Field(False, description="dpo and ipo compare means over tokens instead of sums")

    @property
    def name(self) -> str:
        """The loss, however it was asked for."""
        return "ipo" if self.ipo else self.loss_type


LOSSES_WITH = {
    "label_smoothing": ("dpo",),
    "nll_loss_coef": ("dpo", "ipo", "simpo"),
    "simpo_gamma": ("simpo",),
    "length_average": ("dpo", "ipo"),
    "ref_pretrain": ("dpo", "ipo"),
    "precompute_reference": ("dpo", "ipo"),
}


class DpoConfig(OfflineConfig):
    """Everything `dpo` is told."""

    model: ComparedModelSection = Field(default_factory=ComparedModelSection)
    data: PairSection = Field(default_factory=PairSection)
    training: CautiousTrainingSection = Field(default_factory=CautiousTrainingSection)
    objective: PreferenceSection = Field(default_factory=PreferenceSection)

    def check(self, given: Collection[str]) -> list[str]:
        """See `OfflineConfig`."""
        notices, loss = super().check(given), self.objective
        if loss.ipo and loss.loss_type not in ("dpo", "ipo"):
            raise ConfigError(with_hint(f"--ipo and --loss_type {loss.loss_type} are two losses", "drop one of them"))
        unused = [option for option in LOSSES_WITH if loss.name not in LOSSES_WITH[option]]
        return notices + without_effect(unused, given, f"the loss is {loss.name}")


class KtoSection(Section):
    """How answers are to move."""

    TITLE: ClassVar[str] = "objective"

    beta: float = Field(0.1, gt=0, description="the larger, the nearer to the reference")
    desirable_loss_weight: float = Field(1.0, gt=0, description="weight of an answer with the verdict true")
    undesirable_loss_weight: float = Field(1.0, gt=0, description="weight of an answer with the verdict false")


class KtoConfig(OfflineConfig):
    """Everything `kto` is told."""

    model: ComparedModelSection = Field(default_factory=ComparedModelSection)
    data: VerdictSection = Field(default_factory=VerdictSection)
    training: CautiousTrainingSection = Field(default_factory=CautiousTrainingSection)
    objective: KtoSection = Field(default_factory=KtoSection)


class PrmConfig(OfflineConfig):
    """Everything `prm` is told."""

    data: StepSection = Field(default_factory=StepSection)
    training: CautiousTrainingSection = Field(default_factory=CautiousTrainingSection)

    def check(self, given: Collection[str]) -> list[str]:
        """See `OfflineConfig`."""
        if self.data.placeholder_token is None:
            raise missing("placeholder_token", "prm needs to know where steps end", "name what follows each step")
        return super().check(given)
