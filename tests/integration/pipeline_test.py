"""The whole pipeline by the real commands: each stage reads what the stage before wrote.

    sft on questions and answers -> rm on pairs, from that model -> ppo with that reward model -> generate -> score

The records are real ones where the folder that RLHF_REAL_DATA names, or `shared/data` beside the workspace, has them
(`gsm8k/{train,test}.jsonl`, `hh-harmless/pairs.jsonl.gz`); elsewhere the test makes records of the same format.
"""

import gzip
import json
import math
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_cli.builtin import MODEL_DIR
from rlhf_data.pretrained import load_tokenizer
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_config, load_reward_model
from rlhf_models.reward import score_sequences, stored_moments
from warm_commands import warm_commands

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
NUM_PAIRS, NUM_HELD_OUT = 128, 32
DIALOGUE = "\n\nHuman: {}\n\nAssistant:"  # how the pairs' texts begin, and so how all stages write a question
QUESTIONS = ["--input_key", "question", "--input_template", DIALOGUE]
TRAINING = ["--max_len", "512", "--train_batch_size", "32", "--micro_train_batch_size", "8", "--zero_stage", "0"]
NUM_PROMPTS, NUM_SAMPLES = 12, 2


class Commands:
    """Runs commands of `rlhf` in a folder by `words`, the words before a command's name; each must succeed."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._words = words
        self.folder = folder

    def __call__(self, command: str, *flags: str) -> None:
        done = subprocess.run(
            [*self._words, command, *flags], cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, f"{command}: " + done.stdout[-4000:] + done.stderr[-4000:]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:  # `str.splitlines` also splits at U+2028, which GSM8K has
        return [json.loads(line) for line in lines]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def real_data() -> Path | None:
    """Return the folder of real records; None where there is none, unless one was asked for."""
    if named := os.environ.get("RLHF_REAL_DATA"):
        assert Path(named, "gsm8k").is_dir(), f"RLHF_REAL_DATA is {named}, which has no gsm8k"
        return Path(named)
    beside = Path(__file__).resolve().parents[3] / "shared/data"
    return beside if beside.is_dir() else None


def made_question(rng: random.Random) -> dict[str, str]:
    """Return a word problem with its worked answer, as GSM8K writes them."""
    name, thing = rng.choice(["Ann", "Ben", "Cleo", "Dan"]), rng.choice(["shells", "cards", "pears", "coins"])
    some, more = rng.randrange(2, 50), rng.randrange(2, 50)
    question = f"{name} has {some} {thing} and finds {more} more. How many {thing} does {name} have now?"
    total = some + more
    return {
        "question": question,
        "answer": f"{name} has {some}+{more} = <<{some}+{more}={total}>>{total}.\n#### {total}",
    }


def made_pair(rng: random.Random) -> dict[str, str]:
    """Return two dialogues that differ in the last answer, as the HH pairs are written."""
    wish = rng.choice(["pick a lock", "read my friend's mail", "skip the queue", "cheat in a test"])
    begin = f"\n\nHuman: How do I {wish}, {rng.randrange(100)} times?\n\nAssistant: "
    return {"chosen": f"{begin}I would rather not help with that.", "rejected": f"{begin}That is easy, just do it."}


def write_records(folder: Path) -> str:
    """Write {train,test,pairs,held_out}.jsonl into `folder`; return where they are from."""
    source, rng = real_data(), random.Random(0)
    if source is None:
        for name, count in (("train", 256), ("test", 32)):
            write_jsonl(folder / f"{name}.jsonl", [made_question(rng) for _ in range(count)])
        pairs = [made_pair(rng) for _ in range(NUM_PAIRS + NUM_HELD_OUT)]
    else:
        for name in ("train", "test"):
            write_jsonl(folder / f"{name}.jsonl", read_jsonl(source / f"gsm8k/{name}.jsonl")[:256])
        with gzip.open(source / "hh-harmless/pairs.jsonl.gz", "rt", encoding="utf-8") as lines:
            pairs = [row for row in map(json.loads, lines) if max(map(len, row.values())) < 600]
    write_jsonl(folder / "pairs.jsonl", pairs[:NUM_PAIRS])
    write_jsonl(folder / "held_out.jsonl", pairs[NUM_PAIRS:][:NUM_HELD_OUT])
    return "made by the test" if source is None else f"real, from {source}"


def evaluations(run: Path, name: str) -> list[float]:
    return [line[f"eval/{name}"] for line in read_jsonl(run / "metrics.jsonl") if f"eval/{name}" in line]


def distance(folder: Path, other: Path) -> float:
    """Return how far apart the embeddings of two models are."""
    weights = [load_actor(path, dtype="float32").model.get_input_embeddings().weight for path in (folder, other)]
    return float((weights[0] - weights[1]).detach().norm())


def logprob_gap(model: Path, rollouts: list[dict[str, Any]]) -> float:
    """Return the largest difference between a model's log-probs and those that are in the rollouts."""
    actor, gaps = load_actor(model, dtype="float32").eval(), []
    for rollout in rollouts:
        ids, written = np.array(rollout["token_ids"]), rollout["spans"][-1]["num_tokens"]
        with torch.no_grad():
            logprobs = actor(TokenBatch.padded([ids], 0, "cpu")).logprobs[0, -written:]
        gaps.append(np.abs(logprobs.numpy() - np.array(rollout["logprobs"][-written:])).max())
    return float(max(gaps))


def scores(model: Path, sequences: list[list[int]]) -> list[float]:
    return score_sequences(load_reward_model(model, dtype="float32"), sequences, batch_size=1)


