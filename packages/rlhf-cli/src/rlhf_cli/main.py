"""`rlhf COMMAND ...`: finds the command and hands it the flags."""

import importlib
import sys
from collections.abc import Sequence

from rlhf_cli.exits import BAD_INPUT, SUCCESS
from rlhf_data.errors import unknown
from rlhf_rollout.commands.main import COMMANDS as TOOLS

COMMANDS = {
    "ppo": "train a policy on rewards (PPO, GRPO)",
    "sft": "train a model on demonstrations",
    "rm": "train a reward model on pairs of answers",
    "dpo": "train a policy on pairs of answers (DPO, IPO, cDPO, SimPO, ORPO)",
    "kto": "train a policy on answers judged good or bad",
    "prm": "train a process reward model on judged steps",
    "kd": "train a model on demonstrations and a teacher",
    "lora_combiner": "merge an adapter into its model",
    **TOOLS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items())
        print(f"usage: rlhf COMMAND [flags]\n\n{lines}\n\n`rlhf COMMAND --help` lists a command's flags.")
        return SUCCESS
    if words[0] not in COMMANDS:
        print(f"error: {unknown('command', words[0], COMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    if words[0] in TOOLS:
        from rlhf_cli.tools import run_tool

        return run_tool(words[0], words[1:])
    if words[0] in ("ppo", "lora_combiner"):
        return importlib.import_module(f"rlhf_cli.commands.{words[0]}").main(words[1:])
    from rlhf_cli.commands.examples import COMMANDS as EXAMPLES

    return EXAMPLES[words[0]](words[1:])


if __name__ == "__main__":
    sys.exit(main())
