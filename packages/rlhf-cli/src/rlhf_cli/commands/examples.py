"""The commands that train on fixed examples. Each entry has the encoder of its rows and the objective."""

from functools import partial
from typing import Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import (
    LOSSES_WITH,
    DpoConfig,
    KdConfig,
    KtoConfig,
    OfflineConfig,
    PrmConfig,
    RmConfig,
    SftConfig,
)
from rlhf_data.errors import ConfigError


def _encoder(kind: str, config: OfflineConfig, tokenizer: Any) -> Any:
    """Return the encoder of examples of a kind; see `make_encoder`."""
    from rlhf_data.examples.load import make_encoder  # imported here, so that --help does not wait for numpy

    data = config.data
    if kind == "preference" and not getattr(config.objective, "margin_loss", False):
        data = data.model_copy(update={"margin_key": None})
    return make_encoder(kind, data, tokenizer)


def _completions(config: SftConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.supervised import SupervisedObjective

    return SupervisedObjective()


def _teacher(config: KdConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.distillation import DistillationObjective

    return DistillationObjective(kd_coef=config.objective.kd_coef)


def _scores(config: RmConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.reward_model import RewardModelObjective

    return RewardModelObjective(use_margins=config.objective.margin_loss)


def _preferences(config: DpoConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.dpo import PreferenceObjective

    section = config.objective
    names = {"nll_loss_coef": "nll_coef", "simpo_gamma": "gamma"}
    options = {
        names.get(name, name): getattr(section, name)
        for name, losses in LOSSES_WITH.items()
        if section.name in losses and hasattr(section, name)
    }
    return PreferenceObjective(loss_type=section.name, beta=section.beta, **options)


def _judged_answers(config: KtoConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.kto import KtoObjective

    section = config.objective
    weights = {"desirable_weight": section.desirable_loss_weight, "undesirable_weight": section.undesirable_loss_weight}
    return KtoObjective(beta=section.beta, **weights)


def _judged_steps(config: PrmConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective

    ids = []
    for text in config.data.reward_tokens:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += found
        if len(found) != 1:
            message = f"--reward_tokens: {text!r} is {len(found)} tokens, not one"
            raise ConfigError(message, hint="use a character, such as + and -, or a special token")
    # The encoder refuses a placeholder of several tokens.
    placeholder = tokenizer(config.data.placeholder_token, add_special_tokens=False)["input_ids"]
    return ProcessRewardObjective(reward_tokens=tuple(ids), placeholder=placeholder[-1])


COMMANDS = {
    "sft": Command(
        name="sft",
        description="Supervised fine-tuning: read prompts with completions, train the model on the completions, and"
        " write a Hugging Face model folder. One process; under torchrun, one process per GPU.",
        config=SftConfig,
        encoder=partial(_encoder, "sft"),
        objective=_completions,
        prefix="sft",
        metrics=("loss", "entropy"),
    ),
    "rm": Command(
        name="rm",
        description="Reward model: train a model with a scalar head to score the chosen answer of each pair higher than"
        " the rejected one. The mean and standard deviation of its scores are stored with it.",
        config=RmConfig,
        encoder=partial(_encoder, "preference"),
        objective=_scores,
        prefix="rm",
        metrics=("loss", "accuracy", "margin", "score", "squared_score"),
    ),
    "dpo": Command(
        name="dpo",
        description="Direct preference optimization and, with --loss_type, related losses: make the chosen answer of"
        " each pair more likely than the rejected one.",
        config=DpoConfig,
        encoder=partial(_encoder, "preference"),
        objective=_preferences,
        prefix="preference",
        metrics=("loss", "accuracy", "margin", "nll", "chosen_reward", "rejected_reward"),
    ),
    "kto": Command(
        name="kto",
        description="Kahneman-Tversky optimization: learn from single answers that were judged good or bad.",
        config=KtoConfig,
        encoder=partial(_encoder, "unpaired"),
        objective=_judged_answers,
        prefix="kto",
        metrics=("loss", "kl", "desirable_reward", "undesirable_reward"),
    ),
    "prm": Command(
        name="prm",
        description="Process reward model: train a language model to judge each step of a solution.",
        config=PrmConfig,
        encoder=partial(_encoder, "process"),
        objective=_judged_steps,
        prefix="prm",
        metrics=("loss", "accuracy"),
    ),
    "kd": Command(
        name="kd",
        description="Knowledge distillation: train on the examples of `sft` and on a teacher's predictions for them.",
        config=KdConfig,
        encoder=partial(_encoder, "sft"),
        objective=_teacher,
        prefix="kd",
        metrics=("loss", "nll", "distillation"),
    ),
}
