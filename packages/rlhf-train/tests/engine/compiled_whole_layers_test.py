"""At ZeRO stage 3, layers that are taken whole compute the same when they are compiled, and give their memory back.

The compiler's front end runs here, without its code generator. Packed attention has no kernel on a CPU that can be
compiled: a stand-in masks one sequence from the other.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention

from rlhf_models.attention import packed as attention
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_forwards
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_train.engine import accelerate
from rlhf_train.engine import deepspeed as engine_file
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.engine.whole_layers import layers_taken_whole
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

# The gradient of a bias of keys is rounding alone: attention does not depend on it. This epsilon is far above it.
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, eps=1e-2, scheduler="constant", max_norm=1e9)
NUM_LAYERS, NUM_UPDATES, PASSES = 3, 3, 2
# Matrices of more than 100,000 weights: DeepSpeed leaves smaller ones gathered between passes.
SIZES = {"hidden_size": 320, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
# Not in bfloat16, where DeepSpeed's linear function rounds once more than PyTorch's, which compiled layers have.
CASES = [
    {"dtype": "float32"},
    {"dtype": "float32", "gradient_checkpointing": True, "overlap_comm": True},
    {"dtype": "float32", "gradient_checkpointing": True, "stance": "force_eager"},
]


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int | None,
    how: Any,
) -> torch.Tensor:
    """Stand in for `_varlen`: heads [T, H, D] to [1, T, H, D]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    places = torch.arange(query.shape[2])
    sequences = torch.searchsorted(cu_seqlens, places, right=True)
    mask = (sequences[:, None] == sequences) & (places[:, None] >= places)
    return scaled_dot_product_attention(query, key, value, mask, scale=how.scaling).transpose(1, 2)


def batch_of(update: int, number: int, rank: int) -> TokenBatch:
    """Two sequences, in every pass of other lengths."""
    draw = torch.Generator().manual_seed(100 * update + 10 * number + rank)
    lengths = (5 + update + rank, 9 + 2 * number)
    return TokenBatch.packed([torch.randint(3, 200, (length,), generator=draw).numpy() for length in lengths], "cpu")


def gathering_anew(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed would leave such small layers gathered until the backward pass."""
    config["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return config


class Gathered:
    """The memory of the large weights of layers as they were in their last pass."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.memory: dict[tuple[nn.Module, str], StorageWeakRef] = {}
        for layer in layers:
            layer.register_forward_pre_hook(self._note)

    def _note(self, layer: nn.Module, inputs: Any) -> None:
        for name, weight in layer.named_parameters():
            if weight.numel() > 100_000:
                self.memory[layer, name] = StorageWeakRef(weight.untyped_storage())

    def num_alive(self) -> int:
        assert len(self.memory) == 7 * NUM_LAYERS
        return sum(not memory.expired() for memory in self.memory.values())


def saved_and_loaded(engine: Any, start: Any, folder: Path, rank: int, num_ranks: int) -> tuple[Any, Gathered]:
    """A new engine that goes on where `engine` is."""
    shards = Shards()
    engine.save_shards(shards)
    shards.write(folder / f"{rank}.safetensors")
    torch.distributed.barrier()
    other, gathered = start()
    other.load_shards(ShardReader([folder / f"{number}.safetensors" for number in range(num_ranks)]))
    torch.distributed.barrier()
    return other, gathered


def train(rank: int, num_ranks: int, master: tuple[str, int], folder: str, case: dict[str, Any]) -> list[Any]:
    """Train without and with compilation. Each time: losses and norms, weights, frozen log-probs, memory, graphs."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    attention._has_kernel = lambda *args: True
    attention._varlen = masked_attention
    configure = engine_file._deepspeed_config
    engine_file._deepspeed_config = lambda *args: gathering_anew(configure(*args))
    engine_file.num_gathered_ahead = lambda layers: 0
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    accelerate.compile_unavailable_reason = lambda *args, **kwargs: None
    accelerate.compile_forwards = functools.partial(compile_forwards, backend=backend)
    results = []
    case = dict(case)
    torch.compiler.set_stance(case.pop("stance", "default"))  # "force_eager": nothing is compiled
    for torch_compile in ("off", "on"):
        settings = {"zero_stage": 3, "packing": True, "attn_implementation": "rlhf_packed", **case}
        spec = ModelSpec(path=folder, torch_compile=torch_compile, optimizer=OPTIMIZER, **settings)

        def start(spec: ModelSpec = spec) -> tuple[Any, Gathered]:
            actor = load_actor(spec.path, gradient_checkpointing=spec.gradient_checkpointing, **spec.load_options)
            layers = layers_taken_whole(actor)
            started = accelerate.start_engine(actor, spec, num_ranks=num_ranks, device="cpu", pack_tokens=None)
            return started, Gathered(layers)

        engine, gathered = start()
        found: dict[str, Any] = {"numbers": [], "alive": [], "graphs": []}
        for update in range(NUM_UPDATES):
            for number in range(PASSES):
                loss = -engine.forward(batch_of(update, number, rank)).logprobs.sum()
                found["alive"].append(gathered.num_alive())
                engine.backward(loss, is_last=number == PASSES - 1)
                found["alive"].append(gathered.num_alive())
                found["graphs"].append(len(graphs))
                found["numbers"].append(loss.item())
                torch._dynamo.config.error_on_recompile = True
            found["numbers"].append(engine.step().grad_norm)
            engine.offload()
            engine.reload()
            if update == 0:
                engine, gathered = saved_and_loaded(engine, start, Path(folder), rank, num_ranks)
        found["weights"] = {name: weight.float().numpy() for name, weight in engine.state_dict().items()}
        torch._dynamo.config.error_on_recompile = False
        frozen = accelerate.start_frozen(spec, torch.device("cpu"))
        with torch.no_grad():
            found["frozen"] = [frozen(batch_of(9, number, rank)).logprobs.float().numpy() for number in range(2)]
        results.append(found)
    return results


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case.values())))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each rank found without and with compilation."""
    folder = tiny_model_dir(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS, **SIZES)
    return run_ranks(train, 2, str(folder), request.param)


def test_compiled_layers_give_the_same_losses_norms_and_weights(ranks):
    for plain, compiled in ranks:
        assert compiled["numbers"] == pytest.approx(plain["numbers"], rel=1e-5)
        assert {*compiled["weights"]} == {*plain["weights"]}
        for name, weight in plain["weights"].items():
            np.testing.assert_allclose(compiled["weights"][name], weight, rtol=0, atol=2e-6, err_msg=name)


def test_frozen_layers_give_the_same_logprobs(ranks):
    for plain, compiled in ranks:
        for got, wanted in zip(compiled["frozen"], plain["frozen"], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_no_gathered_weight_outlives_its_layer(ranks):
    for rank in ranks:
        for found in rank:
            assert found["alive"] == [0] * (2 * NUM_UPDATES * PASSES)  # after each forward and each backward pass


def test_one_code_serves_all_layers_and_passes(ranks, request):
    expected = 0 if "force_eager" in request.node.callspec.id else 1
    for plain, compiled in ranks:
        assert {*plain["graphs"]} == {0}
        assert {*compiled["graphs"]} == {expected}
