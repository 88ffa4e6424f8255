"""Rewards of answers in files: columns, pairs, reward models against their own scores, rows that are left out."""

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_data.examples.preference import PreferenceEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows.sources import open_sources
from rlhf_models.loading import load_reward_model
from rlhf_models.reward import score_sequences
from rlhf_models.testing import tiny_reward_model_dir
from rlhf_rollout.commands.main import main

PAIRS = [
    {"prompt": "say", "chosen": "long answer", "rejected": "short"},
    {"prompt": "say", "chosen": "x", "rejected": "longer"},
    {"prompt": "say", "chosen": "same", "rejected": "size"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_reward_model_dir(tmp_path_factory.mktemp("models") / "rm", mean=0.25, std=2.0)


@pytest.fixture
def length(tmp_path):
    """A function that gives an answer its number of characters, less its label."""
    file = tmp_path / "length.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    numbers = [len(q) - len(p) - float(l or 0) for q, p, l in zip(queries, prompts, labels)]\n"
        "    return {'rewards': numbers, 'extra_logs': {'query': [float(len(q)) for q in queries]}}\n"
    )
    return str(file)


def score(tmp_path, rows, *more):
    """Run the command on rows and return the rows that it wrote."""
    out = tmp_path / "out.jsonl"
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    status = main(["score", "--dataset", str(data), "--output_path", str(out), *more])
    return status, read_jsonl(out) if out.exists() else None


def test_function_rewards_are_added_to_the_rows_as_they_are(tmp_path, capsys, length):
    rows = [{"input": "q", "output": "abcd", "label": 1, "else": [1]}, {"input": "qé", "output": "ab", "label": 2}]
    status, scored = score(tmp_path, rows, "--label_key", "label", "--remote_rm_url", length)
    # Answers of 4 and 2 characters less 1 and 2; whole texts of 5 and 4 characters. The mean is 1.5.
    assert status == 0
    assert scored == [
        {**rows[0], "reward": 3.0, "score": 3.0, "verdict": "ok", "query": 5.0},
        {**rows[1], "reward": 0.0, "score": 0.0, "verdict": "wrong", "query": 4.0},
    ]
    assert "reward: mean 1.5000, deviation 1.5000" in capsys.readouterr().err


def test_pairs_get_two_rewards_and_an_accuracy(tmp_path, capsys, length):
    status, scored = score(
        tmp_path, PAIRS, "--chosen_key", "chosen", "--prompt_key", "prompt", "--remote_rm_url", length
    )
    assert status == 0
    assert [(row["chosen_reward"], row["rejected_reward"]) for row in scored] == [(11, 5), (1, 6), (4, 4)]
    # One right, one wrong, one tie: 1.5 of 3.
    assert "accuracy 0.5000 of 3 pairs" in capsys.readouterr().err
    assert all(row.items() <= written.items() for row, written in zip(PAIRS, scored, strict=True))


ANSWERS = [  # of two inputs, mixed; a reward is the number of characters
    {"input": "a", "output": "xx"},
    {"input": "b", "output": "x"},
    {"input": "a", "output": "xxxx"},
    {"input": "b", "output": "xxx"},
    {"input": "a", "output": "xxxxx", "finish_reason": "length"},
]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["iter_dpo"], [("a", "xxxx", "xx"), ("b", "xxx", "x")]),  # the cut answer is left out
        (["best_of_n"], [("a", "xxxxx"), ("b", "xxx")]),
        (["rs", "--min_reward", "3"], [("a", "xxxx"), ("a", "xxxxx"), ("b", "xxx")]),
        (
            ["csft", "--reward_template", r"{reward}:\n{input}"],
            [
                *[("2.00:\na", "xx"), ("4.00:\na", "xxxx"), ("5.00:\na", "xxxxx")],
                *[("1.00:\nb", "x"), ("3.00:\nb", "xxx")],
            ],
        ),
    ],
)
def test_answers_to_one_input_are_compared(tmp_path, capsys, length, more, expected):
    status, written = score(tmp_path, ANSWERS, "--remote_rm_url", length, "--post_processor", *more)
    assert status == 0
    keys = ("prompt", "chosen", "rejected") if more[0] == "iter_dpo" else ("input", "output")
    assert [tuple(row[key] for key in keys) for row in written] == expected
    assert f"{more[0]}: {len(expected)} rows written" in capsys.readouterr().err


def test_answers_that_are_pairs_already_are_not_compared(tmp_path, capsys, length):
    pairs = ("--chosen_key", "chosen", "--prompt_key", "prompt", "--remote_rm_url", length)
    status, _ = score(tmp_path, PAIRS, *pairs, "--post_processor", "iter_dpo")
    assert status == 2
    assert "--chosen_key says that rows are pairs" in capsys.readouterr().err


