"""The task that ships, its data, and the model that was made for it."""

import json

import pytest

import builtin_task as task
import make_builtin as make
from rlhf_cli.builtin import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.math import grade

SIZE_LIMIT_BYTES = 4_000_000


@pytest.fixture(scope="module")
def tokenizer():
    from rlhf_models.loading import load_tokenizer

    return load_tokenizer(MODEL_DIR)


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_solution_is_worked_digit_by_digit():
    # 47 + 38: 7 + 8 = 15, carry 1; 4 + 3 + 1 = 8; 85. Without the carry: 4 + 3 = 7; 75.
    assert task.question((47, 38)) == "What is 47 + 38?"
    assert task.solution((47, 38)) == "7+8=15, 4+3+1=8 #### 85"
    assert task.solution((47, 38), carries=False) == "7+8=15, 4+3=7 #### 75"
    assert task.solution((99, 98)) == "9+8=17, 9+9+1=19 #### 197"


def test_solution_is_right_with_the_carry_and_wrong_without_for_every_problem():
    for problem in task.problems():
        label = str(sum(problem))
        assert grade(task.solution(problem), label) is VerdictKind.OK
        assert grade(task.solution(problem, carries=False), label) is VerdictKind.WRONG


def test_split_is_all_problems_once():
    train, held_out = task.split()
    # Of 10 x 10 pairs of ones 45 carry, each with 9 x 9 pairs of tens.
    assert len(train) + len(held_out) == 45 * 81
    assert set(train) | set(held_out) == set(task.problems())
    assert len(held_out) == task.NUM_HELD_OUT == 200


def test_shipped_prompts_are_disjoint_and_what_make_writes(tmp_path):
    train, held_out = rows(TRAIN_FILE), rows(HELD_OUT_FILE)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    made = make.make_data(tmp_path)
    assert made["train"].read_bytes() == TRAIN_FILE.read_bytes()
    assert made["held_out"].read_bytes() == HELD_OUT_FILE.read_bytes()


def test_demonstrations_have_no_held_out_problem_and_carry_as_often_as_stated(tmp_path):
    demonstrations = rows(make.make_data(tmp_path)["demonstrations"])
    assert not {row["prompt"] for row in demonstrations} & {row["prompt"] for row in rows(HELD_OUT_FILE)}
    # a+b=c, d+e+1=f has three plus signs, the slip a+b=c, d+e=f two.
    share = sum(row["completion"].count("+") == 3 for row in demonstrations) / len(demonstrations)
    assert share == pytest.approx(task.CARRY_SHARE, abs=0.02)


def test_shipped_model_is_small_and_complete():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < SIZE_LIMIT_BYTES
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_shipped_tokenizer_is_what_make_writes(tmp_path):
    make.make_initial_model(tmp_path)
    made, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, MODEL_DIR))
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]


def test_tokenizer_knows_every_byte_and_keeps_digits_apart(tokenizer):
    text = "h\u00e9llo \u65e5\u672c \x00 12345 #### 67"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("1234+56=7890")["input_ids"])
    assert pieces == list("1234+56=7890")


def test_shipped_model_writes_clean_steps_and_mostly_forgets_the_carry(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()
    held_out = rows(HELD_OUT_FILE)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for row in held_out
    ]
    shares = []
    assert len({len(prompt) for prompt in prompts}) == 1  # two-digit numbers: no padding is needed below
    problems = task.split()[1]
    # The probability of each written solution is exact: no sampling noise in the test.
    for carries in (True, False):
        texts = [task.solution(problem, carries=carries) for problem in problems]
        answers = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        width = max(map(len, answers))
        ids = torch.tensor([p + a + [0] * (width - len(a)) for p, a in zip(prompts, answers, strict=True)])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[:, len(prompts[0]) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, len(prompts[0]) :, None])[..., 0]
        mask = torch.tensor([[i < len(answer) for i in range(width)] for answer in answers])
        shares.append((chosen * mask).sum(1).exp().mean().item())
    carried, slipped = shares
    assert 0.15 < carried < 0.35
    assert carried + slipped > 0.97
