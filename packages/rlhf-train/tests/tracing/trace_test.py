"""The file of a timeline, against a clock that the tests set by hand and a checker of the published format."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from record_testing import ManualClock
from rlhf_train.run.timeline import Timeline
from rlhf_train.tracing.trace import Span, Trace, Track, Work, WorkLog, machine
from trace_events import check, load

RANK = Track("actor: rank 0", "calls")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def trace(clock, tmp_path):
    made = Trace(clock)
    made.open(tmp_path / "timeline.json")
    return made


@pytest.fixture
def events(trace, tmp_path):
    """A function that ends the file and returns what it shows."""

    def closed():
        trace.close()
        return check(tmp_path / "timeline.json")

    return closed


def shown(slices):
    """Return depth, name, begin and end in seconds."""
    return [(each.depth, each.name, each.begin / 1e6, each.end / 1e6) for each in slices]


def test_phases_and_steps_have_the_times_of_the_clock_and_say_what_is_waited_for(clock, trace, events):
    timeline = Timeline(clock, trace=trace)
    clock.now += 1
    timeline.take()
    timeline.end_part("startup")
    with timeline.phase("generate"):
        clock.now += 3
        timeline.move("generate", "reward", 0.5)
    clock.now += 0.25
    with timeline.phase("sync"):
        clock.now += 1
        with timeline.phase("wake"):
            clock.now += 2
        clock.now += 1
    timeline.take()
    clock.now += 9
    timeline.end_part("step 1")
    found = events()
    phases = found.of("controller", "phases")
    assert shown(phases) == [
        (0, "generate", 1, 4), (1, "reward", 3.5, 4), (0, "sync", 4.25, 8.25), (1, "wake", 5.25, 7.25),
    ]  # fmt: skip
    assert phases[0].args == {"waits for": "engines answer prompts"}
    assert phases[1].args == {"waits for": "the run waits for rewards after the last answer"}
    assert shown(found.of("controller", "steps")) == [(0, "startup", 0, 1), (0, "step 1", 1, 8.25)]


def test_group_is_shown_from_its_admission_to_its_training(clock, trace, events):
    trace.group("step1/00000", "generated", **{"waits for": "an engine"})
    clock.now += 2
    trace.group("step1/00001", "generated")
    trace.group("step1/00000", "scored")
    clock.now += 1
    trace.group("step1/00000", "trained")
    trace.group("step1/00001", None, end="failed")
    trace.group("never begun", None)
    clock.now += 4
    trace.group("step1/00000", None)
    found = events()
    assert found.groups.keys() == {"step1/00000", "step1/00001"}
    first = found.groups["step1/00000"]
    assert shown(first) == [(0, "prompt", 0, 7), (1, "generated", 0, 2), (1, "scored", 2, 3), (1, "trained", 3, 7)]
    assert (first[0].args, first[1].args) == ({"group": "step1/00000"}, {"waits for": "an engine"})
    other = found.groups["step1/00001"]
    assert shown(other) == [(0, "prompt", 2, 3), (1, "generated", 2, 3)] and other[0].args["end"] == "failed"


def test_work_of_a_rank_has_its_waits_with_the_phases_meanwhile(clock, trace, events):
    timeline = Timeline(clock, trace=trace)
    for name, seconds in (("generate", 2), ("experience", 1), ("train", 4), ("generate", 1.5), ("load", 1.5)):
        with timeline.phase(name):
            clock.now += seconds
    start = clock.now - 10
    done = [Span("update actor", start + 3, start + 7), Span("send", start + 8.5, start + 9)]
    log = WorkLog(lambda: clock.now)
    with log.doing("load"):
        clock.now += 0.5
    trace.work(RANK, Work(machine(), clock.now, done), asked_s=clock.now)
    trace.work(RANK, log.take(), asked_s=clock.now)
    assert log.take().spans == []
    found = events().of(*RANK)
    assert shown(found) == [
        (0, "update actor", 3, 7), (0, "wait", 7, 8.5), (0, "send", 8.5, 9), (0, "wait", 9, 10), (0, "load", 10, 10.5),
    ]  # fmt: skip
    assert [each.args for each in found if each.name == "wait"] == [
        {"waits for": "generate 1.500 s"}, {"waits for": "load 1.000 s"},
    ]  # fmt: skip


def test_work_lies_in_what_it_is_part_of_and_may_be_shown_on_other_tracks(clock, trace, events):
    engine = Track("engine 0", "weights from rank 0")
    log = WorkLog(lambda: clock.now)
    with log.doing("update actor"):
        clock.now += 1
        with log.doing("forward and backward pass", rollouts=4):
            clock.now += 2
        with log.doing("optimizer step"):
            clock.now += 1
    for version in (1, 2):
        clock.now += 2
        log.add(Span(f"weights of version {version}", clock.now - 1, clock.now, args={"bytes": 8}, track=engine))
    with log.doing("send_weights"), log.doing("inner"):
        clock.now += 1
    trace.work(RANK, log.take(), asked_s=clock.now)
    # Another machine seems to have begun before the last work ended: what lies in a span stays in it.
    clock.now += 1
    spans = [Span("part", 6.25, 7.5, 1), Span("whole", 6.0, 8.0)]
    trace.work(RANK, Work("other machine", 8.0, spans), asked_s=clock.now)
    found = events()
    assert shown(found.of(*RANK)) == [
        (0, "update actor", 0, 4), (1, "forward and backward pass", 1, 3), (1, "optimizer step", 3, 4),
        (0, "wait", 4, 8), (0, "send_weights", 8, 9), (1, "inner", 8, 9), (0, "whole", 9, 10), (1, "part", 9, 9.5),
    ]  # fmt: skip
    assert found.of(*RANK)[1].args == {"rollouts": 4}
    assert [(each.name, each.begin / 1e6, each.end / 1e6, each.args) for each in found.of(*engine)] == [
        ("weights of version 1", 5, 6, {"bytes": 8}), ("weights of version 2", 7, 8, {"bytes": 8}),
    ]  # fmt: skip


def test_wait_within_a_phase_names_it(clock, trace, events):
    timeline = Timeline(clock, trace=trace)
    trace.busy(RANK, "works")
    clock.now += 1
    trace.busy(RANK, None)
    with timeline.phase("sync"):
        clock.now += 1
        with timeline.phase("wake"):
            clock.now += 2
        clock.now += 0.5
        trace.busy(RANK, "works")
    assert events().of(*RANK)[-2].args == {"waits for": "wake 2.000 s, sync 1.500 s"}


def test_wait_over_several_phases_names_the_longest_first(clock, trace, events):
    timeline = Timeline(clock, trace=trace)
    trace.busy(RANK, "works")
    clock.now += 1
    trace.busy(RANK, None)
    for name, seconds in (("load", 0.25), ("train", 4), ("sync", 1)):
        with timeline.phase(name):
            clock.now += seconds
    trace.busy(RANK, "works")
    clock.now += 0.5
    trace.busy(RANK, "works")
    found = events().of(*RANK)
    assert shown(found) == [(0, "works", 0, 1), (0, "wait", 1, 6.25), (0, "works", 6.25, 6.75)]
    assert found[1].args == {"waits for": "train 4.000 s, sync 1.000 s, load 0.250 s"}


def test_another_machine_is_set_to_this_clock_by_its_quickest_answer(clock, trace, events):
    # Its clock shows 51 s at this one's 1001.95 s, as an answer after 0.1 s tells. Those after 2 s and 5 s tell less.
    clock.now = 1002.0
    trace.work(RANK, Work("other machine", 50.0, [Span("first", 49.0, 50.0)]), asked_s=1000.0)
    clock.now = 1002.0
    trace.work(RANK, Work("other machine", 51.0, [Span("second", 50.5, 51.0)]), asked_s=1001.9)
    clock.now = 1010.0
    trace.work(RANK, Work("other machine", 57.0, [Span("third", 56.0, 57.0)]), asked_s=1005.0)
    # One of this machine shows the same clock, however late its answer is.
    trace.work(Track("critic: rank 0", "calls"), Work(machine(), 1009.0, [Span("own", 1008.0, 1009.0)]), asked_s=1003.0)
    found = {each.name: (each.begin / 1e6, each.end / 1e6) for each in events().slices if each.name != "wait"}
    assert found == {"first": (0, 1), "second": (1.45, 1.95), "third": (6.95, 7.95), "own": (8, 9)}


def test_answers_that_set_the_clock_back_do_not_overlap(clock, trace, events):
    clock.now = 1010.0
    trace.work(RANK, Work("other machine", 9.0, [Span("first", 7.0, 9.0)]), asked_s=1006.0)
    clock.now = 1010.2
    # By a quicker answer, its clock is 1001 s behind and not 999 s: all of this is before what was shown.
    spans = [Span("second", 8.0, 8.5), Span("third", 8.8, 9.2)]
    trace.work(RANK, Work("other machine", 10.1, spans), asked_s=1010.0)
    found = [(each.name, each.begin / 1e6, each.end / 1e6) for each in events().of(*RANK)]
    assert found == [("first", 6, 8), ("second", 8, 8.5), ("wait", 8.5, 8.8), ("third", 8.8, 9.2)]


def test_states_and_curves_of_an_engine(clock, trace, events):
    track = Track("engine 0", "state")
    trace.state(track, "starts")
    clock.now += 2
    trace.state(track, "waits for weights", version=3)
    trace.state(track, "waits for weights", version=3)
    clock.now += 1
    trace.count(Track("engine 0", "completions in flight"), 5)
    trace.state(track, None)
    clock.now += 1
    trace.state(track, None)
    found = events()
    assert shown(found.of(*track)) == [(0, "starts", 0, 2), (0, "waits for weights", 2, 3)]
    assert found.counters == {("engine 0", "completions in flight"): [(3_000_000, 5)]}


def test_file_of_a_run_that_goes_on_is_valid_and_its_end_closes_what_is_open(clock, trace, events, tmp_path):
    trace.group("g", "generated")
    trace.begin(Track("controller", "phases"), "generate")
    clock.now += 1
    seen = check(tmp_path / "timeline.json")
    assert not seen.is_complete and [each.name for each in seen.of("controller", "phases")] == ["generate"]
    assert seen.slices[0].end is None and seen.groups["g"][0].end is None
    found = events()
    assert found.is_complete and shown(found.slices) == [(0, "generate", 0, 1)]
    assert shown(found.groups["g"]) == [(0, "prompt", 0, 1), (1, "generated", 0, 1)]


def test_file_of_a_killed_process_is_valid(tmp_path):
    code = """
