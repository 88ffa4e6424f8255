"""A dry run of `ppo`: shows the plan, what could not be checked from here, and what a run would still need."""

from pathlib import Path

from rlhf_cli.commands.ppo_job import describe_batches, make_job, make_plan, make_request
from rlhf_cli.config.paths import model_path, parts, with_full_paths
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.console.exits import SUCCESS
from rlhf_cli.console.views import Console
from rlhf_cli.preflight.data import open_prompts
from rlhf_cli.preflight.devices import GPU_FLAGS, check_device, find_gpus
from rlhf_cli.preflight.here import Absent, show_lacks
from rlhf_cli.preflight.inputs import Inputs, check_inputs, check_own_losses
from rlhf_cli.preflight.memory import describe_memory, gpu_memory_bytes, sleep_notices
from rlhf_cli.preflight.models import (
    check_adapters,
    check_attention,
    check_context,
    check_engine,
    check_engine_on_device,
    check_experts,
    load_model_files,
    longest_sequence,
)
from rlhf_cli.preflight.resume import check_run_folders
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import Parsed, to_toml
from rlhf_train.cluster.placement import plan_anywhere
from rlhf_train.cluster.places import PlacementPlan

_GPUS_OF_A_NODE = 8  # assumed where the machine is not known; more if a model asks for more GPUs per node


def show_ppo(parsed: Parsed[PpoConfig], folder: Path, console: Console) -> int:
    """Show what a run of `ppo` would do; return the exit status.

    Raises:
        ConfigError: options that contradict each other, or a model, data or reward on this machine that does not work.
        DataError: data on this machine that cannot be used.
    """
    config = parsed.config
    console.notices(parsed.notices)
    console.working("checking model, data and reward")
    absent = Absent()
    inputs, num_prompts = _look(parsed, folder, absent)
    plan = _plan(parsed, absent)
    if inputs is not None:
        check_engine_on_device(config, plan.num_gpus)
    job = None
    if inputs is not None and not parsed.unavailable:
        job = make_job(config, inputs, plan, folder)
    planned = config.placement.plan_gpu_memory
    gpu_bytes = gpu_memory_bytes() if planned is None else int(planned * 2**30)
    console.done()
    notices = inputs.notices if inputs else ()
    on_device = check_device(config, parsed.given, plan.num_gpus)
    on_memory = sleep_notices(job, gpu_bytes) if job else []
    console.notices(notices, on_device, on_memory)
    num_held_out = len(inputs.eval_prompts or ()) if inputs else None
    console.result(to_toml(with_full_paths(config)))
    console.result(f"placement: {plan.describe()}")
    console.result(f"batches\n{describe_batches(config, plan, num_prompts, num_held_out)}")
    if job is not None and plan.num_gpus:
        console.result(describe_memory(job, gpu_bytes))
    console.result(f"results will be in {folder}")
    show_lacks(console, parsed, absent)
    return SUCCESS


def _look(parsed: Parsed[PpoConfig], folder: Path, absent: Absent) -> tuple[Inputs | None, int | None]:
    """Check those of a run's inputs that are on this machine, and add the others to `absent`.

    Return everything that a run reads, or None if a part is absent, and the number of prompts, or None if it is not
    known.
    """
    config = parsed.config
    check_run_folders(config.checkpoint, folder)
    functions = [source.targets[0] for source in config.reward.sources() if source.kind == "function"]
    critic = config.model.critic_pretrain if config.algorithm.row.uses_critic else None
    has_model = absent.models("pretrain", config.model.pretrain)
    has_data = config.rollout.replay is None
    if has_data:
        data = config.data
        has_data = absent.data("prompt_data", data.prompt_data) and absent.data("eval_data", data.eval_data)
        absent.models("reward_pretrain", *parts(config.reward.reward_pretrain or ""))
        absent.rewards("remote_rm_url", functions)
    absent.models("critic_pretrain", critic)
    absent.models("teacher_model", *config.algorithm.teacher_paths)
    absent.models("vllm_draft_model", config.engine.vllm_draft_model)
    if not absent and not parsed.missing:
        inputs = check_inputs(config, folder)
        return inputs, len(inputs.prompts) or None
    check_own_losses(config.own_code, folder)
    if has_model and config.model.pretrain is not None:
        _check_model(config, config.model.pretrain)
    num_prompts = None
    if has_data and config.data.prompt_data is not None:
        rows, _ = open_prompts(config)
        num_prompts = sum(1 for _ in rows)
    return None, num_prompts


def _check_model(config: PpoConfig, name: str) -> None:
    """Raise ConfigError for a model that cannot be run as the flags say."""
    model_config, _ = load_model_files(model_path(name), images=bool(config.images))
    check_attention(config.model, model_config)
    check_experts(config.model, model_config)
    check_engine(model_config, images=bool(config.images))
    check_context(model_config, *longest_sequence(config))
    check_adapters(config.model, model_config)


def _plan(parsed: Parsed[PpoConfig], absent: Absent) -> PlacementPlan:
    """Return the placement for the first of these: --plan_gpus, the GPUs here, as many GPUs as the flags ask for.

    What is assumed, or does not fit on the GPUs here, is added to `absent`.
    """
    config = parsed.config
    placement = config.placement
    node_size = max(_GPUS_OF_A_NODE, placement.most_gpus_per_node, config.engine.vllm_tensor_parallel_size)
    if (planned := placement.plan_gpus) is not None:
        absent.unseen.append(f"GPUs: planned for --plan_gpus {planned}")
        full = [node_size] * (planned // node_size)
        return make_plan(config, [*full, planned % node_size])
    try:
        here, _ = find_gpus()
    except ConfigError as error:  # the Ray cluster does not answer
        here = []
        absent.unseen.append(str(error).partition("\n")[0])
    if not sum(here) and not GPU_FLAGS & parsed.given:
        return make_plan(config, [])
    needed = plan_anywhere(make_request(config), node_size)
    if not sum(here):
        absent.unseen.append(f"GPUs: there are none here; planned for the {needed.num_gpus} that the flags name")
        return make_plan(config, needed.nodes)
    try:
        return make_plan(config, here)
    except ConfigError as error:
        absent.missing.append(str(error))
        return needed
