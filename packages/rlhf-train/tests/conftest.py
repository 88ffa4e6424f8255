"""A run whose engine and ranks are in this process."""

from online_runs import make_run, model_path

__all__ = ["make_run", "model_path"]
