"""A run in one process with injected faults: full disks, rollouts that are dropped, doubled or late, rewards that hang,
and a slow sync. The run goes on or ends with a clear error, and every rollout is accounted for."""

import errno
import json
import os
import resource
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from online_fakes import SpreadReward
from rlhf_data.errors import CheckpointError, EngineError, RlhfError
from rlhf_data.options.exits import with_flags
from rlhf_data.records import FinishReason
from rlhf_rollout.agents import AgentSpec, EpisodeLimits
from rlhf_rollout.protocols import Completion
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train.generation.run_spec import AsyncSpec, RewardSpec
from rlhf_train.online import train_and_save
from rlhf_train.online_job import CheckpointSpec
from rlhf_train.run.checkpoint import RECEIPT, Checkpoints, write_receipt
from rlhf_train.run.rank_state import file_name
from rollout_testing import limit_only

RANK_FILE = file_name("actor", 0, 1)


@pytest.fixture(params=["in turn", "at once"])
def make_run(request, make_run):
    """Generation and training in turn, or asynchronously."""
    return partial(make_run, asynchronous=AsyncSpec(max_staleness=2)) if request.param == "at once" else make_run


def accounted(run):
    """Check that the counts of the whole run add up, and return them."""
    counts = run.controller.ledger.run
    done = counts.trained + counts.filtered + counts.failed + counts.stale
    assert counts.requested == done + run.controller.rollouts.num_outstanding
    return counts


def checkpoints_of(run):
    """Return the steps of the checkpoints, all of which must be whole."""
    found = Checkpoints(run.job.checkpoints.home(run.job.save_path)).all()
    assert not any(checkpoint.problems() for checkpoint in found)
    return [checkpoint.step for checkpoint in found]


def trained_twice(run):
    """Return the ids of rollouts that the ranks got more than once."""
    ids = Counter(rollout.rollout_id for batch in run.world.rollouts for rollout in batch)
    return [name for name, count in ids.items() if count > 1]


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RANK_FILE, "state.json", "manifest.json"])
def test_disk_that_is_full_during_a_checkpoint_costs_this_checkpoint_only(make_run, name):
    run = make_run(SpreadReward(), checkpoints=CheckpointSpec(folder="", every=1))

    def save_state(folder):
        if folder.endswith(".step-2.partial"):
            Path(folder, name).symlink_to("/dev/full")
        for role in ("actor", "critic"):
            path = Path(folder, file_name(role, 0, 1))
            try:
                path.write_text(f"{role} {run.world.engine_version}")
            except OSError as error:
                path.unlink()
                write_receipt(path, error)
            else:
                write_receipt(path)
        return [file_name(role, 0, 1) for role in ("actor", "critic")]

    run.world.on_save_state = save_state
    train_and_save(run.job, run.controller, run.recorder)
    [warning] = run.listener.warnings
    for part in ("a checkpoint was not saved: ", "No space left on device", "name another folder with --ckpt_path"):
        assert part in with_flags(warning)
    assert checkpoints_of(run) == [1, 3]
    assert not list(Path(run.job.save_path, "checkpoints").glob(".step-*"))  # it gave back the room that it took
    assert accounted(run).trained == 3 * 64


def test_rank_that_meets_a_full_disk_makes_room_for_its_receipt(tmp_path):
    from rlhf_train.run.rank_state import _write

    class Full:
        def write(self, path):
            path.write_bytes(b"0" * 4096)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _write({RANK_FILE: Full()}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RANK_FILE + RECEIPT]
    assert "No space left" in json.loads((tmp_path / (RANK_FILE + RECEIPT)).read_text())["error"]


