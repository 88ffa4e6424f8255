"""Reward servers that hang, trickle, or answer with what cannot be used: what it costs, and whom it is charged to."""

import asyncio
import json

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.remote import RemoteReward
from rlhf_rollout.rewards.sources import CallOptions

pytestmark = pytest.mark.usefixtures("quick_retries")

OK, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.CRASH, VerdictKind.TIMEOUT
GOOD = "http://good/r"
HUNG = "http://hung/r"


class Servers:
    """Replaces the network: the host `hung` never answers, nor does any host a query that ends in "hang"."""

    def __init__(self):
        self.asked = []

    async def __call__(self, request):
        queries = json.loads(request.content)["query"]
        self.asked.append((request.url.host, len(queries)))
        if request.url.host == "hung" or any(query.endswith("hang") for query in queries):
            await asyncio.sleep(1000)
        return httpx.Response(200, json={"rewards": [1.0] * len(queries)})


def score(urls, handler, *groups, **options):
    """Score groups of responses one after the other; return the verdicts of each."""

    async def run():
        calls = CallOptions(**{"timeout_s": 1.2, **options})
        reward = RemoteReward(urls, calls, transport=httpx.MockTransport(handler))
        prompt = make_prompt("q=")
        verdicts = []
        for texts in groups:
            rollouts = [make_rollout(prompt, text, index=index) for index, text in enumerate(texts)]
            verdicts.append(await reward.score(prompt, rollouts))
        await reward.close()
        return verdicts

    return asyncio.run(run())


def test_timeout_of_a_batch_is_charged_to_the_culprit_alone():
    servers = Servers()
    [verdicts] = score([GOOD], servers, ["1", "hang", "2"])
    assert [verdict.kind for verdict in verdicts] == [OK, TIMEOUT, OK]
    assert [size for _, size in servers.asked] == [3, 3, 1, 1, 1]


def test_hung_server_is_left_alone_while_another_answers():
    servers = Servers()
    verdicts = score([HUNG, GOOD], servers, *[["1"]] * 20)
    assert [[verdict.kind for verdict in group] for group in verdicts] == [[OK]] * 20
    assert [host for host, _ in servers.asked].count("hung") <= 5  # four in a row, and one more after a rest


def test_only_server_that_hangs_costs_one_timeout_per_batch_after_a_while():
    servers = Servers()
    verdicts = score([HUNG], servers, ["1", "2"], ["1", "2"])
    assert [[verdict.kind for verdict in group] for group in verdicts] == [[TIMEOUT] * 2] * 2
    assert [size for _, size in servers.asked] == [2, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("body", "kinds", "says"),
    [
        ('{"rewards": [1' + "0" * 400 + ", 1]}", [CRASH, OK], "the reward is inf"),
        ('{"rewards": [NaN, 1]}', [CRASH, OK], "the reward is nan"),
        ('{"rewards": [1e39, 1]}', [CRASH, OK], "the reward is 1e+39, more than float32 can hold"),
        ('{"rewards": [1' + "0" * 5000 + ", 1]}", [CRASH, CRASH], f"{GOOD}: no JSON: "),
        ("[" * 100_000, [CRASH, CRASH], f"{GOOD}: no JSON: [[["),
        (
            '{"rewards": [1, 1], "extra_logs": {"a\\ud800": 1e300}}',
            [OK, OK],
            "left out of the logs: a\\ud800 is 1e+300",
        ),
        ('{"\\ud800\\u001b[2J": 1}', [CRASH, CRASH], f"{GOOD}: the reward server's dictionary has no `rewards`: "),
    ],
    ids=["401 digits", "NaN", "1e39", "5001 digits", "deep", "surrogate in a log", "surrogate in an error"],
)
def test_unusable_answer_becomes_a_verdict_that_can_be_written(body, kinds, says):
    [verdicts] = score([GOOD], lambda request: httpx.Response(200, content=body), ["1", "2"], timeout_s=20.0)
    assert [verdict.kind for verdict in verdicts] == kinds
    assert verdicts[0].detail.startswith(says)
    assert all(char.isprintable() for char in verdicts[0].detail)
    assert json.dumps(dict(verdicts[0].extra), ensure_ascii=False).encode()


def test_score_is_right_from_the_threshold_on():
    def answer(request):
        return httpx.Response(200, json={"rewards": [0.4, 0.5]})

    [verdicts] = score([GOOD], answer, ["a", "b"], success_threshold=0.5)
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.WRONG, OK]
