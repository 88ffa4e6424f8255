"""Costs of passes, compared with numbers by hand and with what torch counts while a model runs."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from online_fakes import LoggedRanks
from rlhf_data.examples.preference import PreferenceExample, UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_train.costs import PassCosts, cached_size, count_parameters, pass_costs
from rlhf_train.learning.learner import Learner
from rlhf_train.learning.ranks import RankSet
from rlhf_train.offline.epochs import Objective, OfflineSchedule, this_ranks_part
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.kto import KtoObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from trainer_testing import random_rollouts, tiny_job

FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "head size of its own": ("Qwen3", {"head_dim": 16}),
    "window": ("Mistral", {"sliding_window": 5}),
    "windows in some layers": ("Gemma3", {"sliding_window": 5, "head_dim": 8, "sliding_window_pattern": 2}),
    "experts": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "experts in some layers": (
        "Qwen2Moe",
        {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "mlp_only_layers": [], **EXPERTS},
    ),
    "dense layer among experts": ("Qwen3Moe", {"head_dim": 8, "mlp_only_layers": [1], **EXPERTS}),
    "dense first layer, then experts beside a shared one": (
        "Glm4Moe",
        {"n_shared_experts": 2, "first_k_dense_replace": 1, "n_routed_experts": 5, "n_group": 1, "topk_group": 1}
        | {"head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "layers by the kind of their MLP": (
        "ExaoneMoe",
        {"mlp_layer_types": ["dense", "sparse", "dense"], "num_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"head_dim": 8, **EXPERTS},
    ),
    "experts of the usual width": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
}


def counted(model: torch.nn.Module, num_tokens: int) -> tuple[int, int]:
    """The operations that torch counts for the layers and for the head, one token after the other.

    With a cache, each token is multiplied with the tokens before it alone, as causal kernels do.
    """
    layers = head = 0
    cache = transformers.DynamicCache(config=model.config)
    for token in range(num_tokens):
        with FlopCounterMode(display=False) as counter:
            hidden = model.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).last_hidden_state
        layers += counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            model.lm_head(hidden)
        head += counter.get_total_flops()
    return layers, head


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_costs_are_what_torch_counts(name: str) -> None:
    prefix, fields = MODELS[name]
    config_class = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_class)(**(FIELDS | fields))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    costs = pass_costs(config)
    for num_tokens in (1, 5, 6, 13):
        layers, head = counted(model, num_tokens)
        assert costs.of(num_tokens) == layers
        assert costs.of(num_tokens, 4) - costs.of(num_tokens) == 4 * head // num_tokens


@pytest.mark.parametrize(("prefix", "query_rank"), [("DeepseekV3", 12), ("DeepseekV2", None)])
@torch.no_grad()
def test_latent_attention_costs_and_weighs_what_torch_counts(prefix: str, query_rank: int | None) -> None:
    config = getattr(transformers, f"{prefix}Config")(**(FIELDS | LATENT), q_lora_rank=query_rank)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    costs = pass_costs(config)
    num_tokens = 7
    with FlopCounterMode(display=False) as counter:
        model.model(torch.arange(num_tokens)[None], use_cache=False)
    # Eager attention computes the whole square, and causal kernels its lower half.
    hidden_half = num_tokens * (num_tokens - 1) // 2
    assert costs.of(num_tokens) + 3 * hidden_half * costs.pair_flops == counter.get_total_flops()
    assert count_parameters(config).total == sum(weight.numel() for weight in model.parameters())
    assert cached_size(config) == cached_size(config, 2) == 10 + 4
    assert cached_size(transformers.Qwen2Config(**FIELDS), 4) == 2 * 8


def test_costs_of_a_small_model_by_hand() -> None:
    config = SimpleNamespace(
        hidden_size=10, num_hidden_layers=2, num_attention_heads=2, intermediate_size=7, vocab_size=11
    )
    config.get_text_config = lambda: config
    # A layer: queries, keys, values and output 10 x 10 each, and the MLP 3 x 10 x 7. 3 tokens see 1 + 2 + 3 keys, each
    # with 2 x 10 operations for scores and 2 x 10 for values.
    layer = 2 * 3 * (4 * 100 + 210) + 6 * 40
    assert pass_costs(config).of(3, 2) == 2 * layer + 2 * 2 * 10 * 11
    assert pass_costs(config, has_head=False).of(3, 2) == 2 * layer
    assert pass_costs(config).of(0) == 0
    config.sliding_window = 2  # the third token does not see the first
    assert pass_costs(config).of(3) == 2 * (layer - 40)


def test_costs_follow_the_text_model_of_a_model_of_images_and_text() -> None:
    text = transformers.Qwen2Config(**FIELDS)
    config = SimpleNamespace(get_text_config=lambda: text)
    assert pass_costs(config) == pass_costs(text)


@pytest.mark.parametrize("in_text", [{}, {"tie_word_embeddings": False}])
def test_whether_the_head_is_the_embedding_the_whole_model_says(in_text) -> None:
    untied, tied = (
        transformers.Qwen2_5_VLConfig(text_config=FIELDS | in_text, tie_word_embeddings=is_tied)
        for is_tied in (False, True)
    )
    head = untied.text_config.vocab_size * untied.text_config.hidden_size
    assert count_parameters(untied).total - count_parameters(tied).total == head


@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v2", "blt"])
def test_configs_that_lack_fields_or_have_them_by_layer_have_costs_that_grow(name: str) -> None:
    costs = pass_costs(transformers.AutoConfig.for_model(name))
    assert 0 < costs.of(10) < costs.of(11) < costs.of(11, 3)


@pytest.mark.usefixtures("results_stand_for_references")
def test_online_ranks_get_what_costs_equally_much_for_the_models_they_hold(tmp_path) -> None:
    job = tiny_job("model", tmp_path)
    job = dataclasses.replace(job, batch=dataclasses.replace(job.batch, train_batch_size=job.batch.num_rollouts))
    rollouts = random_rollouts(job.batch.num_rollouts, vocab_size=64)
    quadratic, by_target = PassCosts(0, 0, 1, {None: 1}), PassCosts(0, 1, 0, {})
    costs = {"actor": quadratic, "critic": by_target, "reference": by_target}
    actor, others = (LoggedRanks([], *roles, count=2) for roles in (("actor",), ("critic", "reference")))
    Learner(job, [actor, others], costs).deal(rollouts, 1)
    squares = [r.num_tokens * (r.num_tokens + 1) / 2 for r in rollouts]
    targets = [r.num_response_tokens for r in rollouts]
    for ranks, work in ((actor, squares), (others, targets)):
        shards = [sorted(plan.rows) for _, plan, _ in ranks.shards]
        assert sorted(shards[0] + shards[1]) == list(range(len(rollouts)))
        first, second = (sum(work[row] for row in rows) for rows in shards)
        assert abs(first - second) <= 0.03 * (first + second)
    # Work by squares is not work by targets.
    assert {tuple(sorted(plan.rows)) for _, plan, _ in actor.shards} != {
        tuple(sorted(plan.rows)) for _, plan, _ in others.shards
    }


def example(name: str, prompt: int, answer: int) -> SftExample:
    return SftExample(name, np.arange(prompt + answer) + 1, np.arange(prompt + answer) >= prompt)


def offline_shares(objective: Objective, items: list, monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    schedule = OfflineSchedule(train_batch_size=len(items), micro_train_batch_size=len(items))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = set()
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        micro_batches, denominators = this_ranks_part(objective, items, schedule)
        assert denominators.num_tokens == sum(map(objective.num_trained_tokens, items))
        shares.add(tuple(sorted(row for batch in micro_batches for row in batch.rows)))
    return shares


def test_offline_ranks_get_equal_costs_of_sequences_and_trained_tokens(monkeypatch) -> None:
    items = [example(str(row), *lengths) for row, lengths in enumerate([(19, 1), (17, 1), (10, 6), (1, 13)])]
    plain = SupervisedObjective()
    assert offline_shares(plain, items, monkeypatch) == {(0, 3), (1, 2)}  # 20 + 14 and 18 + 16 tokens
    by_head = dataclasses.replace(plain, costs=PassCosts(1, 10, 0, {}))
    assert offline_shares(by_head, items, monkeypatch) == {(0, 2), (1, 3)}  # they cost 30, 28, 76 and 144
    # Pairs of equally many tokens: attention costs twice as much if one sequence has them all.
    pairs = [PreferenceExample(str(row), example("c", 1, c), example("r", 1, r))
             for row, (c, r) in enumerate([(97, 1), (95, 3), (49, 49), (50, 48)])]  # fmt: skip
    attention = PassCosts(0, 0, 1, {None: 1})
    for objective in (PreferenceObjective(costs=attention), RewardModelObjective(costs=attention)):
        own = list(objective.items(pairs))
        assert objective.num_tokens(own[0]) == 100
        assert sorted(objective.lengths(own[1])) == [4, 96]
        heavy_and_light = offline_shares(objective, own, monkeypatch)
        assert all(len({0, 1} & set(share)) == 1 for share in heavy_and_light)
    unpaired = [UnpairedExample(str(row), np.arange(n) + 1, np.arange(n) > 0, True) for row, n in enumerate([5, 9])]
    assert [KtoObjective().lengths(item) for item in KtoObjective().items(unpaired)] == [(5, 9), (9, 5)]


@pytest.mark.usefixtures("results_stand_for_references")
def test_learner_counts_the_operations_of_each_steps_passes(monkeypatch, tmp_path):
    job = tiny_job("model", tmp_path)
    # Per token 2, per trained token 3, and per pair of tokens 5 in one layer; the critic needs 7 per token.
    actor = PassCosts(2, 3, 5, {None: 1})
    costs = {"actor": actor, "reference": actor, "critic": PassCosts(7, 0, 0, {None: 1})}
    ranks = RankSet(("actor", "reference", "critic"), ["rank 0"])
    monkeypatch.setattr(ranks, "start", lambda method, *_, **__: [])
    monkeypatch.setattr(ranks, "start_each", lambda *_: [])
    learner = Learner(job, [ranks], costs)
    rollouts = random_rollouts(job.batch.num_rollouts, vocab_size=90)
    sizes = [(rollout.num_tokens, rollout.num_response_tokens) for rollout in rollouts]
    learner.observe(rollouts)
    forward = sum(2 * tokens + 3 * targets + 5 * tokens * (tokens + 1) // 2 for tokens, targets in sizes)
    assert learner.flops == {"generate": forward}
    learner.deal(rollouts, 1)
    learner.fill_columns()
    critic = sum(7 * tokens for tokens, _ in sizes)
    assert learner.flops["experience"] == 2 * forward + critic
    with pytest.raises(KeyError, match="rollout_passes"):  # these ranks have no results
        learner.update(1)
    assert learner.flops["train"] == 3 * job.batch.max_epochs * (forward + critic)
