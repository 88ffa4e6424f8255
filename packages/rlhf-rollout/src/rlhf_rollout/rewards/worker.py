"""The program of a reward worker: imports the user's function, then answers calls until the connection closes.

The connection carries one JSON value per line in both directions. An answer has the number of its call. Standard output
and error belong to the user's function.
"""

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import IO, Any

from rlhf_data.errors import RewardError
from rlhf_rollout.rewards.user_function import RewardTarget, accepted_extras, explain, load_function, read_result


def serve(stream: IO[bytes], first: Mapping[str, Any]) -> None:
    """Import the function that the message `first` names, then answer the calls that arrive on `stream`."""
    target = RewardTarget(**first["target"])
    worker_id = os.getpid()

    def send(call: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the function may have closed stdout
            sys.stdout.flush()
        if os.getpid() != worker_id:  # the function has forked, and this is the child: only its parent answers
            os._exit(0)
        stream.write(json.dumps({"call": call["call"], **answer}).encode() + b"\n")
        stream.flush()

    extra_keys = first["extra_keys"]
    function, failure = _attempt(target, load_function, target, extra_keys)
    send(first, failure or {"extras": accepted_extras(function, extra_keys)})
    # Async functions share one event loop, so that their clients stay connected between calls.
    with asyncio.Runner() as runner:
        while function is not None and (line := stream.readline()):
            call = json.loads(line)
            scored, failure = _attempt(target, _score, function, call, runner)
            send(call, failure or {"scored": scored})


def _score(function: Callable[..., Any], call: Mapping[str, Any], runner: asyncio.Runner) -> dict[str, Any]:
    result = function(*call["arguments"], **call["extras"])
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    return asdict(read_result(result, len(call["arguments"][0])))


async def _awaited(result: Any) -> Any:
    return await result


def _attempt(target: RewardTarget, action: Callable[..., Any], *arguments: Any) -> tuple[Any, dict[str, str]]:
    """Return the result of `action` and an empty answer, or None and the answer that says why it failed."""
    try:
        return action(*arguments), {}
    except RewardError as error:
        return None, {"invalid": str(error)}
    except BaseException as error:  # also SystemExit: the parent must be told the reason
        return None, {"error": explain(error, target)}
