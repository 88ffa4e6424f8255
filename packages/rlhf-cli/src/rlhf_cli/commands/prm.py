"""`prm`: train a process reward model, which says after each step of a solution whether the step is good."""

import sys
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import PrmConfig
from rlhf_data.errors import ConfigError, with_hint

if TYPE_CHECKING:
    from rlhf_data.preference import ProcessEncoder
    from rlhf_train.offline.process_reward import ProcessRewardObjective


def _encoder(config: PrmConfig, tokenizer: Any) -> "ProcessEncoder":
    from rlhf_data.preference import ProcessEncoder

    data = config.data
    assert data.placeholder_token
    return ProcessEncoder(
        tokenizer=tokenizer,
        placeholder=data.placeholder_token,
        input_key=data.input_key,
        label_key=data.label_key,
        reward_tokens=data.reward_tokens,
        input_template=data.input_template,
    )


def _objective(config: PrmConfig, tokenizer: Any) -> "ProcessRewardObjective":
    from rlhf_train.offline.process_reward import ProcessRewardObjective

    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in config.data.reward_tokens]
    for text, found in zip(config.data.reward_tokens, ids, strict=True):
        if len(found) != 1:
            message = f"--reward_tokens: {text!r} is {len(found)} tokens, not one"
            raise ConfigError(with_hint(message, "use a character, such as + and -, or a special token"))
    return ProcessRewardObjective(reward_tokens=(ids[0][0], ids[1][0]))


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
