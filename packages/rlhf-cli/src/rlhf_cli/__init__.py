"""The `rlhf` commands, and functions that start them from Python.

Nothing heavy is imported before the flags are parsed, so that --help is fast.
"""

from typing import TYPE_CHECKING

from rlhf_data import lazy_exports

if TYPE_CHECKING:
    from rlhf_cli.api import dpo as dpo
    from rlhf_cli.api import kd as kd
    from rlhf_cli.api import kto as kto
    from rlhf_cli.api import open_run as open_run
    from rlhf_cli.api import ppo as ppo
    from rlhf_cli.api import prm as prm
    from rlhf_cli.api import read_rollouts as read_rollouts
    from rlhf_cli.api import rm as rm
    from rlhf_cli.api import sft as sft
    from rlhf_cli.report.runs import Run as Run
    from rlhf_data.errors import ConfigError as ConfigError
    from rlhf_data.errors import RlhfError as RlhfError

__all__, __getattr__ = lazy_exports(__name__, __file__)
