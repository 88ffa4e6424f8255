"""`sft` from its flags to a model folder, on real DeepSpeed in this process."""

import json
from pathlib import Path

import pytest

from rlhf_cli.commands.examples import COMMANDS

main = COMMANDS["sft"]
ROWS = [{"question": f"Say {word}.", "reply": word} for word in ("one", "two", "three", "four")] * 4


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def flags(**changes: object) -> list[str]:
    options: dict[str, object] = {
        "pretrain": "builtin",
        "dataset": "rows.jsonl",
        "input_key": "question",
        "output_key": "reply",
        "save_path": "out",
        "max_len": 64,
        "train_batch_size": 8,
        "micro_train_batch_size": 3,
        "max_epochs": 2,
        "learning_rate": 1e-3,
        "zero_stage": 0,
    }
    words = [word for name, value in (options | changes).items() for word in (f"--{name}", str(value))]
    return [*words, "--apply_chat_template"]


def test_sft_trains_and_leaves_a_model_that_plain_transformers_loads(folder, capsys):
    assert main(flags(eval_dataset="rows.jsonl")) == 0
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "sft/loss" in line]
    # 16 examples x 2 epochs / 8 = 4 updates.
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    before, after = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert after < before - 0.5
    assert f"{before:.4f} -> {after:.4f}" in out
    assert main(["--config", "out/config.toml", "--save_path", "again", "--dry_run"]) == 0
    assert (folder / "out" / "config.toml").read_text().replace('"out"', '"again"') in capsys.readouterr().out

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(folder / "out" / "model").eos_token_id


def test_sft_dry_run_shows_the_arithmetic_and_starts_nothing(folder, capsys):
    assert main([*flags(), "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "16 examples x 2 epochs = 4 updates of 8 on 1 process(es), 3 per pass" in out
    assert 'pretrain = "builtin"' in out
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "row.jsonl"}, "row.jsonl does not exist"),
        ({"output_key": "answer"}, "unknown key `answer`; known: question, reply"),
        ({"max_len": 4096}, "has a context of 2048"),
        ({"max_len": 3}, "longer than --max_len 3"),
    ],
    ids=["file", "key", "context", "length"],
)
def test_sft_bad_input_is_refused_before_a_model_loads(folder, capsys, monkeypatch, changes, message):
    monkeypatch.setattr("rlhf_train.offline.job.run_offline", lambda *_: pytest.fail("a run was started"))
    assert main(flags(**changes)) == 2
    assert message in capsys.readouterr().err
