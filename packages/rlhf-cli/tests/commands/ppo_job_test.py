"""From configuration to job: numbers, models, engines, devices."""

import re
from pathlib import Path

import numpy as np
import pytest

from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.commands.ppo_job import count_steps, describe_batches, make_job, make_plan
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.data import data_notices
from rlhf_cli.preflight.devices import check_device, find_gpus
from rlhf_cli.preflight.inputs import Inputs
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.exits import with_flags
from rlhf_data.prompts import PromptSet
from rlhf_data.records import Prompt
from rlhf_data.rows.row import Counts
from rlhf_rollout.rewards.sources import RewardSource

SOURCES = (RewardSource(kind="function", targets=("r.py",)),)
ONE_SAMPLE = ("--n_samples_per_prompt", "1", "--train_batch_size", "32")
SKIP = ("--old_logprobs", "skip", "--train_batch_size", "128")
FP8 = ("--vllm_quantization", "fp8", "--bf16")
CPU, ONE_GPU, MANY_GPUS = 0, 1, 8


def configure(*argv: str) -> PpoConfig:
    return CommandLine(config=PpoConfig, prog="", recipe=lowest_layer).parse(argv).config


def prompt_set(count: int) -> PromptSet:
    prompts = tuple(Prompt(f"p{i}", np.array([1, 2]), f"prompt {i}") for i in range(count))
    return PromptSet(prompts, Counts(count, longest_tokens=2, digest=f"of {count}"))


def make(config: PpoConfig, num_gpus: int):
    inputs = Inputs("policy", "critic", SOURCES, prompt_set(100), prompt_set(10), ())
    return make_job(config, inputs, make_plan(config, [num_gpus]), Path("/out"))


@pytest.mark.parametrize(
    ("argv", "num_prompts", "steps"),
    [
        (["--train_steps", "None"], 64, 2),  # 64 / 32
        (["--train_steps", "None"], 65, 3),  # the last step begins another pass
        (["--train_steps", "None", "--num_episodes", "3"], 65, 7),  # 195 / 32 = 6.1
        (["--train_steps", "2", "--num_episodes", "3"], 65, 2),
        (["--train_steps", "9"], 64, 2),
    ],
)
def test_count_steps_covers_the_episodes_up_to_train_steps(argv, num_prompts, steps):
    assert count_steps(configure(*argv), num_prompts) == steps


@pytest.mark.parametrize(
    ("argv", "num_prompts", "told"),
    [
        (["--train_steps", "2"], 33, None),  # 33 / 32 begin a second step
        (["--train_steps", "3"], 33, "33 prompts x 1 episode(s) / --rollout_batch_size 32 give 2 step(s), 2"),
        (["--train_steps", "9", "--num_episodes", "2"], 65, "65 prompts x 2 episode(s) / --rollout_batch_size 32"
         " give 5 step(s), 4"),  # 4 * 65 / 32 = 8.1
        (["--train_steps", "None"], 33, None),
    ],
)  # fmt: skip
def test_train_steps_that_the_prompts_do_not_suffice_for_are_a_notice(argv, num_prompts, told):
    config = configure(*argv)
    notices = data_notices(config, prompt_set(num_prompts), None)
    if told is None:
        assert notices == []
        return
    [notice] = notices
    count, _, episodes = told.rpartition(", ")
    assert notice == f"{argv[0]} {argv[1]} is not reached: {count}; --num_episodes {episodes} suffices"
    assert count_steps(configure(*argv, "--num_episodes", episodes), num_prompts) == int(argv[1])
    assert count_steps(configure(*argv, "--num_episodes", str(int(episodes) - 1)), num_prompts) < int(argv[1])


FEW = "--rollout_batch_size 32 is more than the 20 prompts: each is used 1.6 times per step"
MANY = (
    "--dynamic_filtering may draw 320 prompts per step (--rollout_batch_size x --dynamic_filtering_max_batches), more"
    " than the {} there are: some are used again"
)


