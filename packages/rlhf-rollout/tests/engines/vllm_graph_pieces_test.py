"""Which steps an engine on a GPU replays in pieces, by vLLM's own manager of CUDA graphs. Replays need a GPU."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.vllm import core, memory, patches, worker
from rlhf_rollout.engines.vllm.internals import SETTINGS
from rlhf_rollout.protocols import SamplingParams

graph_pieces = pytest.importorskip("rlhf_rollout.engines.vllm.patches.graph_pieces", exc_type=ImportError)

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("hidden", "width", "sizes"),
    [
        (576, 1536, (256, 512, 768, 1024, 1536, 2048, 3072, 4096)),  # SmolLM2-135M
        (896, 4864, (256, 512, 768, 1024, 1536, 2048)),  # Qwen2-0.5B
        (1536, 8960, (256, 512, 768)),  # Qwen2-1.5B
        (2560, 9728, (256,)),  # Qwen3-4B
        (3584, 18_944, ()),  # Qwen2-7B
        (0, 0, ()),  # a family that does not tell
    ],
)
def test_narrow_models_have_pieces_for_more_tokens_and_large_ones_have_none(hidden, width, sizes) -> None:
    config = {"hidden_size": hidden, "intermediate_size": width}
    assert memory.piece_sizes(EngineSpec(model="m"), config) == sizes


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_patches": ("graph_pieces",)},
        {"enforce_eager": True},
        {"speculative": "ngram"},
        {"draft_model": "m"},
        {"adapter_rank": 8},
        {"images": True},
        {"return_routes": True},
        {"tensor_parallel_size": 2},
        {"max_num_batched_tokens": 128, "max_num_seqs": 64},
    ],
)
def test_engines_that_do_more_or_run_otherwise_have_none(fields) -> None:
    assert memory.piece_sizes(EngineSpec(model="m", **fields), SMALL) == ()
    assert memory.piece_sizes(EngineSpec(model="m"), SMALL | {"num_experts": 8}) == ()


def test_no_sequence_of_a_capture_is_longer_than_a_request_may_be() -> None:
    spec = EngineSpec(model="m", max_num_seqs=300, max_model_len=168)
    # The last of 300 sequences has 213 of 512 tokens, 170 of 768 and 254 of 2,048, but 127 of 1,024 and 41 of 1,536.
    assert memory.piece_sizes(spec, SMALL) == (256, 1024, 1536)


def test_memory_counts_the_activations_of_the_largest_piece(monkeypatch) -> None:
    spec = EngineSpec(model="m", dtype="bfloat16", max_num_batched_tokens=1100, max_num_seqs=100)
    skipping = replace(spec, skip_patches=("graph_pieces",))
    more = 1024 * (4 * 896 + 3 * 4864) * 2
    assert memory.gpu_work_bytes(spec, SMALL) == memory.gpu_work_bytes(skipping, SMALL) + more
    for kind in (FullAttentionSpec, SlidingWindowSpec):
        monkeypatch.setattr(kind, "max_memory_usage_bytes", lambda self, config: 1 << 40)
    layers = [FullAttentionSpec(**HEADS)]
    monkeypatch.setattr(worker.PlatformWorker, "determine_available_memory", lambda self: 1 << 30)
    monkeypatch.setattr(worker.PlatformWorker, "get_kv_cache_spec", lambda self: dict(enumerate(layers)))
    assert worker_with(spec).determine_available_memory() == (1 << 30) - more
    assert worker_with(skipping).determine_available_memory() == 1 << 30
    assert worker_with(replace(spec, kv_cache_memory_bytes=1 << 30)).determine_available_memory() == 1 << 30
    layers.append(SlidingWindowSpec(**HEADS, sliding_window=64))  # for which there will be no pieces
    assert worker_with(spec).determine_available_memory() == 1 << 30
    # A bound of the memory has counted them, and on a CPU there are none.
    assert worker_with(spec, kv_cache_memory_bytes=1 << 30).determine_available_memory() == 1 << 30


def worker_with(spec: EngineSpec, kv_cache_memory_bytes: int | None = None) -> Any:
    found = object.__new__(worker.Worker)
    cache = SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes)
    settings = {SETTINGS: core.worker_settings(spec, SMALL)}
    found.vllm_config = SimpleNamespace(additional_config=settings, cache_config=cache)
    found.model_runner = "runner"
    return found


def test_a_worker_adds_pieces_before_vllm_captures_graphs(monkeypatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(worker, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(worker.PlatformWorker, "compile_or_warm_up_model", lambda self: done.append("captured"))
    monkeypatch.setattr(worker, "patch_graphs", lambda *given: done.append(given))
    monkeypatch.setattr(worker, "replays_of", lambda *_: None)
    sampling = SamplingParams(max_tokens=48)
    spec = EngineSpec(model="m", max_num_batched_tokens=600, max_model_len=1000, expected_sampling=sampling)
    worker_with(spec).compile_or_warm_up_model()
    assert done == [("runner", [], [256, 512], 952), "captured"]


@pytest.mark.parametrize(("given", "on_gpu", "found"), [(None, True, "1"), ("0", True, "0"), (None, False, None)])
def test_vllm_breaks_graphs_only_on_a_gpu_and_where_the_user_has_not_said_no(given, on_gpu, found, monkeypatch) -> None:
    environ = {} if given is None else {core._BREAKABLE: given}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(core, "place_vllm_sockets", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    core.prepare_environment(has_pieces=False)
    assert environ.get(core._BREAKABLE) == given
    core.prepare_environment(has_pieces=True)
    assert environ.get(core._BREAKABLE) == found
    core.break_graphs_of_second_runner(SimpleNamespace(use_v2_model_runner=True))
    assert environ.get(core._BREAKABLE) == found
    core.break_graphs_of_second_runner(SimpleNamespace(use_v2_model_runner=False))
    assert environ[core._BREAKABLE] == "0"


@pytest.fixture
def runner(monkeypatch):
    """vLLM's model runner with its own manager of graphs, for 8 sequences; `breaks` is what a capture finds."""
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=1, is_last_rank=1))
    monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    monkeypatch.setenv(core._BREAKABLE, "1")
    monkeypatch.setattr(graph_pieces, "NEEDS", graph_pieces.NEEDS[len(graph_pieces.NEEDED_TO_TELL) :])
    monkeypatch.setattr(graph_pieces, "computes_plainly", lambda runner: True)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        speculative_config=None,
    )
    found = object.__new__(GPUModelRunner)
    found.breaks = 3
    manager = cudagraph_utils.CudaGraphManager(config, "cpu", CUDAGraphMode.FULL_DECODE_ONLY, 1)
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(**HEADS), layer_names=["a", "b", "c"])]
    found.cudagraph_manager = manager
    found.attn_groups = [groups]

    def capture(model: str) -> None:
        assert model == "model"
        found.captured = {
            mode: [each.num_tokens for each in each_of] for mode, each_of in manager._capture_descs.items()
        }
        entry = SimpleNamespace(capture=SimpleNamespace(num_eager_breaks=found.breaks))
        entries = dict.fromkeys(found.captured.get(PIECEWISE, ()), entry)
        manager.breakable_cg_runner = SimpleNamespace(entries=entries) if manager.use_breakable_cg else None
        manager._graphs_captured = True

    manager.capture = capture
    return found


