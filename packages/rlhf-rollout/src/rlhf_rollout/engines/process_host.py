"""The process of a `ProcessEngine`: builds the engine and answers calls."""

import logging
import os
import socket
import sys
from collections.abc import Mapping
from logging.handlers import BufferingHandler
from typing import Any

from rlhf_data.errors import RlhfError
from rlhf_rollout.engines.build import build_engine
from rlhf_rollout.engines.process import packed, unpacked
from rlhf_rollout.engines.remote_engine import EngineHost
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.host import collection_paused, spare_collection
from rlhf_rollout.workers.serving import serve_side_by_side
from rlhf_rollout.workers.user_code import Target


class _Host(EngineHost):
    def __init__(self) -> None:
        self._drafts = {}
        self._logged = BufferingHandler(sys.maxsize)  # for the process that shows it to the user
        logging.getLogger("rlhf_rollout").addHandler(self._logged)

    async def __call__(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a call."""
        is_raised = False
        try:
            result = await getattr(self, message["method"])(*unpacked(message["arguments"]))
        except RlhfError as error:
            is_raised = True
            result = error
        with self._logged.lock:  # any thread may log
            logged = [(record.name, record.levelno, record.getMessage()) for record in self._logged.buffer]
            self._logged.flush()
        return {"result": packed(result), "is_raised": is_raised, "logged": logged}

    async def ready(self, kind: str, spec: EngineSpec, environ: Mapping[str, str]) -> None:
        """Build the engine, with these variables in the environment. Other calls wait."""
        os.environ.update(environ)
        with collection_paused():
            self.part = build_engine(kind, spec)
        spare_collection()


def serve(connection: socket.socket, first: Mapping[str, Any]) -> None:
    """Serve the engine that the first call describes, until the connection closes."""
    serve_side_by_side(connection, Target(**first["target"]), _Host, lambda message, ask: message)
