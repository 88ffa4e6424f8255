"""The configurations of the commands that train on fixed examples."""

from collections.abc import Collection
from dataclasses import replace

from rlhf_cli.config.checkpoint import CheckpointSection, EvaluationSection
from rlhf_cli.config.data import (
    DemonstrationSection,
    ExampleSection,
    MarginPairSection,
    PairSection,
    StepSection,
    VerdictSection,
)
from rlhf_cli.config.model import (
    ComparedModelSection,
    ImageOfflineModelSection,
    OfflineModelSection,
    TaughtModelSection,
)
from rlhf_cli.config.output import OutputSection
from rlhf_cli.config.paths import run_folder_notices
from rlhf_cli.config.terms import Divergence, divergence_flag, jsd_beta_flag
from rlhf_cli.config.training import (
    CautiousTrainingSection,
    OfflineTrainingSection,
    RewardTrainingSection,
)
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import check_has_metric, lacking, once, without_effect
from rlhf_data.options.declare import Config, Section, flag, one_of
from rlhf_data.options.sections import ImageSection
from rlhf_data.rows.sources import parse_probs
from rlhf_train.losses.preference_table import DISCOPOP_TAU, PREFERENCE_LOSSES
from rlhf_train.specs import ModelSpec

RewardLoss = one_of(("sigmoid", "logexp"))
PreferenceLoss = one_of(PREFERENCE_LOSSES, {name: row.title for name, row in PREFERENCE_LOSSES.items()})


class OfflineConfig(Config):
    """The options that all of these commands have."""

    model: OfflineModelSection = OfflineModelSection()
    data: ExampleSection = ExampleSection()
    training: OfflineTrainingSection = OfflineTrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()

    @property
    def planned_model(self) -> ModelSpec:
        """How the trained model is computed, without its path. Raises ConfigError for options that contradict."""
        training = self.training
        spec = self.model.spec("", training.sharding, training.optimizer(training.learning_rate, num_updates=0))
        return replace(spec, images=self.images)

    @property
    def images(self) -> str:
        """How the trained model reads images; see `ModelSpec`."""
        return self.model.reads_images(self.data.image_key) if isinstance(self.data, ImageSection) else ""

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return self.model.missing() + self.data.missing("there must be examples to train on")

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        model = self.model
        data = self.data
        training = self.training
        evaluation = self.evaluation
        parse_probs("dataset_probs", data.dataset_probs)
        self.planned_model.check_passes(training.micro_batch_tokens)
        notices = run_folder_notices(self) + model.check(given) + training.check(given)
        held_out = data.eval_dataset
        best = evaluation.best_metric_key
        notices += check_has_metric("eval_dataset", held_out, best, evaluation.eval_steps)
        notices += self.checkpoint.check(given, self.output.save_path)
        notices += self.output.check(given)
        if isinstance(data, ImageSection):
            cached = "no cache, which does not see whether the files of images have changed"
            data.check_images((data.data_cache is not None, cached, "drop --data_cache"))
        has_template = getattr(data, "apply_chat_template", True)
        return notices + without_effect(
            given,
            (not self.images, ["freeze_visual_encoder"], "there is no --image_key"),
            (held_out is None, ["eval_steps", "eval_split"], "there is no --eval_dataset"),
            (not has_template, ["tokenizer_chat_template", "chat_template_kwargs"], "--apply_chat_template is off"),
        )


class SupervisedSection(Section, title="objective"):
    """The loss of fine-tuning."""

    dft: bool = flag(False, "weigh the loss of each token by its probability (dynamic fine-tuning)")


class SftConfig(OfflineConfig):
    """All options of `sft`."""

    model: ImageOfflineModelSection = ImageOfflineModelSection()
    data: DemonstrationSection = DemonstrationSection()
    objective: SupervisedSection = SupervisedSection()


class DistillationSection(Section, title="objective"):
    """How much the student learns from the teacher."""

    kd_coef: float = flag(0.4, "weight of the teacher's term in the loss; the examples' term has 1 - X", gt=0, le=1)
    kd_divergence: Divergence = divergence_flag("forward_kl", "their cross-entropy")
    jsd_beta: float = jsd_beta_flag()


class KdConfig(OfflineConfig):
    """All options of `kd`."""

    model: TaughtModelSection = TaughtModelSection()
    data: DemonstrationSection = DemonstrationSection()
    objective: DistillationSection = DistillationSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        hint = "add --teacher_model FOLDER_OR_NAME"
        return super().missing() + lacking(self.model, "teacher_model", "kd needs a model to learn from", hint)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        divergence = self.objective.kd_divergence
        unused = (divergence != "jsd", ["jsd_beta"], f"--kd_divergence is {divergence}")
        return super().check(given) + without_effect(given, unused)


