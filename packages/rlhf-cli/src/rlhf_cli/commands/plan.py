"""`plan`: the placement, the batches and the memory of a run of `ppo`, without its GPUs, weights and data."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_cli.commands.ppo import COMMAND_LINE as PPO
from rlhf_cli.config.paths import user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.preflight.plan_changes import Planned, adapters, changes, passes
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config, Section, flag, options
from rlhf_data.options.exits import FAILURE
from rlhf_rollout.commands.terminal import TERMINAL

if TYPE_CHECKING:
    from rlhf_cli.config.ppo import PpoConfig
    from rlhf_train.run_memory import CardMemory

DESCRIPTION = """`rlhf plan FLAGS` takes the flags of `rlhf ppo`, and shows where processes go, the batches, the memory
of each process, GPU and phase, and the seconds of each phase: for any number of GPUs, none of which is needed here. A
model is a folder, a config.json, or a shape such as qwen2.5-7b; an unknown one is answered with all of them. Prompts
and rewards need not be there. If the run does not fit, flags follow that make it fit. The status is 1 if none do."""

_GIB = 1 << 30
_BAR = 24  # characters
_GPUS_OF_A_NODE = 8
# A plan needs rows and a reward to be complete; what they are makes no difference to it.
_MADE_UP = {
    "prompt_data": ("prompts.jsonl",),
    "remote_rm_url": ("rlhf_rollout.rewards.math", "--label_key", "answer"),
}
_REWARDS = ("remote_rm_url", "reward_pretrain", "agent_func_path", "teacher_model", "replay")


class PlanSection(Section, title="plan"):
    """The GPUs that a run is planned for."""

    gpus: int | None = flag(None, "number of GPUs, 8 on each node; None: as many as the flags ask for", ge=0)
    gpu_memory_gb: float | None = flag(None, "GiB of memory of a GPU, such as 80; None: nothing is compared", gt=0)
    gpu_kind: Literal["h100", "h200"] = flag("h200", "GPUs for which seconds are told: those that were measured")
    mean_response_tokens: float | None = flag(
        None, "tokens of a response on average, for seconds and expected memory; None: all as long as they may be", gt=0
    )
    suggest: bool = flag(
        False,
        "propose flags with which the model fits, all GPUs are used, and passes are large enough; needs both others",
    )


class PlanConfig(Config):
    """The options of `plan` beside those of `ppo`."""

    plan: PlanSection = PlanSection()


COMMAND_LINE = CommandLine(
    config=PlanConfig, prog="rlhf plan", words="PPO_FLAGS", description=DESCRIPTION, resolve=user_path
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    own, words = _divided(argv)
    section = COMMAND_LINE.parse(own).config.plan
    for notice in PPO.parse([*words, "--dry_run"]).notices:
        TERMINAL.say(f"notice: {notice}")
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as scratch:
        planner = Planner(section, Path(scratch))
        with TERMINAL.progress.doing("reading configs of models"):
            if section.suggest:
                words = planner.suggested(words)
            planned = planner(words)
        if (used := planned.job.plan.num_gpus) < (section.gpus or 0):
            TERMINAL.say(f"notice: the flags use {used} of {section.gpus} GPUs; --suggest proposes flags that use all")
        print(describe(planned, planner.gpu_bytes))
        if planned.memory is not None and section.mean_response_tokens:
            print(f"\n{_expected(planned, planner.gpu_bytes, section.mean_response_tokens)}")
        print(f"\n{_seconds(planned, section)}")
        if planner.gpu_bytes is None or planned.memory is None:
            return SUCCESS
        with TERMINAL.progress.doing("looking for flags that fit"):
            advice, status = advise(words, planned, planner)
        print(advice)
    return status


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that are this command's own, and those of `ppo`."""
    takes = {name: not option.is_switch for option in options(PlanConfig) for name in option.flags}
    takes |= {"-h": False, "--help": False}
    own: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, is_whole, _ = word.partition("=")
        (own if name in takes else rest).append(word)
        if takes.get(name) and not is_whole:
            own.append(next(words, ""))
    return own, rest


