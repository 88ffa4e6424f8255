"""The sandbox on a server with SandboxFusion's protocol: what it is sent, what it answers, and how it fails."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError
from rlhf_data.records import VerdictKind
from rlhf_rollout.http.client import Client, RequestFailure
from rlhf_rollout.rewards.code.code_reward import CodeReward
from rlhf_rollout.rewards.code.sandbox import SandboxServer, check_sandbox
from rlhf_rollout.rewards.sources import CallOptions
from rollout_testing import json_server

OK, WRONG, CRASH = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH


def judge(url, label, *programs):
    prompt = make_prompt(label=label)
    reward = CodeReward(SandboxServer(url), CallOptions(timeout_s=120))
    rollouts = [make_rollout(prompt, f"```\n{program}\n```", index=index) for index, program in enumerate(programs)]
    return asyncio.run(reward.score(prompt, rollouts))


def run_program(request):
    """Answer as SandboxFusion does; the programs of these tests are harmless and run without a sandbox."""
    command = [sys.executable, "-c", request["code"]]
    done = subprocess.run(command, input=request["stdin"].encode(), capture_output=True, check=False)
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout.decode()}
    return {"status": "Success" if done.returncode == 0 else "Failed", "message": "", "run_result": result}


@pytest.fixture
def fusion():
    made = SimpleNamespace(requests=[], answer=None, status=200)

    def respond(request, headers):
        made.requests.append((headers["path"], request))
        return made.status, made.answer or run_program(request)

    with json_server(respond) as made.url:
        yield made


@pytest.mark.parametrize("form", ["stdin", "call", "assertions"])
def test_server_runs_programs(fusion, form):
    label = {
        "stdin": {"inputs": ["1", "2"], "outputs": ["2", "4"]},
        "call": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]},
        "assertions": ["assert f(1) == 2", "assert f(2) == 4"],
    }[form]
    programs = ["def f(x): return 2 * x\n", "def f(x): return x + 1\n"]
    programs = [program + "print(f(int(input())))" * (form == "stdin") for program in programs]
    verdicts = judge(fusion.url, json.dumps(label), *programs)
    assert [(verdict.kind, verdict.extra["passed"]) for verdict in verdicts] == [(OK, 1.0), (WRONG, 0.5)]
    path, request = fusion.requests[0]
    assert (path, request["language"]) == ("/run_code", "python")
    check_sandbox(fusion.url)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, {"status": "SandboxError", "message": "out of pods"}, "out of pods"),
        (200, {"status": "Failed", "message": "", "run_result": None}, "it wrote nothing"),
        (200, {"status": "Success", "run_result": {"stdout": "[1]\nhello\n"}}, "hello"),
        (200, "<html>", "JSONDecodeError"),
        (200, "[]", "AttributeError"),
        (503, {"status": "Success"}, "503"),
    ],
)
def test_server_that_fails_is_a_crash(fusion, status, answer, says):
    fusion.status, fusion.answer = status, answer
    (verdict,) = judge(fusion.url, json.dumps(["assert f(1) == 1"]), "def f(x): return x")
    assert verdict.kind is CRASH and says in verdict.detail and "\n" not in verdict.detail
    with pytest.raises(ConfigError, match="the sandbox of the reward `code` does not work"):
        check_sandbox(fusion.url)


def test_server_that_is_silent_is_given_up_after_twice_its_own_time_limit(monkeypatch):
    async def send(client, url, request):
        return RequestFailure(VerdictKind.TIMEOUT, f"limits {request['run_timeout']:g}, {client.timeout_s:g}")

    monkeypatch.setattr(Client, "send", send)
    (verdict,) = judge("http://127.0.0.1:9", json.dumps(["assert f(1) == 1"]), "def f(x): return x")
    assert verdict.kind is CRASH and "limits 180, 360" in verdict.detail  # 120 s of the tests and 60 s around them


def test_server_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"does not work: http://127\.0\.0\.1:9/run_code: ConnectError"):
        check_sandbox("http://127.0.0.1:9")


def test_server_url_must_be_one():
    with pytest.raises(ConfigError, match="is no URL"):
        SandboxServer("sandbox:8080")
