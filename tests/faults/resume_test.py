"""A run that is killed, or told to end, goes on as if nothing had happened: the same numbers, bit for bit.

What the killed run leaves, processes and files, is gone at the end.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlhf_data.sampler import EpochSampler
from warm_commands import warm_commands

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500
NUM_STEPS = 5
FLAGS = ["--train_steps", str(NUM_STEPS), "--eval_steps", "2", "--enable_ema", "--running_reward_norm"]
FLAGS += ["--rollout_batch_size", "16", "--train_batch_size", "32", "--early_forwards", "--difficulty_pool"]
FLAGS += ["--packing_samples"]
NOT_NUMBERS = ("time/", "startup/", "throughput/", "memory/")  # they differ between any two runs
SECONDS = re.compile(r'"score_seconds": [\d.e-]+')
BUILTIN = "packages/rlhf-cli/src/rlhf_cli/builtin"
# The built-in model learns to draft for itself. Which tokens a seed gives depends on the drafts.
FLAGS += ["--vllm_draft_model", str(ROOT / BUILTIN / "model"), "--draft_learning_rate", "1e-3"]
GONE_S = 60  # for processes to notice that the one that started them was killed


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[Path]:
    """The runs' folder for temporary files; its short path leaves room for the names of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="runs", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", "RAY_TMPDIR"):
            patch.setenv(name, str(folder))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flag that evaluates on a few held-out prompts of the built-in task."""
    few = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    lines = (ROOT / BUILTIN / "data/held_out.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:16]))
    return ["--eval_data", str(few)]


@pytest.fixture(scope="module")
def forked(scratch: Path) -> Iterator[list[str]]:
    """The words that start a run whose processes are forks. Runs that are to be killed are new interpreters."""
    with warm_commands() as words:
        yield words


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a file of a folder open or name it in their command."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = process.cmdline() + [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if any(str(folder) in text for text in texts):
            found.append(process)
    return found


def shared_memory() -> set[str]:
    """Return the shared-memory segments of the kinds that PyTorch, Python and Ray make; tests beside this one have
    others."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "psm_", "plasma"))}


def start(folder: Path, *flags: str, words: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
    """Start `ppo` in a session of its own: by `words`, Bazel's binary where there is one, or the module."""
    binary = ROOT / "packages/rlhf-cli/ppo"
    command = [str(binary)] if binary.is_file() else [sys.executable, "-m", "rlhf_cli.commands.ppo"]
    environment = os.environ | {"BUILD_WORKING_DIRECTORY": str(folder.parent), "RAY_ADDRESS": "local"} | variables
    environment["OMP_NUM_THREADS"] = "1"  # as forks have
    if words:
        command = [*words, "ppo"]
    else:
        environment.pop("RAY_RUNTIME_ENV_HOOK", None)  # which lets Ray's workers be forks
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path, words: Sequence[str], *flags: str, **variables: str) -> None:
    status = start(folder, *flags, words=words, **variables).wait(TIMEOUT_S)
    assert status == 0, folder.with_suffix(".log").read_text()[-4000:]


def steps_of(folder: Path) -> int:
    """Return the last step in the run's metrics, -1 before the first line."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)


def signal_when(
    run: subprocess.Popen[bytes],
    number: int,
    is_time: Callable[[], bool],
    folder: Path,
    send: Callable[[int, int], None] = os.kill,
) -> int:
    """Send a signal to the process, or with `os.killpg` to its group, as soon as `is_time`; return the exit status."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_time():
        assert run.poll() is None and time.monotonic() < deadline, folder.with_suffix(".log").read_text()[-4000:]
        time.sleep(0.02)
    send(run.pid, number)
    return run.wait(TIMEOUT_S)


def numbers(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(NOT_NUMBERS)} for line in lines]


def rollouts(folder: Path, name: str) -> str:
    return SECONDS.sub("", (folder / name).read_text())


def check_same(folder: Path, whole: Path) -> None:
    assert numbers(folder) == numbers(whole)
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        assert rollouts(folder, name) == rollouts(whole, name)
    check_same_weights(folder, whole)


def check_same_weights(folder: Path, whole: Path) -> None:
    models = [{path.parent.name for path in run.glob("*/model.safetensors")} for run in (folder, whole)]
    assert models[0] == models[1] >= {"model", "ema_model"}
    for model in models[0]:
        weights, expected = (load_file(path / model / "model.safetensors") for path in (folder, whole))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)


