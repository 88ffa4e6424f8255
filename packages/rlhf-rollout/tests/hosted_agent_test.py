"""Users' agents in processes of their own: what is recorded, what counts as its reward, and what a bad agent costs."""

import asyncio
import os
import time

import numpy as np
import pytest

from agent_testing import TOKENIZER, run, texts_of, writes
from record_testing import make_prompt
from rlhf_data.errors import ConfigError, EngineError, RewardError
from rlhf_data.records import FinishReason, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.pool import AgentPool
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.user_agent import parse_agent
from rlhf_rollout.engines.fake import VOCAB_SIZE, FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT
SAMPLING = SamplingParams(max_tokens=32, seed=3)

# In the form of OpenRLHF 0.8: a coroutine as `__init__`, and a constructor that passes on what the run gives.
RETRIES = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0

    async def step(self, states, **kwargs):
        self.tries += 1
        right = states["action_text"].strip() == states["label"]
        return {
            "rewards": 1.0 if right else -0.25,
            "scores": [float(right)],
            "environment_feedback": " no, again: ",
            "done": right or self.tries == 3,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": self.tries, "seen": len(states["observation_text"])},
        }

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""


def test_openrlhf_agent_with_retries_is_recorded_token_by_token(write):
    [episode], _ = run(write(RETRIES), writes(["5", "6", "4"]))
    [rollout] = episode.rollouts
    asked = make_prompt("2+2=", "4")
    assert rollout.spans[0].token_ids.tolist() == asked.token_ids.tolist()
    assert texts_of(rollout)[1:] == [
        (POLICY, "5<eos>"),
        (ENVIRONMENT, " no, again: "),
        (POLICY, "6<eos>"),
        (ENVIRONMENT, " no, again: "),
        (POLICY, "4<eos>"),
    ]
    assert rollout.text == "5 no, again: 6 no, again: 4"
    assert rollout.finish_reason is FinishReason.STOP
    verdict = rollout.verdict
    assert (verdict.kind, verdict.reward, verdict.score, verdict.turn_rewards) == (OK, 0.5, 1.0, (-0.25, -0.25, 1.0))
    assert dict(verdict.extra) == {"tries": 3.0, "turns": 3.0, "seen": float(len("2+2=5 no, again: 6 no, again: "))}
    np.testing.assert_allclose(rollout.rollout_logprobs[rollout.loss_mask], -np.log(VOCAB_SIZE), rtol=1e-6)
    assert episode.rollouts[0].policy_versions[rollout.loss_mask].tolist() == [0] * 6


def test_samples_of_a_prompt_are_episodes_of_their_own_with_different_seeds(write):
    engine = FakeEngine(script=lambda prompt, seed: [*str(seed % 1000).encode(), EOS_ID])
    episodes, _ = run(write(RETRIES), engine, samples=3)
    assert [episode.episode_id for episode in episodes] == ["g0/0", "g0/1", "g0/2"]
    first = [TOKENIZER.decode(episode.rollouts[0].spans[1].token_ids) for episode in episodes]
    assert len(set(first)) == 3
    again, _ = run(write(RETRIES), engine, samples=3)
    for one, other in zip(episodes, again, strict=True):
        assert [span.token_ids.tolist() for span in one.rollouts[0].spans] == [
            span.token_ids.tolist() for span in other.rollouts[0].spans
        ]


