"""Seconds of a plan by hand: operations and bytes of shapes over rates, and what has no size."""

import dataclasses
import math

import pytest

from rlhf_cli.preflight.seconds import Rates, step_seconds
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines.model_files import checkpoint_shapes

WEIGHTS = {"qwen2.5-0.5b": 494_032_768}  # as its owner publishes them
GROUP = ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4", "--init_kl_coef", "0", "--bf16"]
SLEEP = ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]
ASYNC = ["--async_train", "--old_logprobs", "rollout"]


def model(name: str, gpus: int, *more: str) -> list[str]:
    ranks = ["--actor_num_gpus_per_node", str(gpus), "--vllm_num_engines", str(gpus)]
    return ["--pretrain", name, *ranks, *GROUP, "--colocate_all_models", "--packing_samples", *more]


def seconds(planned, *, mean=None, moved=0, **rates):
    """The seconds of a plan on a device with these rates, for which all else takes no time."""
    free = {field.name: 0.0 if field.name.endswith("_s") else math.inf for field in dataclasses.fields(Rates)}
    return step_seconds(planned.job, Rates(**(free | {"crowding": 1.0} | rates)), mean, moved)


@pytest.mark.parametrize(("more", "expected"), [(SLEEP, {"sleep and waking": 4.0}), ([], {})])
def test_seconds_of_what_sleeps_and_is_copied_there_and_back(more, expected, planner):
    """20 GB twice, at 10 GB/s."""
    found = seconds(planner(1)(model("qwen2.5-0.5b", 1, *more)), moved=20e9, copied_bytes=1e10)
    assert {name: value for name, value in found.items() if value and name != "step"} == expected


def test_seconds_of_passes_are_operations_over_rate(planner):
    """64 rollouts of 1,024 + 1,024 tokens, each in the layers of 357,826,560 matrix weights and in 24 layers of causal
    attention of 14 heads of 64, and the response in the head of 151,936 x 896."""
    words = model("qwen2.5-0.5b", 1, "--init_kl_coef", "0.1", "--rollout_batch_size", "16", "--train_batch_size", "32")
    words += ["--generate_max_len", "1024"]
    of_attention = 64 * 24 * 4 * 14 * 64 * 2048 * 2049 / 2
    of_forward = 64 * (2 * 357_826_560 * 2048 + 2 * 151_936 * 896 * 1024) + of_attention
    found = seconds(planner(1)(words), flops=1e12)
    assert found["reference"] == pytest.approx(of_forward / 1e12)
    assert found["policy training"] == pytest.approx(3 * of_forward / 1e12)
    saving = seconds(planner(1, 1.0)([*words, "--gradient_checkpointing"]), flops=1e12)
    assert saving["policy training"] == pytest.approx(4 * of_forward / 1e12)
    two = seconds(planner(2)([*words, "--actor_num_gpus_per_node", "2", "--vllm_num_engines", "2"]), flops=1e12)
    assert two["policy training"] == pytest.approx(1.5 * of_forward / 1e12)
    padded = seconds(planner(1, 3.0)([*words, "--packing_samples", "false"]), flops=1e12)  # with all of the square
    assert padded["reference"] == pytest.approx((of_forward + of_attention) / 1e12)
    # 2 updates, each of 32 rollouts in passes of 8, forward and backward; or the host's seconds, if they are more.
    one = planner(1, 2.0)(words)
    assert seconds(one, pass_s=1.0)["policy training"] == 2 * 4 * 2
    assert seconds(one, pass_s=1.0, host_layer_s=3.0)["policy training"] == 2 * 4 * 3 * 24
    assert seconds(one, pass_s=1.0, host_layer_s=3.0)["reference"] == 8 * 24
    assert seconds(one, pass_s=99.0, host_layer_s=3.0)["reference"] == 8 * 99


@pytest.mark.parametrize(
    ("more", "rows", "of_hidden", "of_parts"),
    [
        ([], 32, 8 * 896, 4 * 64 * 16 + 6 * 4864),
        # Layers that are not compiled have norms with a float32 copy and a result, and another factor in the MLP.
        (["--packing_samples", "false"], 32, 20 * 896, 4 * 64 * 16 + 8 * 4864),
        (["--ds_tensor_parallel_size", "2"], 64, 20 * 896, (4 * 64 * 16 + 8 * 4864) / 2),
        (["--sequence_parallel_size", "2"], 64, 10 * 896, (4 * 64 * 16 + 8 * 4864) / 2),
    ],
)
def test_seconds_of_what_layers_move(more, rows, of_hidden, of_parts, planner):
    """Three passes over 64 rollouts of 2,048 tokens, of which each of two ranks has one half, or half of each layer."""
    words = model("qwen2.5-0.5b", 2, "--rollout_batch_size", "16", "--train_batch_size", "64", *more)
    found = seconds(planner(2)([*words, "--generate_max_len", "1024"]), moved_bytes=1e12)
    assert found["policy training"] == pytest.approx(3 * rows * 2048 * 24 * (of_hidden + of_parts) / 1e12)


