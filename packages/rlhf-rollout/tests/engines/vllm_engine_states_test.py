"""What requests meet after control calls of the vLLM engine that fail or are given up, on a core that is scripted."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_data.own_code import TrustedModel, is_trusted
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from scripted_core import ScriptedCore

pytest.importorskip("vllm")

from rlhf_rollout.engines.vllm import engine as vllm_engine
from rlhf_rollout.engines.vllm.weights import BucketWorkerExtension

PROMPT = np.array([5, 6], np.int32)


class Core(ScriptedCore):
    """Ends each request after one token, once `may_step` is set; the calls named in `failing` raise."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Event()
        self.may_step.set()
        self.allowed = SimpleNamespace(acquire=self.may_step.wait)
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self.is_asleep = False
        self.answers: dict[str, list[Any]] = {}  # of the workers, by method
        self.engine_core.pause_scheduler = lambda mode, clear_cache: self.called("pause_scheduler")

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise RuntimeError(f"{name} failed")

    def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        self.called(method)
        return self.answers.get(method, [[]])

    def reset_encoder_cache(self) -> None:
        self.called("reset_encoder_cache")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.called("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        self.is_asleep = True
        self.level = level
        self.called("sleep")

    def wake_up(self, tags: Any) -> None:
        self.is_asleep = False
        self.called("wake_up")

    def add_request(self, request: Any) -> None:
        assert not self.is_asleep
        super().add_request(request)


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def engine(core: Core, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(vllm_engine, "resolve_model_dir", Path)
    monkeypatch.setattr(vllm_engine, "read_config", lambda path, **options: {"vocab_size": 512})
    monkeypatch.setattr(vllm_engine, "end_token_ids", lambda *paths: (0,))
    monkeypatch.setattr(vllm_engine, "build_core", lambda *args, **options: core)
    engine = vllm_engine.VllmEngine(EngineSpec(model="x", max_model_len=64, enable_sleep=True))
    yield engine
    core.may_step.set()
    asyncio.run(engine.close())


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_the_model_runs_only_with_a_trusted_name(engine: Any, monkeypatch: pytest.MonkeyPatch, trust) -> None:
    asked = []
    monkeypatch.setattr(vllm_engine, "read_config", lambda path, **options: asked.append(options) or {"vocab_size": 9})
    name = TrustedModel("x") if trust else "x"
    other = vllm_engine.VllmEngine(EngineSpec(model=name))
    asyncio.run(other.close())
    assert asked == [{"may_run": trust}]
    assert is_trusted(other._tokenizer_dir) is trust


def test_a_hub_name_of_a_model_that_vllm_would_take_for_another_is_refused(engine: Any, tmp_path, monkeypatch) -> None:
    table = np.arange(24, dtype=np.float32).reshape(6, 4)
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": table + 1}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    monkeypatch.setattr(vllm_engine, "resolve_model_dir", lambda name: tmp_path)
    with pytest.raises(ConfigError, match="ties the LM head to the embedding"):
        vllm_engine.VllmEngine(EngineSpec(model="owner/name"))


def test_a_model_whose_graphs_cannot_be_captured_can_do_without_them(engine: Any, monkeypatch) -> None:
    def build(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing: out of memory")

    monkeypatch.setattr(vllm_engine, "build_core", build)
    with pytest.raises(EngineError, match=r"is capturing(.|\n)*hint: use ``skip_patches=graph_pieces``, or"):
        vllm_engine.VllmEngine(EngineSpec(model="x"))


def test_prompt_of_one_token_is_refused_for_linear_attention(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"vocab_size": 9, "architectures": ["Qwen3NextForCausalLM"]}
    monkeypatch.setattr(vllm_engine, "read_config", lambda path, **options: config)
    other = vllm_engine.VllmEngine(EngineSpec(model="x", max_model_len=64))
    sampling = SamplingParams(max_tokens=1)
    with pytest.raises(EngineError, match=r"a prompt of one token [^\n]*\n\nhint: use prompts of two tokens or more"):
        asyncio.run(other.generate(np.array([5], np.int32), sampling))
    assert other._loop.num_in_flight == 0
    for served, prompt in ((other, [5, 6]), (engine, [5])):
        assert len(asyncio.run(served.generate(np.array(prompt, np.int32), sampling))) == 1
    asyncio.run(other.close())


def test_engines_without_a_seed_draw_one_each(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(vllm_engine, "build_core", lambda spec, *args, **options: built.append(spec) or Core())
    for seed in (None, None, 5):
        other = vllm_engine.VllmEngine(EngineSpec(model="x", seed=seed))
        other._loop.call(lambda core: None, drain=False).result(60)
        asyncio.run(other.close())
    first, second, seeded = (spec.seed for spec in built)
    assert first is not None and first != second and seeded == 5


def generate(engine: Any) -> Any:
    return engine.generate(PROMPT, SamplingParams(max_tokens=1))


async def outcome(request: Any) -> str:
    """Return "answered", or the error of a request that must not wait for ever."""
    try:
        await asyncio.wait_for(request, 60)
    except EngineError as error:
        return str(error)
    return "answered"


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("start_weight_update", "an update could not begin"),
        ("rlhf_receive_weights", "the last update failed: rlhf_receive_weights failed"),
        ("finish_weight_update", "the last update failed"),
        ("rlhf_missing_weights", "the last update failed"),
        ("rlhf_kept_layers", "the last update failed"),
        ("reset_prefix_cache", "vLLM kept prefixes that the old weights computed"),
    ],
)
def test_failed_weight_update_answers_the_requests_it_held(engine: Any, core: Core, failing: str, message: str) -> None:
    async def update(version: int) -> Any:
        await engine.begin_weight_update(version)
        held = asyncio.create_task(outcome(generate(engine)))
        while not (await engine.health()).num_in_flight:
            await asyncio.sleep(0.001)
        try:
            await engine.receive_weights(None)
            await engine.finish_weight_update()
        finally:
            update.held = held

    async def scenario() -> None:
        core.failing = {failing}
        # It says nothing about whether the weights fit.
        with pytest.raises(EngineError, match=f"vLLM could not .*: ({failing} failed|vLLM kept prefixes)"):
            await update(1)
        if held := getattr(update, "held", None):
            assert message in await held
        assert message in await outcome(generate(engine))
        core.failing = set()
        await update(2)
        assert await update.held == await outcome(generate(engine)) == "answered"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {"rlhf_kept_layers": [["b"], ["a", "b"]]},
            r"vLLM kept the old weights of 2 layers \(a, b\), though all arrived",
        ),
        (
            {"rlhf_kept_layers": [[*"fedcba"]]},
            r"vLLM kept the old weights of 6 layers \(a, b, c, d, e \.\.\.\), though all",
        ),
        (
            {"rlhf_missing_weights": [["w"]], "rlhf_kept_layers": [["a"]]},
            r"weights missing: 1 did not .* \(w\)",
        ),
    ],
)
def test_update_that_does_not_reach_the_engine_ends_with_an_error(engine: Any, core: Core, answers, message) -> None:
    async def update(version: int) -> None:
        await engine.begin_weight_update(version)
        await engine.finish_weight_update()

    async def scenario() -> None:
        core.answers = answers
        with pytest.raises(WeightSyncError, match=rf"(?s){message}.*hint: "):
            await update(1)
        refused = await outcome(generate(engine))
        assert "did not arrive" in refused or "vLLM kept the old weights of" in refused
        core.answers = {}
        await update(2)
        assert await outcome(generate(engine)) == "answered"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([[], [EngineError("not arrived")]], EngineError),
        ([[WeightSyncError("too short")], []], WeightSyncError),
        ([[EngineError("not arrived")], [WeightSyncError("too short")]], WeightSyncError),
    ],
)
def test_bucket_that_a_worker_could_not_load_raises_the_workers_error(
    engine: Any, core: Core, answers: list, kind: type[Exception]
) -> None:
    async def scenario() -> None:
        await engine.begin_weight_update(1)
        core.answers = {"rlhf_receive_weights": answers}
        reason = "too short" if kind is WeightSyncError else "not arrived"
        with pytest.raises(kind, match=reason) as raised:
            await engine.receive_weights(None)
        assert type(raised.value) is kind
        assert core.calls[-2] == "rlhf_abandon_weight_update"
        assert reason in await outcome(generate(engine))
        core.answers = {}
        await engine.begin_weight_update(2)
        await engine.receive_weights(None)
        await engine.finish_weight_update()
        assert await outcome(generate(engine)) == "answered"

    asyncio.run(scenario())


