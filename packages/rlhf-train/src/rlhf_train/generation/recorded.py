"""Rollouts from the record of a run, in the place of those that engines generate. Torch-free."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.records import RolloutGroup, SpanSource
from rlhf_rollout.records_io import NUM_LEFT, parse_batches, read_lines
from rlhf_train.generation.reuse import as_sampled
from rlhf_train.generation.service import Drawn
from rlhf_train.run.recorder import GROUPS_LEFT, artifact_path

# The beginning of a record of `Report.rollouts`.
_HEAD = re.compile(
    rb'\{"step": (?P<step>\d+), "num_steps": (?P<num_steps>\d+), "kept": (?:true|false),'
    rb'(?: "%s": (?P<groups>\d+),)? "%s": (?P<records>\d+),' % (GROUPS_LEFT.encode(), NUM_LEFT.encode())
)
_SOURCE = re.compile(rb'"source": ("(?:[^"\\]|\\.)*")')  # the first one of a record is that of its prompt


@dataclass(frozen=True, slots=True)
class Recording:
    """The record of a run's rollouts.

    Attributes:
        path: the file.
        num_steps: steps whose record is complete; they count from 1.
        num_planned: steps that the run was to have, by which its learning rates change.
        notice: what the user should know; "" for nothing.
        sources: the data sources of the prompts.
    """

    path: Path
    num_steps: int
    num_planned: int
    notice: str = ""
    sources: frozenset[str] = frozenset()


def find_recording(run_folder: Path) -> Recording:
    """Return the record of the run in a folder. Looks at the beginning of each line only; `read_batches` checks all.

    Records of older versions do not say how many groups a step has: its last one then counts as complete if its last
    group is. Raises DataError when there is no record, or when it holds no complete step.
    """
    path = artifact_path(run_folder, "rollouts")
    if not path.is_file():
        hint = "a run writes it unless ``record`` is false; name the folder of a run, its ``save_path``"
        raise DataError(f"there is no record of rollouts, {path}", hint=hint)
    step = 0
    num_steps = 0  # complete ones
    num_planned = 0
    is_complete = True  # the last step
    sources: set[str] = set()
    for line in read_lines(path, has_tokens=False):
        head = _HEAD.match(line.text)
        now = -1 if head is None else int(head["step"])
        if now != step and not (is_complete and now == step + 1):
            is_complete = False
            break
        if (source := _SOURCE.search(line.text)) is not None:
            with suppress(ValueError):  # damaged; `read_batches` says so
                sources.add(json.loads(source[1]))
        num_steps = now - 1
        step = now
        num_planned = int(head["num_steps"])
        num_left = int(head["records"]) + int(head["groups"] or 0)
        is_complete = num_left == 0 and line.text.endswith(b"\n")
    if is_complete:
        num_steps = step
    if num_steps == 0:
        raise DataError(f"{path} has no complete step", hint="name a run that has trained for at least one step")
    notice = "" if is_complete else f"the end of {path} is damaged; steps 1 to {num_steps} are complete"
    return Recording(path, num_steps, max(num_planned, num_steps), notice, frozenset(sources))


def _step(line: bytes) -> float:
    """Return the step of a record; infinity for a line that is none, so that it is read and refused."""
    head = _HEAD.match(line)
    return int(head["step"]) if head else math.inf


class RecordedRollouts:
    """Has the interface of `Rollouts`, and hands out the batches that a run was trained on.

    There is no engine: weight syncs, sleep and wake-ups do nothing, and evaluations are refused.

    Args:
        path: the record. It is read step by step, and what comes before the first step that is asked for is skipped.
        batch_size: the largest number of groups per batch.
        masked_ids: ids to which the policy gives the probability 0, see `ModelSpec`.
    """

    num_outstanding = 0

    def __init__(self, path: Path, batch_size: int, masked_ids: Sequence[range] = ()) -> None:
        self._path = path
        self._masked_ids = masked_ids
        self._batch_size = batch_size
        self._lines = read_lines(path)
        # One line is read ahead of a step, and not parsed: what comes after the last step may be damaged.
        self._steps = groupby(self._lines, key=lambda line: _step(line.text))
        self.policy_version: int | None = None

    def next_batch(self, step: int) -> Drawn:
        """Return the batch of `step`, and what was left out of it.

        Raises DataError for a damaged record and for a trained token that the policy masks, and ConfigError for a batch
        that is larger than this run's.
        """
        lines = next((lines for found, lines in self._steps if found >= step), iter(()))
        batches = list(parse_batches(self._path, lines))
        if {batch.fields.get("step") for batch in batches} != {step}:
            raise DataError(f"{self._path} has no step {step}", hint="replay a record as the run wrote it")
        kept: list[RolloutGroup] = []
        dropped: list[RolloutGroup] = []
        for batch in batches:
            (kept if batch.fields["kept"] else dropped).extend(batch.groups)
        if len(kept) > self._batch_size:
            message = (
                f"step {step} was trained on {len(kept)} prompts, and ``rollout_batch_size`` is {self._batch_size}"
            )
            raise ConfigError(message, hint=f"use ``rollout_batch_size={len(kept)}``")
        for group in kept:
            self._check_ids(step, group)
        sampled, dropped = as_sampled(kept, dropped)
        num_episodes = sum(len(group.episodes) for group in (*sampled, *dropped))
        return Drawn(tuple(sampled), (), tuple(dropped), num_requested=num_episodes, num_failed=0, batch=tuple(kept))

    def _check_ids(self, step: int, group: RolloutGroup) -> None:
        """Raise DataError for a token of the policy that it masks: the log-prob is -inf, and no gradient is finite."""
        for rollout in group.rollouts:
            spans = [span.token_ids for span in rollout.spans if span.source is SpanSource.POLICY]
            sampled = {token for ids in spans for token in ids.tolist()}
            masked = sorted(token for token in sampled if any(token in ids for ids in self._masked_ids))
            if masked:
                message = (
                    f"{self._path}, step {step}, rollout {rollout.rollout_id}: the policy sampled the id {masked[0]}"
                )
                message += ", for which the tokenizer of ``pretrain`` has no token"
                raise DataError(message, hint="name the model of the recorded run by ``pretrain``, with its tokenizer")

    def synchronize(self, policy_version: int) -> None:
        """Note the version of the trainers' weights, which nobody else needs."""
        self.policy_version = policy_version

    def release(self, policy_version: int) -> None:
        """Do nothing."""

    def pending(self) -> str:
        """Return what rollouts wait for, which is nothing."""
        return ""

    def sleep(self) -> None:
        """Do nothing."""

    wake_up = sleep

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