@pytest.mark.parametrize(
    ("argv", "num_prompts", "told"),
    [
        ([], 20, [FEW]),
        ([], 32, []),
        (["--dynamic_filtering"], 20, [FEW]),
        (["--dynamic_filtering"], 32, [MANY.format(32)]),
        (["--dynamic_filtering"], 319, [MANY.format(319)]),
        (["--dynamic_filtering"], 320, []),
    ],
)
def test_prompts_that_do_not_suffice_for_a_step_are_a_notice(argv, num_prompts, told):
    assert data_notices(configure("--train_steps", "None", *argv), prompt_set(num_prompts), None) == told


def test_make_job_schedule_spans_all_optimizer_steps():
    # 100 prompts / 32 = 4 steps; 128 / 64 x 2 epochs = 4 updates each; 16 in all, 10 % of them warm-up.
    job = make(configure("--max_epochs", "2", "--lr_warmup_ratio", "0.1"), CPU)
    assert (job.num_steps, job.batch.num_updates) == (4, 4)
    actor = job.models["actor"].optimizer
    assert (actor.total_steps, actor.warmup_steps, actor.learning_rate) == (16, 2, 3e-4)
    assert job.models["critic"].optimizer.learning_rate == 1e-3


def test_make_job_models_are_those_the_algorithm_needs():
    assert set(make(configure(), CPU).models) == {"actor", "critic", "reference"}
    grpo = make(configure("--advantage_estimator", "group_norm", "--init_kl_coef", "0"), CPU)
    assert set(grpo.models) == {"actor"}
    job = make(configure("--gradient_checkpointing", "--packing_samples", "--bf16"), CPU)
    assert job.models["critic"].path == "critic"
    assert job.models["reference"].optimizer is None
    assert [model.gradient_checkpointing for model in job.models.values()] == [True, True, False]
    assert all(model.packing and model.dtype == "bfloat16" for model in job.models.values())
    assert job.engine.dtype == "bfloat16"


def test_make_job_masks_the_same_ids_in_the_engine_and_in_models_that_give_log_probs():
    config = configure("--teacher_model", "teacher")
    masked = {"policy": (range(3, 4), range(9, 12)), "teacher": (range(3, 4), range(9, 20))}
    inputs = Inputs("policy", "critic", SOURCES, prompt_set(100), None, (), masked_ids=masked)
    job = make_job(config, inputs, make_plan(config, [CPU]), Path("/out"))
    assert job.engine.masked_ids == masked["policy"]
    assert {role: spec.masked_ids for role, spec in job.models.items()} == {
        "actor": masked["policy"],
        "reference": masked["policy"],
        "teacher": masked["teacher"],
        "critic": (),
    }


@pytest.mark.parametrize(("num_gpus", "sleeps", "transfer"), [(CPU, False, "shared_memory"), (ONE_GPU, True, "ipc")])
@pytest.mark.parametrize("stage", ["0", "3"])
def test_make_job_sleeps_and_syncs_by_ipc_where_processes_share_a_gpu(num_gpus, sleeps, transfer, stage):
    sleep = ("--vllm_enable_sleep", "--deepspeed_enable_sleep")
    job = make(configure("--colocate_all_models", *sleep, "--zero_stage", stage), num_gpus)
    assert (job.trainer_sleep, job.engine.enable_sleep, job.engine.weight_transfer) == (sleeps, sleeps, transfer)
    assert job.engine.gpu_memory_utilization == (0.6 if sleeps else 0.9)