def test_seconds_of_gathering_weights_that_are_divided(planner):
    """A sync gathers the weights of 24 layers once, and 2 passes with gradients three times each."""
    words = model("qwen2.5-0.5b", 2, "--rollout_batch_size", "8", "--train_batch_size", "32", "--zero_stage", "3")
    plan = planner(2)(words)
    found = seconds(plan, zero3_layer_s=3.0)
    assert (found["weight sync"], found["policy training"]) == (24, 2 * 3 * 24)
    assert seconds(plan, link_bytes=1e12)["weight sync"] == pytest.approx(2 * WEIGHTS["qwen2.5-0.5b"] / 1e12)
    assert "weight sync" not in seconds(planner(2, 1.0)([*words, "--zero_stage", "2"]), zero3_layer_s=3.0)


@pytest.mark.parametrize(("gpus", "more", "copied"), [(1, [], 2), (2, [], 2), (2, ["--zero_stage", "3"], 1)])
def test_seconds_of_copying_a_reference_from_host_memory(gpus, more, copied, planner):
    """2 bytes per weight in each step; at ZeRO 3, each of two ranks copies one half of them."""
    words = model("qwen2.5-0.5b", gpus, "--init_kl_coef", "0.1", "--ref_reward_offload", *more)
    found = seconds(planner(gpus)(words), copied_bytes=1e12)
    assert found["reference"] == pytest.approx(copied * WEIGHTS["qwen2.5-0.5b"] / 1e12)


def test_seconds_of_sending_adapters_alone(planner):
    """Rank 8 has 8 (inputs + outputs) weights of 2 bytes for each of the 7 linear layers of 24."""
    words = model("qwen2.5-0.5b", 2, "--rollout_batch_size", "8", "--train_batch_size", "32", "--lora_rank", "8")
    shapes = [(896, 896), (896, 128), (896, 128), (896, 896), (896, 4864), (896, 4864), (4864, 896)]
    plan = planner(2)
    for sync, size in (("merge", WEIGHTS["qwen2.5-0.5b"]), ("adapter", 24 * 8 * sum(map(sum, shapes)))):
        found = seconds(plan([*words, "--lora_sync", sync]), synced_bytes=1e9)
        assert found["weight sync"] == pytest.approx(2 * size / 1e9)


def test_seconds_of_sending_a_draft_model_that_is_trained_along(planner):
    words = model("qwen2.5-1.5b", 2, "--vllm_draft_model", "qwen2.5-0.5b", "--zero_stage", "3")
    plan = planner(2)
    frozen, trained = (
        seconds(plan([*words, *more]), synced_bytes=1e9, link_bytes=1e10, zero3_layer_s=3.0)["weight sync"]
        for more in ([], ["--draft_learning_rate", "1e-5"])
    )
    size = 2 * WEIGHTS["qwen2.5-0.5b"]
    assert trained - frozen == pytest.approx(size / 1e9 + size / 1e10 + 24)  # one second per layer


def test_seconds_of_tokens_that_go_to_experts_of_other_ranks(planner, tmp_path):
    """Of two ranks, each sends 32 rollouts of 2,048 tokens to 2 experts in each of 2 layers and back, one half of them
    to the other rank, forward and backward. Both have one half of 4 experts, and add up gradients of the rest."""
    path = tiny_model_dir(tmp_path / "moe", architecture="qwen3_moe")
    sizes = ["--rollout_batch_size", "16", "--train_batch_size", "64", "--generate_max_len", "1024"]
    words = model(str(path), 2, *sizes, "--zero_stage", "1", "--expert_parallel_size", "2")
    shapes = checkpoint_shapes(path)
    own = sum(math.prod(shape) / (1 + (".experts." in name)) for name, shape in shapes.items())
    exchanged = 32 * 2048 * 2 * 2 * 64 * 2 * 2 / 2
    found = seconds(planner(2)(words), link_bytes=1e6)
    assert found["policy training"] == pytest.approx((2 * exchanged + 6 * own) / 1e6)
    with_reference = seconds(planner(2, 9.0)([*words, "--init_kl_coef", "0.1"]), link_bytes=1e6)
    assert with_reference["reference"] == pytest.approx(exchanged / 1e6)


