"""Dropout is off in online training, and so is the noise of routers."""

import torch


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """Disable dropout, and the jitter noise of routers of experts, in `model` permanently, and return the model.

    Old log-probs come from eval mode, and the engine has neither. With one of them in training, the ratio of the first
    update would not be 1. Running updates in eval mode is no alternative: gradient checkpointing needs train mode.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
