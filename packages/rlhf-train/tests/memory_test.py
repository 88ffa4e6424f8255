"""The memory function, compared with arithmetic by hand."""

from dataclasses import replace

import pytest

from memory_models import ADAMW, BF16, NOTHING, config_of
from rlhf_models.lora import LoraSpec
from rlhf_rollout.engines import EngineSpec
from rlhf_train.costs import count_parameters
from rlhf_train.memory import Model, Passes, engine_memory, pass_memory, trainer_memory
from rlhf_train.specs import ModelSpec

W1 = Passes(train=(16 * 768, 16 * 512), forward=(32 * 768, 32 * 512), most_targets=32 * 512)


def items(spec: ModelSpec, num_ranks: int = 1, passes: Passes = NOTHING, name: str = "Qwen2-0.5B", **options) -> dict:
    return dict(trainer_memory([Model(config_of(name), spec, **options)], passes, num_ranks).items)


def test_half_a_billion_weights_on_one_gpu_by_hand() -> None:
    # A layer: attention 2 * 896 * 64 * (14 + 2), MLP 3 * 896 * 4864, biases 64 * (14 + 2 * 2), norms 2 * 896.
    layer = 1_835_008 + 13_074_432 + 1_152 + 1_792
    embedding = 151_936 * 896
    weights = 24 * layer + embedding + 896
    assert weights == 494_032_768
    need = trainer_memory([Model(config_of("Qwen2-0.5B"), BF16, runs_forward=False)], W1, 1, bucket_copies=1)
    # A token keeps in a layer, in 2 bytes each: 4 * 896 of the residuals and norms, 2 * 14 * 64 of queries and the
    # output of attention, 2 * 2 * 64 of keys and values, 3 * 4864 of the MLP: 40,448 bytes.
    # 32 responses of 512 tokens have 16,384 * 151,936 * 2 = 4.98e9 bytes of logits, above 4 GiB.
    assert need.items == {
        "weights": 2 * weights,
        "gradients": 4 * weights,  # ZeRO 2 on one rank runs as ZeRO 1
        "master weights": 4 * weights,
        "moments": 8 * weights,
        "sync bucket": 2 * embedding,  # larger than 256 MiB
        "activations": 12_288 * 24 * 40_448,
        "logits": 530_579_456 + 4 * embedding,  # 506 MiB of them, and the gradient of the head in float32
    }
    assert need.total == 22_168_577_792
    assert need.asleep == 2 * weights + 2 * embedding
    spec = EngineSpec(model="m", dtype="bfloat16", max_num_seqs=512, max_model_len=768)
    engine = engine_memory(config_of("Qwen2-0.5B"), spec)
    pieces = 2048 * (4 * 896 + 3 * 4864) * 2  # of CUDA graphs; engines with adapters have none
    assert engine.items == {
        "weights": 2 * weights,
        "KV cache": 2 * 24 * 2 * 64 * 2 * 512 * 768,  # keys and values, layers, heads, size, bytes, sequences, tokens
        "work": (2 << 30) + 8192 * (4 * 896 + 3 * 4864) * 2 + pieces + 7 * 512 * 151_936 * 4,
    }
    assert engine.asleep == 2 << 30
    rounded = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)  # attention and MLP; not biases and embedding
    in_fp8 = engine_memory(config_of("Qwen2-0.5B"), replace(spec, quantization="fp8"))
    assert in_fp8.items == engine.items | {"weights": 2 * weights - rounded}
    adapters = 24 * 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    with_adapters = engine_memory(config_of("Qwen2-0.5B"), replace(spec, adapter_rank=8))
    work = engine.items["work"] - pieces
    assert with_adapters.items == engine.items | {"weights": 2 * (weights + adapters), "work": work}
    alone, drafted = (
        engine_memory(config_of("Llama-2-70B"), spec, None, draft) for draft in (None, config_of("Qwen2-0.5B"))
    )
    assert drafted.items["weights"] == alone.items["weights"] + 2 * weights
    assert drafted.items["KV cache"] == alone.items["KV cache"] + engine.items["KV cache"]
    few = Passes(train=(12_288, 8192), forward=(12_288, 8192), most_targets=8192)  # 2.5e9 bytes: whole logits
    assert items(BF16, passes=few)["logits"] == 2 * 151_936 * 8192 + 2 * embedding
    # A teacher's distributions: all logits of a training pass, and two gradients of their size.
    assert items(BF16, passes=W1, num_logits=3)["logits"] == 3 * 2 * 151_936 * 8192 + 2 * embedding


