"""The configurations of the commands that learn from fixed examples."""

from collections.abc import Collection

from rlhf_cli.config.data import (
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
from rlhf_data.checks import check_has_metric, missing, without_effect
from rlhf_data.errors import ConfigError
from rlhf_data.options import Config, Section, flag, one_of

RewardLoss = one_of(("sigmoid", "logexp"))
PreferenceLoss = one_of(("dpo", "ipo", "simpo", "orpo"))


class OfflineConfig(Config):
    """What every such command is told."""

    model: OfflineModelSection = OfflineModelSection()
    data: ExampleSection = ExampleSection()
    training: OfflineTrainingSection = OfflineTrainingSection()
    evaluation: OfflineEvaluationSection = OfflineEvaluationSection()
    output: OutputSection = OutputSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        found = []
        if self.model.pretrain is None:
            hint = "add --pretrain FOLDER_OR_NAME; --pretrain builtin is the tiny model that ships"
            found.append(missing("pretrain", "it names the model to start from", hint))
        if self.data.dataset is None:
            hint = "add --dataset FILE.jsonl and the keys of its rows"
            found.append(missing("dataset", "there must be examples", hint))
        return found

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        model, data, training, evaluation = self.model, self.data, self.training, self.evaluation
        from rlhf_data.sources import parse_probs  # takes a moment, which --help has not

        parse_probs("dataset_probs", data.dataset_probs)
        notices, budget = training.check(given), training.micro_batch_tokens
        if budget is not None and not model.packing_samples:
            message = "--micro_batch_tokens limits packed sequences only"
            raise ConfigError(message, hint="add --packing_samples, or use --micro_train_batch_size")
        held_out, best = data.eval_dataset, evaluation.best_metric_key
        notices += check_has_metric("eval_dataset", held_out, best, evaluation.eval_steps)
        notices += self.output.check(given)
        has_template = getattr(data, "apply_chat_template", True)
        return notices + without_effect(
            given,
            (not model.lora_rank, ["lora_alpha", "lora_dropout", "target_modules"], "--lora_rank is 0"),
            (budget is not None, ["micro_train_batch_size"], "--micro_batch_tokens takes its place"),
            (held_out is None, ["eval_steps", "eval_split"], "there is no --eval_dataset"),
            (not has_template, ["tokenizer_chat_template"], "--apply_chat_template is off"),
        )


class SftConfig(OfflineConfig):
    """Everything `sft` is told."""

    data: DemonstrationSection = DemonstrationSection()


class DistillationSection(Section, title="objective"):
    """What the student follows."""

    kd_coef: float = flag(0.4, "share of the teacher in the loss; the rest is the examples'", gt=0, le=1)


class KdConfig(SftConfig):
    """Everything `kd` is told."""

    model: TaughtModelSection = TaughtModelSection()
    objective: DistillationSection = DistillationSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        if self.model.teacher_model is not None:
            return super().missing()
        error = missing("teacher_model", "kd needs a model to learn from", "add --teacher_model FOLDER_OR_NAME")
        return [*super().missing(), error]


class RewardLossSection(Section, title="objective"):
    """How scores are to differ."""

    loss: RewardLoss = flag(
        "sigmoid", "sigmoid: -log sigmoid(chosen - rejected - margin); logexp: log(1 + exp(rejected - chosen))"
    )
    margin_loss: bool = flag(False, "scores are to differ by --margin_key at least")


class RmConfig(OfflineConfig):
    """Everything `rm` is told."""

    data: MarginPairSection = MarginPairSection()
    training: RewardTrainingSection = RewardTrainingSection()
    objective: RewardLossSection = RewardLossSection()

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        notices, has_margin = super().check(given), self.objective.margin_loss
        if has_margin and self.objective.loss == "logexp":
            raise ConfigError("--loss logexp has no margin", hint="drop --margin_loss, or use --loss sigmoid")
        return notices + without_effect(given, (not has_margin, ["margin_key"], "--margin_loss is off"))


class PreferenceSection(Section, title="objective"):
    """How likely the preferred answer is to be, against the other one."""

    loss_type: PreferenceLoss = flag("dpo", "dpo and ipo compare with a reference; simpo and orpo need none")
    ipo: bool = flag(False, "the same as --loss_type ipo")
    beta: float = flag(
        0.1, "the larger, the nearer to the reference; orpo: weight of the odds ratio; simpo: 2 or more", gt=0
    )
    label_smoothing: float = flag(0.0, "probability that a pair is the wrong way round (cDPO); of dpo", ge=0, lt=0.5)
    nll_loss_coef: float = flag(
        0.0, "weight of the preferred answer's negative log-likelihood; orpo always has it, with 1", ge=0
    )
    simpo_gamma: float = flag(0.5, "margin that simpo aims at", ge=0)
    length_average: bool = flag(False, "dpo and ipo compare means over tokens instead of sums")

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

    model: ComparedModelSection = ComparedModelSection()
    data: PairSection = PairSection()
    training: CautiousTrainingSection = CautiousTrainingSection()
    objective: PreferenceSection = PreferenceSection()

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        notices, loss = super().check(given), self.objective
        if loss.ipo and loss.loss_type not in ("dpo", "ipo"):
            raise ConfigError(f"--ipo and --loss_type {loss.loss_type} are two losses", hint="drop one of them")
        unused = [option for option in LOSSES_WITH if loss.name not in LOSSES_WITH[option]]
        return notices + without_effect(given, (True, unused, f"the loss is {loss.name}"))


class KtoSection(Section, title="objective"):
    """How answers are to move."""

    beta: float = flag(0.1, "the larger, the nearer to the reference", gt=0)
    desirable_loss_weight: float = flag(1.0, "weight of an answer with the verdict true", gt=0)
    undesirable_loss_weight: float = flag(1.0, "weight of an answer with the verdict false", gt=0)


class KtoConfig(OfflineConfig):
    """Everything `kto` is told."""

    model: ComparedModelSection = ComparedModelSection()
    data: VerdictSection = VerdictSection()
    training: CautiousTrainingSection = CautiousTrainingSection()
    objective: KtoSection = KtoSection()


class PrmConfig(OfflineConfig):
    """Everything `prm` is told."""

    data: StepSection = StepSection()
    training: CautiousTrainingSection = CautiousTrainingSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        if self.data.placeholder_token is not None:
            return super().missing()
        error = missing("placeholder_token", "prm needs to know where steps end", "name what follows each step")
        return [*super().missing(), error]
