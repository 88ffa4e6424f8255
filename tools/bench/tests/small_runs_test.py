"""Benchmarks in small, on a CPU: what they compare computes the same, and reports say what was measured."""

import json
import shutil
from types import SimpleNamespace

import pytest

import runner
from process_testing import forked_context
from rlhf_models.testing import tiny_model_dir
from runner import Metrics
from workloads.speed import head_step, real_work


@pytest.fixture
def forked_ranks(monkeypatch):
    """Let the processes of a benchmark's ranks be forks, on a CPU: `runner_test.py` starts new ones."""
    monkeypatch.setattr(
        runner, "multiprocessing", SimpleNamespace(get_context=lambda method: forked_context("ranks_preload"))
    )


def test_agents_tell_the_cost_of_the_door_and_of_many_episodes(bench):
    shape = ["--door_episodes", "10", "--episodes", "100", "--turns", "3", "--latency_s", "0.3"]
    _, report = bench("agents", *shape)
    door, rounds = report["door"], report["episodes"]["rounds"]
    assert door["num_requests"] == 30
    assert 0 < door["direct_median_ms"] < door["door_median_ms"]
    assert 0 < door["overhead_median_ms"] <= door["overhead_p99_ms"]
    for one in rounds:
        assert 50 < one["max_concurrent_episodes"] <= 100
        # Three times the question and the answer; the prompt is the question, too.
        assert one["num_tokens"] == 100 * (4 * 65 + 3 * 25)
        assert one["lag_median_ms"] <= one["lag_p99_ms"] <= one["lag_max_ms"]


