"""The `rlhf` commands. Nothing heavy is imported before the flags are parsed, so that --help is fast."""
