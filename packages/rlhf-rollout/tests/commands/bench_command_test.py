"""`bench`: which requests it sends, what it counts of their answers, and its report."""

import asyncio
import json

import numpy as np
import pytest

from record_testing import write_jsonl
from rlhf_data.errors import EngineError
from rlhf_rollout.commands.bench import Answered, summarize, table
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines import process
from rlhf_rollout.engines.fake import FakeEngine


@pytest.fixture
def words(tmp_path):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "a" * n} for n in (3, 5, 8)])
    return ["bench", "--engine", "fake", "--prompt_data", str(prompts), "--out", str(tmp_path / "report.json")]


def run(words, tmp_path, *more):
    status = main([*words, *map(str, more)])
    return status, json.loads((tmp_path / "report.json").read_text())


def test_requests_have_seeds_and_prompts_by_their_number_and_warm_up_is_not_counted(
    words, tmp_path, capsys, monkeypatch
):
    asked = []
    most = [0, 0]

    class Engine(FakeEngine):
        async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
            asked.append((len(token_ids) - 1, sampling.seed, sampling.min_tokens))  # without <bos>
            most[0] += 1
            most[1] = max(most)
            try:
                await asyncio.sleep(0.002)
                return await super().generate(token_ids, sampling, timeout_s=timeout_s)
            finally:
                most[0] -= 1

    monkeypatch.setattr(process, "build_engine", lambda kind, spec: Engine(spec))
    more = ("--num_requests", 4, "--warmup", 2, "--concurrency", 2, "--seed", 70, "--generate_max_len", 6)
    status, report = run(words, tmp_path, *more, "--fixed_length", "--n_samples_per_prompt", 2)
    assert status == 0
    assert asked == [
        (5, 70 + 2**31 - 2, 6),
        (8, 70 + 2**31 - 1, 6),
        (3, 70, 6),
        (5, 71, 6),
        (8, 72, 6),
        (3, 73, 6),
    ]
    assert most[1] == 2
    assert (report["num_requests"], report["num_failed"]) == (4, 0)
    assert report["output_tokens"]["min"] == report["output_tokens"]["max"] == 6
    spread = {"mean": 5.75, "min": 4, "p50": 5, "p90": 8.1, "p99": 8.91, "max": 9}
    assert report["prompt_tokens"] == pytest.approx(spread)
    assert report["finish_reasons"] == {"length": 8}
    assert report["seconds_to_completion"]["min"] >= 0.002
    assert report["output_tokens_per_s"] == pytest.approx(48 / report["seconds"])
    assert report["requests_per_s"] == pytest.approx(4 / report["seconds"])
    assert report["options"]["load"]["concurrency"] == 2 and report["machine"]["versions"]["python"]
    assert report["machine"]["num_cpus"] >= 1 and report["machine"]["memory_bytes"] > 2**28
    told = capsys.readouterr()
    assert "4 requests in " in told.out and "responses ended by: length 8" in told.out
    assert told.err.endswith(f"written to {tmp_path / 'report.json'}\n")


def test_failed_requests_are_counted_and_told(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(process, "build_engine", lambda kind, spec: FakeEngine(spec, fail_after=2))
    status, report = run(words, tmp_path, "--warmup", 0)
    assert status == 1
    assert (report["num_requests"], report["num_failed"]) == (2, 1)
    told = capsys.readouterr()
    assert "2 requests in " in told.out and "1 failed" in told.out
    assert "failed: the fake engine was told to fail after 2 requests" in told.err
    monkeypatch.setattr(process, "build_engine", lambda kind, spec: FakeEngine(spec, fail_after=0))
    status, report = run(words, tmp_path, "--warmup", 0)
    assert (status, report["num_failed"], report["seconds_to_completion"]) == (1, 3, None)


def test_summary_of_known_requests():
    times = np.linspace(0.1, 10.0, 100)
    answered = [Answered(float(time), 7, (10, 5), ("stop", "length")) for time in times]
    found = summarize([*answered, Answered(99.0, 7, failure="no")], 20.0)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["prompt_tokens_per_s"]) == (5.0, 75.0, 35.0)
    # Of 0.1, 0.2 ... 10.0, interpolated between neighbours.
    spread = {"mean": 5.05, "min": 0.1, "p50": 5.05, "p90": 9.01, "p99": 9.901, "max": 10.0}
    assert found["seconds_to_completion"] == pytest.approx(spread)
    assert found["seconds_per_output_token"] == pytest.approx({name: value / 10 for name, value in spread.items()})
    assert found["finish_reasons"] == {"stop": 100, "length": 100}
    lines = table(found).splitlines()
    assert lines[0] == "100 requests in 20.00 s, 1 failed"
    assert lines[1] == "5.00 requests/s, 75.0 output tokens/s, 35.0 prompt tokens/s"
    assert lines[2].split() == ["mean", "min", "p50", "p90", "p99", "max"]
    assert lines[3].split()[3:] == ["5.050", "0.100", "5.050", "9.010", "9.901", "10.000"]
    assert lines[-1] == "responses ended by: length 100, stop 100"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--concurrency", "0"], "--concurrency is 0; it must be at least 1"),
        (["--warmup", "-1"], "--warmup is -1; it must be at least 0"),
        (["--input_key", "x"], "unknown key `x`; known: input"),
        (["--out", "{folder}"], "is a folder"),
        (["--top_k", "0"], "--top_k is 0"),
        (["--engine", "http"], "--pretrain is missing"),
        (["--prompt_data", "None"], "--prompt_data is missing: it names the prompts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_measurement_that_cannot_work_is_refused(words, tmp_path, capsys, more, says):
    assert main([*words, *(word.format(folder=tmp_path) for word in more)]) == 2
    assert says in capsys.readouterr().err


def test_engine_that_does_not_start_is_an_error(words, capsys, monkeypatch):
    def fail(kind, spec):
        raise EngineError("no engine")

    monkeypatch.setattr(process, "build_engine", fail)
    assert main(words) == 2
    assert "error: no engine" in capsys.readouterr().err