import sys
from pathlib import Path
from rlhf_train.tracing.trace import Trace, Track
trace = Trace()
trace.open(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    trace.group(f"g{number}", "generated", text="x" * 200)
    trace.begin(Track("controller", "phases"), "train")
    if number % 2:
        trace.end(Track("controller", "phases"))
    if number == 300:
        print("many", flush=True)
"""
    path = tmp_path / "timeline.json"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"many\n"
        process.send_signal(signal.SIGKILL)
    found = check(path)
    assert not found.is_complete and len(found.groups) >= 290


def test_large_file_ends_with_a_notice_and_the_run_goes_on(clock, tmp_path):
    told = []
    trace = Trace(clock, limit_bytes=20_000, notice=told.append)
    trace.open(tmp_path / "timeline.json")
    trace.begin(RANK, "load")
    for number in range(10_000):
        trace.group(f"g{number}", "generated")
        trace.group(f"g{number}", "scored")
        if number % 10:
            trace.group(f"g{number}", None)
    trace.close()
    assert told == ["the timeline has reached 0 MiB and ends here; the run goes on without it"]
    found = check(tmp_path / "timeline.json")
    assert found.is_complete and found.slices[-1].name == "the file has reached its limit"
    assert 20_000 <= (tmp_path / "timeline.json").stat().st_size < 30_000


def test_file_of_another_process_stays(clock, tmp_path):
    for text in ("first", "second", "third"):
        trace = Trace(clock)
        trace.slice(RANK, text, clock.now, clock.now)  # before the file is there
        trace.open(tmp_path / "timeline.json")
        trace.close()
    names = [("timeline.json", "first"), ("timeline.2.json", "second"), ("timeline.3.json", "third")]
    assert [check(tmp_path / file).slices[0].name for file, _ in names] == [name for _, name in names]


def test_events_reach_the_file_without_a_phase_and_none_is_kept_after_its_end(trace, events, tmp_path):
    for number in range(2000):
        trace.group(f"g{number}", "generated")
    assert (tmp_path / "timeline.json").stat().st_size > 200_000
    events()
    trace.group("late", "generated")
    assert not trace.is_on and trace._lines == []


def test_threads_write_whole_events(trace, events):
    def write(number):
        for count in range(500):
            trace.begin(Track("engines", str(number)), "generates", count=count)
            trace.group(f"{number}/{count}", "generated")
            trace.group(f"{number}/{count}", None)
            trace.end(Track("engines", str(number)))

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = events()
    assert len(found.slices) == 2000 and len(found.groups) == 2000


def test_full_disk_ends_the_file_and_not_the_run(clock, tmp_path):
    told = []
    trace = Trace(clock, notice=told.append)
    trace.open(tmp_path / "timeline.json")
    with open("/dev/full", "wb", buffering=0) as full:
        trace._file = full
        for _ in range(3):
            trace.slice(RANK, "load", clock.now, clock.now)
            trace.flush()
        trace.close()
    assert len(told) == 1 and "No space left on device" in told[0]


def test_trace_that_is_off_writes_and_keeps_nothing(clock, tmp_path):
    trace = Trace(clock, is_on=False)
    trace.open(tmp_path / "timeline.json")
    timeline = Timeline(clock, trace=trace)
    with timeline.phase("train"):
        trace.group("g", "generated")
    trace.close()
    assert list(tmp_path.iterdir()) == [] and trace._lines == []


def test_file_is_plain_json_with_an_event_per_line(trace, events, tmp_path):
    trace.slice(RANK, 'a "name"\nof two lines', 1000.0, 1000.5)
    events()
    lines = (tmp_path / "timeline.json").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("[", "]")
    assert [json.loads(line.rstrip(","))["ph"] for line in lines[1:-1]] == ["M", "M", "M", "X"]
    assert len(load(tmp_path / "timeline.json")[0]) == 4
