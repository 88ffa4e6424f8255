"""Ranks that divide the weights of layers compute what one rank computes: outputs, gradients, their norm, updates, and
what is saved and sent."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from rlhf_data.errors import CheckpointError, ConfigError
from rlhf_models.loading import load_actor
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.host import free_port
from rlhf_train.engine.shards import COLUMN_PARTS, ShardReader, Shards, WeightPart, column_parts, load_weights
from rlhf_train.engine.tensor_parallel import check_divides, divide_weights, join_tensor_group
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SIZES = {
    "vocab_size": 320, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),  # biases of columns and of rows
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),  # norms of heads, whole on each rank, of which each has some
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 3}),
}
ROWS = torch.arange(12).view(2, 6) * 7 % SIZES["vocab_size"]


class Wrapped(nn.Module):
    """As models of rlhf_models have a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def new_model(family: str, **changes: Any) -> Any:
    prefix, fields = FAMILIES[family]
    kind = getattr(transformers, f"{prefix}Model")
    torch.manual_seed(5)
    model = kind(kind.config_class(**(SIZES | fields | changes), attn_implementation="eager")).double()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # biases start as zeros and scales as ones, which would hide mistakes
            weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name))).double()
    return model


def loss_of(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum()


def divided_passes(rank: int, num_ranks: int, master: Any, size: int) -> dict[str, Any]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(size)
    found: dict[str, Any] = {"place": (group.rank, group.size, group.data_rank, group.data_size)}
    for family in FAMILIES:
        model = new_model(family)
        if family == "llama":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        num_all = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim > 1)
        wrapped = Wrapped(model)
        divide_weights(wrapped, group)
        num_own = sum(weight.numel() for weight in model.layers.parameters() if weight.ndim > 1)
        assert num_own * size == num_all
        hidden = model(input_ids=ROWS + group.data_rank).last_hidden_state
        loss_of(hidden).backward()
        norm = group.norm(list(model.parameters()))
        whole = {name: group.whole(weight).numpy().copy() for name, weight in model.named_parameters()}
        gradients = {}
        for name, weight in model.named_parameters():
            weight.data = weight.grad
            gradients[name] = group.whole(weight).numpy().copy()
        found[family] = (hidden.detach().numpy(), gradients, whole, norm)
    return found


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2)])
def test_outputs_and_gradients_are_those_of_plain_transformers_in_float64(num_ranks, size):
    ranks = run_ranks(divided_passes, num_ranks, size)
    assert [rank["place"] for rank in ranks] == [
        (n % size, size, n // size, num_ranks // size) for n in range(num_ranks)
    ]
    for rank in ranks:
        for family in FAMILIES:
            plain = new_model(family)
            weights = {name: weight.detach().clone().numpy() for name, weight in plain.named_parameters()}
            wanted = plain(input_ids=ROWS + rank["place"][2]).last_hidden_state
            loss_of(wanted).backward()
            hidden, gradients, whole, norm = rank[family]
            np.testing.assert_allclose(hidden, wanted.detach().numpy(), rtol=1e-9, atol=1e-9, err_msg=family)
            assert gradients.keys() == whole.keys() == weights.keys()
            for name, weight in plain.named_parameters():
                assert np.array_equal(whole[name], weights[name])
                largest = weight.grad.abs().max()
                assert largest > 1e-3
                # Gemma's norms of heads add up over tokens and heads in float32.
                tolerance = 1e-6 if family == "gemma3" and "self_attn" in name and weight.ndim == 1 else 1e-9
                error = np.abs(gradients[name] - weight.grad.numpy()).max()
                assert error < tolerance * float(largest), f"{family} {name}"
            squares = sum(float(weight.grad.square().sum()) for weight in plain.parameters())
            assert norm == pytest.approx(squares**0.5, rel=1e-8)


# -- the engine --------------------------------------------------------------------------------------------------

SPEC = OptimizerSpec(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, scheduler="constant", max_norm=0.5)


@dataclasses.dataclass(frozen=True)
class Layout:
    size: int = 1
    zero_stage: int = 1
    dtype: str = "float32"
    offload: bool = False


LAYOUTS = {
    "ZeRO 0": Layout(2, zero_stage=0),
    "ZeRO 1": Layout(2),
    "ZeRO 2": Layout(2, zero_stage=2),
    "bfloat16": Layout(2, dtype="bfloat16"),
    "bfloat16, ZeRO 2": Layout(2, zero_stage=2, dtype="bfloat16"),
    "bfloat16, offloaded": Layout(2, dtype="bfloat16", offload=True),
}


def new_engine(path: str, num_ranks: int, layout: Layout, group: Any) -> Any:
    from rlhf_train.engine.accelerate import start_engine

    optimizer = dataclasses.replace(SPEC, offload=layout.offload)
    spec = ModelSpec(
        path=path,
        dtype=layout.dtype,
        zero_stage=layout.zero_stage,
        tensor_parallel_size=layout.size,
        optimizer=optimizer,
    )
    model = load_actor(path, dtype=layout.dtype)
    return start_engine(model, spec, num_ranks=num_ranks, device="cpu", pack_tokens=None, tensor_group=group)


def train(engine: Any, updates: range, data_rank: int, data_size: int) -> list[float]:
    """Two micro-batches of each half of the rows per update; returns the norms."""
    from rlhf_models.batch import TokenBatch

    norms = []
    for update in updates:
        rng = np.random.default_rng(update)
        rows = [rng.integers(3, 300, 8) for _ in range(8)]
        own = rows[data_rank::data_size]
        for part in (0, 1):
            batch = TokenBatch.padded(own[part::2], 0)
            output = engine.forward(batch)
            engine.backward(-output.logprobs.sum() / 56, is_last=part == 1)
        norms.append(engine.step().grad_norm)
    return norms


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors.items()}


