"""A stand-in for the Hugging Face hub, for tests of what is looked up by name: `HF_ENDPOINT` is its address.

It serves what the hub's client asks for: information on a repository, its tree of files, and the files. Where there is
no such repository, revision or file, or a token is needed, it answers with the hub's status codes and `X-Error-Code`.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_admitted"  # of the only user who may read gated repositories


@dataclass
class Repository:
    """A model or data set.

    Attributes:
        revisions: the files by name, by commit; the last commit is that of `main`.
        tags: commits by further names.
        is_gated: whether only the user of `TOKEN` may read files.
        delay_s: how long the first byte of each answer about it takes.
    """

    revisions: dict[str, Mapping[str, bytes]]
    tags: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    delay_s: float = 0.0

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, tag or commit; None if there is none."""
        names = {"main": list(self.revisions)[-1], **self.tags}
        found = names.get(revision, revision)
        return found if found in self.revisions else None


@dataclass
class Hub:
    """A hub that is running.

    Attributes:
        url: its address.
        models, datasets: the repositories by `owner/name`.
        asked: method and path of each request, in order.
    """

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def commit_of(text: str) -> str:
    """Return a commit's name of 40 digits, made of a text."""
    return hashlib.sha1(text.encode()).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Yield a hub without repositories that answers on this machine."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answers(hub: Hub, home: object, code: str, questions: object, **environment: str) -> list:
    """Run code in a process of its own, which reads the hub's address from its environment, and return what it says.

    Args:
        hub: the only one that it knows.
        home: the folder of its cache.
        code: Python that reads JSON from its first argument, and prints lines of JSON.
        questions: what it reads.
        environment: further variables.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", code, json.dumps(questions)]
    run = subprocess.run(words, env=inherited | own | environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_) -> None:
        """Write nothing to the standard error of the test."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        words = path.strip("/").split("/")
        is_api = words[0] == "api"
        words = words[is_api:]
        repositories = self.hub.datasets if words[0] == "datasets" else self.hub.models
        if words[0] in ("datasets", "models"):
            words = words[1:]
        if len(words) < 2:
            self._send(b"{}")
            return
        repository = repositories.get("/".join(words[:2]))
        if repository is None:
            # The hub does not tell a stranger whether a private repository exists.
            status = 404 if "Authorization" in self.headers else 401
            self._refuse(status, "RepoNotFound" if status == 404 else "", "Repository not found")
            return
        time.sleep(repository.delay_s)
        if is_api:
            self._inform("/".join(words[:2]), repository, words[2:], body)
        else:
            self._serve(repository, words[2:])

    def _inform(self, name: str, repository: Repository, words: list[str], body: bytes) -> None:
        kind = words[0] if words else "revision"
        commit = repository.commit(words[1] if len(words) > 1 else "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {words[1]}")
            return
        files = repository.revisions[commit]
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            fields = {"private": False, "gated": "manual" if repository.is_gated else False, "tags": []}
            self._send_json({"id": name, "_id": commit[:24], "sha": commit, "siblings": siblings, **fields})
        elif kind == "tree":
            folder = "/".join(words[2:])
            self._send_json([_entry(file, data) for file, data in files.items() if file.startswith(folder)])
        elif kind == "paths-info":
            asked = json.loads(body)["paths"]
            self._send_json([_entry(file, files[file]) for file in asked if file in files])
        else:
            self._refuse(404, "EntryNotFound", f"no {kind}")

    def _serve(self, repository: Repository, words: list[str]) -> None:
        _, revision, *rest = words  # "resolve", the revision, and the file
        if repository.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 403 if "Authorization" in self.headers else 401
            self._refuse(status, "GatedRepo", "Access to this repository is restricted")
            return
        commit = repository.commit(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        data = repository.revisions[commit].get("/".join(rest))
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        self._send(data, headers={"X-Repo-Commit": commit, "ETag": f'"{_object_id(data)}"'})

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        codes = {"X-Error-Code": code} if code else {}
        self._send(b"", status, {**codes, "X-Error-Message": text, **(headers or {})})

    def _send(self, data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        start = 0
        asked = self.headers.get("Range", "")
        if status == 200 and asked.startswith("bytes=") and not asked.startswith("bytes=-"):
            start = int(asked[6:].partition("-")[0])
            status = 206
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[start:])


def _object_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as Git names a file


def _entry(file: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": file, "size": len(data), "oid": _object_id(data)}
