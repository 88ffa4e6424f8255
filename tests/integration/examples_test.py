"""The examples of agents run, with the fake engine in the place of a model."""

import asyncio
import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent_testing import TOKENIZER, ToolTokenizer, run, texts_of, writes
from record_testing import make_prompt, make_rollout
from rlhf_cli.builtin import HELD_OUT_FILE
from rlhf_data.records import FinishReason, SpanSource, Verdict, VerdictKind
from rlhf_rollout.agents.agent_spec import AgentSpec, make_workflow
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.own_groups import Group, keeps_group, step_metrics
from rlhf_train.losses.own_check import check_own_code

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMITS = EpisodeLimits(max_length=4000)


def written(example, *arguments):
    command = [sys.executable, str(EXAMPLES / example), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def feedback(episode):
    return [text for source, text in texts_of(episode.rollouts[0]) if source is SpanSource.ENVIRONMENT]


def test_spo_loss():
    code = OwnCode.read("policy_loss", EXAMPLES / "spo_loss.py")
    assert check_own_code(code) == []
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[0.0, math.log(3), 9.0]])
    advantages = torch.tensor([[2.0, -1.0, 5.0]])
    inputs = {"logprobs": logprobs, "old_logprobs": torch.zeros(1, 3), "advantages": advantages, "loss_mask": mask}
    loss, metrics = code.call(inputs)
    # Ratios 1 and 3: -(1 x 2) and -(3 x -1 - 1 / 0.4 x 2^2).
    assert loss[mask].tolist() == pytest.approx([-2.0, 13.0])
    assert metrics["distance"][mask].tolist() == pytest.approx([0.0, 2.0])


def test_median_advantage():
    code = OwnCode.read("advantages", EXAMPLES / "median_advantage.py")
    assert check_own_code(code) == []
    rewards, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([3, 3, 3, 0])
    mask = torch.ones(4, 2, dtype=torch.bool)
    assert code.call({"rewards": rewards, "group_ids": groups, "loss_mask": mask})[0].tolist() == [-1.0, 0.0, 4.0, 0.0]


def group_of(*marks):
    """A group whose responses are right (+), wrong (-) or right and truncated (t)."""
    kinds = [VerdictKind.WRONG if mark == "-" else VerdictKind.OK for mark in marks]
    prompt = make_prompt()
    rollouts = [make_rollout(prompt, "4", verdict=Verdict(kind, float(kind is VerdictKind.OK))) for kind in kinds]
    ends = [FinishReason.LENGTH if mark == "t" else FinishReason.STOP for mark in marks]
    return Group.of(prompt, [replace(one, finish_reason=end) for one, end in zip(rollouts, ends, strict=True)])


def test_group_filter():
    code = OwnCode.read("keep_group", EXAMPLES / "group_filter.py")
    assert check_own_code(code) == []
    assert [keeps_group(code, group_of(*marks)) for marks in ("+-", "++", "--", "-t", "+-t", "tt")] == [
        *(True, False, False, False, True, False)
    ]


def test_pass_at_k():
    code = OwnCode.read("step_metrics", EXAMPLES / "pass_at_k.py")
    assert check_own_code(code) == []
    # One of four is right, none of two, and the one of one, which is left out. 3 of 6 pairs of four have the right one.
    found = step_metrics(code, [group_of(*"+---"), group_of(*"--")], [group_of("+")])
    assert found == pytest.approx({"own/pass_at_1": (1 / 4 + 0 + 1) / 3, "own/pass_at_2": 1 / 4, "own/pass_at_4": 1.0})


def test_guess_number():
    rows = rows_of(written("guess_number.py", "numbers"))
    assert {row["number"] for row in rows} == set("0123456789")
    answers = ["2+6=8 #### 8", "none", "3", "5"]
    prompts = [make_prompt(rows[0]["prompt"], "5")]
    [episode], _ = run(str(EXAMPLES / "guess_number.py"), writes(answers), prompts=prompts, limits=LIMITS)
    assert feedback(episode) == ["lower", "\nInvalid action: guess a number from 0 to 9\n", "higher"]
    assert (episode.verdict.reward, episode.verdict.score) == (1.0, 1.0)
    [episode], _ = run(str(EXAMPLES / "guess_number.py"), writes(["1"]), prompts=prompts, limits=LIMITS)
    assert feedback(episode) == ["higher"] * 3
    assert episode.verdict.turn_rewards == pytest.approx((0.0, -0.2, -0.2, -0.2))
    assert episode.verdict.score == 0.0