NEWER = """
import asyncio
from rlhf_rollout.agents.interface import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.closed = False

    def reset(self, states):
        return {"observation": "Q: " + states["observation"]}

    def step(self, states):
        return {"rewards": 0.5, "environment_feedback": "", "done": False}

    def close(self):
        open(PATH, "a").write("closed ")

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_newer_form_changes_the_prompt_and_is_cut_after_its_turns_with_what_it_has_earned(write, tmp_path):
    source = write(NEWER.replace("PATH", repr(str(tmp_path / "closed"))))
    [episode], _ = run(source, writes(["a", "b"]), limits=EpisodeLimits(max_length=200, max_turns=3))
    [rollout] = episode.rollouts
    assert texts_of(rollout) == [(PROMPT, "Q: 2+2="), (POLICY, "a<eos>"), (POLICY, "b<eos>"), (POLICY, "b<eos>")]
    assert rollout.finish_reason is FinishReason.LENGTH
    # The environment wrote nothing between the answers, so they are one turn.
    assert (rollout.verdict.reward, rollout.verdict.turn_rewards) == (1.5, (1.5,))
    assert (tmp_path / "closed").read_text() == "closed "


def test_conversation_that_is_full_ends_with_what_it_has_earned(write):
    limits = EpisodeLimits(max_length=len("2+2=") + 1 + 2 + len(" no, again: ") + 2)
    [episode], _ = run(write(RETRIES), writes(["5", "666", "4"]), limits=limits)
    [rollout] = episode.rollouts
    assert rollout.num_tokens == limits.max_length
    assert texts_of(rollout)[-1] == (POLICY, "66")  # there was room for two tokens
    assert rollout.finish_reason is FinishReason.LENGTH
    assert rollout.verdict.turn_rewards == (-0.25, -0.25)


EXECUTOR = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        ids = list(prompt.encode())
        outputs = []
        for more in ("", "?", "!"):
            ids = ids + list(more.encode())
            request = await llm_engine.generate(ids, sampling_params)
            output = request.outputs[0]
            assert request.prompt_token_ids == ids and output.finish_reason == "stop"
            assert len(output.token_ids) == len(output.logprobs)
            assert output.token_ids[0] in output.logprobs[0]
            outputs.append(output.text)
            ids = ids + output.token_ids
        # The history is rewritten: the rest is another rollout.
        request = await llm_engine.generate(list(b"short:"))
        branch = list(b"short:") + request.outputs[0].token_ids
        again = await llm_engine.generate(branch + list(b"1"))
        twice = await llm_engine.generate(branch + list(b"2"))
        return {"reward": 2.0, "scores": 0.75, "extra_logs": {"answers": len(outputs)}, "max_length": max_length}
"""


def test_custom_executor_gets_tokens_and_a_rewritten_history_becomes_another_rollout(write):
    [episode], _ = run(write(EXECUTOR), writes(["a", "b", "c"]))
    assert [rollout.rollout_id for rollout in episode.rollouts] == ["g0/0.0", "g0/0.1", "g0/0.2"]
    first, second, third = map(texts_of, episode.rollouts)
    assert first == [(PROMPT, "2+2="), (POLICY, "a<eos>"), (ENVIRONMENT, "?"), (POLICY, "b<eos>"), (ENVIRONMENT, "!"),
                     (POLICY, "c<eos>")]  # fmt: skip
    assert second == [(PROMPT, "short:"), (POLICY, "a<eos>"), (ENVIRONMENT, "1"), (POLICY, "b<eos>")]
    # The second answer to the same history: no token of the policy is trained twice.
    assert third == [(PROMPT, "short:a<eos>2"), (POLICY, "b<eos>")]
    for rollout in episode.rollouts:
        assert (rollout.verdict.reward, rollout.verdict.score, rollout.verdict.turn_rewards) == (2.0, 0.75, ())
        assert dict(rollout.verdict.extra) == {"answers": 3.0}


def test_rewards_of_answers_stay_in_the_rollouts_that_hold_them(write):
    # Six answers, of which the fifth and the sixth continue the fourth: three of the first rollout, two, and one.
    agent = EXECUTOR.replace('"reward": 2.0', '"reward": [1, 2, 4, 8, 16, 32]')
    [episode], _ = run(write(agent), writes(["a", "b", "c"]))
    verdicts = [rollout.verdict for rollout in episode.rollouts]
    assert [verdict.reward for verdict in verdicts] == [63.0] * 3
    assert [verdict.turn_rewards for verdict in verdicts] == [(1.0, 2.0, 4.0), (8.0, 16.0), (32.0,)]
    assert [verdict.earned_elsewhere for verdict in verdicts] == [(0.0, 56.0), (7.0, 32.0), (31.0, 0.0)]
    # Another number of rewards than of answers: they belong to the episode as a whole.
    [episode], _ = run(write(agent.replace("32]", "32, 64]")), writes(["a", "b", "c"]))
    for rollout in episode.rollouts:
        assert (rollout.verdict.reward, rollout.verdict.turn_rewards) == (127.0, ())
        assert rollout.verdict.earned_elsewhere == (0.0, 0.0)


