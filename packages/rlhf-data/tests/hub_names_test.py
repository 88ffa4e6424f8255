"""Tokenizers and data sets by the names of a hub: revisions, what is downloaded, and what is said of refusals."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from rlhf_data import pretrained
from rlhf_data.hub_names import HubName, hub_name, hub_problem
from rlhf_data.own_code import TrustedModel

ASK = """
import json, os, sys
from rlhf_data.errors import RlhfError
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows.sources import open_sources

for name in sys.argv[1:]:
    if name.startswith("token:"):
        os.environ["HF_TOKEN"] = name[6:]
        continue
    try:
        open_sources(name[5:]) if name.startswith("data:") else load_tokenizer(name)
    except RlhfError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name", None)),
        ("owner/name@v1", HubName("owner/name", "v1")),
        ("owner/name@refs/pr/3", HubName("owner/name", "refs/pr/3")),
        ("owner/name@", None),
        ("name", None),
        ("name@v1", None),
        ("a/b/c@v1", None),
        ("./owner/name", None),
        ("~/name@v1", None),
        ("/name@v1", None),
    ],
)
def test_hub_name_is_an_owner_a_name_and_perhaps_a_revision(text, name):
    assert hub_name(text) == name


def test_errors_that_the_hub_did_not_cause_are_not_explained_by_it():
    assert hub_problem(ValueError("sizes differ"), "owner/name") is None
    assert hub_problem(OSError("no such file"), "owner/name") is None


ALWAYS = ["config.json", "chat_template.jinja"]
FILES = {
    "org/weights": ["model.safetensors", "value_head.bin", "a/model.safetensors", "pytorch_model.bin", "code.py"],
    "org/pickled": ["pytorch_model.bin", "a/pytorch_model.bin", "code.py"],
}


@pytest.mark.parametrize(
    ("name", "weights"),
    [("org/weights@v1", ["model.safetensors", "value_head.bin"]), ("org/pickled@v1", ["pytorch_model.bin"])],
)
def test_weights_of_a_revision_are_loaded_once_and_only_when_they_are_wanted(tmp_path, monkeypatch, name, weights):
    asked = []

    def download(repository, *, revision, allow_patterns, ignore_patterns, local_files_only):
        assert (revision, local_files_only) == ("v1", False)
        wanted = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        for file in filter_repo_objects([*ALWAYS, *FILES[repository]], **wanted):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        asked.append(repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(pretrained, "hub_answers", lambda: True)
    pretrained._pinned.cache_clear()
    for path, options, more in ((name, {"with_weights": False}, []), (name, {}, weights), (name, {}, weights)):
        assert pretrained.located(path, **options) == (str(tmp_path), True)
        assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")) == sorted([*ALWAYS, *more])
    assert len(asked) == (2 if "model.safetensors" in weights else 3)  # pickled ones are looked for last
    pretrained.located(TrustedModel(name))
    assert (tmp_path / "code.py").exists()


class Hub(BaseHTTPRequestHandler):
    """Refuses what is asked for, with the hub's status codes, which do not tell a stranger what there is."""

    def do_GET(self) -> None:
        is_known = "Authorization" in self.headers
        status, code = (404, "RepoNotFound") if is_known else (401, "")
        if "org/gated" in self.path:
            status, code = 403 if is_known else 401, "GatedRepo"
        elif "org/open" in self.path:
            status, code = 404, "RevisionNotFound"
        elif self.path == "/":
            status = 200
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


def told(home: Path, *names: str, **variables: str) -> list[str]:
    """Return what a process of its own is told about tokenizers and data sets; `home` is the folder of its cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", ASK, *names]
    run = subprocess.run(words, env=inherited | own | variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_what_the_hub_refuses_is_told_with_what_to_do(tmp_path):
    names = ["org/none", "org/gated", "org/gated@main", "org/open@v9", "data:org/none"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        said = told(tmp_path, *names, "token:hf_stranger", "org/gated", "org/none", HF_ENDPOINT=address)
        server.shutdown()
    unknown = "the hub has no model org/none that this user may see"
    log_in = "hint: check the name; for a private one, type `hf auth login`, or set HF_TOKEN"
    assert said[0] == f"ConfigError: cannot load the tokenizer org/none: {unknown}\n\n{log_in}"
    for text, kind in zip(said[1:3], ("tokenizer org/gated", "model org/gated@main"), strict=True):
        assert text.startswith(f"ConfigError: cannot load the {kind}: the hub gives org/gated only to users whom")
        assert "hint: ask for access on its page of the hub; then type `hf auth login`, or set HF_TOKEN" in text
    assert "org/open has no such revision v9\n\nhint: name a branch, a tag or a whole commit" in said[3]
    of_data = unknown.replace("model", "data set")
    assert said[4] == f"DataError: data set org/none cannot be opened: {of_data}\n\n{log_in}"
    assert "the hub gives org/gated only to users whom its owner admits" in said[5]
    assert "the hub has no model org/none" in said[6]


def test_names_that_are_not_in_the_cache_say_how_they_get_there(tmp_path):
    said = told(tmp_path, "org/other", "org/open@v2", "data:org/none", HF_HUB_OFFLINE="1")
    for text, name, command in zip(
        said,
        ("org/other", "org/open@v2", "org/none"),
        ("org/other`", "org/open --revision v2`", "org/none --repo-type dataset`"),
        strict=True,
    ):
        assert f"{name} is not in this machine's cache of the hub, and HF_HUB_OFFLINE forbids" in text, text
        assert "hint: unset HF_HUB_OFFLINE, or, to stay offline, load it where" in text
        assert f"`hf download {command}" in text
