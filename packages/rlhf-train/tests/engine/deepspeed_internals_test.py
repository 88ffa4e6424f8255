"""An engine starts only where DeepSpeed keeps master weights, moments and gradients as the tested version does.

DeepSpeed's own code runs here, with names changed in its source, or with states that are not what they seem.
"""

import dataclasses
import importlib
import inspect
import os
import re
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rlhf_train
from rlhf_data.errors import CheckpointError, EngineError
from rlhf_rollout.host import free_port
from rlhf_train.engine import deepspeed_internals
from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.deepspeed_internals import (
    MODULE_NAMES,
    OPTIMIZER_NAMES,
    SHARD_NAMES,
    TESTED_VERSION,
    clip_whole_groups,
    drop_copies,
    frozen_parts,
    import_deepspeed,
    num_elements,
    same_ends,
    weight_slices,
)
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.shards import Shards, WeightSlice
from rlhf_train.specs import OptimizerSpec
from small_net import Net
from trainer_testing import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
SPEC = OptimizerSpec(learning_rate=0.05, scheduler="constant", weight_decay=0.1)
MODULES = {
    "BF16_Optimizer": "deepspeed.runtime.bf16_optimizer",
    "DeepSpeedZeroOptimizer": "deepspeed.runtime.zero.stage_1_and_2",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.zero.stage3",
}
# A stage and a type of weights that each optimizer of DeepSpeed is for.
USES = {"BF16_Optimizer": (1, BF16), "DeepSpeedZeroOptimizer": (2, BF16), "DeepSpeedZeroOptimizer_Stage3": (3, BF16)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = [(stage, dtype, False) for stage in range(4) for dtype in (FP32, BF16)]
ALL += [(stage, BF16, True) for stage in (0, 1, 3)]  # what can be kept in host memory


def new_engine(stage, dtype, **changes):
    init_process_group(rank=0, world_size=1, master=("127.0.0.1", free_port()), device=DEVICE)
    spec = dataclasses.replace(SPEC, **changes)
    return DeepSpeedEngine(Net().to(dtype), spec, zero_stage=stage, dtype=dtype, device=DEVICE)


def train(engine, dtype):
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    engine.backward(engine.forward(rows).float().square().sum(), is_last=True)
    return engine.step().grad_norm


def rename(monkeypatch, kind, name):
    """Have DeepSpeed's file of a class call an attribute otherwise, as another version might."""
    deepspeed = import_deepspeed(DEVICE)
    module = importlib.import_module(MODULES[kind])
    source = re.sub(rf"\b{name}\b", f"{name}_of_tomorrow", inspect.getsource(module))
    scope = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source, module.__file__, "exec"), scope)
    for owner in (module, deepspeed.runtime.engine):
        monkeypatch.setattr(owner, kind, scope[kind], raising=False)


def tamper(monkeypatch, change):
    """Have `change(module, DeepSpeed's optimizer)` done to what DeepSpeed makes."""
    deepspeed = import_deepspeed(DEVICE)
    initialize = deepspeed.initialize

    def changed(**options):
        made = initialize(**options)
        change(made[0].module, made[0].optimizer)
        return made

    monkeypatch.setattr(deepspeed, "initialize", changed)


@pytest.mark.parametrize("module", MODULE_NAMES)
def test_deepspeed_whose_modules_lack_a_name_is_refused(monkeypatch, module):
    import_deepspeed(DEVICE)
    owner, name = importlib.import_module(module), MODULE_NAMES[module][-1]
    monkeypatch.delattr(owner, name)
    monkeypatch.delattr(owner, "__getattr__", raising=False)  # by which one module makes a name when it is first read
    said = rf"^DeepSpeed [\d.]+ keeps its states in a way that is not known: there is no {module}\.{name}\n"
    with pytest.raises(EngineError, match=rf"{said}(.|\n)*hint: install deepspeed=={TESTED_VERSION}"):
        import_deepspeed(DEVICE)


RENAMED = [(kind, name) for kind, names in OPTIMIZER_NAMES.items() for name in names if name != "optimizer"]


