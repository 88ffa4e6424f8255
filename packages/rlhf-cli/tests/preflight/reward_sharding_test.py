"""Which reward models are divided over their processes, and what a process of one needs of its GPU."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from rlhf_cli.commands import ppo_job
from rlhf_rollout.rewards.sources import RewardSource
from rlhf_train import run_memory

LIMIT = 20 << 30
# 80 layers of 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192, a table of 32000 * 8192, norm and score.
WEIGHTS_70B = 68_714_512_384
SIZES = {"large": LIMIT + 1, "small": LIMIT, "steps": 2 * LIMIT}
LLAMA_70B = LlamaConfig(
    vocab_size=32_000,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)


def divided(monkeypatch, sharding="auto", zero_stage=3, num_ranks=2, images="") -> tuple[str, ...]:
    monkeypatch.setattr(ppo_job, "reward_model_bytes", lambda path, dtype: SIZES[path])
    config = SimpleNamespace(
        model=SimpleNamespace(dtype="bfloat16"),
        reward=SimpleNamespace(reward_sharding=sharding),
        training=SimpleNamespace(zero_stage=zero_stage),
        images=images,
    )
    sources = tuple(RewardSource(kind="model", targets=(path,)) for path in SIZES)
    inputs = SimpleNamespace(reward_sources=sources, process_models=("steps",))
    plan = SimpleNamespace(scorers=SimpleNamespace(num_ranks=num_ranks) if num_ranks else None)
    return ppo_job._divided_reward_models(config, inputs, plan)


def test_large_reward_models_are_divided_at_zero_stage_3(monkeypatch):
    assert divided(monkeypatch) == ("large",)
    assert divided(monkeypatch, zero_stage=2) == ()
    assert divided(monkeypatch, num_ranks=1) == divided(monkeypatch, num_ranks=0) == ()


def test_on_and_off_decide_for_all_sizes_and_stages_but_not_for_models_that_judge_steps(monkeypatch):
    assert divided(monkeypatch, "on") == divided(monkeypatch, "on", zero_stage=0) == ("large", "small")
    assert divided(monkeypatch, "on", num_ranks=1) == divided(monkeypatch, "on", images="trained") == ()
    assert divided(monkeypatch, "off") == ()


def test_bytes_of_a_model_are_those_of_its_weights_with_one_score(monkeypatch):
    monkeypatch.setattr("rlhf_models.loading.load_config", lambda path: LLAMA_70B)
    assert run_memory.reward_model_bytes("70b", "bfloat16") == 2 * WEIGHTS_70B


@pytest.mark.parametrize(("divided_models", "num_parts"), [(("70b",), 16), ((), 1)])
def test_a_process_of_a_divided_model_needs_its_part_and_the_layers_that_a_pass_gathers(
    monkeypatch, divided_models, num_parts
):
    monkeypatch.setattr(run_memory, "_config", lambda path: LLAMA_70B)
    reward = SimpleNamespace(
        models=("70b",), divided_models=divided_models, calls=SimpleNamespace(batch_size=64), offload_models=False
    )
    engine = SimpleNamespace(dtype="bfloat16", max_model_len=2048)
    job = SimpleNamespace(engine=engine, reward=reward, plan=SimpleNamespace(scorers=SimpleNamespace(num_ranks=16)))
    items = run_memory._scorers(job).items
    assert items["frozen weights"] == pytest.approx(2 * WEIGHTS_70B / num_parts, rel=1e-6)
    # A pass of at most 32,768 tokens works on one layer, which is not compiled.
    layer = 2 * (4 * 8192 + 2 * 8192 + 2 * 1024 + 3 * 28_672) + 2 * 8192 * 6 + 2 * 28_672
    assert items["working"] == 32_768 * layer
    # It gathers 1e9 weights, and copies the matrices of a layer.
    copied = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    assert items["gathered"] == (2 * (1_000_000_000 + copied) if num_parts > 1 else 0)
