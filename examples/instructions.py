r"""Write prompts whose answers can be checked by rule, and score the answers: a sentence, and demands on its form.

    python examples/instructions.py train.jsonl held_out.jsonl
    rlhf ppo --pretrain HuggingFaceTB/SmolLM2-135M-Instruct --apply_chat_template --prompt_data train.jsonl \
      --label_key label --remote_rm_url examples/instructions.py --eval_data held_out.jsonl --eval_steps 10 \
      --eval_temperature 0 --advantage_estimator group_norm --init_kl_coef 0 --rollout_batch_size 64 \
      --n_samples_per_prompt 8 --train_batch_size 512 --train_steps 60 --prompt_max_len 128 --generate_max_len 64 \
      --actor_learning_rate 2e-5 --lr_scheduler constant --bf16 --packing_samples --micro_batch_tokens 16384 \
      --colocate_all_models

Write one sentence about rivers. Use exactly 9 words. End with the word "indeed".

The subjects of the held-out prompts are in no training prompt. An answer is right if it names the subject and meets all
demands. The reward is the share of these that it meets, so that a model that seldom meets them all can begin to learn.
"""

import argparse
import json
import random
import re
from pathlib import Path

SUBJECTS = [
    "rivers",
    "bread",
    "clocks",
    "horses",
    "bridges",
    "winter",
    "music",
    "gardens",
    "books",
    "trains",
    "islands",
    "coffee",
    "dreams",
    "maps",
    "wolves",
    "candles",
    "rain",
    "schools",
    "mirrors",
    "apples",
    "ships",
    "deserts",
    "glass",
    "bees",
    "castles",
    "snow",
    "poems",
    "engines",
    "markets",
    "owls",
    "forests",
    "letters",
    "salt",
    "games",
    "towers",
    "tea",
    "storms",
    "shoes",
    "birds",
    "stars",
]
HELD_OUT_SUBJECTS = [
    "lamps",
    "whales",
    "mountains",
    "paper",
    "violins",
    "spiders",
    "kitchens",
    "wheels",
    "clouds",
    "doctors",
]
# What is asked for, with its values: the text behind the subject, and whether an answer does it.
DEMANDS = {
    "words": (range(6, 16), "Use exactly {} words.", lambda text, number: len(text.split()) == number),
    "end": (
        ["indeed", "always", "today", "people", "forever", "again"],
        'End with the word "{}".',
        lambda text, word: re.sub(r"\W+$", "", text).split()[-1:] == [word],
    ),
    "begin": (
        ["Perhaps", "Everyone", "Sometimes", "Truly", "Nobody", "Often"],
        'Begin with the word "{}".',
        lambda text, word: re.match(rf"{word}\b", text) is not None,
    ),
    "without": (
        ["a", "i", "o", "s", "t"],
        'Do not use the letter "{}".',
        lambda text, letter: letter not in text.lower(),
    ),
    "twice": (
        ["very", "old", "slowly", "bright", "small"],
        'Use the word "{}" exactly twice.',
        lambda text, word: len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) == 2,
    ),
    "case": (["capital", "small"], "Write only in {} letters.", lambda text, case: text == _in_case(text, case)),
}


def _in_case(text, case):
    return text.upper() if case == "capital" else text.lower()


def contradict(demands, subject):
    """Return whether demands do not go together: a word to write has the letter to leave out, or the other case."""
    words = [value for name, value in demands.items() if name in ("end", "begin", "twice")]
    if "without" in demands:
        return any(demands["without"] in word.lower() for word in [subject, *words])
    return "case" in demands and any(word != _in_case(word, demands["case"]) for word in words)


def prompts(subjects, number, seed):
    """Yield rows with `input` and `label`, none twice: each has a subject and one or two demands, drawn at random."""
    rng = random.Random(seed)
    seen = set()
    while len(seen) < number:
        subject = rng.choice(subjects)
        demands = {name: rng.choice(DEMANDS[name][0]) for name in rng.sample(list(DEMANDS), rng.randint(1, 2))}
        asked = " ".join(DEMANDS[name][1].format(value) for name, value in demands.items())
        text = f"Write one sentence about {subject}. {asked}"
        if text in seen or contradict(demands, subject):
            continue
        seen.add(text)
        yield {"input": text, "label": json.dumps({"subject": subject, "demands": demands})}


def met(text, label):
    """Return what an answer meets: the subject first, then each demand."""
    wanted = json.loads(label)
    named = wanted["subject"].removesuffix("s") in text.lower()
    return [named, *(DEMANDS[name][2](text, value) for name, value in wanted["demands"].items())]


def reward_func(queries, prompts, labels):
    """Score responses: the share of what is met, and 1 or 0 for all of it."""
    responses = [query[len(prompt) :].strip() for query, prompt in zip(queries, prompts, strict=True)]
    found = [met(response, label) for response, label in zip(responses, labels, strict=True)]
    rewards = [sum(each) / len(each) for each in found]
    return {"rewards": rewards, "scores": [float(all(each)) for each in found]}


def main(train, held_out):
    """Write 4,000 prompts for training and 300 about other subjects."""
    for path, subjects, number, seed in ((train, SUBJECTS, 4000, 1), (held_out, HELD_OUT_SUBJECTS, 300, 2)):
        rows = (json.dumps(row) + "\n" for row in prompts(subjects, number, seed))
        Path(path).write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="file of the 4,000 prompts for training")
    parser.add_argument("held_out", help="file of the 300 prompts about other subjects")
    files = parser.parse_args()
    main(files.train, files.held_out)
