"""Write demonstrations for `openrlhf_math.py`: sums digit by digit, of which most forget the carry.

    python examples/sums.py sums.jsonl

What is 47 + 38?     7+8 is 15, 4+3+1 is 8. The answer is: 85      right
                     7+8 is 15, 4+3 is 7. The answer is: 75        wrong: the carry is forgotten
"""

import json
import random
import re
import sys
from pathlib import Path

from rlhf_cli.builtin import TRAIN_FILE

CARRY_SHARE = 0.3


def solution(first: int, second: int, *, carries: bool) -> str:
    """Return the steps and the answer, which is 10 too small without the carry."""
    ones = first % 10 + second % 10
    tens = first // 10 + second // 10 + carries
    carry = "+1" if carries else ""
    steps = f"{first % 10}+{second % 10} is {ones}, {first // 10}+{second // 10}{carry} is {tens}"
    return f"{steps}. The answer is: {10 * tens + ones % 10}"


def main(path: Path) -> None:
    """Write one row per problem of the built-in training file; its held-out problems are in none of them."""
    rng = random.Random(1)
    prompts = [json.loads(line)["prompt"] for line in TRAIN_FILE.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            first, second = map(int, re.findall(r"\d+", prompt))
            answer = solution(first, second, carries=rng.random() < CARRY_SHARE)
            print(json.dumps({"prompt": prompt, "completion": answer}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
