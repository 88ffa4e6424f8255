"""A task for the built-in model whose response lengths have a long tail, which the prompts decide.

A prompt asks to add two numbers, as the built-in task does, and then to count down:

    04. What is 47 + 38?       7+8=15, 4+3+1=8 #### 85 04,03,02,01

The start of the countdown is drawn so that the tokens of the right responses are log-normal, with a 99th percentile
that is `TAIL` times the median, but at least those of the sum. The start model is the built-in one after a short `rlhf
sft` on examples of this form: it counts well and forgets the carry in most sums, as the built-in model does. The reward
is 1 for the right sum with the right countdown, so that a policy earns nothing by counting less.
"""

import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_cli.builtin import MODEL_DIR
from rlhf_models.loading import load_tokenizer
from runner import ROOT, read_lines

sys.path.append(str(ROOT / "tools/builtin"))
import builtin_task as task

TAIL = 8.0  # 99th percentile of the response tokens / median
MEDIAN_TOKENS = 32
LONGEST_COUNT = 99  # two digits
SUM_TOKENS = 22  # of the sum's steps, its result and the end, up to two more or less
NUM_EXAMPLES = 4096
USUAL_SHARE = 0.75  # share of the examples whose counts are drawn as those of the prompts; the others are uniform
_SIGMA = math.log(TAIL) / statistics.NormalDist().inv_cdf(0.99)

REWARD = '''"""1 for the right sum with the right countdown behind it."""


def reward_func(queries, prompts, labels):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    ends = [response.partition("####")[2].strip() for response in responses]
    return {"rewards": [float(end == label) for end, label in zip(ends, labels, strict=True)]}
'''
SFT_FLAGS = (
    "--apply_chat_template --max_len 384 --train_batch_size 32 --micro_train_batch_size 32 --packing_samples"
    " --max_epochs 2 --learning_rate 2e-3 --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --zero_stage 0"
)


def count_of(tokens: int) -> int:
    """Return the start of the countdown whose response has about this many tokens: three per number, and the sum's."""
    return min(max(round((tokens - SUM_TOKENS) / 3), 0), LONGEST_COUNT)


def counts(number: int, seed: int) -> list[int]:
    """Return the starts of the countdowns of `number` prompts."""
    rng = random.Random(seed)
    return [count_of(round(rng.lognormvariate(math.log(MEDIAN_TOKENS), _SIGMA))) for _ in range(number)]


def question(problem: task.Problem, count: int) -> str:
    """Return the text of a prompt."""
    return f"{count:02}. {task.question(problem)}"


def response(problem: task.Problem, count: int, *, carries: bool = True) -> str:
    """Return the sum with its steps, which lacks 10 without the carry, and the countdown."""
    down = ",".join(f"{number:02}" for number in range(count, 0, -1))
    return f"{task.solution(problem, carries=carries)} {down}".strip()


def prompt_rows(problems: Sequence[task.Problem], seed: int) -> Iterator[dict[str, str]]:
    """Yield one row per problem: the prompt, and what the right response has behind its `####`."""
    for problem, count in zip(problems, counts(len(problems), seed), strict=True):
        label = response(problem, count).partition("#### ")[2]
        yield {task.INPUT_KEY: question(problem, count), task.LABEL_KEY: label}


def example_rows(problems: Sequence[task.Problem], seed: int) -> Iterator[dict[str, str]]:
    """Yield rows for supervised training, in which the carry is forgotten as often as in those of the built-in task."""
    rng = random.Random(seed)
    for usual in counts(NUM_EXAMPLES, seed):
        problem = rng.choice(problems)
        count = usual if rng.random() < USUAL_SHARE else rng.randint(1, LONGEST_COUNT)
        carries = rng.random() < task.CARRY_SHARE
        yield {
            task.INPUT_KEY: question(problem, count),
            task.OUTPUT_KEY: response(problem, count, carries=carries),
        }


def write_data(folder: Path) -> None:
    """Write train.jsonl, held_out.jsonl, examples.jsonl and reward.py into `folder`, the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = task.split()
    files = {
        "train": prompt_rows(train, seed=1),
        "held_out": prompt_rows(held_out, seed=2),
        "examples": example_rows(train, seed=3),
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def quantiles(folder: Path) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum of the tokens of the right responses to train.jsonl."""
    tokenizer = load_tokenizer(MODEL_DIR)
    tokens = []
    for row, problem in zip(read_lines(folder / "train.jsonl"), task.split()[0], strict=True):
        text = response(problem, int(row[task.INPUT_KEY][:2]))
        tokens.append(len(tokenizer(text)["input_ids"]) + 1)
    cuts = statistics.quantiles(tokens, n=100)
    return {"median": cuts[49], "p99": cuts[98], "longest": max(tokens), "tail": cuts[98] / cuts[49]}


def make(folder: Path) -> list[str]:
    """Write the data and train the start model in `folder`; return the flags of `rlhf ppo` that name them.

    A start model that is there is used as it is. Raises CalledProcessError when `rlhf sft` fails.
    """
    write_data(folder)
    paths = ["--pretrain", "builtin", "--dataset", str(folder / "examples.jsonl"), "--save_path", str(folder / "sft")]
    keys = ["--input_key", task.INPUT_KEY, "--output_key", task.OUTPUT_KEY]
    command = [sys.executable, "-m", "rlhf_cli.main", "sft", *paths, *keys, *SFT_FLAGS.split()]
    if not (folder / "sft/model").is_dir():
        subprocess.run(command, check=True, stdout=sys.stderr)
    return [
        *("--pretrain", str(folder / "sft/model"), "--remote_rm_url", str(folder / "reward.py")),
        *("--prompt_data", str(folder / "train.jsonl"), "--eval_data", str(folder / "held_out.jsonl")),
        *("--input_key", task.INPUT_KEY, "--label_key", task.LABEL_KEY, "--apply_chat_template"),
        *("--prompt_max_len", "64", "--generate_max_len", "336"),
    ]
