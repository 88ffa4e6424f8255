"""The built-in task: add two two-digit numbers with a carry, digit by digit.

    What is 47 + 38?     7+8=15, 4+3+1=8 #### 85        right
                         7+8=15, 4+3=7 #### 75          wrong: the carry is forgotten

Demonstrations contain both kinds, the wrong one more often. A model trained on them writes correct steps but forgets
the carry most of the time. Its accuracy is low, and a reward for the final answer can raise it: right answers occur
often enough to be reinforced.
"""

import random
from collections.abc import Iterator

INPUT_KEY = "prompt"
LABEL_KEY = "answer"
OUTPUT_KEY = "completion"
NUM_HELD_OUT = 200
CARRY_SHARE = 0.25
"""The share of demonstrations with the carry, which is about the accuracy of a model that imitates them."""

_DEMONSTRATIONS_PER_PROBLEM = 3
_SPLIT_SEED = 20_240_601

Problem = tuple[int, int]


def problems() -> list[Problem]:
    """Return all pairs of two-digit numbers whose ones add up to 10 or more."""
    return [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]


def split() -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the held-out problems, each in a fixed shuffled order."""
    shuffled = problems()
    random.Random(_SPLIT_SEED).shuffle(shuffled)
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def question(problem: Problem) -> str:
    """Return the text of a problem."""
    return f"What is {problem[0]} + {problem[1]}?"


def solution(problem: Problem, *, carries: bool = True) -> str:
    """Return the steps and, after `####`, the result. Without the carry, the result is wrong by 10."""
    tens_a, ones_a = divmod(problem[0], 10)
    tens_b, ones_b = divmod(problem[1], 10)
    ones = ones_a + ones_b
    tens = tens_a + tens_b + carries
    middle = f"{tens_a}+{tens_b}+1={tens}" if carries else f"{tens_a}+{tens_b}={tens}"
    return f"{ones_a}+{ones_b}={ones}, {middle} #### {10 * tens + ones % 10}"


def prompt_rows(chosen: list[Problem]) -> Iterator[dict[str, str]]:
    """Yield one row per problem for reinforcement learning: the question and the right answer."""
    for problem in chosen:
        yield {INPUT_KEY: question(problem), LABEL_KEY: str(sum(problem))}


def demonstration_rows(chosen: list[Problem], *, seed: int) -> Iterator[dict[str, str]]:
    """Yield several rows per problem for supervised training. A share of `CARRY_SHARE` of them is right."""
    rng = random.Random(seed)
    for problem in chosen:
        for _ in range(_DEMONSTRATIONS_PER_PROBLEM):
            carries = rng.random() < CARRY_SHARE
            yield {INPUT_KEY: question(problem), OUTPUT_KEY: solution(problem, carries=carries)}
