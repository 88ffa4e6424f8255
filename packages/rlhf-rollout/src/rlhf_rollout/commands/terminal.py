"""The user's terminal: what the commands say on it, while a log file receives what libraries write."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rlhf_data.errors import ConfigError
from rlhf_data.options.capture import captured, released
from rlhf_data.options.exits import with_flags
from rlhf_data.options.progress import Progress
from rlhf_data.safety import is_utf8, visible


class Terminal:
    """Writes results to stdout and everything else to stderr, also while the output of libraries is captured.

    Attributes:
        progress: shows what is being done while a person waits.
    """

    def __init__(self) -> None:
        self._streams: tuple[TextIO, TextIO] | None = None
        self.progress = Progress()

    @property
    def out(self) -> TextIO:
        """The user's stdout."""
        return self._streams[0] if self._streams else sys.stdout

    @property
    def err(self) -> TextIO:
        """The user's stderr."""
        return self._streams[1] if self._streams else sys.stderr

    def say(self, text: str) -> None:
        """Write a line to stderr."""
        self.progress.clear()
        print(with_flags(visible(text)), file=self.err, flush=True)

    def ask(self, prompt: str) -> str | None:
        """Return the line that the user types after `prompt`; None at the end of the input."""
        with ExitStack() as stack:
            if self._streams is not None:
                stack.enter_context(released(*self._streams))
            while True:
                try:
                    if is_utf8(line := input(prompt)):
                        return line
                except EOFError:
                    return None
                except UnicodeDecodeError:
                    pass
                print("this line is not UTF-8; type it again", file=sys.stderr)

    @contextmanager
    def captured(self, log: Path) -> Iterator[None]:
        """Append what libraries write to the file `log`, for the time of a `with` block.

        At the end the user is told the path if anything was written; otherwise an empty log is removed. Raises
        ConfigError when the log cannot be created.
        """
        made = [folder for folder in log.parents if not folder.exists()]
        with ExitStack() as stack:
            stack.callback(self._end_log, log, _size_bytes(log), made)  # runs last: the terminal is then free again
            try:
                self._streams = stack.enter_context(captured(log))
            except OSError as error:
                message = f"{log} cannot be written: {error.strerror}"
                raise ConfigError(message, hint="name a file in a folder that you may write to") from None
            self.progress = Progress(self.err)
            stack.callback(self._forget_streams)
            yield

    def _forget_streams(self) -> None:
        self.progress.clear()
        self.progress = Progress()
        self._streams = None

    def _end_log(self, log: Path, size_before_bytes: int, made: list[Path]) -> None:
        """Tell where the log is if it has grown; remove it and the folders `made` for it if they are empty."""
        size_bytes = _size_bytes(log)
        if size_bytes > size_before_bytes:
            self.say(f"messages of libraries and reward functions are in {log}")
            return
        if size_bytes:
            return
        with suppress(OSError):  # the log may never have been created
            log.unlink()
        for folder in made:
            with suppress(OSError):  # a folder that holds results is not empty, and stays
                folder.rmdir()


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


TERMINAL = Terminal()


def log_file(command: str, output_path: str | None) -> Path:
    """Return the log of a command: beside the file that it writes, or a new file in the folder for temporary files."""
    if output_path is not None:
        return Path(f"{output_path}.log")
    descriptor, path = tempfile.mkstemp(prefix=f"rlhf-{command}-", suffix=".log")
    os.close(descriptor)
    return Path(path)
