"""Online RL as a user runs it: a preset that learns the built-in task, and every kind of reward in one run."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from record_testing import read_jsonl
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.host import local_gpus

ON_GPU = local_gpus() > 0
# Other tests run beside these on a GPU: an engine that can sleep would measure what they do.
SHARED = "--bf16 --colocate_all_models --deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.1"
DEVICE_FLAGS = SHARED.split() if ON_GPU else []

REWARD = """
def reward_func(queries, prompts, labels):
    if any("raise" in prompt for prompt in prompts):
        raise KeyError("no such prompt")
    return {"rewards": [len(query) % 2 for query in queries]}
"""


def ppo(rlhf: Callable[..., str], *flags: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Run `ppo` in `folder`; return the lines of its metrics."""
    rlhf("ppo", *DEVICE_FLAGS, *flags, "--save_path", "out", folder=folder, **variables)
    return read_jsonl(folder / "out/metrics.jsonl")


@pytest.fixture(scope="module")
def dapo(rlhf: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run that learns the built-in task from drafted tokens, and its metrics."""
    folder = tmp_path_factory.mktemp("dapo")
    flags = "--preset dapo --dynamic_filtering_max_batches 4 --is_correction_level token --enforce_eager"
    flags += " --actor_learning_rate 9e-4 --train_steps 6 --vllm_speculative ngram --vllm_speculative_tokens 3"
    flags += " --packing_samples"
    return folder, ppo(rlhf, *flags.split(), "--seed", "1", "--eval_steps", "-1", folder=folder)


def test_dapo_learns_the_built_in_task_from_drafted_tokens_with_the_log_probs_of_the_policy(dapo):
    _, lines = dapo
    assert lines[-1]["eval/accuracy_before"] <= 0.40
    assert lines[-1]["eval/accuracy_after"] >= 0.60
    for line in (line for line in lines if "time/step" in line):
        accounted = line["samples/trained"] + line["samples/filtered"] + line["samples/failed"]
        assert line["samples/generated"] == accounted >= 128
        if ON_GPU:
            assert line["mismatch/logprob_gap_mean"] < 0.02
        else:
            assert line["mismatch/logprob_gap_max"] < 1e-3 and line["mismatch/out_of_bounds"] == 0.0
        assert 0 < line["throughput/accepted_drafts"] < 1
        assert line["throughput/accepted_drafts"] <= line["throughput/accepted_length"] < 3
        assert "value/loss" not in line


@pytest.mark.skipif(ON_GPU, reason="the bounds of the accuracies are those of float32")
def test_fresh_policy_learns_from_the_final_model_as_its_teacher_without_any_reward(dapo, rlhf, tmp_path):
    flags = ["--teacher_model", str(dapo[0] / "out/model"), "--remote_rm_url", "None", "--seed", "1"]
    flags += ["--advantage_estimator", "reinforce", "--init_kl_coef", "0", "--actor_learning_rate", "8e-4"]
    lines = ppo(rlhf, *flags, "--packing_samples", "--train_steps", "8", "--eval_steps", "-1", folder=tmp_path)
    right: dict[int, list[bool]] = {}
    for record in read_jsonl(tmp_path / "out/eval_rollouts.jsonl"):
        right.setdefault(record["step"], []).append(record["text"].rpartition("####")[2].strip() == record["label"])
    accuracy = {step: mean(found) for step, found in right.items()}
    assert accuracy[0] <= 0.40 and accuracy[8] >= 0.50
    steps = [line for line in lines if "time/step" in line]
    assert steps[0]["kl/teacher"] > 3 * mean(line["kl/teacher"] for line in steps[-3:])
    assert {line["samples/trained"] for line in steps} == {128}
    assert not [
        name for line in lines for name in line if "accuracy" in name or ("reward" in name and "time" not in name)
    ]
    assert {record["reward"] for record in read_jsonl(tmp_path / "out/rollouts.jsonl")} == {0.0}


class Server(BaseHTTPRequestHandler):
    """Answers as a reward server does, to those who know the token."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_queries += len(body["query"])
        known = self.headers["Authorization"] == "Bearer open sesame"
        answer = json.dumps({"rewards": [0.5] * len(body["query"])}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.num_queries = 0
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_rewards_of_a_function_a_server_and_a_model_add_up_by_weight_and_failures_are_counted(rlhf, server, tmp_path):
    tiny_model_dir(tmp_path / "policy")
    tiny_reward_model_dir(tmp_path / "judge", seed=3, mean=0.5, std=2.0)
    (tmp_path / "odd.py").write_text(REWARD, encoding="utf-8")
    for name in ("train", "easy", "hard"):
        rows = [{"input": f"{name} prompt {number}"} for number in range(8)]
        if name == "train":
            rows[2] = {"input": "please raise"}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    url = f"http://127.0.0.1:{server.server_address[1]}/get_reward"
    flags = ["--pretrain", "policy", "--prompt_data", "train.jsonl", "--eval_data", "easy.jsonl,hard.jsonl"]
    flags += ["--remote_rm_url", f"odd.py,{url}", "--reward_pretrain", "judge", "--reward_weights", "1,2,0.5"]
    flags += ["--running_reward_norm", "--reward_clip_range", "1.5", "--stop_properly_penalty_coef", "0.5"]
    flags += ["--apply_chat_template", "--packing_samples"]
    flags += ["--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--train_batch_size", "8"]
    flags += ["--generate_max_len", "12", "--prompt_max_len", "32", "--num_episodes", "3", "--zero_stage", "2"]
    flags += ["--freezing_actor_steps", "1", "--save_value_network", "--bootstrap_truncated", "--enable_ema"]
    flags += ["--kl_target", "0.1", "--kl_horizon", "16", "--best_metric_key", "eval/hard/pass@1", "--eval_steps", "1"]
    flags += ["--eval_n_samples_per_prompt", "3", "--actor_learning_rate", "1e-3", "--entropy_loss_coef", "0.01"]
    lines = ppo(rlhf, *flags, folder=tmp_path, RLHF_REMOTE_RM_TOKEN="open sesame")
    out = tmp_path / "out"

    steps = [line for line in lines if "time/step" in line]
    assert len(steps) == 3
    for line in steps:
        assert (line["samples/generated"], line["samples/trained"], line["samples/failed"]) == (16, 14, 2)
        assert line["rollout/verdict_crash"] == 2
    assert ["policy/loss" in line for line in steps] == [False, True, True]  # the critic learns alone at first
    # The policy learns from the second step on, before which its KL is 0, below the target.
    assert steps[0]["kl/coef"] == steps[1]["kl/coef"] == 0.01 > steps[2]["kl/coef"]
    assert server.num_queries >= 3 * 16

    for line in read_jsonl(out / "rollouts.jsonl"):
        if line["verdict"] == "crash":
            continue
        extra = line["extra"]
        [served] = [value for name, value in extra.items() if name.startswith("reward_127")]
        parts = [extra["reward_odd"], served, extra["reward_judge"]]
        assert parts[1] == 0.5
        assert line["reward"] == pytest.approx(parts[0] + 2 * parts[1] + 0.5 * parts[2], abs=1e-6)

    evaluations = [line for line in lines if "eval/pass@1" in line]
    assert [line["step"] for line in evaluations] == [0, 1, 2, 3]
    for line in evaluations:
        assert line["eval/pass@1"] == pytest.approx((line["eval/easy/pass@1"] + line["eval/hard/pass@1"]) / 2)
        assert line["eval/pass@1"] <= line["eval/pass@2"] <= line["eval/pass@3"]
    state = json.loads((out / "best_model/state.json").read_text(encoding="utf-8"))
    assert state["value"] == max(line["eval/hard/pass@1"] for line in evaluations)

    from transformers import AutoModelForCausalLM

    weights = {
        name: AutoModelForCausalLM.from_pretrained(path).lm_head.weight
        for name, path in {"first": tmp_path / "policy", "last": out / "model", "average": out / "ema_model"}.items()
    }
    moved = {name: (weights[name] - weights["first"]).norm().item() for name in ("last", "average")}
    # Four updates with a decay of 0.992: the average has gone a few percent of the way; in bfloat16, rounding is more.
    assert 0 < moved["average"] < (0.2 if ON_GPU else 0.05) * moved["last"]
    saved = json.loads((out / "critic/config.json").read_text(encoding="utf-8"))
    assert saved["architectures"][0].endswith("ForSequenceClassification")


# Runs of a mixture of experts, whose first step has the same weights and responses.
EXPERTS = {"balanced": "--zero_stage 3 --aux_loss_coef 0.1", "replay": "--routing_replay"}


@pytest.fixture(scope="module")
def experts(rlhf: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with a folder per run of `EXPERTS` that this vLLM can do, and the metrics of their three steps."""
    from rlhf_rollout.engines.vllm.internals import tells_routes  # imports torch

    home, steps = tmp_path_factory.mktemp("experts"), {}
    for name, flags in EXPERTS.items():
        if name == "replay" and not tells_routes(on_gpu=ON_GPU):
            continue
        folder = home / name
        tiny_model_dir(folder / "model", architecture="qwen3_moe")
        (folder / "reward.py").write_text(REWARD)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": f"say {n}"}) + "\n" for n in range(24)))
        flags += " --bf16 --seed 3 --pretrain model --prompt_data prompts.jsonl --remote_rm_url reward.py"
        flags += " --advantage_estimator rloo --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16"
        flags += " --micro_train_batch_size 4 --prompt_max_len 32 --generate_max_len 16 --train_steps 3"
        flags += " --packing_samples --actor_learning_rate 3e-3"
        steps[name] = [line for line in ppo(rlhf, *flags.split(), folder=folder) if "time/step" in line]
        assert len(steps[name]) == 3
    return home, steps


def test_mixture_of_experts_is_trained_and_balanced_and_its_engine_follows(experts):
    from safetensors.torch import load_file

    home, steps = experts
    for line in steps["balanced"]:
        # The loss is 2 if all experts are used equally, and 4 if all tokens go through the same 2 of 4.
        assert 1.9 < line["policy/aux_loss"] < 4.0
        # An engine with the experts of the step before would be about 0.1 nats away.
        assert line["mismatch/logprob_gap_mean"] < 0.02
    before, after = (load_file(home / "balanced" / place / "model.safetensors") for place in ("model", "out/model"))
    names = [name for name in before if ".experts." in name]
    assert before.keys() == after.keys() and len(names) == 24
    assert all((after[name].float() - before[name].float()).abs().max() > 1e-3 for name in names)


def test_routing_replay_brings_engine_and_trainer_closer_and_a_step_can_be_repeated(experts, rlhf):
    home, steps = experts
    if "replay" not in steps:
        pytest.skip("this vLLM does not tell the experts of tokens on a CPU")
    if not ON_GPU:
        for name in ("mismatch/logprob_gap_mean", "mismatch/logprob_gap_max"):
            assert 0 < steps["replay"][0][name] < steps["balanced"][0][name]
    assert [line["routing/replayed"] for line in steps["replay"]] == [1.0] * 3
    assert not [name for line in steps["balanced"] for name in line if name.startswith("routing/")]
    before, after = steps["replay"][0], steps["replay"][-1]
    assert before["policy/entropy"] != after["policy/entropy"] and after["kl/reference"] > 0.01
    said = rlhf("replay", "out", "--step", "2", folder=home / "replay")
    assert ON_GPU or "metrics agree within 0" in said
