"""Keeps what libraries write away from the terminal, in a log file of the run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rlhf_cli.config.paths import LOG_FILE
from rlhf_data.errors import RlhfError
from rlhf_data.options import capture


@contextmanager
def captured(folder: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Send what this process and its children write to `folder`/log.txt; see `rlhf_data.options.capture.captured`.

    Several ranks append to one file. The log is removed at the end when nothing else lies in the folder, and so are the
    folders that were made for it, if they are empty. After an unexpected error all stay.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with capture.captured(folder / LOG_FILE) as streams:
            try:
                yield streams
            except Exception as error:
                capture.keep(f"error: {error if isinstance(error, RlhfError) else repr(error)}")
                raise
    except (RlhfError, KeyboardInterrupt):
        _remove_unused(folder, made)
        raise
    else:
        _remove_unused(folder, made)


def _remove_unused(folder: Path, made: list[Path]) -> None:
    if [path.name for path in folder.iterdir()] == [LOG_FILE]:
        (folder / LOG_FILE).unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):  # another run may write there by now
                path.rmdir()