@pytest.mark.parametrize(("kind", "name"), RENAMED)
def test_attribute_that_deepspeed_renames_is_missed_when_the_engine_starts(monkeypatch, kind, name):
    rename(monkeypatch, kind, name)
    with pytest.raises(EngineError) as caught:
        new_engine(*USES[kind])
    said = str(caught.value)
    assert re.match(rf"DeepSpeed [\d.]+ keeps its states in a way that is not known: {kind} has no {name}\n", said)
    assert f"hint: install deepspeed=={TESTED_VERSION}" in said


@pytest.mark.parametrize("name", SHARD_NAMES)
def test_attribute_of_sharded_weights_is_missed_when_the_engine_starts(monkeypatch, name):
    tamper(monkeypatch, lambda module, _: delattr(module.layers[2].bias, name))
    with pytest.raises(EngineError, match=f"Parameter has no {name}"):
        new_engine(3, BF16)


def test_class_that_deepspeed_renames_is_refused(monkeypatch):
    def change(_, wrapper):
        wrapper.__class__ = type("Newer_Optimizer", (type(wrapper),), {})

    tamper(monkeypatch, change)
    with pytest.raises(EngineError, match="its optimizer is Newer_Optimizer"):
        new_engine(1, BF16)


@pytest.mark.parametrize("bf16_moments", [False, True])
@pytest.mark.parametrize(("stage", "dtype", "offload"), ALL)
def test_engine_is_as_before_its_own_check(stage, dtype, bf16_moments, offload):
    """A checkpoint of a new engine has the weights of the model, to the last bit, and its sums are zero."""
    engine = new_engine(stage, dtype, bf16_moments=bf16_moments, offload=offload)
    shards = Shards()
    engine.save_shards(shards)
    for name, weight in Net().to(dtype).named_parameters():
        if weight.requires_grad:
            assert torch.equal(shards.tensors[f"weight/{name}"], weight.detach().float().flatten())
            assert torch.equal(engine.state_dict()[name], weight)
    assert not any(total.any() for total in engine.gradient_sums.values())
    assert train(engine, dtype) > 0


def shift_mapping(module, _):
    mapping = module.layers[0].weight._hp_mapping
    address = mapping.hp_fragment_address
    mapping.hp_fragment_address = dataclasses.replace(address, start=address.start + 1)


def shift_shard(module, wrapper):
    key = wrapper.get_param_id(module.layers[0].weight)
    group, offset, size = wrapper.grad_position[key]
    wrapper.grad_position[key] = (group, offset + 1, size)


def copy_first(name):
    """Have a list hold a copy of its first tensor, with the same values but its own memory."""

    def change(_, wrapper):
        getattr(wrapper, name)[0] = getattr(wrapper, name)[0].detach().clone()

    return change


def drop_last(name):
    """Have a list by parameter group lack the last group."""
    return lambda _, wrapper: getattr(wrapper, name).pop()


def copy_fragment(module, _):
    mapping = module.layers[2].bias._hp_mapping
    mapping.hp_fragment = mapping.hp_fragment.clone()


def copy_local(_, wrapper):
    found = wrapper.get_local_fp32_param
    before = {}
    wrapper.get_local_fp32_param = lambda weight: before.setdefault(weight, found(weight).clone()) * 0


def forget_weight(_, wrapper):
    for weights in (wrapper.bf16_groups, wrapper.fp32_groups_gradients):
        weights[0].pop()


def other_sum(_, wrapper):
    wrapper.fp32_groups_gradients[0][0] = wrapper.fp32_groups_gradients[0][0].clone()


def shorter_sum(_, wrapper):
    wrapper.fp32_groups_gradients[0][0] = wrapper.fp32_groups_gradients[0][0][1:]


def other_part(_, wrapper):
    wrapper.fp32_groups_gradient_flat_partition[0] = wrapper.fp32_groups_gradient_flat_partition[0].clone()


