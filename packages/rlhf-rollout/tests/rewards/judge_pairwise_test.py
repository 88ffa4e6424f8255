"""A judge who compares responses, behind a real server on this machine; and judges as sources of a reward."""

import asyncio
import itertools
import re

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.commands.main import main
from rlhf_rollout.rewards.judge import KEY_VARIABLE, PairwiseReward, check_judge, choose_pairs
from rlhf_rollout.rewards.mix import build_reward, check_reward
from rlhf_rollout.rewards.sources import CallOptions, JudgeOptions, parse_sources
from rollout_testing import judge_server, quoted, said

OK, WRONG, CRASH = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH
NO_SERVER = "http://127.0.0.1:9/v1"  # the discard port: nothing listens there


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


def options(url):
    return CallOptions(timeout_s=20.0, judge=JudgeOptions(url=url, model="the-judge"))


def score(path, url, texts):
    async def run():
        reward = PairwiseReward(path, options(url))
        prompt = make_prompt("2+2=", "4")
        try:
            return await reward.score(prompt, [make_rollout(prompt, text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(run())


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
    verdicts = score(rubric, server.url, ["two2", "one", "three", "four"])
    # "three" beats all. "two2" and "four" tie and beat "one": (0.5 + 1 + 0) / 3. "one" beats none.
    assert [v.reward for v in verdicts] == pytest.approx([0.5, 0.0, 1.0, 0.5])
    assert [v.kind for v in verdicts] == [WRONG, WRONG, OK, WRONG]
    asked = [(quoted(body, "RESPONSE A"), quoted(body, "RESPONSE B")) for body in server.bodies]
    assert sorted(asked) == sorted(itertools.permutations(["two2", "one", "three", "four"], 2))


@pytest.mark.parametrize("choice", ["A", "B", "tie"])
def test_pairwise_judge_who_prefers_a_place_prefers_no_response(server, rubric, choice):
    server.respond = prefers(lambda a, b: choice)
    assert [v.reward for v in score(rubric, server.url, ["a", "b", "c"])] == [0.5] * 3


def test_pairwise_pair_counts_only_if_both_answers_can_be_read(server, rubric):
    server.respond = prefers(lambda a, b: "neither" if (a, b) == ("bb", "a") else by_length(a, b))
    verdicts = score(rubric, server.url, ["a", "bb", "ccc"])
    assert [v.reward for v in verdicts] == [0.0, 0.0, 1.0]  # against "ccc" alone
    assert [v.extra["judge_failed"] for v in verdicts] == [0.5, 0.5, 0.0]


def test_pairwise_reward_without_an_answer_is_a_failure(server, rubric):
    server.respond = lambda body: (404, "no such model")
    verdicts = score(rubric, server.url, ["a", "bb"])
    assert [(v.kind, v.reward) for v in verdicts] == [(CRASH, None)] * 2
    assert "status 404: no such model" in verdicts[0].detail


def test_pairwise_cost_of_a_comparison_is_halved_between_its_responses(server, rubric):
    server.respond = lambda body: (200, said("<winner>A</winner>", prompt_tokens=100, completion_tokens=5))
    verdicts = score(rubric, server.url, ["a", "b", "c"])
    assert [v.extra["judge_prompt_tokens"] for v in verdicts] == [200.0] * 3  # 6 questions of 100
    assert sum(v.extra["judge_completion_tokens"] for v in verdicts) == 30.0


def test_pairwise_equal_responses_tie_unasked_and_one_alone_has_half(server, rubric):
    verdicts = score(rubric, server.url, ["a", "a"])
    assert ([v.reward for v in verdicts], server.bodies) == ([0.5, 0.5], [])
    [verdict] = score(rubric, server.url, ["a"])
    assert (verdict.reward, dict(verdict.extra), server.bodies) == (0.5, {}, [])
    assert score(rubric, server.url, []) == []


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
    verdicts = score(tmp_path / "r.toml", server.url, ["a", "bb", "ccc", "dddd", "eeeee"])
    # On a ring of five, each meets its two neighbours: 5 pairs in both orders.
    assert len(server.bodies) == 10
    assert [v.reward for v in verdicts] == [0.0, 0.5, 0.5, 0.5, 1.0]


# -- as a source -----------------------------------------------------------------------------------------------------


def test_judge_is_a_source_beside_others(server, rubric):
    sources = parse_sources(f"math,judge:{rubric},pairwise:{rubric}", weights=(1.0, 2.0, 4.0))
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
