"""The engines that the contract of `RolloutEngine` is held against, and how tests call them."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.host import free_port
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rollout_testing import shared_memory_bucket

MAX_MODEL_LEN = 128
REQUEST_TIMEOUT_S = 90.0
CONTROL_TIMEOUT_S = 80.0
MASKED_IDS = (range(7, 9), range(300, 512))  # which the engines with a model never sample
MASKED = [token for ids in MASKED_IDS for token in ids]
PROMPT = np.arange(3, 13, dtype=np.int32)


@dataclass(frozen=True)
class Subject:
    """An engine under test, the weights it holds, and the size of its vocabulary."""

    kind: str
    engine: RolloutEngine
    weights: Mapping[str, np.ndarray]
    vocab_size: int

    @property
    def has_model(self) -> bool:
        """Whether there is a model behind it, and not a script."""
        return self.kind in ("process", "vllm")


# A fake engine behind the server, in a process of its own; the arguments are the port and the fields of its spec.
_SERVED = """
import sys
from rlhf_rollout.commands.serve import create_app
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.http.server import listen

spec = EngineSpec(**eval(sys.argv[2]))
app = create_app(FakeEngine(spec, token_latency_s=float(sys.argv[3])), {"engine": "fake"}, token=sys.argv[4])
listen(app, "127.0.0.1", int(sys.argv[1]))
"""


@contextmanager
def served_engine(spec: EngineSpec, *, token_latency_s: float = 0.0, token: str = "") -> Iterator[str]:
    """Yield the URL of a server in another process, with a fake engine of this specification behind it."""
    port = free_port()
    words = [str(port), repr(dataclasses.asdict(spec)), str(token_latency_s), token]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", _SERVED, *words], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def wait_until_up(url: str, process: subprocess.Popen) -> None:
    """Wait until the server of a process answers."""
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline and process.poll() is None, process.returncode
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf_models.testing import tiny_model_dir

    # No end token of its own, so that only what a test asks for ends a completion.
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), eos_token_id=None)
    (path / "generation_config.json").write_text("{}")
    # The tokenizer must have an end token to load. This one is not in its vocabulary, so the model cannot write it.
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    return path


@pytest.fixture(scope="session", params=["fake", "served", "process", "vllm"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    kind = request.param
    spec = EngineSpec(
        model="fake" if kind in ("fake", "served") else str(request.getfixturevalue("model_dir")),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_sleep=True,
        request_timeout_s=REQUEST_TIMEOUT_S,
        control_timeout_s=CONTROL_TIMEOUT_S,
        masked_ids=MASKED_IDS,
    )
    if kind in ("fake", "served"):
        weights: Mapping[str, np.ndarray] = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
        vocab_size = 256
    else:
        from safetensors.numpy import load_file

        weights = load_file(Path(spec.model) / "model.safetensors")
        vocab_size = 512
    with ExitStack() as stack:
        if kind == "served":  # its tokens take their time, so that there are requests in flight to pause
            url = stack.enter_context(served_engine(spec, token_latency_s=0.005))
            engine = build_engine("http", dataclasses.replace(spec, base_url=url))
        elif kind == "process":  # that of transformers, which has what the contract says through its process, too
            engine = asyncio.run(start_engine("transformers", spec))
        else:
            engine = build_engine(kind, spec)
        yield Subject(kind, engine, weights, vocab_size)
        asyncio.run(engine.close())


@asynccontextmanager
async def stopped_amid(
    engine: Any, requests: Sequence[Coroutine[Any, Any, Any]], *, num_sequences: int, num_tokens: int = 10
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Send requests to a vLLM engine, and stop its thread when `num_sequences` of theirs have `num_tokens` each.

    They are taken up together, and none ends before what the context sends to the engine, however busy the machine.
    The thread goes on at the end of the context, once it has been sent a pause, which is two calls.
    """
    loop = engine._loop
    take, reached, may_go = loop._take_outputs, threading.Event(), threading.Event()

    def take_and_stop(outputs: Any) -> None:
        take(outputs)
        lengths = sorted((len(sample.draft.token_ids) for sample in loop._samples.values()), reverse=True)
        if not reached.is_set() and lengths[num_sequences - 1 :][:1] >= [num_tokens]:
            reached.set()
            may_go.wait(60)

    await asyncio.wrap_future(loop.call(lambda core: setattr(loop, "holding", True), drain=False))
    tasks = [asyncio.create_task(request) for request in requests]
    while len(loop._waiting) < len(tasks):
        await asyncio.sleep(0.001)
    loop._take_outputs = take_and_stop
    loop.call(lambda core: setattr(loop, "holding", False), drain=False)
    try:
        assert await asyncio.to_thread(reached.wait, 60)
        yield tasks
        while loop._inbox.qsize() < 2:
            await asyncio.sleep(0.001)
    finally:
        may_go.set()
        del loop._take_outputs


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout=120))


def generate(subject: Subject, **sampling: Any) -> list[Any]:
    return run(subject.engine.generate(PROMPT, SamplingParams(**sampling)))


async def update(subject: Subject, policy_version: int, weights: Mapping[str, np.ndarray] | None = None) -> None:
    await subject.engine.begin_weight_update(policy_version)
    names = list(subject.weights if weights is None else weights)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        with shared_memory_bucket({name: (weights or subject.weights)[name] for name in part}, checksum=True) as bucket:
            await subject.engine.receive_weights(bucket)
    await subject.engine.finish_weight_update()
