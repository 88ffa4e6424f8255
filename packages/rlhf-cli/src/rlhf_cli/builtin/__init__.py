"""What `ppo` runs on when it is given nothing: a tiny model, prompts with answers, and a recipe with a rule reward.

`tools/builtin/` of the repository makes the model and the data anew.
"""

from pathlib import Path

BUILTIN = "builtin"
"""The name that stands for the model, the prompts or the held-out prompts of this folder."""

_FOLDER = Path(__file__).resolve().parent

MODEL_DIR = _FOLDER / "model"
TRAIN_FILE = _FOLDER / "data" / "train.jsonl"
HELD_OUT_FILE = _FOLDER / "data" / "held_out.jsonl"
RECIPE_FILE = _FOLDER / "recipe.toml"
