"""An offline run that is killed, or told to end, goes on as if nothing had happened: the same numbers, bit for bit."""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from rlhf_data.errors import EngineError, RlhfError
from rlhf_data.examples.preference import PreferenceExample, ProcessExample, UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.distillation import DistillationObjective
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.kto import KtoObjective
from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.checkpoint import Checkpoints, CheckpointSpec
from rlhf_train.run.checkpointing import find_checkpoint, resumed_step
from rlhf_train.run.interrupts import Interrupted
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder
from rlhf_train.specs import ModelSpec, OptimizerSpec

NUM_EXAMPLES, NUM_UPDATES = 18, 9  # two epochs in updates of 4
TIMEOUT_S = 240
TRAINERS = ("sft", "rm", "dpo", "kto", "prm", "kd")


def answer(rng: np.random.Generator) -> SftExample:
    tokens = rng.integers(3, 250, 9)
    return SftExample("row", tokens, np.arange(9) >= 4)


def examples(trainer: str, count: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    if trainer in ("rm", "dpo"):
        return [PreferenceExample("pair", answer(rng), answer(rng)) for _ in range(count)]
    rows = [answer(rng) for _ in range(count)]
    if trainer == "kto":
        return [UnpairedExample("row", row.token_ids, row.loss_mask, index % 3 > 0) for index, row in enumerate(rows)]
    if trainer == "prm":
        return [ProcessExample("row", row.token_ids, np.array([4, 7]), np.array([1.0, 0.0])) for row in rows]
    return rows


def make_job(trainer: str, models: str, folder: str, stage: int = 0, place: tuple[Any, ...] = (), **changes) -> Any:
    """Return the job of a trainer; its run lies in `folder`."""
    objectives = {
        "sft": SupervisedObjective(),
        "rm": RewardModelObjective(),
        "dpo": PreferenceObjective(),
        "kto": KtoObjective(),
        "prm": ProcessRewardObjective(reward_tokens=(5, 6)),
        "kd": DistillationObjective(),
    }
    rank, num_ranks, master = place or (0, 1, ("127.0.0.1", free_port()))
    optimizer = OptimizerSpec(learning_rate=2e-3, weight_decay=0.1, warmup_steps=2, total_steps=NUM_UPDATES)
    # Dropout draws random numbers in every update.
    lora = LoraSpec(rank=2, dropout=0.2) if trainer in ("sft", "rm") and stage == 0 else None
    fields = {
        "objective": objectives[trainer],
        "model": ModelSpec(path=f"{models}/policy", zero_stage=stage, optimizer=optimizer, lora=lora),
        "reference": ModelSpec(path=f"{models}/teacher") if trainer == "kd" else None,
        "precompute_reference": trainer == "dpo",
        "examples": examples(trainer, NUM_EXAMPLES, 0),
        "eval_examples": examples(trainer, 6, 1),
        "eval_steps": 2,
        "best_metric": "loss",
        "schedule": OfflineSchedule(train_batch_size=4, micro_train_batch_size=2, max_epochs=2),
        "model_path": Path(folder, "model"),
        "best_path": Path(folder, "best_model"),
        "checkpoints": CheckpointSpec(every=1, max_num=2, hf_model=True, resume=Path(folder).exists()),
        "rank": rank,
        "num_ranks": num_ranks,
        "master": master,
    }
    return OfflineJob(**(fields | changes))


class Ending(Observer):
    """Sends a signal to a rank some time after an update. The last update waits for it."""

    def __init__(self, pid_file: Path, number: int, update: int, delay_s: float) -> None:
        self._pid_file = pid_file
        self._number = number
        self._update = update
        self._delay_s = delay_s

    def update(self, update, num_updates, metrics):
        if update == self._update:
            pid = int(self._pid_file.read_text())
            threading.Timer(self._delay_s, os.kill, (pid, self._number)).start()
        if update == num_updates:
            time.sleep(TIMEOUT_S)


class Failing(Observer):
    """Cannot show the third update, as a recorder cannot write to a full disk."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def update(self, update, num_updates, metrics):
        if update == 3:
            raise RlhfError("the disk is full")

    def warning(self, text):
        self.warnings.append(text)


def carry_out(job: OfflineJob, observer: Observer | None = None) -> None:
    """Run a job as the command does: rank 0 records it and finds its checkpoint."""
    observer = observer or Observer()
    folder = job.model_path.parent
    if job.rank > 0:
        run_offline(job, observer)
        return
    checkpoint = find_checkpoint(job.checkpoints, folder, observer)
    kept = resumed_step(job.checkpoints, checkpoint)
    with Recorder(str(folder), "", None, observer, kept) as recorder:
        run_offline(job, observer, recorder, checkpoint)


def rank_main(rank: int, num_ranks: int, master: Any, made: list[tuple[Any, ...]], ending: Any) -> None:
    """Carry jobs out in this process, which exits with a signal's number + 128 after `Interrupted`, and 1 after an
    error. With the `ending` "failing", rank 0 fails."""
    os.environ.pop("LOCAL_SIZE", None)
    models = Path(made[0][1])
    (models / f"pid-{rank}").write_text(str(os.getpid()))
    observer: Observer = Observer()
    if ending is not None and rank == 0:
        observer = Failing() if ending == "failing" else Ending(models / f"pid-{ending[0]}", *ending[1:])
    try:
        for arguments in made:
            carry_out(make_job(*arguments, place=(rank, num_ranks, master)), observer)
    except Interrupted as interrupt:
        os._exit(128 + interrupt.signal_number)
    except RlhfError as error:
        expected = EngineError if ending == "failing" and rank > 0 else RlhfError
        os._exit(1 if type(error) is expected else 2)


@pytest.fixture(scope="module")
def fork():
    """A multiprocessing context whose processes have the libraries imported when they start."""
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["deepspeed", "peft", "tensorboard.summary.writer", "offline_resume_test"])
        yield context


def run_ranks(fork, num_ranks: int, made: list[tuple[Any, ...]], ending: Any = None) -> list[int]:
    """Carry jobs out in new processes; return their exit codes. `ending` has a rank, a signal and when to send it.

    The others are killed when a rank was killed.
    """
    master = ("127.0.0.1", free_port())
    ranks = [fork.Process(target=rank_main, args=(rank, num_ranks, master, made, ending)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.exitcode is None for process in ranks):
        assert time.monotonic() < deadline, [process.exitcode for process in ranks]
        if any(process.exitcode == -signal.SIGKILL for process in ranks):
            for process in ranks:
                process.kill()
        time.sleep(0.02)
    return [process.exitcode for process in ranks]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 260}
    tiny_model_dir(folder / "policy", **sizes)
    tiny_model_dir(folder / "teacher", seed=5, **sizes)
    return str(folder)


def numbers(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/"))} for line in lines
    ]


def check_same(folder: Path, whole: Path) -> None:
    assert numbers(folder) == numbers(whole)
    assert max(line["step"] for line in numbers(whole)) == NUM_UPDATES
    for model in ("model", "best_model"):
        # peft's configuration lists a set, in another order in each process.
        files = [path for path in (whole / model).rglob("*") if path.is_file() and path.name != "adapter_config.json"]
        names = sorted(str(path.relative_to(whole / model)) for path in files)
        assert "model.safetensors" in names
        for name in names:
            assert (folder / model / name).read_bytes() == (whole / model / name).read_bytes(), name


def moment(first: int = 1) -> tuple[int, float]:
    """An update, from number `first`, and seconds after it. Printed, so that a failure tells them."""
    update, delay_s = random.randrange(first, NUM_UPDATES - 1), random.uniform(0, 0.08)
    print(f"killed {delay_s:.3f} s after update {update}")
    return update, delay_s


@pytest.mark.parametrize("trainer", TRAINERS)
def test_killed_run_of_each_trainer_goes_on_bit_for_bit(fork, models, tmp_path, trainer):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    carry_out(make_job(trainer, models, str(whole), checkpoints=CheckpointSpec()))
    arguments = (trainer, models, str(folder))
    assert run_ranks(fork, 1, [arguments], (0, signal.SIGKILL, *moment())) == [-signal.SIGKILL]
    assert not (folder / "model").exists()
    carry_out(make_job(*arguments))
    check_same(folder, whole)
    saved = Checkpoints(folder / "checkpoints").all()
    assert [one.step for one in saved][-2:] == [NUM_UPDATES - 1, NUM_UPDATES]
    weights = [(path / "model.safetensors").read_bytes() for path in (folder / "model", saved[-1].path / "hf")]
    assert weights[0] == weights[1]


def test_runs_of_two_ranks_go_on_bit_for_bit_at_each_zero_stage(fork, models, tmp_path):
    stages = (0, 2, 3)
    made = [("sft", models, str(tmp_path / f"run{stage}"), stage) for stage in stages]
    assert run_ranks(fork, 2, [("sft", models, str(tmp_path / f"whole{stage}"), stage) for stage in stages]) == [0, 0]
    for stage, one in zip(stages, made, strict=True):
        folder = tmp_path / f"run{stage}"
        if stage == 2:
            # Only one rank gets a signal: both save the state after the same update, and end alike.
            code = 128 + signal.SIGTERM
            assert run_ranks(fork, 2, [one], (1, signal.SIGTERM, 3, 0.0)) == [code, code]
            [*_, newest] = Checkpoints(folder / "checkpoints").all()
            assert newest.step in (3, 4) and newest.problems() == []
        killed = random.randrange(2)
        codes = run_ranks(fork, 2, [one], (killed, signal.SIGKILL, *moment(5)))
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] != 0
    assert run_ranks(fork, 2, made) == [0, 0]
    for stage in stages:
        check_same(tmp_path / f"run{stage}", tmp_path / f"whole{stage}")


def test_error_of_one_rank_ends_all_and_saves_what_they_have_learned(fork, models, tmp_path):
    folder = tmp_path / "run"
    assert run_ranks(fork, 2, [("dpo", models, str(folder), 3)], "failing") == [1, 1]
    # The model has three updates; the state of the run has the two that were recorded.
    [*_, newest] = Checkpoints(folder / "checkpoints").all()
    assert (newest.step, newest.problems()) == (2, [])
    assert (folder / "model/model.safetensors").read_bytes() != (folder / "best_model/model.safetensors").read_bytes()


@pytest.mark.parametrize("has_room", [True, False])
def test_error_saves_the_model_or_says_why_not(models, tmp_path, has_room):
    folder = tmp_path / "run"
    made = make_job("kd", models, str(folder), checkpoints=CheckpointSpec())
    if not has_room:
        (tmp_path / "file").write_text("")
        made = dataclasses.replace(made, model_path=tmp_path / "file/model", checkpoints=CheckpointSpec())
    observer = Failing()
    with pytest.raises(RlhfError, match="the disk is full"):
        run_offline(made, observer)
    assert (folder / "model").exists() == has_room
    assert [warning[:29] for warning in observer.warnings] == [] if has_room else ["not everything was saved: can"]


def test_best_model_that_cannot_take_its_place_ends_the_run_with_its_state_saved(models, tmp_path, monkeypatch):
    def keep(best, update, *args, **options):
        if update:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(BestModel, "keep", keep)
    with pytest.raises(RlhfError, match=r"a file cannot be written: .*No space left on device\n\nhint: free space"):
        run_offline(make_job("kd", models, str(tmp_path / "run")), Observer())
    assert (tmp_path / "run/model/model.safetensors").exists()
    [newest] = Checkpoints(tmp_path / "run/checkpoints").all()
    assert (newest.step, newest.problems()) == (1, [])