def other_optimizer(_, wrapper):
    wrapper.optimizer = torch.optim.SGD(wrapper.optimizer.param_groups[-1:])


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (1, other_optimizer, "BF16_Optimizer updates weights by SGD"),
        (1, copy_first("fp32_groups_flat_partition"), "updates other tensors than the master weights"),
        (2, copy_first("single_partition_of_fp32_groups"), "updates other tensors than the master weights"),
        (1, forget_weight, "no master weight of layers.2.weight"),
        (1, drop_last("bf16_groups"), "updates other tensors than the master weights"),
        (1, drop_last("fp32_groups_flat_partition"), "updates other tensors than the master weights"),
        (2, drop_last("single_partition_of_fp32_groups"), "updates other tensors than the master weights"),
        (1, drop_last("fp32_groups_gradients"), "2 weights have no sum of gradients"),
        (1, shift_mapping, "found for layers.0.weight has other values"),
        (2, shift_mapping, "found for layers.0.weight has other values"),
        (3, shift_shard, "found for layers.0.weight has other values"),
        (1, copy_fragment, r"0.5 is written to the master weight of layers.2.bias, and read as \[0.5, "),
        (2, copy_fragment, r"0.5 is written to the master weight of layers.2.bias, and read as \[0.5, "),
        (3, copy_local, r"0.5 is written to the master weight of layers.2.bias, and read as \[0.5, 0.0\]"),
        (1, other_sum, "sums of gradients do not lie in the flat ones"),
        (1, other_part, "sums of gradients do not lie in the flat ones"),
        (1, shorter_sum, "the gradients of 1 weights have other sizes"),
    ],
)
def test_states_that_are_not_what_they_seem_are_refused(monkeypatch, stage, change, message):
    tamper(monkeypatch, change)
    with pytest.raises(EngineError, match=message):
        new_engine(stage, BF16)


@pytest.mark.parametrize("stage", [1, 3])
def test_host_memory_takes_over_only_what_belongs_together(monkeypatch, stage):
    def change(_, wrapper):
        groups = wrapper.bf16_partitioned_groups[0] if stage == 1 else wrapper.fp16_partitioned_groups_flat
        groups[0] = groups[0] + 1

    tamper(monkeypatch, change)
    with pytest.raises(EngineError, match="the weights that an update rounds to are not those of the master weights"):
        new_engine(stage, BF16, offload=True)


@pytest.mark.parametrize(("stage", "dtype"), [(0, FP32), (1, BF16), (2, BF16), (3, BF16)])
def test_moments_of_unknown_tensors_are_not_left_out_of_a_checkpoint(stage, dtype):
    engine = new_engine(stage, dtype)
    train(engine, dtype)
    engine.save_shards(Shards())
    engine._inner_optimizer.state[torch.zeros(3, device=DEVICE)] = {"exp_avg": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="states of 1 tensors that are no master weights"):
        engine.save_shards(Shards())


def start(rank, num_ranks, master):
    """What a rank says whose DeepSpeed alone is another one, rank 1."""
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")  # ranks share no GPU
    said = []
    for stage, change in ((1, copy_fragment_of_any), (3, copy_local)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1:
                tamper(monkeypatch, change)
            try:
                DeepSpeedEngine(Net().bfloat16(), SPEC, zero_stage=stage, dtype=BF16, device="cpu")
                said.append("")
            except EngineError as error:
                said.append(str(error))
    return said


def copy_fragment_of_any(module, _):
    for weight in module.layers.parameters():
        if weight._hp_mapping is not None:
            weight._hp_mapping.hp_fragment = weight._hp_mapping.hp_fragment.clone()


def test_every_rank_checks_its_own_part():
    good, bad = run_ranks(start, 2)
    assert good == ["", ""]
    assert all("0.5 is written to the master weight" in text for text in bad)


@pytest.mark.parametrize(("named", "expected"), [(None, "cpu"), ("cuda", "cuda")])
def test_deepspeed_is_told_the_device_unless_a_user_names_one(monkeypatch, named, expected):
    monkeypatch.setenv("DS_ACCELERATOR", named or "")
    if named is None:
        monkeypatch.delenv("DS_ACCELERATOR")
    deepspeed = import_deepspeed("cpu")
    assert os.environ["DS_ACCELERATOR"] == expected
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False  # which would be compiled at first use


def test_number_of_elements_is_that_of_the_whole_weight():
    whole, shard = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(0))
    shard.ds_id, shard.ds_numel = 0, 7
    assert [num_elements(weight) for weight in (whole, shard)] == [12, 7]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("end", [0, -1])
