"""`prm`: train a process reward model, which says after each step of a solution whether the step is good."""

import sys
from typing import Any

from rlhf_cli.commands.offline import Command, matching
from rlhf_cli.config.offline import PrmConfig
from rlhf_data.errors import ConfigError, with_hint


def _encoder(config: PrmConfig, tokenizer: Any) -> Any:
    from rlhf_data.preference import ProcessEncoder

    options = matching(ProcessEncoder, config.data)
    return ProcessEncoder(tokenizer=tokenizer, placeholder=config.data.placeholder_token, **options)


def _objective(config: PrmConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.process_reward import ProcessRewardObjective

    ids = []
    for text in config.data.reward_tokens:
        ids += (found := tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(found) != 1:
            message = f"--reward_tokens: {text!r} is {len(found)} tokens, not one"
            raise ConfigError(with_hint(message, "use a character, such as + and -, or a special token"))
    return ProcessRewardObjective(reward_tokens=tuple(ids))


main = Command(
    name="prm",
    description="Process reward model: a language model that writes its verdict after each step of a solution.",
    config=PrmConfig,
    encoder=_encoder,
    objective=_objective,
    metrics=("prm/loss", "prm/accuracy"),
)

if __name__ == "__main__":
    sys.exit(main())