def test_answers_of_an_adapter_are_near_peft_with_this_adapter(bench, tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{number} + 1"}) + "\n" for number in range(4)))
    sizes = ["--prompt_tokens", "48", "--response_tokens", "4", "--adapters", "1", "--rank", "4", "--rounds", "1"]
    status, report = bench("adapters", "--model", str(model), "--questions", str(questions), *sizes)
    assert status == 0
    assert {count: [*works] for count, works in report["engines"].items()} == {
        "0": ["base"],
        "1": ["base", "one", "all", "mixed"],
    }
    for name, gaps in report["logprob_gaps"].items():
        [other] = set(gaps) - {name}
        assert gaps[name] < 1e-5 < gaps[other]


def test_two_ranks_of_long_context_agree_with_one(bench, forked_ranks):
    status, report = bench("long_context", "--shape", "tiny", "--num_tokens", "48", "--ranks", "1", "2")
    ranks = report["ranks"]
    assert status == 0
    assert {name: len(run["updates"]) for name, run in ranks.items()} == {"1": 4, "2": 4}
    for value in ranks["2"]["first_update"].values():
        assert value["relative_error"] == pytest.approx(0, abs=1e-5)
    losses = [[update["sft/loss"] for update in run["updates"]] for run in ranks.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == 4  # another sequence in each update


def test_two_ways_of_zero3_compute_the_same(bench, forked_ranks):
    flags = ["--shape", "tiny", "--num_tokens", "16", "--passes", "2", "--turns", "1"]
    _, report = bench("zero3", *flags, "--ways", "parts", "layers")
    parts, layers = report["ways"].values()
    assert (parts["ratio"], layers["ratio"]) == (1, pytest.approx(layers["seconds"] / parts["seconds"]))
    assert layers["loss"] == pytest.approx(parts["loss"], rel=1e-6)
    assert layers["grad_norm"] == pytest.approx(parts["grad_norm"], rel=1e-5) != 0


def test_heads_are_compared_before_they_are_timed(bench, monkeypatch):
    flags = ["--num_tokens", "512", "--repeats", "1"]
    _, report = bench("head_step", *flags)
    assert [*report["heads"]] == [*head_step.HEADS]
    assert all(head["seconds"] > 0 and head["errors"]["gradient"] < 1e-4 for head in report["heads"].values())
    wrong = head_step.HEADS | {"linear_policy_loss": lambda *given: head_step.loss_of(given[0].sum(-1), given[0])}
    monkeypatch.setattr(head_step, "HEADS", wrong)
    with pytest.raises(RuntimeError, match="linear_policy_loss is wrong"):
        bench("head_step", *flags)


def test_shared_prompts_have_fewer_tokens_and_the_same_log_probs(bench):
    flags = ["--shape", "tiny", "--prompt_tokens", "8", "--response_tokens", "4", "--samples", "3", "--rounds", "1"]
    _, report = bench("shared_prompts", *flags)
    assert (report["copies"]["tokens_in_layers"], report["shared"]["tokens_in_layers"]) == (72, 40)
    assert report["logprob_gap_mean"] < 1e-5
    assert report["seconds_ratio"] == pytest.approx(report["shared"]["seconds"] / report["copies"]["seconds"])


def test_fine_tuning_is_measured_padded_and_packed(bench, tmp_path):
    rows = [{"question": "q" * 30, "answer": "a" * length} for length in (3, 60, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = ["--batch_size", "3", "--micro_batch_size", "3", "--pack_tokens", "64", "--steps", "3", "--warmup", "1"]
    _, report = bench("sft_throughput", "--lengths", str(tmp_path / "rows.jsonl"), *sizes, "--repeats", "1")
    assert report["mean_tokens"] == pytest.approx(11 + (2 + 21 + 4) / 3)
    assert [run["layout"] for run in report["runs"]] == ["padded, 3 rows", "packed, 64 tokens"]
    padded, packed = (run["tokens_a_second"] for run in report["runs"])
    assert report["packed_over_padded"] == {"packed, 64 tokens": pytest.approx(packed / padded)}


def test_formats_of_rollouts_are_measured_on_all_of_their_tokens(bench):
    shape = ["--groups", "2", "--response_tokens", "50", "--rounds", "1"]
    _, report = bench("records", *shape, "--waiting_mb", "1", "--unfinished_tokens", "1000")
    assert report["num_tokens"] == 2 * 8 * 150
    assert all(report[name]["tokens_per_s"] > 0 for name in ("jsonl", "columns", "checkpoint"))
    # JSON has each token as text, besides the words; columns have at most four bytes of an id and of a log-prob.
    assert report["columns"]["bytes_per_token"] < 10 < report["jsonl"]["bytes_per_token"]
    saved = report["saved"]
    assert saved["num_tokens"] == 125_000
    assert 8 * 125_000 < saved["unfinished"]["size_bytes"] < 8.5 * 125_000
    assert saved["waiting"]["size_bytes"] > 8 * 125_000  # with texts and names, and prompts without log-probs
    assert all(saved[name]["seconds"] > 0 and saved[name]["memory_mib"] >= 0 for name in ("unfinished", "waiting"))


def test_the_report_of_a_large_run_is_measured(bench):
    shape = ["--steps", "3", "--groups", "2", "--response_tokens", "40"]
    _, report = bench("large_report", *shape, "--openings", "1")
    assert (report["num_rollouts"], report["num_tokens"]) == (48, 1920)
    assert report["size_bytes"] > 1920 * 10  # 10 bytes of values per token
    assert report["page_bytes"] > 1920 * 8 and report["peak_mib"] > 20 and report["seconds"] > 0
    if shutil.which("chromium"):
        assert report["page_rollouts"] == 48 and 0 < report["opens_s"][0] < 60


def test_fleet_tells_what_a_controller_needs_while_all_answers_are_written(bench):
    shape = ["--engines", "4", "--actors", "2", "--prompts", "40", "--answer_tokens", "200", "--batch", "8"]
    _, report = bench("fleet", *shape, "--tokens_per_s", "400", "--fill_s", "4", "--seconds", "10")
    # 1,600 tokens per second are an answer in an eighth of a second, and a step per second.
    assert 5 <= report["steps"] <= 20
    steady = report["steady"]
    assert steady["tokens_per_s"] == 1600 and report["tokens_in_flight"] == 4000
    assert 0 < steady["cores_by_thread"]["generation"] < steady["cores"] < 2
    assert steady["memory_growth"] == pytest.approx(steady["memory_last_mib"] / steady["memory_first_mib"] - 1)
    fill = report["fill"]
    assert fill["tokens_per_s_of_a_core"] == pytest.approx(1000 / fill["cores"])


def test_real_work_asks_for_natural_lengths_and_leaves_the_first_step_out(bench, monkeypatch):
    asked = {}

    def run_ppo(flags, folder):
        asked[folder.name] = " ".join(flags)
        return Metrics([], [{"time/step": seconds} for seconds in (9.0, 2.0, 4.0, 3.0)], {})

    def generate(command, **options):
        asked["file"] = " ".join(command)
        return SimpleNamespace(stdout="generating ...\n1319 rollouts in 22.4 s, 8531 tokens/s\n")

    monkeypatch.setattr(real_work, "run_ppo", run_ppo)
    monkeypatch.setattr(real_work, "subprocess", SimpleNamespace(run=generate, PIPE=None, STDOUT=None))
    inputs = ["--model", "sft", "--questions", "rows.jsonl", "--chats", "hh.jsonl", "--reward_model", "rm"]
    _, report = bench("real_work", *inputs, "--prompts", "4", "--", "--vllm_max_num_seqs", "1024")
    assert report["answers"]["median"] == report["chats"]["median"] == {"time/step": 3.0}
    assert report["file"]["seconds"] == 22.4 and report["file"]["tokens_per_s"] == 8531
    assert all("--pretrain sft" in words and words.count("--vllm_max_num_seqs 1024") == 1 for words in asked.values())
    assert "--rollout_batch_size 4 --train_batch_size 32" in asked["answers"]
    assert "--reward_pretrain rm --critic_pretrain rm --prompt_data hh.jsonl" in asked["chats"]
    assert "--max_samples 1319 --generate_max_len 300" in asked["file"]


@pytest.mark.parametrize("steps", ["1", "4"])
def test_steps_with_a_timeline_need_a_neighbour_without_one(steps, bench, capsys):
    with pytest.raises(SystemExit):
        bench("timeline_cost", "--steps", steps)
    assert "--steps must be odd and at least 3" in capsys.readouterr().err


def test_adapters_alone_are_few_bytes_beside_merged_weights(bench, monkeypatch):
    asked = []

    def run_ppo(flags, folder):
        asked.append(" ".join(flags))
        size = 10.0 if folder.name == "adapter" else 1000.0
        step = {"sync/size_bytes": size, "time/sync": 0.5, "time/generate": 2.0, "time/step": 3.0}
        step |= {"rollout/response_tokens": 7.0, "samples/generated": 4}
        gaps = [{"mismatch/logprob_gap_max": gap, "mismatch/logprob_gap_mean": gap / 2} for gap in (4e-6, 2e-6)]
        return SimpleNamespace(steps=[step | gaps[0] | {"time/sync": 9.0}, step | gaps[1]])

    monkeypatch.setattr("workloads.speed.adapter_sync.run_ppo", run_ppo)
    _, report = bench("adapter_sync", "--rank", "8", "--steps", "2", "--", "--bf16")
    assert asked == [f"--lora_rank 8 --lora_sync {sync} --train_steps 2 --bf16" for sync in ("merge", "adapter")]
    assert report["measured"]["adapter"] == {
        "sync/size_bytes": 10.0,
        "time/sync": 0.5,
        "time/generate": 2.0,
        "time/step": 3.0,
        "tokens_per_s": 14.0,
        "logprob_gap_max": 4e-6,
        "logprob_gap_mean": 2e-6,
    }
    assert report["measured"]["merge"]["sync/size_bytes"] == 1000.0