FUNCTION = """
async def run_episode(session):
    reply = await session.reply(sampling={"max_tokens": 2})
    assert reply.finish_reason == "length" and len(reply.token_ids) == 2
    if session.label == "none":
        return None
    if session.label == "quit":
        while True:
            await session.reply("more ")
    return [0.5]
"""


@pytest.mark.parametrize(
    ("label", "kind", "reward", "detail"),
    [
        ("4", WRONG, 0.5, ""),
        ("none", CRASH, None, "the agent gave no reward"),
        ("quit", WRONG, 0.0, "a limit ended the episode before its reward"),
    ],
)
def test_function_is_an_agent_and_must_give_a_reward(write, label, kind, reward, detail):
    [episode], _ = run(write(FUNCTION), writes(["abc"]), prompts=[make_prompt("x", label)])
    verdict = episode.verdict
    assert (verdict.kind, verdict.reward, verdict.detail) == (kind, reward, detail)


def test_agent_without_a_reward_leaves_the_verdict_to_another(write):
    prompts = [make_prompt("x", "none")]
    [episode], _ = run(write(FUNCTION), writes(["abc"]), prompts=prompts, gives_reward=False)
    assert episode.verdict is None
    assert episode.rollouts[0].text == "ab"


BAD = """
import asyncio, os, sys, time
async def run_episode(session):
    await session.reply()
    match session.label:
        case "raise": raise KeyError("no\\nsuch key")
        case "exit": os._exit(3)
        case "hang": await asyncio.sleep(1000)
        case "block": time.sleep(1000)
        case "text": return "high"
        case "nan": return float("nan")
        case "huge": return 10**400
        case "temperature": await session.reply(sampling={"temperature": 0.5})
        case "zero": await session.reply(sampling={"max_tokens": 0})
        case "many": await session.reply(sampling={"max_tokens": "many"})
        case "least": assert len((await session.reply(sampling={"max_tokens": 2, "min_tokens": 5})).token_ids) == 2
        case "stops": await session.reply(sampling={"stop_token_ids": [10**6]})
        case "tokens": await session.complete([5, 10**6])
        case "negative": await session.complete([-1])
        case "insist":
            while True:
                try:
                    await session.complete([1])
                except Exception:  # also one that says that the episode has no budget left
                    await asyncio.sleep(0.01)
        case "give_up":
            asyncio.current_task().get_loop().call_later(0.1, (waiting := asyncio.Future()).cancel)
            await waiting
        case "write": os.write(int(sys.argv[1]), b"[1]\\n")
        case "fork": os.fork()
        case "never": return 1.0
    await asyncio.sleep(0.2)
    return 1.0
"""


@pytest.mark.parametrize(
    ("label", "kind", "detail"),
    [
        ("raise", CRASH, "KeyError: 'no\\nsuch key' (reward.py:6)"),
        ("text", CRASH, "TypeError: a reward, score or extra log must be one number, got 'high'"),
        ("nan", CRASH, "the reward is nan"),
        ("huge", CRASH, "OverflowError: int too large to convert to float"),
        ("temperature", CRASH, "and the policy learns as sampled"),
        ("exit", CRASH, "the agent's process exited with status 3"),
        ("hang", TIMEOUT, "the agent took longer than 6 s"),
        ("block", TIMEOUT, "the agent took longer than 6 s"),
        ("zero", CRASH, "max_tokens (0) must be at least 1"),
        ("many", CRASH, "invalid literal for int() with base 10: 'many'"),
        ("least", OK, ""),
        ("stops", CRASH, "used the token id 1000000, and the vocabulary has 256 tokens"),
        ("tokens", CRASH, "used the token id 1000000, and the vocabulary has 256 tokens"),
        ("negative", CRASH, "used the token id -1, and the vocabulary has 256 tokens"),
        ("insist", TIMEOUT, "the agent took longer than 6 s"),
        ("give_up", CRASH, "CancelledError"),
        ("write", CRASH, "the agent's process sent something that is no answer"),
        ("fork", OK, ""),
    ],
)
def test_bad_episode_fails_alone(write, label, kind, detail):
    prompts = [make_prompt(f"x{number}", "good") for number in range(3)]
    prompts.insert(1, make_prompt("bad", label))
    timeout_s = 6.0 if kind is TIMEOUT else 60.0  # the good ones must not be late on a busy machine
    episodes, _ = run(write(BAD), writes(["a"]), prompts=prompts, timeout_s=timeout_s)
    assert [episode.verdict.kind for episode in episodes] == [OK, kind, OK, OK]
    assert detail in episodes[1].verdict.detail
    if kind.failed:
        assert episodes[1].verdict.reward is None
        assert texts_of(episodes[1].rollouts[0])[-1] == (POLICY, "a<eos>")


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
    episodes, replaced = run(source, writes(["a"]), prompts=[*prompts, make_prompt("y", "good")], timeout_s=6.0)
    assert [episode.verdict.kind for episode in episodes] == [TIMEOUT] * num_hanging + [OK]
    assert replaced == 0