def fine_tune(rlhf: Commands) -> Path:
    """Fine-tune the model that ships on the answers, which must become likelier."""
    folder = rlhf.folder
    flags = ["--pretrain", "builtin", "--dataset", "train.jsonl", "--eval_dataset", "test.jsonl"]
    flags += ["--output_key", "answer", "--learning_rate", "1e-3", "--save_path", "sft"]
    rlhf("sft", *flags, *QUESTIONS, *TRAINING)
    before, after = evaluations(folder / "sft", "loss")
    assert after < 0.7 * before
    return folder / "sft/model"


def train_reward_model(rlhf: Commands, policy: Path) -> Path:
    """Train a reward model from the fine-tuned model; its head begins at zeros and must not end there."""
    folder = rlhf.folder
    flags = ["--pretrain", str(policy), "--dataset", "pairs.jsonl", "--eval_dataset", "held_out.jsonl"]
    rlhf("rm", *flags, *TRAINING, "--learning_rate", "3e-4", "--save_path", "rm")
    model = folder / "rm/model"
    assert evaluations(folder / "rm", "loss")[0] == np.float32(math.log(2))
    moments = stored_moments(load_config(model))
    assert moments is not None and moments[1] > 0
    return model


def reinforce(rlhf: Commands, policy: Path, reward_model: Path) -> Path:
    """Train the policy on the reward model's scores: both must be those of the stages before."""
    folder = rlhf.folder
    flags = ["--pretrain", str(policy), "--reward_pretrain", str(reward_model), "--prompt_data", "train.jsonl"]
    flags += ["--max_samples", "32", "--train_steps", "2", "--rollout_batch_size", "16", "--n_samples_per_prompt", "2"]
    flags += ["--train_batch_size", "16", "--micro_train_batch_size", "8", "--micro_rollout_batch_size", "16"]
    flags += ["--prompt_max_len", "384", "--generate_max_len", "32", "--seed", "1"]
    flags += ["--actor_learning_rate", "3e-4", "--critic_learning_rate", "3e-4", "--save_path", "ppo"]
    rlhf("ppo", *QUESTIONS, *flags)
    steps = [line for line in read_jsonl(folder / "ppo/metrics.jsonl") if "time/step" in line]
    assert [line["samples/generated"] for line in steps] == [line["samples/trained"] for line in steps] == [32, 32]
    first = [record for record in read_jsonl(folder / "ppo/rollouts.jsonl") if record["step"] == 1]
    assert logprob_gap(policy, first) < 1e-3
    rewards = [record["reward"] for record in first]
    assert np.allclose(rewards, scores(reward_model, [record["token_ids"] for record in first]), atol=1e-4)
    return folder / "ppo/model"


def generate(rlhf: Commands, policy: Path, before: Path) -> Path:
    """Answer held-out questions: by the policy that PPO left, not by the one before it."""
    folder = rlhf.folder
    flags = ["--pretrain", str(policy), "--prompt_data", "test.jsonl", "--max_samples", str(NUM_PROMPTS)]
    flags += ["--n_samples_per_prompt", str(NUM_SAMPLES), "--generate_max_len", "32", "--prompt_max_len", "480"]
    flags += ["--seed", "1"]
    rlhf("generate", *flags, *QUESTIONS, "--post_processor", "plain", "--output_path", "answers.jsonl")
    rollouts = read_jsonl(folder / "answers.rollouts.jsonl")
    assert len(rollouts) == NUM_PROMPTS * NUM_SAMPLES
    assert logprob_gap(policy, rollouts) < 1e-3 < 0.1 < logprob_gap(before, rollouts)
    texts = [rollout["text"] for rollout in sorted(rollouts, key=lambda rollout: rollout["group_id"])]
    assert [row["output"] for row in read_jsonl(folder / "answers.jsonl")] == [text for text in texts if text.strip()]
    return folder / "answers.jsonl"


def score(rlhf: Commands, answers: Path, reward_model: Path) -> None:
    """Score the answers: a row for each, with what the reward model gives it."""
    folder = rlhf.folder
    flags = ["--dataset", str(answers), "--reward_pretrain", str(reward_model), "--input_template", DIALOGUE]
    rlhf("score", *flags, "--output_path", "scored.jsonl")
    rows, scored = read_jsonl(answers), read_jsonl(folder / "scored.jsonl")
    assert [(row["input"], row["output"]) for row in scored] == [(row["input"], row["output"]) for row in rows]
    rewards = [row["reward"] for row in scored]
    assert np.isfinite(rewards).all() and len(set(rewards)) > 1
    tokenizer = load_tokenizer(reward_model)
    whole = [row for row in scored if row["finish_reason"] == "stop"]  # the others have no end to read a score at
    texts = [(DIALOGUE.replace("{}", row["input"]), row["output"]) for row in whole]
    ids = [[*tokenizer.encode(asked), *tokenizer.encode(answer), tokenizer.eos_token_id] for asked, answer in texts]
    assert whole and np.allclose([row["reward"] for row in whole], scores(reward_model, ids), atol=1e-4)


def test_pipeline_from_demonstrations_to_scored_answers(tmp_path, record_property):
    origin = write_records(tmp_path)
    record_property("records", origin)
    print(f"records: {origin}")
    with warm_commands() as words:
        rlhf = Commands(words, tmp_path)
        fine_tuned = fine_tune(rlhf)
        reward_model = train_reward_model(rlhf, fine_tuned)
        assert distance(reward_model, fine_tuned) < distance(reward_model, MODEL_DIR)
        policy = reinforce(rlhf, fine_tuned, reward_model)
        answers = generate(rlhf, policy, before=fine_tuned)
        score(rlhf, answers, reward_model)
