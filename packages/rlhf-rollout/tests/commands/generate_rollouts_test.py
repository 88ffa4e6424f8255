"""The rollouts that `generate` writes: records, rewards, seeds, sources, failures, and files that exist."""

import json

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines.fake import FakeEngine
from rollout_testing import generate_words, json_server


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"q": f"{n}+1=", "a": n + 1} for n in range(5)])


def generate(prompts, out, *more):
    return main(generate_words(prompts, out, "--input_key", "q", *more))


def test_generate_writes_one_scored_record_per_rollout(prompts, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(q, p, l): return {'rewards': [float(label) for label in l]}\n")
    out = tmp_path / "out.jsonl"
    status = generate(prompts, out, "--label_key", "a", "--remote_rm_url", str(reward), "--n_samples_per_prompt", "3")
    records = read_jsonl(out)
    assert status == 0
    assert len(records) == 15
    assert len({record["group_id"] for record in records}) == 5
    assert all(record["reward"] == float(record["label"]) and record["verdict"] == "ok" for record in records)
    # Labels 1 to 5, three times each: the mean is 3.
    told = capsys.readouterr().err
    assert all(part in told for part in ("15 rollouts", "mean reward 3.0000", "verdicts: ok 15", str(out)))


@pytest.fixture
def reward_url():
    """The URL of a server that gives every query the reward 10."""
    with json_server(lambda body, headers: (200, {"rewards": [10.0] * len(body["query"])})) as url:
        yield url


def test_generate_mixes_functions_and_servers_by_weight(prompts, tmp_path, capsys, reward_url):
    (tmp_path / "label.py").write_text("def reward_func(q, p, l): return {'rewards': [float(label) for label in l]}\n")
    rewards, out = f"{tmp_path}/label.py,{reward_url}/a,{reward_url}/b", tmp_path / "out.jsonl"
    assert generate(prompts, out, "--label_key", "a", "--remote_rm_url", rewards, "--reward_weights", "2,0.5") == 0
    records = read_jsonl(out)
    assert all(record["reward"] == 2 * float(record["label"]) + 0.5 * 10 for record in records)
    host = reward_url.removeprefix("http://").replace(":", "_")
    assert all(
        record["extra"] == {"reward_label": float(record["label"]), f"reward_{host}": 10.0} for record in records
    )
    # Labels 1 to 5: twice their mean of 3, and 5.
    assert "mean reward 11.0000" in capsys.readouterr().err


def test_generate_long_prompts_are_left_out_and_told(prompts, tmp_path, capsys):
    write_jsonl(prompts, [{"q": "short"}, {"q": "long" * 100}])
    assert generate(prompts, tmp_path / "out.jsonl", "--prompt_max_len", "10") == 0
    assert "1 of 2 left out as too long" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_generate_failed_prompts_are_told_and_change_the_status(prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.engines.fake.FakeEngine", lambda spec: FakeEngine(spec, fail_after=4))
    assert generate(prompts, tmp_path / "out.jsonl") == 1
    told = capsys.readouterr().err
    assert "1 rollouts failed, of 1 prompts" in told
    assert "failed: prompts.jsonl:5: engine 0: EngineError: the fake engine was told to fail" in told
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_generate_reward_that_raises_is_told_and_counted(prompts, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(q, p, l): return 1 / 0\n")
    assert generate(prompts, tmp_path / "out.jsonl", "--remote_rm_url", str(reward)) == 0
    told = capsys.readouterr().err
    assert "warning: the reward function failed a trial call: ZeroDivisionError" in told
    assert "verdicts: crash 5" in told


def test_generate_draws_from_sources_by_their_probabilities(prompts, tmp_path, capsys):
    more = write_jsonl(tmp_path / "more.jsonl", [{"q": f"{n}-1="} for n in range(50)])
    both, out = f"{prompts},{more}", tmp_path / "out.jsonl"
    assert generate(both, out, "--prompt_data_probs", "0.1,0.9", "--seed", "3") == 0
    with out.open(encoding="utf-8") as lines:
        records = sorted(map(json.loads, lines), key=lambda record: record["group_id"])
    files = [record["prompt_id"].partition(":")[0] for record in records[:20]]
    assert set(files) == {"prompts.jsonl", "more.jsonl"}
    assert files != sorted(files, reverse=True)  # not one after the other
    assert all(record["prompt"] == record["input"] for record in records)
    assert generate(both, tmp_path / "other.jsonl", "--prompt_data_probs", "1") == 2
    assert "2 data sources need as many probabilities, got 1" in capsys.readouterr().err


def test_generate_existing_file_is_kept_unless_told(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    assert generate(prompts, out) == 2
    assert "hint: give another --output_path, or --overwrite" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert generate(prompts, out, "--overwrite") == 0
    assert len(out.read_text().splitlines()) == 5
