"""The commands that `rlhf-rollout` has too: the same ones, which also know the model and the data that ship."""

from collections.abc import Sequence
from itertools import pairwise

from rlhf_cli.builtin import BUILTIN, MODEL_DIR, TRAIN_FILE

_SHIPPED = {
    **dict.fromkeys(("--model", "--pretrain", "--tokenizer"), MODEL_DIR),
    **dict.fromkeys(("--prompts", "--prompt_data", "--dataset"), TRAIN_FILE),
}


def run_tool(name: str, argv: Sequence[str]) -> int:
    """Run `rlhf-rollout NAME`; return its exit status."""
    from rlhf_rollout.commands.main import main

    words = [part for word in argv for part in (word.split("=") if word.endswith(f"={BUILTIN}") else [word])]
    flags_before = pairwise(["", *words])
    words = [str(_SHIPPED[flag]) if word == BUILTIN and flag in _SHIPPED else word for flag, word in flags_before]
    return main([name, *words], prog="rlhf")
