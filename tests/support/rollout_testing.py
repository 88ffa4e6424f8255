"""Helpers for tests of rlhf-rollout: weight buckets without a trainer, and HTTP servers."""

import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from rlhf_rollout.rewards.function import RewardCall
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket, aligned, bucket_checksum
from rlhf_rollout.workers.rpc import WorkerProcess


@contextmanager
def shared_memory_bucket(weights: Mapping[str, np.ndarray], *, checksum: bool = False) -> Iterator[WeightBucket]:
    """Yield a bucket that holds `weights` in shared memory. The segment is removed when the context ends."""
    specs = []
    offset = 0
    for name, array in weights.items():
        specs.append(TensorSlot(name, array.dtype.name, array.shape, offset, array.nbytes))
        offset = aligned(offset + array.nbytes)
    buffer = np.zeros(max(offset, 1), np.uint8)
    for spec, array in zip(specs, weights.values(), strict=True):
        buffer[spec.offset_bytes : spec.offset_bytes + spec.size_bytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    sum_of_all = bucket_checksum(buffer, tuple(specs)) if checksum else None
    with tempfile.NamedTemporaryFile(prefix="rlhf-test-", dir="/dev/shm") as file:
        file.write(buffer.tobytes())
        file.flush()
        yield WeightBucket("shared_memory", tuple(specs), (file.name, 0), sum_of_all)


def limit_only(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[list[str]], bool]) -> None:
    """Keep the time limit of a reward function's calls where `hangs(queries)`, and give a minute to all other calls.

    A call that hangs is then late, and no other one is, however busy the machine.
    """
    call = WorkerProcess.call

    async def patient(worker: WorkerProcess, asked: Any, timeout_s: float) -> Any:
        if isinstance(asked, RewardCall) and not hangs(
            [prompt.text + rollout.text for prompt, rollout in asked.samples]
        ):
            timeout_s = 60.0
        return await call(worker, asked, timeout_s)

    monkeypatch.setattr(WorkerProcess, "call", patient)


def generate_words(prompts: Any, out: Any, *more: str) -> list[str]:
    """Return the command line that answers prompts with the fake engine."""
    return ["generate", "--engine", "fake", "--prompt_data", str(prompts), "--output_path", str(out), *more]


@contextmanager
def json_server(respond: Callable[[Any, Mapping[str, str]], tuple[Any, ...]]) -> Iterator[str]:
    """Yield the URL of a server on this machine. It stops when the context ends.

    For each POST, `respond` is called in a thread of its own with the JSON body and the headers. It returns the status
    and the answer, and optionally a dictionary of headers. A text is sent unchanged, anything else as JSON.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer, *more = respond(body, {**self.headers, "path": self.path})
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(more[0] if more else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # tests let clients time out on purpose: keep their disconnects out of the output

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def said(text: Any, **usage: Any) -> dict[str, Any]:
    """Return the body of a judge's answer that says `text`, with the tokens that it counts."""
    body = {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    return body | ({"usage": usage} if usage else {})


def quoted(body: Mapping[str, Any], title: str) -> str | None:
    """Return what the question to a judge quotes under a title."""
    found = re.search(rf"(?s)BEGIN {title} (\w+)\n(.*?)\nEND {title} \1", body["messages"][1]["content"])
    return found and found[2]


class JudgeServer:
    """Answers the questions to a judge, for `json_server`.

    It gives what is in `answers` one after the other, and then what `respond` says: as the score the response itself.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []
        self.bodies: list[Any] = []
        self.headers: list[Mapping[str, str]] = []
        self.respond: Callable[[Any], tuple[Any, ...]] = self._grade
        self._lock = threading.Lock()
        self.url = ""

    def __call__(self, body: Any, headers: Mapping[str, str]) -> tuple[Any, ...]:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            answer = self.answers.pop(0) if self.answers else None
        return answer or self.respond(body)

    def _grade(self, body: Any) -> tuple[Any, ...]:
        return 200, said(f"<score>{quoted(body, 'RESPONSE')}</score>")


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """Yield a `JudgeServer` that runs at its `url`."""
    judge = JudgeServer()
    with json_server(judge) as url:
        judge.url = url + "/v1"
        yield judge


@contextmanager
def app_server(app: Any) -> Iterator[str]:
    """Yield the URL of an ASGI application, which a thread of this process serves until the context ends."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