def test_agent_is_not_late_while_its_question_waits_for_this_process(write, tmp_path):
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

    async def scenario():
        pool = AgentPool(parse_agent(source), num_processes=1, timeout_s=6.0)
        agent = HostedAgent(EngineRouter([writes(["a"])]), pool, TOKENIZER, EpisodeLimits())
        task = asyncio.create_task(agent.run(make_prompt(), SAMPLING, "g"))
        while not (tmp_path / "replied").exists():
            await asyncio.sleep(0.001)
        (tmp_path / "busy").touch()  # this process is, until long after the question
        while not (tmp_path / "asked").exists():
            time.sleep(0.01)
        time.sleep(6.5)
        [episode] = await task
        await pool.close()
        return episode

    episode = asyncio.run(scenario())
    assert (episode.verdict.kind, episode.verdict.reward) == (OK, 1.0), episode.verdict


def test_agent_that_cannot_be_imported_is_an_error_before_the_run(write):
    for source, message in {
        "raise ValueError('no')\nAgentExecutor = 1": "cannot import the agent from .*ValueError: no",
        "AgentExecutor = 1": "AgentExecutor has neither `execute` nor `step`",
        "import sys\nsys.exit(5)\nAgentExecutor = 1": "SystemExit: 5",
        "import os\nos._exit(5)\nAgentExecutor = 1": "exited with status 5",
    }.items():
        pool = AgentPool(parse_agent(write(source)), num_processes=1)

        async def start(pool=pool):
            try:
                await pool.start()
            finally:
                await pool.close()

        with pytest.raises(RewardError, match=message):
            asyncio.run(start())


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


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"max_length": -1}, {"max_seconds": 0}])
def test_limits_must_be_positive(options):
    with pytest.raises(ConfigError, match="must be positive"):
        EpisodeLimits(**options)


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
    limits = EpisodeLimits(max_length=5000, max_turns=100, max_seconds=0.5)
    [episode], _ = run(source, writes(["a"]), limits=limits)
    assert 1 < len(episode.rollouts[0].turn_ends) < 20
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH


def test_engine_that_fails_fails_the_group(write):
    engine = FakeEngine(fail_after=1)
    with pytest.raises(EngineError, match="told to fail"):
        run(write(RETRIES), engine, samples=2)


def test_closing_ends_processes_and_what_they_started(write, tmp_path):
    source = write(f"""
        import os, subprocess
        async def run_episode(session):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
            await session.reply()
            return 1.0
    """)
    run(source, writes(["a"]))
    process_ids = (tmp_path / "pids").read_text().split()
    assert len(process_ids) == 2
    assert not any(os.path.exists(f"/proc/{process_id}") for process_id in process_ids)


def test_cancelled_episodes_end_in_their_process(write, tmp_path):
    source = write(f"""
        import asyncio
        async def run_episode(session):
            try:
                open({str(tmp_path / "began")!r}, "w")
                await asyncio.sleep(1000)
            finally:
                open({str(tmp_path / "ended")!r}, "w")
    """)

    async def cancel():
        pool = AgentPool(parse_agent(source), num_processes=1)
        agent = HostedAgent(EngineRouter([writes(["a"])]), pool, TOKENIZER, EpisodeLimits())
        task = asyncio.create_task(agent.run(make_prompt(), SAMPLING, "g"))
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 60
        while not (tmp_path / "ended").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await pool.close()

    asyncio.run(cancel())
    assert (tmp_path / "ended").exists()
