"""`score`: rewards the answers in a file. For pairs it also reports how often the preferred answer scores higher."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import PreferenceEncoder
from rlhf_data.examples.sft import SftEncoder, SftExample
from rlhf_data.keys import check_extra_keys, check_section_keys, unread_tools
from rlhf_data.options.declare import matching
from rlhf_data.pretrained import set_chat_template
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_data.rows.row import Row, RowErrors
from rlhf_data.rows.sources import Rows, open_sources
from rlhf_rollout.commands.configs import AnswerSection, ScoreConfig
from rlhf_rollout.commands.parts import RewardJob, check_new_file, is_data_here, write_rows
from rlhf_rollout.commands.post_process import post_process
from rlhf_rollout.commands.terminal import TERMINAL

_NUM_AT_ONCE = 1024  # rows that are scored concurrently

Sample = tuple[Prompt, Rollout]


def run(config: ScoreConfig) -> int:
    """Score every row and write it with its rewards; return 0, or 1 if no row could be scored.

    Raises:
        ConfigError: the output file exists or cannot be written, a model does not exist, or a reward cannot be used.
        DataError: rows cannot be used.
    """
    data = config.data
    output = config.output
    reward = RewardJob(config.reward, config.model.dtype, data.max_len)
    check_new_file(output.path, replace=output.overwrite, hint="give another --output_path, or --overwrite")
    with TERMINAL.progress.doing("reading the rows"):
        reward.check_models()
        rows = _open_rows(config)
        tokenizer = reward.load_tokenizer(config.model.tokenizer)
        set_chat_template(tokenizer, variables=data.chat_template_kwargs)
        reader = _Reader(data, rows, tokenizer, config.reward.extra_names)
        num_rows = sum(1 for _ in rows.read(RowErrors()))
    scored = asyncio.run(_score(reward, reader, num_rows))
    kind = output.post_processor
    num_written = write_rows(output.path, scored if kind == "rows" else _selected(config, scored))
    reader.report()
    num_whole = _report(scored, pairs=data.chosen_key is not None)
    made = "" if kind == "rows" else f"{kind}: "
    TERMINAL.say(f"{made}{num_written} rows written to {output.path}")
    return 1 if scored and not num_whole else 0


def check_data(config: ScoreConfig) -> None:
    """Raise DataError for a source on this machine that cannot be opened, and as `_check_keys` does."""
    if is_data_here("dataset", config.data.dataset):
        _open_rows(config)


def _open_rows(config: ScoreConfig) -> Rows:
    data = config.data
    options = {"max_samples": data.max_samples, "split": data.dataset_split, "preset": data.preset_data}
    rows = open_sources(data.dataset, **options)
    for notice in unread_tools([rows], data):
        TERMINAL.say(f"notice: {notice}")
    _check_keys(data, rows)
    check_extra_keys(rows, config.reward.extra_names)
    return rows


def _check_keys(data: AnswerSection, rows: Rows) -> None:
    """Raise DataError for a key that rows lack, and ConfigError for pairs of answers where one answer is expected."""
    is_paired = data.chosen_key is not None
    row = next(rows.read(RowErrors()), None)
    is_pair = row is not None and {"chosen", "rejected"} <= row.values.keys()
    if is_pair and not is_paired and data.input_key not in row.values:
        hint = "give " + " ".join(f"--{key}_key {key}" for key in ("chosen", "rejected", "prompt") if key in row.values)
        problem = f"{row.origin} holds a pair of answers, not one answer: {', '.join(row.values)}"
        raise ConfigError(problem, hint=hint)
    names = ("prompt_key", "chosen_key", "rejected_key") if is_paired else ("input_key", "output_key")
    check_section_keys(data, rows, (*names, "label_key", "tools_key"))


class _Reader:
    """Reads rows as prompts with one or two answers, and counts the rows that are left out."""

    def __init__(self, data: AnswerSection, rows: Rows, tokenizer: Tokenizer, extra_keys: Sequence[str]) -> None:
        kind = SftEncoder if data.chosen_key is None else PreferenceEncoder
        self._encoder: Any = kind(tokenizer=tokenizer, **matching(kind, data))
        self._data = data
        self._rows = rows
        self._extra_keys = extra_keys
        self.tokenizer = tokenizer
        self._errors = RowErrors(skip_bad_rows=data.skip_bad_rows)
        self._num_rows = self._num_too_long = 0
        self.num_answers = 1 if data.chosen_key is None else 2  # per row
        self.num_left_out = 0

    def __iter__(self) -> Iterator[tuple[Row, list[Sample]]]:
        for row in self._rows.read(self._errors):
            try:
                example = self._encoder(row)
                label = None if self._data.label_key is None else row.label(self._data.label_key)
                extra = {key: row.plain(key) for key in self._extra_keys}
            except DataError as error:
                self._errors.add(error)
                self.num_left_out += 1
                continue
            self._num_rows += 1
            answers = [example] if isinstance(example, SftExample) else [example.chosen, example.rejected]
            if max(answer.num_tokens for answer in answers) > self._data.max_len:
                self._num_too_long += 1
                self.num_left_out += 1
            else:
                yield row, [self._sample(answer, label, extra) for answer in answers]
        self._errors.check(self._num_rows + self._errors.num_bad)

    def report(self) -> None:
        """Tell how many rows were left out, and why."""
        if self._num_too_long:
            TERMINAL.say(f"{self._num_too_long} of {self._num_rows} rows left out as too long")
        if self._errors.num_bad:
            TERMINAL.say(f"{self._errors.num_bad} rows cannot be used, such as {self._errors.first[0]}")

    def _sample(self, example: SftExample, label: str | None, extra: Mapping[str, Any]) -> Sample:
        first = int(example.loss_mask.argmax())
        asked, answer = example.token_ids[:first], example.token_ids[first:]
        # As in generation, the prompt's text includes what the chat template adds.
        plain = not self._data.apply_chat_template
        text = self.tokenizer.decode(asked, skip_special_tokens=plain)
        spans = (Span(SpanSource.PROMPT, asked), Span(SpanSource.POLICY, answer, np.zeros(len(answer)), 0))
        name = example.example_id
        response = self.tokenizer.decode(answer, skip_special_tokens=True)
        prompt = Prompt(name, asked, text, label, extra=extra)
        return prompt, Rollout(name, name, spans, FinishReason.STOP, response)


async def _score(job: RewardJob, reader: _Reader, num_rows: int) -> list[dict[str, Any]]:
    """Return the rows with their rewards, of the `num_rows` that can be read."""
    scored = []
    num_scored = 0

    def show() -> None:
        # Answers that are left out count as done, for which no time was needed.
        done = num_scored + reader.num_left_out * reader.num_answers
        TERMINAL.progress.show("scoring", done=done, total=num_rows * reader.num_answers)

    async def verdict_of(prompt: Prompt, answer: Rollout) -> Verdict:
        nonlocal num_scored
        [verdict] = await reward.score(prompt, [answer])
        num_scored += 1
        show()
        return verdict

    async with contextlib.AsyncExitStack() as stack:
        reward = job.open(reader.tokenizer, stack)
        stack.callback(TERMINAL.progress.clear)
        show()
        samples = iter(reader)
        while batch := list(itertools.islice(samples, _NUM_AT_ONCE)):
            calls = [verdict_of(prompt, answer) for _, answers in batch for prompt, answer in answers]
            verdicts = iter(await asyncio.gather(*calls))
            for row, answers in batch:
                columns = dict(row.values)
                for prefix in [""] if len(answers) == 1 else ["chosen_", "rejected_"]:
                    columns |= _columns(prefix, next(verdicts))
                scored.append(columns)
    return scored


def _selected(config: ScoreConfig, scored: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the training data that `post_process` makes of scored answers. Those to one input are compared."""
    data = config.data
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in scored:
        asked = row[data.input_key]
        record = {
            "input": asked,
            "text": row[data.output_key],
            "label": row.get(data.label_key or ""),
            "reward": row["reward"],
            "verdict": row["verdict"],
            "finish_reason": row.get("finish_reason", "stop"),
        }
        groups.setdefault(json.dumps(asked, sort_keys=True), []).append(record)
    for group in groups.values():
        yield from post_process(group, config.output.post_processor, **matching(post_process, config.output))


