"""Rewards from servers, on a network that is made up: values, turns, batches, retries, hangs, and unusable answers."""

import asyncio
import json

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.remote import TOKEN_VARIABLE, RemoteReward, check_reward_server
from rlhf_rollout.rewards.sources import CallOptions

pytestmark = pytest.mark.usefixtures("quick_retries")

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT
NO_SERVER = "http://127.0.0.1:9/get_reward"  # the discard port: nothing listens there


class Server:
    """A reward server. Answers (status, body) from `answers` one after the other, then what `respond` says.

    By default that is the number that the response of each query is, 0 for an empty one. A query with "hang" in it has
    no answer.
    """

    def __init__(self):
        self.answers, self.requests, self.headers = [], [], []
        self.hangs = False
        self.respond = lambda body: (200, {"rewards": [float(text or 0) for text in responses(body)]})

    async def __call__(self, request):
        body = json.loads(request.content)
        self.requests.append(body)
        self.headers.append(request.headers)
        if self.hangs or any("hang" in query for query in body["query"]):
            await asyncio.sleep(1000)
        status, answer = self.answers.pop(0) if self.answers else self.respond(body)
        return httpx.Response(status, text=answer if isinstance(answer, str) else json.dumps(answer))


def responses(body):
    return [query.removeprefix(prompt) for query, prompt in zip(body["query"], body["prompts"], strict=True)]


@pytest.fixture
def serve(monkeypatch):
    """Replace the network; return a function that starts a server and returns it with its URL."""
    servers = {}

    async def answer(transport, request):
        if request.url.host not in servers:
            raise httpx.ConnectError("nobody is there")
        return await servers[request.url.host](request)

    def start():
        host = f"server{len(servers)}"
        servers[host] = Server()
        return servers[host], f"http://{host}/get_reward"

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
    return start


def score(urls, *groups, **options):
    """Score groups of responses, all at once and each to a prompt of its own; return the verdicts of each."""

    async def run():
        num_retries = options.pop("num_retries", 3)
        reward = RemoteReward(urls, CallOptions(**{"timeout_s": 60.0, **options}), num_retries=num_retries)
        try:
            calls = []
            for number, texts in enumerate(groups):
                prompt = make_prompt(f"q{number}=", str(number))
                calls.append(reward.score(prompt, [make_rollout(prompt, text) for text in texts]))
            return await asyncio.gather(*calls)
        finally:
            await reward.close()

    return asyncio.run(run())


def test_remote_reward_sends_queries_prompts_and_labels(serve):
    server, url = serve()
    ((first, second),) = score([url], ["1", "-2.5"])
    assert server.requests == [{"query": ["q0=1", "q0=-2.5"], "prompts": ["q0=", "q0="], "labels": ["0", "0"]}]
    assert (first.kind, first.reward, first.score) == (OK, 1.0, 1.0)
    assert (second.kind, second.reward, second.score) == (WRONG, -2.5, -2.5)
    assert server.headers[0]["Content-Type"] == "application/json"


def test_remote_reward_reads_scores_logs_and_verdicts(serve):
    server, url = serve()
    answer = {"rewards": [3, 1], "scores": [0, 1], "extra_logs": {"length": [4, 5], "load": 0.5}}
    server.answers = [(200, answer | {"verdicts": ["unparsable", None]})]
    ((first, second),) = score([url], ["a", "b"])
    assert (first.kind, first.reward, first.score) == (VerdictKind.UNPARSABLE, 3.0, 0.0)
    assert (second.kind, dict(second.extra)) == (OK, {"length": 5.0, "load": 0.5})


def test_remote_reward_no_rollouts_asks_nothing(serve):
    server, url = serve()
    assert score([url], []) == [[]]
    assert server.requests == []


def test_remote_reward_text_that_is_no_utf8_arrives(serve):
    server, url = serve()
    server.answers = [(200, {"rewards": [1.0]})]

    async def run():
        reward = RemoteReward([url])
        prompt = make_prompt("q=")
        object.__setattr__(rollout := make_rollout(prompt, ""), "text", "\udcff é \x00")
        verdicts = await reward.score(prompt, [rollout])
        await reward.close()
        return verdicts

    assert asyncio.run(run())[0].kind is OK
    assert server.requests[0]["query"] == ["q=\udcff é \x00"]


def test_remote_reward_concurrent_calls_share_requests_up_to_the_batch_size(serve):
    server, url = serve()
    groups = [[str(2 * number), str(2 * number + 1)] for number in range(5)]
    verdicts = score([url], *groups, batch_size=4)
    assert sorted(sizes(server)) == [2, 4, 4]
    assert [[verdict.reward for verdict in group] for group in verdicts] == [[float(t) for t in g] for g in groups]


