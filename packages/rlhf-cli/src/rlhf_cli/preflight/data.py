"""Checks of data before a run: rows, keys, lengths, and the metrics that held-out prompts allow."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf_cli.config.paths import data_path, source_names, user_folder
from rlhf_cli.config.ppo import PpoConfig
from rlhf_data import keys
from rlhf_data.errors import ConfigError, DataError, missing_file, unknown
from rlhf_data.images.reader import ImageReader
from rlhf_data.options.declare import matching
from rlhf_data.prompts import PromptSet, check_has_images, load_prompts
from rlhf_data.records import Prompt
from rlhf_data.rows.row import Counts
from rlhf_data.rows.sources import SUFFIXES, Rows, open_sources, parse_probs, split_sources
from rlhf_train.generation.summaries import metric_part

_METRICS = ("accuracy", "reward", "score", "response_tokens", "truncated", "failed")
_SOURCE_METRICS = ("response_tokens", "truncated")
_ONLY_SOURCE = "train"  # of all prompts to train on, if they are from one file or data set
_A_SLIP = 0.9  # share of common letters from which a name counts as a misspelling of a known one


def open_prompts(config: PpoConfig) -> tuple[Rows, dict[str, Rows]]:
    """Return the rows of --prompt_data, and the rows of each --eval_data file by the file's name.

    Raises:
        DataError: a source cannot be opened, or its first row lacks a key.
        ConfigError: two held-out files with one name, or probabilities that are not valid.
    """
    data = config.data
    held_out = {}
    files = [data_path(name, held_out=True) for name in split_sources(data.eval_data or "", user_folder())]
    names = [path.stem for path in files]
    for name in names:
        if names.count(name) > 1:
            message = f"two files of --eval_data are called {name}, but results are reported by file name"
            raise ConfigError(message, hint="rename one of them")
    assert data.prompt_data
    probs = parse_probs("prompt_data_probs", data.prompt_data_probs)
    common = {"max_samples": data.max_samples, "preset": data.preset_data}
    options = {"probs": probs, "seed": config.training.seed, "split": data.prompt_split}
    training = open_sources(source_names(data.prompt_data), **options, **common)
    keys.check_section_keys(data, training, ("input_key", "label_key", "tools_key"))
    extra_keys = config.reward.extra_names
    keys.check_extra_keys(training, extra_keys)
    for name, path in zip(names, files, strict=True):
        if not path.exists() and not path.name.lower().endswith(SUFFIXES):
            message = f"--eval_data: {missing_file('data file', path).partition(chr(10))[0]}"
            raise DataError(message, hint="give a .jsonl or .json file; names on the hub are for --prompt_data")
        held_out[name] = open_sources(path, **common)
        keys.check_section_keys(data, held_out[name], ("input_key", "label_key", "tools_key", "source_key"))
        keys.check_extra_keys(held_out[name], extra_keys)
    return training, held_out


def load_all(
    config: PpoConfig,
    rows: Rows,
    held_out_rows: Mapping[str, Rows],
    tokenizer: Any,
    num_ids: int | None = None,
    reader: ImageReader | None = None,
) -> tuple[PromptSet, PromptSet | None]:
    """Return the training prompts and the held-out prompts. A held-out prompt's source is the one its metrics name.

    See `load_prompts` for `num_ids` and `reader`.

    Raises:
        DataError: too many rows that cannot be used.
    """
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        num_ids=num_ids,
        reader=reader,
        extra_keys=config.reward.extra_names,
        **matching(load_prompts, config.data),
    )
    prompts = load(rows, source=_ONLY_SOURCE if len(rows.sources) == 1 else None, source_key=None)
    if config.rollout.adaptive_mix and len({prompt.source for prompt in prompts}) < 2:
        message = "--adaptive_mix sets the shares of several sources, and all usable prompts are of one"
        raise ConfigError(message, hint="name several in --prompt_data, separated by commas, or drop it")
    if config.rollout.adaptive_mix or config.algorithm.teachers.keys() - {""}:
        _check_metric_names("--prompt_data", {prompt.source for prompt in prompts})
    if config.agent.agent_func_path is None:  # an agent may give images where prompts have none
        check_has_images(prompts, "--prompt_data", config.data.image_key)
    sets = [load(part, source=name) for name, part in held_out_rows.items()]
    if not sets:
        return prompts, None
    # The source becomes a part of metric names.
    _check_metric_names("--eval_data", {prompt.source for part in sets for prompt in part})
    held_out = (replace(p, source=metric_part(p.source)) for part in sets for p in part)
    return prompts, PromptSet(tuple(held_out), sum((part.counts for part in sets), Counts()))


def _check_metric_names(option: str, sources: Collection[str]) -> None:
    """Raise ConfigError if metrics of two data sources would have one name."""
    known: dict[str, str] = {}
    for source in sorted(sources):
        if (other := known.setdefault(metric_part(source), source)) != source:
            message = f"{option}: metrics of the data sources {other!r} and {source!r} would have one name,"
            raise ConfigError(f"{message} {metric_part(source)}", hint="rename one of them")


def check_taught(config: PpoConfig, sources: Collection[str]) -> None:
    """Raise ConfigError unless each of the prompts' data sources has a teacher, and each of several teachers a source.

    A record of an older version may have no sources, and is not checked.
    """
    teachers = config.algorithm.teachers
    sources = sorted(sources)
    if not teachers.keys() - {""} or not sources:
        return
    if sources == [_ONLY_SOURCE]:
        message = "--teacher_model names teachers by data source, and all prompts are of a single one"
        raise ConfigError(message, hint="write the MODEL alone, without SOURCE=")
    for source in teachers:
        if source and source not in sources:
            raise ConfigError(f"--teacher_model: {unknown('data source', source, sources)}")
    untaught = [source for source in sources if source not in teachers]
    if untaught and "" not in teachers:
        message = f"--teacher_model names no teacher for {', '.join(untaught)} of --prompt_data"
        raise ConfigError(message, hint=f"add {untaught[0]}=MODEL, or MODEL alone for all sources without one")
    if not untaught and "" in teachers:
        message = f"--teacher_model has {teachers['']} for sources without a teacher of their own, and all have one"
        raise ConfigError(message, hint="drop it")


def check_best_metric(config: PpoConfig, prompts: Sequence[Prompt], *, logs_numbers: bool) -> None:
    """Raise ConfigError if --best_metric_key names a metric that evaluations of the held-out `prompts` will not have.

    If the reward `logs_numbers`, it may add metrics of its own, whose names are not known before the first evaluation.
    Then an unknown name is accepted, unless it is probably a misspelling of a known one.
    """
    name = config.evaluation.best_metric_key
    if name is None:
        return
    known = metric_names({prompt.source for prompt in prompts}, config.evaluation.eval_n_samples_per_prompt)
    slip = difflib.get_close_matches(name.removeprefix("eval/"), _METRICS, n=1, cutoff=_A_SLIP)
    may_be_logged = logs_numbers and not slip and re.fullmatch(r"eval/(?!pass@)[^/]+", name)
    if name not in known and not may_be_logged:
        raise ConfigError(f"--best_metric_key: {unknown('metric', name, known)}")


def metric_names(sources: Collection[str], num_samples: int) -> list[str]:
    """Return the names of an evaluation's metrics; see `rlhf_train.evaluation`."""
    ks = {2**power for power in range(num_samples.bit_length())} | {num_samples}
    passes = [f"pass@{k}" for k in sorted(ks) if k <= num_samples]
    names = [f"eval/{name}" for name in (*_METRICS, *passes)]
    if len(sources) > 1:
        names += [f"eval/{source}/{name}" for source in sorted(sources) for name in (*passes, *_SOURCE_METRICS)]
    return names