def _columns(prefix: str, verdict: Verdict) -> dict[str, Any]:
    values = {"reward": verdict.reward, "score": verdict.score, "verdict": str(verdict.kind), **verdict.extra}
    if verdict.detail:
        values["detail"] = verdict.detail
    return {prefix + name: value for name, value in values.items()}


def _report(scored: Sequence[dict[str, Any]], *, pairs: bool) -> int:
    """Say what the rewards of all rows are like; return the number of rows that have theirs."""
    prefixes = ("chosen_", "rejected_") if pairs else ("",)
    names = [prefix + "reward" for prefix in prefixes]
    whole = [row for row in scored if all(row[name] is not None for name in names)]
    if len(whole) < len(scored):
        failed = [row for row in scored if any(row[name] is None for name in names)][-1]
        reason = next(failed.get(prefix + "detail") for prefix in prefixes if failed[prefix + "reward"] is None)
        text = f"{len(scored) - len(whole)} rows have no reward: the scorer failed or abstained"
        TERMINAL.say(f"{text}; the last reason: {reason}" if reason else text)
    if noted := [row for row in whole if any(prefix + "detail" in row for prefix in prefixes)]:
        notes = (noted[-1].get(prefix + "detail") for prefix in prefixes)
        TERMINAL.say(f"{len(noted)} rows have a reward with a note; the last: {next(filter(None, notes))}")
    for name in names if whole else ():
        values = np.array([row[name] for row in whole])
        TERMINAL.say(f"{name}: mean {values.mean():.4f}, deviation {values.std():.4f}")
    if pairs and whole:
        right = [float(np.sign(row["chosen_reward"] - row["rejected_reward"]) + 1) / 2 for row in whole]
        TERMINAL.say(f"accuracy {np.mean(right):.4f} of {len(whole)} pairs (a tie counts half)")
    return len(whole)