def test_remote_reward_servers_take_turns(serve):
    (one, url_one), (two, url_two) = serve(), serve()
    score([url_one, url_two], ["1", "2", "3", "4"], batch_size=1)
    assert (len(one.requests), len(two.requests)) == (2, 2)


@pytest.mark.parametrize("is_gone", [False, True])
def test_remote_reward_server_that_is_busy_or_gone_is_left_for_the_next(serve, is_gone):
    (busy, url_busy), (free, url_free) = serve(), serve()
    busy.respond = lambda body: (503, "busy")
    (verdicts,) = score([NO_SERVER if is_gone else url_busy, url_free], ["1", "2"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 2.0]
    assert (len(busy.requests), len(free.requests)) == (not is_gone, 1)


def test_remote_reward_tells_the_last_failure_of_a_busy_server_that_is_not_asked_sample_by_sample(serve):
    server, url = serve()
    server.respond = lambda body: (503, "  still\nbusy ")
    (verdicts,) = score([url], ["1", "2"], num_retries=3)
    assert [(v.kind, v.reward, v.detail) for v in verdicts] == [(CRASH, None, f"{url}: status 503: still busy")] * 2
    assert len(server.requests) == 4


def sizes(server):
    return [len(request["query"]) for request in server.requests]


def test_remote_reward_silent_server_is_a_timeout_after_two_tries_of_the_batch_and_one_of_each_sample(serve):
    server, url = serve()
    server.hangs = True
    (verdicts,) = score([url], ["1", "2"], timeout_s=0.5, num_retries=5)
    assert [(v.kind, v.detail) for v in verdicts] == [(TIMEOUT, f"{url}: no answer within 0.5 s")] * 2
    assert sizes(server) == [2, 2, 1, 1]


def in_turn(urls, *groups):
    """Score groups of responses one after the other by one reward; return the kinds of their verdicts."""

    async def run():
        reward = RemoteReward(urls, CallOptions(timeout_s=1.2))
        prompt = make_prompt("q=")
        found = [await reward.score(prompt, [make_rollout(prompt, text) for text in texts]) for texts in groups]
        await reward.close()
        return [[verdict.kind for verdict in verdicts] for verdicts in found]

    return asyncio.run(run())


def test_timeout_of_a_batch_is_charged_to_the_culprit_alone(serve):
    server, url = serve()
    assert in_turn([url], ["1", "hang", "2"]) == [[OK, TIMEOUT, OK]]
    assert sizes(server) == [3, 3, 1, 1, 1]


def test_hung_server_is_left_alone_while_another_answers(serve):
    (hung, url_hung), (_, url) = serve(), serve()
    hung.hangs = True
    assert in_turn([url_hung, url], *[["1"]] * 20) == [[OK]] * 20
    assert len(hung.requests) <= 5  # four in a row, and one more after a rest


def test_only_server_that_hangs_costs_one_timeout_per_batch_after_a_while(serve):
    server, url = serve()
    server.hangs = True
    assert in_turn([url], ["1", "2"], ["1", "2"]) == [[TIMEOUT] * 2] * 2
    assert sizes(server) == [2, 2, 1, 1, 2]


@pytest.mark.parametrize(
    "fail",
    [
        lambda body: (422, {"detail": "bad"}),
        lambda body: (500, "traceback"),
        lambda body: (200, {"rewards": [1.0] * (len(body["query"]) - 1)}),
        lambda body: (200, "not json"),
    ],
    ids=["refused", "error", "lost one", "no json"],
)
def test_remote_reward_only_the_culprit_of_a_batch_is_charged(serve, fail):
    server, url = serve()
    good = server.respond
    server.respond = lambda body: fail(body) if "bad" in responses(body) else good(body)
    groups = score([url], ["1", "bad"], ["3"], num_retries=0)
    assert [[verdict.reward for verdict in group] for group in groups] == [[1.0, None], [3.0]]
    assert groups[0][1].kind is CRASH
    assert sorted(sizes(server)) == [1, 1, 1, 3]


def test_remote_reward_samples_of_a_broken_batch_are_tried_twice(serve):
    server, url = serve()
    good, times_busy = server.respond, {"1": 1, "2": 2}

    def respond(body):
        if len(body["query"]) == 2:
            return 422, "bad"
        (text,) = responses(body)
        times_busy[text] -= 1
        return good(body) if times_busy[text] < 0 else (503, "busy")

    server.respond = respond
    (verdicts,) = score([url], ["1", "2"], num_retries=3)
    assert [verdict.reward for verdict in verdicts] == [1.0, None]
    assert sizes(server) == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("body", "kinds", "says"),
    [
        ('{"rewards": [1' + "0" * 400 + ", 1]}", [CRASH, OK], "the reward is inf"),
        ('{"rewards": [NaN, 1]}', [CRASH, OK], "the reward is nan"),
        ('{"rewards": [1e39, 1]}', [CRASH, OK], "the reward is 1e+39, more than float32 can hold"),
        ('{"rewards": [1' + "0" * 5000 + ", 1]}", [CRASH, CRASH], "no JSON: "),
        ("[" * 100_000, [CRASH, CRASH], "no JSON: [[["),
        (
            '{"rewards": [1, 1], "extra_logs": {"a\\ud800": 1e300}}',
            [OK, OK],
            "left out of the logs: a\\ud800 is 1e+300",
        ),
        ('{"\\ud800\\u001b[2J": 1}', [CRASH, CRASH], "the reward server's dictionary has no `rewards`: "),
    ],
    ids=["401 digits", "NaN", "1e39", "5001 digits", "deep", "surrogate in a log", "surrogate in an error"],
)
def test_unusable_answer_becomes_a_verdict_that_can_be_written(serve, body, kinds, says):
    server, url = serve()
    server.respond = lambda _: (200, body)
    (verdicts,) = score([url], ["1", "2"])
    assert [verdict.kind for verdict in verdicts] == kinds
    assert len(server.requests) == (3 if kinds == [CRASH, CRASH] else 1)  # each sample by itself, and none again
    assert verdicts[0].detail.removeprefix(f"{url}: ").startswith(says)
    assert all(char.isprintable() for char in verdicts[0].detail)
    assert json.dumps(dict(verdicts[0].extra), ensure_ascii=False).encode()


