"""Runs that train on what another run recorded: the same batches, counts and metrics, without an engine."""

import dataclasses
import json
import re

import numpy as np
import pytest

from online_fakes import OWN_METRICS, BrokenReward, Forgets, SpreadReward, by_step, held_out, tiny_batch
from rlhf_data.errors import ConfigError, DataError
from rlhf_rollout.records_io import read_batches, read_lines
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.generation.recorded import RecordedRollouts, Recording, find_recording
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import AsyncSpec, DynamicSampling, RewardSpec
from rlhf_train.generation.scoring import RewardShaper
from rlhf_train.online import train_and_save
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec
from rlhf_train.run.checkpointing import find_checkpoint

HOW_MADE = ("time/", "throughput/", "async/", "sync/", "memory/", "samples/generated", "samples/failed", "reuse/")


def numbers(run):
    """The metrics of every step, but for those that tell how the rollouts were made."""
    return [
        {name: value for name, value in line.items() if not name.startswith(HOW_MADE)} for line in by_step(run.lines())
    ]


def trained(run):
    """What the ranks got: for each step, the tokens, log-probs, versions and rewards of each rollout."""
    return [[tuple(np.asarray(part).tolist() for part in r) for r in batch] for batch in run.world.rollouts]


def replayed(make_run, run, **changes):
    """Make a run that trains on what another one recorded, with the options of that one but for `changes`."""
    run.recorder.close()
    names = ("num_steps", "algorithm", "batch", "dynamic_sampling", "num_frozen_steps", "own_metrics")
    job = {name: getattr(run.job, name) for name in names}
    own = {"save_path": f"{run.job.save_path}-replay", "replay": str(run.recorder.path("rollouts"))}
    again = make_run(**(job | own | changes))
    again.world.kl = run.world.kl
    again.controller.learner._shaper = RewardShaper(run.shaping, max_tokens=12)
    return again


def finished(make_run, reward, shaping=None, **changes):
    """A run that has trained, whose rewards are shaped as `shaping` says."""
    run = make_run(reward, **changes)
    run.shaping = shaping or run.job.reward
    run.controller.learner._shaper = RewardShaper(run.shaping, max_tokens=12)
    run.world.kl = 5.0
    train_and_save(run.job, run.controller, run.recorder)
    run.controller.checkpointer.close()
    return run


NORM = RewardSpec(sources=(RewardSource(kind="function", targets=("f.py",)),), running_reward_norm=True)


OWN_FILTER = OwnCode("keep_group", "/nowhere/mine.py", "def keep_group(group): return not group.scores.max()")
CASES = {
    "plain": (SpreadReward(), {}),
    "dynamic sampling": (SpreadReward(), {"dynamic_sampling": DynamicSampling(max_batches=3), "shaping": NORM}),
    "failed rewards": (BrokenReward(), {"shaping": NORM}),
    "generation ahead of training": (
        SpreadReward(),
        {
            "asynchronous": AsyncSpec(max_staleness=2),
            "dynamic_sampling": DynamicSampling(),
            "num_steps": 4,
            "shaping": NORM,
        },
    ),
    "filter and metrics of the user's own": (
        SpreadReward(),
        {
            "asynchronous": AsyncSpec(max_staleness=2),
            "dynamic_sampling": DynamicSampling(scores_differ=False, own_filter=OWN_FILTER),
            "own_metrics": OWN_METRICS,
            "num_steps": 4,
        },
    ),
    "answers of earlier steps": (Forgets(), {"reuse": ReuseSpec(reuse_solved=9), "shaping": NORM}),
    "adaptive KL": (SpreadReward(), {"algorithm": make_algorithm(kl_target=0.5, kl_horizon=64)}),
    "a record of columns": (SpreadReward(), {"record_format": "columns"}),
}


@pytest.mark.parametrize("case", CASES)
def test_replay_trains_on_the_same_batches_in_the_same_order_without_an_engine(case, make_run, monkeypatch):
    reward, changes = CASES[case]
    run = finished(make_run, reward, **changes)

    async def nobody(*_, **__):
        pytest.fail("an engine was asked")

    monkeypatch.setattr("online_fakes.World.generate", nobody)
    again = replayed(make_run, run)
    before = run.recorder.path("rollouts").read_bytes()
    train_and_save(again.job, again.controller, again.recorder)
    assert trained(again) == trained(run) and len(trained(run)) == run.job.num_steps
    assert numbers(again) == numbers(run)
    assert not [entry for entry in again.world.log if entry.startswith("send")]
    assert run.recorder.path("rollouts").read_bytes() == before
    # A replay records what it trains on, so that it can be replayed itself.
    again.recorder.close()
    batches = [
        [(batch.fields, [group.group_id for group in batch.groups]) for batch in read_batches(path)]
        for path in (run.recorder.path("rollouts"), again.recorder.path("rollouts"))
    ]
    assert batches[0] == batches[1]


