"""Responses to a file of prompts, and the training data that they make; a run that was stopped goes on.

Rollouts are written as they come. Training data is made of them at the end, so that it is whole or not there.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, DataError, unknown
from rlhf_data.prompts import PromptSet, load_prompts
from rlhf_data.records import FinishReason
from rlhf_data.rows import RowErrors
from rlhf_data.sources import open_sources, parse_probs
from rlhf_rollout.commands.from_options import (
    engine_spec,
    engine_tokenizer,
    open_reward,
    reward_sources,
    sampling_params,
    say,
    write_rows,
)
from rlhf_rollout.commands.main import POST_PROCESSORS
from rlhf_rollout.engines import build_engine
from rlhf_rollout.generator import GenerationCounts, generate_groups
from rlhf_rollout.records_io import RolloutWriter
from rlhf_rollout.rewards import RewardSource, check_reward

_NUM_SHOWN_FAILURES = 3
_PROGRESS_INTERVAL_S = 5.0
_SETTINGS = ("engine", "model", "tokenizer", "dtype", "num_samples", "max_tokens", "temperature", "top_p", "top_k")
_SETTINGS += ("seed", "reward", "reward_pretrain", "reward_weights", "normalize_reward")

Record = dict[str, Any]


def generate(options: argparse.Namespace) -> int:
    """Run `rlhf-rollout generate`."""
    out = Path(options.out)
    rollouts = out if options.post_processor == "rollouts" else out.with_suffix(".rollouts.jsonl")
    sources = reward_sources(options)
    _check(options, sources, (out, rollouts))
    task = _Task(options, sources, rollouts)
    for source in sources:
        if problem := check_reward(source, task.prompts[:4], timeout_s=options.reward_timeout_s):
            say(f"warning: the reward {source.kind} failed a trial call: {problem}")
    status = asyncio.run(_write_rollouts(task)) if len(task.done) < len(task.prompts) else 0
    if rollouts != out:
        num_rows = write_rows(out, training_rows(rollouts, options))
        say(f"{options.post_processor}: {num_rows} rows of {len(task.prompts)} prompts written to {out}")
    return status


def _check(options: argparse.Namespace, sources: Sequence[RewardSource], files: Sequence[Path]) -> None:
    kind = options.post_processor
    if kind not in POST_PROCESSORS:
        raise ConfigError(unknown("post-processor", kind, POST_PROCESSORS))
    if options.overwrite and options.resume:
        raise ConfigError("--overwrite and --resume: a file is either replaced or gone on with")
    for path in files:
        if path.exists() and not (options.overwrite or options.resume):
            raise ConfigError(f"{path} exists", hint="give another --out, or --overwrite, or --resume to go on")
    if not sources and kind not in ("rollouts", "plain"):
        hint = "give --reward_pretrain DIR, or --reward FILE.py"
        raise ConfigError(f"--post_processor {kind} needs a reward", hint=hint)
    if kind in ("best_of_n", "iter_dpo") and options.num_samples < 2:
        raise ConfigError(f"--post_processor {kind} compares responses to a prompt", hint="give --num_samples 4")
    if options.min_reward is not None and kind != "rs":
        raise ConfigError("--min_reward has no effect", hint="it goes with --post_processor rs")
    if kind == "csft" and not all(options.reward_template.count(part) == 1 for part in ("{input}", "{reward}")):
        raise ConfigError(f"--reward_template must hold {{input}} and {{reward}} once, got {options.reward_template!r}")


class _Task:
    """What there is to generate: `done` are the numbers of the prompts whose rollouts are in the file, and `run`, in
    each of its records, names the settings."""

    def __init__(self, options: argparse.Namespace, sources: Sequence[RewardSource], rollouts: Path) -> None:
        self.options, self.sources, self.rollouts = options, sources, rollouts
        self.spec, self.sampling = engine_spec(options), sampling_params(options, options.num_samples)
        probs = parse_probs("prompt_data_probs", options.prompt_data_probs)
        rows = open_sources(options.prompts, probs=probs, seed=options.seed or 0, max_samples=options.max_samples)
        self.tokenizer = engine_tokenizer(options)
        self.prompts = load_prompts(
            rows,
            self.tokenizer,
            input_key=options.input_key,
            label_key=options.label_key,
            apply_chat_template=options.apply_chat_template,
            input_template=options.input_template,
            prompt_max_len=options.prompt_max_len,
            skip_bad_rows=options.skip_bad_rows,
        )
        say(self.prompts.summary)
        # The rows of the prompts: the same ones, in the same order, without those that were left out.
        kept = iter(rows.read(RowErrors(skip_bad_rows=True)))
        found = (next(row for row in kept if row.row_id == prompt.prompt_id) for prompt in self.prompts)
        self.inputs: list[Any] = [row.cell(options.input_key) for row in found]
        if options.post_processor == "csft" and not all(isinstance(value, str) for value in self.inputs):
            raise DataError("conditional SFT writes the reward into the input, which must be text")
        self.run, self.done = _digest(options, self.prompts), frozenset[int]()
        if options.resume and rollouts.exists():
            self.done = take_up(rollouts, self.run, options.num_samples)
            say(f"{len(self.done)} of {len(self.prompts)} prompts are done already")


def _digest(options: argparse.Namespace, prompts: PromptSet) -> str:
    """Return a name of all that decides what the rollouts are."""
    settings = [(name, getattr(options, name)) for name in _SETTINGS]
    asked = [(prompt.prompt_id, prompt.token_ids.tobytes(), prompt.label) for prompt in prompts]
    return hashlib.sha256(repr((settings, asked)).encode()).hexdigest()[:16]


def take_up(path: Path, run: str, num_samples: int) -> frozenset[int]:
    """Cut a file of rollouts behind its last whole group; return the numbers of the groups in it. Raises ConfigError
    when it was written with other settings, DataError when it holds something else than rollouts."""
    done, size, offset, count = set(), 0, 0, 0
    with path.open("rb+") as file:
        for line in file:
            offset += len(line)
            if not line.endswith(b"\n"):  # the process was killed as it wrote
                break
            try:
                record = json.loads(line)
                number, found = int(record["group_id"].rpartition("/")[2]), record["run"]
            except (ValueError, KeyError, TypeError, AttributeError):
                message = f"{path}: {line[:60]!r} is no record of a run that can be gone on with"
                raise DataError(message, hint="give another --out, or --overwrite") from None
            if found != run:
                message = f"{path} was written with another model, other prompts, sampling or rewards"
                raise ConfigError(message, hint="repeat its options, or give another --out")
            count += 1
            if count == num_samples:
                done.add(number)
                size, count = offset, 0
        file.truncate(size)
    return frozenset(done)


async def _write_rollouts(task: _Task) -> int:
    options, counts = task.options, GenerationCounts()
    failures, rewards, num_cut = [], [], 0
    started = told = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        reward = open_reward(options, task.sources, task.tokenizer, stack) if task.sources else None
        engine = build_engine(options.engine, task.spec)
        stack.push_async_callback(engine.close)
        if options.overwrite:
            task.rollouts.unlink(missing_ok=True)
        writer = RolloutWriter(task.rollouts)
        stack.callback(writer.close)
        results = generate_groups(
            task.prompts,
            [engine],
            task.sampling,
            reward,
            max_in_flight=max(1, 2 * options.max_num_seqs // options.num_samples),
            group_id_prefix="generate",
            decode=lambda token_ids: task.tokenizer.decode(token_ids, skip_special_tokens=True),
            counts=counts,
            skip=task.done,
        )
        async for result in results:
            if result.group is None:
                failures.append(f"{result.prompt.prompt_id}: {result.failure}")
            else:
                number = int(result.group_id.rpartition("/")[2])
                writer.write(result.group, run=task.run, input=task.inputs[number])
                num_cut += sum(rollout.finish_reason is FinishReason.LENGTH for rollout in result.group.rollouts)
                rewards += [r.verdict.reward for r in result.group.rollouts if r.verdict and not r.verdict.kind.failed]
            if time.monotonic() - told > _PROGRESS_INTERVAL_S:
                told = time.monotonic()
                num_done = len(task.done) + counts.num_groups + counts.num_failed_groups
                say(f"{num_done} of {len(task.prompts)} prompts")
    say(_summary(counts, rewards, time.monotonic() - started, task.rollouts))
    if num_cut:
        say(f"{num_cut} of {counts.num_generated} rollouts were cut by --max_tokens {options.max_tokens}")
    for failure in failures[:_NUM_SHOWN_FAILURES]:
        say(f"failed: {failure}")
    return 1 if failures else 0


def _summary(counts: GenerationCounts, rewards: Sequence[float], seconds: float, path: Path) -> str:
    tokens_per_s = counts.num_response_tokens / seconds if seconds else 0.0
    lines = [f"{counts.num_generated} rollouts in {seconds:.1f} s, {tokens_per_s:.0f} tokens/s"]
    if counts.num_failed:
        lines.append(f"{counts.num_failed} rollouts failed, of {counts.num_failed_groups} prompts")
    if rewards:
        lines.append(f"mean reward {sum(rewards) / len(rewards):.4f}")
    if counts.verdicts:
        lines.append("verdicts: " + ", ".join(f"{kind} {number}" for kind, number in sorted(counts.verdicts.items())))
    return "\n".join([*lines, f"written to {path}"])


def training_rows(rollouts: Path, options: argparse.Namespace) -> list[Record]:
    """Return what `--post_processor` makes of a file of rollouts, in the order of the prompts."""
    made: dict[str, list[Record]] = {}
    with rollouts.open(encoding="utf-8") as lines:
        for group_id, group in itertools.groupby(map(json.loads, lines), key=itemgetter("group_id")):
            made[group_id] = list(
                post_process(
                    list(group),
                    options.post_processor,
                    min_reward=options.min_reward,
                    reward_template=options.reward_template,
                )
            )
    return [row for group_id in sorted(made) for row in made[group_id]]


def post_process(
    group: Sequence[Record], kind: str, *, min_reward: float | None = None, reward_template: str = "{input}{reward}"
) -> Iterator[Record]:
    """Yield the training rows of one prompt's rollouts.

    An empty response makes no row, and but for "plain" one whose reward failed makes none either. Rows keep the
    `finish_reason`, by which the trainers know an answer that has no end. The input is what the prompt was made of:
    trainers read it with the same chat template or input template.

    Args:
        group: records of `rlhf_rollout.records_io`, with the `input`.
        kind: see `rlhf_rollout.commands.main.POST_PROCESSORS`, but for "rollouts".
        min_reward: what "rs" accepts; None for what has the verdict ok.
        reward_template: of "csft", with {input} and {reward}, of which two decimals are written.
    """
    answers, by_reward = [record for record in group if record["text"].strip()], itemgetter("reward")
    if kind != "plain":
        answers = [record for record in answers if record["reward"] is not None]
    if kind == "best_of_n":
        answers = answers and [max(answers, key=by_reward)]
    elif kind == "rs":
        accepted = [r for r in answers if (r["verdict"] == "ok" if min_reward is None else r["reward"] >= min_reward)]
        first: dict[str, Record] = {}
        for record in accepted:
            first.setdefault(record["text"], record)
        answers = list(first.values())
    elif kind == "iter_dpo":
        # A row says for both answers whether they were cut, and of one that was cut nothing tells how it would end.
        answers = [record for record in answers if record["finish_reason"] == "stop"]
        if answers:
            best, worst = max(answers, key=by_reward), min(answers, key=by_reward)
            high, low = best["reward"], worst["reward"]
            if high > low and best["text"] != worst["text"]:
                pair = {"prompt": best["input"], "chosen": best["text"], "rejected": worst["text"]}
                yield {**pair, "chosen_reward": high, "rejected_reward": low, "margin": high - low}
        return
    for record in answers:
        text = record["input"]
        if kind == "csft":
            # In this order: an input may hold braces.
            text = reward_template.replace("{reward}", f"{record['reward']:.2f}").replace("{input}", text)
        row = {"input": text, "output": record["text"], "reward": record["reward"]}
        yield {**row, "label": record["label"], "finish_reason": record["finish_reason"]}