@pytest.mark.parametrize(
    ("flags", "num_gpus", "share"),
    [
        ("", MANY_GPUS, 0.9),
        ("--colocate_all_models", ONE_GPU, 0.4),
        ("--colocate_all_models --vllm_gpu_memory_utilization 0.7", ONE_GPU, 0.7),
        ("--colocate_all_models --vllm_num_engines 2", ONE_GPU, 0.2),
        ("--colocate_all_models --vllm_num_engines 3 --vllm_enable_sleep", ONE_GPU, 0.2),
        ("--colocate_all_models --vllm_num_engines 2 --vllm_gpu_memory_utilization 0.5", ONE_GPU, 0.5),
    ],
)
def test_make_job_engines_that_share_a_gpu_take_less_of_its_memory(flags, num_gpus, share):
    assert make(configure(*flags.split()), num_gpus).engine.gpu_memory_utilization == pytest.approx(share)


def test_make_job_sampling_and_engine_follow_the_flags():
    argv = ["--top_k", "5", "--top_p", "0.9", "--temperature", "0.7", "--vllm_max_num_seqs", "16"]
    job = make(configure(*argv, "--eval_n_samples_per_prompt", "2", "--seed", "3"), CPU)
    assert (job.sampling.num_samples, job.sampling.temperature, job.sampling.top_k) == (4, 0.7, 5)
    assert (job.eval_sampling.num_samples, job.eval_sampling.temperature, job.eval_sampling.top_p) == (2, 1.0, 0.9)
    assert job.engine.max_model_len == 64 + 32
    assert (job.engine.max_num_seqs, job.engine.seed, job.seed) == (16, 3, 3)
    expected = job.engine.expected_sampling  # of which engines compile the kernels as they start
    assert (expected.temperature, expected.top_k, expected.top_p) == (0.7, 5, 0.9)
    assert job.max_in_flight == 8  # 16 places / 4 samples, twice
    assert "seed = 3\n" in job.config
    assert job.prompts_digest == f"of {len(job.prompts)}"


def test_make_job_saves_the_configuration_as_the_file_that_gives_it_again(tmp_path):
    config = configure("--actor_learning_rate", "5e-7", "--value_clip", "None", "--eps_clip_low_high", "0.1", "0.3")
    file = tmp_path / "config.toml"
    file.write_text(make(config, CPU).config, encoding="utf-8")
    assert configure("--config", str(file)) == config
    assert configure("--config", str(file), "--seed", "7").training.seed == 7


def test_make_job_saves_full_paths_so_that_the_file_works_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "policy").mkdir()
    argv = ["--pretrain", "policy", "--critic_pretrain", "./critic", "--prompt_data", "p.jsonl", "--eval_data"]
    argv += ["builtin, e.jsonl", "--reward_pretrain", "../judge,owner/name", "--rollout_batch_size", "128"]
    argv += ["--remote_rm_url", "r.py:grade,package.module,http://host/x.py"]
    file = tmp_path / "config.toml"
    file.write_text(make(configure(*argv), CPU).config, encoding="utf-8")
    again = configure("--config", str(file))
    assert (again.model.pretrain, again.model.critic_pretrain) == (f"{tmp_path}/policy", f"{tmp_path}/critic")
    assert (again.data.prompt_data, again.data.eval_data) == (f"{tmp_path}/p.jsonl", f"builtin,{tmp_path}/e.jsonl")
    assert again.reward.reward_pretrain == f"{tmp_path}/../judge,owner/name"
    assert again.reward.remote_rm_url == f"{tmp_path}/r.py:grade,package.module,http://host/x.py"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        # 32 x 4 = 128 samples / 64 = 2 updates; / 128 x 3 epochs = 3.
        (["--old_logprobs", "skip"], "one update per step, and there are 2"),
        ([*SKIP, "--max_epochs", "3"], "one update per step, and there are 3"),
        ([*SKIP, "--async_train"], "needs rollouts of the newest weights, and rollouts may be stale"),
        ([*SKIP, *FP8], "an importance correction needs log-probs of the policy before the update"),
        (["--dynamic_filtering", *ONE_SAMPLE], "use --n_samples_per_prompt 4 or more"),
        (["--advantage_estimator", "group_norm", *ONE_SAMPLE], "use --n_samples_per_prompt 4 or more"),
    ],
)
def test_make_job_what_the_trainer_refuses_is_an_error_before_anything_starts(argv, message):
    with pytest.raises(ConfigError) as caught:
        make(configure("--init_kl_coef", "0", *argv), CPU)
    assert re.search(message, with_flags(str(caught.value)))


