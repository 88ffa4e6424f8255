"""An environment: a number from 0 to 9 is to be guessed, and each wrong guess is answered by "higher" or "lower".

    python examples/guess_number.py > numbers.jsonl
    rlhf ppo --prompt_data numbers.jsonl --input_key prompt --label_key number \
        --agent_func_path examples/guess_number.py --max_steps 4 --agent_max_len 192

The guess is the last digit of the answer, so that any answer with a number is one. The number is the row's label.
"""

import json
import re

POOL_SIZE = 4


class Environment:
    """One game. It may be played again, so that processes keep their games."""

    reusable = True
    max_guesses = 4

    def reset(self, label):
        """Begin a game; the prompt says all that there is to say."""
        self.number = int(label)
        self.num_guesses = 0

    def step(self, guess):
        """Compare a guess with the number: 1 point for the right one, a tenth less per guess before it."""
        self.num_guesses += 1
        is_right = guess == self.number
        is_done = is_right or self.num_guesses == self.max_guesses
        reward = 1.1 - 0.1 * self.num_guesses if is_right else 0.0
        return "higher" if guess < self.number else "lower", reward, is_done, {"score": float(is_right)}


def parse(text):
    """Return the last digit of an answer."""
    digits = re.findall(r"\d", text)
    if not digits:
        raise ValueError("guess a number from 0 to 9")
    return int(digits[-1])


if __name__ == "__main__":
    for row in range(640):
        print(json.dumps({"prompt": "What is the number?", "number": str(row % 10)}))
