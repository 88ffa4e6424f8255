"""Makes training data from a file of rollouts."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_data.errors import DataError

POST_PROCESSORS = {
    "rollouts": "one record per response, with its tokens and log-probs",
    "plain": "one input/output row per response",
    "rendered": "the same, with the input as the model saw it, after its chat template or input template",
    "best_of_n": "the response with the highest reward, for each prompt",
    "rs": "rejection sampling: the responses that the reward accepts, without repetitions",
    "iter_dpo": "prompt/chosen/rejected rows: the uncut responses with the highest and the lowest reward",
    "csft": "conditional SFT: every response, with its reward written into its input",
}

Record = dict[str, Any]

# What makes rows of answers that have their rewards already.
SELECTORS = {
    "rows": "every row, with its reward",
    **{kind: text for kind, text in POST_PROCESSORS.items() if kind in ("best_of_n", "rs", "iter_dpo", "csft")},
}

_FIELDS: Mapping[str, Any] = MappingProxyType(
    {"group_id": str, "input": str | list, "text": str, "verdict": str | None, "finish_reason": str}
)


def training_rows(rollouts: Path, kind: str, *, min_reward: float | None, reward_template: str) -> list[Record]:
    """Return the rows that `post_process` makes of a file of rollouts, in the order of the prompts.

    Raises DataError for a line that is not a record of a rollout, and for messages where "csft" needs text.
    """
    made: dict[str, list[Record]] = {}
    with rollouts.open("rb") as lines:
        records = (_record(line, f"{rollouts}:{number}") for number, line in enumerate(lines, start=1))
        for group_id, group in itertools.groupby(records, key=itemgetter("group_id")):
            rows = post_process(list(group), kind, min_reward=min_reward, reward_template=reward_template)
            made[group_id] = list(rows)
    return [row for group_id in sorted(made) for row in made[group_id]]


def _record(line: bytes, origin: str) -> Record:
    """Return the record of one line. The file may have been edited, so the fields that are used are checked."""
    try:
        record = json.loads(line)
        reward = record["reward"]
        is_valid = all(isinstance(record[key], kinds) for key, kinds in _FIELDS.items())
        is_valid = is_valid and "label" in record and (reward is None or math.isfinite(reward))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        is_valid = False
    if not is_valid:
        message = f"{origin}: {line[:60]!r} is not a record of a rollout"
        raise DataError(message, hint="repair or remove the line, or generate the file anew with --overwrite")
    return record


def post_process(
    group: Sequence[Record], kind: str, *, min_reward: float | None = None, reward_template: str = "{input}{reward}"
) -> Iterator[Record]:
    """Yield the training rows of one prompt's rollouts.

    An empty response gives no row. A response whose reward failed gives a row only for "plain" and "rendered". Rows
    keep the `finish_reason`, which tells trainers whether an answer was cut. `input` is the text or the messages that
    the prompt was made from, with its `tools`, so trainers must read it with the same chat template or input template;
    for "rendered" it is what the template made, which trainers read without one.

    Args:
        group: records of `rlhf_rollout.records_io`, each with its `input`. Only "rendered" reads their `prompt`.
        kind: a key of `POST_PROCESSORS` other than "rollouts".
        min_reward: lowest reward that "rs" accepts; None accepts responses with the verdict ok.
        reward_template: the input that "csft" writes, with {input} and {reward} (two decimals).
    """
    answers = [record for record in group if record["text"].strip()]
    by_reward = itemgetter("reward")
    has_tools = kind != "rendered" and any("tools" in record for record in group)
    tools = {"tools": group[0]["tools"]} if has_tools else {}
    if kind not in ("plain", "rendered"):
        answers = [record for record in answers if record["reward"] is not None]
    if kind == "best_of_n":
        answers = answers and [max(answers, key=by_reward)]
    elif kind == "rs":
        if min_reward is None:
            accepted = [record for record in answers if record["verdict"] == "ok"]
        else:
            accepted = [record for record in answers if record["reward"] >= min_reward]
        first: dict[str, Record] = {}
        for record in accepted:
            first.setdefault(record["text"], record)
        answers = list(first.values())
    elif kind == "iter_dpo":
        # The row of a pair has no `finish_reason`, so trainers could not tell that an answer was cut.
        answers = [record for record in answers if record["finish_reason"] == "stop"]
        if answers:
            best, worst = max(answers, key=by_reward), min(answers, key=by_reward)
            high, low = best["reward"], worst["reward"]
            if high > low and best["text"] != worst["text"]:
                pair = {"prompt": best["input"], "chosen": best["text"], "rejected": worst["text"]}
                yield {**pair, "chosen_reward": high, "rejected_reward": low, "margin": high - low, **tools}
        return
    for record in answers:
        text = record["prompt"] if kind == "rendered" else record["input"]
        if kind == "csft":
            if not isinstance(text, str):
                raise DataError("csft writes the reward into the input, so inputs must be text and not messages")
            # The input is filled in last, because it may itself contain `{reward}`.
            text = reward_template.replace("{reward}", f"{record['reward']:.2f}").replace("{input}", text)
        row = {"input": text, "output": record["text"], "reward": record["reward"]}
        yield {**row, "label": record["label"], "finish_reason": record["finish_reason"], **tools}
