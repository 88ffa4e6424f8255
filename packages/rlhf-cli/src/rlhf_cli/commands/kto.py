"""`kto`: make answers that were judged good likelier, and those judged bad less likely."""

import sys
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import KtoConfig

if TYPE_CHECKING:
    from rlhf_data.preference import UnpairedEncoder
    from rlhf_train.offline.kto import KtoObjective


def _encoder(config: KtoConfig, tokenizer: Any) -> "UnpairedEncoder":
    from rlhf_data.preference import UnpairedEncoder
    from rlhf_data.sft import SftEncoder

    data = config.data
    sft = SftEncoder(
        tokenizer=tokenizer,
        input_key=data.input_key,
        output_key=data.output_key,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
    )
    return UnpairedEncoder(sft=sft, label_key=data.label_key)


def _objective(config: KtoConfig, tokenizer: Any) -> "KtoObjective":
    from rlhf_train.offline.kto import KtoObjective

    section = config.objective
    return KtoObjective(
        beta=section.beta,
        desirable_weight=section.desirable_loss_weight,
        undesirable_weight=section.undesirable_loss_weight,
    )


main = Command(
    name="kto",
    description="Kahneman-Tversky optimization: learn from answers that were judged one by one, good or bad.",
    config=KtoConfig,
    encoder=_encoder,
    objective=_objective,
    metrics=tuple(f"kto/{name}" for name in ("loss", "kl", "desirable_reward", "undesirable_reward")),
    num_shown=4,
)

if __name__ == "__main__":
    sys.exit(main())
