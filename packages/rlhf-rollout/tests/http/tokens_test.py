"""A token reaches the server that it belongs to, and nobody else."""

import asyncio
import socket

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError
from rlhf_rollout.http.tokens import TOKEN_VARIABLE, tokens_of, unproxied
from rlhf_rollout.rewards.remote import RemoteReward
from rlhf_rollout.rewards.sources import RewardSource

HERE = "http://127.0.0.1:5000/get_reward"
FAR = "http://far:5000/get_reward"
SAFE = "https://far/get_reward"


@pytest.mark.parametrize(
    ("urls", "text", "tokens"),
    [
        ([HERE], "", {}),
        ([HERE], " t=,1 ", {HERE: "t=,1"}),
        (["http://[::1]:5000/x"], "t", {"http://[::1]:5000/x": "t"}),
        ([SAFE, "https://far:443/other"], "t", {SAFE: "t", "https://far:443/other": "t"}),
        ([FAR], "http://far:5000=t", {FAR: "t"}),
        ([FAR, SAFE, HERE], "http://far:5000/=a=b, https://far=c", {FAR: "a=b", SAFE: "c"}),
        ([HERE], "https://elsewhere=t", {}),
        ([], "t", {}),
    ],
)
def test_token_belongs_to_one_server(urls, text, tokens):
    assert tokens_of(urls, text) == tokens


@pytest.mark.parametrize(
    ("urls", "text", "message"),
    [
        ([FAR], "t0ken", r"would go to http://far:5000 without encryption\n\nhint: use https, or set .*far:5000=TOKEN"),
        ([HERE, SAFE], "t0ken", r"is one token for 2 servers: http://127.0.0.1:5000, https://far:443\n\nhint: say"),
        ([FAR], "http://far:5000", r"an entry has no `=` and token\n\nhint: write"),
        ([FAR], "http://far:5000=a,t0ken", r"an entry has no `=` and token"),
    ],
)
def test_token_that_would_go_to_others_is_refused_and_not_shown(urls, text, message):
    with pytest.raises(ConfigError, match=rf"(?s)^.*{TOKEN_VARIABLE}.*{message}") as caught:
        RemoteReward(urls, token=text)
    assert "t0ken" not in str(caught.value)


def test_requests_carry_the_token_of_their_server_and_follow_no_redirect():
    sent = []

    def answer(request):
        sent.append((str(request.url), request.headers.get("Authorization")))
        return httpx.Response(307, headers={"Location": "https://thief/x"})

    async def run():
        transport = httpx.MockTransport(answer)
        reward = RemoteReward([SAFE, HERE], token="https://far=t", num_retries=0, transport=transport)
        prompt = make_prompt("p")
        for _ in range(2):
            await reward.score(prompt, [make_rollout(prompt, "a")])
        await reward.close()

    asyncio.run(run())
    assert sorted(sent) == [(HERE, None), (SAFE, "Bearer t")]


@pytest.mark.parametrize("status", [200, 500])
def test_verdict_holds_neither_the_token_nor_the_query_of_a_server(status):
    def answer(request):
        return httpx.Response(status, text=f"you sent {request.headers['Authorization']} to {request.url}")

    async def run():
        transport = httpx.MockTransport(answer)
        url = "https://far/get_reward?key=s3cret"
        reward = RemoteReward([url], token="t0ken", num_retries=0, transport=transport)
        prompt = make_prompt("p")
        [verdict] = await reward.score(prompt, [make_rollout(prompt, "a")])
        await reward.close()
        return verdict.detail

    detail = asyncio.run(run())
    assert "https://far/get_reward?***" in detail and "you sent Bearer ***" in detail
    assert "s3cret" not in detail and "t0ken" not in detail


def test_name_of_a_server_in_metrics_has_no_secret():
    for url in ("http://me:s3cret@far:5000/x", "http://far:5000?key=s3cret", "http://far:5000/?key=s3cret"):
        assert RewardSource(kind="server", targets=(url,)).name.removeprefix("***@") == "far:5000"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("LOCALHOST", True),
        ("[::1]", True),
        (socket.gethostname(), True),
        ("0.0.0.0", True),  # every address of this machine
        ("192.0.2.1", False),  # an address for documents, which no machine has
        ("[2001:db8::1]", False),
        ("far", False),
    ],
)
def test_only_servers_on_this_machine_are_asked_without_the_proxy(host, is_here, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.2:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = f"http://{host}:5000/get_reward"
    with httpx.Client(mounts=unproxied([url])) as client:
        assert (client._transport_for_url(httpx.URL(url)) is client._transport) == is_here
