"""The file of a run's timeline against the metrics of the run, and what an engine and prompts went through."""

from itertools import pairwise

import pytest

from online_fakes import SpreadReward, held_out
from rlhf_train.generation.run_spec import DynamicSampling
from rlhf_train.online import train_and_save
from rlhf_train.run.timeline import PHASES
from rlhf_train.tracing.trace import Trace
from trace_events import check


@pytest.fixture
def trace(tmp_path):
    made = Trace()
    made.open(tmp_path / "timeline.json")
    return made


def events(trace, tmp_path):
    trace.close()
    return check(tmp_path / "timeline.json")


def own_seconds(slices, step):
    """Return the seconds of each phase within a step, without those of phases within it."""
    inside = [each for each in slices if step.begin <= each.begin and each.end <= step.end]
    seconds = dict.fromkeys(PHASES, 0.0)
    for each in inside:
        seconds[each.name] += (each.end - each.begin) / 1e6
        around = [o for o in inside if o.begin <= each.begin and each.end <= o.end and o.depth == each.depth - 1]
        for outer in around[-1:]:
            seconds[outer.name] -= (each.end - each.begin) / 1e6
    return seconds


def test_phases_of_the_file_add_up_to_the_metrics_of_each_step(make_run, trace, tmp_path):
    run = make_run(SpreadReward(), trace=trace, enable_sleep=True)
    run.world.delay_s = 0.002
    run.controller.start()
    for step in (1, 2, 3):
        assert run.step(step)
    found = events(trace, tmp_path)
    parts = found.of("controller", "steps")
    assert [part.name for part in parts] == ["startup", "first evaluation", "step 1", "step 2", "step 3"]
    assert all(one.end == other.begin for one, other in pairwise(parts))
    lines = [line for line in run.lines() if "time/step" in line]
    for part, line in zip(parts[2:], lines, strict=True):
        assert (part.end - part.begin) / 1e6 == pytest.approx(line["time/step"], abs=1e-4)
        seconds = own_seconds(found.of("controller", "phases"), part)
        assert {"generate", "load", "train"} <= {name for name, value in seconds.items() if value > 0.001}
        for name, value in seconds.items():
            assert value == pytest.approx(line.get(f"time/{name}", 0.0), abs=1e-4), name


def test_every_prompt_is_shown_from_its_admission_to_its_training(make_run, trace, tmp_path):
    run = make_run(SpreadReward(), trace=trace, eval_prompts=held_out(), dynamic_sampling=DynamicSampling())
    run.controller.start()
    assert run.step(1)
    found = events(trace, tmp_path)
    ids = {line for line in found.groups if line.startswith("step1/")}
    evaluated = {line for line in found.groups if line.startswith("eval0/")}
    assert len(evaluated) == 2 and ids | evaluated == found.groups.keys()
    trained = filtered = 0
    for group_id in ids:
        outer, *inner = found.groups[group_id]
        assert outer.name == "prompt" and outer.args["group"] == group_id
        assert (inner[0].begin, inner[-1].end) == (outer.begin, outer.end)
        assert [each.end for each in inner[:-1]] == [each.begin for each in inner[1:]]
        names = [each.name for each in inner]
        waits = [each.args.get("waits for") for each in inner]
        if outer.args.get("end") == "filtered":
            filtered += 1
            assert names == ["generated", "scored"]
        else:
            trained += 1
            assert names == ["generated", "scored", "queued", "trained"]
            assert waits == ["an engine", "its reward", "a batch", None]
    [line] = [line for line in run.lines() if "time/step" in line]
    assert (trained * 4, filtered * 4) == (line["samples/trained"], line["samples/filtered"]) and filtered
    assert {each.name for each in found.groups["eval0/00000"]} == {"prompt", "generated", "scored"}


def test_engine_and_rank_show_what_they_did_and_waited_for(make_run, trace, tmp_path):
    run = make_run(SpreadReward(), trace=trace, enable_sleep=True)
    run.world.delay_s = 0.002
    train_and_save(run.job, run.controller, run.recorder)
    found = events(trace, tmp_path)
    states = found.of("engine 0", "state")
    # Before the first weights, and those of each of three steps.
    assert [each.name for each in states] == ["waits for weights"] * len(states) and len(states) == 4
    requests = found.of("engine 0", "requests")
    waits = [each for each in requests if each.name == "wait"]
    assert {each.name for each in requests} == {"generates", "wait"}
    assert any("train " in each.args.get("waits for", "") for each in waits)
    numbers = [value for _, value in found.counters["engine 0", "completions in flight"]]
    assert max(numbers) >= 4 and numbers[-1] == 0 and min(numbers) == 0
    assert [each.name for each in found.of("engine 0", "memory")] == ["asleep"] * 4
    calls = found.of("actor, critic, reference: rank 0", "calls")
    names = [each.name for each in calls if each.name != "wait"]
    assert names.count("update") == 6 and names.count("load_rollouts") == 3
    assert any(each.name == "wait" and "generate" in each.args.get("waits for", "") for each in calls)