def check_that_nothing_is_left(scratch: Path, shared_before: set[str]) -> None:
    """Check that the runs have removed their files and processes, and those of the run that ended before them."""
    left = [path for path in scratch.glob("ray/session_*") if path.is_dir()]
    assert not left, [sorted(folder.rglob("*")) for folder in left]
    assert set(os.listdir(scratch)) <= {"ray", "torchinductor_root"}  # the second is PyTorch's cache
    new = shared_memory() - shared_before
    deadline = time.monotonic() + GONE_S
    while new & shared_memory():  # those of tests beside this one go by themselves
        assert time.monotonic() < deadline, new & shared_memory()
        time.sleep(0.1)
    deadline = time.monotonic() + GONE_S
    while left := processes_in(scratch):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_killed_run_goes_on_bit_for_bit_and_leaves_nothing(scratch, forked, held_out, tmp_path, request):
    shared_before = shared_memory()
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"
    flags = [*FLAGS, *held_out, "--save_path", str(folder), "--save_steps", "1", "--max_ckpt_num", "2"]
    flags.append("--save_hf_ckpt")
    # SIGKILL in the middle of a step, after a checkpoint.
    run = start(folder, *flags)
    assert signal_when(run, signal.SIGKILL, (checkpoints / "step-2/manifest.json").exists, folder) == -signal.SIGKILL
    assert not (checkpoints / "step-4").exists()
    assert processes_in(scratch) and list(scratch.glob("ray/session_*"))  # the killed run left them
    # Beside what follows: the same run without an interruption and without checkpoints.
    whole = tmp_path / "whole"
    uninterrupted = start(whole, *FLAGS, *held_out, "--save_path", str(whole), words=forked)
    request.addfinalizer(uninterrupted.kill)
    # The newest checkpoint is torn: the run says so and goes on from the one before.
    newest = max(checkpoints.glob("step-*"))
    torn = newest / "actor-0-of-1.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    finish(folder, forked, "--resume", str(folder))
    text = folder.with_suffix(".log").read_text()
    assert f"the checkpoint {newest} is skipped: actor-0-of-1.safetensors has" in text
    assert uninterrupted.wait(TIMEOUT_S) == 0, whole.with_suffix(".log").read_text()[-4000:]
    check_same(folder, whole)
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{NUM_STEPS - 1}", f"step-{NUM_STEPS}"]
    folders = (checkpoints / f"step-{NUM_STEPS}/hf", folder / "model")
    saved, final = (load_file(path / "model.safetensors") for path in folders)
    assert saved.keys() == final.keys() and all(torch.equal(saved[name], final[name]) for name in final)
    check_that_nothing_is_left(scratch, shared_before)


def test_terminated_asynchronous_run_trains_every_prompt_once(scratch, forked, held_out, tmp_path):
    """With groups that wait and groups in flight: none is lost, none trained twice, none older than allowed."""
    shared_before = shared_memory()
    folder = tmp_path / "run"
    max_staleness = 2
    batch_size = 16
    flags = [*held_out, "--async_train", "--max_staleness", str(max_staleness), "--at_update", "keep", "--enable_ema"]
    flags += ["--old_logprobs", "rollout", "--rollout_batch_size", str(batch_size), "--train_batch_size", "64"]
    flags += ["--train_steps", str(NUM_STEPS), "--eval_steps", "2", "--save_path", str(folder), "--save_steps", "1"]
    run = start(folder, *flags)
    saved = folder / "checkpoints/step-2"
    # SIGTERM to its process group, as `timeout` sends it, ends it properly.
    status = signal_when(run, signal.SIGTERM, (saved / "manifest.json").exists, folder, os.killpg)
    text = folder.with_suffix(".log").read_text()
    assert status == 128 + signal.SIGTERM, text[-4000:]
    assert f"`rlhf ppo --resume {folder}` continues this run" in text
    assert 2 <= steps_of(folder) < NUM_STEPS
    state = json.loads((saved / "state.json").read_bytes())["rollouts"]["stream"]
    assert len(state["tickets"]) == (max_staleness + 1) * batch_size  # queued and in flight
    # The command of the start with --load_checkpoint does the same as --resume.
    finish(folder, forked, *flags, "--load_checkpoint")
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == sorted(one["step"] for one in records)
    groups = {one["group_id"]: one for one in records}
    assert len(records) == 4 * len(groups) == 4 * NUM_STEPS * batch_size
    # The prompts are the first ones of the seeded order, each once.
    num_prompts = len((ROOT / BUILTIN / "data/train.jsonl").read_text().splitlines())
    order = EpochSampler(num_prompts, batch_size, seed=42).take(NUM_STEPS * batch_size)
    asked = sorted(int(one["prompt_id"].rpartition(":")[2]) for one in groups.values())
    assert asked == sorted((order + 1).tolist())
    for one in records:
        versions = [span["policy_version"] for span in one["spans"] if span["source"] == "policy"]
        assert versions == sorted(versions) and one["step"] - 1 - versions[0] <= max_staleness
    lines = numbers(folder)
    assert [line["step"] for line in lines if "policy/loss" in line] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4, NUM_STEPS]
    # The record has the order in which groups were trained: without an engine, the run is repeated bit for bit.
    again = tmp_path / "again"
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison/vllm.py").write_text("import os\n\nos._exit(99)\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path / "poison"), os.environ.get("PYTHONPATH")]))
    finish(again, forked, "--replay", str(folder), "--save_path", str(again), PYTHONPATH=paths)
    check_same_weights(again, folder)
    assert (again / "rollouts.jsonl").read_bytes() == (folder / "rollouts.jsonl").read_bytes()
    check_that_nothing_is_left(scratch, shared_before)