def test_step_is_repeated_from_the_runs_own_checkpoint_which_stays_as_it_is(make_run, tmp_path):
    folder = tmp_path / "checkpoints"
    saving = CheckpointSpec(folder=str(folder), every=1)
    run = finished(make_run, SpreadReward(), algorithm=make_algorithm(kl_target=0.5, kl_horizon=64), checkpoints=saving)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    spec = CheckpointSpec(folder=str(folder), full=False, resume=True, before=3)
    again = replayed(make_run, run, checkpoints=spec, saves_models=False)
    checkpoint = find_checkpoint(spec, "nowhere", again.listener)
    assert checkpoint.step == 2
    again.controller.first_step = again.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(again.job, again.controller, again.recorder)
    assert trained(again) == trained(run)[2:]
    assert numbers(again)[0] == numbers(run)[2]
    assert not [entry for entry in again.world.log if entry.startswith(("send", "save"))]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files


def test_replay_that_ended_early_goes_on_from_its_own_checkpoint(make_run, tmp_path):
    run = finished(make_run, SpreadReward())
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=1)
    first = replayed(make_run, run, checkpoints=saving)
    first.controller.start()
    first.step(1)
    first.controller.checkpointer.close()
    second = replayed(make_run, run, checkpoints=saving, save_path=str(tmp_path / "second"))
    [checkpoint] = Checkpoints(tmp_path / "checkpoints").all()
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(second.job, second.controller, second.recorder)
    assert trained(second) == trained(run)[1:]
    assert numbers(second) == numbers(run)[1:]


def test_other_updates_on_the_same_rollouts_leave_none_of_them_out(make_run):
    run = finished(make_run, SpreadReward())
    batch = dataclasses.replace(run.job.batch, max_epochs=2, train_batch_size=64)
    again = replayed(make_run, run, batch=batch)
    train_and_save(again.job, again.controller, again.recorder)
    assert [line["samples/trained"] for line in numbers(again)[:3]] == [64, 64, 64]
    assert again.controller.learner.policy_version == 3 * 2


def test_evaluation_of_a_replay_is_refused(make_run):
    run = finished(make_run, SpreadReward())
    with pytest.raises(ConfigError, match="held-out prompts need an engine"):
        replayed(make_run, run, eval_prompts=held_out())


def test_smaller_batches_than_the_recorded_ones_are_refused(make_run):
    run = finished(make_run, SpreadReward())
    again = replayed(make_run, run, batch=tiny_batch(8))
    with pytest.raises(
        ConfigError, match=r"step 1 was trained on 16 prompts.*is 8\n\nhint: use ``rollout_batch_size=16``"
    ):
        again.controller.generate(1)


def test_recorded_token_that_the_policy_masks_is_refused_with_its_rollout(make_run):
    run = finished(make_run, SpreadReward())
    path = run.recorder.path("rollouts")
    run.recorder.close()
    (_, second, *_) = list(read_batches(path))
    rollout = second.groups[0].rollouts[-1]
    prompt, answer = rollout.spans[0].token_ids, rollout.spans[1].token_ids
    masked = int(answer[-1])
    for step in (1, 2):  # ids of prompts are not sampled: a policy may read what it cannot write
        RecordedRollouts(path, 100, [range(masked + 1, masked + 1)]).next_batch(step)
    unsampled = {int(token) for token in prompt} - {
        int(token) for batch in read_batches(path) for group in batch.groups for each in group.rollouts
        for token in each.spans[1].token_ids
    }  # fmt: skip
    RecordedRollouts(path, 100, [range(token, token + 1) for token in unsampled]).next_batch(2)
    message = rf"rollouts\.jsonl, step 2, rollout \S+: the policy sampled the id {masked}, for which .*\n\nhint: name"
    with pytest.raises(DataError, match=message):
        RecordedRollouts(path, 100, [range(0), range(masked, masked + 1)]).next_batch(2)


def test_run_without_a_record_writes_no_rollouts_and_cannot_be_replayed(make_run):
    run = finished(make_run, SpreadReward(), record=False)
    run.recorder.close()
    assert not run.recorder.path("rollouts").exists()
    with pytest.raises(
        DataError, match=r"there is no record of rollouts, .*rollouts.jsonl\n\nhint: .*``record`` is false"
    ):
        find_recording(run.recorder.folder)


