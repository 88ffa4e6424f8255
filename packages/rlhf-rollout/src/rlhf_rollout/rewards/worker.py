"""The program of a reward worker: imports the user's function, then answers calls over a socket until it closes.

The socket carries one JSON value a line, each way. Standard output and error are the user's own.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from io import BufferedIOBase
from typing import Any

from rlhf_data.errors import RewardError
from rlhf_rollout.rewards.user_function import RewardTarget, load_function, read_result

_PR_SET_PDEATHSIG = 1
_MAX_DETAIL = 500


def main(connection: socket.socket, requests: BufferedIOBase) -> None:
    """Serve the parent. The first line names the function, every further one is a call; each gets one line back."""
    os.set_inheritable(connection.fileno(), False)
    _die_with_parent()
    target = RewardTarget(**json.loads(requests.readline()))
    try:
        function = load_function(target)
    except RewardError as error:
        _send(connection, {"invalid": str(error)})
        return
    except BaseException as error:  # SystemExit included: the parent must hear of it
        _send(connection, {"error": _explain(error, target)})
        return
    _send(connection, {"ready": True})
    for line in requests:
        call = json.loads(line)
        try:
            result = function(call["queries"], call["prompts"], call["labels"])
            answer = {"scored": asdict(read_result(result, len(call["queries"])))}
        except RewardError as error:
            answer = {"invalid": str(error)}
        except BaseException as error:
            answer = {"error": _explain(error, target)}
        with contextlib.suppress(Exception):  # the function may have closed it
            sys.stdout.flush()
        _send(connection, answer)


def _send(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _explain(error: BaseException, target: RewardTarget) -> str:
    """Return the last line of the traceback, with the place in the user's file that it came through."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_DETAIL]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == target.module]
    return f"{text} ({os.path.basename(target.module)}:{frames[-1].lineno})" if frames else text


def _die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends, so that a hung call outlives no run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