def test_score_is_right_from_the_threshold_on(serve):
    _, url = serve()
    (verdicts,) = score([url], ["0.4", "0.5"], success_threshold=0.5)
    assert [verdict.kind for verdict in verdicts] == [WRONG, OK]


def test_remote_reward_close_ends_a_request_under_way(serve):
    server, url = serve()
    server.hangs = True

    async def run():
        reward = RemoteReward([url], CallOptions(timeout_s=1000.0))
        prompt = make_prompt()
        task = asyncio.create_task(reward.score(prompt, [make_rollout(prompt, "1")]))
        while not server.requests:
            await asyncio.sleep(0.01)
        await reward.close()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(asyncio.wait_for(run(), 60))[0], asyncio.CancelledError)


def test_check_reward_server_tries_each_with_labels_and_empty_responses(serve):
    (one, url_one), (two, url_two) = serve(), serve()
    for server in (one, two):
        server.respond = lambda body: (200, {"rewards": [0.0] * len(body["query"])})
    assert check_reward_server([url_one, url_two], [make_prompt(f"q{n}=", str(n)) for n in range(6)]) is None
    assert one.requests == two.requests
    assert [request["query"] for request in one.requests] == [
        ["q0=0", "q0=", "q1=1", "q1=", "q2=2", "q2=", "q3=3", "q3="]
    ]


def test_check_reward_server_without_prompts_looks_at_the_urls_only():
    assert check_reward_server([NO_SERVER]) is None
    with pytest.raises(ConfigError, match="is no URL"):
        check_reward_server(["nothing"])


def test_check_reward_server_unreachable_is_refused_with_a_hint(serve):
    _, url = serve()
    with pytest.raises(ConfigError, match=r"does not answer: http://127.0.0.1:9.* nobody(.|\n)*hint: start it.*0\.1"):
        check_reward_server([url, NO_SERVER], [make_prompt(label="1")], CallOptions(timeout_s=5.0))


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (401, "who are you", rf"status 401: who are you\n\nhint: set the token .* {TOKEN_VARIABLE}"),
        (404, "what", r"status 404: what\n\nhint: the server must accept a POST .*check the path"),
        (422, {"detail": "no"}, r"status 422(.|\n)*hint: the server must accept a POST"),
        (200, "hello", r"no JSON: hello\n\nhint: answer \{\"rewards\": \[one number per query\]\}"),
        (200, {"rewards": [1.0]}, r"`rewards` has 1 numbers for 2 samples\n\nhint: answer"),
        (200, '{"rewards": [1.0, NaN]}', r"the reward is nan in the trial call \(sample 1\)\n\nhint: "),
    ],
)
def test_check_reward_server_bad_answer_is_refused(serve, status, answer, says):
    server, url = serve()
    server.respond = lambda body: (status, answer)
    with pytest.raises(RewardError, match=says):
        check_reward_server([url], [make_prompt()])
    assert len(server.requests) == 1


def test_check_reward_server_that_is_unwell_or_slow_is_told(serve):
    (broken, url_broken), (slow, url_slow) = serve(), serve()
    broken.respond = lambda body: (500, "traceback")
    slow.hangs = True
    problem = check_reward_server([url_broken, url_slow], [make_prompt()], CallOptions(timeout_s=1.0))
    assert problem == f"{url_broken}: status 500: traceback; {url_slow}: no answer within 1 s"
