"""ZeRO stage 3 gathers and reduces a transformers layer at once, and computes what one process without ZeRO does."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_models.actor import Actor
from rlhf_models.attention.states_apart import keep_states_apart
from rlhf_models.lora import LoraSpec, add_lora
from rlhf_train.engine import deepspeed as engine_file
from rlhf_train.engine import whole_layers
from rlhf_train.engine.deepspeed import DeepSpeedEngine, place_frozen
from rlhf_train.engine.process_group import init_process_group
from rlhf_train.engine.whole_layers import call_layers_equally, layers_taken_whole, num_gathered_ahead
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import run_ranks

SPEC = OptimizerSpec(learning_rate=1e-3, eps=1e-4, scheduler="constant", max_norm=1e9, weight_decay=0.0)
NUM_UPDATES, PASSES = 3, 2
CASES = [(False, False), (True, False), (True, True)]  # gradient checkpointing, and overlap
HEAVY = {"Qwen2Attention", "Qwen2MLP", "Qwen2RMSNorm"}


def make_model(*, checkpointing: bool = False) -> nn.Module:
    """A model with matrices of more than 100 000 weights: DeepSpeed leaves smaller ones gathered between passes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 320, "intermediate_size": 384, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes, **heads)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tokens_of(update: int, number: int, rank: int) -> torch.Tensor:
    return torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(100 * update + 10 * number + rank))


