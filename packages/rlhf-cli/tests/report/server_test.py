"""The report behind an address of this machine: who gets it, what it tells of a run that goes on, what it finds."""

import contextlib
import http.client
import json
import re
import threading
from urllib.parse import urlencode, urlsplit

import pytest

from report_testing import write_run, write_token_values
from rlhf_cli.commands.report import main
from rlhf_cli.report.server import Report, open_server
from rlhf_data.errors import ConfigError, DataError


@contextlib.contextmanager
def served(*folders, limits=(100, 1000)):
    """Yield a function that asks for a path under the secret one, and returns status and text."""
    server, address = open_server(Report(folders, limits), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    home = urlsplit(address).path

    def get(path, base=home, method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, base + path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    try:
        yield get
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def page_data(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_only_the_address_with_the_secret_has_something(tmp_path):
    with served(write_run(tmp_path / "run")) as get:
        status, text = get("")
        assert (status, page_data(text)["served"]) == (200, True)
        for path, base in (("", "/"), ("news", "/"), ("x", "/wrong/"), ("", "/wrong/"), ("../", "/a/"), ("else", None)):
            assert get(path, **({} if base is None else {"base": base})) == (404, "not found")
        assert get("", method="POST")[0] == 501


def test_a_run_that_goes_on_is_followed(tmp_path):
    folder = write_run(tmp_path / "run", 2)
    more = write_run(tmp_path / "more", 3)
    with served(folder) as get:
        [run] = json.loads(get("news")[1])["runs"]
        assert (run["last_step"], run["files"][0]["num_rollouts"]) == (2, 4)
        assert "groups" not in run
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            (folder / name).write_bytes((more / name).read_bytes())
        [run] = json.loads(get("news")[1])["runs"]
        assert (run["last_step"], run["files"][0]["num_rollouts"]) == (3, 6)


@pytest.mark.parametrize("suffix", [".jsonl", ".columns"])
def test_rollouts_that_the_page_lacks_are_found(suffix, tmp_path):
    folder = write_run(tmp_path / "run", 9, answer="42", suffix=suffix)
    with served(folder, limits=(2, 100)) as get:
        [run] = page_data(get("")[1])["runs"]
        assert [group["step"] for group in run["groups"]] == [1]

        def find(**query):
            status, text = get("rollouts?" + urlencode({"run": 0, **query}))
            assert status == 200, text
            found = json.loads(text)
            return found["num_found"], [group["step"] for group in found["groups"]]

        assert find(first_step=4, last_step=5) == (4, [4, 5])
        assert find(min_reward=8) == (2, [8, 9])
        assert find(verdicts="wrong", last_step=2) == (2, [1, 2])
        assert find(text="42!", first_step=9, kind="training") == (1, [9])
        write_token_values(folder, 4)
        assert find(max_gap=0.5) == find(min_gap=0) == (1, [4])
        assert find(text="nowhere") == find(min_gap=0.4, max_gap=0.5) == (0, [])
        assert find(kind="held-out") == (0, [])
        assert find(min_tokens=4, max_tokens=4, first_step=9, finish_reasons="stop", text="") == (1, [9])


def test_wrong_questions_are_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    with served(folder) as get:
        for query in ("", "run=1", "run=x", "run=0&first_step=x"):
            assert get("rollouts?" + query)[0] == 400
        (folder / "rollouts.jsonl").unlink()
        status, text = get("rollouts?run=0&text=4")
        assert status == 409
        assert "rollouts.jsonl" in text


def test_a_server_needs_runs_and_a_port(tmp_path, capsys):
    with pytest.raises(DataError, match="there is no run in"):
        Report([tmp_path], (1, 1))
    report = Report([write_run(tmp_path / "run")], (1, 1))
    server, address = open_server(report, 0)
    with (
        contextlib.closing(server.socket),
        pytest.raises(ConfigError, match=r"cannot be used(.|\n)*hint: use --port 0"),
    ):
        open_server(report, server.server_port)
    assert address.startswith(f"http://127.0.0.1:{server.server_port}/")
    assert len(address.split("/")[3]) == 32
    assert main([str(tmp_path / "run"), "--port", "9"]) == 0
    assert "--port has no effect: there is no --serve" in capsys.readouterr().err
