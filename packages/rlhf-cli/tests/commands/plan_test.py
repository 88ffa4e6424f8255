"""`rlhf plan`: memory by hand, flags that make a run fit, and plans for GPUs and models that are not here."""

import json
import math
import re
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf_cli.commands.plan import describe
from rlhf_cli.main import main
from rlhf_cli.preflight.plan_changes import adapters, changes
from rlhf_cli.preflight.shapes import _SIZES, shape_config
from rlhf_data.errors import ConfigError
from rlhf_train.costs import count_parameters
from rlhf_train.memory import Passes
from rlhf_train.run_memory import largest_passes

GIB = 1 << 30
# As their owners publish them.
WEIGHTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
GROUP = ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4", "--init_kl_coef", "0", "--bf16"]
SHARED = [*GROUP, "--colocate_all_models", "--packing_samples"]
APART = ["--colocate_all_models", "false", "--actor_num_gpus_per_node", "1", "--vllm_num_engines", "1"]
SLEEP = ["--vllm_enable_sleep", "--deepspeed_enable_sleep"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("socket.socket.connect", lambda *words: pytest.fail("a plan used the network"))


def model(name: str, gpus: int, *more: str) -> list[str]:
    per_node = str(min(gpus, 8))
    nodes = str(-(-gpus // 8))
    ranks = ["--actor_num_nodes", nodes, "--actor_num_gpus_per_node", per_node, "--vllm_num_engines", str(gpus)]
    return ["--pretrain", name, *ranks, *SHARED, *more]


@pytest.mark.parametrize("name", _SIZES)
def test_shape_has_the_weights_that_its_owner_publishes(name, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(shape_config(name)))
    assert count_parameters(AutoConfig.from_pretrained(tmp_path)).total == WEIGHTS[name]


def test_states_that_sleep_take_12_bytes_per_weight_of_host_memory(planner):
    weights = WEIGHTS["qwen2.5-7b"]
    asleep = planner(8)(model("qwen2.5-7b", 8, *SLEEP))
    [need] = [asleep.memory.needs[kind.name] for kind in asleep.job.plan.trainers]
    assert 8 * need.host == 8 * need.moved == pytest.approx(12 * weights, rel=1e-6)
    assert f"at most: {12 * weights / GIB:.1f} GiB per node" in describe(asleep, None)
    awake = planner(16)(model("qwen2.5-7b", 16))
    assert {awake.memory.needs[kind.name].host for kind in awake.job.plan.trainers} == {0}
    assert "host memory" not in describe(awake, None)


@pytest.mark.parametrize(
    ("more", "bytes_per_weight", "moved"),
    [
        (["--adam_offload"], 12, 0),
        (["--adam_offload", "--bf16_moments"], 8, 0),
        (["--adam_offload", "--adam_offload_path", "disk"], 0, 0),
        (["--init_kl_coef", "0.1", "--ref_reward_offload"], 2, 0),
        (["--init_kl_coef", "0.1", "--ref_reward_offload", "--adam_offload"], 14, 0),
        (["--init_kl_coef", "0.1", *SLEEP], 14, 14),
        (["--init_kl_coef", "0.1", "--adam_offload", *SLEEP], 14, 2),
    ],
)
def test_what_is_kept_in_host_memory_is_counted_and_what_is_copied_there_in_turns(
    more, bytes_per_weight, moved, planner
):
    found = planner(1)(model("qwen2.5-1.5b", 1, *more))
    [kind] = found.job.plan.trainers
    need = found.memory.needs[kind.name]
    weights = WEIGHTS["qwen2.5-1.5b"]
    assert (need.host, need.moved) == (bytes_per_weight * weights, moved * weights)


def test_draft_model_that_is_trained_has_its_states_where_the_policy_is_trained(planner):
    drafts = ["--vllm_draft_model", "qwen2.5-1.5b"]
    plan_of = planner(1)
    plans = [plan_of(model("qwen2.5-7b", 1, *drafts, *more)) for more in ([], ["--draft_learning_rate", "1e-5"])]
    [placed] = plans[1].job.plan.trainers
    assert placed.roles == ("actor", "draft")
    frozen, trained = (plan.memory.needs[placed.name].items for plan in plans)
    weights = WEIGHTS["qwen2.5-1.5b"]
    assert trained["weights"] - frozen["weights"] == 2 * weights
    for name, size in {"gradients": 4, "master weights": 4, "moments": 8}.items():
        assert trained[name] - frozen[name] == size * weights


def test_each_teacher_is_counted_and_its_distributions_are_kept_for_all_rollouts(planner):
    plan = planner(8)
    one, two = (
        plan(model("qwen2.5-7b", 8, "--teacher_model", teachers, "--teacher_top_k", "64"))
        for teachers in ("qwen2.5-7b", "math.jsonl=qwen2.5-7b,qwen2.5-1.5b")
    )
    [placed] = two.job.plan.trainers
    assert placed.roles == ("actor", "teacher", "teacher 2")
    # The average of the policy is called by its name, beside which others have their numbers.
    averaged = planner(8, 1.0)(model("qwen2.5-7b", 8, "--teacher_model", "math.jsonl=ema,qwen2.5-1.5b", "--enable_ema"))
    assert averaged.job.plan.trainers[0].roles == ("actor", "teacher", "teacher ema")
    assert averaged.job.models["teacher ema"].is_average
    before, after = (planned.memory.needs[placed.name] for planned in (one, two))
    assert before.items["frozen weights"] == 2 * WEIGHTS["qwen2.5-7b"]
    assert after.items["frozen weights"] == 2 * (WEIGHTS["qwen2.5-7b"] + WEIGHTS["qwen2.5-1.5b"])
    columns = 4 * two.job.batch.num_rollouts // 8 * two.job.engine.max_model_len * (2 * 64 + 1)
    sampled = planner(8, 80)(model("qwen2.5-7b", 8, "--teacher_model", "math.jsonl=qwen2.5-7b,qwen2.5-1.5b"))
    assert after.forward - sampled.memory.needs[placed.name].forward == columns


def test_phases_add_up_what_is_awake(planner):
    found = planner(1, 140.0)(model("qwen2.5-1.5b", 1, *SLEEP))
    trainer = found.memory.needs["train"]
    engine = found.memory.needs["engines"]
    [card] = found.memory.cards
    assert card.phases == {
        "generation and rewards": trainer.asleep + engine.total,
        "log-probs and values": trainer.forward + engine.asleep,
        "updates": trainer.total + engine.asleep,
    }
    assert found.peak == max(card.phases.values()) < card.together
    text = describe(found, 140 * GIB)
    assert f"  updates                 {card.phases['updates'] / GIB:7.1f}" in text
    awake = planner(1)(model("qwen2.5-1.5b", 1))
    assert awake.peak == sum(need.total for need in awake.memory.needs.values())
    assert "nothing sleeps, so all of it stays in every phase" in describe(awake, None)


def picture_of(planned, size):
    return describe(planned, size).partition("GPUs, at the peak\n")[2].partition("\n\n")[0].splitlines()


def test_picture_has_a_line_per_range_of_equal_gpus(planner):
    words = model("llama-3.1-70b", 64, *SLEEP, "--zero_stage", "3", "--train_batch_size", "512")
    picture = picture_of(planner(64, 80.0)(words), 80 * GIB)
    assert [line.split("  ")[1] for line in picture] == [f"node {node} GPU 0-7" for node in range(8)]
    for line in picture:
        bar, size = re.search(r"\|([#.]+)\| +([\d.]+) of 80\.0 GiB", line).groups()
        assert bar.count("#") == min(round(24 * float(size) / 80), 24)
        assert "[1 x train] [1 x engines]" in line
    apart = ["--pretrain", "qwen2.5-1.5b", *GROUP]
    picture = picture_of(planner(2)(apart), None)
    assert ["actor" in picture[0], "engines" in picture[1], "|" in picture[0]] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "more"),
    [
        ("qwen2.5-7b", 1, 140.0, []),
        ("qwen2.5-7b", 1, 100.0, []),
        ("qwen2.5-7b", 8, 40.0, []),
        ("llama-3.1-70b", 16, 140.0, ["--generate_max_len", "2048"]),
        ("llama-3.1-8b", 1, 140.0, ["--advantage_estimator", "gae", "--init_kl_coef", "0.01"]),
    ],
)
def test_flags_make_the_run_fit_and_none_of_them_is_superfluous(name, gpus, gib, more, planner):
    plan = planner(gpus, gib)
    words = model(name, gpus, *more)
    size = int(gib * GIB)
    assert plan(words).lacks(size)
    found = changes(words, plan, size)
    assert plan([*words, *found]).lacks(size) == ""
    starts = [number for number, word in enumerate(found) if word.startswith("--")]
    parts = [found[start:end] for start, end in zip(starts, [*starts[1:], len(found)], strict=True)]
    pairs = ("--vllm_enable_sleep", "--deepspeed_enable_sleep", "--micro_", "--vllm_num_engines", "--vllm_tensor")
    for part in (part for part in parts if not part[0].startswith(pairs)):
        rest = [word for other in parts if other is not part for word in other]
        with suppress(ConfigError):  # a later flag needs this one
            assert plan([*words, *rest]).lacks(size), part


def test_run_that_nothing_makes_fit(planner):
    """At the start, weights, gradients and master weights of 7 billion take 10 bytes each: 71 GiB, before the rest."""
    assert changes(model("qwen2.5-7b", 1), planner(1, 80.0), 80 * GIB) is None


def test_engine_whose_share_is_too_small_is_found(planner):
    found = planner(1, 80.0)(model("qwen2.5-7b", 1, "--vllm_gpu_memory_utilization", "0.1"))
    assert re.fullmatch(r"an engine needs [\d.]+ GiB, and its share of a GPU is 8\.0 GiB", found.lacks(80 * GIB))


def test_expected_passes_have_the_longest_of_geometric_lengths(planner):
    """The longest of n has mean (log n + 0.577) tokens, the k-th longest mean / (k - 1) less than the one before."""
    sizes = "--rollout_batch_size 16 --prompt_max_len 100 --generate_max_len 9000"
    words = model("qwen2.5-1.5b", 2, *sizes.split())
    plan = planner(2)

    def passes(mean: float | None, num_rows: int, *more: str, num_shards: int = 2) -> Passes:
        rows = ["--micro_train_batch_size", str(num_rows), "--train_batch_size", "64"]
        return largest_passes(plan([*words, *rows, *more]).job, num_shards, mean)

    def longest(count: int, num_rows: int) -> float:
        return 100 * sum(
            math.log(count) + 0.577 - sum(1 / k for k in range(1, number)) for number in range(1, num_rows + 1)
        )

    most = longest(10 * 64, 1)
    assert passes(100.0, 1).train == pytest.approx((100 + most, most), rel=0.06)
    # The longest four of one step and rank are fewer tokens than those of ten steps and both ranks.
    assert longest(32, 4) < passes(100.0, 4).train[1] < longest(10 * 64, 4)
    assert passes(100.0, 4, "--share_prompts").train[1] < 0.9 * passes(100.0, 4).train[1]
    assert passes(1e9, 4) == passes(None, 4)
    two_updates = passes(100.0, 1, "--train_batch_size", "32")
    assert two_updates == passes(100.0, 1)  # of as many responses
    held = passes(100.0, 4, "--async_train", "--max_staleness", "9", *APART, num_shards=1).train[1]
    assert held == pytest.approx(longest(10 * 64, 4), rel=0.06)  # of one batch that may get all that are under way


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_command_says_which_flags_make_a_run_fit(capsys):
    words = model("qwen2.5-7b", 1)
    status, out, _ = run(capsys, *words, "--gpus=1", "--gpu_memory_gb", "140")
    assert status == 0
    assert "placement: 1 GPU(s)\n  train    1 x actor, GPU 0\n  engines  1 x vLLM, GPU 0" in out
    assert "128 samples / 1 process(es) = 128 each, in 16 pass(es) of at most 8" in out
    assert "the run does not fit: the fullest GPU needs " in out
    added = re.search(r"\nadd (.*): it then needs ([\d.]+) GiB", out)
    assert float(added[2]) * 1.1 <= 140
    status, out, _ = run(capsys, *words, *added[1].split(), "--gpus", "1", "--gpu_memory_gb=140")
    assert (status, out.splitlines()[-1]) == (0, "the run fits")


def test_seconds_are_those_of_the_kind_of_gpu_and_the_lengths(capsys):
    def step(*more: str) -> float:
        _, out, _ = run(capsys, *model("qwen2.5-7b", 2), "--gpus", "2", *more)
        seconds, speed = re.search(r"\n  step +([\d.]+)\n  response tokens/s +([\d,]+)\n", out).groups()
        tokens = 4096 * (100 if "--mean_response_tokens" in more else 1024)
        assert int(speed.replace(",", "")) == pytest.approx(tokens / float(seconds), rel=0.01)
        return float(seconds)

    assert step("--gpu_kind", "h200") == step()
    assert step("--gpu_kind", "h100") > 1.05 * step()
    assert step("--mean_response_tokens", "100") < 0.5 * step()
    own = ["--gpus", "2", "--mean_response_tokens", "100"]
    _, out, _ = run(capsys, *model("qwen2.5-7b", 2), *own)
    told = re.search(r"100 tokens on average: ([\d.]+) GiB for a training process, ([\d.]+) GiB on the fullest", out)
    trainer, fullest = (float(re.search(rf"\n  {name} +(\d+\.\d)", out)[1]) for name in ("train", "fullest GPU"))
    assert float(told[1]) < trainer
    assert float(told[2]) - fullest == pytest.approx(float(told[1]) - trainer, abs=0.11)


@pytest.mark.parametrize(("gpus", "says"), [(8, False), (64, True)])
def test_links_between_nodes_are_said_to_be_unmeasured(gpus, says, capsys):
    words = model("llama-3.1-70b", gpus, *SLEEP, "--zero_stage", "3", "--train_batch_size", "512")
    status, out, _ = run(capsys, *words, "--gpus", str(gpus))
    assert (status, "\n  links between nodes are counted like those within a node" in out) == (0, says)


@pytest.mark.parametrize("four_bit", [[], ["--load_in_4bit"]], ids=str)
def test_the_time_to_restore_weights_is_said_to_be_left_out(four_bit, capsys):
    status, out, _ = run(capsys, *model("qwen2.5-7b", 2), "--gpus", "2", "--lora_rank", "8", *four_bit)
    assert (status, "from 4 bits is not counted" in out) == (0, bool(four_bit))


def test_adapters_are_suggested_where_all_weights_cannot_be_trained(capsys, planner):
    """7 billion weights in bfloat16 are 14.2 GiB, and adapters of rank 64 add 64 (inputs + outputs) of 7 matrices."""
    own = ["--gpus", "1", "--gpu_memory_gb", "80"]
    start = ["--pretrain", "qwen2.5-7b", *GROUP]
    status, out, _ = run(capsys, "--suggest", *start, *own)
    assert (status, out.splitlines()[-1]) == (0, "the run fits")
    flags = out.splitlines()[1].split()
    assert flags[flags.index("--lora_rank") + 1] == "64"
    told = re.search(r"all weights cannot be trained on these GPUs; LoRA adapters can, in ([\d.]+) GiB", out)
    assert float(told[1]) == float(re.search(r"fullest GPU +([\d.]+) of 80.0, fits", out)[1]) < 80 / 1.1
    found = planner(1, 80.0)([*start, *flags])
    outputs = 3584 + 3584 + 2 * (3584 + 512) + 3584 + 3584 + 3 * (3584 + 18_944)
    weights = 2 * (WEIGHTS["qwen2.5-7b"] + 28 * 64 * outputs)
    assert found.memory.needs["train"].items["weights"] == weights
    status, out, _ = run(capsys, *model("qwen2.5-7b", 1), *own)
    assert status == 0
    assert re.search(r"\nall weights cannot .*\nadd --lora_rank 64.*: it then needs [\d.]+ GiB", out)


def test_adapters_are_for_the_critic_too_and_only_where_there_are_none(planner):
    words = ["--pretrain", "qwen2.5-7b", "--advantage_estimator", "gae", *GROUP[2:], "--colocate_all_models"]
    plan = planner(1, 80.0)
    assert adapters(words, plan, 80 * GIB)[:4] == ["--lora_rank", "64", "--critic_lora_rank", "64"]
    given = ["--lora_rank", "8", "--critic_lora_rank", "8"]
    assert adapters([*words, *given], plan, 80 * GIB) is None


def test_gpus_that_the_flags_leave_idle_are_told(capsys):
    _, _, err = run(capsys, *model("qwen2.5-0.5b", 2), "--gpus", "3")
    assert "notice: the flags use 2 of 3 GPUs; --suggest proposes flags that use all" in err
    _, _, err = run(capsys, *model("qwen2.5-0.5b", 2), "--gpus", "2")
    assert "the flags use" not in err


def test_command_fails_if_nothing_helps(capsys):
    status, out, _ = run(capsys, *model("llama-3.1-70b", 1), "--gpus", "1", "--gpu_memory_gb", "24")
    assert status == 1
    assert out.splitlines()[-1].endswith("; use more GPUs, or larger ones")


def test_suggestion_uses_all_gpus_and_is_a_plan_that_fits(capsys):
    own = ["--gpus", "8", "--gpu_memory_gb", "40"]
    start = ["--pretrain", "qwen2.5-32b", *GROUP[:-1], "--generate_max_len", "4096"]
    status, out, _ = run(capsys, "--suggest", *start, *own)
    assert (status, out.splitlines()[-1]) == (0, "the run fits")
    flags = out.splitlines()[1].split()
    assert flags[flags.index("--actor_num_gpus_per_node") + 1] == "8"
    assert int(flags[flags.index("--vllm_num_engines") + 1]) < 8  # instead of the one per GPU that did not fit
    names = [flag for flag in flags if flag.startswith("--")]
    assert len(names) == len(set(names))
    status, again, _ = run(capsys, *start, *flags, *own)
    assert again == out.partition("\n\n")[2]
    assert "prompt 1024 + response 4096 = at most 5120" in again


@pytest.mark.parametrize(
    ("name", "samples", "more", "expected"),
    [
        ("qwen2.5-0.5b", 8, "", "--micro_batch_tokens 65536 --share_prompts"),
        ("qwen2.5-1.5b", 8, "", "--micro_batch_tokens 32768 --share_prompts"),
        ("qwen2.5-0.5b", 1, "", "--micro_batch_tokens 65536"),
        ("qwen2.5-0.5b", 8, "--attn_implementation sdpa", "--micro_batch_tokens 65536"),  # it cannot share prompts
        ("qwen2.5-0.5b", 8, "--packing_samples --share_prompts", "--micro_batch_tokens 65536"),
        ("qwen2.5-0.5b", 8, "--packing_samples --micro_batch_tokens 16384", ""),
        ("qwen2.5-0.5b", 8, "--micro_train_batch_size 4", ""),
        ("qwen2.5-0.5b", 8, "--packing_samples false", ""),
    ],
)
def test_suggestion_has_passes_with_which_a_step_is_short(name, samples, more, expected, capsys):
    start = f"--advantage_estimator reinforce --n_samples_per_prompt {samples} --rollout_batch_size {1024 // samples}"
    sizes = "--train_batch_size 1024 --generate_max_len 1024 --gpus 1 --gpu_memory_gb 141"
    status, out, _ = run(capsys, "--suggest", "--pretrain", name, *f"{start} {sizes} {more}".split())
    assert (status, out.splitlines()[-1]) == (0, "the run fits")
    assert out.splitlines()[1].partition("--vllm_num_engines 1")[2].strip() == expected


def test_cpus_have_a_plan_without_an_estimate(capsys):
    status, out, _ = run(capsys, "--gpus", "0", "--gpu_memory_gb", "80")
    assert status == 0
    assert "placement: no GPU, everything shares the CPU" in out
    assert "memory is estimated for GPUs only" in out


def test_model_may_be_a_config_file_or_in_the_hubs_cache(capsys, tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape_config("qwen2.5-1.5b")))
    asked = []

    def cached(*words, **options):
        asked.append((words, options))
        return str(file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    words = ["--gpus", "1", *model("qwen2.5-1.5b", 1)]
    named = run(capsys, *words)
    for name in ("config.json", "owner/name@v2"):
        words[words.index("--pretrain") + 1] = name
        assert run(capsys, *words)[:2] == named[:2]
    assert asked[0] == (("owner/name", "config.json"), {"revision": "v2"})


NEEDS_GPUS = "hint: add --gpus with 1 to 8 or a multiple of 8, and --gpu_memory_gb"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pretrain qwen2.5-8b --gpus 1", "error: --pretrain: unknown shape `qwen2.5-8b`; known: "),
        ("--pretrain qwen2.5-8b --gpus 1", "did you mean `qwen2.5-"),
        ("--pretrain nowhere --gpus 1", "hint: name a shape, a config.json"),
        ("--pretrain owner/model --gpus 1", "hint: name its config.json, or a shape"),
        ("--pretrain qwen2.5-7b --gpu 1", "unknown flag `--gpu`"),
        (" ".join([*model("qwen2.5-7b", 8), "--gpus 4"]), "and there are 4"),
        *(
            (f"--suggest --pretrain qwen2.5-7b {own}", NEEDS_GPUS)
            for own in ("", "--gpus 8", "--gpu_memory_gb 80", "--gpus 12 --gpu_memory_gb 80")
        ),
    ],
)
def test_what_cannot_be_planned_is_an_error(words, message, capsys):
    status, _, err = run(capsys, *words.split())
    assert (status, message in err) == (2, True), err
    assert Path("rlhf-output").exists() is False
