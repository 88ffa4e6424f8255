"""The checkpoints of a run: folders that are whole or not there. Torch-free.

    CHECKPOINTS/step-20/manifest.json      step, metric, and size and SHA-256 of every other file; written last
    CHECKPOINTS/step-20/state.json         the state of the driver, which may have files beside it; see `saved.state`
    CHECKPOINTS/step-20/actor-0-of-2.safetensors   weights and optimizer of a model, one file per rank

A checkpoint is written into `.step-20.partial` and renamed after every file is on the disk.
"""

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_data.errors import CheckpointError
from rlhf_data.rows.sources import sha256
from rlhf_train.run.saved.arrays import damaged
from rlhf_train.run.saved.state import FORMAT, READ_FORMATS, UNREADABLE, read_state, write_state

FOLDER = "checkpoints"  # within the folder of a run
WRITER = "continue it with the version that wrote it"  # a hint
MANIFEST = "manifest.json"
RECEIPT = ".receipt.json"  # ends the name of the file in which a rank tells that its own file is on the disk
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When the state of a run is saved, and where.

    Attributes:
        folder: of all checkpoints of the run; "" for the folder `checkpoints` in the run's folder.
        every: steps (updates of an offline run) between two checkpoints; 0 saves one only when the run is interrupted
            or fails.
        max_num, max_bytes: see `Checkpoints`.
        full: save what a run needs to go on; without it, checkpoints hold the model only.
        hf_model: save the policy, or the model of an offline run, as a Hugging Face folder in each checkpoint.
        resume: continue from the newest checkpoint in the folder, if there is one.
        before: continue only from a checkpoint of an earlier step than this.
        template_clock: the time that the chat template writes, which a run that continues keeps; see `recorded_clock`.
    """

    folder: str = ""
    every: int = 0
    max_num: int = 3
    max_bytes: float = math.inf
    full: bool = True
    hf_model: bool = False
    resume: bool = False
    before: float = math.inf
    template_clock: datetime | None = None

    def home(self, run_folder: str | Path) -> Path:
        """Return the folder of all checkpoints of the run in `run_folder`."""
        return Path(self.folder or Path(run_folder) / FOLDER)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk.

    Attributes:
        path: its folder.
        step: steps (or updates of an offline run) that were complete.
        metric: value of the metric that decides the best checkpoint; None if it was not known.
        lowest: whether lower values of it are better.
        files: name to size in bytes and SHA-256 of its files.
        version: of the format of its state.
    """

    path: Path
    step: int
    metric: float | None
    lowest: bool
    files: Mapping[str, tuple[int, str]]
    version: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())

    def state(self) -> dict[str, Any]:
        """Return the state that the driver saved. Raises CheckpointError when it cannot be read."""
        return read_state(self.path, self.version)

    def problems(self, *, content: bool = True) -> list[str]:
        """Return one sentence per file that is missing or has changed since it was written.

        Reads all files, or with `content` False only their sizes.
        """
        found = []
        for name, (size, digest) in self.files.items():
            path = self.path / name
            try:
                if not path.is_file() or not path.resolve().is_relative_to(self.path.resolve()):
                    found.append(f"{name} is missing")
                elif path.stat().st_size != size:
                    found.append(f"{name} has {path.stat().st_size} bytes, not {size}")
                elif content and sha256(path) != digest:
                    found.append(f"{name} has changed since it was written")
            except OSError as error:
                found.append(f"{name} cannot be read: {error.strerror}")
        return found