def trained(rank: int, num_ranks: int, master: Any, path: str, folder: str, layouts: dict[str, Layout]) -> Any:
    """Train, save, average, sleep; go on from the files of other layouts."""
    from rlhf_train.engine.process_group import init_process_group
    from rlhf_train.run.ema import WeightAverage
    from rlhf_train.run.rank_state import StateWriter

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(next(iter(layouts.values())).size)
    place = (rank, num_ranks) if group is None else (group.data_rank, group.data_size)
    results = {}
    for name, layout in layouts.items():
        home = Path(folder, f"{name}-{num_ranks}")
        home.mkdir(exist_ok=True)
        engine = new_engine(path, num_ranks, layout, group)
        found: dict[str, Any] = {"norms": train(engine, range(2), *place), "has sums": bool(engine.gradient_sums)}
        average = WeightAverage(0.5, engine.local_weights())
        found["norms"] += train(engine, range(2, 3), *place)
        average.update(engine.local_weights())
        found["weights"] = arrays(engine.state_dict())
        engine.offload()
        found["sent"] = {key: weight.float().numpy().copy() for key, weight in engine.named_weights()}
        engine.reload()
        with average.in_place_of(engine.local_weights()):
            found["average"] = arrays(engine.state_dict())
        assert engine.state_dict(wanted=False) == {}
        writer = StateWriter(rank, num_ranks)
        writer.save({"actor": engine}, home, average)
        writer.finish()
        torch.distributed.barrier()
        found["norms"] += train(engine, range(3, 5), *place)
        found["after"] = arrays(engine.state_dict())
        results[name] = found
    return results


def resumed(rank: int, num_ranks: int, master: Any, path: str, folder: str, layout: Layout, files: list[str]) -> Any:
    """Go on from the state in each of the folders."""
    from rlhf_train.engine.process_group import init_process_group
    from rlhf_train.run.ema import WeightAverage
    from rlhf_train.run.rank_state import StateWriter

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(layout.size)
    place = (rank, num_ranks) if group is None else (group.data_rank, group.data_size)
    results = {}
    for name in files:
        engine = new_engine(path, num_ranks, layout, group)
        average = WeightAverage(0.5, engine.local_weights())
        train(engine, range(1), *place)
        StateWriter(rank, num_ranks).load({"actor": engine}, Path(folder, name), average)
        with average.in_place_of(engine.local_weights()):
            kept = arrays(engine.state_dict())
        norms = train(engine, range(3, 5), *place)
        results[name] = {"average": kept, "norms": norms, "after": arrays(engine.state_dict())}
    return results


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(tiny_model_dir(folder, vocab_size=320, num_attention_heads=4, num_key_value_heads=4, hidden_size=32))


