"""Makes the engines of `engine_testing` fixtures of every test here; they are built where a test asks for them."""

from engine_testing import model_dir, subject

__all__ = ["model_dir", "subject"]