def test_the_line_of_70_billion_weights_by_hand() -> None:
    # 8 nodes, 16 GPUs each for actor, critic, reference and reward models, ZeRO 3: --micro_train_batch_size 1
    # --micro_rollout_batch_size 2 --gradient_checkpointing --packing_samples, and lengths of 1,024 + 1,024 tokens.
    # A layer: attention 2 * 8192 * 128 * (64 + 8), MLP 3 * 8192 * 28,672, norms 2 * 8192.
    matrices = 150_994_944 + 704_643_072
    layer = matrices + 16_384
    table = 32_000 * 8192
    weights = 80 * layer + 2 * table + 8192
    assert weights == 68_976_648_192
    passes = Passes(train=(2048, 1024), forward=(4096, 2048), most_targets=2048)
    spec = replace(BF16, zero_stage=3, gradient_checkpointing=True)
    need = trainer_memory([Model(config_of("Llama-2-70B"), spec)], passes, 16)
    # What a compiled layer keeps of a token: 2 bytes * (4 * 8192 + 2 * 64 * 128 + 2 * 8 * 128 + 3 * 28,672).
    whole_layer = 2048 * 274_432
    assert need.items == {
        "weights": 2 * weights // 16,
        "gradients": 4 * weights // 16,
        "master weights": 4 * weights // 16,
        "moments": 8 * weights // 16,
        "reduction": 4 * 500_000_000,
        "activations": 2048 * 2 * 8192 * 80 + whole_layer,
        "logits": 2 * 32_000 * (1024 + 8192),  # more than a layer: 562,036,736
        "gathered": 2 * (1_000_000_000 + 2 * matrices),  # a copy of a layer's, and their gradients
    }
    assert need.total == 88_857_496_576  # 82.8 GiB: too much for a GPU of 80 GB
    assert need.asleep == 2 * weights // 16
    # The reference keeps its sixteenth. Its pass of 4,096 tokens works on one layer, and gathers weights.
    frozen = trainer_memory([Model(config_of("Llama-2-70B"), replace(spec, optimizer=None))], passes, 16)
    assert frozen.items == {
        "frozen weights": 2 * weights // 16,
        "working": 2 * whole_layer,
        "gathered": 2 * (1_000_000_000 + matrices),
    }
    # The critic has one output in place of a head.
    critic = trainer_memory([Model(config_of("Llama-2-70B"), spec, has_head=False)], passes, 16)
    assert critic.items["moments"] == 8 * (weights - table + 8192) // 16
    # All on the same 64 GPUs: states of 18 bytes per weight for two models, 2 for one, divided by 64.
    models = [Model(config_of("Llama-2-70B"), each) for each in (spec, spec, replace(spec, optimizer=None))]
    shared = trainer_memory(models, passes, 64)
    assert (
        sum(shared.items[name] for name in ("weights", "gradients", "master weights", "moments")) == 36 * weights // 64
    )
    assert items(replace(spec, lora=LoraSpec(rank=16)), 64, name="Llama-2-70B")["weights"] < 1.01 * 2 * weights / 64
    assert shared.items["frozen weights"] == 2 * weights // 64
    assert shared.items["reduction"] == 2 * 2_000_000_000  # each trained model has its bucket
    # Engines on 4 GPUs each: two of the 8 key-value heads on each, 256 responses of 2,048 tokens.
    spec = EngineSpec(model="m", dtype="bfloat16", max_num_seqs=256, max_model_len=2048, tensor_parallel_size=4)
    engine = engine_memory(config_of("Llama-2-70B"), spec)
    assert (engine.items["weights"], engine.items["KV cache"]) == (weights // 2, 2 * 80 * 2 * 128 * 2 * 256 * 2048)
    # On 16 GPUs, more than it has heads, each has one.
    engine = engine_memory(config_of("Llama-2-70B"), replace(spec, tensor_parallel_size=16))
    assert engine.items["KV cache"] == 2 * 80 * 1 * 128 * 2 * 256 * 2048


def test_models_that_train_in_turn_need_the_states_of_one() -> None:
    """Llama-2-70B on 64 ranks, policy, critic and reference, by hand."""
    spec = replace(BF16, zero_stage=3, gradient_checkpointing=True)
    passes = Passes(train=(2048, 1024), forward=(4096, 2048), most_targets=2048)
    models = [
        Model(config_of("Llama-2-70B"), spec),
        Model(config_of("Llama-2-70B"), spec, has_head=False),
        Model(config_of("Llama-2-70B"), replace(spec, optimizer=None)),
    ]
    policy, critic, reference = (trainer_memory([model], passes, 64) for model in models)
    turns = trainer_memory(models, passes, 64, in_turn=True)
    # The policy's update is the worst moment: its states and its pass, and of the others the critic's weights alone.
    assert turns.total == policy.total + critic.items["weights"]
    assert turns.asleep == policy.items["weights"] + critic.items["weights"]
    # In passes without gradients there are the weights of all three, and the worst pass.
    weights = turns.asleep + reference.items["frozen weights"]
    assert weights < turns.forward < turns.total
    assert turns.forward - weights == max(
        sum(pass_memory(model, passes, with_gradients=False, num_weights=10**9).values()) for model in models
    )
    # One model alone needs what it needs, and while it runs forward no states.
    alone = trainer_memory(models[:1], passes, 64, in_turn=True)
    assert alone.total == policy.total and alone.forward < alone.total - policy.items["moments"]
    together = trainer_memory(models, passes, 64)
    states = ("gradients", "master weights", "moments", "reduction")
    saved = sum(critic.items[name] for name in states) + reference.items["frozen weights"]
    assert together.total - turns.total == saved


def test_adapters_have_states_and_the_base_has_none() -> None:
    # Rank 16: 16 * (in + out) of q, o 896 + 896 each, k, v 896 + 128, gate, up, down 896 + 4864, in 24 layers.
    adapters = 24 * 16 * (2 * 1792 + 2 * 1024 + 3 * 5760)
    assert adapters == 8_798_208
    spec = replace(BF16, lora=LoraSpec(rank=16))
    found = items(spec, passes=W1)
    assert found["weights"] == 2 * (494_032_768 + adapters)
    states = {"gradients": 4 * adapters, "master weights": 4 * adapters, "moments": 8 * adapters}
    assert {name: found[name] for name in states} == states
    assert found["logits"] == 506 << 20  # the head is not trained
    critic = items(spec, has_head=False)
    assert critic["gradients"] == 4 * (adapters + 896)  # the value head is
    # The reference is the policy without its adapters: it has passes, and no weights.
    frozen = Model(config_of("Qwen2-0.5B"), replace(BF16, optimizer=None), is_adapted=True)
    both = trainer_memory([Model(config_of("Qwen2-0.5B"), spec), frozen], W1, 1)
    assert "frozen weights" not in both.items and both.items["weights"] == found["weights"]
    assert both.asleep == found["weights"]


def test_offloaded_states_pass_through_in_chunks_and_offloaded_models_are_there_while_they_run() -> None:
    spec = replace(BF16, optimizer=replace(ADAMW, offload=True))
    weights = 494_032_768
    # Without passes, the start is the worst moment, at which float32 weights are still there.
    assert items(spec) == {"weights": 2 * weights, "gradients": 4 * weights, "load": 4 * weights}
    # On two ranks it is the update: 3 places of 3 states of 2^23 float32 elements, and gradients, of which at most 5e8
    # are copied to be reduced, here all.
    assert items(replace(spec, zero_stage=1), 2)["update"] == 9 * 4 * (1 << 23) + 4 * weights
    # With moments in bfloat16, a place has 8 bytes per element instead of 12.
    short = replace(ADAMW, bf16_moments=True)
    halved = replace(BF16, optimizer=replace(short, offload=True), zero_stage=1)
    assert items(halved, 2)["update"] == 3 * 8 * (1 << 23) + 4 * weights
    assert items(replace(BF16, optimizer=short))["moments"] == 4 * weights == items(BF16)["moments"] // 2
    assert items(replace(BF16, optimizer=short, zero_stage=3), 8)["moments"] == 4 * weights // 8
    frozen = replace(BF16, optimizer=None)
    assert items(frozen) == {"frozen weights": 2 * weights}
    rests = Model(config_of("Qwen2-0.5B"), replace(frozen, offload=True))
    alone = trainer_memory([rests], W1, 1)
    assert alone.items["frozen weights"] == 2 * weights
    # Beside a trained model, its weights are not there at the peak, which is that model's pass.
    both = trainer_memory([Model(config_of("Qwen2-0.5B"), BF16), rests], W1, 1)
    assert "frozen weights" not in both.items and "activations" in both.items


def test_a_token_goes_through_some_of_the_experts() -> None:
    config = config_of("Qwen3-30B-A3B")
    # A layer: attention 2 * 2048 * 128 * (32 + 4), 128 experts of 3 * 2048 * 768, router 2048 * 128, norms of the
    # layer and of queries and keys 2 * 2048 + 2 * 128.
    layer = 18_874_368 + 128 * 4_718_592 + 262_144 + 4_352
    weights = 48 * layer + 2 * 151_936 * 2048 + 2048
    assert count_parameters(config).total == weights == 30_532_122_624
    # What a layer keeps of a token: 2 bytes * (4 * 2048 + 2 * 32 * 128 + 2 * 4 * 128 + 3 * 8 * 768 + 2 * 2048 * 8).
    passes = Passes(train=(1000, 10), forward=(0, 0), most_targets=10)
    found = items(replace(BF16, zero_stage=1), 8, passes, "Qwen3-30B-A3B")
    assert found["activations"] == 48 * 1000 * 2 * (8192 + 8192 + 1024 + 18_432 + 32_768)
    assert (found["gradients"], found["moments"]) == (4 * weights, weights)
    muon = replace(BF16, optimizer=replace(ADAMW, muon_momentum=0.95))
    moments = 8 * weights - 4 * count_parameters(config).matrices
    assert items(muon, name="Qwen3-30B-A3B")["moments"] == moments
    # Without ZeRO, no rank has a part only.
    whole = replace(muon, dtype="float32", zero_stage=0)
    assert items(whole, num_ranks=4, name="Qwen3-30B-A3B")["moments"] == moments


def test_ranks_of_an_expert_group_divide_the_experts() -> None:
    # 48 layers with 128 experts of 3 * 2048 * 768; half of them on each rank, with states shared out over all of 8.
    experts = 48 * 128 * 3 * 2048 * 768
    config = config_of("Qwen3-30B-A3B")
    total = count_parameters(config).total
    spec = replace(BF16, torch_compile="off", zero_stage=1, expert_parallel_size=2)
    found = trainer_memory([Model(config, spec)], W1, 8).items
    own = total - experts // 2
    names = ("weights", "gradients", "master weights", "moments")
    assert [found[name] for name in names] == [2 * own, 4 * own, 4 * -(-total // 8), 8 * -(-total // 8)]
    whole = trainer_memory([Model(config, replace(spec, expert_parallel_size=1))], W1, 8).items
    assert whole["weights"] - found["weights"] == experts
    frozen = trainer_memory([Model(config, replace(spec, optimizer=None))], W1, 8).items
    assert frozen["frozen weights"] == 2 * own


def test_layers_with_experts_and_without_keep_each_what_is_its_own() -> None:
    # A token keeps in each layer 2 bytes * (4 * 128 + 2 * 32 * (4 + 2)), and of an MLP 2 bytes * 3 * 384. In the second
    # and the sixth layer it keeps 2 bytes * (3 * (2 * 24 + 40) + 2 * 2 * 128) of two experts and the shared one.
    dense, sparse = 1792 + 2304, 1792 + 1552
    passes = Passes(train=(1000, 0), forward=(0, 0), most_targets=0)
    name = "dense layers between experts"
    found = items(BF16, passes=passes, name=name, has_head=False)
    assert (found["activations"], found["working"]) == (1000 * (4 * dense + 2 * sparse), 1000 * dense)
    found = items(replace(BF16, gradient_checkpointing=True), passes=passes, name=name, has_head=False)
    assert (found["activations"], found["working"]) == (1000 * (6 * 2 * 128 + dense), 1000 * dense)


def test_frozen_models_are_divided_and_gathered_at_zero_3_on_several_ranks_alone() -> None:
    weights = 494_032_768
    frozen = replace(BF16, optimizer=None, zero_stage=3)
    assert items(frozen) == {"frozen weights": 2 * weights}
    # All weights, and a copy of a layer's: attention 2 * 896 * 64 * (14 + 2), MLP 3 * 896 * 4864.
    gathered = 2 * (weights + 1_835_008 + 13_074_432)
    assert items(frozen, 8) == {"frozen weights": 2 * weights // 8, "gathered": gathered}
    # The head is the embedding, so that a model with one output has 896 weights more.
    assert items(frozen, 8, has_head=False)["frozen weights"] == 2 * (weights + 896) // 8
    copied = replace(frozen, zpg=2)
    assert items(copied, 8)["second copy"] == 2 * weights // 2
    assert items(copied, 8, is_adapted=True) == {"gathered": gathered}
    for spec in (frozen, replace(BF16, optimizer=None, offload=True)):
        assert trainer_memory([Model(config_of("Qwen2-0.5B"), spec)], NOTHING, 8).asleep == 0


def test_passes_without_gradients_count_for_models_that_have_them() -> None:
    passes = Passes(train=(10, 8), forward=(100_000, 0), most_targets=8)
    found = items(BF16, passes=passes)
    assert found["working"] == 100_000 * 40_448 and not {"activations", "logits"} & set(found)  # one layer at a time
    found = items(BF16, passes=passes, runs_forward=False)
    assert found["activations"] == 10 * 24 * 40_448
    assert found["logits"] == 2 * 151_936 * 8 + 2 * 151_936 * 896 and "working" not in found


def test_logits_above_4_gib_are_computed_in_chunks_if_the_head_is_plain_and_whole() -> None:
    config = config_of("Qwen2-0.5B")
    config.vocab_size = 1 << 15
    table = 896 << 15
    whole = (2 * 8 << 15) + 2 * table

    def logits(most_targets: int, spec: ModelSpec = BF16, num_ranks: int = 1) -> int:
        passes = Passes(train=(10, 8), forward=(0, 0), most_targets=most_targets)
        return trainer_memory([Model(config, spec, runs_forward=False)], passes, num_ranks).items["logits"]

    assert logits(1 << 16) == whole  # 2 bytes * 2^15 * 2^16 is 4 GiB
    assert logits((1 << 16) + 1) == (506 << 20) + 4 * table
    assert logits(1 << 20, replace(BF16, zero_stage=3), 64) == whole
    config.final_logit_softcapping = 30.0
    assert logits(1 << 20) == whole


def test_layers_are_compiled_at_zero_3_except_with_adapters() -> None:
    passes = Passes(train=(1000, 0), forward=(0, 0), most_targets=0)
    sharded = replace(BF16, zero_stage=3)
    assert items(sharded, 2, passes)["activations"] == 1000 * 24 * 40_448
    adapted = items(replace(sharded, lora=LoraSpec(rank=4)), 2, passes)
    assert adapted["activations"] == 1000 * 24 * (40_448 + 2 * 896 * 6 + 2 * 4864)


def test_layers_of_ranks_that_divide_sequences_are_not_compiled() -> None:
    passes = Passes(train=(100_000, 0), forward=(0, 0), most_targets=0)
    found = items(replace(BF16, sequence_parallel_size=2), 2, passes)
    assert found["activations"] == 50_000 * 24 * (40_448 + 2 * 896 * 6 + 2 * 4864)


@pytest.mark.parametrize(
    ("dtype", "stage", "num_ranks", "expected"),
    # Bytes per weight of weights, gradients, master weights and moments, of which the last two are divided.
    [
        ("bfloat16", 0, 4, (2, 4, 1, 2)),
        ("bfloat16", 1, 4, (2, 4, 1, 2)),
        ("bfloat16", 2, 4, (2, 1, 1, 2)),
        ("bfloat16", 3, 4, (0.5, 1, 1, 2)),
        ("bfloat16", 2, 1, (2, 4, 4, 8)),
        ("float32", 0, 4, (4, 4, 0, 8)),
        ("float32", 1, 4, (4, 4, 1, 2)),
        ("float32", 2, 4, (4, 1, 1, 2)),
        ("float32", 3, 4, (1, 1, 1, 2)),
    ],
)
def test_states_by_zero_stage(dtype: str, stage: int, num_ranks: int, expected: tuple[float, ...]) -> None:
    found = items(replace(BF16, dtype=dtype, zero_stage=stage), num_ranks)
    names = ("weights", "gradients", "master weights", "moments")
    assert tuple(found.get(name, 0) / 494_032_768 for name in names) == expected


def test_buckets_of_gradients_are_in_the_type_that_is_sent() -> None:
    weights = 494_032_768
    passes = Passes(train=(64, 8), forward=(0, 0), most_targets=8)
    # ZeRO 2 collects 5e8 gradients in bfloat16, and has a float32 copy of those that it reduces, once their layers are
    # done. All of this model's fit: the copy comes after the activations, and is the peak of small passes only.
    assert items(replace(BF16, zero_stage=2), 4, passes)["reduction"] == 1_000_000_000 + 4 * weights
    large = items(replace(BF16, zero_stage=2), 4, replace(passes, train=(16_384, 8)))
    assert large["reduction"] == 1_000_000_000 and large["activations"] > 1e10
    assert items(replace(BF16, zero_stage=2, dtype="float32"), 4, passes)["reduction"] == 2_000_000_000
    assert items(replace(BF16, zero_stage=3), 4)["reduction"] == 2_000_000_000
    assert items(replace(BF16, zero_stage=3), 1)["reduction"] == 1_000_000_000
    # At ZeRO 1, gradients in float32 have a bucket in passes, too.
    assert items(replace(BF16, zero_stage=1, dtype="float32"), 4, passes)["reduction"] == 2_000_000_000
    assert "reduction" not in items(replace(BF16, zero_stage=1), 4, passes)


def test_updates_copy_gradients_of_at_most_a_billion_weights_at_zero_3() -> None:
    assert items(replace(BF16, zero_stage=3))["update"] == 4 * 494_032_768
    of_two = items(replace(BF16, zero_stage=3), 2, name="Qwen2-7B", has_head=False)
    assert of_two["update"] == 4_000_000_000  # a rank has 3.5e9 weights


def test_ranks_of_a_sequence_group_divide_the_tokens() -> None:
    spec = replace(BF16, torch_compile="off")
    whole = items(spec, 4, W1)
    divided = items(replace(spec, sequence_parallel_size=4), 4, W1)
    assert divided["activations"] == whole["activations"] // 4
    checkpointed = items(replace(spec, gradient_checkpointing=True), passes=W1)
    assert checkpointed["activations"] == 12_288 * 2 * 896 * 24 + whole["activations"] // 24


def test_ranks_of_a_tensor_group_divide_the_matrices_of_layers() -> None:
    # Qwen2-0.5B: 24 layers with matrices of 896 x 64 x 2 x (14 + 2) and 3 x 896 x 4864 weights.
    matrices = 24 * (1_835_008 + 13_074_432)
    own = matrices // 2 + 494_032_768 - matrices
    spec = replace(BF16, torch_compile="off", zero_stage=1, tensor_parallel_size=2)
    found = items(spec, 8, W1)
    names = ("weights", "gradients", "master weights", "moments")
    assert [found[name] for name in names] == [2 * own, 4 * own, own, 2 * own]
    frozen = items(replace(spec, optimizer=None), 8, W1)
    assert frozen["frozen weights"] == 2 * own
    # Per token a layer keeps 4 x 896 that is whole and 2 (896 + 128) + 3 x 4864 that is divided; norms not compiled
    # 2 x 896 x 6 bytes, and the MLP 4864.
    per_layer = 2 * (4 * 896 + (2 * (896 + 128) + 3 * 4864) // 2) + 2 * 896 * 6 + 4864
    assert found["activations"] == 24 * 12_288 * per_layer
    # One group of all ranks has nothing to share out among ranks with the same weights.
    assert items(spec, 2)["master weights"] == 4 * own


def test_engine_has_the_cache_that_its_share_of_the_gpu_leaves() -> None:
    spec = EngineSpec(model="m", dtype="bfloat16", max_num_seqs=256, max_model_len=2048, gpu_memory_utilization=0.5)
    free = engine_memory(config_of("Llama-2-70B"), spec)
    sequence = 2 * 80 * 8 * 128 * 2 * 2048  # keys and values of 80 layers with 8 heads of 128
    assert free.items["KV cache"] == 256 * sequence
    others = free.total - free.items["KV cache"]
    capped = engine_memory(config_of("Llama-2-70B"), spec, gpu_bytes=2 * (others + 10 * sequence))
    assert capped.items["KV cache"] == 10 * sequence and capped.total == others + 10 * sequence
    assert engine_memory(config_of("Llama-2-70B"), spec, gpu_bytes=others).items["KV cache"] == sequence
    assert engine_memory(config_of("Llama-2-70B"), spec, gpu_bytes=10**15) == free
