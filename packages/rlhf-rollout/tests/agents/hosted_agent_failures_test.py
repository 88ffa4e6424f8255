"""Users' agents in processes of their own: what bad and late episodes cost, and how agents are refused and ended."""

import asyncio
import os
import time

import pytest

from agent_testing import Hosted, run, texts_of, writes
from process_testing import eventually
from record_testing import make_prompt
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import FinishReason, SpanSource, VerdictKind
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.user_agent import parse_agent

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT

BAD = """
import asyncio, os, sys, time
async def run_episode(session):
    await session.reply()
    match session.label:
        case "raise": raise KeyError("no\\nsuch key")
        case "exit": os._exit(3)
        case "nan": return float("nan")
        case "huge": return 10**400
        case "temperature": await session.reply(sampling={"temperature": 0.5})
        case "zero": await session.reply(sampling={"max_tokens": 0})
        case "many": await session.reply(sampling={"max_tokens": "many"})
        case "least": await session.reply(sampling={"min_tokens": 5})
        case "stops": await session.reply(sampling={"stop_token_ids": [10**6]})
        case "tokens": await session.complete([5, 10**6])
        case "negative": await session.complete([-1])
        case "insist" | "nag":
            sampling = {"max_tokens": []} if session.label == "nag" else None
            while True:
                try:
                    await session.complete([1], sampling=sampling)
                except Exception:  # also one that says that the episode has no budget left
                    await asyncio.sleep(0.01)
        case "give_up":
            asyncio.current_task().get_loop().call_later(0.1, (waiting := asyncio.Future()).cancel)
            await waiting
    await asyncio.sleep(0.2)
    return 1.0
"""


def test_bad_episodes_fail_alone(write):
    details = {
        "huge": "OverflowError: int too large to convert to float",
        "temperature": "and the policy learns as sampled",
        "zero": "``max_tokens`` is 0; it must be at least 1",
        "many": "invalid literal for int() with base 10: 'many'",
        "least": "an agent asked for min_tokens = 5",
        "stops": "used the token id 1000000, and the vocabulary has 256 tokens",
        "tokens": "used the token id 1000000, and the vocabulary has 256 tokens",
        "negative": "used the token id -1, and the vocabulary has 256 tokens",
        "insist": "the agent took longer than 12 s",
        "nag": "the agent took longer than 12 s",
        "give_up": "CancelledError",
    }
    prompts = [make_prompt(label, label) for label in ["good", *details, "good "]]
    episodes, _ = run(write(BAD), writes(["a"]), prompts=prompts, timeout_s=12.0)
    first, *bad, last = episodes
    assert (first.verdict.kind, last.verdict.kind) == (OK, OK)
    for episode, (label, detail) in zip(bad, details.items(), strict=True):
        assert episode.verdict.kind is (TIMEOUT if label in ("insist", "nag") else CRASH), label
        assert detail in episode.verdict.detail
        assert episode.verdict.reward is None
        assert texts_of(episode.rollouts[0])[-1] == (POLICY, "a<eos>")


@pytest.mark.parametrize("gives_reward", [True, False])
def test_failed_episode_has_the_reward_of_failed_ones_if_the_policy_has_answered(write, gives_reward):
    source = BAD.replace(
        "    await session.reply()\n",
        "    if session.label == 'unasked': raise KeyError\n    await session.reply()\n",
        1,
    )
    prompts = [make_prompt("x", label) for label in ("raise", "nan", "exit", "unasked")]
    options = {"failed_reward": -2.0, "gives_reward": gives_reward, "prompts": prompts}
    episodes, _ = run(write(source), writes(["a"]), **options)
    found = [(episode.verdict.kind, episode.verdict.reward, episode.verdict.score) for episode in episodes]
    assert found == [(CRASH, -2.0, -2.0)] * 3 + [(CRASH, None, None)]


