"""A policy with two tools: a price list to look items up in, and a calculator. It learns to use both.

    python examples/two_tools.py shop
    rlhf sft --pretrain builtin --dataset shop/demonstrations.jsonl --input_key messages --output_key None --multiturn \
        --apply_chat_template --max_len 256 --train_batch_size 16 --micro_train_batch_size 16 --learning_rate 3e-3 \
        --zero_stage 0 --save_path shop/sft
    rlhf ppo --config examples/tiny.toml --pretrain shop/sft/model --prompt_data shop/prompts.jsonl \
        --eval_data shop/held_out.jsonl --eval_n_samples_per_prompt 8 --num_episodes 20 --train_steps 20 \
        --generate_max_len 48 --agent_func_path examples/two_tools.py --max_steps 4 --agent_max_len 256 \
        --save_path shop/ppo

The second command teaches the built-in model to look prices up, and mostly to estimate the total. The third one teaches
it to calculate the total: it reaches a held-out accuracy of at least 0.50, over purchases that are no prompts. The
demonstrations show every purchase.
"""

import ast
import itertools
import json
import operator
import random
import sys
from pathlib import Path

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
PRICES = {"apples": 3, "breads": 4, "cheeses": 7, "grapes": 5, "honeys": 9, "lemons": 6, "milks": 2, "teas": 8}

NUM_HELD_OUT = 16
NUM_DEMONSTRATIONS = 8000
CALCULATED_SHARE = 0.4  # of them; the others estimate


def look_up(item: str) -> int:
    """Return the price of one item in dollars, for example of "teas"."""
    return PRICES[item]


def calculate(expression: str) -> float:
    """Return the value of an expression of numbers with + - * / and parentheses, for example "3*(4+5)"."""
    if len(expression) > 100:
        raise ValueError("the expression is too long")
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and parentheses are known")


TOOLS = [look_up, calculate]
TOOL_PARSER = "mistral"
TOOL_LIMITS = {"max_calls": 4, "timeout_s": 5.0, "max_chars": 40}
SYSTEM = "look_up, calculate"


def reward(messages, label):
    """Return 1 if the price was looked up and the last result of a tool is the total: nothing is done in the head."""
    results = [(message["name"], message["content"]) for message in messages if message["role"] == "tool"]
    return float(results[-1:] == [("calculate", label)] and "look_up" in dict(results))


def prompt(count: str, item: str) -> dict[str, str]:
    """Return a question with its answer."""
    return {
        "prompt": f"I buy {count} {item}. What do {count} {item} cost?",
        "answer": str(COUNTS[count] * PRICES[item]),
    }


def call(name: str, **arguments) -> str:
    """Return a tool call in Mistral's form, the shortest one."""
    return f"[TOOL_CALLS]{name}{json.dumps(arguments)}"


def demonstration(count: str, item: str, *, calculates: bool) -> list[dict[str, str]]:
    """Return a conversation that looks a price up, and then calculates the total or estimates it."""
    price = PRICES[item]
    total = COUNTS[count] * price
    turns = [("system", SYSTEM), ("user", prompt(count, item)["prompt"])]
    turns += [("assistant", call("look_up", item=item)), ("tool", str(price))]
    if calculates:
        turns += [("assistant", call("calculate", expression=f"{price}*{COUNTS[count]}")), ("tool", str(total))]
        turns.append(("assistant", "done"))
    else:
        turns.append(("assistant", f"about {round(total, -1)}"))
    return [{"role": role, "content": content} for role, content in turns]


def write(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """Write demonstrations, prompts, and held-out prompts, which are not among the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(2)
    pairs = [(count, item) for count in COUNTS for item in PRICES]
    rng.shuffle(pairs)
    shown = [
        {"messages": demonstration(*pair, calculates=rng.random() < CALCULATED_SHARE)}
        for pair in itertools.islice(itertools.cycle(pairs), NUM_DEMONSTRATIONS)
    ]
    write(folder / "demonstrations.jsonl", shown)
    write(folder / "prompts.jsonl", [prompt(*pair) for pair in pairs[NUM_HELD_OUT:]])
    write(folder / "held_out.jsonl", [prompt(*pair) for pair in pairs[:NUM_HELD_OUT]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
