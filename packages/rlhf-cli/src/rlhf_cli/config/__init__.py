"""The configuration: a closed schema in sections, filled from defaults, a recipe, a TOML file and flags. Torch-free."""

from rlhf_cli.config.offline import DpoConfig, KdConfig, KtoConfig, OfflineConfig, PrmConfig, RmConfig, SftConfig
from rlhf_cli.config.ppo import PpoConfig

__all__ = [
    "DpoConfig",
    "KdConfig",
    "KtoConfig",
    "OfflineConfig",
    "PpoConfig",
    "PrmConfig",
    "RmConfig",
    "SftConfig",
]
