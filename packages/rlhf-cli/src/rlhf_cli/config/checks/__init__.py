"""What concerns several options, a file a concern: what cannot work is an error, an option without effect a notice."""

from rlhf_cli.config.checks.messages import missing, once, without_effect
from rlhf_cli.config.checks.offline import check_offline
from rlhf_cli.config.checks.placement import on_cpu, with_places
from rlhf_cli.config.checks.ppo import check_ppo

__all__ = ["check_offline", "check_ppo", "missing", "on_cpu", "once", "with_places", "without_effect"]