def loss_of(forward: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = forward(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def trained_by_torch(num_ranks: int) -> dict[str, torch.Tensor]:
    """The weights after updates of one process that has the tokens of all ranks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=SPEC.betas, eps=1e-4, weight_decay=0.0)
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for number in range(PASSES):
            for rank in range(num_ranks):
                loss_of(model, tokens_of(update, number, rank)).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def gathering_nothing_ahead(config: dict[str, Any]) -> dict[str, Any]:
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 1
    return config


def train(rank: int, num_ranks: int, master: tuple[str, int], cases: list[tuple[bool, bool]]) -> list[dict[str, Any]]:
    """For each of `CASES`: the trained weights, the modules that gathered, a frozen output."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    # DeepSpeed's own number would do for layers that are so small.
    configure = engine_file._deepspeed_config
    engine_file._deepspeed_config = lambda *args: gathering_nothing_ahead(configure(*args))
    whole_layers._LEAST_AHEAD = 1
    fetch, gathering, ahead = Coordinator.fetch_sub_module, [], []

    def fetch_and_note(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gathering.append(type(module).__name__)
        if gathering[-1] == "Qwen2DecoderLayer":
            missing = [weight.ds_status == ZeroParamStatus.NOT_AVAILABLE for weight in module.parameters()]
            ahead.append(not any(missing))
        return fetch(self, module, *args, **kwargs)

    Coordinator.fetch_sub_module = fetch_and_note
    results = []
    for checkpointing, overlap in cases:
        gathering.clear(), ahead.clear()
        model = make_model(checkpointing=checkpointing)
        options = {"dtype": torch.float32, "device": "cpu", "overlap_comm": overlap}
        engine = DeepSpeedEngine(model, SPEC, zero_stage=3, **options)
        assert engine._engine.zero_overlap_comm() == overlap
        for update in range(NUM_UPDATES):
            for number in range(PASSES):
                loss = loss_of(engine.forward, tokens_of(update, number, rank))
                engine.backward(loss, is_last=number == PASSES - 1)
            engine.step()
        # As arrays: tensors of a process that has ended cannot be read.
        weights = {name: weight.numpy() for name, weight in engine.state_dict().items()}
        found = {"weights": weights, "trained": [*gathering], "ahead": [*ahead]}
        gathering.clear()
        frozen = make_model().requires_grad_(False)
        spec = ModelSpec(path="unused", zero_stage=3)
        with torch.no_grad():
            logits = place_frozen(frozen, spec, torch.device("cpu"))(input_ids=tokens_of(9, 0, rank)).logits
        results.append(found | {"logits": logits.numpy(), "frozen": [*gathering]})
    return results


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(train, 2, CASES)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_updates_are_those_of_one_process_without_zero(ranks, case):
    expected = trained_by_torch(num_ranks=2)
    for rank in ranks:
        weights = rank[case]["weights"]
        assert {*weights} >= {*expected}
        for name, weight in expected.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), weight, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_layers_gather_and_their_parts_do_not(ranks, case):
    for rank in ranks:
        gathering = rank[case]["trained"]
        assert gathering.count("Qwen2DecoderLayer") == NUM_UPDATES * PASSES * 3 * 2  # forward and backward
        # The norm after the layers is not part of one.
        assert gathering.count("Qwen2RMSNorm") == NUM_UPDATES * PASSES * 2
        assert not (HEAVY - {"Qwen2RMSNorm"}) & {*gathering}


@pytest.mark.parametrize("case", range(len(CASES)))
def test_layers_are_on_their_way_when_they_are_needed(ranks, case):
    for rank in ranks:
        ahead = rank[case]["ahead"]
        assert len(ahead) == NUM_UPDATES * PASSES * 6
        assert not any(ahead[:3])  # the first pass teaches DeepSpeed the order
        assert all(ahead[-6:])


def test_frozen_models_gather_layers_too_and_compute_the_same(ranks):
    for rank, found in enumerate(ranks):
        assert found[0]["frozen"].count("Qwen2DecoderLayer") == 3
        assert not {"Qwen2Attention", "Qwen2MLP"} & {*found[0]["frozen"]}
        with torch.no_grad():
            expected = make_model()(input_ids=tokens_of(9, 0, rank)).logits
        torch.testing.assert_close(torch.from_numpy(found[0]["logits"]), expected, rtol=0, atol=1e-5)


def test_very_large_layers_are_gathered_part_by_part(monkeypatch):
    model = make_model()
    assert layers_taken_whole(model) == [*model.model.layers]
    size = sum(weight.numel() for weight in model.model.layers[0].parameters())
    monkeypatch.setattr(whole_layers, "_MOST_GATHERED", size)
    assert len(layers_taken_whole(model)) == 3
    monkeypatch.setattr(whole_layers, "_MOST_GATHERED", size - 1)
    assert layers_taken_whole(model) == []
    assert num_gathered_ahead([]) == num_gathered_ahead(model.model.layers) == 50_000_000
    assert num_gathered_ahead([nn.Linear(10_000, 6_000, bias=False, device="meta")]) == 60_000_000


def test_layers_whose_gradients_may_come_late_are_gathered_part_by_part():
    adapted = Actor(make_model())
    add_lora(adapted, LoraSpec(rank=2))
    shared, repeated, own = make_model(), make_model(), make_model()
    shared.model.layers[2].mlp = shared.model.layers[0].mlp
    repeated.config.num_hidden_layers = 6  # three layers that run twice
    own.model.layers[1].__class__ = type(
        "Layer", (type(own.model.layers[1]),), {"__module__": "transformers_modules.x"}
    )
    assert own(input_ids=tokens_of(0, 0, 0)).logits.shape == (2, 7, 64)
    for model in (adapted, shared, repeated, own, nn.Linear(2, 2)):
        assert layers_taken_whole(model) == []
    frozen = make_model().requires_grad_(False)
    assert len(layers_taken_whole(frozen)) == 3


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_layers_with_states_read_one_batch_per_pack_if_ranks_gather_inside_of_them(lora):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Lfm2Config(**sizes, num_hidden_layers=2, layer_types=["conv", "full_attention"], vocab_size=64)
    actor = Actor(Lfm2ForCausalLM(config))
    assert keep_states_apart(actor.model)
    if lora is not None:
        add_lora(actor, lora)
    call_layers_equally(actor, layers_taken_whole(actor))
    [found] = [module.states_apart.in_one_batch for module in actor.modules() if hasattr(module, "states_apart")]
    assert found == (lora is not None)
