"""`generate`: samples responses to prompts and makes training data of them. A run that was stopped can continue.

Rollouts are written as they are generated. Training data is made of them at the end, so its file is complete or absent.
"""

import asyncio
import contextlib
import gc
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_data.chat.template import template_clock
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.images.reader import ImageReader, open_image_reader
from rlhf_data.options.declare import matching
from rlhf_data.prompts import PromptSet, check_has_images, load_prompts
from rlhf_data.records import FinishReason
from rlhf_data.rows.row import RowErrors
from rlhf_rollout.agents import AgentSpec, check_agent, make_workflow
from rlhf_rollout.commands.configs import GenerateConfig
from rlhf_rollout.commands.parts import (
    EngineJob,
    RewardJob,
    check_new_file,
    is_data_here,
    make_engine,
    open_prompts,
    write_rows,
)
from rlhf_rollout.commands.post_process import training_rows
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.engines.process import start_engines
from rlhf_rollout.generator import GenerationCounts, generate_groups
from rlhf_rollout.mps import MpsDaemon
from rlhf_rollout.protocols import RolloutEngine, SamplingParams
from rlhf_rollout.records_io import RolloutWriter
from rlhf_rollout.rewards.mix import check_reward
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.router import EngineRouter

_NUM_SHOWN_FAILURES = 3
_CLOCK = "template_clock"  # the key of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A run whose inputs have been read.

    Attributes:
        config: all options.
        engine: the engine that answers.
        sampling: how responses are sampled.
        agent: turns prompts into episodes of several turns; None for single turns.
        reward: what scores the responses to which the agent gives no reward; without sources they are not scored.
        tokenizer: the engine's tokenizer.
        reader: of the images of prompts; None for text alone.
        prompts, inputs: the prompts, and the cells that each was made from.
        settings: what every record of the file begins with: the hash of the settings as `run`, and as `template_clock`
            the time that the chat template writes into prompts, if it does.
        done: numbers of the prompts whose rollouts are already in the file.
    """

    config: GenerateConfig
    engine: EngineJob
    sampling: SamplingParams
    agent: AgentSpec | None
    reward: RewardJob
    tokenizer: Any
    reader: ImageReader | None
    prompts: PromptSet
    inputs: list[dict[str, Any]]
    settings: dict[str, str]
    done: frozenset[int]


def run(config: GenerateConfig) -> int:
    """Generate, score and write; return 1 when some prompts failed, else 0.

    Raises:
        ConfigError: an output file exists, a model or an agent does not exist, or a reward cannot be used.
        RewardError: the agent cannot be imported.
        DataError: rows cannot be used.
    """
    output = config.output
    for path in (output.path, output.rollouts_path):
        hint = "give another --output_path, or --overwrite, or --resume to continue"
        check_new_file(path, replace=output.overwrite or output.resume, hint=hint)
    with TERMINAL.progress.doing("reading the prompts"):
        task = _prepare(config)
    calls = config.reward.calls(len(task.prompts), task.sampling.num_samples)
    for source in task.reward.sources:
        with TERMINAL.progress.doing(f"trying the reward {source.kind}"):
            problem = check_reward(source, task.prompts, calls)
        if problem:
            TERMINAL.say(f"warning: the reward {source.kind} failed a trial call: {problem}")
    if task.agent is not None:
        with TERMINAL.progress.doing("importing the agent"):
            check_agent(task.agent)
    status = asyncio.run(_write_rollouts(task, calls)) if len(task.done) < len(task.prompts) else 0
    if output.rollouts_path != output.path:
        rows = training_rows(output.rollouts_path, output.post_processor, **matching(training_rows, output))
        num_rows = write_rows(output.path, rows)
        made = f"{num_rows} rows of {len(task.prompts)} prompts"
        TERMINAL.say(f"{output.post_processor}: {made} written to {output.path}")
    return status


def check_data(config: GenerateConfig) -> None:
    """Raise DataError for a source on this machine that cannot be opened, or whose first row lacks a key."""
    if is_data_here("prompt_data", config.data.prompt_data):
        open_prompts(config.data, config.rollout.seed or 0, config.reward.extra_names)


def _prepare(config: GenerateConfig) -> _Task:
    output = config.output
    sampling = config.sampling()
    agent = config.agent_spec()
    reward = RewardJob(config.reward, config.model.dtype, config.max_len)
    share = config.engine.memory_share
    engine = make_engine(config.model, config.engine, config.max_len, memory_share=share, expected_sampling=sampling)
    reward.check_models()
    tokenizer = engine.load_tokenizer(config.data)
    clock = template_clock(tokenizer, recorded_clock(output.rollouts_path) if output.resume else None)
    reader = None if config.data.image_key is None else open_image_reader(engine.spec.model)
    prompts, inputs = _load_prompts(config, tokenizer, reader)
    TERMINAL.say(prompts.summary)
    if output.post_processor == "csft" and not all(isinstance(cells["input"], str) for cells in inputs):
        message = "--post_processor csft writes the reward into the input, so inputs must be text and not messages"
        raise DataError(message)
    # Everything that determines the rollouts: model, sampling, agent, rewards and prompts.
    settings = (engine.kind, engine.spec.model, engine.spec.tokenizer, engine.spec.dtype, sampling)
    if agent is not None:
        settings += (agent.path, agent.limits, agent.history, agent.tool_parser, agent.chat_template_kwargs)
    rewards = (reward.sources, config.reward.normalize_reward, config.reward.judge_model)
    asked = [
        (prompt.prompt_id, prompt.token_ids.tobytes(), prompt.label, prompt.extra, *prompt.images) for prompt in prompts
    ]
    digest = hashlib.sha256(repr((settings, rewards, asked)).encode()).hexdigest()[:16]
    done: frozenset[int] = frozenset()
    if output.resume and output.rollouts_path.exists():
        done = take_up(output.rollouts_path, digest, sampling.num_samples)
        TERMINAL.say(f"{len(done)} of {len(prompts)} prompts are already done")
    return _Task(
        config=config,
        engine=engine,
        sampling=sampling,
        agent=agent,
        reward=replace(reward, reader=reader),
        tokenizer=tokenizer,
        reader=reader,
        prompts=prompts,
        inputs=inputs,
        settings={"run": digest} | ({} if clock is None else {_CLOCK: clock.isoformat()}),
        done=done,
    )


def _load_prompts(
    config: GenerateConfig, tokenizer: Any, reader: ImageReader | None
) -> tuple[PromptSet, list[dict[str, Any]]]:
    """Return the prompts, and for each the cells that it was made from: `input`, text or messages, and
    `tools`."""
    data = config.data
    extra_keys = config.reward.extra_names
    rows = replace(open_prompts(data, config.rollout.seed or 0, extra_keys), skip_samples=data.skip_samples)
    options = matching(load_prompts, data)
    prompts = load_prompts(rows, tokenizer, extra_keys=extra_keys, reader=reader, **options)
    if config.agent.agent_func_path is None:  # an agent may give images where prompts have none
        check_has_images(prompts, "--prompt_data", data.image_key)
    # A second pass gives the same rows in the same order; rows that made no prompt are skipped.
    again = iter(rows.read(RowErrors()))
    keys = {"input": data.input_key} | ({} if data.tools_key is None else {"tools": data.tools_key})
    cells = []
    for prompt in prompts:
        row = next(row for row in again if row.row_id == prompt.prompt_id)
        cells.append({name: row.cell(key) for name, key in keys.items()})
    return prompts, cells


def recorded_clock(path: Path) -> datetime | None:
    """Return the time that the chat template wrote into the prompts of a file of rollouts; None if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            return datetime.fromisoformat(json.loads(file.readline())[_CLOCK])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `take_up` says what is wrong with a file
        return None


