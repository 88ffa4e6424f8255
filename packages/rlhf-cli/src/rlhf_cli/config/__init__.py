"""The configuration: a closed schema in sections, filled from defaults, a recipe, a TOML file and flags. Torch-free."""

from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.config.sft import SftConfig

__all__ = ["PpoConfig", "SftConfig"]
