"""Start a command of the repository under `bazel run` as if it were installed."""

import os
import runpy
import sys


def run(module: str) -> None:
    """Run `module` as `__main__`, in the user's folder, and pass the import path on to child processes.

    Ray starts its workers with this interpreter and environment. Bazel's stub puts the packages under `src/` on
    `sys.path` of this process only, so workers would not find them without PYTHONPATH.
    """
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [os.path.abspath(path) if path in own else path for path in sys.path if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in own))
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
