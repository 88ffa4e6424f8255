"""The command: what it writes, what it refuses before anything starts, and how quickly it helps."""

import json
import resource
import subprocess
import sys
import time

import pytest

from rlhf_data.testing import write_jsonl
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines.fake import FakeEngine
from rollout_testing import json_server


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"q": f"{n}+1=", "a": n + 1} for n in range(5)])


def generate(prompts, out, *more):
    return main(
        ["generate", "--engine", "fake", "--prompts", str(prompts), "--input_key", "q", "--out", str(out), *more]
    )


def test_generate_writes_one_scored_record_a_rollout(prompts, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(q, p, l): return {'rewards': [float(label) for label in l]}\n")
    out = tmp_path / "out.jsonl"
    status = generate(prompts, out, "--label_key", "a", "--reward", str(reward), "--num_samples", "3")
    records = [json.loads(line) for line in out.read_text().splitlines()]
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
    assert generate(prompts, out, "--label_key", "a", "--reward", rewards, "--reward_weights", "2,0.5") == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(record["reward"] == 2 * float(record["label"]) + 0.5 * 10 for record in records)
    host = reward_url.removeprefix("http://").replace(":", "_")
    assert all(
        record["extra"] == {"reward_label": float(record["label"]), f"reward_{host}": 10.0} for record in records
    )
    # Labels 1 to 5: twice their mean of 3, and 5.
    assert "mean reward 11.0000" in capsys.readouterr().err


def test_generate_without_reward_repeats_with_a_seed(prompts, tmp_path):
    assert generate(prompts, tmp_path / "a.jsonl", "--seed", "7") == 0
    assert generate(prompts, tmp_path / "b.jsonl", "--seed", "7") == 0
    first, second = (sorted((tmp_path / name).read_text().splitlines()) for name in ("a.jsonl", "b.jsonl"))
    assert first == second
    assert json.loads(first[0])["verdict"] is None


def test_generate_long_prompts_are_left_out_and_told(prompts, tmp_path, capsys):
    write_jsonl(prompts, [{"q": "short"}, {"q": "long" * 100}])
    assert generate(prompts, tmp_path / "out.jsonl", "--prompt_max_len", "10") == 0
    assert "1 of 2 left out as too long" in capsys.readouterr().err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_generate_failed_prompts_are_told_and_change_the_status(prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.engines.fake.FakeEngine", lambda **options: FakeEngine(**options, fail_after=4))
    assert generate(prompts, tmp_path / "out.jsonl") == 1
    told = capsys.readouterr().err
    assert "1 rollouts failed, of 1 prompts" in told
    assert "failed: prompts.jsonl:5: engine 0: EngineError: the fake engine was told to fail" in told
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


def test_generate_reward_that_raises_is_told_and_counted(prompts, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(q, p, l): return 1 / 0\n")
    assert generate(prompts, tmp_path / "out.jsonl", "--reward", str(reward)) == 0
    told = capsys.readouterr().err
    assert "warning: the reward function failed a trial call: ZeroDivisionError" in told
    assert "verdicts: crash 5" in told


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--input_kye", "q"], "unknown option `--input_kye`"),
        (["--input_key", "question"], "prompts.jsonl:1: unknown key `question`; known: a, q"),
        (["--engine", "vlm"], "did you mean `vllm`?"),
        (["--engine", "vllm"], "engine vllm needs --model"),
        (["--prompts", "nothere.jsonl"], "data file nothere.jsonl does not exist"),
        (["--prompt_max_len", "1"], "all 5 prompts of"),
        (["--prompt_max_len", "0"], "at least 1"),
        (["--prompt_max_len", "x"], "invalid int value"),
        (["--max_samples", "0"], "at least 1, got 0"),
        (["--num_samples", "2", "--temperature", "0"], "greedy sampling"),
        (["--top_p", "0"], "top_p 0.0 in (0, 1]"),
        (["--dtype", "float16"], "unknown engine dtype `float16`"),
        (["--input_template", "x"], "must contain `{}` exactly once"),
        (["--reward", "nothere.py"], "reward file nothere.py does not exist"),
        (["--reward", "rlhf_rollout.rewards.math:nothing"], "has no function `nothing`"),
        (["--reward", "rlhf_rollout.rewards.math,"], "names nothing between two commas"),
        (["--reward", "rlhf_rollout.rewards.math,http://"], "reward server http:// is no URL"),
        (["--reward", "http://127.0.0.1:9/get_reward"], "the reward server does not answer: http://127.0.0.1:9"),
        (["--reward", "rlhf_rollout.rewards.math", "--reward_weights", "1,2"], "2 weights for 1 rewards"),
        (
            ["--reward", "rlhf_rollout.rewards.math", "--reward_weights", "one"],
            "--reward_weights is one; it must be",
        ),
        (["--reward_weights", "1"], "1 weights for 0 rewards: none"),
    ],
)
def test_generate_bad_input_is_refused_before_the_engine_starts(prompts, tmp_path, capsys, monkeypatch, more, says):
    monkeypatch.setattr(
        "rlhf_rollout.commands.generate.build_engine", lambda *arguments: pytest.fail("the engine was built")
    )
    assert generate(prompts, tmp_path / "out.jsonl", *more) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_model_without_tokenizer_is_refused(prompts, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert generate(prompts, tmp_path / "out.jsonl", "--model", str(tmp_path / "model")) == 2
    assert f"cannot load the tokenizer {tmp_path / 'model'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompts", "{prompts}", "--input_key", "q", "--out", "{out}", "--model", "{none}"],
        ["generate", "--prompts", "{prompts}", "--out", "{out}", "--engine", "fake", "--reward_pretrain", "{none}"],
        ["score", "--dataset", "{prompts}", "--out", "{out}", "--reward_pretrain", "{none}"],
        ["serve_rm", "--reward_pretrain", "{none}"],
        ["chat", "--pretrain", "{none}"],
        ["chat", "--engine", "transformers", "--model", "{none}", "--tokenizer", "owner/name"],
    ],
)
def test_model_folder_that_does_not_exist_is_refused_at_once(prompts, tmp_path, capsys, arguments):
    names = {"prompts": prompts, "out": tmp_path / "out.jsonl", "none": tmp_path / "none"}
    started = time.monotonic()
    assert main([argument.format(**names) for argument in arguments]) == 2
    assert time.monotonic() - started < 5
    told = capsys.readouterr().err
    assert f"there is no model folder {names['none']}\n\nhint: give an existing folder" in told


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
    assert "hint: give another --out, or --overwrite" in capsys.readouterr().err
    assert out.read_text() == "precious\n"
    assert generate(prompts, out, "--overwrite") == 0
    assert len(out.read_text().splitlines()) == 5


def test_main_without_a_command_or_a_needed_option_is_refused(capsys):
    assert main([]) == 2
    assert main(["generate", "--prompts", "x"]) == 2
    assert capsys.readouterr().err.count("are required") == 2


def children_seconds() -> float:
    """Return the processor's seconds of ended child processes, which do not depend on what else the machine does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_quick_and_brings_no_heavy_library():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import rlhf_rollout.commands.main as m\n"
        "try: m.main(['generate', '--help'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'ray', 'vllm', 'httpx') if name in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        started = children_seconds()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(children_seconds() - started)
    assert "--reward" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(seconds) < 1.0
