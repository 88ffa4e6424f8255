"""A judge behind a real server on this machine: grades, bad answers, limits, cost, and its key."""

import asyncio
import contextlib
import json
import re
import threading
from types import SimpleNamespace

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.judge import KEY_VARIABLE, JudgeReward
from rlhf_rollout.rewards.sources import CallOptions, JudgeOptions
from rollout_testing import JudgeServer, judge_server, quoted, said
from simulated import now, simulate

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def server():
    with judge_server() as made:
        yield made


@pytest.fixture
def rubric(tmp_path):
    (tmp_path / "polite.txt").write_text("Is it polite?", encoding="utf-8")
    return str(tmp_path / "polite.txt")


def options(url, *, timeout_s=20.0, num_calls=16, threshold=1.0):
    judge = JudgeOptions(url=url, model="the-judge", num_calls=num_calls)
    return CallOptions(timeout_s=timeout_s, judge=judge, success_threshold=threshold)


def score(kind, path, url, texts, **more):
    async def run():
        reward = kind(path, options(url, **more))
        prompt = make_prompt("2+2=", "4")
        try:
            return await reward.score(prompt, [make_rollout(prompt, text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.fixture
def judged(monkeypatch, rubric):
    """Return a function that scores by a simulated clock; it returns the verdicts and how many seconds that took.

    Its judge answers each question after `takes_s` seconds.
    """
    clock = SimpleNamespace(monotonic=now)
    for module in ("rewards.judge", "http.breaker"):
        monkeypatch.setattr(f"rlhf_rollout.{module}.time", clock)

    def judged(judge, texts, *, takes_s=0.0, num_prompts=1, **more):
        async def answer(request):
            await asyncio.sleep(takes_s)
            status, content, *headers = judge(json.loads(request.content), request.headers)
            return httpx.Response(status, headers=headers[0] if headers else None, json=content)

        async def run():
            reward = JudgeReward(rubric, options("https://judge/v1", **more))
            reward.judge._client.transport = httpx.MockTransport(answer)
            prompts = [make_prompt("2+2=", "4", prompt_id=str(index)) for index in range(num_prompts)]
            scored = [reward.score(prompt, [make_rollout(prompt, text) for text in texts]) for prompt in prompts]
            groups = await asyncio.gather(*scored)
            await reward.close()
            return [verdict for group in groups for verdict in group], now()

        return simulate(run())

    return judged


# -- grades ----------------------------------------------------------------------------------------------------------


def test_judge_grades_each_response_by_itself(server, rubric):
    verdicts = score(JudgeReward, rubric, server.url + "/", ["7", "10", "0"])
    assert [(v.kind, v.reward, v.score) for v in verdicts] == [(WRONG, 0.7, 0.7), (OK, 1.0, 1.0), (WRONG, 0.0, 0.0)]
    assert [v.kind for v in score(JudgeReward, rubric, server.url, ["7", "6"], threshold=0.7)] == [OK, WRONG]
    body, headers = server.bodies[0], server.headers[0]
    assert (headers["path"], body["model"], set(body)) == ("/v1/chat/completions", "the-judge", {"model", "messages"})
    assert "Is it polite?" in body["messages"][0]["content"]
    assert (quoted(body, "PROMPT"), quoted(body, "REFERENCE ANSWER")) == ("2+2=", "4")
    assert "Authorization" not in headers


def test_judge_of_several_criteria_has_their_weighted_mean_and_each_score(server, tmp_path):
    (tmp_path / "r.toml").write_text(
        "scale = [1, 5]\nrequest = {temperature = 0}\n"
        "[[criteria]]\nname = 'helpful'\ntext = 'h'\nweight = 2\n[[criteria]]\nname = 'safe'\ntext = 's'\n"
    )
    server.respond = lambda body: (200, said('{"helpful": 4, "safe": 5}'))
    [verdict] = score(JudgeReward, tmp_path / "r.toml", server.url, ["x"])
    assert verdict.reward == pytest.approx((2 * 0.75 + 1.0) / 3)
    assert dict(verdict.extra) == {"judge_unparsable": 0.0, "judge_helpful": 4.0, "judge_safe": 5.0}
    assert server.bodies[0]["temperature"] == 0


def test_judge_cost_is_counted_also_for_answers_that_cannot_be_read(server, rubric):
    server.answers = [
        (200, said("<score>5</score>", prompt_tokens=100, completion_tokens=7)),
        (200, said("no idea", prompt_tokens=90, completion_tokens=3)),
    ]
    first, second = score(JudgeReward, rubric, server.url, ["a", "b"], num_calls=1)
    costs = [(v.extra["judge_prompt_tokens"], v.extra["judge_completion_tokens"]) for v in (first, second)]
    assert costs == [(100.0, 7.0), (90.0, 3.0)]
    assert (second.kind, second.reward, second.extra["judge_unparsable"]) == (CRASH, None, 1.0)
    assert second.detail == "unparsable answer of the judge: no idea"


@pytest.mark.parametrize("usage", [None, [], 3, {"prompt_tokens": "9"}, {"prompt_tokens": -1}, {"prompt_tokens": True},
                                   {"prompt_tokens": 1.5}, {"prompt_tokens": 10**400}])  # fmt: skip
def test_judge_cost_that_is_none_is_not_counted(server, rubric, usage):
    server.respond = lambda body: (200, said("<score>5</score>") | {"usage": usage})
    [verdict] = score(JudgeReward, rubric, server.url, ["a"])
    assert (verdict.reward, dict(verdict.extra)) == (0.5, {"judge_unparsable": 0.0})


# -- answers that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, "oops", "no text of an answer: oops"),
        (200, "", "no text of an answer:"),
        (200, "[" * 100_000, "no text of an answer: [[["),
        (200, {}, "no text of an answer: {}"),
        (200, [1], "no text of an answer: [1]"),
        (200, {"choices": []}, "no text of an answer"),
        (200, {"choices": {"0": 1}}, "no text of an answer"),
        (200, {"choices": [{"message": "hi"}]}, "no text of an answer"),
        (200, said(None), "no text of an answer"),
        (200, said([{"type": "text", "text": "<score>5</score>"}]), "no text of an answer"),
        (200, '{"choices": NaN, "usage": 1e400}', "no text of an answer"),
        (401, "who are you", "status 401: who are you"),
        (400, {"error": "context too long"}, 'status 400: {"error": "context too long"}'),
        (302, "elsewhere", "status 302: elsewhere"),
    ],
)
def test_judge_answer_that_cannot_be_used_is_a_crash_and_is_not_asked_again(server, rubric, status, answer, says):
    server.respond = lambda body: (status, answer)
    [verdict] = score(JudgeReward, rubric, server.url, ["a"])
    assert (verdict.kind, verdict.reward) == (CRASH, None)
    assert verdict.detail.startswith(f"{server.url}/chat/completions: {says}")
    assert len(server.bodies) == 1


def test_judge_one_bad_answer_leaves_the_others(server, rubric):
    texts = ["1", "NaN", "1e400", "11", "2"]
    assert [v.reward for v in score(JudgeReward, rubric, server.url, texts)] == [0.1, None, None, None, 0.2]


# -- limits ----------------------------------------------------------------------------------------------------------


def test_judge_that_stays_busy_is_a_timeout_at_the_deadline(judged):
    server = JudgeServer()
    server.respond = lambda body: (429, "busy")
    [verdict], seconds = judged(server, ["8"], timeout_s=1.5)
    assert verdict.kind is TIMEOUT
    assert re.fullmatch(r".*: status 429: \"busy\"; asked [23] times within 1.5 s", verdict.detail)
    assert seconds <= 1.5


def test_judge_is_asked_a_bounded_number_of_questions_and_waiting_for_a_place_costs_no_time(judged):
    server = JudgeServer()
    server.respond = lambda body: (200, said("<score>5</score>"))
    # 12 questions at 2 at a time take longer than the time limit of one.
    verdicts, seconds = judged(server, ["x"] * 12, takes_s=0.15, num_calls=2, timeout_s=0.2)
    assert {v.kind for v in verdicts} == {WRONG}
    assert seconds == pytest.approx(6 * 0.15)


def test_judge_that_hangs_is_left_alone_after_a_while(judged):
    server = JudgeServer()
    more = {"takes_s": 1000.0, "num_calls": 8, "timeout_s": 1.1}
    verdicts, seconds = judged(server, ["x"], num_prompts=40, **more)
    assert {v.kind for v in verdicts} == {TIMEOUT}
    assert seconds == pytest.approx(1.1)  # only the first eight are asked
    assert "not called, because 8 calls in a row failed" in verdicts[-1].detail
    # One prompt alone does not hold the judge back: its 40 questions are asked, 8 at a time.
    verdicts, seconds = judged(server, ["x"] * 40, **more)
    assert not any("not called" in v.detail for v in verdicts)
    assert seconds == pytest.approx(5 * 1.1)


def test_judge_that_is_cancelled_asks_nothing_more(server, rubric):
    closing = threading.Event()
    server.respond = lambda body: (closing.wait(30), (200, said("<score>5</score>")))[1]

    async def run():
        reward = JudgeReward(rubric, options(server.url, num_calls=2))
        prompt = make_prompt()
        task = asyncio.create_task(reward.score(prompt, [make_rollout(prompt, str(n)) for n in range(6)]))
        while len(server.bodies) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        closing.set()
        # Its places are free again.
        [verdict] = await reward.score(prompt, [make_rollout(prompt, "7")])
        await reward.close()
        return verdict

    assert asyncio.run(run()).reward == 0.5
    assert len(server.bodies) == 3
