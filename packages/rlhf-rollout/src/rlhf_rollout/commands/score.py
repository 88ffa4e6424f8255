"""Rewards of answers that are in a file: one an answer, or two a pair and how often the preferred one has more."""

import argparse
import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.chat import Tokenizer
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.preference import PreferenceEncoder
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_data.rows import Row, RowErrors
from rlhf_data.sft import SftEncoder, SftExample
from rlhf_data.sources import Rows, open_sources
from rlhf_rollout.commands.from_options import needed_sources, open_reward, reward_tokenizer, say, write_rows
from rlhf_rollout.rewards import RewardSource

_NUM_AT_ONCE = 1024

Sample = tuple[Prompt, Rollout]


def score(options: argparse.Namespace) -> int:
    """Run `rlhf-rollout score`."""
    out = Path(options.out)
    if out.exists() and not options.overwrite:
        raise ConfigError(f"{out} exists", hint="give another --out, or --overwrite")
    sources = needed_sources(options)
    rows = open_sources(options.dataset, max_samples=options.max_samples)
    tokenizer = reward_tokenizer(options, sources)
    reader = _Reader(options, rows, tokenizer)
    scored = asyncio.run(_score(options, sources, reader))
    write_rows(out, scored)
    reader.tell()
    _tell(scored, pairs=options.chosen_key is not None)
    say(f"{len(scored)} rows written to {out}")
    return 0


class _Reader:
    """Reads rows as prompts with answers, one answer a row or two, and counts those that are left out."""

    def __init__(self, options: argparse.Namespace, rows: Rows, tokenizer: Tokenizer) -> None:
        common = {
            "tokenizer": tokenizer,
            "apply_chat_template": options.apply_chat_template,
            "input_template": options.input_template,
        }
        if options.chosen_key is None:
            self._encoder: Any = SftEncoder(input_key=options.input_key, output_key=options.output_key, **common)
        else:
            keys = {"chosen_key": options.chosen_key, "rejected_key": options.rejected_key}
            self._encoder = PreferenceEncoder(prompt_key=options.prompt_key, **keys, **common)
        self._options, self._rows, self.tokenizer = options, rows, tokenizer
        self._errors = RowErrors(skip_bad_rows=options.skip_bad_rows)
        self._num_rows = self._num_too_long = 0

    def __iter__(self) -> Iterator[tuple[Row, list[Sample]]]:
        for row in self._rows.read(self._errors):
            try:
                example = self._encoder(row)
                label = None if self._options.label_key is None else row.label(self._options.label_key)
            except DataError as error:
                self._check_no_pair(row)
                self._errors.add(error)
                continue
            self._num_rows += 1
            answers = [example] if isinstance(example, SftExample) else [example.chosen, example.rejected]
            if max(answer.num_tokens for answer in answers) > self._options.max_len:
                self._num_too_long += 1
            else:
                yield row, [self._sample(answer, label) for answer in answers]
        self._errors.check(self._num_rows + self._errors.num_bad)

    def _check_no_pair(self, row: Row) -> None:
        """Tell a file of pairs that is read as one of answers, which would be wrong in every row."""
        keys = [key for key in ("chosen", "rejected") if key in row.values]
        if self._options.chosen_key is None and len(keys) == 2:
            keys += ["prompt"] if "prompt" in row.values else []
            hint = "give " + " ".join(f"--{key}_key {key}" for key in keys)
            raise ConfigError(f"{row.origin} is no answer but a pair of answers: {', '.join(row.values)}", hint=hint)

    def tell(self) -> None:
        """Say what was left out."""
        if self._num_too_long:
            say(f"{self._num_too_long} of {self._num_rows} rows left out as too long")
        if self._errors.num_bad:
            say(f"{self._errors.num_bad} rows cannot be used, such as {self._errors.first[0]}")

    def _sample(self, example: SftExample, label: str | None) -> Sample:
        first = int(example.loss_mask.argmax())
        asked, answer = example.token_ids[:first], example.token_ids[first:]
        # What a chat template has written belongs to the prompt's text, as it does in generation.
        plain = not self._options.apply_chat_template
        text = self.tokenizer.decode(asked, skip_special_tokens=plain)
        spans = (Span(SpanSource.PROMPT, asked), Span(SpanSource.POLICY, answer, np.zeros(len(answer)), 0))
        name, response = example.example_id, self.tokenizer.decode(answer, skip_special_tokens=True)
        return Prompt(name, asked, text, label), Rollout(name, name, spans, FinishReason.STOP, response)


async def _score(options: argparse.Namespace, sources: Sequence[RewardSource], reader: _Reader) -> list[dict[str, Any]]:
    scored = []
    async with contextlib.AsyncExitStack() as stack:
        reward = open_reward(options, sources, reader.tokenizer, stack)
        samples = iter(reader)
        while batch := list(itertools.islice(samples, _NUM_AT_ONCE)):
            calls = [reward.score(prompt, [answer]) for _, answers in batch for prompt, answer in answers]
            verdicts = iter([verdict for [verdict] in await asyncio.gather(*calls)])
            for row, answers in batch:
                columns = dict(row.values)
                for prefix in [""] if len(answers) == 1 else ["chosen_", "rejected_"]:
                    columns |= _columns(prefix, next(verdicts))
                scored.append(columns)
    return scored


def _columns(prefix: str, verdict: Verdict) -> dict[str, Any]:
    values = {"reward": verdict.reward, "score": verdict.score, "verdict": str(verdict.kind), **verdict.extra}
    return {prefix + name: value for name, value in values.items()}


def _tell(scored: Sequence[dict[str, Any]], *, pairs: bool) -> None:
    names = ("chosen_reward", "rejected_reward") if pairs else ("reward",)
    whole = [row for row in scored if all(row[name] is not None for name in names)]
    if len(whole) < len(scored):
        say(f"{len(scored) - len(whole)} rows have no reward: the scorer failed")
    for name in names if whole else ():
        values = np.array([row[name] for row in whole])
        say(f"{name}: mean {values.mean():.4f}, deviation {values.std():.4f}")
    if pairs and whole:
        right = [float(np.sign(row["chosen_reward"] - row["rejected_reward"]) + 1) / 2 for row in whole]
        say(f"accuracy {np.mean(right):.4f} of {len(whole)} pairs (a tie counts half)")
