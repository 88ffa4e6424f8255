"""The live line against a clock that the tests set by hand, on a terminal and in a pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from record_testing import ManualClock
from rlhf_data.options.progress import Progress, duration


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def pipe(clock):
    """A progress whose thread finds nothing to say: the tests call `beat`."""
    stream = io.StringIO()
    return stream, Progress(stream, clock=clock)


@pytest.fixture
def terminal(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    return stream, Progress(stream, clock=clock)


def test_a_pipe_gets_a_line_at_once_and_one_after_each_silence(pipe, clock):
    stream, progress = pipe
    progress.show("loading the model")
    for _ in range(45):
        clock.now += 1
        progress.beat()
    progress.clear()
    assert stream.getvalue().splitlines() == [
        "loading the model ...",
        "loading the model: 20 s",
        "loading the model: 40 s",
    ]


def test_what_is_not_announced_is_said_after_a_silence_only(pipe, clock):
    stream, progress = pipe
    progress.show("training", announce=False)
    clock.now += 19
    progress.beat()
    assert stream.getvalue() == ""
    clock.now += 1
    progress.beat()
    assert stream.getvalue() == "training: 20 s\n"


def test_time_left_comes_from_the_parts_that_are_done(pipe, clock):
    stream, progress = pipe
    progress.show("generating", done=0, total=8)
    clock.now += 20
    progress.beat()
    progress.show("generating", done=2, total=8)
    clock.now += 20
    progress.beat()
    # 40 s for 2 parts: 120 s for the other 6.
    assert stream.getvalue().splitlines()[1:] == [
        "generating: 0/8, 20 s",
        "generating: 2/8, 40 s, about 2 min 0 s left",
    ]


def test_time_left_that_the_caller_knows_counts_until_it_is_over(pipe, clock):
    stream, progress = pipe
    progress.show("step 2/3: training", ends_in_s=30)
    for _ in range(2):
        clock.now += 20
        progress.beat()
    progress.show("step 2/3: training", done=1, total=3, ends_in_s=-10)
    clock.now += 20
    progress.beat()
    assert stream.getvalue().splitlines()[1:] == [
        "step 2/3: training: 20 s, about 10 s left",
        "step 2/3: training: 40 s",
        "step 2/3: training: 1/3, 1 min 0 s, about 2 min 0 s left",
    ]


def test_a_terminal_gets_one_line_that_is_drawn_again_and_removed(terminal, clock):
    stream, progress = terminal
    progress.show("loading")
    clock.now += 3
    progress.beat()
    drawn = stream.getvalue()
    assert "\n" not in drawn
    lines = drawn.split("\r\x1b[2K")[1:]
    assert lines[-1].endswith("loading  3 s")
    assert ("/-\\|" * 99).startswith("".join(line[0] for line in lines))  # a bar that turns
    progress.clear()
    assert stream.getvalue().endswith("\r\x1b[2K")
    size = len(stream.getvalue())
    progress.beat()
    progress.clear()
    assert len(stream.getvalue()) == size  # nothing is left to draw or to remove


def screen(text):
    """Return the lines that a terminal shows after it got `text`."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
            assert row >= 0
        else:
            assert not part.startswith("\x1b"), part
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def test_lines_above_the_live_line_are_drawn_and_removed_with_it(terminal, clock):
    stream, progress = terminal
    stream.write("before\n")
    progress.show("step 1", above=["reward 0.5", "y" * 80])
    clock.now += 2
    progress.beat()
    shown = screen(stream.getvalue())
    assert [*shown[:3], shown[3][2:]] == ["before", "reward 0.5", "y" * 59, "step 1  2 s"]
    progress.show("step 2", above=["reward 0.6"])
    shown = screen(stream.getvalue())
    assert [*shown[:2], shown[2][2:]] == ["before", "reward 0.6", "step 2  0 s"] and len(shown) == 3
    with progress.paused():
        assert screen(stream.getvalue()) == ["before", ""]
        stream.write("a warning\n")
    progress.beat()
    shown = screen(stream.getvalue())
    assert [*shown[:3], shown[3][2:]] == ["before", "a warning", "reward 0.6", "step 2  0 s"]
    progress.show("step 3")
    assert len(screen(stream.getvalue())) == 3
    progress.clear()
    assert screen(stream.getvalue()) == ["before", "a warning", ""]


@pytest.mark.parametrize(("columns", "shown"), [(31, 28), (0, 57)])  # one that does not say its size has COLUMNS
def test_a_line_fits_the_terminal_that_it_is_written_to(columns, shown, clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")  # what standard output may say
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(writer, "w", encoding="utf-8") as stream:
        progress = Progress(stream, clock=clock)
        progress.show("x" * 200)
        drawn = os.read(reader, 4096)
        progress.clear()
    os.close(reader)
    assert drawn == b"\r\x1b[2K/ " + b"x" * shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
