"""An environment: a number from 0 to 9 is to be guessed, and each wrong guess is answered by "higher" or "lower".

    python examples/guess_number.py games > games.jsonl
    python examples/guess_number.py numbers > numbers.jsonl
    rlhf sft --pretrain builtin --dataset games.jsonl --input_key messages --output_key None --multiturn \
        --apply_chat_template --max_len 192 --train_batch_size 16 --micro_train_batch_size 16 --max_epochs 2 \
        --learning_rate 2e-3 --zero_stage 0 --save_path guess/sft
    rlhf ppo --config examples/tiny.toml --pretrain guess/sft/model --prompt_data numbers.jsonl \
        --eval_data numbers.jsonl --label_key number --num_episodes 10 --train_steps 30 --turn_gamma 0.5 \
        --actor_learning_rate 1e-3 --generate_max_len 4 --agent_func_path examples/guess_number.py --max_steps 4 \
        --agent_max_len 192 --save_path guess/ppo

`sft` shows the built-in model games of a careless player, and `ppo` lets it find out which guesses win. Accuracy is the
share of games that are won, which is 0.4 at most for four guesses that ignore the answers. With each of the seeds 1, 2
and 3 it reaches a held-out accuracy of at least 0.50.
"""

import json
import random
import re
import sys

POOL_SIZE = 4
PROMPT = "Guess a number from 0 to 9."
MAX_GUESSES = 4


class Environment:
    """One game. It may be played again, so that processes keep their games."""

    reusable = True

    def reset(self, label):
        """Begin a game; the prompt says all that there is to say."""
        self.number = int(label)
        self.low, self.high = 0, 9
        self.num_guesses = 0

    def step(self, guess):
        """Compare a guess with the number. The right one is worth 1 point; one that was ruled out costs 0.2."""
        self.num_guesses += 1
        is_right = guess == self.number
        is_sensible = self.low <= guess <= self.high
        reward = float(is_right) if is_sensible else -0.2
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        is_done = is_right or self.num_guesses == MAX_GUESSES
        return "higher" if guess < self.number else "lower", reward, is_done, {"score": float(is_right)}


def parse(text):
    """Return the last digit of an answer."""
    digits = re.findall(r"\d", text)
    if not digits:
        raise ValueError("guess a number from 0 to 9")
    return int(digits[-1])


def play(rng, number):
    """Return the messages of a game in which 3 of 10 guesses heed the answers, and the others are any digits."""
    game = Environment()
    game.reset(number)
    messages = [{"role": "user", "content": PROMPT}]
    is_done = False
    while not is_done:
        heeds = rng.random() < 0.3
        guess = rng.randint(game.low, game.high) if heeds else rng.randint(0, 9)
        answer, _, is_done, _ = game.step(guess)
        messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": answer}]
    return messages[:-1]


if __name__ == "__main__":
    rng = random.Random(1)
    if sys.argv[1] == "games":
        rows = [{"messages": play(rng, row % 10)} for row in range(1280)]
    else:
        rows = [{"prompt": PROMPT, "number": str(row % 10)} for row in range(200)]
    for row in rows:
        print(json.dumps(row))
