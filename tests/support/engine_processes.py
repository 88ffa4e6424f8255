"""The processes that a process has started for engines."""

from pathlib import Path

from rlhf_rollout.workers.leftovers import MARK


def started_by(process_id: int) -> dict[int, str]:
    """Return the command lines of the processes that a process has started for workers and engines, by their ids."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if any(one.startswith(f"{MARK}={process_id}:".encode()) for one in variables):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is another user's
            continue
    return found