def test_games_shown_to_the_guessing_policy_are_played_by_the_rules():
    games = [row["messages"] for row in rows_of(written("guess_number.py", "games"))]
    won = 0
    for number, (_, *game) in enumerate(games):
        guesses = [int(message["content"]) for message in game[::2]]
        expected = ["higher" if guess < number % 10 else "lower" for guess in guesses[:-1]]
        assert [message["content"] for message in game[1::2]] == expected
        assert number % 10 not in guesses[:-1] and (guesses[-1] == number % 10 or len(guesses) == 4)
        won += guesses[-1] == number % 10
    assert 0.4 < won / len(games) < 0.55


def test_two_tools(tmp_path):
    written("two_tools.py", tmp_path)
    demonstrations, prompts, held_out = (
        rows_of((tmp_path / f"{name}.jsonl").read_text()) for name in ("demonstrations", "prompts", "held_out")
    )
    asked = {row["prompt"]: row["answer"] for row in prompts}
    assert (len(asked), len(held_out)) == (48, 16)
    assert not set(asked) & {row["prompt"] for row in held_out}
    calculated = [row["messages"] for row in demonstrations if len(row["messages"]) == 7]
    assert len(calculated) / len(demonstrations) == pytest.approx(0.4, abs=0.03)
    for messages in calculated[::100]:
        price, count = re.search(r"(\d)\*(\d)", messages[4]["content"]).groups()
        assert messages[3]["content"] == price
        assert messages[5]["content"] == str(int(count) * int(price))

    calls = [("look_up", {"item": "cheeses"}), ("look_up", {"item": "gold"}), ("calculate", {"expression": "().a"}),
             ("calculate", {"expression": "7 * 4"})]  # fmt: skip
    written_calls = [f"[TOOL_CALLS]{name}{json.dumps(given)}" for name, given in calls]
    prompts = [make_prompt("What do four cheeses cost?", "28")]
    options = {"prompts": prompts, "limits": LIMITS, "tokenizer": ToolTokenizer(), "engine_tokens": 200}
    agent = str(EXAMPLES / "two_tools.py")
    [episode], _ = run(agent, writes([*written_calls, "done"], sign="assistant: "), **options)
    results = [text.removeprefix("\ntool: ").partition("<eos>")[0] for text in feedback(episode)]
    assert results[:2] == ["7", "Error: KeyError: 'gold'"]
    assert results[2].startswith("Error: ValueError: only numbers, + - * /")
    assert "more characters are left out" in results[2]
    assert results[3] == "28"
    assert episode.verdict.reward == 1.0
    assert dict(episode.verdict.extra)["tool_failed"] == 2.0
    in_the_head = (
        ["28"],
        [written_calls[0], "28"],
        [written_calls[3], "28"],
        [written_calls[3], written_calls[0], "28"],
    )
    for answers in in_the_head:
        [episode], _ = run(agent, writes(answers, sign="assistant: "), **options)
        assert episode.verdict.reward == 0.0