@pytest.mark.parametrize(
    ("argv", "source"),
    [
        (["--async_train"], "rollout"),
        (["--async_train", "--policy_loss_type", "gspo"], "rollout"),
        (["--async_train", "--max_staleness", "0"], "recompute"),
        (["--async_train", "--is_correction_level", "token"], "recompute"),
        (["--async_train", "--policy_loss_type", "reinforce", "--train_batch_size", "128"], "recompute"),
        (["--async_train", "--old_logprobs", "recompute"], "recompute"),
        ([*FP8, "--is_correction_level", "off"], "rollout"),
        ([*FP8], "recompute"),
        ([*SKIP, "--init_kl_coef", "0", "--async_train", "--max_staleness", "0"], "skip"),
        ([], "recompute"),
    ],
)
def test_make_job_takes_the_engines_logprobs_where_only_the_ratio_corrects_for_its_weights(argv, source):
    assert make(configure(*argv), CPU).algorithm.old_logprobs == source


ONE_UPDATE = ("--train_batch_size", "128", "--init_kl_coef", "0")


@pytest.mark.parametrize(
    ("argv", "source"),
    [
        ([], "skip"),
        (["--init_kl_coef", "0.1", "--use_kl_loss"], "skip"),
        (["--policy_loss_type", "reinforce"], "skip"),
        (["--async_train", "--max_staleness", "0"], "skip"),
        (["--old_logprobs", "recompute"], "recompute"),
        (["--old_logprobs", "rollout"], "rollout"),
        (["--async_train"], "rollout"),
        (["--async_train", "--policy_loss_type", "reinforce"], "recompute"),
        # more than one update per step, or maybe more, or none in some steps
        (["--train_batch_size", "64"], "recompute"),
        (["--max_epochs", "2"], "recompute"),
        (["--agent_func_path", "agents:Two"], "recompute"),
        (["--freezing_actor_steps", "1"], "recompute"),
        # something else needs them
        (["--init_kl_coef", "0.1"], "recompute"),
        (["--teacher_model", "m"], "recompute"),
        (["--teacher_model", "m", "--teacher_top_k", "9"], "skip"),
        (["--top_entropy_quantile", "0.2"], "recompute"),
        (["--entropy_target", "0.2"], "recompute"),
        (["--is_correction_level", "token"], "recompute"),
        ([*FP8], "recompute"),
        ([*FP8, "--policy_loss_type", "reinforce", "--is_correction_level", "off"], "recompute"),
        ([*FP8, "--old_logprobs", "rollout"], "rollout"),
    ],
)
def test_old_logprobs_are_skipped_by_default_where_the_only_update_is_on_policy_and_nothing_needs_them(argv, source):
    config = configure(*ONE_UPDATE, *argv)
    assert config.objective.old_logprobs == source
    says = {"skip": "of the update itself", "rollout": "of the engine", "recompute": "computed by the trainer"}[source]
    plan = make_plan(config, [CPU])
    [line] = [line for line in describe_batches(config, plan, 100).splitlines() if "old log" in line]
    assert says in line


OLD = ("old log-probs", "computed by the trainer before the first update of a step")
STEP = ("step", "32 prompts x 4 samples = 128")
TOKENS = ("tokens", "prompt 64 + response 32 = at most 96")


