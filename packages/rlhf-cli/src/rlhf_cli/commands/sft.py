"""`sft`: teach a model the completions of demonstrations."""

import sys
from typing import Any

from rlhf_cli.commands.offline import Command, matching
from rlhf_cli.config.offline import SftConfig


def make_encoder(config: SftConfig, tokenizer: Any) -> Any:
    """Return what makes an example of a row."""
    from rlhf_data.sft import SftEncoder

    options = matching(SftEncoder, config.data)
    return SftEncoder(tokenizer=tokenizer, pretrain=config.data.pretrain_mode, **options)


def _objective(config: SftConfig, tokenizer: Any) -> Any:
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
