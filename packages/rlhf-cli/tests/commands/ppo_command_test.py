"""`ppo` up to the point where something would start: dry runs, and every kind of bad input."""

import json
import shutil
from pathlib import Path

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_cli.commands.ppo import main

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's folder, with prompts and a reward, and no way to start a run."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("rlhf_train.online.run_online", lambda job, view: pytest.fail("a run was started"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def flags(**changes: object) -> list[str]:
    """Return a command line that works, relative to the user's folder, with some flags changed."""
    options: dict[str, object] = {
        "pretrain": "builtin",
        "prompt_data": "prompts.jsonl",
        "input_key": "question",
        "label_key": "answer",
        "remote_rm_url": "reward.py",
        "rollout_batch_size": 8,
        "train_batch_size": 8,
        "prompt_max_len": 64,
        "generate_max_len": 16,
    }
    return [word for name, value in (options | changes).items() for word in (f"--{name}", str(value))]


def refused(capsys, argv: list[str]) -> tuple[str, str]:
    """Run `argv`, which must be refused as bad input; return message and hint."""
    status = main(argv)
    printed = capsys.readouterr()
    assert status == 2, printed
    assert "results will be in" not in printed.out
    message, _, hint = printed.err[printed.err.index("error: ") :].partition("\n\nhint: ")
    return message, hint


# -- dry runs -------------------------------------------------------------------------------------------------------


def test_dry_run_of_the_builtin_task_shows_configuration_placement_and_arithmetic(folder, capsys):
    assert main(["--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "\nrollout_batch_size = 32\n" in out
    assert "x actor + critic + reference" in out
    # 32 x 4 = 128 samples; 128 / 64 = 2 updates; 40 x 2 = 80, drawing 40 x 32 = 1280 of 3445 prompts.
    assert "32 prompts x 4 samples = 128" in out
    assert "128 / 64 x 1 epoch(s) = 2 update(s)" in out
    assert "40 steps x 2 = 80 updates; 1280 prompts drawn from 3445, 0.37 passes" in out
    assert not (folder / "rlhf-output").exists()


def test_dry_run_reports_what_is_left_out_shared_or_failing(folder, capsys):
    long = {"question": "What is " + "1 + " * 40 + "1?", "answer": "41"}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, long]))
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('no luck')\n")
    argv = flags(eval_data="prompts.jsonl", rollout_batch_size=16, train_batch_size=16)
    assert main([*argv, "--dry_run"]) == 0
    notices = capsys.readouterr().err
    assert "1 of 9 prompts are longer than --prompt_max_len and left out" in notices
    assert "8 of 8 held-out prompts are also training prompts" in notices
    assert "the reward function failed on the first prompts, and the run goes on" in notices
    assert "no luck" in notices
    assert "--rollout_batch_size 16 is more than the 8 prompts: each is used 2.0 times per step" in notices


def test_dry_run_says_which_share_is_left_out_if_it_is_most(folder, capsys):
    long = {"question": "What is " + "1 + " * 40 + "1?", "answer": "41"}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *[long] * 24]))
    assert main([*flags(), "--dry_run"]) == 0
    said = "most of the data, 75 %, is not used: 24 of 32 prompts are longer than --prompt_max_len and left out"
    assert said in capsys.readouterr().err


# -- bad input ------------------------------------------------------------------------------------------------------


HUB = "give a .jsonl or .json file; names on the hub are for --prompt_data"


@pytest.mark.parametrize(
    ("changes", "says", "hint"),
    [
        ({"prompt_data": "promts.jsonl"}, "data file {}/promts.jsonl does not exist", "prompts.jsonl"),
        *(
            ({"eval_data": name}, f"--eval_data: data file {{}}/{name} does not exist", HUB)
            for name in ("gsm8k", "openai/gsm8k", "owner/prompts-v0.1")
        ),
        *(
            ({key: "answr"}, f"--{key}: {{}}/prompts.jsonl:1: unknown key `answr`; known: answer, question", guess)
            for key, guess in (
                ("input_key", "did you mean --input_key question?"),
                ("label_key", "did you mean --label_key answer, or --label_key None if rows have none?"),
            )
        ),
        ({"prompt_max_len": 3}, "all 8 prompts", "raise --prompt_max_len"),
        ({"generate_max_len": 4096}, "4096 is 4160 tokens, and the model has a context of 2048", "2048"),
        ({"remote_rm_url": "rewrd.py"}, "reward file {}/rewrd.py does not exist", "reward.py"),
        ({"pretrain": "./model"}, "there is no model folder {}/model", ""),
        ({"attn_implementation": "sdp"}, "--attn_implementation: unknown value `sdp`", "did you mean `sdpa`?"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_a_hint(folder, capsys, changes, says, hint):
    message, given = refused(capsys, flags(**changes))
    assert says.format(folder) in message
    assert given and hint in given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("def score(queries):\n    return []\n", "has no function `reward_func`; it has score"),
        ("def reward_func(queries, prompts):\n    return {'rewards': [0.0]}\n", "does not take (queries, prompts"),
        ("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0]}\n", "numbers for"),
        ("def reward_func(queries, prompts, labels):\n    return {'rewards': [float('nan')] * len(queries)}\n", "nan"),
        ("def reward_func(queries, prompts, labels):\n    return {'reward': [0.0] * len(queries)}\n", "rewards"),
        ("import nothing_of_that_name\ndef reward_func(queries, prompts, labels):\n    return {}\n", "nothing_of_that"),
    ],
    ids=["no function", "arguments", "wrong length", "not finite", "no rewards", "import fails"],
)
def test_reward_that_cannot_work_is_refused(folder, capsys, content, message):
    (folder / "reward.py").write_text(content)
    text, hint = refused(capsys, flags())
    assert message in text
    assert "hint: " not in hint  # there is one at most


@pytest.mark.parametrize(("flag", "named"), [("pretrain", ""), ("critic_pretrain", "--critic_pretrain: ")])
def test_model_that_the_tokenizer_does_not_fit_is_refused(folder, capsys, flag, named):
    shutil.copytree(MODEL_DIR, folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    message, hint = refused(capsys, flags(**{flag: "model"}))
    assert message.startswith(
        f"error: {named}the tokenizer has token ids up to 511, but the model's embedding ends at 299"
    )
    assert "tokenizer" in hint


@pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
def test_model_folder_without_weights_is_refused(folder, capsys, flag):
    shutil.copytree(MODEL_DIR, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    message, hint = refused(capsys, flags(**{flag: "model", "save_path": "out"}))
    assert f"the model folder {folder / 'model'} has no weights" in message
    assert hint
    assert not (folder / "out").exists()


def test_cluster_that_does_not_answer_is_named(folder, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    message, hint = refused(capsys, flags())
    assert "the Ray cluster at 127.0.0.1:1 cannot be joined: no cluster answers" in message
    assert "RAY_ADDRESS=local" in hint