@pytest.mark.parametrize(
    ("flags", "sizes", "rows"),
    [
        (
            "--actor_num_gpus_per_node 4 --sequence_parallel_size 2 --packing_samples --dynamic_filtering"
            " --dynamic_filtering_max_batches 3 --freezing_actor_steps 2 --overlong_buffer_len 8 --num_episodes 2"
            " --overlong_penalty_factor 0.5 --eval_n_samples_per_prompt 3 --train_steps None --max_epochs 2"
            " --micro_train_batch_size 12",
            (100, 10),
            [
                STEP,
                ("", "128 / 64 x 2 epoch(s) = 4 update(s)"),
                # 64 / (4 / 2) = 32; 32 / 12 = 2.7
                (
                    "update",
                    "64 samples / 2 group(s) of 2 processes that divide every sequence = 32 each,"
                    " in 3 pass(es) of at most 12",
                ),
                OLD,
                # 2 x 100 / 32 = 6.25; 7 x 32 = 224
                ("run", "7 steps x 4 = 28 updates; 224 prompts drawn from 100, 2.24 passes"),
                TOKENS,
                ("dynamic sampling", "each step draws prompts until 32 pass the filter, at most 96"),
                ("critic first", "2 steps train the critic only; the policy gets 20 updates"),  # (7 - 2) x 4
                ("length penalty", "none up to 24 tokens, then growing to 0.5 over 8 tokens"),
                ("held-out", "10 prompts x 3 sample(s)"),
            ],
        ),
        (
            "--actor_num_gpus_per_node 4 --ds_tensor_parallel_size 2 --packing_samples --micro_batch_tokens 999"
            " --freezing_actor_steps 1",
            (None, None),
            [
                STEP,
                ("", "128 / 64 x 1 epoch(s) = 2 update(s)"),
                (
                    "update",
                    "64 samples / 2 group(s) of 2 processes that divide the weights = 32 each,"
                    " in passes of at most 999 tokens",
                ),
                OLD,
                ("run", "prompts / 32 x 1 episode(s) = steps"),
                TOKENS,
            ],
        ),
        (
            "--actor_num_gpus_per_node 2 --micro_train_batch_size 5 --overlong_buffer_len 0 --agent_func_path agent.py"
            " --agent_max_len 200",
            (64, 0),
            [
                STEP,
                ("", "128 / 64 x 1 epoch(s) = 2 update(s)"),
                ("update", "64 samples / 2 process(es) = 32 each, in 7 pass(es) of at most 5"),  # 32 / 5 = 6.4
                OLD,
                ("run", "2 steps x 2 = 4 updates; 64 prompts drawn from 64, 1.00 passes"),
                ("tokens", "prompt 64, each answer 32, a conversation at most 200"),
            ],
        ),
    ],
    ids=["rich", "tensor parallel", "plain"],
)
def test_describe_batches_is_the_arithmetic_of_the_run(flags, sizes, rows):
    config = configure(*flags.split())
    text = describe_batches(config, make_plan(config, [CPU]), *sizes)
    assert text.splitlines() == [f"  {name:18} {words}" for name, words in rows]


@pytest.mark.parametrize(
    ("flags", "num_gpus", "says"),
    [
        (
            "--vllm_use_mps",
            MANY_GPUS,
            "--vllm_use_mps is for engines that share a GPU, and none do\n\nhint: use more --vllm_num_engines",
        ),
        (
            "--sequence_parallel_size 2 --packing_samples --actor_num_gpus_per_node 3",
            CPU,
            "--sequence_parallel_size is 2, and a model has 3 training process(es)\n\nhint: use 2 or a multiple:"
            " --actor_num_gpus_per_node 2, and as many for models",
        ),
    ],
)
def test_make_plan_refuses_what_its_processes_cannot_do(flags, num_gpus, says):
    with pytest.raises(ConfigError) as caught:
        make_plan(configure(*flags.split()), [num_gpus])
    assert with_flags(str(caught.value)).startswith(says)


