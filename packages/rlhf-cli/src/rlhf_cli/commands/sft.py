"""`sft`: teach a model the completions of demonstrations."""

import sys
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import SftConfig

if TYPE_CHECKING:
    from rlhf_data.sft import SftEncoder
    from rlhf_train.offline.supervised import SupervisedObjective


def make_encoder(config: SftConfig, tokenizer: Any) -> "SftEncoder":
    """Return what makes an example of a row."""
    from rlhf_data.sft import SftEncoder

    data = config.data
    return SftEncoder(
        tokenizer=tokenizer,
        input_key=data.input_key,
        output_key=data.output_key,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
        multiturn=data.multiturn,
        pretrain=data.pretrain_mode,
    )


def _objective(config: SftConfig, tokenizer: Any) -> "SupervisedObjective":
    from rlhf_train.offline.supervised import SupervisedObjective

    return SupervisedObjective()


main = Command(
    name="sft",
    description="Supervised fine-tuning: read prompts with completions, train the model on the completions, and write a"
    " Hugging Face model folder. One process; under torchrun, one process a GPU.",
    config=SftConfig,
    encoder=make_encoder,
    objective=_objective,
    metrics=("sft/loss", "sft/entropy"),
)

if __name__ == "__main__":
    sys.exit(main())