def data_notices(config: PpoConfig, prompts: PromptSet, held_out: PromptSet | None) -> list[str]:
    """Return notices about the prompts, one sentence each."""
    notices = []
    rollout = config.rollout
    for part in (prompts.counts, held_out.counts) if held_out is not None else (prompts.counts,):
        if part.num_too_long:
            count = f"{part.num_too_long} of {part.num_rows} prompts are longer than --prompt_max_len and left out"
            notices.append(f"{part.most_is_lost}{count}; the longest has {part.longest_tokens} tokens")
        if part.num_bad:
            notices.append(f"{part.num_bad} of {part.num_rows} rows cannot be used and are left out")
    trained = {(prompt.text, prompt.images) for prompt in prompts}
    if shared := sum((prompt.text, prompt.images) in trained for prompt in held_out or ()):
        notices.append(f"{shared} of {len(held_out)} held-out prompts are also training prompts")
    size = rollout.rollout_batch_size
    most = rollout.rollout_batch_size * rollout.dynamic_filtering_max_batches
    if size > len(prompts):
        times = f"each is used {size / len(prompts):.1f} times per step"
        notices.append(f"--rollout_batch_size {size} is more than the {len(prompts)} prompts: {times}")
    elif rollout.filters and most > len(prompts):
        name = "dynamic_filtering" if rollout.dynamic_filtering else "group_filter_path"
        notices.append(
            f"--{name} may draw {most} prompts per step (--rollout_batch_size x"
            f" --dynamic_filtering_max_batches), more than the {len(prompts)} there are: some are used again"
        )
    wanted = config.training.train_steps
    steps = config.steps_of_episodes(len(prompts))
    if wanted is not None and steps < wanted:
        count = f"{len(prompts)} prompts x {config.training.num_episodes} episode(s)"
        needed = (wanted - 1) * size // len(prompts) + 1  # the last step need not be full of prompts of a pass
        notices.append(
            f"--train_steps {wanted} is not reached: {count} / --rollout_batch_size {size} give {steps} step(s);"
            f" --num_episodes {needed} suffices"
        )
    may_repeat = rollout.filters or rollout.difficulty_pool or rollout.adaptive_mix
    num_steps = steps if wanted is None else min(steps, wanted)
    if config.reuse is not None and not may_repeat and num_steps * size <= len(prompts):
        count = f"{num_steps} step(s) x --rollout_batch_size {size}"
        notices.append(f"--reuse_solved has no effect: {count} draw each of the {len(prompts)} prompts at most once")
    return notices