class Checkpoints:
    """The folder with the checkpoints of one run.

    Args:
        folder: of all checkpoints; created with the first one.
        max_num: newest checkpoints to keep; the one with the best metric is kept besides.
        max_bytes: largest size of all checkpoints together. The newest one is kept even if it is larger.
        lowest: whether lower metrics are better.
    """

    def __init__(self, folder: Path, *, max_num: int = 3, max_bytes: float = math.inf, lowest: bool = False) -> None:
        self.folder = folder
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._lowest = lowest

    def begin(self, step: int) -> Path:
        """Return an empty folder for the files of a new checkpoint. Raises CheckpointError if it cannot be written."""
        staging = self.folder / f".step-{step}.partial"
        try:
            for path in self.folder.glob(".step-*"):  # of a run that was killed while it wrote or removed them
                shutil.rmtree(path, ignore_errors=path != staging)
            staging.mkdir(parents=True)
        except OSError as error:
            raise cannot_save(staging, error) from error
        return staging

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        ranks: Collection[str],
        metric: float | None,
        ended: threading.Event | None = None,
    ) -> Checkpoint:
        """Put a checkpoint in force, once all ranks have written their files, and remove older ones.

        Blocks until then, so call it on a thread.

        Args:
            step: as given to `begin`.
            state: of the driver; see `write_state`.
            ranks: names of the files that the ranks write; see `write_receipt`.
            metric: see `Checkpoint`.
            ended: set by another thread once no rank writes any more, because all have ended or died.

        Raises:
            CheckpointError: a rank, or this process, could not write.
        """
        staging = self.folder / f".step-{step}.partial"
        target = self.folder / f"step-{step}"
        try:
            files = {name: _await_receipt(staging / name, ended or threading.Event()) for name in ranks}
            write_state(staging, state)
            for path in sorted(staging.rglob("*")):
                name = str(path.relative_to(staging))
                if name in files or name.endswith(RECEIPT):
                    continue
                if path.is_dir():
                    flush(path)
                elif path.is_file():
                    files[name] = _flushed(path)
            for name in ranks:
                (staging / (name + RECEIPT)).unlink()
            manifest = {"format": FORMAT, "step": step, "metric": metric, "lowest": self._lowest, "files": files}
            (staging / MANIFEST).write_bytes(json.dumps(manifest).encode())
            flush(staging / MANIFEST)
            flush(staging)
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
            flush(self.folder)
            for old in superfluous(self.all(), self._max_num, self._max_bytes):
                if old.path != target:  # folders of later steps may belong to another run
                    _remove(old.path)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(staging, ignore_errors=True)  # the other files of the run need the room on a full disk
            raise error if isinstance(error, CheckpointError) else cannot_save(target, error) from error
        return read_checkpoint(target)

    def all(self) -> list[Checkpoint]:
        """Return all checkpoints with a readable manifest, the oldest first. Their files are not checked."""
        found = []
        for path in self.folder.glob("step-*"):
            with suppress(CheckpointError):
                found.append(read_checkpoint(path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest_whole(self, warn: Callable[[str], None], before: float = math.inf) -> Checkpoint | None:
        """Return the newest checkpoint of a step `before` that whose files are all as they were written, or None.

        `warn` is called for each newer one with what is wrong with it.
        """
        for path in sorted(self.folder.glob("step-*"), key=step_of, reverse=True):
            if step_of(path) >= before:
                continue
            try:
                checkpoint = read_checkpoint(path)
                problems = checkpoint.problems()
            except CheckpointError as error:
                problems = [str(error).partition("\n")[0]]
            if not problems:
                return checkpoint
            warn(f"the checkpoint {path} is skipped: {'; '.join(problems[:3])}")
        return None


def superfluous(found: Sequence[Checkpoint], max_num: int, max_bytes: float = math.inf) -> list[Checkpoint]:
    """Return the checkpoints beyond the limits of `Checkpoints`, except for the best one. `found` begins with the
    oldest."""
    if not found:
        return []
    *older, newest = found
    scored = [one for one in found if one.metric is not None and not math.isnan(one.metric)]
    best = max(scored, key=lambda one: (-one.metric if one.lowest else one.metric, one.step), default=newest)
    used = newest.size_bytes + (best.size_bytes if best is not newest else 0)
    num = 1
    gone = []
    for checkpoint in reversed(older):
        if checkpoint is best:
            continue
        num += 1
        used += checkpoint.size_bytes
        if num > max_num or used > max_bytes:
            gone.append(checkpoint)
            used -= checkpoint.size_bytes
    return gone


def folders(home: Path) -> list[Path]:
    """Return the folders of all checkpoints in `home`, whole or not, the oldest first."""
    return sorted((path for path in home.glob("step-*") if step_of(path) >= 0), key=step_of)


def recorded_clock(folder: Path) -> datetime | None:
    """Return the time that the chat template writes in the run whose checkpoints are in `folder`.

    None if the template writes no time, or no checkpoint can be read.
    """
    for path in sorted(folder.glob("step-*"), key=step_of, reverse=True):
        with suppress(CheckpointError, ValueError, TypeError):
            text = read_checkpoint(path).state().get("template_clock")
            return None if text is None else datetime.fromisoformat(text)
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises CheckpointError when the manifest is missing or cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version = manifest["format"]
        if version in READ_FORMATS:
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
            metric = manifest["metric"]
            value = None if metric is None else float(metric)
            return Checkpoint(path, int(manifest["step"]), value, bool(manifest["lowest"]), files, version)
    except UNREADABLE as error:
        raise damaged(path / MANIFEST, f"cannot be read: {error}") from error
    message = f"{path} has format {version}; this version reads formats {', '.join(map(str, READ_FORMATS))}"
    raise CheckpointError(message, hint=WRITER)


def write_receipt(path: Path, error: Exception | None = None) -> None:
    """Tell the process that waits in `Checkpoints.commit` that the file `path` is on the disk, or why it is not.

    An empty receipt stands for an `error` whose text does not fit on the disk. Raises OSError when the file cannot be
    flushed, or the receipt of a file that is on the disk cannot be written.
    """
    receipt: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    if error is None:
        size, digest = _flushed(path)
        receipt = {"size": size, "sha256": digest}
    draft = path.with_name(f"{path.name}{RECEIPT}.draft")
    try:
        draft.write_bytes(json.dumps(receipt).encode())
    except OSError:
        if error is None or not draft.exists():
            raise
        os.truncate(draft, 0)
    draft.rename(path.with_name(path.name + RECEIPT))


def _flushed(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file once it is on the disk."""
    failed: list[OSError] = []

    def wait() -> None:
        try:
            flush(path)
        except OSError as error:
            failed.append(error)

    beside = threading.Thread(target=wait)  # an executor takes no work once the interpreter ends
    beside.start()
    digest = sha256(path)  # reads what memory still holds of it
    beside.join()
    if failed:
        raise failed[0]
    return path.stat().st_size, digest


def _await_receipt(path: Path, ended: threading.Event) -> tuple[int, str]:
    """Return size and SHA-256 of a rank's file once it is on the disk."""
    receipt = path.with_name(path.name + RECEIPT)
    while not receipt.exists():
        if not path.parent.is_dir():
            raise cannot_save(path, "the folder was removed")
        if ended.wait(_POLL_S) and receipt.name not in os.listdir(path.parent):  # NFS remembers what did not exist
            raise cannot_save(path, f"the rank that writes it has ended; {_free(path.parent)}")
    content = receipt.read_bytes()
    if not content:
        raise cannot_save(path, f"there is no room even for the reason; {_free(path.parent)}")
    told = json.loads(content)
    if "error" in told:
        raise cannot_save(path, told["error"])
    return int(told["size"]), str(told["sha256"])


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB are free there"


def check_rows(saved: str, own: str) -> None:
    """Raise CheckpointError if a run that continues has other rows. Both are a `Counts.digest`, or "" if unknown."""
    if saved and own and saved != own:
        message = f"the run to continue was trained on other rows: their digest was {saved}, and that of these is {own}"
        hint = "name the rows that it had, with the same keys and in the same order; or train on these rows from its"
        hint += " weights, in a new run: ``pretrain`` with the folder of its model, and another ``save_path``"
        raise CheckpointError(message, hint=hint)


def cannot_save(path: object, error: object) -> CheckpointError:
    """Return the error for a checkpoint that cannot be written."""
    hint = "free space there, or name another folder with ``CheckpointSpec.folder``"
    return CheckpointError(f"{path} cannot be written: {error}", hint=hint)


def _remove(path: Path) -> None:
    """Remove a checkpoint. If this process is killed meanwhile, `Checkpoints.begin` removes the rest."""
    removed = path.with_name(f".{path.name}.removed")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)  # the new checkpoint counts, whether or not an old one can go


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(path: Path) -> int:
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1