def test_rank_whose_file_leaves_no_room_for_its_receipt_tells_so(tmp_path, monkeypatch):
    from rlhf_train.run.rank_state import _write

    class LastThatFits:
        def write(self, path):
            with path.open("wb") as file:
                file.write(b"0" * 4096)

    write = Path.write_bytes

    def write_bytes(path, content):
        if (tmp_path / RANK_FILE).exists():
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    _write({RANK_FILE: LastThatFits()}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [RANK_FILE + RECEIPT]
    assert "No space left" in json.loads((tmp_path / (RANK_FILE + RECEIPT)).read_text())["error"]


def test_disk_that_is_full_for_rollouts_ends_the_run_with_its_state_saved(make_run):
    """The limit of file sizes stands for the disk: other files of the run are smaller."""
    run = make_run(SpreadReward(), num_steps=9)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(
            RlhfError, match=r"rollouts\.jsonl cannot be written: .*File too large(.|\n)*hint: free space"
        ):
            train_and_save(run.job, run.controller, run.recorder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    num_steps = len([line for line in run.lines() if "time/step" in line])
    assert 1 <= num_steps < 9
    assert checkpoints_of(run) == [num_steps]
    assert run.world.log[-1] == f"save actor {run.recorder.path('final model')}"
    assert run.controller.ledger.run.trained == num_steps * 64
    with pytest.raises(RlhfError, match="cannot be written"):
        run.recorder.close()
    run.recorder.close = lambda: None  # the fixture closes it, too


def test_disk_that_is_full_at_the_end_keeps_the_state_of_the_last_step(make_run):
    run = make_run(SpreadReward())

    def save(role, path):
        raise CheckpointError(f"cannot write the model to {path}: No space left on device")

    run.world.on_save = save
    with pytest.raises(CheckpointError, match="No space left"):
        train_and_save(run.job, run.controller, run.recorder)
    assert checkpoints_of(run) == [3]
    assert "not everything was saved: cannot write the model" in run.listener.warnings[0]
    assert accounted(run).trained == 3 * 64


# -- rollouts on their way from the engine to the ranks --------------------------------------------------------------


def completion(run, reason=FinishReason.STOP):
    return Completion.single(np.arange(5), np.full(5, -1.0), reason, run.world.engine_version)


ANSWERS = {
    "fewer": lambda run: [completion(run)] * 3,
    "more": lambda run: [completion(run)] * 5,
    "aborted": lambda run: [completion(run, FinishReason.ABORT)] * 4,
    "none": lambda run: [],
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("answer", [*ANSWERS, "late"])
def test_answer_that_is_not_what_was_asked_for_is_asked_for_again_and_then_counted_as_failed(make_run, answer, times):
    run = make_run(SpreadReward())
    generate = run.world.generate
    asked = Counter()

    async def faulty(token_ids, *arguments, **options):
        asked[token_ids[0]] += 1
        if token_ids[0] == 4 and asked[4] <= times:
            if answer == "late":
                raise EngineError("a request of an engine's process took longer than 1800 s")
            return ANSWERS[answer](run)
        return await generate(token_ids, *arguments, **options)

    run.world.generate = faulty
    train_and_save(run.job, run.controller, run.recorder)
    assert sum(line["samples/retried_groups"] for line in run.lines() if "time/step" in line) == 1
    counts = accounted(run)
    num_failed = 4 * (times - 1)
    # In turn, a batch lacks the failed group. Otherwise there is time for the group of another prompt.
    num_trained = 3 * 64 - num_failed * (run.job.asynchronous is None)
    assert (counts.requested, counts.trained, counts.failed) == (num_trained + num_failed, num_trained, num_failed)
    assert not trained_twice(run)


@pytest.mark.parametrize("fault", ["drop", "double"])
def test_group_that_is_lost_or_doubled_before_the_ranks_stops_the_run_before_it_trains(make_run, monkeypatch, fault):
    run = make_run(SpreadReward(), num_steps=4, checkpoints=CheckpointSpec(folder="", every=1))
    stream = run.controller.rollouts._stream
    take = stream.take

    def faulty():
        fresh, stale = take()
        if len(run.world.rollouts) == 2:
            fresh = fresh[1:] if fault == "drop" else [*fresh, fresh[0]]
        return fresh, stale

    monkeypatch.setattr(stream, "take", faulty)
    with pytest.raises(RlhfError, match=r"rollouts were lost or counted twice: \d+ requested, 128 trained"):
        train_and_save(run.job, run.controller, run.recorder)
    assert [len(batch) for batch in run.world.rollouts] == [64, 64] and not trained_twice(run)
    assert checkpoints_of(run) == [1, 2]


def test_slow_sync_is_waited_for_and_no_rollout_is_older_than_its_batch(make_run):
    run = make_run(SpreadReward())
    send = run.world.send
    sending = []

    def slow(*arguments):
        sending.append(True)
        time.sleep(0.2)
        sending.pop()
        return send(*arguments)

    generate = run.world.generate

    async def checked(*arguments, **options):
        assert not sending
        return await generate(*arguments, **options)

    run.world.send, run.world.generate = slow, checked
    train_and_save(run.job, run.controller, run.recorder)
    lines = [line for line in run.lines() if "time/step" in line]
    assert all(line["time/sync"] >= 0.2 for line in lines)
    assert (accounted(run).trained, accounted(run).stale) == (3 * 64, 0)
    versions = [{rollout.policy_version for rollout in batch} for batch in run.world.rollouts]
    # All prompts of the three steps are admitted at once if they may be two steps old.
    assert versions == [{0}, {4}, {8}] if run.job.asynchronous is None else [{0}, {0}, {0}]


# -- rewards that hang -------------------------------------------------------------------------------------------------

HANGS = """
import time

def reward_func(queries, prompts, labels):
    if "prompt 5" in prompts:
        time.sleep(600)
    return {"rewards": [float(len(query) % 2) for query in queries]}
"""


def test_reward_that_hangs_on_one_prompt_costs_its_rollouts_only(make_run, tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text(HANGS)
    source = RewardSource(kind="function", targets=(str(tmp_path / "hangs.py"),))
    limit_only(monkeypatch, lambda queries: any(query.startswith("prompt 5") for query in queries))
    run = make_run(reward=RewardSpec(sources=(source,), calls=CallOptions(timeout_s=1.0)), num_steps=1)
    started = time.monotonic()
    train_and_save(run.job, run.controller, run.recorder)
    assert time.monotonic() - started < 200
    run.recorder.close()  # a thread writes the records
    records = [json.loads(line) for line in run.recorder.path("rollouts").read_text().splitlines()]
    failed = [one for one in records if one["reward"] is None]
    assert {one["prompt"] for one in failed} == {"prompt 5"}
    assert all("no answer within 1 s" in one["detail"] for one in failed)
    counts = accounted(run)
    assert (counts.requested, counts.trained, counts.failed) == (64, 60, 4)


# -- agents ------------------------------------------------------------------------------------------------------------

AGENT = """
async def run_episode(session):
    if session.prompt_token_ids[0] == 3:
        raise ValueError("not this one")
    first = await session.reply()
    second = await session.complete([7, 7])  # another conversation, and so another rollout of the episode
    return float(len(first.text) % 2)
"""


def test_episodes_of_several_rollouts_and_failed_ones_are_accounted_for(make_run, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = AgentSpec(path=str(tmp_path / "agent.py"), limits=EpisodeLimits(max_length=64), num_processes=1)
    run = make_run(SpreadReward(), agent=agent)
    train_and_save(run.job, run.controller, run.recorder)
    counts = accounted(run)
    # Of sixteen prompts per step with four samples, one fails. The episodes of the others have two rollouts.
    assert (counts.requested, counts.trained, counts.failed) == (3 * (15 * 8 + 4), 3 * 15 * 8, 3 * 4)
    assert trained_twice(run) == []
    assert len([text for text in run.listener.warnings if text.startswith("the agent gives rewards of its own")]) == 1


def test_reward_of_the_flags_scores_what_the_agent_leaves_to_it(make_run, tmp_path):
    (tmp_path / "agent.py").write_text("async def run_episode(session):\n    await session.reply()\n")
    agent = AgentSpec(path=str(tmp_path / "agent.py"), limits=EpisodeLimits(max_length=64), num_processes=1)
    run = make_run(SpreadReward(), agent=agent, num_steps=1)
    train_and_save(run.job, run.controller, run.recorder)
    assert accounted(run).trained == 64
    assert not [text for text in run.listener.warnings if "rewards of its own" in text]
