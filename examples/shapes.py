r"""Draw pictures of shapes, ask about their colour, their number and their side, and score the answers.

    python examples/shapes.py shapes
    rlhf sft --pretrain HuggingFaceTB/SmolVLM-256M-Instruct --dataset shapes/train.jsonl --output_key label \
      --image_key images --apply_chat_template --max_len 2048 --save_path told
    rlhf ppo --pretrain told/model --image_key images --apply_chat_template --prompt_data shapes/train.jsonl \
      --label_key label --remote_rm_url examples/shapes.py --eval_data shapes/held_out.jsonl \
      --advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 8 --rollout_batch_size 64 \
      --train_batch_size 512 --prompt_max_len 2048 --generate_max_len 8 --bf16

An answer is right if it is the one word or number that was asked for.
"""

import argparse
import json
import random
from pathlib import Path

COLOURS = {"red": (220, 30, 30), "green": (30, 170, 30), "blue": (30, 60, 220), "yellow": (230, 210, 20)}
KINDS = ("square", "circle")
SIDES = ("left", "right")
QUESTIONS = {
    "colour": "Which colour are the shapes? Answer with one word.",
    "number": "How many shapes are there? Answer with one number.",
    "side": "On which side are the shapes, left or right? Answer with one word.",
}
MOST = 4  # shapes in a picture: as many as fit into one half, below each other


def draw(rng, size):
    """Return a picture with one to four shapes of one colour in its left or right half, and what is to see there."""
    from PIL import Image, ImageDraw

    colour, kind, side = rng.choice([*COLOURS]), rng.choice(KINDS), rng.choice(SIDES)
    number = rng.randint(1, MOST)
    picture = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(picture)
    row, half = size // MOST, size // 2
    width = 3 * row // 4
    for place in rng.sample(range(MOST), number):
        x = rng.randint(0, half - width) + (half if side == "right" else 0)
        y = rng.randint(0, row - width) + row * place
        shape = pen.rectangle if kind == "square" else pen.ellipse
        shape((x, y, x + width - 1, y + width - 1), fill=COLOURS[colour])
    return picture, {"colour": colour, "number": str(number), "side": side}


def rows(folder, name, number, size, seed):
    """Draw pictures into `folder`, and yield rows with `input`, `label` and `images`, a path relative to `folder`."""
    rng = random.Random(seed)
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        picture, seen = draw(rng, size)
        path = pictures / f"{name}-{index}.png"
        picture.save(path)
        asked = rng.choice([*QUESTIONS])
        yield {"input": QUESTIONS[asked], "label": seen[asked], "images": [f"{pictures.name}/{path.name}"]}


def reward_func(queries, prompts, labels):
    """Return 1 for each right answer, and 0 for others."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    right = [answer.strip().rstrip(".").lower() == label for answer, label in zip(answers, labels, strict=True)]
    return {"rewards": [float(each) for each in right]}


def main(folder, train, held_out, size):
    """Write train.jsonl and held_out.jsonl, with other pictures."""
    for name, number, seed in (("train", train, 1), ("held_out", held_out, 2)):
        lines = [json.dumps(row) + "\n" for row in rows(folder, name, number, size, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files and the pictures are written")
    parser.add_argument("--train", type=int, default=4000, help="rows of train.jsonl")
    parser.add_argument("--held_out", type=int, default=300, help="rows of held_out.jsonl")
    parser.add_argument("--size", type=int, default=128, help="pixels of a picture's side")
    given = parser.parse_args()
    main(given.folder, given.train, given.held_out, given.size)