def dispatched(runner: Any) -> list[tuple[Any, int, int | None]]:
    """Return mode, tokens and sequences of: 3 and 8 decodes, then mixed steps of 3, 5, 16, 17 and 33 tokens."""
    steps = ((3, 3, 1), (8, 8, 1), (2, 3, None), (2, 5, None), (8, 16, None), (2, 17, None), (2, 33, None))
    found = [runner.cudagraph_manager.dispatch(*step, num_active_loras=0) for step in steps]
    return [(each.cg_mode, each.num_tokens, each.num_reqs) for each in found]


WHOLE = [(FULL, 4, 4), (FULL, 8, 8)]
EAGER = [(NONE, 3, 2), (NONE, 5, 2), (NONE, 16, 8), (NONE, 17, 2), (NONE, 33, 2)]


def test_a_mixed_step_takes_the_next_larger_piece_and_one_that_decodes_its_whole_graph(runner) -> None:
    patches.patch_graphs(runner, ("shared_prefixes",), [16, 32], 0)
    assert dispatched(runner)[2][0] == NONE  # nothing is captured yet
    runner.cudagraph_manager.capture("model")
    assert runner.captured == {FULL: [8, 4, 2, 1], PIECEWISE: [32, 16]}
    pieces = [(PIECEWISE, 16, None)] * 3 + [(PIECEWISE, 32, None)]
    assert dispatched(runner) == WHOLE + pieces + EAGER[-1:]


def test_pieces_with_attention_in_them_are_dropped_with_a_warning(runner, caplog) -> None:
    runner.breaks = 2  # of three layers
    patches.patch_graphs(runner, ("shared_prefixes",), [16, 32], 0)
    runner.cudagraph_manager.capture("model")
    assert dispatched(runner) == WHOLE + EAGER
    assert runner.cudagraph_manager.use_breakable_cg is False
    assert "does without the speed-up graph_pieces" in caplog.text and "attention is in a piece" in caplog.text


def no_variable(runner: Any, patch: Any) -> None:
    patch.setenv(core._BREAKABLE, "0")


def no_name(runner: Any, patch: Any) -> None:
    patch.setattr(graph_pieces, "NEEDS", ("cudagraph_manager._gone",))


def windows(runner: Any, patch: Any) -> None:
    runner.attn_groups[0].append(SimpleNamespace(kv_cache_spec=SlidingWindowSpec(**HEADS, sliding_window=64)))


def windows_in_a_full_cache(runner: Any, patch: Any) -> None:
    runner.attn_groups[0][0].kv_cache_spec = FullAttentionSpec(**HEADS, sliding_window=64)


def other_model(runner: Any, patch: Any) -> None:
    patch.setattr(graph_pieces, "computes_plainly", lambda runner: False)


def other_graphs(runner: Any, patch: Any) -> None:
    runner.cudagraph_manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


def first_runner(runner: Any, patch: Any) -> None:
    runner.__class__ = type("Other", (), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_variable, "VLLM_USE_BREAKABLE_CUDAGRAPH is not 1"),
        (no_name, "its model runner has no cudagraph_manager._gone"),
        (windows, "more than full attention"),
        (windows_in_a_full_cache, "more than full attention"),
        (other_model, "more than full attention"),
        (other_graphs, "more than full attention"),
        (first_runner, ""),
    ],
)
def test_a_runner_that_does_not_suit_stays_as_it_is(change, said, runner, monkeypatch, caplog) -> None:
    change(runner, monkeypatch)
    capture = runner.cudagraph_manager.capture
    with caplog.at_level(logging.INFO, "rlhf_rollout"):
        patches.patch_graphs(runner, ("shared_prefixes",), [16, 32], 0)
    assert said in caplog.text and bool(said) == bool(caplog.text)
    assert runner.cudagraph_manager.capture is capture
    capture("model")
    assert runner.captured == {FULL: [8, 4, 2, 1]} and dispatched(runner) == WHOLE + EAGER
