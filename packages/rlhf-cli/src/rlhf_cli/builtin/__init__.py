"""What `ppo` uses without any flags: a tiny model, prompts with answers, and a recipe with a rule-based reward.

`tools/builtin/` in the repository creates the model and the data.
"""

from pathlib import Path

# The name that flags accept for the model, the prompts or the held-out prompts of this folder.
BUILTIN = "builtin"

_FOLDER = Path(__file__).resolve().parent

MODEL_DIR = _FOLDER / "model"
TRAIN_FILE = _FOLDER / "data" / "train.jsonl"
HELD_OUT_FILE = _FOLDER / "data" / "held_out.jsonl"
RECIPE_FILE = _FOLDER / "recipe.toml"
