"""The engines of `engine_testing`, which are built where a test asks for them."""

from engine_testing import model_dir, subject
from scripted_core import core, loop

__all__ = ["core", "loop", "model_dir", "subject"]
