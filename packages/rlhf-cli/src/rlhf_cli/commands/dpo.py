"""`dpo`: make the chosen answers of pairs likelier than the rejected ones: DPO, IPO, cDPO, SimPO, ORPO."""

import sys
from typing import Any

from rlhf_cli.commands.offline import Command, matching
from rlhf_cli.config.offline import LOSSES_WITH, DpoConfig, RmConfig


def make_encoder(config: DpoConfig | RmConfig, tokenizer: Any, margin_key: str | None = None) -> Any:
    """Return what makes a pair of a row."""
    from rlhf_data.preference import PreferenceEncoder

    options = matching(PreferenceEncoder, config.data) | {"margin_key": margin_key}
    return PreferenceEncoder(tokenizer=tokenizer, **options)


def _objective(config: DpoConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.preference import PreferenceObjective

    section = config.objective
    names = {"nll_loss_coef": "nll_coef", "simpo_gamma": "gamma"}
    options = {
        names.get(name, name): getattr(section, name)
        for name, losses in LOSSES_WITH.items()
        if section.name in losses and hasattr(section, name)
    }
    return PreferenceObjective(loss_type=section.name, beta=section.beta, **options)


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