def test_child_that_the_agent_forks_takes_no_message_of_its_parent(write):
    source = write("""
        import os
        async def run_episode(session):
            await session.reply()
            if session.label == "fork":
                os.fork()
            for _ in range(50):
                await session.reply("more ")
            return 1.0
    """)
    prompts = [make_prompt(f"x{number}", label) for number, label in enumerate(["good", "fork", "good", "good"])]
    limits = EpisodeLimits(max_length=5000, max_turns=100)
    episodes, _ = run(source, writes(["a"]), prompts=prompts, limits=limits, timeout_s=20.0)
    assert [episode.verdict.kind for episode in episodes] == [OK] * 4
    assert [len(episode.rollouts[0].turn_ends) for episode in episodes] == [51] * 4


def test_plain_steps_that_hang_hold_up_no_other_episode(write):
    source = write("""
        import time
        class AgentInstance:
            def reset(self, states):
                return {"observation": states["observation"]}
            def step(self, states):
                if states["label"] == "hang":
                    time.sleep(1000)
                return {"rewards": 1.0, "done": True}
    """)
    num_hanging = min(32, os.cpu_count() + 4) + 1  # more than the threads of an event loop by default
    prompts = [make_prompt(f"x{number}", "hang") for number in range(num_hanging)]
    episodes, replaced = run(source, writes(["a"]), prompts=[*prompts, make_prompt("y", "good")], timeout_s=12.0)
    assert [episode.verdict.kind for episode in episodes] == [TIMEOUT] * num_hanging + [OK]
    assert replaced == 0


async def test_agent_is_not_late_while_its_question_waits_for_this_process(write, tmp_path):
    source = write(f"""
        import asyncio, pathlib
        folder = pathlib.Path({str(tmp_path)!r})
        async def run_episode(session):
            await session.reply()
            folder.joinpath("replied").touch()
            while not folder.joinpath("busy").exists():
                await asyncio.sleep(0.01)
            asking = asyncio.create_task(session.reply())
            await asyncio.sleep(0.1)
            folder.joinpath("asked").touch()
            await asking
            return 1.0
    """)
    async with Hosted(source, writes(["a"]), timeout_s=6.0) as hosted:
        task = asyncio.create_task(hosted.episode())
        while not (tmp_path / "replied").exists():
            await asyncio.sleep(0.001)
        (tmp_path / "busy").touch()  # this process is, until long after the question
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)
        time.sleep(6.5)
        episode = await task
    assert (episode.verdict.kind, episode.verdict.reward) == (OK, 1.0), episode.verdict


def test_agent_of_no_known_form_is_an_error_before_the_run(write):
    with pytest.raises(RewardError, match=": AgentExecutor has neither `execute` nor `step`"):
        run(write("AgentExecutor = 1"), writes(["a"]))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("missing.py", "agent file missing.py does not exist"),
        ("no agent", "neither a Python file nor a module"),
        ("FILE", "defines no AgentExecutor or AgentInstance or run_episode"),
        ("FILE:other", "defines no other"),
    ],
)
def test_agent_that_is_none_is_refused(write, agent, message):
    with pytest.raises(ConfigError, match=message):
        parse_agent(agent.replace("FILE", write("x = 1")))


def test_seconds_of_an_episode_are_limited(write):
    source = write("""
        import asyncio
        async def run_episode(session):
            total = 0.0
            for _ in range(50):
                await session.reply("more ")
                total += 1
                await asyncio.sleep(0.1)
            return total
    """)
    limits = EpisodeLimits(max_length=5000, max_turns=100, max_seconds=3.0)
    [episode], _ = run(source, writes(["a"]), limits=limits)
    assert 1 < len(episode.rollouts[0].turn_ends) < 50  # 50 turns take at least 5 s
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH


async def test_cancelled_episodes_end_in_their_process(write, tmp_path):
    source = write(f"""
        import asyncio
        async def run_episode(session):
            try:
                open({str(tmp_path / "began")!r}, "w")
                await asyncio.sleep(1000)
            finally:
                open({str(tmp_path / "ended")!r}, "w")
    """)
    async with Hosted(source, writes(["a"])) as hosted:
        task = asyncio.create_task(hosted.episode())
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, (tmp_path / "ended").exists)
