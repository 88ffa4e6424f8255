"""`kto`: make answers that were judged good likelier, and those judged bad less likely."""

import sys
from typing import Any

from rlhf_cli.commands.offline import Command, matching
from rlhf_cli.config.offline import KtoConfig


def _encoder(config: KtoConfig, tokenizer: Any) -> Any:
    from rlhf_data.preference import UnpairedEncoder
    from rlhf_data.sft import SftEncoder

    sft = SftEncoder(tokenizer=tokenizer, **matching(SftEncoder, config.data))
    return UnpairedEncoder(sft=sft, label_key=config.data.label_key)


def _objective(config: KtoConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.kto import KtoObjective

    section = config.objective
    weights = {"desirable_weight": section.desirable_loss_weight, "undesirable_weight": section.undesirable_loss_weight}
    return KtoObjective(beta=section.beta, **weights)


main = Command(
    name="kto",
    description="Kahneman-Tversky optimization: learn from answers that were judged one by one, good or bad.",
    config=KtoConfig,
    encoder=_encoder,
    objective=_objective,
    metrics=tuple(f"kto/{name}" for name in ("loss", "kl", "desirable_reward", "undesirable_reward")),
)

if __name__ == "__main__":
    sys.exit(main())
