"""Data files before a run: rows, keys, lengths, and what can be measured on the held-out ones."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.paths import data_paths, source_names
from rlhf_data import keys
from rlhf_data.errors import ConfigError, DataError, missing_file, unknown
from rlhf_data.prompts import PromptSet, load_prompts
from rlhf_data.records import Prompt
from rlhf_data.rows import Counts
from rlhf_data.sources import SUFFIXES, Rows, open_sources, parse_probs
from rlhf_rollout.commands.sections import RowSection

_METRICS = ("accuracy", "reward", "score", "response_tokens", "truncated", "failed")
_SOURCE_METRICS = ("response_tokens", "truncated")
_A_SLIP = 0.9  # share of letters in common


def open_prompts(config: PpoConfig) -> tuple[Rows, dict[str, Rows]]:
    """Return the rows of --prompt_data, and by name those of each --eval_data file. Raises DataError for a source that
    cannot be opened or whose first row lacks its keys, ConfigError for held-out files of one name and for probabilities
    that are none."""
    data, held_out = config.data, {}
    files = data_paths(data.eval_data, held_out=True)
    names = [path.stem for path in files]
    for name in names:
        if names.count(name) > 1:
            message = f"two files of --eval_data are called {name}, the name by which their results are told apart"
            raise ConfigError(message, hint="rename one")
    assert data.prompt_data
    probs = parse_probs("prompt_data_probs", data.prompt_data_probs)
    options = {"probs": probs, "seed": config.training.seed, "max_samples": data.max_samples}
    training = open_sources(source_names(data.prompt_data), split=data.prompt_split, **options)
    check_keys(data, training, ("input_key", "label_key"))
    for name, path in zip(names, files, strict=True):
        if not path.exists() and not path.name.lower().endswith(SUFFIXES):
            message = f"--eval_data: {missing_file('data file', path).partition(chr(10))[0]}"
            raise DataError(message, hint="give a .jsonl or .json file; names on the hub are for --prompt_data")
        held_out[name] = open_sources(path, max_samples=data.max_samples)
        check_keys(data, held_out[name], ("input_key", "label_key", "source_key"))
    return training, held_out


def check_keys(section: RowSection, rows: Rows, names: Iterable[str]) -> None:
    """Raise DataError unless the first readable row of every source has the keys that options called `names` say."""
    fields = type(section).model_fields
    optional = [name for name in names if fields[name].annotation == str | None]
    keys.check_keys(rows, {name: getattr(section, name) for name in names}, optional)


def load_all(
    config: PpoConfig, rows: Rows, held_out_rows: Mapping[str, Rows], tokenizer: Any
) -> tuple[PromptSet, PromptSet | None]:
    """Return what the policy trains on, and the held-out prompts, each with the name of its source as metrics have it.
    Raises DataError for a row that cannot be used."""
    names = ("input_key", "label_key", "apply_chat_template", "input_template", "prompt_max_len", "skip_bad_rows")
    load = partial(load_prompts, tokenizer=tokenizer, **{name: getattr(config.data, name) for name in names})
    prompts = load(rows, source="train")
    sets = [load(part, source=name, source_key=config.data.source_key) for name, part in held_out_rows.items()]
    if not sets:
        return prompts, None
    held_out = (replace(p, source=re.sub(r"[^\w.-]", "_", p.source) or "_") for part in sets for p in part)
    return prompts, PromptSet(tuple(held_out), sum((part.counts for part in sets), Counts()))


def check_best_metric(config: PpoConfig, prompts: Sequence[Prompt], *, logs_numbers: bool) -> None:
    """Raise ConfigError when --best_metric_key names a number that no evaluation of the held-out `prompts` will have.
    Where a reward `logs_numbers` of its own, their names show at the first evaluation; a name that only a slip tells
    from one of ours is none of them."""
    name = config.evaluation.best_metric_key
    if name is None:
        return
    known = metric_names({prompt.source for prompt in prompts}, config.evaluation.eval_n_samples_per_prompt)
    slip = difflib.get_close_matches(name.removeprefix("eval/"), _METRICS, n=1, cutoff=_A_SLIP)
    may_be_logged = logs_numbers and not slip and re.fullmatch(r"eval/(?!pass@)[^/]+", name)
    if name not in known and not may_be_logged:
        raise ConfigError(f"--best_metric_key: {unknown('metric', name, known)}")


def metric_names(sources: Collection[str], num_samples: int) -> list[str]:
    """Return what an evaluation measures; see `rlhf_train.online.evaluation`."""
    ks = {2**power for power in range(num_samples.bit_length())} | {num_samples}
    passes = [f"pass@{k}" for k in sorted(ks) if k <= num_samples]
    names = [f"eval/{name}" for name in (*_METRICS, *passes)]
    if len(sources) > 1:
        names += [f"eval/{source}/{name}" for source in sorted(sources) for name in (*passes, *_SOURCE_METRICS)]
    return names


def data_notices(config: PpoConfig, prompts: PromptSet, held_out: PromptSet | None) -> list[str]:
    """Return what a person should know about the prompts, a sentence each."""
    notices, rollout = [], config.rollout
    for part in (prompts.counts, held_out.counts) if held_out is not None else (prompts.counts,):
        if part.num_too_long:
            count = f"{part.num_too_long} of {part.num_rows} prompts are longer than --prompt_max_len and left out"
            notices.append(f"{count}; the longest has {part.longest_tokens} tokens")
        if part.num_bad:
            notices.append(f"{part.num_bad} of {part.num_rows} rows cannot be used and are left out")
    trained = {prompt.text for prompt in prompts}
    if shared := sum(prompt.text in trained for prompt in held_out or ()):
        notices.append(f"{shared} of {len(held_out)} held-out prompts are training prompts, too")
    size, most = rollout.rollout_batch_size, rollout.rollout_batch_size * rollout.dynamic_filtering_max_batches
    if size > len(prompts):
        times = f"each is asked {size / len(prompts):.1f} times a step"
        notices.append(f"--rollout_batch_size {size} is more than the {len(prompts)} prompts: {times}")
    elif rollout.dynamic_filtering and most > len(prompts):
        notices.append(
            f"--dynamic_filtering may draw {most} prompts a step (--rollout_batch_size x"
            f" --dynamic_filtering_max_batches), more than the {len(prompts)} there are: some are asked again"
        )
    return notices
