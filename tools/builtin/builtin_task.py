"""The built-in task: add two numbers of two digits whose ones carry, digit by digit.

    What is 47 + 38?     7+8=15, 4+3+1=8 #### 85        the answer
                         7+8=15, 4+3=7 #### 75          the slip: the carry is forgotten

Demonstrations contain both, the slip more often. A model trained on them writes clean steps and forgets the carry most
of the time, so that its accuracy is low for a reason that a reward on the answer alone can mend.
"""

import random
from collections.abc import Iterator

INPUT_KEY = "prompt"
LABEL_KEY = "answer"
OUTPUT_KEY = "completion"
NUM_HELD_OUT = 200
CARRY_SHARE = 0.25
"""The share of demonstrations that carry, and so about the accuracy of a model that imitates them."""

_DEMONSTRATIONS_A_PROBLEM = 3
_SPLIT_SEED = 20_240_601

Problem = tuple[int, int]


def problems() -> list[Problem]:
    """Return all pairs of two-digit numbers whose ones add up to 10 or more."""
    return [(a, b) for a in range(10, 100) for b in range(10, 100) if a % 10 + b % 10 >= 10]


def split() -> tuple[list[Problem], list[Problem]]:
    """Return the training and the held-out problems: together all of them, in a fixed shuffled order."""
    shuffled = problems()
    random.Random(_SPLIT_SEED).shuffle(shuffled)
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def question(problem: Problem) -> str:
    """Return what is asked."""
    return f"What is {problem[0]} + {problem[1]}?"


def solution(problem: Problem, *, carries: bool = True) -> str:
    """Return the steps and, after `####`, the result; without the carry it is the slip."""
    (tens_a, ones_a), (tens_b, ones_b) = (divmod(number, 10) for number in problem)
    ones, tens = ones_a + ones_b, tens_a + tens_b + carries
    middle = f"{tens_a}+{tens_b}+1={tens}" if carries else f"{tens_a}+{tens_b}={tens}"
    return f"{ones_a}+{ones_b}={ones}, {middle} #### {10 * tens + ones % 10}"


def prompt_rows(chosen: list[Problem]) -> Iterator[dict[str, str]]:
    """Yield one row a problem for reinforcement learning: the question and the right answer."""
    for problem in chosen:
        yield {INPUT_KEY: question(problem), LABEL_KEY: str(sum(problem))}


def demonstration_rows(chosen: list[Problem], *, seed: int) -> Iterator[dict[str, str]]:
    """Yield rows for supervised training, several a problem, of which `CARRY_SHARE` carry."""
    rng = random.Random(seed)
    for problem in chosen:
        for _ in range(_DEMONSTRATIONS_A_PROBLEM):
            carries = rng.random() < CARRY_SHARE
            yield {INPUT_KEY: question(problem), OUTPUT_KEY: solution(problem, carries=carries)}