def take_up(path: Path, digest: str, num_samples: int) -> frozenset[int]:
    """Remove everything after the last complete group of a file of rollouts; return the numbers of its groups.

    Raises:
        ConfigError: the file was written with other settings than those of `digest`.
        DataError: the file holds something other than rollouts.
    """
    done = set()
    size = 0  # bytes of the complete groups
    offset = 0  # bytes of all records so far
    count = 0  # records of the group that is being read
    with path.open("rb+") as file:
        for line in file:
            offset += len(line)
            if not line.endswith(b"\n"):  # the process was killed while it wrote the line
                break
            try:
                record = json.loads(line)
                number = int(record["group_id"].rpartition("/")[2])
                found = record["run"]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                message = f"{path}: {line[:60]!r} is not a record of a run that can be continued"
                raise DataError(message, hint="give another --output_path, or --overwrite") from None
            if found != digest:
                message = f"{path} was written with another model or agent, other prompts, sampling or rewards"
                raise ConfigError(message, hint="give the options of that run, or another --output_path")
            count += 1
            # An episode of an agent may be several rollouts.
            if count == record.get("num_rollouts", num_samples):
                done.add(number)
                size = offset
                count = 0
        file.truncate(size)
    return frozenset(done)


async def _write_rollouts(task: _Task, calls: CallOptions) -> int:
    output = task.config.output
    counts = GenerationCounts()
    failures: list[str] = []
    rewards: list[float] = []
    num_cut = 0
    async with contextlib.AsyncExitStack() as stack:
        reward = task.reward.open(task.tokenizer, stack, calls) if task.reward.sources else None
        engines = await _start_engines(task, stack)
        gc.freeze()  # libraries stay to the end; looking at them again and again would hold up the event loop
        if output.overwrite:
            output.rollouts_path.unlink(missing_ok=True)
        writer = RolloutWriter(output.rollouts_path)
        stack.callback(writer.close)
        workflow = make_workflow(
            task.agent,
            EngineRouter(engines),
            task.tokenizer,
            tokenizer_path=task.engine.tokenizer,
            gives_reward=not task.reward.sources,
            reader=task.reader,
        )
        stack.push_async_callback(workflow.close)
        await workflow.start()
        started = time.monotonic()
        results = generate_groups(
            task.prompts,
            workflow,
            task.sampling,
            reward,
            # Twice what the engines decode at once, so that none waits for the next prompt.
            max_in_flight=max(1, 2 * len(engines) * task.engine.spec.max_num_seqs // task.sampling.num_samples),
            group_id_prefix="generate",
            counts=counts,
            skip=task.done,
        )
        num_wanted = len(task.prompts) - len(task.done)
        stack.callback(TERMINAL.progress.clear)
        TERMINAL.progress.show("generating", done=0, total=num_wanted)
        async for result in results:
            if result.group is None:
                failures.append(f"{result.prompt.prompt_id}: {result.failure}")
            else:
                number = int(result.group_id.rpartition("/")[2])
                size = len(result.group.rollouts)
                writer.write(result.group, **task.settings, num_rollouts=size, **task.inputs[number])
                num_cut += sum(rollout.finish_reason is FinishReason.LENGTH for rollout in result.group.rollouts)
                verdicts = [rollout.verdict for rollout in result.group.rollouts if rollout.verdict is not None]
                rewards += [verdict.reward for verdict in verdicts if verdict.reward is not None]
            TERMINAL.progress.show("generating", done=counts.num_groups + counts.num_failed_groups, total=num_wanted)
    TERMINAL.say(_summary(counts, rewards, time.monotonic() - started, output.rollouts_path))
    if task.done:
        TERMINAL.say(f"the figures leave out the {len(task.done)} prompts that were done before")
    if num_cut:
        limit = f"--generate_max_len {task.sampling.max_tokens}" if task.agent is None else "a limit of the episode"
        TERMINAL.say(f"{num_cut} of {counts.num_generated} rollouts were cut by {limit}")
    for failure in failures[:_NUM_SHOWN_FAILURES]:
        TERMINAL.say(f"failed: {failure}")
    return 1 if failures else 0


async def _start_engines(task: _Task, stack: contextlib.AsyncExitStack) -> list[RolloutEngine]:
    """Return the running engines; `stack` closes them."""
    places = task.config.engine.places
    environ: dict[str, str] = {}
    if task.config.engine.vllm_use_mps:
        daemon = MpsDaemon()
        stack.callback(daemon.stop)
        environ = daemon.start()
    with TERMINAL.progress.doing("starting the engine" if len(places.gpus) == 1 else "starting the engines"):
        spec = task.engine.masked_spec(task.tokenizer, task.reader)
        engines = await start_engines(task.engine.kind, spec, places, environ)
    for engine in engines:
        stack.push_async_callback(engine.close)
    return engines


def _summary(counts: GenerationCounts, rewards: Sequence[float], seconds: float, path: Path) -> str:
    tokens_per_s = counts.num_response_tokens / seconds if seconds else 0.0
    lines = [f"{counts.num_generated} rollouts in {seconds:.1f} s, {tokens_per_s:.0f} tokens/s"]
    if counts.num_failed:
        lines.append(f"{counts.num_failed} rollouts failed, of {counts.num_failed_groups} prompts")
    num_drafts, num_drafted, num_accepted = counts.drafts
    if num_drafts:
        gain = f"{num_accepted / num_drafts:.2f} more tokens each"
        lines.append(f"{num_drafts} drafts: {num_accepted} of {num_drafted} tokens accepted, {gain}")
    if rewards:
        lines.append(f"mean reward {sum(rewards) / len(rewards):.4f}")
    if counts.verdicts:
        lines.append("verdicts: " + ", ".join(f"{kind} {number}" for kind, number in sorted(counts.verdicts.items())))
    return "\n".join([*lines, f"written to {path}"])
