"""Judges behind a real server on this machine: grades, comparisons, bad answers, limits, cost; and as sources."""

import asyncio
import contextlib
import itertools
import json
import re
import threading
from types import SimpleNamespace

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.commands.main import main
from rlhf_rollout.rewards.judge import KEY_VARIABLE, JudgeReward, PairwiseReward, check_judge, choose_pairs
from rlhf_rollout.rewards.mix import build_reward, check_reward
from rlhf_rollout.rewards.sources import CallOptions, JudgeOptions, parse_sources
from rollout_testing import JudgeServer, judge_server, quoted, said
from simulated import now, simulate

NO_SERVER = "http://127.0.0.1:9/v1"  # the discard port: nothing listens there
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


# -- comparisons ----------------------------------------------------------------------------------------------------


def prefers(choose):
    """Answers with what `choose` says of responses A and B."""
    return lambda body: (
        200,
        said(f"<winner>{choose(quoted(body, 'RESPONSE A'), quoted(body, 'RESPONSE B'))}</winner>"),
    )


def by_length(a, b):
    return "tie" if len(a) == len(b) else "AB"[len(b) > len(a)]


def test_pairwise_reward_is_the_share_of_wins_in_both_orders(server, rubric):
    server.respond = prefers(by_length)
    verdicts = score(PairwiseReward, rubric, server.url, ["two2", "one", "three", "four"])
    # "three" beats all. "two2" and "four" tie and beat "one": (0.5 + 1 + 0) / 3. "one" beats none.
    assert [v.reward for v in verdicts] == pytest.approx([0.5, 0.0, 1.0, 0.5])
    assert [v.kind for v in verdicts] == [WRONG, WRONG, OK, WRONG]
    asked = [(quoted(body, "RESPONSE A"), quoted(body, "RESPONSE B")) for body in server.bodies]
    assert sorted(asked) == sorted(itertools.permutations(["two2", "one", "three", "four"], 2))


@pytest.mark.parametrize("choice", ["A", "B", "tie"])
def test_pairwise_judge_who_prefers_a_place_prefers_no_response(server, rubric, choice):
    server.respond = prefers(lambda a, b: choice)
    assert [v.reward for v in score(PairwiseReward, rubric, server.url, ["a", "b", "c"])] == [0.5] * 3


def test_pairwise_pair_counts_only_if_both_answers_can_be_read(server, rubric):
    server.respond = prefers(lambda a, b: "neither" if (a, b) == ("bb", "a") else by_length(a, b))
    verdicts = score(PairwiseReward, rubric, server.url, ["a", "bb", "ccc"])
    assert [v.reward for v in verdicts] == [0.0, 0.0, 1.0]  # against "ccc" alone
    assert [v.extra["judge_failed"] for v in verdicts] == [0.5, 0.5, 0.0]


def test_pairwise_reward_without_an_answer_is_a_failure(server, rubric):
    server.respond = lambda body: (404, "no such model")
    verdicts = score(PairwiseReward, rubric, server.url, ["a", "bb"])
    assert [(v.kind, v.reward) for v in verdicts] == [(CRASH, None)] * 2
    assert "status 404: no such model" in verdicts[0].detail


def test_pairwise_cost_of_a_comparison_is_halved_between_its_responses(server, rubric):
    server.respond = lambda body: (200, said("<winner>A</winner>", prompt_tokens=100, completion_tokens=5))
    verdicts = score(PairwiseReward, rubric, server.url, ["a", "b", "c"])
    assert [v.extra["judge_prompt_tokens"] for v in verdicts] == [200.0] * 3  # 6 questions of 100
    assert sum(v.extra["judge_completion_tokens"] for v in verdicts) == 30.0


def test_pairwise_equal_responses_tie_unasked_and_one_alone_has_half(server, rubric):
    verdicts = score(PairwiseReward, rubric, server.url, ["a", "a"])
    assert ([v.reward for v in verdicts], server.bodies) == ([0.5, 0.5], [])
    [verdict] = score(PairwiseReward, rubric, server.url, ["a"])
    assert (verdict.reward, dict(verdict.extra), server.bodies) == (0.5, {}, [])
    assert score(PairwiseReward, rubric, server.url, []) == []


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("opponents", [None, 1, 2, 3, 4, 7, 20])
def test_choose_pairs_gives_each_response_the_same_number_of_opponents(count, opponents):
    pairs = choose_pairs(count, opponents)
    met = [sum(index in pair for pair in pairs) for index in range(count)]
    wanted = count - 1 if opponents is None else min(opponents + opponents % 2, count - 1)
    assert met == [wanted] * count
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    assert all(a != b for a, b in pairs)


