"""The prompts decide the length of a response, and lengths have the tail that the benchmark states."""

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_models.loading import load_tokenizer
from runner import read_lines
from workloads.asynchronous import long_tail
from workloads.asynchronous.long_tail import task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("task")
    long_tail.write_data(path)
    return path


def test_lengths_in_tokens_of_the_model_have_the_tail(folder):
    found = long_tail.quantiles(folder)
    assert found["median"] == pytest.approx(long_tail.MEDIAN_TOKENS, abs=2)
    assert found["tail"] == pytest.approx(long_tail.TAIL, rel=0.1)
    # All of them fit what `make` allows.
    longest = load_tokenizer(MODEL_DIR)(long_tail.response((99, 99), long_tail.LONGEST_COUNT))["input_ids"]
    assert found["longest"] <= len(longest) + 1 <= 336


def test_reward_is_for_the_right_sum_with_the_right_countdown(folder):
    scope = {}
    exec((folder / "reward.py").read_text(encoding="utf-8"), scope)
    right = long_tail.response((47, 38), 3)
    wrong = [long_tail.response((47, 38), 3, carries=False), long_tail.response((47, 38), 2), "85 03,02,01", ""]
    responses = [right, f" {right}\n", *wrong]
    prompts = ["P: "] * len(responses)
    queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    [row] = long_tail.prompt_rows([(47, 38)], seed=1)
    count = int(row["prompt"][:2])
    rewards = scope["reward_func"](queries, prompts, ["85 03,02,01"] * len(responses))
    assert rewards == {"rewards": [1, 1, 0, 0, 0, 0]}
    [[own]] = scope["reward_func"](["P: " + long_tail.response((47, 38), count)], ["P: "], [row["answer"]]).values()
    assert own == 1


def test_examples_know_no_held_out_problem_and_carry_as_those_of_the_built_in_task(folder):
    examples, held_out = read_lines(folder / "examples.jsonl"), read_lines(folder / "held_out.jsonl")
    asked = {row["prompt"].partition(". ")[2] for row in examples}
    assert not asked & {row["prompt"].partition(". ")[2] for row in held_out}
    right = sum("+1=" in row["completion"] and row["completion"].count("+") == 3 for row in examples)
    assert right / len(examples) == pytest.approx(task.CARRY_SHARE, abs=0.03)
    # No count of the prompts is new to the start model.
    counts, known = ({row["prompt"][:2] for row in each} for each in (held_out, examples))
    assert counts <= known
