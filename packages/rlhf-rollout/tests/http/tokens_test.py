"""A token reaches the server that it belongs to, and nobody else."""

import socket

import httpx
import pytest

from rlhf_data.errors import ConfigError
from rlhf_rollout.http.tokens import TOKEN_VARIABLE, check_url, tokens_of, unproxied

HERE = "http://127.0.0.1:5000/get_reward"
FAR = "http://far:5000/get_reward"
SAFE = "https://far/get_reward"


def test_ports_go_from_1_to_65535():
    for url in ("http://host:1/v1", "https://host:65535"):
        assert check_url(url) == url


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
        tokens_of(urls, text)
    assert "t0ken" not in str(caught.value)


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
