"""Finds which models, data and rewards are on this machine, so that a dry run can check them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_cli.builtin import BUILTIN
from rlhf_cli.config.offline import OfflineConfig
from rlhf_cli.config.paths import is_data_path, model_path, parts, reward_path, user_path
from rlhf_data.hub_names import hub_name
from rlhf_data.options.command_line import Parsed
from rlhf_data.options.exits import with_flags

if TYPE_CHECKING:
    from rlhf_cli.console.views import Console


@dataclass(slots=True)
class Absent:
    """What a dry run cannot check because it is not on this machine.

    Attributes:
        unseen: what may exist elsewhere, such as on the hub; one phrase each.
        missing: files and folders that do not exist; one sentence each.
    """

    unseen: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.unseen) + len(self.missing)

    def models(self, flag: str, *names: str | None) -> bool:
        """Add the models that are not on this machine; return True if there are none."""
        num_before = len(self)
        for name in filter(None, names):
            path = model_path(name)
            if Path(path).is_dir():
                continue
            if hub_name(name) is None:
                self.missing.append(f"--{flag} {name}: there is no folder {path}")
            elif not _is_cached(path):
                self.unseen.append(f"--{flag} {name}: not on this machine, and a dry run does not ask the hub")
        return len(self) == num_before

    def data(self, flag: str, names: str | None) -> bool:
        """Add the sources of a comma-separated list that are not on this machine; return True if there are none."""
        num_before = len(self)
        for name in parts(names or ""):
            path = user_path(name.rpartition("@")[0] or name)
            if name == BUILTIN or path.exists() or user_path(name).exists():
                continue
            if is_data_path(name):
                self.missing.append(f"--{flag} {name}: there is no file {path}")
            else:
                self.unseen.append(f"--{flag} {name}: a dry run does not load data from the hub")
        return len(self) == num_before

    def rewards(self, flag: str, names: Iterable[str]) -> None:
        """Add the reward functions whose file does not exist."""
        for name in names:
            path = Path(reward_path(name).partition(".py")[0] + ".py")
            if ".py" in name and not path.is_file():
                self.missing.append(f"--{flag} {name}: there is no file {path}")


def _is_cached(name: str) -> bool:
    """Return whether the model is in this machine's cache of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    found = hub_name(name)
    if found is None:
        return False
    try:
        return isinstance(try_to_load_from_cache(found.repository, "config.json", revision=found.revision), str)
    except HFValidationError:
        return False


def absent_offline(config: OfflineConfig) -> tuple[Absent, bool]:
    """Return what a command on fixed examples names that is not on this machine, and whether its data is here."""
    absent = Absent()
    has_data = config.data.dataset is not None and absent.data("dataset", config.data.dataset)
    has_data &= absent.data("eval_dataset", config.data.eval_dataset)
    for flag in ("pretrain", "ref_pretrain", "teacher_model"):
        absent.models(flag, getattr(config.model, flag, None))
    return absent, has_data


def show_lacks(console: "Console", parsed: Parsed, absent: Absent) -> None:
    """Write what could not be checked, what is not available, and what is missing."""
    for title, texts in (
        ("not looked at", absent.unseen),
        ("cannot run yet", map(str, parsed.unavailable)),
        ("still missing", [*map(str, parsed.missing), *absent.missing]),
    ):
        texts = list(texts)
        if texts:
            console.result(f"\n{title}", "bold")
        for text in texts:
            console.result("  " + with_flags(text).replace("\n\n", "\n").replace("\n", "\n    "))
