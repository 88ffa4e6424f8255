"""The commands of the house: ppo, sft. Nothing heavy is imported before the flags are parsed."""