def test_pairwise_rubric_bounds_the_opponents(server, tmp_path):
    (tmp_path / "r.toml").write_text("text = 'Which is longer?'\nopponents = 2\n")
    server.respond = prefers(by_length)
    verdicts = score(PairwiseReward, tmp_path / "r.toml", server.url, ["a", "bb", "ccc", "dddd", "eeeee"])
    # On a ring of five, each meets its two neighbours: 5 pairs in both orders.
    assert len(server.bodies) == 10
    assert [v.reward for v in verdicts] == [0.0, 0.5, 0.5, 0.5, 1.0]


# -- as a source -----------------------------------------------------------------------------------------------------


def test_judge_is_a_source_beside_others(server, rubric):
    sources = parse_sources(f"math,judge:{rubric},pairwise:{rubric}", weights="1,2,4")
    assert [source.name for source in sources] == ["math", "polite", "polite"]
    server.respond = lambda body: (
        200,
        said("<score>5</score><winner>A</winner>", prompt_tokens=10, completion_tokens=1),
    )
    prompt = make_prompt("2+2=", "4")

    async def run():
        reward = build_reward(sources, options(server.url))
        try:
            return await reward.score(prompt, [make_rollout(prompt, text) for text in ("#### 4", "#### 5")])
        finally:
            await reward.close()

    first, second = asyncio.run(run())
    assert (first.kind, first.reward) == (OK, 1.0 + 2 * 0.5 + 4 * 0.5)
    assert (second.kind, second.reward) == (WRONG, 3.0)
    assert (first.extra["judge_prompt_tokens_polite"], first.extra["judge_prompt_tokens_polite_2"]) == (10.0, 10.0)


@pytest.mark.parametrize("kind", ["judge", "pairwise"])
def test_check_judge_asks_once_about_the_first_prompt(server, rubric, kind):
    [source] = parse_sources(f"{kind}:{rubric}")
    assert check_reward(source, [], options(server.url)) is None
    assert server.bodies == []
    assert check_reward(source, [make_prompt("q=", "right"), make_prompt()], options(server.url)) is None
    [body] = server.bodies
    assert quoted(body, "RESPONSE" if kind == "judge" else "RESPONSE A") == "right"


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (401, RewardError, rf"judge refuses the trial request: .*status 401: no\n\nhint: .*{KEY_VARIABLE}"),
        (404, RewardError, r"status 404: no\n\nhint: check ``JudgeOptions.model``"),
        (500, None, r"status 500: no"),
        (200, None, r"no text of an answer: no"),
    ],
)
def test_check_judge_tells_what_is_wrong(server, rubric, status, error, says):
    [source] = parse_sources(f"judge:{rubric}")
    server.respond = lambda body: (status, "no")
    if error is None:
        assert re.search(says, check_judge(source, [make_prompt()], options(server.url)))
    else:
        with pytest.raises(error, match=says):
            check_judge(source, [make_prompt()], options(server.url))
    assert len(server.bodies) == 1


def test_check_judge_that_is_not_there_or_has_no_rubric_is_refused(rubric):
    [source] = parse_sources(f"judge:{rubric}")
    with pytest.raises(ConfigError, match=r"the judge does not answer: http://127.0.0.1:9"):
        check_judge(source, [make_prompt()], options(NO_SERVER))
    with pytest.raises(ConfigError, match=r"rubric .* does not exist"):
        check_judge(parse_sources(f"judge:{rubric}x")[0], [], options(NO_SERVER))


def test_score_command_has_a_judge(server, rubric, tmp_path, capsys):
    rows = '{"question": "2+2=", "answer": "9"}\n{"question": "3+3=", "answer": "4"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    words = ["score", "--dataset", str(tmp_path / "rows.jsonl"), "--input_key", "question", "--output_key", "answer"]
    words += ["--remote_rm_url", f"judge:{rubric}", "--output_path", str(tmp_path / "out.jsonl")]
    assert main(words) == 2
    assert "--judge_url is missing: a judge scores" in capsys.readouterr().err
    words += ["--judge_url", server.url, "--judge_model", "m"]
    assert main(words) == 0
    assert "reward: mean 0.6500" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--remote_rm_url", f"pairwise:{rubric}"]) == 2
    assert "a pairwise judge compares the responses to a prompt" in capsys.readouterr().err