@pytest.mark.parametrize("normalize", [False, True])
def test_reward_model_scores_the_tokens_that_its_trainer_reads(tmp_path, model_dir, normalize):
    rows = [{"input": f"{n} plus {n} is", "output": f" {2 * n}"} for n in range(1, 6)]
    more = ("--normalize_reward",) if normalize else ()
    _, scored = score(tmp_path, rows, "--reward_pretrain", str(model_dir), *more)
    model, encoder = load_reward_model(model_dir, dtype="float32"), SftEncoder(tokenizer=load_tokenizer(str(model_dir)))
    read = [encoder(row).token_ids for row in open_sources(tmp_path / "data.jsonl")]
    raw = score_sequences(model, read, batch_size=1)
    expected = [(value - 0.25) / 2.0 for value in raw] if normalize else raw
    assert [row["reward"] for row in scored] == pytest.approx(expected, abs=1e-6)


def test_reward_model_scores_pairs_and_is_mixed_with_a_function(tmp_path, model_dir, length):
    more = ("--remote_rm_url", length, "--reward_pretrain", str(model_dir), "--reward_weights", "0.5,2")
    keys = ("--chosen_key", "chosen", "--prompt_key", "prompt", "--apply_chat_template")
    _, scored = score(tmp_path, PAIRS, *keys, *more)
    tokenizer = load_tokenizer(str(model_dir))
    encoder = PreferenceEncoder(tokenizer=tokenizer, prompt_key="prompt", apply_chat_template=True)
    model = load_reward_model(model_dir, dtype="float32")
    for row, written in zip(open_sources(tmp_path / "data.jsonl"), scored, strict=True):
        [value] = score_sequences(model, [encoder(row).chosen.token_ids], batch_size=1)
        assert written["chosen_reward_rm"] == pytest.approx(value, abs=1e-6)
        mixed = 0.5 * written["chosen_reward_length"] + 2 * written["chosen_reward_rm"]
        assert written["chosen_reward"] == pytest.approx(mixed, abs=1e-5)


@pytest.mark.parametrize(
    ("row", "flags", "hint"),
    [
        ({"question": "2+2", "response": "4"}, [], "did you mean --input_key question?"),
        (
            {"input": "2+2", "response": "4"},
            [],
            "did you mean --output_key response?",
        ),
        (
            {"input": "2+2", "output": "4", "answer": 4},
            ["--label_key", "lab"],
            "did you mean --label_key answer, or --l",
        ),
        (
            {"prompt": "q", "chosen": "4", "bad": "5"},
            ["--chosen_key", "chosen"],
            "name one of these keys with --reject",
        ),
    ],
)
def test_a_key_that_rows_lack_is_refused_with_the_flag_to_type(tmp_path, capsys, length, row, flags, hint):
    assert score(tmp_path, [row], "--remote_rm_url", length, *flags) == (2, None)
    assert f"hint: {hint}" in capsys.readouterr().err


def test_one_answer_beside_a_pair_is_scored(tmp_path, length):
    status, [row] = score(tmp_path, [{"input": "a", "output": "bcd", **PAIRS[0]}], "--remote_rm_url", length)
    assert (status, row["output"]) == (0, "bcd")


def test_pairs_without_their_keys_are_told_which_to_give(tmp_path, capsys, length):
    assert score(tmp_path, PAIRS, "--remote_rm_url", length) == (2, None)
    told = capsys.readouterr().err
    assert "data.jsonl:1 holds a pair of answers, not one answer: prompt, chosen, rejected" in told
    assert "hint: give --chosen_key chosen --rejected_key rejected --prompt_key prompt" in told


def test_rows_left_out_are_told(tmp_path, capsys, length):
    rows = [{"input": "q", "output": "a"}, {"input": "q", "output": "a" * 50}, {"input": "q", "output": ""}]
    more = ("--remote_rm_url", length, "--max_len", "20")
    status, scored = score(tmp_path, rows, *more)
    assert (status, scored) == (2, None)
    assert "1 of 3 rows cannot be used" in capsys.readouterr().err
    status, scored = score(tmp_path, rows, *more, "--skip_bad_rows")
    assert (status, len(scored)) == (0, 1)
    told = capsys.readouterr().err
    assert "1 of 2 rows left out as too long" in told
    assert "data.jsonl:3: `output` is empty" in told


