"""The reward server over a real socket, with a tiny reward model behind it and `RemoteReward` as the client."""

import asyncio
import contextlib
import sys
import threading
import time

import httpx
import pytest
import uvicorn

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import RewardError
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.records import Verdict, VerdictKind
from rlhf_data.rows.row import Row
from rlhf_data.testing import ByteTokenizer
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.commands import main as command
from rlhf_rollout.commands import serve_rm
from rlhf_rollout.commands.serve_rm import MAX_QUERIES, create_app
from rlhf_rollout.host import free_port
from rlhf_rollout.rewards.model import LocalScorer, ModelReward
from rlhf_rollout.rewards.remote import RemoteReward, check_reward_server
from rlhf_rollout.rewards.sources import CallOptions
from rollout_testing import app_server

ANSWERS = [("two plus two is", " four"), ("two plus two is", " five or so"), ("the sky", " is blue"), ("", "alone")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_reward_model_dir(tmp_path_factory.mktemp("models") / "rm")


class Counting:
    """A scorer that also keeps the sizes of its batches."""

    def __init__(self, scorer):
        self.scorer, self.batches = scorer, []

    async def score(self, token_ids):
        self.batches.append(len(token_ids))
        return await self.scorer.score(token_ids)


@contextlib.contextmanager
def serving(reward, tokenizer, token=""):
    """Yield the URL of a server on a port of its own."""

    resources = contextlib.AsyncExitStack()
    resources.push_async_callback(reward.close)
    app = create_app(reward, tokenizer, resources, token=token)
    with app_server(app) as url:
        yield url


def ask(url, answers):
    """Score each answer through `RemoteReward`, a request each, all at once."""

    async def run():
        reward = RemoteReward([url + "/get_reward"], CallOptions(batch_size=1))
        try:
            prompts = [make_prompt(prompt or " ", "label") for prompt, _ in answers]
            calls = [
                reward.score(prompt, [make_rollout(prompt, text)])
                for prompt, (_, text) in zip(prompts, answers, strict=True)
            ]
            return [verdict for [verdict] in await asyncio.gather(*calls)]
        finally:
            await reward.close()

    return asyncio.run(run())


def test_model_behind_the_server_scores_as_it_was_trained_and_batches_across_requests(model_dir, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.http.batcher.MAX_WAIT_S", 30.0)
    scorer, tokenizer = Counting(LocalScorer(str(model_dir))), load_tokenizer(str(model_dir))
    with serving(ModelReward([scorer], CallOptions(batch_size=3)), tokenizer) as url:
        verdicts = ask(url, ANSWERS[:3])
    # The tokens that the trainers make of the same rows: prompt and answer apart, one EOS.
    encoder = SftEncoder(tokenizer=tokenizer)
    rows = [Row({"input": prompt, "output": answer}, "t", 1) for prompt, answer in ANSWERS[:3]]
    expected = asyncio.run(LocalScorer(str(model_dir)).score([encoder(row).token_ids for row in rows]))
    assert [verdict.reward for verdict in verdicts] == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 3
    assert scorer.batches == [3]


def test_a_query_longer_than_max_len_is_refused():
    app = create_app(Told(), ByteTokenizer(), contextlib.AsyncExitStack(), max_len=7)
    with app_server(app) as url:
        assert post(url, {"query": ["12345"]}).json()["rewards"] == [5.0]  # with tokens of its start and end 7 tokens
        answer = post(url, {"query": ["1", "123456"]})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "query 1 has 8 tokens, more than --max_len 7 of the server"


class Told:
    """A reward that is the number of characters of the response, with a log; it fails for `bad`."""

    def __init__(self):
        self.asked = []

    async def score(self, prompt, rollouts):
        self.asked += [(prompt.text, rollout.text, prompt.label) for rollout in rollouts]
        if any(rollout.text == "broken" for rollout in rollouts):
            raise RewardError("the function cannot run\n\nhint: no")
        crash = Verdict(VerdictKind.CRASH, detail="bad")
        lengths = [float(len(rollout.text)) for rollout in rollouts]
        verdicts = [Verdict(VerdictKind.OK, length, 0.5, extra={"log": 1.0}) for length in lengths]
        return [crash if r.text == "bad" else v for r, v in zip(rollouts, verdicts, strict=True)]

    async def close(self):
        self.asked.append("closed")


def post(url, body, **headers):
    return httpx.post(url + "/get_reward", json=body, headers=headers)


def test_server_answers_with_rewards_scores_logs_and_verdicts():
    reward = Told()
    with serving(reward, ByteTokenizer()) as url:
        body = {"query": ["p ab", "p bad"], "prompts": ["p ", "p "], "labels": ["x", None]}
        assert post(url, body).json() == {
            "rewards": [2.0, 0.0],
            "scores": [0.5, 0.0],
            "extra_logs": {},
            "verdicts": ["ok", "crash"],
        }
        assert post(url, {"query": ["abc"]}).json()["extra_logs"] == {"log": [1.0]}
        assert httpx.get(url + "/health").json() == {"status": "ok"}
        assert post(url, {"query": []}).json()["rewards"] == []
        assert check_reward_server([url + "/get_reward"], [make_prompt("p", "bad")]) is None
    assert reward.asked[:3] == [("p ", "ab", "x"), ("p ", "bad", None), ("", "abc", None)]
    assert reward.asked[-1] == "closed"


def test_server_refuses_what_is_no_request():
    bodies = [{}, {"query": "text"}, {"query": ["a", "b"], "prompts": ["a"]}, {"query": ["ab"], "prompts": ["b"]}]
    with serving(Told(), ByteTokenizer()) as url:
        for body in (*bodies, {"query": ["a"] * (MAX_QUERIES + 1)}):
            assert post(url, body).status_code == 422
        assert post(url, {"query": ["a"] * 3}).json()["rewards"] == [1.0] * 3


def test_server_does_not_wait_for_ever(monkeypatch):
    class Hanging(Told):
        async def score(self, prompt, rollouts):
            await asyncio.sleep(3600)

    monkeypatch.setattr(serve_rm, "ANSWER_TIMEOUT_S", 0.2)
    with serving(Hanging(), ByteTokenizer()) as url:
        assert post(url, {"query": ["a"]}).status_code == 504


def test_server_failure_of_one_answer_is_charged_to_it_alone():
    with serving(Told(), ByteTokenizer()) as url:

        async def run():
            reward = RemoteReward([url + "/get_reward"], num_retries=0)
            prompt = make_prompt("p")
            try:
                return await reward.score(prompt, [make_rollout(prompt, text) for text in ("ab", "broken", "bad", "c")])
            finally:
                await reward.close()

        verdicts = asyncio.run(run())
    assert [verdict.reward for verdict in verdicts] == [2.0, None, None, 1.0]
    assert "the function cannot run" in verdicts[1].detail


@contextlib.contextmanager
def command_running(monkeypatch, *arguments):
    """Run `serve_rm` with `arguments` in a thread, on a port of its own; yield the port."""
    servers = []

    class Kept(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(sys.modules[uvicorn.run.__module__], "Server", Kept)
    port, codes = free_port(), []
    arguments = ["serve_rm", *arguments, "--port", str(port)]
    thread = threading.Thread(target=lambda: codes.append(command.main(arguments)), daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not (servers and servers[0].started):
            assert time.monotonic() < deadline and thread.is_alive()
            time.sleep(0.01)
        yield port
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(60)
    assert codes == [0]


def answers(host, port):
    """Whether a server at this address says that it is up."""
    try:
        return httpx.get(f"http://{host}:{port}/health").json() == {"status": "ok"}
    except httpx.ConnectError:
        return False


# All of 127.0.0.0/8 is this machine, but a server that is bound to 127.0.0.1 alone answers nowhere else.
OTHER_ADDRESS = "127.0.0.2"


def test_command_listens_on_this_machine_only_unless_told_otherwise(model_dir, monkeypatch, capsys):
    model = ("--reward_pretrain", str(model_dir))
    with command_running(monkeypatch, *model, "--max_len", "7") as port:
        assert answers("127.0.0.1", port) and not answers(OTHER_ADDRESS, port)
        said = post(f"http://127.0.0.1:{port}", {"query": ["nine " * 9]})
        assert said.status_code == 422 and "more than --max_len 7" in said.text
    capsys.readouterr()
    for host in ("0.0.0.0", "::", "203.0.113.1", ""):
        assert command.main(["serve_rm", *model, f"--host={host}"]) == 2
        said = capsys.readouterr().err
        option = f"--host {host}".rstrip()
        assert f"error: {option} lets other machines use this server, and no token is set\n\nhint: set" in said
    monkeypatch.setenv("RLHF_REMOTE_RM_TOKEN", "secret")
    with command_running(monkeypatch, *model, "--host", "0.0.0.0") as port:
        url = f"http://{OTHER_ADDRESS}:{port}"
        assert post(url, {"query": ["a"]}).status_code == 401
        assert post(url, {"query": ["a"]}, Authorization="Bearer secret").status_code == 200


def test_command_without_a_usable_reward_is_refused(model_dir, capsys):
    plain = str(tiny_model_dir(model_dir.parent / "policy"))
    assert command.main(["serve_rm", "--reward_pretrain", plain]) == 2
    assert "error:" in capsys.readouterr().err
    assert command.main(["serve_rm"]) == 2
    assert "nothing says how answers are scored" in capsys.readouterr().err
