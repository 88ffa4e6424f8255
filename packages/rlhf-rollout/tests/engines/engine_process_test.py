"""An engine in a process of its own: how its errors and warnings arrive, and that no process is left over."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine_processes import started_by
from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, EngineError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.process import ProcessEngine, packed, start_engine, unpacked
from rlhf_rollout.engines.process_host import _Host
from rlhf_rollout.protocols import Draft, SamplingParams

PROMPT = np.array([4, 5, 6], np.int32)
FAKE = EngineSpec(model="fake")


async def until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_killed_process_is_an_error_with_a_hint_and_later_calls_fail_at_once(monkeypatch):
    monkeypatch.setenv("VLLM_OF_THIS_TEST", "a value")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@127.0.0.1:9")
    engine = ProcessEngine("fake", FAKE)
    await engine.ready()
    guard, worker = sorted(started_by(os.getpid()))
    for process_id in (guard, worker):  # they have the environment of this process
        variables = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
        assert {b"VLLM_OF_THIS_TEST=a value", b"HTTPS_PROXY=http://user:password@127.0.0.1:9"} <= set(variables)
    await engine.begin_weight_update(1)  # holds the request back
    request = asyncio.create_task(engine.generate(PROMPT, SamplingParams()))
    while not (await engine.health()).num_in_flight:
        await asyncio.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    gone = r"^the engine's process was ended by SIGKILL\s+hint: the log tells why, .* ran out of memory$"
    with pytest.raises(EngineError, match=gone):
        await request
    for call in (engine.health(), engine.generate(PROMPT, SamplingParams()), engine.finish_weight_update()):
        with pytest.raises(EngineError, match=gone):
            await asyncio.wait_for(call, 5)
    assert "engine-calls" in {thread.name for thread in threading.enumerate()}
    await engine.close()
    assert "engine-calls" not in {thread.name for thread in threading.enumerate()}
    assert not {guard, worker} & started_by(os.getpid()).keys()
    with pytest.raises(EngineError, match="the engine was closed"):
        await engine.health()


async def test_what_a_killed_process_wrote_is_known(tmp_path):
    model = str(tiny_model_dir(tmp_path, eos_token_id=None, max_position_embeddings=4096))
    engine = await start_engine("transformers", EngineSpec(model=model, max_model_len=4096))
    worker = max(started_by(os.getpid()))
    draft = Draft()
    request = asyncio.create_task(
        engine.generate(PROMPT, SamplingParams(max_tokens=4000, min_tokens=4000), drafts=[draft])
    )
    try:
        await until(lambda: draft.token_ids or request.done(), "nothing is told of the request")
        assert 0 < len(draft.token_ids) == len(draft.logprobs) < 4000
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineError, match="was ended by SIGKILL"):
            await request
        assert draft.token_ids and draft.versions == [(0, 0)] and draft.finish_reason is None
    finally:
        await engine.close()


async def test_engine_that_does_not_start_tells_why_as_in_this_process():
    spec = EngineSpec(model="fake", images=True)
    engine = ProcessEngine("fake", spec)
    with pytest.raises(ConfigError) as there:
        await engine.ready()
    await engine.close()
    with pytest.raises(ConfigError) as here:
        build_engine("fake", spec)
    assert str(there.value) == str(here.value) and "hint: " in str(here.value)
    assert not started_by(os.getpid())


async def test_kinds_without_a_model_stay_in_this_process():
    assert isinstance(await start_engine("fake", FAKE), FakeEngine)
    with pytest.raises(ConfigError, match="unknown engine `fak`"):
        await start_engine("fak", FAKE)


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
async def test_start_that_is_given_up_leaves_no_process(tmp_path, leave):
    model = str(tiny_model_dir(tmp_path))
    spec = EngineSpec(model=model, start_timeout_s=0.3 if leave == "deadline" else 600)
    start = asyncio.create_task(start_engine("transformers", spec))
    await until(lambda: len(started_by(os.getpid())) == 2 or start.done(), "the process has not started")
    if leave == "cancel":
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    else:
        with pytest.raises(EngineError, match=r"the start of an engine's process took longer than 0\.3 s"):
            await start
    assert not started_by(os.getpid())


async def test_host_hands_on_what_the_engine_logs_once():
    async def sleep(keep_weights):
        logging.getLogger("rlhf_rollout.engines.some").warning("a patch is left out: %d", 7)

    host = _Host()
    host.part = SimpleNamespace(sleep=sleep)
    message = {"method": "call", "arguments": packed(("sleep", True))}
    first = await host(message)
    assert first["logged"] == [("rlhf_rollout.engines.some", logging.WARNING, "a patch is left out: 7")]
    assert unpacked(first["result"]) is None and not first["is_raised"]
    host.part = SimpleNamespace(sleep=lambda keep_weights: asyncio.sleep(0))
    assert (await host(message))["logged"] == []
    logging.getLogger("rlhf_rollout").removeHandler(host._logged)


async def test_interrupted_command_leaves_no_process(tmp_path):
    model = tiny_model_dir(tmp_path / "model", eos_token_id=None)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": f"{n} + 1 ="} for n in range(200)])
    out = tmp_path / "out.jsonl"
    words = f"generate --engine transformers --pretrain {model} --prompt_data {prompts} --output_path {out}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "rlhf_rollout.commands.main", *words.split(), "--generate_max_len", "400"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        await until(lambda: (out.exists() and out.stat().st_size) or process.poll() is not None, "no rollouts")
        assert len(started_by(process.pid)) == 2
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    await until(lambda: not started_by(process.pid), "a process of the engine is left")
