"""Serves the report to a browser on this machine, follows runs that go on, and looks for rollouts in their files."""

import json
import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rlhf_cli.report.page import follow_data, group_data, html, report_data
from rlhf_cli.report.rollouts import Filter, RolloutFile, Row, with_gaps
from rlhf_cli.report.runs import read_run
from rlhf_cli.report.samples import Recorded, choose, recorded
from rlhf_cli.report.tokens import Texts
from rlhf_data.errors import ConfigError, DataError
from rlhf_train.run.recorder import artifact_path

HOST = "127.0.0.1"
MAX_FOUND = 2000  # rollouts in an answer to a search
MAX_FOUND_TOKENS = 300_000
_NUMBERS = {"first_step": int, "last_step": int, "min_tokens": int, "max_tokens": int}
_NUMBERS |= {"min_reward": float, "max_reward": float}


class Report:
    """The report of runs that may go on.

    Args:
        folders: of the runs.
        limits: rollouts and tokens in the page; see `report_data`.

    Raises:
        DataError: a folder has no run.
    """

    def __init__(self, folders: Sequence[Path], limits: tuple[int, int]) -> None:
        self._folders = folders
        self._limits = limits
        self._files: dict[Path, Recorded] = {}
        self._lock = Lock()  # requests come on several threads
        self._read()

    def page(self) -> str:
        """Return the page."""
        with self._lock:
            return html(report_data(self._read(), *self._limits, served=True))

    def news(self) -> dict[str, Any]:
        """Return what the page shows besides rollouts, as it is now."""
        with self._lock:
            return follow_data(self._read())

    def find(self, query: dict[str, str]) -> dict[str, Any]:
        """Return groups with a rollout that is wanted, their tokens' texts, and the number of such rollouts.

        Args:
            query: the number of the `run`, the `kind` of rollouts, and fields of `Filter`. The last two are optional.

        Raises:
            ValueError, IndexError: a value that is none of those.
        """
        wanted = _filter(query)
        gaps = [float(query[name]) if query.get(name) else None for name in ("min_gap", "max_gap")]
        run = read_run(self._folders[int(query["run"])])
        texts = Texts(run)
        groups = []
        num_found = 0
        with self._lock:
            files = [file for path, file in self._files.items() if path.parent == run.folder]
            files = [file for file in files if query.get("kind", file.kind) == file.kind]
            for file in files:
                found = _matching(file, wanted)
                if gaps != [None, None]:
                    found = list(with_gaps(found, artifact_path(run.folder, "token values"), *gaps))
                num_found += len(found)
                names = {(row.step, row.group_id) for row in found}
                rows = [row for row in file.rows if (row.step, row.group_id) in names]
                groups += group_data(file, choose(rows, MAX_FOUND, MAX_FOUND_TOKENS), texts)
        return {"groups": groups, "vocabulary": texts.seen, "num_found": num_found}

    def _read(self) -> list[tuple[Any, list[Recorded]]]:
        runs = []
        for folder in self._folders:
            files = [self._files.setdefault(file.file.path, file) for file in recorded(folder)]
            for file in files:
                file.read()
            runs.append((read_run(folder), files))
        return runs


def _filter(query: dict[str, str]) -> Filter:
    numbers = {name: kind(query[name]) for name, kind in _NUMBERS.items() if query.get(name)}
    sets = {name: frozenset([query[name]]) for name in ("verdicts", "finish_reasons") if query.get(name)}
    return Filter(**numbers, **sets, text=query.get("text") or None)


def _matching(file: Recorded, wanted: Filter) -> list[Row]:
    """Return the rows that are wanted. Only a text needs the file again."""
    if wanted.text is None:
        return [row for row in file.rows if wanted.accepts(row, {})]
    return [row for row, _ in RolloutFile(file.file.path).rows(wanted)]


def open_server(report: Report, port: int) -> tuple[ThreadingHTTPServer, str]:
    """Return a server that answers this machine only, and the address of the page, whose path has a secret.

    Raises ConfigError when the port cannot be used.
    """
    token = secrets.token_urlsafe(24)

    answers = {
        f"/{token}/": lambda query: ("text/html; charset=utf-8", report.page()),
        f"/{token}/news": lambda query: ("application/json", json.dumps(report.news())),
        f"/{token}/rollouts": lambda query: ("application/json", json.dumps(report.find(query))),
    }
    try:
        server = ThreadingHTTPServer((HOST, port), type("Handler", (_Handler,), {"answers": answers}))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--port {port} cannot be used: {reason}", hint="use --port 0 for any free port") from None
    return server, f"http://{HOST}:{server.server_port}/{token}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers requests whose path holds the secret; to others there is nothing here."""

    answers: dict[str, Callable[[dict[str, str]], tuple[str, str]]]
    timeout = 60  # seconds without a byte of a request

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        found = [
            answer for path, answer in self.answers.items() if secrets.compare_digest(path.encode(), _path(url.path))
        ]
        if not found:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found")
            return
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        try:
            kind, text = found[0](query)
        except DataError as error:
            self._send(HTTPStatus.CONFLICT, "text/plain", str(error))
        except (ValueError, LookupError) as error:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"the question is wrong: {error}")
        else:
            self._send(HTTPStatus.OK, kind, text)

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address is a secret
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a line per request would hide what the command says."""


def _path(path: str) -> bytes:
    return path.encode("utf-8", "replace")
