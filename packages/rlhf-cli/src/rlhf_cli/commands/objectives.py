"""What the commands on fixed examples do with a row, and what they learn from it."""

from typing import Any

from rlhf_cli.config.offline import DpoConfig, KtoConfig, OfflineConfig, PrmConfig, RmConfig, SftConfig
from rlhf_data.errors import ConfigError
from rlhf_data.options.declare import matching
from rlhf_train.losses.preference_table import PREFERENCE_LOSSES


def encoder_of(kind: str, config: OfflineConfig, tokenizer: Any, reader: Any = None) -> Any:
    """Return the encoder of examples of a kind; see `make_encoder`. With `reader` they have images."""
    from rlhf_data.examples.load import make_encoder  # imported here, so that --help does not wait for numpy

    data = config.data
    if kind == "preference" and not getattr(config.objective, "margin_loss", False):
        data = data.model_copy(update={"margin_key": None})
    encoder = make_encoder(kind, data, tokenizer)
    if reader is None:
        return encoder
    from rlhf_data.examples.with_images import ImageEncoder

    return ImageEncoder(encoder=encoder, image_key=data.image_key, reader=reader)


def objective_of(config: OfflineConfig, tokenizer: Any, reader: Any = None) -> Any:
    """Return the objective of the command that has this configuration. `reader` reads the images of its examples.

    Raises ConfigError if --reward_tokens are no tokens.
    """
    # Imported here, so that --help does not wait for torch.
    from rlhf_train.offline.objectives.distillation import DistillationObjective
    from rlhf_train.offline.objectives.dpo import PreferenceObjective
    from rlhf_train.offline.objectives.kto import KtoObjective
    from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective
    from rlhf_train.offline.objectives.reward_model import RewardModelObjective
    from rlhf_train.offline.objectives.supervised import SupervisedObjective

    if isinstance(config, PrmConfig):
        # The encoder refuses a placeholder of several tokens.
        placeholder = tokenizer(config.data.placeholder_token, add_special_tokens=False)["input_ids"]
        return ProcessRewardObjective(reward_tokens=_verdict_ids(config, tokenizer), placeholder=placeholder[-1])
    if isinstance(config, DpoConfig):
        loss = config.objective.name
        given = matching(PreferenceObjective, config.objective) | {"loss_type": loss}
        row = PREFERENCE_LOSSES[loss]
        used = {name: value for name, value in given.items() if row.takes(name)}
        return PreferenceObjective(reader=reader, **used)
    kinds = {SftConfig: SupervisedObjective, RmConfig: RewardModelObjective, KtoConfig: KtoObjective}
    kind = kinds.get(type(config), DistillationObjective)
    return kind(reader=reader, **matching(kind, config.objective))


def _verdict_ids(config: PrmConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens of --reward_tokens."""
    ids = []
    for text in config.data.reward_tokens:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += found
        if len(found) != 1:
            message = f"--reward_tokens: {text!r} is {len(found)} tokens, not one"
            raise ConfigError(message, hint="use a character, such as + and -, or a special token")
    return tuple(ids)