class Planner:
    """Makes plans of flags of `ppo`.

    Args:
        section: the options of this command.
        scratch: an empty folder, for configs of models.

    Attributes:
        gpu_bytes: memory of a GPU; None if it is not known.
    """

    def __init__(self, section: PlanSection, scratch: Path) -> None:
        self._section = section
        self._scratch = scratch
        self.gpu_bytes = None if section.gpu_memory_gb is None else int(section.gpu_memory_gb * _GIB)

    def __call__(self, words: Sequence[str]) -> Planned:
        """Return the plan of flags. Raises ConfigError for flags that contradict each other or the number of GPUs."""
        from rlhf_cli.commands.ppo_job import make_job, make_plan, make_request
        from rlhf_cli.preflight.inputs import Inputs
        from rlhf_cli.preflight.shapes import with_model_folders
        from rlhf_data.prompts import PromptSet
        from rlhf_data.rows.row import Counts
        from rlhf_rollout.rewards.sources import model_paths
        from rlhf_train.cluster.placement import plan_anywhere
        from rlhf_train.run_memory import run_memory

        config = with_model_folders(self._parsed(words), self._scratch)
        if (gpus := self._section.gpus) is None:
            largest = max(_GPUS_OF_A_NODE, config.placement.most_gpus_per_node)
            nodes: Sequence[int] = plan_anywhere(make_request(config), largest).nodes
        else:
            nodes = [_GPUS_OF_A_NODE] * (gpus // _GPUS_OF_A_NODE) + [gpus % _GPUS_OF_A_NODE]
        sources = config.reward.sources()
        model = config.model.pretrain
        inputs = Inputs(
            model=model,
            critic=config.model.critic_pretrain or next(iter(model_paths(sources)), model),
            reward_sources=sources,
            prompts=PromptSet((), Counts()),
            eval_prompts=None,
            notices=(),
            agent=config.agent.agent_func_path,
        )
        plan = make_plan(config, nodes)
        job = make_job(config, inputs, plan, self._scratch)
        return Planned(config, job, run_memory(job, self.gpu_bytes) if plan.num_gpus else None)

    def suggested(self, words: Sequence[str]) -> list[str]:
        """Return flags with those added that use all GPUs, those that then make the run fit, and sizes of passes.

        Raises ConfigError unless the GPUs and their memory are given.
        """
        gpus = self._section.gpus
        if not gpus or self.gpu_bytes is None or (gpus > _GPUS_OF_A_NODE and gpus % _GPUS_OF_A_NODE):
            hint = "add --gpus with 1 to 8 or a multiple of 8, and --gpu_memory_gb, such as --gpus 8 --gpu_memory_gb 80"
            raise ConfigError("--suggest proposes flags for a number of GPUs and their memory", hint=hint)
        found = {
            "bf16": "true",
            "packing_samples": "true",
            "colocate_all_models": "true",
            "actor_num_nodes": str(-(-gpus // _GPUS_OF_A_NODE)),
            "actor_num_gpus_per_node": str(min(gpus, _GPUS_OF_A_NODE)),
            "vllm_num_engines": str(gpus),
        }
        names = {word.partition("=")[0].removeprefix("--") for word in words}
        own = {f"--{name}": value for name, value in found.items() if name not in names}
        first = [*words, *(word for pair in own.items() for word in pair)]
        more, said = self.fitting(first) if self(first).lacks(self.gpu_bytes) else ([], "")
        added = [word for pair in own.items() if pair[0] not in more for word in pair] + more
        if not said:
            added += passes([*words, *added], self, self.gpu_bytes, self._seconds)
        print(f"suggested flags\n  {' '.join(added)}\n{said}")
        return [*words, *added]

    def _seconds(self, planned: Planned) -> float:
        """Return the estimate of a step."""
        from rlhf_cli.preflight.seconds import RATES, step_seconds

        return step_seconds(planned.job, RATES[self._section.gpu_kind], self._section.mean_response_tokens)["step"]

    def fitting(self, words: Sequence[str]) -> tuple[list[str], str]:
        """Return flags that make a run fit, and what they cost beside time; neither if none do."""
        found = changes(words, self, self.gpu_bytes)
        if found is not None:
            return found, ""
        found = adapters(words, self, self.gpu_bytes)
        if found is None:
            return [], ""
        peak = self([*words, *found]).peak / _GIB
        return found, f"all weights cannot be trained on these GPUs; LoRA adapters can, in {peak:.1f} GiB\n"

    def _parsed(self, words: Sequence[str]) -> "PpoConfig":
        """Return the configuration of flags, with rows and a reward if they name none."""
        names = {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}
        more = []
        if "pretrain" in names and "config" not in names:
            if "prompt_data" not in names:
                more += ["--prompt_data", *_MADE_UP["prompt_data"]]
            if not names & set(_REWARDS):
                more += ["--remote_rm_url", *_MADE_UP["remote_rm_url"]]
        return PPO.parse([*words, *more, "--dry_run"]).config


def describe(planned: Planned, gpu_bytes: int | None) -> str:
    """Return a plan for people: placement, GPUs, batches, and memory by process, phase and node."""
    from rlhf_cli.commands.ppo_job import describe_batches
    from rlhf_cli.preflight.memory import describe_memory

    job = planned.job
    blocks = [f"placement: {job.plan.describe()}"]
    if planned.memory is None:
        blocks.append("memory is estimated for GPUs only")
    else:
        blocks.append(f"GPUs, at the peak\n{_picture(planned, gpu_bytes)}")
    blocks.append(f"batches\n{describe_batches(planned.config, job.plan, None)}")
    if planned.memory is not None:
        blocks += [describe_memory(job, gpu_bytes), _phases(planned)]
        host = _host_bytes(planned)
        if host:
            blocks.append(f"host memory for what sleeps or is never on a GPU, at most: {host / _GIB:.1f} GiB per node")
    return "\n\n".join(blocks)


def _expected(planned: Planned, gpu_bytes: int | None, mean_response_tokens: float) -> str:
    from rlhf_train.run_memory import STEPS, run_memory

    memory = run_memory(planned.job, gpu_bytes, mean_response_tokens)
    peak = replace(planned, memory=memory).peak / _GIB
    trainer = max(memory.needs[kind.name].total for kind in planned.job.plan.trainers) / _GIB
    return (
        f"expected within {STEPS} steps, if responses have {mean_response_tokens:g} tokens on average:"
        f" {trainer:.1f} GiB for a training process, {peak:.1f} GiB on the fullest GPU"
    )


def _seconds(planned: Planned, section: PlanSection) -> str:
    from rlhf_cli.preflight.seconds import describe_seconds

    kind = section.gpu_kind if planned.job.plan.device == "cuda" else "cpu"
    moved = max((need.moved for need in planned.memory.needs.values()), default=0) if planned.memory else 0
    return describe_seconds(planned.job, kind, section.mean_response_tokens, moved)


def _picture(planned: Planned, gpu_bytes: int | None) -> str:
    """Return a line for each range of GPUs with the same processes, and how full they are."""

    def same(card: "CardMemory") -> tuple[object, ...]:
        return card.node, tuple(card.counts.items()), planned.peak_of(card)

    rows = []
    for (node, counts, peak), group in groupby(planned.memory.cards, same):
        cards = list(group)
        name = f"GPU {cards[0].gpu}" + (f"-{cards[-1].gpu}" if len(cards) > 1 else "")
        name = f"node {node} {name}" if len(planned.job.plan.nodes) > 1 else name
        holds = " ".join(f"[{number} x {kind}]" for kind, number in counts if number)
        size = f"{peak / _GIB:6.1f} GiB"
        if gpu_bytes is not None:
            filled = min(round(_BAR * peak / gpu_bytes), _BAR)
            size = f"|{'#' * filled}{'.' * (_BAR - filled)}|{peak / _GIB:6.1f} of {gpu_bytes / _GIB:.1f} GiB"
        rows.append((name, holds, size))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"  {name:<{widths[0]}}  {holds:<{widths[1]}}  {size}" for name, holds, size in rows)


def _phases(planned: Planned) -> str:
    if not planned.sleeps:
        return "memory by phase: nothing sleeps, so all of it stays in every phase"
    phases = max(planned.memory.cards, key=planned.peak_of).phases
    rows = (f"  {name:<24}{size / _GIB:7.1f}" for name, size in phases.items())
    return "\n".join(["memory by phase on the fullest GPU, in GiB", *rows])


def _host_bytes(planned: Planned) -> int:
    """Return the bytes of host memory on the node that takes the most."""
    plan = planned.job.plan
    needs = planned.memory.needs
    kinds = [*plan.trainers, *([plan.scorers] if plan.scorers else [])]
    sizes = [(place.node, needs[kind.name].host) for kind in kinds for place in kind.places]
    return max(sum(size for node, size in sizes if node == number) for number in range(len(plan.nodes)))


def advise(words: Sequence[str], planned: Planned, planner: Planner) -> tuple[str, int]:
    """Return whether the run fits, or the flags with which it does, and the exit status."""
    lack = planned.lacks(planner.gpu_bytes)
    if not lack:
        return "\nthe run fits", SUCCESS
    found, said = planner.fitting(words)
    if not found:
        return f"\nthe run does not fit: {lack}; use more GPUs, or larger ones", FAILURE
    peak = planner([*words, *found]).peak / _GIB
    return f"\nthe run does not fit: {lack}\n{said}add {' '.join(found)}: it then needs {peak:.1f} GiB", SUCCESS
