"""`dpo`: make the chosen answers of pairs likelier than the rejected ones: DPO, IPO, cDPO, SimPO, ORPO."""

import sys
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.config.offline import DpoConfig, RmConfig

if TYPE_CHECKING:
    from rlhf_data.preference import PreferenceEncoder
    from rlhf_train.offline.preference import PreferenceObjective


def make_encoder(config: DpoConfig | RmConfig, tokenizer: Any, margin_key: str | None = None) -> "PreferenceEncoder":
    """Return what makes a pair of a row."""
    from rlhf_data.preference import PreferenceEncoder

    data = config.data
    return PreferenceEncoder(
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=margin_key,
        apply_chat_template=data.apply_chat_template,
        input_template=data.input_template,
    )


def _objective(config: DpoConfig, tokenizer: Any) -> "PreferenceObjective":
    from rlhf_train.offline.preference import PreferenceObjective

    section = config.objective
    options = {
        "label_smoothing": section.label_smoothing,
        "nll_loss_coef": section.nll_loss_coef,
        "simpo_gamma": section.simpo_gamma,
        "length_average": section.length_average,
    }
    names = {"nll_loss_coef": "nll_coef", "simpo_gamma": "gamma"}
    used = {names.get(name, name): value for name, value in options.items() if name not in section.unused()}
    return PreferenceObjective(loss_type=section.name, beta=section.beta, **used)


main = Command(
    name="dpo",
    description="Direct preference optimization, and its relatives by --loss_type: the chosen answer of each pair is to"
    " become likelier than the rejected one.",
    config=DpoConfig,
    encoder=make_encoder,
    objective=_objective,
    metrics=tuple(
        f"preference/{name}" for name in ("loss", "accuracy", "margin", "nll", "chosen_reward", "rejected_reward")
    ),
)

if __name__ == "__main__":
    sys.exit(main())
