"""Exit statuses of commands, how errors are shown to the user, and the choice of a command."""

import atexit
import gc
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rlhf_data.errors import ConfigError, DataError, RlhfError, unknown
from rlhf_data.safety import visible

SUCCESS, FAILURE, BAD_INPUT = 0, 1, 2
_SIGNALLED = 128  # plus the number of a signal: the exit status of a process that the signal ended

_FIELD = re.compile(r"``([A-Za-z][\w./]*(?:=[^`\n]*)?)``")
# What to type for the fields of libraries that have another name than the option that sets them.
FLAGS_OF_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "CallOptions.batch_size": "--reward_batch_size",
        "CheckpointSpec.every": "--save_steps",
        "CheckpointSpec.folder": "--ckpt_path",
        "CheckpointSpec.full=False": "--disable_ds_ckpt",
        "CorrectionSpec.level": "--is_correction_level",
        "CorrectionSpec.low/high": "--is_correction_threshold",
        "CorrectionSpec.mode": "--is_correction_mode",
        "CorrectionSpec.reject": "--is_reject",
        "CorrectionSpec.reject_low/reject_high": "--is_reject_threshold",
        "EntropySpec.top_quantile": "--top_entropy_quantile",
        "EntropySpec.target": "--entropy_target",
        "EngineSpec.tensor_parallel_size": "--vllm_tensor_parallel_size",
        "JudgeOptions.model": "--judge_model",
        "JudgeOptions.url": "--judge_url",
        "ModelSpec.offload": "--ref_reward_offload",
        "OfflineJob.model_path": "--save_path",
        "OptimizerSpec.offload": "--adam_offload",
        "OptimizerSpec.offload_path": "--adam_offload_path",
        "PlacementRequest.ranks": "--X_num_nodes times --X_num_gpus_per_node",
        "PlacementRequest.tensor_parallel_size": "--vllm_tensor_parallel_size",
        "DynamicSampling.reward_range": "--dynamic_filtering_reward_range",
        "ProcessEncoder.placeholder": "--placeholder_token",
        "RemoteReward.urls": "--remote_rm_url",
        "RewardModel.normalize": "--normalize_reward",
        "SftEncoder.pretrain": "--pretrain_mode",
        "adapter_rank": "--lora_rank",
        "adapter_rank=0": "--lora_sync merge",
        "asynchronous": "--async_train",
        "betas": "--adam_betas",
        "draft_model": "--vllm_draft_model",
        "dtype=bfloat16": "--bf16",
        "enable_sleep": "--vllm_enable_sleep",
        "estimator": "--advantage_estimator",
        "gpu_memory_utilization": "--vllm_gpu_memory_utilization",
        "images": "--image_key",
        "kl_coef": "--init_kl_coef",
        "muon_momentum=None": "--optim adam",
        "num_engines": "--vllm_num_engines",
        "num_frozen_steps": "--freezing_actor_steps",
        "num_samples": "--n_samples_per_prompt",
        "open_sources.preset": "--preset_data",
        "packing": "--packing_samples",
        "parse_sources.weights": "--reward_weights",
        "policy_loss": "--policy_loss_type",
        "quantization": "--vllm_quantization",
        "ranks.actor": "--actor_num_gpus_per_node",
        "reward_ranks": "--reward_num_gpus_per_node",
        "return_routes": "--routing_replay",
        "save_critic": "--save_value_network",
        "set_chat_template.text": "--tokenizer_chat_template",
        "speculative": "--vllm_speculative",
        "start_timeout_s": "--reward_start_timeout_s",
        "skip_patches": "--vllm_skip_patches",
        "teachers": "--teacher_model",
        "tensor_parallel_size": "--ds_tensor_parallel_size",
        "trainer_sleep": "--deepspeed_enable_sleep",
        "overlong_buffer": "--overlong_buffer_len",
        "whiten_std=False": "--no_advantage_std_norm",
        "TrustedModel": "--trust_remote_code",
        "WorkerOptions.env": "--reward_env",
        "weight_transfer=shared_memory": "--vllm_sync_backend host",
    }
)


def with_flags(text: str) -> str:
    """Return `text` with flags in place of the fields that libraries name in it, as ``field`` or ``field=value``."""

    def flag(found: re.Match[str]) -> str:
        name, _, value = found[1].partition("=")
        return FLAGS_OF_FIELDS.get(found[1]) or f"{FLAGS_OF_FIELDS.get(name, f'--{name}')} {value}".rstrip()

    return _FIELD.sub(flag, text)


def exit_status(command: Callable[[], int], *, failure: int = FAILURE) -> int:
    """Run `command` and return its exit status: 2 for bad input, `failure` for a run that failed, 130 after Ctrl-C, 143
    after SIGTERM, 141 when nobody reads stdout any more, as after `| head`.

    An error for the user (`RlhfError`) is printed to stderr without a traceback, and with flags for fields.
    """
    # The end of the process would search all that was imported for garbage, for up to a second.
    atexit.register(gc.freeze)
    try:
        status = command()
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()  # the interpreter's own flush, at its end, would report a closed pipe
        return status
    except BrokenPipeError:
        if not _lets_go_of_closed_stdout():
            raise
        return _SIGNALLED + signal.SIGPIPE
    except RlhfError as error:
        print(with_flags(visible(f"error: {error}")), file=sys.stderr, flush=True)
        return BAD_INPUT if isinstance(error, ConfigError | DataError) else failure
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted", file=sys.stderr)
        return _SIGNALLED + getattr(interrupt, "signal_number", signal.SIGINT)


def _lets_go_of_closed_stdout() -> bool:
    """Return whether nobody reads stdout any more; what is still written to it then goes nowhere."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # it was replaced by a stream without a descriptor, or closed
        return False
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def run_command(
    prog: str, titles: Mapping[str, str], argv: Sequence[str] | None, run: Callable[[str, list[str]], int]
) -> int:
    """Run one of a program's commands; return its status: 2 when it cannot run, 130 after Ctrl-C, else its own.

    Args:
        prog: the program's name.
        titles: name of a command to one line about it, for the list that is printed when no command is given.
        argv: the words of the command line; None for the process's own.
        run: takes the name of a command and the words after it; returns an exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if not words or words[0] in ("-h", "--help"):
            width = max(map(len, titles))
            lines = "\n".join(f"  {name.ljust(width)}  {title}" for name, title in titles.items())
            print(f"usage: {prog} COMMAND [flags]\n\n{lines}\n\n`{prog} COMMAND --help` lists a command's flags.")
            return SUCCESS
        name, *flags = words
        if name not in titles:
            message = unknown("command", name, titles, otherwise=f"`{prog} --help` says what they do")
            print(visible(f"error: {message}"), file=sys.stderr)
            return BAD_INPUT
        return run(name, flags)

    return exit_status(command, failure=BAD_INPUT)
