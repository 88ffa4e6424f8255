"""An environment whose observations sum up what happened, so that the episodes of a group meet the same states.

A digit is to be guessed. Each wrong guess is answered by the range in which it must be, such as "3 to 7". The reward is
1 for the right guess and 0 before; `MAX_GUESSES` guesses are enough for a player who halves the range.
"""

import random
import re

POOL_SIZE = 4
PROMPT = "0 to 9"
MAX_GUESSES = 4
HEEDED_SHARE = 0.7


class Environment:
    """One game. It may be played again, so that processes keep their games."""

    reusable = True

    def reset(self, label):
        """Begin a game; the prompt has the range."""
        self.number = int(label)
        self.low, self.high = 0, 9
        self.num_guesses = 0

    def step(self, guess):
        """Compare a guess with the number, and return the range that is left."""
        self.num_guesses += 1
        is_right = guess == self.number
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        is_done = is_right or self.num_guesses == MAX_GUESSES
        return f"{self.low} to {self.high}", float(is_right), is_done, {"score": float(is_right)}


def parse(text):
    """Return the last digit of an answer."""
    digits = re.findall(r"\d", text)
    if not digits:
        raise ValueError("guess a digit")
    return int(digits[-1])


def prompts(count):
    """Return rows of prompts with their numbers, each digit equally often."""
    return [{"prompt": PROMPT, "number": str(row % 10)} for row in range(count)]


def games(count):
    """Return conversations in which `HEEDED_SHARE` of the guesses heed the range, and the others are any digits."""
    rng = random.Random(1)
    rows = []
    for row in prompts(count):
        game = Environment()
        game.reset(row["number"])
        messages = [{"role": "user", "content": PROMPT}]
        is_done = False
        while not is_done:
            heeds = rng.random() < HEEDED_SHARE
            guess = rng.randint(game.low, game.high) if heeds else rng.randint(0, 9)
            answer, _, is_done, _ = game.step(guess)
            messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": answer}]
        rows.append({"messages": messages[:-1]})
    return rows