def test_describe_batches_says_how_far_generation_runs_ahead():
    says = "\n  ahead              at most 128 prompts run or wait; what is trained is at most 3 step(s) old"
    for argv, is_ahead in ((["--max_staleness", "3"], True), (["--max_staleness", "0"], False)):
        config = configure("--rollout_batch_size", "32", "--async_train", *argv)
        text = describe_batches(config, make_plan(config, [CPU]), 100)
        assert (says in text, "ahead" in text) == (is_ahead, is_ahead)


@pytest.mark.parametrize(
    ("argv", "ranks"),
    [
        ([], {"actor": 1, "critic": 1, "ref": 1, "reward": 1}),
        (["--critic_num_nodes", "0"], {"actor": 4, "critic": 0, "ref": 1, "reward": 1}),
        (["--colocate_all_models"], {"actor": 4, "critic": 4, "ref": 4, "reward": 4}),
        (["--colocate_all_models", "--reward_num_gpus_per_node", "2"], {"reward": 2, "ref": 4}),
        (["--colocate_all_models", "--ref_num_nodes", "0", "--ref_num_gpus_per_node", "0"], {"ref": 0, "critic": 4}),
        (["--colocate_actor_ref"], {"ref": 4, "critic": 1}),
        (["--colocate_critic_reward", "--critic_num_gpus_per_node", "3"], {"critic": 3, "reward": 3, "ref": 1}),
    ],
    ids=" ".join,
)
def test_num_ranks_are_as_many_as_those_of_the_models_that_share_the_gpus(argv, ranks):
    given = ["--actor_num_gpus_per_node", "4"] if ranks.get("actor") != 1 else []
    placement = configure(*given, *argv).placement
    assert {role: placement.num_ranks(role) for role in ranks} == ranks


def test_find_gpus_counts_those_of_each_node_that_lives(monkeypatch):
    nodes = [("Alive", 2.0), ("Alive", 4.0), ("Dead", 8.0)]
    found = [{"Alive": state == "Alive", "Resources": {"GPU": gpus, "CPU": 9.0}} for state, gpus in nodes]
    monkeypatch.setattr("ray.nodes", lambda: [*found, {"Alive": True, "Resources": {}}])
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("rlhf_train.cluster.ray_session.find_cluster", lambda: "127.0.0.1:6379")
    assert find_gpus() == ([2, 4, 0], "127.0.0.1:6379")


def test_make_plan_checks_the_memory_of_engines_that_share_a_gpu():
    two = ["--colocate_all_models", "--vllm_num_engines", "2", "--vllm_gpu_memory_utilization", "0.6"]
    with pytest.raises(ConfigError) as caught:
        make_plan(configure(*two), [1])
    assert str(caught.value) == (
        "2 engines share a GPU, and --vllm_gpu_memory_utilization 0.6 is the share of each: 1.2 of its memory\n\n"
        "hint: use --vllm_gpu_memory_utilization 0.2, or fewer engines"
    )
    # Each has a GPU of its own, or there is none.
    assert make_plan(configure(*two, "--actor_num_gpus_per_node", "2"), [2])
    assert make_plan(configure(*two), [0])


def test_check_device_without_gpu_refuses_tensor_parallelism():
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size is 2 and there is no GPU"):
        check_device(configure("--vllm_tensor_parallel_size", "2"), {"vllm_tensor_parallel_size"}, num_gpus=0)
    assert check_device(configure(), {"enforce_eager"}, num_gpus=1) == []
    assert len(check_device(configure(), {"enforce_eager"}, num_gpus=0)) == 1
    no_places = configure("--advantage_estimator", "group_norm", "--critic_num_nodes", "0")
    assert check_device(no_places, {"critic_num_nodes"}, num_gpus=0) == []


def test_make_job_seed_reaches_every_request_on_a_cpu():
    job = make(configure("--seed", "5"), CPU)
    assert (job.sampling.seed, job.eval_sampling.seed) == (5, 5)
    assert make(configure("--seed", "5"), ONE_GPU).sampling.seed is None