def test_master_weights_are_compared_at_both_ends(size, end):
    weight = torch.arange(1.0, size + 1)
    assert same_ends(weight + 2**-20, weight.bfloat16())
    other = weight.clone()
    other[end] += 1
    assert not same_ends(other, weight)
    assert not same_ends(weight[1:], weight)


@pytest.mark.parametrize("value", [0.25, 0.5, 1.5])
def test_copy_of_master_weights_that_deepspeed_does_not_read_is_refused_whatever_they_are(value):
    place = WeightSlice("weight", 0, 2, torch.full((2,), value), 0)
    weight = torch.full((2,), value)
    with pytest.raises(EngineError, match="is written to the master weight of weight, and read as"):
        deepspeed_internals._check_round_trip(place, weight)
    assert place.flat.tolist() == [value, value]
    deepspeed_internals._check_round_trip(place, place.flat)


def test_parts_of_frozen_weights_are_shards_and_their_second_copies():
    net = Net()
    copied, single = net.layers[0].weight, net.layers[2].weight
    for weight, copy in ((copied, torch.zeros(2)), (single, None)):
        weight.ds_id = 0
        weight.ds_tensor = torch.ones(2)
        weight.ds_secondary_tensor = copy
    plain = [net.layers[0].bias, net.layers[2].bias, net.frozen]
    expected = [copied.ds_tensor, copied.ds_secondary_tensor, single.ds_tensor, *plain]
    assert {id(part) for part in frozen_parts(net)} == set(map(id, expected))
    assert len(list(frozen_parts(net))) == len(expected)
    drop_copies(net.parameters())
    assert copied.ds_secondary_tensor is None
    assert not any(hasattr(weight, "ds_secondary_tensor") for weight in plain)


@pytest.mark.parametrize(
    ("kind", "groups", "flats"),
    [
        ("BF16_Optimizer", "bf16_groups", "fp32_groups_flat_partition"),
        ("DeepSpeedZeroOptimizer", "bit16_groups", "single_partition_of_fp32_groups"),
    ],
)
def test_rank_keeps_nothing_of_a_weight_that_lies_in_the_parts_of_others(kind, groups, flats):
    net = nn.Linear(2, 3, bias=False)
    net.weight._hp_mapping = None
    flat = torch.zeros(4)
    wrapper = type(kind, (), {groups: [[net.weight]], flats: [flat]})()
    assert weight_slices(net, wrapper) == [WeightSlice("weight", 0, 0, flat, 0)]


def test_norms_on_a_cpu_sum_parts_of_at_most_2_to_the_20_elements(monkeypatch):
    monkeypatch.setattr(deepspeed_internals, "float32_sums", lambda wrapper: {})
    flat = [torch.arange(float(2**21 + 3)), torch.ones(5), torch.full((7,), 2.0)]
    groups = [{}, {}, {"moe": True, "name": "own"}]
    wrapper = SimpleNamespace(fp32_groups_gradients_flat=flat, optimizer=SimpleNamespace(param_groups=groups))
    clip_whole_groups(wrapper)
    parts, experts = wrapper.get_grads_for_norm()
    assert [len(part) for part in parts] == [2**20, 2**20, 3, 5]
    assert torch.equal(torch.cat(parts), torch.cat(flat[:2]))
    assert [*experts] == ["own"] and torch.equal(torch.cat(experts["own"]), flat[2])
    assert wrapper.get_grads_for_norm(for_clipping=True) is flat


def test_names_stand_in_one_file():
    names = {*chain(*OPTIMIZER_NAMES.values()), *SHARD_NAMES, "_hp_mapping"} - {"optimizer"}
    own = Path(deepspeed_internals.__file__)
    for path in Path(rlhf_train.__file__).parent.rglob("*.py"):
        found = names & set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        assert path == own or not found, path
