"""OpenRLHF's command modules: `python -m rlhf_cli.train_ppo_ray ...` runs `rlhf ppo ...` with OpenRLHF's flags."""

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from rlhf_cli.console.exits import exit_status
from rlhf_cli.main import run as rlhf
from rlhf_cli.preflight.launcher import LAUNCHED
from rlhf_data.errors import ConfigError, unknown

# By module of `openrlhf.cli`, the command of `rlhf`.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train_ppo_ray": "ppo",
        "train_ppo": "ppo",
        "train_sft": "sft",
        "train_rm": "rm",
        "train_dpo": "dpo",
        "train_kto": "kto",
        "train_prm": "prm",
        "train_kd": "kd",
        "batch_inference": "generate",
        "interactive_chat": "chat",
        "serve_rm": "serve_rm",
        "lora_combiner": "lora_combiner",
    }
)

# By `--eval_task` of batch_inference, the words of the command here.
_EVAL_TASKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generate_vllm": ("generate", "--engine", "vllm"),
        "generate": ("generate", "--engine", "transformers"),
        "rm": ("score",),
    }
)


def run(module: str) -> NoReturn:
    """Run the command that corresponds to `module` as this process, and end with its exit status."""
    sys.exit(main(module))


def main(module: str, argv: Sequence[str] | None = None) -> int:
    """Run the command that corresponds to `module`; return its exit status.

    Args:
        module: the module's dotted name, such as `rlhf_cli.train_ppo_ray`.
        argv: OpenRLHF's flags; None for the process's own.
    """
    name = module.rpartition(".")[2]
    typed = f"python3 -m rlhf_cli.{name}"
    return exit_status(lambda words: rlhf(_command_words(name, list(words)), typed), argv)


def _command_words(name: str, words: list[str]) -> list[str]:
    """Return the words of `rlhf` for the words of a module. `--eval_task` of batch_inference selects the command."""
    if name != "batch_inference":
        compares = ["--openrlhf"] if COMMANDS[name] in ("ppo", *LAUNCHED) else []
        return [COMMANDS[name], *compares, *words]
    taken: dict[str, str | None] = {"eval_task": None, "post_processor": None}
    rest = []
    while words:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        option = flag.removeprefix("--").replace("-", "_")
        if option not in taken or not flag.startswith("--"):
            rest.append(word)
        elif has_value or words:
            taken[option] = value if has_value else words.pop(0)
    task = taken["eval_task"]
    if task is None:
        if {"-h", "--help"} & set(rest):
            return [COMMANDS[name], *rest]
        kinds = ", ".join(_EVAL_TASKS)
        raise ConfigError("--eval_task is missing: it says what batch_inference does", hint=f"give one of {kinds}")
    if task not in _EVAL_TASKS:
        raise ConfigError(f"--eval_task: {unknown('value', task, _EVAL_TASKS)}")
    return [*_EVAL_TASKS[task], *_post_processor(task, taken["post_processor"]), *rest]


def _post_processor(task: str, given: str | None) -> list[str]:
    """Return the words that make the rows of OpenRLHF's `--post_processor`, which is `given`, or of none."""
    if given in (None, "None", "null"):
        # OpenRLHF writes the rendered prompt and the response, which its later tasks and trainers read as they are.
        return [] if task == "rm" else ["--post_processor", "rendered"]
    # OpenRLHF's `rs` keeps the response with the highest reward, for each prompt. Ours keeps those that are right.
    return ["--post_processor", "best_of_n" if given == "rs" else given]