@pytest.fixture(scope="module")
def states(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def whole(model_path, states) -> dict[str, Any]:
    """One rank that has all weights."""
    layouts = {"float32": Layout(), "bfloat16": Layout(dtype="bfloat16")}
    return trained(0, 1, ("127.0.0.1", free_port()), model_path, states, layouts)


@pytest.fixture(scope="module")
def divided(model_path, states) -> dict[int, list[Any]]:
    return {number: run_ranks(trained, number, model_path, states, LAYOUTS) for number in (2, 4)}


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.abs(found[name] - value).max() < tolerance, name


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_engine_of_divided_weights_trains_sends_and_averages_as_one_of_whole_weights(whole, divided, name, num_ranks):
    dtype = LAYOUTS[name].dtype
    tolerance, norm_tolerance = (2e-5, 1e-5) if dtype == "float32" else (1e-2, 2e-2)
    wanted = whole[dtype]
    assert min(wanted["norms"]) > SPEC.max_norm  # every gradient is clipped
    for rank in divided[num_ranks]:
        found = rank[name]
        assert found["norms"] == pytest.approx(wanted["norms"], rel=norm_tolerance)
        assert found["norms"] == divided[num_ranks][0][name]["norms"]
        for part in ("weights", "sent", "after"):
            assert_close(found[part], wanted[part], tolerance)
    assert_close(divided[num_ranks][0][name]["average"], wanted["average"], tolerance)


def test_stage_2_does_as_stage_1_where_no_ranks_have_the_same_weights(divided):
    names = ("bfloat16", "bfloat16, ZeRO 2")
    assert [divided[2][0][name]["has sums"] for name in names] == [True, True]
    assert [divided[4][0][name]["has sums"] for name in names] == [True, False]


# -- files -------------------------------------------------------------------------------------------------------


def assert_goes_on(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found["norms"] == pytest.approx(wanted["norms"][3:], rel=1e-5 if tolerance < 1e-4 else 2e-2)
    assert_close(found["after"], wanted["after"], tolerance)
    assert_close(found["average"], wanted["average"], tolerance)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, Layout()), (2, Layout(2, zero_stage=2)), (4, Layout(4, zero_stage=0)), (4, Layout(2)), (2, Layout(1))],
    ids=str,
)
def test_run_goes_on_from_files_of_any_division(whole, divided, model_path, states, num_ranks, layout):
    files = ["ZeRO 0-2", "ZeRO 1-4", "ZeRO 2-4", "float32-1"]
    first = run_ranks(resumed, num_ranks, model_path, states, layout, files)[0]
    for name in files:
        assert_goes_on(first[name], whole["float32"], 3e-5)


def test_run_in_bfloat16_goes_on_from_files_of_any_division(whole, divided, model_path, states):
    files = ["bfloat16-4", "bfloat16, ZeRO 2-2", "bfloat16, offloaded-4", "bfloat16-1"]
    for layout in (Layout(2, dtype="bfloat16", offload=True), Layout(2, 2, dtype="bfloat16")):
        first = run_ranks(resumed, 2, model_path, states, layout, files)[0]
        for name in files:
            assert_goes_on(first[name], whole["bfloat16"], 1e-2)
    # Where nothing differs, the run that goes on is the uninterrupted one to the last bit.
    own = divided[2][0]["bfloat16, ZeRO 2"]
    assert_close(first["bfloat16, ZeRO 2-2"]["after"], own["after"], 1e-9)
    assert first["bfloat16, ZeRO 2-2"]["norms"] == own["norms"][3:]


def test_files_hold_each_weight_once_and_load_into_a_whole_model(whole, divided, model_path, states):
    sizes = {}
    for name in ("ZeRO 0-4", "ZeRO 1-4", "ZeRO 2-2", "float32-1"):
        reader = ShardReader(sorted(Path(states, name).glob("actor-*.safetensors")))
        model = load_actor(model_path, dtype="float32")
        load_weights(model, reader)
        weights = arrays(dict(model.named_parameters()))
        assert_close(weights, {key: whole["float32"]["weights"][key] for key in weights}, 2e-5)
        kept = [key for key in reader._parts if not key.startswith(("random", "average"))]
        sizes[name] = sum(size for key in kept for _, size, _ in reader._parts[key])
    assert len(set(sizes.values())) == 1


