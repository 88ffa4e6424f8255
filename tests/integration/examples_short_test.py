"""The game and the shop of `examples/` are played and trained in one short run, and recorded by their own rules."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from record_testing import read_jsonl, write_jsonl

ROOT = Path(__file__).parents[2]
NUM_SHOWN = 1280  # conversations, three in four of them from the shop
NUM_QUESTIONS = 2  # in the shop: few, so that the model learns the form of calls within seconds
NUM_STEPS = 2
NUM_EPISODES = 32  # per step
LOW, HIGH = 0, 9

# One agent that plays what the prompt asks for, so that one run serves both.
BOTH = """
from rlhf_rollout.agents.user_agent import load_agent, parse_agent

GAME, SHOP = [load_agent(parse_agent(path), None) for path in ({game!r}, {shop!r})]


class Both:
    start, close = GAME.start, GAME.close

    async def __call__(self, session):
        return await (GAME if "Guess" in session.prompt else SHOP)(session)


run_episode = Both()
"""


def written(example: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def records(rlhf: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The rollouts of the run with their spans as texts, and its folder."""
    folder = tmp_path_factory.mktemp("short")
    written("two_tools.py", str(folder))
    demonstrations, questions = (read_jsonl(folder / f"{name}.jsonl") for name in ("demonstrations", "prompts"))
    questions = questions[:NUM_QUESTIONS]
    asked = {row["prompt"] for row in questions}
    visits = itertools.cycle(row for row in demonstrations if row["messages"][1]["content"] in asked)
    games = rows_of(written("guess_number.py", "games"))[: NUM_SHOWN // 4]
    write_jsonl(folder / "shown.jsonl", [row for game in games for row in (game, *itertools.islice(visits, 3))])
    numbers = rows_of(written("guess_number.py", "numbers"))[:8]
    prompts = [{"prompt": row["prompt"], "label": row["number"]} for row in numbers]
    prompts += [{"prompt": row["prompt"], "label": row["answer"]} for row in questions * (8 // NUM_QUESTIONS)]
    write_jsonl(folder / "prompts.jsonl", prompts)
    files = {"game": str(ROOT / "examples/guess_number.py"), "shop": str(ROOT / "examples/two_tools.py")}
    (folder / "agent.py").write_text(BOTH.format(**files), encoding="utf-8")

    rlhf(
        "sft",
        *("--pretrain", "builtin", "--dataset", "shown.jsonl", "--input_key", "messages", "--output_key", "None"),
        *("--multiturn", "--apply_chat_template", "--max_len", "256", "--train_batch_size", "8"),
        *("--micro_train_batch_size", "8", "--learning_rate", "6e-3", "--zero_stage", "0", "--save_path", "sft"),
        folder=folder,
    )
    rlhf(
        "ppo",
        *("--config", str(ROOT / "examples/tiny.toml"), "--pretrain", "sft/model", "--prompt_data", "prompts.jsonl"),
        *("--label_key", "label", "--eval_data", "None", "--train_steps", str(NUM_STEPS), "--turn_gamma", "0.5"),
        *("--rollout_batch_size", "8", "--n_samples_per_prompt", "4", "--train_batch_size", str(NUM_EPISODES)),
        *("--micro_train_batch_size", str(NUM_EPISODES), "--generate_max_len", "48", "--agent_func_path", "agent.py"),
        *("--max_steps", "4", "--agent_max_len", "256", "--seed", "1", "--save_path", "out"),
        folder=folder,
    )
    tokenizer = Tokenizer.from_file(str(folder / "out/model/tokenizer.json"))
    found = read_jsonl(folder / "out/rollouts.jsonl")
    for record in found:
        start = 0
        for span in record["spans"]:
            end = start + span["num_tokens"]
            span["text"] = tokenizer.decode(record["token_ids"][start:end])
            start = end
    return found, folder


def turns_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each answer of the policy with what followed it, which is empty after the last one."""
    _, *spans = record["spans"]
    assert [span["source"] for span in spans] == ["policy", "environment"] * (len(spans) // 2) + ["policy"]
    texts = [span["text"] for span in spans] + [""]
    return list(zip(texts[::2], texts[1::2], strict=True))


def test_games_are_played_and_rewarded_by_the_rules(records):
    games = [record for record in records[0] if "Guess" in record["prompt"]]
    assert len(games) == NUM_STEPS * NUM_EPISODES // 2
    for record in games:
        number, low, high, expected = int(record["label"]), LOW, HIGH, []
        turns = turns_of(record)
        for answer, following in turns:
            digits = re.findall(r"\d", answer)
            if not digits:
                expected.append(0.0)
                assert "Invalid action" in following or not following
                continue
            guess = int(digits[-1])
            is_sensible = low <= guess <= high
            expected.append(float(guess == number) if is_sensible else -0.2)
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            if following:
                assert ("higher" in following) is (guess < number) and ("lower" in following) is (guess > number)
        assert record["turn_rewards"] == pytest.approx(expected)
        assert record["extra"]["turns"] == len(turns) <= 4
        assert record["score"] == float(bool(digits) and guess == number)
        assert len(turns) == 4 or record["score"] == 1.0
    assert len({len(turns_of(record)) for record in games}) > 1  # some are won early


def test_tools_are_called_and_the_right_total_is_rewarded(records):
    visits = [record for record in records[0] if "I buy" in record["prompt"]]
    assert len(visits) == NUM_STEPS * NUM_EPISODES // 2
    prices = {"apples": 3, "breads": 4, "cheeses": 7, "grapes": 5, "honeys": 9, "lemons": 6, "milks": 2, "teas": 8}
    num_found = 0
    for record in visits:
        results = []
        for answer, following in turns_of(record):
            called = re.search(r'\[TOOL_CALLS\]look_up\{"item": "(\w+)"\}', answer)
            if called and following:
                num_found += called[1] in prices
                assert str(prices.get(called[1], "KeyError")) in following
                results.append(("look_up", ""))
            product = re.search(r'\[TOOL_CALLS\]calculate\{"expression": "(\d+)\*(\d+)"\}', answer)
            if product and following:
                total = str(int(product[1]) * int(product[2]))
                assert total in following
                results.append(("calculate", total))
        is_right = results[-1:] == [("calculate", record["label"])] and ("look_up", "") in results
        is_right = is_right and record["finish_reason"] == "stop"
        assert (record["reward"], record["score"]) == (float(is_right), float(is_right))
        assert record["extra"]["tool_calls"] >= len(results)
    assert num_found >= len(visits) / 2
    assert 0 < sum(record["reward"] for record in visits) < len(visits)


def test_both_are_trained(records):
    lines = read_jsonl(records[1] / "out/metrics.jsonl")
    steps = [line for line in lines if "time/step" in line]
    assert len(steps) == NUM_STEPS
    for line in steps:
        assert line["samples/generated"] == line["samples/trained"] == NUM_EPISODES
        assert line["mismatch/logprob_gap_max"] < 1e-3
        assert line["policy/grad_norm"] > 0
