"""`rm`: train a reward model on pairs of answers."""

import sys
from typing import Any

from rlhf_cli.commands.dpo import make_encoder
from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import RmConfig


def _encoder(config: RmConfig, tokenizer: Any) -> Any:
    return make_encoder(config, tokenizer, margin_key=config.data.margin_key if config.objective.margin_loss else None)


def _objective(config: RmConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.reward_model import RewardModelObjective

    return RewardModelObjective(use_margins=config.objective.margin_loss)


main = Command(
    name="rm",
    description="Reward model: the model gets a scalar head that is to score the chosen answer of each pair above the"
    " rejected one. Mean and deviation of its scores are stored with it.",
    config=RmConfig,
    encoder=_encoder,
    objective=_objective,
    metrics=("rm/loss", "rm/accuracy", "rm/margin", "rm/score", "rm/squared_score"),
)

if __name__ == "__main__":
    sys.exit(main())