class Worker(BucketWorkerExtension):
    """A worker of vLLM that is told what happens to a bucket."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.calls: list[str] = []
        self._weight_update_active = True
        self.weight_transfer_engine = SimpleNamespace(finish_weight_update=lambda: self.calls.append("engine"))

    def update_weights(self, update_info: dict) -> None:
        assert update_info == {"bucket": "bucket"}
        if self.error is not None:
            self._weight_update_active = False
            raise self.error

    def finish_weight_update(self) -> None:
        self._weight_update_active = False
        self.calls.append("worker")


def test_abandoned_update_ends_also_where_a_worker_had_loaded_its_bucket() -> None:
    for worker, expected in ((Worker(None), "worker"), (Worker(EngineError("lost")), "engine")):
        worker.rlhf_receive_weights("bucket")
        worker.rlhf_abandon_weight_update()
        assert worker.calls == [expected]
        assert not worker._weight_update_active


def test_time_limits_of_requests_and_of_calls_that_drain_are_on_doing_nothing(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = engine._loop.progress
    plain = vllm_engine.deadline
    limits = []

    def noted(timeout_s: float, what: str, *, progress: Any = None) -> Any:
        limits.append((what, timeout_s, progress))
        return plain(timeout_s, what, progress=progress)

    async def scenario() -> None:
        await generate(engine)
        await engine.pause("drain")
        assert progress.is_paused
        await engine.resume()
        assert not progress.is_paused
        await engine.pause("keep")
        await engine.health()

    monkeypatch.setattr(vllm_engine, "deadline", noted)
    asyncio.run(scenario())
    spec = engine._spec
    control_s = spec.control_timeout_s
    assert limits == [
        ("a generation request", spec.request_timeout_s, progress),
        ("`pause`", control_s + spec.request_timeout_s, progress),
        ("`resume`", control_s, None),
        ("`pause`", control_s, None),
        ("`health`", spec.health_timeout_s, None),
    ]


@pytest.mark.parametrize(("keep_kv", "images"), [(False, False), (True, True)])
def test_kept_request_goes_on_at_the_end_of_the_update_and_not_amid_it(
    engine: Any, core: Core, keep_kv: bool, images: bool
) -> None:
    engine._spec = dataclasses.replace(engine._spec, keep_kv=keep_kv, images=images)

    async def scenario() -> None:
        core.may_step.clear()
        running = asyncio.create_task(outcome(generate(engine)))
        while not core.running:
            await asyncio.sleep(0.001)
        pausing = asyncio.create_task(engine.pause("keep"))
        core.num_tokens = 0  # the step at hand ends no request
        core.may_step.set()
        assert await pausing == 1
        await engine.begin_weight_update(1)
        await engine.resume()
        core.num_tokens = 1
        num_steps = len(core.batches)
        await engine.receive_weights(None)
        assert len(core.batches) == num_steps
        await engine.finish_weight_update()
        assert await running == "answered"
        assert core.calls.count("reset_prefix_cache") == (not keep_kv)
        assert core.calls.count("reset_encoder_cache") == images

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["begin_weight_update", "pause"])
def test_call_given_up_while_it_drains_holds_no_request_back(engine: Any, core: Core, call: str) -> None:
    async def scenario() -> None:
        core.may_step.clear()
        running = asyncio.create_task(outcome(generate(engine)))
        while not core.running:
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(getattr(engine, call)({"pause": "drain"}.get(call, 1)), 0.2)
        waiting = asyncio.create_task(outcome(generate(engine)))
        core.may_step.set()
        assert [await running, await waiting, await outcome(generate(engine))] == ["answered"] * 3
        assert "start_weight_update" not in core.calls
        assert not (await engine.health()).is_paused

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("keep_weights", "holds_more", "level"),
    [(True, [False], 1), (False, [False, False], 2), (False, [False, True], 1)],
)
def test_sleep_on_a_gpu_drops_weights_unless_the_model_holds_what_an_update_does_not_bring(
    engine: Any, core: Core, keep_weights: bool, holds_more: list[bool], level: int
) -> None:
    engine._on_gpu = True
    core.answers["rlhf_holds_more_than_weights"] = holds_more
    asyncio.run(engine.sleep(keep_weights))
    assert core.level == level


def test_sleep_that_fails_refuses_requests_until_the_engine_is_woken_up(engine: Any, core: Core) -> None:
    async def scenario() -> None:
        core.failing = {"sleep"}
        with pytest.raises(RuntimeError, match="sleep failed"):
            await engine.sleep()
        assert "the engine sleeps" in await outcome(generate(engine))
        await engine.wake_up()
        assert await outcome(generate(engine)) == "answered"

    asyncio.run(scenario())