def test_recording_ends_with_the_last_complete_step(make_run):
    run = finished(make_run, SpreadReward())
    run.recorder.close()
    path = run.recorder.path("rollouts")
    whole = path.read_bytes()
    assert find_recording(run.recorder.folder) == Recording(path, 3, 3, sources=frozenset({"default"}))
    rows = whole.splitlines(keepends=True)
    fourth = rows[0].replace(b'"step": 1', b'"step": 4')
    damages = {
        "the end of a line": (whole[:-1], 2),
        "the last line": (b"".join(rows[:-1]), 2),
        "all but the first line of a step": (b"".join(rows[:65]), 1),
        "all but the first group of a step": (b"".join(rows[: 64 + 4]), 1),
        "the last group": (b"".join(rows[:-4]), 2),
        "the last group of a step before others": (b"".join([*rows[: 128 - 4], *rows[128:]]), 1),
        "most of the next step's first line": (whole + fourth[:-9], 3),
        "what may belong to the last step": (whole + b"{", 2),
        "a whole step": (whole + fourth.replace(b'"step": 4', b'"step": 5'), 2),
    }
    for torn, steps in damages.values():
        path.write_bytes(torn)
        found = find_recording(run.recorder.folder)
        assert (found.num_steps, found.num_planned) == (steps, 3)
        assert found.notice == f"the end of {path} is damaged; steps 1 to {steps} are complete"
    for nothing in (b"", b"".join(rows[:63]), b"".join(rows[:60]), b"hello\n"):
        path.write_bytes(nothing)
        with pytest.raises(DataError, match=r"has no complete step\n\nhint: "):
            find_recording(run.recorder.folder)


def test_recording_of_an_older_version_ends_with_its_last_step(make_run):
    run = finished(make_run, SpreadReward())
    run.recorder.close()
    path = run.recorder.path("rollouts")
    older, num_fields = re.subn(rb' "groups_left": \d+,', b"", path.read_bytes())
    assert num_fields == 3 * 64
    path.write_bytes(older)
    assert find_recording(run.recorder.folder) == Recording(path, 3, 3, sources=frozenset({"default"}))
    path.write_bytes(older[: older.rindex(b'{"step": 3')])
    assert find_recording(run.recorder.folder).num_steps == 2


def test_recording_of_columns_ends_with_the_last_complete_step(make_run):
    run = finished(make_run, SpreadReward(), record_format="columns")
    run.recorder.close()
    path = run.recorder.path("rollouts")
    assert path.name == "rollouts.columns"
    assert find_recording(run.recorder.folder) == Recording(path, 3, 3, sources=frozenset({"default"}))
    ends = {json.loads(line.text)["step"]: line.end for line in read_lines(path)}
    whole = path.read_bytes()
    of_groups = sorted({line.end for line in read_lines(path)})
    assert len(of_groups) == 3 * 16
    between_groups = [(whole[: of_groups[-2]], 2), (whole[: of_groups[16]], 1)]
    for torn, steps in ((whole[:-1], 2), (whole[: ends[2] + 1], 1), (whole + b"{", 2), *between_groups):
        path.write_bytes(torn)
        found = find_recording(run.recorder.folder)
        assert (found.num_steps, found.num_planned) == (steps, 3)
        assert found.notice == f"the end of {path} is damaged; steps 1 to {steps} are complete"
    path.write_bytes(whole[: ends[2]])
    assert find_recording(run.recorder.folder).num_steps == 2
    for nothing in (b"", whole[:20], whole[:-1].replace(b"rlhf", b"RLHF")):
        path.write_bytes(nothing)
        with pytest.raises(DataError, match=r"has no complete step\n\nhint: "):
            find_recording(run.recorder.folder)


def test_replay_of_a_damaged_record_ends_with_file_and_line(make_run):
    run = finished(make_run, SpreadReward())
    run.recorder.close()
    path = run.recorder.path("rollouts")
    rows = path.read_text().splitlines(keepends=True)
    rows[70] = json.dumps(json.loads(rows[70]) | {"logprobs": []}) + "\n"
    path.write_text("".join(rows))
    again = replayed(make_run, run)
    again.step(1)
    with pytest.raises(DataError, match=f"{path}:71 is not a rollout as it was written"):
        again.controller.generate(2)


@pytest.mark.parametrize(
    ("num_gpus", "together", "nodes"), [(0, False, (0,)), (4, False, (3,)), (4, True, (1,)), (1, False, (1,))]
)
def test_plan_without_engines_has_places_for_trainers_only(num_gpus, together, nodes):
    ranks = {"actor": 1, "critic": 1, "reference": 1}
    request = PlacementRequest(ranks=ranks, num_engines=0, colocate_all_models=together, tensor_parallel_size=2)
    plan = (
        plan_placement(request, [num_gpus])
        if num_gpus != 1
        else plan_placement(dataclasses.replace(request, tensor_parallel_size=1), [1])
    )
    assert (plan.nodes, plan.engines.num_ranks) == (nodes, 0)
    assert not plan.shares_gpus
    assert sorted(role for placed in plan.all_processes for role in placed.roles) == sorted(ranks)
    assert "engines" not in plan.describe() and "vLLM" not in plan.describe()
