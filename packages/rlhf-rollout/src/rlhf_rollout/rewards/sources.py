"""What gives rewards, as plain data: functions, servers and reward models, each with a weight."""

from dataclasses import dataclass
from typing import Literal

from rlhf_data.errors import ConfigError, unknown

RewardKind = Literal["function", "server", "model"]
REWARD_KINDS: tuple[RewardKind, ...] = ("function", "server", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource:
    """One giver of rewards.

    Attributes:
        kind: "function", "server" or "model".
        targets: a function's `FILE.py` or `module:function`; the URLs of a server, equal to each other, which take
            turns; a model's folder or hub name.
        weight: its rewards are multiplied by that before they are added to the others'.
    """

    kind: RewardKind
    targets: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in REWARD_KINDS:
            raise ConfigError(unknown("kind of reward", self.kind, REWARD_KINDS))
        if not self.targets or (self.kind != "server" and len(self.targets) > 1):
            raise ConfigError(f"a reward {self.kind} with the targets {', '.join(self.targets) or 'none'}")

    @property
    def name(self) -> str:
        """Its last part, for people and for the names of metrics: a file's stem, a host, a folder's name."""
        target = self.targets[0].rstrip("/")
        if self.kind == "server":
            return target.partition("://")[2].partition("/")[0] or target
        return target.rpartition("/")[2].removesuffix(".py")