def test_openrlhf_math(tmp_path):
    written("sums.py", tmp_path / "sums.jsonl")
    rows = rows_of((tmp_path / "sums.jsonl").read_text())
    held_out = {row["prompt"] for row in rows_of(HELD_OUT_FILE.read_text())}
    assert not held_out & {row["prompt"] for row in rows}
    right = 0
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        answer = int(row["completion"].rpartition("The answer is: ")[2])
        assert answer in (first + second, first + second - 10)
        right += answer == first + second
    assert right / len(rows) == pytest.approx(0.3, abs=0.03)

    answers = ["7+8 is 15, 4+3 is 7. The answer is: 75", "85!", "7+8 is 15, 4+3+1 is 8. The answer is: 85"]
    agent = str(EXAMPLES / "openrlhf_math.py")
    options = {"prompts": [make_prompt("What is 47 + 38?", "85")], "limits": LIMITS, "engine_tokens": 200}
    [episode], _ = run(agent, writes(answers), **options)
    assert [text.split("]")[0] for text in feedback(episode)] == ["\n\n[WRONG", "\n\n[NO ANSWER"]
    assert (episode.verdict.reward, episode.verdict.score) == (1.0, 1.5)
    [episode], _ = run(agent, writes(answers[:1]), **options)
    assert (round(episode.verdict.reward, 6), round(episode.verdict.score, 6)) == (-0.3, 0.2)
    assert dict(episode.verdict.extra)["attempts"] == 3.0


def test_instructions(tmp_path):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    written("instructions.py", train, held_out)
    rows, others = rows_of(train.read_text()), rows_of(held_out.read_text())
    assert (len(rows), len(others)) == (4000, 300)
    assert len({row["input"] for row in [*rows, *others]}) == 4300
    subjects = [{json.loads(row["label"])["subject"] for row in some} for some in (rows, others)]
    assert not subjects[0] & subjects[1]
    reward_func = runpy.run_path(str(EXAMPLES / "instructions.py"))["reward_func"]

    def rewards(subject, demands, answers):
        label = json.dumps({"subject": subject, "demands": demands})
        count = len(answers)
        found = reward_func([f"Q{answer}" for answer in answers], ["Q"] * count, [label] * count)
        assert found["scores"] == [float(reward == 1) for reward in found["rewards"]]
        return found["rewards"]

    assert rewards("owls", {"words": 4}, ["An owl sees well.", " Owls see. ", "A cat sees well."]) == [1, 0.5, 0.5]
    assert rewards("tea", {"end": "again"}, ['Tea again."', "Tea is against", "Tea: again and again, I"]) == [
        1,
        0.5,
        0.5,
    ]
    assert rewards("tea", {"begin": "Often"}, ["Often tea", "Oftentimes tea", "often tea"]) == [1, 0.5, 0.5]
    assert rewards("tea", {"twice": "old"}, ["Old tea, old.", "old old old tea", "older old tea"]) == [1, 0.5, 0.5]
    assert rewards("tea", {"without": "o", "case": "small"}, ["tea!", "O tea", "tea too", "coffee"]) == [
        1,
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
    ]
    assert rewards("tea", {"case": "capital"}, ["TEA 2", "Tea"]) == [1, 0.5]


def test_instructions_ask_for_nothing_that_cannot_be_met():
    contradict = runpy.run_path(str(EXAMPLES / "instructions.py"))["contradict"]
    assert contradict({"without": "s"}, "owls") and not contradict({"without": "i"}, "owls")
    assert contradict({"without": "a", "end": "again"}, "owls") and contradict(
        {"begin": "Often", "case": "small"}, "owls"
    )
    assert contradict({"twice": "old", "case": "capital"}, "owls") and not contradict(
        {"twice": "old", "words": 9}, "owls"
    )
    assert not contradict({"case": "small", "end": "again"}, "owls")


@pytest.mark.parametrize("start", ["", f"{shlex.quote(sys.executable)} "])
def test_openai_client_as_a_function_and_as_a_program(start):
    async def episode():
        spec = AgentSpec(path=f"{start}{EXAMPLES / 'openai_client.py'}", limits=LIMITS, num_processes=1)
        agent = make_workflow(
            spec, EngineRouter([writes(["#### 5", "none", "2+2=4 #### 4"], sign="assistant: ")]), TOKENIZER
        )
        try:
            await agent.start()
            [found] = await agent.run(make_prompt("2+2=", "4"), SamplingParams(max_tokens=32), "g")
            return found
        finally:
            await agent.close()

    found = asyncio.run(episode())
    assert found.verdict.reward == pytest.approx(0.8)
    assert (found.verdict.score, dict(found.verdict.extra)) == (1.0, {"attempts": 3.0})
    again = "\nuser: That is wrong. Try again.<eos>\nassistant: "
    assert feedback(found) == [again, again]
