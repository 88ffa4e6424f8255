"""The program of a reward worker: imports the user's function, then answers calls over a connection until it closes.

The connection carries JSON values in both directions. Standard output and error belong to the user's function.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_rollout.rewards.user_function import RewardTarget, load_function, read_result

_PR_SET_PDEATHSIG = 1
_MAX_DETAIL = 500


def main(connection: Connection) -> None:
    """Serve the parent. The first message names the function, each later one is a call. Each gets one answer."""
    os.set_inheritable(connection.fileno(), False)  # a child of the function would keep it open after a crash
    _die_with_parent()
    target = RewardTarget(**json.loads(connection.recv_bytes()))
    try:
        function = load_function(target)
    except RewardError as error:
        _send(connection, {"invalid": str(error)})
        return
    except BaseException as error:  # also SystemExit: the parent must be told the reason
        _send(connection, {"error": _explain(error, target)})
        return
    _send(connection, {"ready": True})
    while True:
        try:
            call = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = function(call["queries"], call["prompts"], call["labels"])
            answer = {"scored": asdict(read_result(result, len(call["queries"])))}
        except RewardError as error:
            answer = {"invalid": str(error)}
        except BaseException as error:
            answer = {"error": _explain(error, target)}
        with contextlib.suppress(Exception):  # the function may have closed stdout
            sys.stdout.flush()
        _send(connection, answer)


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(json.dumps(value).encode())


def _explain(error: BaseException, target: RewardTarget) -> str:
    """Return the error as one line, with the last line of the user's file in its traceback."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_DETAIL]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == target.module]
    return f"{text} ({os.path.basename(target.module)}:{frames[-1].lineno})" if frames else text


def _die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it: a hung call must not outlive the run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
