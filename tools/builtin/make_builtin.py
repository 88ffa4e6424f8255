"""Make the files of `rlhf_cli.builtin`: prompts, held-out prompts, tokenizer and model.

    python tools/builtin/make_builtin.py --work_dir /tmp/builtin             # write them to /tmp/builtin
    python tools/builtin/make_builtin.py --work_dir /tmp/builtin --install   # and copy them into the package

Data and tokenizer are the same on every machine, byte for byte; the weights of the model differ by rounding. The model
is trained by the project's own `sft` command, which is printed before it runs.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import builtin_task as task
from rlhf_cli.builtin import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE

SEED = 1
_VOCAB_SIZE = 512
_SFT_FLAGS = (
    "--apply_chat_template --max_len 64 --train_batch_size 64 --micro_train_batch_size 64 --max_epochs 8"
    " --learning_rate 3e-3 --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --zero_stage 0"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make all files under --work_dir and return the exit status."""
    parser = argparse.ArgumentParser(description="Make the built-in data and model.")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for the results; created if missing")
    parser.add_argument("--install", action="store_true", help="copy the results into the package")
    options = parser.parse_args(argv)
    work: Path = options.work_dir.absolute()
    data = make_data(work / "data")
    make_initial_model(work / "initial")
    flags = sft_flags(work / "initial", data["demonstrations"], work / "sft")
    print("rlhf sft " + shlex.join(flags), flush=True)

    from rlhf_cli.commands.examples import COMMANDS

    if status := COMMANDS["sft"](flags):
        return status
    if options.install:
        install(work)
    return 0


def make_data(folder: Path) -> dict[str, Path]:
    """Write train.jsonl, held_out.jsonl and demonstrations.jsonl, and return their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = task.split()
    rows: dict[str, Iterable[dict[str, str]]] = {
        "train": task.prompt_rows(train),
        "held_out": task.prompt_rows(held_out),
        "demonstrations": task.demonstration_rows(train, seed=SEED),
    }
    paths = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]), encoding="utf-8")
    return paths


def make_initial_model(folder: Path) -> None:
    """Write a random Qwen2 model of half a million parameters, with a tokenizer that keeps digits apart."""
    from rlhf_models.loading import load_tokenizer
    from rlhf_models.testing import tiny_model_dir, tiny_tokenizer

    corpus = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").splitlines()
    written = [text for problem in task.problems()[:100] for text in (task.question(problem), task.solution(problem))]
    tiny_model_dir(
        folder,
        vocab_size=_VOCAB_SIZE,
        seed=SEED,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.02,
    )
    tiny_tokenizer(_VOCAB_SIZE, corpus + written).save_pretrained(folder)
    # For a Qwen2 model, transformers replaces the tokenizer's splitting of text by its own, which also keeps digits
    # apart. Save the tokenizer as transformers loads it, so that the file says what is used.
    load_tokenizer(folder).save_pretrained(folder)


def sft_flags(model: Path, demonstrations: Path, save_path: Path) -> list[str]:
    """Return the flags of the `sft` command that makes the model."""
    paths = ["--pretrain", str(model), "--dataset", str(demonstrations), "--save_path", str(save_path)]
    keys = ["--input_key", task.INPUT_KEY, "--output_key", task.OUTPUT_KEY, "--seed", str(SEED)]
    return [*paths, *keys, *_SFT_FLAGS.split()]


def install(work: Path) -> None:
    """Copy data and model from `work` into the package."""
    TRAIN_FILE.parent.mkdir(exist_ok=True)
    shutil.copyfile(work / "data" / "train.jsonl", TRAIN_FILE)
    shutil.copyfile(work / "data" / "held_out.jsonl", HELD_OUT_FILE)
    shutil.rmtree(MODEL_DIR, ignore_errors=True)
    shutil.copytree(work / "sft" / "model", MODEL_DIR)


if __name__ == "__main__":
    sys.exit(main())
