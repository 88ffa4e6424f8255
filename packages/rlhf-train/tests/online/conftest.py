"""A run in this process, for the tests of this folder."""

from online_runs import make_run, model_path

__all__ = ["make_run", "model_path"]
