"""`rlhf COMMAND ...`: finds the command and hands it the flags."""

import importlib
import sys
from collections.abc import Sequence

from rlhf_cli.exits import BAD_INPUT, SUCCESS
from rlhf_data.errors import unknown

COMMANDS = {
    "ppo": "train a policy on rewards (PPO, GRPO)",
    "sft": "train a model on demonstrations",
    "generate": "sample responses to prompts, or make training data of them",
    "score": "give the answers in a file rewards",
    "serve_rm": "serve a reward, such as a reward model, over HTTP",
    "lora_combiner": "merge an adapter into its model",
    "chat": "talk to a model in the terminal",
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
    return importlib.import_module(f"rlhf_cli.commands.{words[0]}").main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
