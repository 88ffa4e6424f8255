"""The configuration of each command: typed sections of options. Does not need torch."""

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
