"""An environment whose observations sum up what happened, so that the episodes of a group meet the same states.

A digit is to be guessed. Each wrong guess is answered by the range in which it must be, such as "3 to 7". The reward is
1 for the right guess and 0 before. `MAX_GUESSES` guesses are enough for a player who halves the range.
"""

import importlib.util
import random
from pathlib import Path

_spec = importlib.util.spec_from_file_location("guess_number", Path(__file__).parents[4] / "examples/guess_number.py")
_example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)

POOL_SIZE = _example.POOL_SIZE
MAX_GUESSES = _example.MAX_GUESSES
PROMPT = "0 to 9"
HEEDED_SHARE = 0.7
parse = _example.parse


class Environment(_example.Environment):
    """The game of examples/guess_number.py with other observations. Guesses that are ruled out cost nothing."""

    def step(self, guess):
        """Compare a guess with the number, and return the range that is left."""
        _, _, is_done, extra = super().step(guess)
        return f"{self.low} to {self.high}", extra["score"], is_done, extra


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
