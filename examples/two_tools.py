"""A policy with two tools: a price list to look things up in, and a calculator.

    python examples/two_tools.py > purchases.jsonl
    rlhf ppo --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data purchases.jsonl --input_key prompt --label_key answer \
        --apply_chat_template --agent_func_path examples/two_tools.py --max_steps 4

The model's chat template must know tools and write calls in Hermes' form, as Qwen's templates do.
"""

import ast
import itertools
import json
import operator
import re

PRICES = {"apple": 3, "bread": 4, "cheese": 7, "grapes": 5, "honey": 9, "milk": 2, "rice": 6, "tea": 8}
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def look_up(item: str) -> int:
    """Return the price of an item in dollars, for example of "tea"."""
    return PRICES[item]


def calculate(expression: str) -> float:
    """Return the value of an expression of numbers with + - * / and parentheses, for example "3 * (4 + 5)"."""
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
TOOL_LIMITS = {"max_calls": 6, "timeout_s": 5.0, "max_chars": 200}
SYSTEM = "You are a shop assistant. Use the tools, then answer with one number."


def reward(messages, label):
    """Return 1 if the last number of the final answer is the total."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", messages[-1]["content"])
    return float(bool(numbers) and float(numbers[-1]) == float(label))


if __name__ == "__main__":
    for count, (first, second) in itertools.product(range(2, 10), itertools.permutations(PRICES, 2)):
        question = f"How much are {count} of {first} and one of {second} together?"
        print(json.dumps({"prompt": question, "answer": str(count * PRICES[first] + PRICES[second])}))