def test_seconds_of_decode_steps(planner):
    """64 rollouts at once, for 1,024 steps that read weights, and 12,288 bytes of keys and values per token before."""
    words = model("qwen2.5-0.5b", 1, "--rollout_batch_size", "16", "--train_batch_size", "64")
    plan = planner(1)([*words, "--generate_max_len", "1024"])
    assert seconds(plan, decode_step_s=1.0)["generation"] == 1024
    assert seconds(plan, decode_row_s=1.0)["generation"] == 64 * 1024
    single = planner(1, 4.0)([*words, "--generate_max_len", "1024", "--vllm_skip_patches", "multi_step"])
    assert seconds(single, single_step_s=2.0, single_row_s=1.0)["generation"] == 2 * 1024 + 64 * 1024
    read = 2 * WEIGHTS["qwen2.5-0.5b"] + 64 * 12_288 * (1024 + 512)
    assert seconds(plan, read_bytes=1e12, crowding=1.5)["generation"] == pytest.approx(1024 * read / 1e12)
    rounded = planner(1, 1.0)([*words, "--generate_max_len", "1024", "--vllm_quantization", "fp8"])
    assert seconds(rounded, read_bytes=1e12)["generation"] == pytest.approx(1024 * (read - 357_826_560) / 1e12)
    # 100 tokens on average: the longest of 64 has about 100 (ln 64 + 0.577).
    assert seconds(plan, mean=100.0, decode_step_s=1.0)["generation"] == pytest.approx(473.6, abs=0.1)
    assert seconds(plan, mean=100.0, decode_row_s=1.0)["generation"] == 6400
    # Two engines of one GPU have half of the rollouts each, and wait for each other's work there.
    halves = planner(1, 2.0)([*words, "--generate_max_len", "1024", "--vllm_num_engines", "2"])
    read += 2 * WEIGHTS["qwen2.5-0.5b"]
    assert seconds(halves, read_bytes=1e12, crowding=1.5)["generation"] == pytest.approx(1.5 * 1024 * read / 1e12)
    two = planner(2)([*words, "--generate_max_len", "1024", "--vllm_num_engines", "2"])  # wait for the longest of both
    assert seconds(two, mean=100.0, decode_step_s=1.0)["generation"] == pytest.approx(473.6, abs=0.1)


def test_seconds_of_a_reward_model(planner):
    """64 rollouts of 2,048 tokens in 4 calls, and a head of one output; --ref_reward_offload loads it each time."""
    sizes = "--rollout_batch_size 16 --train_batch_size 64"
    words = model("qwen2.5-0.5b", 1, *sizes.split(), "--remote_rm_url", "None")
    words += ["--generate_max_len", "1024", "--reward_pretrain", "qwen2.5-0.5b", "--reward_batch_size", "16"]
    plan = planner(1)(words)
    of_layers = 64 * (2 * 357_826_560 * 2048 + 24 * 4 * 14 * 64 * 2048 * 2049 / 2)
    assert seconds(plan, flops=1e12)["rewards"] == pytest.approx(of_layers / 1e12)
    assert seconds(plan, pass_s=1.0)["rewards"] == 4
    away = planner(1, 1.0)([*words, "--ref_reward_offload"])
    assert seconds(away, copied_bytes=1e12)["rewards"] == pytest.approx(4 * 2 * WEIGHTS["qwen2.5-0.5b"] / 1e12)


def test_sides_that_work_at_the_same_time_take_as_long_as_the_longer_one(planner):
    words = ["--pretrain", "qwen2.5-0.5b", *GROUP, "--train_batch_size", "128"]
    rates = {"decode_step_s": 1.0, "flops": 1e13}
    in_turn = seconds(planner(2)(words), **rates)
    assert in_turn["step"] == pytest.approx(sum(in_turn.values()) - in_turn["step"])
    beside = seconds(planner(2, 1.0)([*words, *ASYNC]), **rates)
    assert beside["step"] == max(beside["generation"], beside["policy training"])
    # On one GPU a trainer computes beside an engine, and waits for it.
    shared = seconds(planner(1)([*words, *ASYNC, "--colocate_all_models"]), crowding=1.5, **rates)
    assert shared["policy training"] == pytest.approx(1.5 * beside["policy training"])
    assert shared["step"] == pytest.approx(shared["generation"] + shared["policy training"])
