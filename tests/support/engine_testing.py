"""The engines that the contract of `RolloutEngine` is held against, and how tests call them."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rollout_testing import shared_memory_bucket

MAX_MODEL_LEN = 128
REQUEST_TIMEOUT_S = 90.0
CONTROL_TIMEOUT_S = 80.0
PROMPT = np.arange(3, 13, dtype=np.int32)


@dataclass(frozen=True)
class Subject:
    """An engine under test, the weights it holds, and the size of its vocabulary."""

    kind: str
    engine: RolloutEngine
    weights: Mapping[str, np.ndarray]
    vocab_size: int


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf_models.testing import tiny_model_dir

    # No end token of its own, so that only what a test asks for ends a completion.
    path = tiny_model_dir(tmp_path_factory.mktemp("model"), eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    return path


@pytest.fixture(scope="module", params=["fake", "transformers", "vllm"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model_dir = Path() if request.param == "fake" else request.getfixturevalue("model_dir")
    spec = EngineSpec(
        model=str(model_dir),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_sleep=True,
        request_timeout_s=REQUEST_TIMEOUT_S,
        control_timeout_s=CONTROL_TIMEOUT_S,
    )
    weights: Mapping[str, np.ndarray] = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    vocab_size = 256
    if request.param != "fake":
        from safetensors.numpy import load_file

        weights, vocab_size = load_file(model_dir / "model.safetensors"), 512
    engine = build_engine(request.param, spec)
    yield Subject(request.param, engine, weights, vocab_size)
    asyncio.run(engine.close())


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
