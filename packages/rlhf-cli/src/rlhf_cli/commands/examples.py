"""The commands that train on fixed examples. Each entry has the kind of its examples and the metrics that it shows."""

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import DpoConfig, KdConfig, KtoConfig, PrmConfig, RmConfig, SftConfig

COMMANDS = {
    "sft": Command(
        name="sft",
        description="Supervised fine-tuning: read prompts with completions, train the model on the completions, and"
        " write a Hugging Face model folder. One process; under torchrun, one process per GPU.",
        config=SftConfig,
        kind="sft",
        prefix="sft",
        metrics=("loss", "entropy"),
    ),
    "rm": Command(
        name="rm",
        description="Reward model: train a model with a scalar head to score the chosen answer of each pair higher than"
        " the rejected one. The mean and standard deviation of its scores are stored with it.",
        config=RmConfig,
        kind="preference",
        prefix="rm",
        metrics=("loss", "accuracy", "margin", "score", "squared_score"),
    ),
    "dpo": Command(
        name="dpo",
        description="Direct preference optimization and, with --loss_type, related losses: make the chosen answer of"
        " each pair more likely than the rejected one.",
        config=DpoConfig,
        kind="preference",
        prefix="preference",
        metrics=("loss", "accuracy", "margin", "nll", "chosen_reward", "rejected_reward"),
    ),
    "kto": Command(
        name="kto",
        description="Kahneman-Tversky optimization: learn from single answers that were judged good or bad.",
        config=KtoConfig,
        kind="unpaired",
        prefix="kto",
        metrics=("loss", "kl", "desirable_reward", "undesirable_reward"),
    ),
    "prm": Command(
        name="prm",
        description="Process reward model: train a language model to judge each step of a solution.",
        config=PrmConfig,
        kind="process",
        prefix="prm",
        metrics=("loss", "accuracy"),
    ),
    "kd": Command(
        name="kd",
        description="Knowledge distillation: train on the examples of `sft` and on a teacher's predictions for them.",
        config=KdConfig,
        kind="sft",
        prefix="kd",
        metrics=("loss", "nll", "distillation"),
    ),
}