def test_columns_in_parts_are_put_together_and_cut_anew(tmp_path):
    matrix = torch.arange(24.0).view(3, 8)
    for rank, part in enumerate(matrix.chunk(2, dim=1)):
        shards = Shards()
        shards.add("weight/rows", part[:1].flatten(), rank * 4)
        for kind in ("weight", "exp_avg"):
            shards.add(f"{kind}/columns", part.flatten()[:5], rank * 12)
            shards.add(f"{kind}/columns", part.flatten(), rank * 12)
        shards.numbers[COLUMN_PARTS] = {"columns": [2, 3, 8]}
        shards.write(tmp_path / f"{rank}.safetensors")
    reader = ShardReader(sorted(tmp_path.iterdir()))
    assert reader.read("weight/columns", 0, 24).tolist() == matrix.flatten().tolist()
    assert reader.read("exp_avg/columns", 7, 5).tolist() == [7, 8, 9, 10, 11]
    assert reader.read("weight/rows", 0, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    for count in (2, 4):
        reader.column_parts = {"columns": [count, 3, 8]}
        flat = torch.cat([part.flatten() for part in matrix.chunk(count, dim=1)])
        assert reader.read("weight/columns", 4, 11).tolist() == flat[4:15].tolist()
    with pytest.raises(CheckpointError, match="lacks elements 0 to 3 of weight/others"):
        reader.read("weight/others", 0, 4)
    with pytest.raises(CheckpointError, match="lacks elements 12 to 23 of weight/columns"):
        ShardReader([tmp_path / "0.safetensors"]).read("weight/columns", 0, 4)


def test_parts_of_a_weight_are_told_from_those_of_another():
    module = nn.Linear(4, 6)
    assert column_parts(module) == {}
    module.weight.part = WeightPart(1, 1, 2)
    module.bias.part = WeightPart(0, 1, 2)
    assert column_parts(module) == {"weight": [2, 6, 8]}


# -- what cannot be divided --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message", "hint"),
    [
        ({}, 3, "a model has 3 training process", "use 2 of them, or a multiple"),
        ({"zero_stage": 3}, 2, "--zero_stage is 3", "use --zero_stage 2"),
        ({"sequence_parallel_size": 2}, 4, "--sequence_parallel_size divides tokens", "use one of them"),
        ({"lora": object()}, 2, "--lora_rank adds matrices", "drop one"),
        ({"optimizer": dataclasses.replace(SPEC, muon_momentum=0.9)}, 2, "--optim muon", "use --optim adam"),
        ({"torch_compile": "on"}, 2, "--torch_compile is on", "leave --torch_compile at auto"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, num_ranks, message, hint):
    with pytest.raises(ConfigError, match=rf"(?s)--ds_tensor_parallel_size 2 divides.* and {message}.*hint: {hint}"):
        ModelSpec(path="", tensor_parallel_size=2, **changes).check_ranks(num_ranks)


def test_settings_that_go_together_are_not_refused():
    offloaded = dataclasses.replace(SPEC, offload=True)
    ModelSpec(path="", tensor_parallel_size=2, optimizer=offloaded, dtype="bfloat16").check_ranks(2)  # nothing to shard
    ModelSpec(path="", tensor_parallel_size=2, optimizer=SPEC).check_ranks(4)
    with pytest.raises(ConfigError, match="--zero_stage is 2"):
        ModelSpec(path="", tensor_parallel_size=2, optimizer=offloaded, dtype="bfloat16").check_ranks(4)


def config(family: str = "Llama", **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**(SIZES | changes))


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (config(), 3, "must divide the model's num_attention_heads, which is 4\n\nhint: use 2"),
        (config(num_key_value_heads=1), 2, "num_key_value_heads, which is 1\n\nhint: drop it"),
        (config(), 4, "must divide the model's num_key_value_heads, which is 2\n\nhint: use 2"),
        (config(num_key_value_heads=4, intermediate_size=42), 4, "intermediate_size, which is 42\n\nhint: use 2"),
        (transformers.GPT2Config(), 2, "no plan to divide a gpt2 model\n\nhint: .* --zero_stage 3"),
        (config("Phi3"), 2, "a phi3 model is divided in ways .*colwise_gather_output"),
        (transformers.Gemma3nTextConfig(), 2, "gemma3n_text model differ in intermediate_size\n\nhint: drop"),
        (transformers.AutoConfig.for_model("embedding_gemma2_text"), 2, "differ in num_key_value_heads\n\nhint: drop"),
        (config("Qwen3Moe"), 2, "a qwen3_moe model is divided in ways .*hint: .* --zero_stage 3"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(config, size, message):
    with pytest.raises(ConfigError, match=f"(?s)--ds_tensor_parallel_size {size}.*{message}"):
        check_divides(config, size)


def test_models_that_can_be_divided_are_not_refused():
    check_divides(config(), 2)
    check_divides(config(num_key_value_heads=4), 4)


class Adapted(nn.Linear):
    """A layer that does more than its weights say."""


def refusals(rank: int, num_ranks: int, master: Any) -> list[str]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_tensor_group(2)
    assert join_tensor_group(1) is None
    adapted = new_model("llama")
    adapted.layers[1].mlp.down_proj = Adapted(40, 24)
    gated = new_model("llama")
    gated.layers[0].self_attn.gate = nn.Parameter(torch.ones(4))
    normed = new_model("llama")
    normed.layers[0].mlp.norm = nn.LayerNorm(24)
    odd = new_model("llama")
    odd.layers[0].mlp.up_proj = nn.Linear(24, 41)
    texts = []
    for model in (adapted, gated, normed, odd):
        with pytest.raises(ConfigError) as caught:
            divide_weights(Wrapped(model), group)
        texts.append(str(caught.value))
    return texts


def test_layers_that_the_plan_does_not_fit_are_refused():
    for texts in run_ranks(refusals, 2):
        assert "2 ranks cannot divide the layer layers.1.mlp.down_proj: Adapted" in texts[0]
        assert "does not say how ranks divide layers.0.self_attn\n" in texts[1]
        assert "does not say how ranks divide layers.0.mlp.norm\n" in texts[2]
        assert "2 ranks cannot divide the layer layers.0.mlp.up_proj: Linear" in texts[3]
        assert all("hint:" in text for text in texts)
