"""`lora_combiner`: merge an adapter into its model."""

import sys
from collections.abc import Sequence

from rlhf_cli.config.command_line import parse, to_toml
from rlhf_cli.config.lora_combiner import LoraCombinerConfig
from rlhf_cli.exits import SUCCESS, exit_status
from rlhf_cli.paths import model_path, user_path
from rlhf_data.errors import ConfigError, with_hint

DESCRIPTION = "Merge a low-rank adapter into its model, or reward model, and write a plain Hugging Face model folder."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parsed = parse(LoraCombinerConfig, argv, prog="rlhf lora_combiner", description=DESCRIPTION, resolve=user_path)
    merge = parsed.config.merge
    out = user_path(merge.output_path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(with_hint(f"--output_path {out} is not an empty folder", "name a new one"))
    if parsed.dry_run:
        print(to_toml(parsed.config))
        return SUCCESS
    from rlhf_models.lora import merge_adapter

    merge_adapter(model_path(merge.model_path), user_path(merge.lora_path), out, dtype=merge.param_dtype)
    print(f"written to {out}")
    return SUCCESS


if __name__ == "__main__":
    sys.exit(main())
