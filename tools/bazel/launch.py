"""Starts a command of the repository under `bazel run` as if it were installed."""

import os
import runpy
import sys


def run(module: str) -> None:
    """Runs `module` as `__main__`, in the user's folder, with the import path handed on to child processes.

    Ray starts its workers with this interpreter and environment, and the packages under `src/` are known to this
    process only: Bazel's stub put them on `sys.path`.
    """
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [os.path.abspath(path) if path in own else path for path in sys.path if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in own))
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
