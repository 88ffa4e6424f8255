"""`kd`: teach a model the distributions of a larger one, beside the completions of demonstrations."""

import sys
from typing import Any

from rlhf_cli.commands.offline import Command
from rlhf_cli.commands.sft import make_encoder
from rlhf_cli.config.offline import KdConfig


def _objective(config: KdConfig, tokenizer: Any) -> Any:
    from rlhf_train.offline.distillation import DistillationObjective

    return DistillationObjective(kd_coef=config.objective.kd_coef)


main = Command(
    name="kd",
    description="Knowledge distillation: the examples of `sft`, on whose completions the model follows a teacher.",
    config=KdConfig,
    encoder=make_encoder,
    objective=_objective,
    metrics=("kd/loss", "kd/nll", "kd/distillation"),
)

if __name__ == "__main__":
    sys.exit(main())