class RewardLossSection(Section, title="objective"):
    """The loss of a reward model."""

    loss: RewardLoss = flag(
        "sigmoid", "sigmoid: -log sigmoid(chosen - rejected - margin); logexp: log(1 + exp(rejected - chosen))"
    )
    margin_loss: bool = flag(False, "the scores of a pair must differ by at least its margin, --margin_key")


class RmConfig(OfflineConfig):
    """All options of `rm`."""

    model: ImageOfflineModelSection = ImageOfflineModelSection()
    data: MarginPairSection = MarginPairSection()
    training: RewardTrainingSection = RewardTrainingSection()
    objective: RewardLossSection = RewardLossSection()

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        notices = super().check(given)
        has_margin = self.objective.margin_loss
        if has_margin and self.objective.loss == "logexp":
            raise ConfigError("--loss logexp has no margin", hint="drop --margin_loss, or use --loss sigmoid")
        return notices + without_effect(given, (not has_margin, ["margin_key"], "--margin_loss is off"))


class ReferenceStrengthSection(Section, title="objective"):
    """How closely the model is held to the reference."""

    beta: float = flag(
        0.1,
        "larger values keep the model closer to the reference (`dpo --loss_type orpo`: weight of the odds ratio;"
        " `simpo`: scale of the reward, 2 or more)",
        gt=0,
    )


class PreferenceSection(ReferenceStrengthSection):
    """The loss of preference optimization."""

    loss_type: PreferenceLoss = flag(
        "dpo",
        "; ".join(f"{row.name}: {row.title}" for row in PREFERENCE_LOSSES.values())
        + "; simpo, orpo and cpo need no reference model",
    )
    ipo: bool = flag(False, "the same as --loss_type ipo")
    label_smoothing: float = flag(
        0.0,
        "probability that the two answers of a pair are swapped, with dpo (conservative DPO), robust and exo_pair",
        ge=0,
        lt=0.5,
    )
    nll_loss_coef: float = flag(
        0.0, "weight of the negative log-likelihood of the preferred answer; always 1 with orpo and cpo", ge=0
    )
    simpo_gamma: float = flag(0.5, "target margin of simpo between the two rewards", ge=0)
    discopop_tau: float = flag(
        DISCOPOP_TAU, "how soon discopop turns from one of its two losses to the other", gt=0, lt=1
    )
    length_average: bool = flag(False, "losses with a reference compare mean log-probs per token instead of sums")

    @property
    def name(self) -> str:
        """The name of the loss, whether --ipo or --loss_type set it."""
        return "ipo" if self.ipo else self.loss_type


class DpoConfig(OfflineConfig):
    """All options of `dpo`."""

    model: ComparedModelSection = ComparedModelSection()
    data: PairSection = PairSection()
    training: CautiousTrainingSection = CautiousTrainingSection()
    objective: PreferenceSection = PreferenceSection()

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        notices = super().check(given)
        loss = self.objective
        if loss.ipo and loss.loss_type not in ("dpo", "ipo"):
            raise ConfigError(f"--ipo and --loss_type {loss.loss_type} are two losses", hint="drop one of them")
        row = PREFERENCE_LOSSES[loss.name]
        row.check_smoothing(loss.label_smoothing)
        unused = [option for option in given if not row.takes(option)]
        return once(notices + without_effect(given, (True, unused, f"the loss is {loss.name}")))


class KtoSection(ReferenceStrengthSection):
    """The weights of good and bad answers."""

    desirable_loss_weight: float = flag(1.0, "weight of answers with the verdict true", gt=0)
    undesirable_loss_weight: float = flag(1.0, "weight of answers with the verdict false", gt=0)


class KtoConfig(OfflineConfig):
    """All options of `kto`."""

    model: ComparedModelSection = ComparedModelSection()
    data: VerdictSection = VerdictSection()
    training: CautiousTrainingSection = CautiousTrainingSection()
    objective: KtoSection = KtoSection()


class PrmConfig(OfflineConfig):
    """All options of `prm`."""

    data: StepSection = StepSection()
    training: CautiousTrainingSection = CautiousTrainingSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        hint = "add --placeholder_token TEXT, the text that follows each step"
        return super().missing() + lacking(self.data, "placeholder_token", "prm needs to know where steps end", hint)