def test_failing_scorer_is_told_and_leaves_no_reward(tmp_path, capsys):
    (tmp_path / "half.py").write_text("def reward_func(q, p, l): return {'rewards': [1 / (len(t) - 2) for t in q]}\n")
    rows = [{"input": "q", "output": "a"}, {"input": "q", "output": "ab"}]
    status, scored = score(tmp_path, rows, "--remote_rm_url", str(tmp_path / "half.py"))
    assert [(row["reward"], row["verdict"]) for row in scored] == [(None, "crash"), (1.0, "ok")]
    assert scored[0]["detail"].startswith("ZeroDivisionError") and "detail" not in scored[1]
    told = capsys.readouterr().err
    assert f"1 rows have no reward: the scorer failed or abstained; the last reason: {scored[0]['detail']}" in told
    assert status == 0


def test_scorer_that_fails_for_every_row_is_a_status_and_its_reason_is_that_of_the_answer_without_reward(
    tmp_path, capsys
):
    (tmp_path / "good.py").write_text("def reward_func(q, p, l): return {'rewards': [1 / (t != 'qbad') for t in q]}\n")
    keys = ["--prompt_key", "prompt", "--chosen_key", "chosen", "--rejected_key", "rejected"]
    rows = [{"prompt": "q", "chosen": "good", "rejected": "bad"}] * 2
    status, scored = score(tmp_path, rows, *keys, "--remote_rm_url", str(tmp_path / "good.py"))
    assert status == 1
    assert [(row["chosen_reward"], row["rejected_reward"]) for row in scored] == [(1.0, None)] * 2
    told = capsys.readouterr().err
    assert "2 rows have no reward: the scorer failed or abstained; the last reason: ZeroDivisionError" in told


def test_failing_scorer_may_leave_a_fixed_reward_and_prints_to_a_log(tmp_path, capfd):
    code = "def reward_func(q, p, l): print('seen', q); return {'rewards': [1 / (len(t) - 2) for t in q]}\n"
    (tmp_path / "half.py").write_text(code)
    rows = [{"input": "q", "output": "a"}, {"input": "q", "output": "ab"}]
    _, scored = score(tmp_path, rows, "--remote_rm_url", str(tmp_path / "half.py"), "--failed_reward", "-2")
    told = capfd.readouterr().err
    assert [(row["reward"], row["score"], row["verdict"]) for row in scored] == [
        (-2.0, -2.0, "crash"),
        (1.0, 1.0, "ok"),
    ]
    assert "seen" not in told and "1 rows have a reward with a note; the last: ZeroDivisionError" in told
    assert "seen ['qab']" in (tmp_path / "out.jsonl.log").read_text()


@pytest.mark.parametrize("place", ["file.txt/out.jsonl", "folder"])
def test_output_that_cannot_be_written_is_refused_before_anything_is_scored(tmp_path, capsys, place):
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.jsonl").write_text('{"input": "q", "output": "a"}\n')
    reward = tmp_path / "reward.py"
    reward.write_text(
        f"open({str(tmp_path / 'scored')!r}, 'w')\ndef reward_func(q, p, l): return {{'rewards': [1.0]}}\n"
    )
    words = ["score", "--dataset", str(tmp_path / "data.jsonl"), "--remote_rm_url", str(reward), "--overwrite"]
    assert main([*words, "--output_path", str(tmp_path / place)]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / place) in told
    assert "hint: " in told
    assert not (tmp_path / "scored").exists()


def test_batch_of_no_rows_is_refused(tmp_path, capsys, length):
    assert score(tmp_path, PAIRS, "--remote_rm_url", length, "--reward_batch_size", "0")[0] == 2
    assert "reward_batch_size" in capsys.readouterr().err


def test_score_without_a_reward_or_over_a_file_is_refused(tmp_path, capsys, length):
    assert score(tmp_path, PAIRS) == (2, None)
    assert "nothing says how answers are scored" in capsys.readouterr().err
    (tmp_path / "out.jsonl").write_text('"precious"\n')
    assert score(tmp_path, PAIRS, "--remote_rm_url", length) == (2, ["precious"])


def test_pairs_of_a_data_preset_are_scored_without_keys_to_give(tmp_path, capsys, length):
    talk = "\n\nHuman: a\n\nAssistant: "
    rows = [{"chosen": talk + "good", "rejected": talk + "no"}, {"chosen": talk + "x", "rejected": talk + "yes"}]
    # Without a tokenizer prompts are bytes, and the byte tokenizer has a chat template.
    status, scored = score(tmp_path, rows, "--preset_data", "hh", "--remote_rm_url", length)
    assert status == 0
    assert [(row["chosen_reward"], row["rejected_reward"]) for row in scored] == [(4.0, 2.0), (1.0, 3.0)]
    assert scored[0]["chosen"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good"}]
