"""`ppo`: train a policy on rewards, with a critic (PPO) or by comparing the samples of each prompt (GRPO)."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.builtin import RECIPE_FILE
from rlhf_cli.config.checkpoint import resumed_config
from rlhf_cli.config.paths import LOG_FILE, user_path
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.console.capture import captured
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.console.secrets import restart_without_key
from rlhf_cli.doctor.environment import keep_environment
from rlhf_cli.openrlhf.differences import online_differences
from rlhf_cli.openrlhf.flags import adapt, flags_of
from rlhf_cli.preflight.resume import (
    changed_options,
    check_can_continue,
    check_run_folders,
    nothing_is_left,
    run_folder,
    saying_how_to_resume,
    steps_of_ended_run,
    to_store,
)
from rlhf_cli.presets import PRESETS
from rlhf_data.options.command_line import CommandLine, Parsed, to_toml
from rlhf_train.run.interrupts import Interrupts

if TYPE_CHECKING:
    from rlhf_cli.console.views import Console

DESCRIPTION = """Train a language model on rewards: vLLM generates, a reward function scores, DeepSpeed trains.
Without --pretrain and --prompt_data, the tiny model that ships learns to carry when it adds two numbers."""


def lowest_layer(values: Mapping[str, Any]) -> Path | None:
    """Return the options of the run that --resume continues, or that --replay trains on; else the built-in recipe if
    neither a model nor prompts are given."""
    own = "pretrain" in values or "prompt_data" in values
    return resumed_config(values) or resumed_config(values, "replay") or (None if own else RECIPE_FILE)


COMMAND_LINE = CommandLine(
    config=PpoConfig,
    prog="rlhf ppo",
    description=DESCRIPTION,
    resolve=user_path,
    recipe=lowest_layer,
    presets=PRESETS,
    foreign=flags_of("ppo"),
    adapt=adapt,
    compare=online_differences,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    with Interrupts():
        return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(argv)
    config = parsed.config
    if not parsed.dry_run:  # a dry run starts nothing that could record the command line
        restart_without_key()

    from rlhf_cli.console.views import Console

    folder = run_folder(config.checkpoint, config.output.save_path, "ppo")
    if parsed.dry_run:
        from rlhf_cli.commands.dry_run import show_ppo

        console = Console()
        return show_ppo(parsed, folder, console)
    check_run_folders(config.checkpoint, folder)
    check_can_continue(config.checkpoint, folder)
    with captured(folder) as (out, err):
        console = Console(out, err)
        keep_environment()
        try:
            with saying_how_to_resume("ppo", config.checkpoint, folder, console.notice):
                _train(parsed, folder, console)
        finally:
            console.done()
    return SUCCESS


def _train(parsed: Parsed[PpoConfig], folder: Path, console: "Console") -> None:
    """Check everything, show the plan, and run. Nothing is started before all checks have passed."""
    from rlhf_cli.commands.ppo_job import describe_batches, make_job, make_plan
    from rlhf_cli.console.results import show_results
    from rlhf_cli.console.views import RunView
    from rlhf_cli.preflight.devices import check_device, cluster_notices, find_gpus
    from rlhf_cli.preflight.inputs import check_inputs
    from rlhf_cli.preflight.memory import gpu_memory_bytes, sleep_notices
    from rlhf_cli.preflight.models import check_engine_on_device
    from rlhf_train.run.trackers.start import check_trackers

    config = parsed.config
    console.notices(parsed.notices)
    console.working("checking model, data and reward")
    inputs = check_inputs(config, folder)
    nodes, ray_address = find_gpus()
    check_engine_on_device(config, sum(nodes))
    device_notices = [*cluster_notices(ray_address), *check_device(config, parsed.given, sum(nodes))]
    plan = make_plan(config, nodes)
    job = make_job(config, inputs, plan, folder, ray_address)
    job = replace(job, config=to_toml(to_store(config), parsed.origins))
    check_trackers(job.trackers)
    console.done()
    changes = changed_options(to_store(config), folder) if config.checkpoint.continues else []
    done = steps_of_ended_run(config.checkpoint, folder)
    if done is not None and done >= job.num_steps:
        console.result(nothing_is_left(folder, f"{done} step(s)", "--train_steps or --num_episodes"))
        return
    memory_notices = sleep_notices(job, gpu_memory_bytes())
    console.notices(inputs.notices, device_notices, memory_notices, changes)
    console.result(f"placement: {plan.describe()}")
    num_held_out = len(inputs.eval_prompts or ())
    console.result(f"batches\n{describe_batches(config, plan, len(inputs.prompts) or None, num_held_out)}")
    console.result(f"results will be in {folder}, messages of libraries in {LOG_FILE} there")

    from rlhf_train.online import run_online

    view = RunView(
        console,
        job.num_steps,
        dynamic_sampling=job.dynamic_sampling is not None,
        has_teacher=job.algorithm.uses_teacher,
        logging_steps=config.output.logging_steps,
    )
    summary = run_online(job, view)
    loader = {"loader": "AutoModelForImageTextToText.from_pretrained"} if config.images else {}
    show_results(console, summary.save_path, summary.artifacts, summary.metrics, **loader)


if __name__ == "__main__":
    sys.exit(main())
