"""Episodes in environments: what is recorded, invalid actions, Gymnasium's form, and that each is closed."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from agent_testing import TOKENIZER, Hosted, ToolTokenizer, run, texts_of, writes
from process_testing import eventually
from record_testing import make_prompt
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason, Prompt, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents.environments import episode_seed, find_action, fit_action, read_reset, read_step
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import FakeEngine

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT

GUESS = """
    import os, time
    LOG = PATH

    def log(text):
        with open(LOG, "a") as file:
            file.write(text + "\\n")

    class Environment:
        def __init__(self):
            log("made")

        def reset(self, prompt, label):
            self.target = int(label)
            self.tries = 0
            return "guess: "

        def step(self, action):
            if action == 99: raise KeyError("broken")
            if action == 98: os._exit(7)
            if action == 97: log("hangs"); time.sleep(1000)
            self.tries += 1
            if action == self.target:
                return "yes", 1.0, True, {"score": 1.0 / self.tries}
            return " higher: " if action < self.target else " lower: ", -0.25, False, {}

        def close(self):
            log("closed")

    def parse(text):
        return int(text)
"""


@pytest.fixture
def guess(write, tmp_path):
    """Return a function that writes the environment's file, with more code after it, and the log of its life."""
    log = tmp_path / "log"

    def make(more=""):
        code = textwrap.dedent(GUESS).replace("PATH", repr(str(log)))
        return write(code + textwrap.dedent(more)), lambda: sorted(log.read_text().split())

    return make


def test_observations_and_answers_are_recorded_until_the_environment_is_done(guess):
    source, log = guess()
    [episode], _ = run(source, writes(["2", "x", "9", "4"]))
    [rollout] = episode.rollouts
    assert texts_of(rollout) == [
        (PROMPT, "<bos>2+2=guess: "),
        (POLICY, "2<eos>"),
        (ENVIRONMENT, " higher: "),
        (POLICY, "x<eos>"),
        (ENVIRONMENT, "\nInvalid action: invalid literal for int() with base 10: 'x'\n"),
        (POLICY, "9<eos>"),
        (ENVIRONMENT, " lower: "),
        (POLICY, "4<eos>"),
    ]
    verdict = rollout.verdict
    assert (verdict.reward, verdict.turn_rewards) == (0.5, (-0.25, 0.0, -0.25, 1.0))
    assert verdict.score == pytest.approx(1 / 3)
    assert dict(verdict.extra) == {"turns": 4.0, "invalid_actions": 1.0}
    assert rollout.finish_reason is FinishReason.STOP
    assert log().count("made") == log().count("closed") >= 1


def test_chat_prompt_gets_observations_as_messages_of_the_user_also_behind_the_beginning_of_an_answer(guess):
    asked = {"role": "user", "content": "Find it."}
    plain = ({"role": "system", "content": "Play."}, asked)
    begun = (asked, {"role": "assistant", "content": "I play."})
    prompts = [Prompt("p", [1], "rendered", "4", messages=messages) for messages in (plain, begun)]
    engine = writes(["2", "4"], sign="assistant: ")
    [first, second], _ = run(guess()[0], engine, prompts=prompts, tokenizer=ToolTokenizer())
    assert texts_of(first.rollouts[0]) == [
        (PROMPT, "<bos>system: Play.<eos>\nuser: Find it.\n\nguess:<eos>\nassistant: "),
        (POLICY, "2<eos>"),
        (ENVIRONMENT, "\nuser: higher:<eos>\nassistant: "),
        (POLICY, "4<eos>"),
    ]
    told = "<bos>user: Find it.<eos>\nassistant: I play.<eos>\nuser: guess:<eos>\nassistant: "
    assert texts_of(second.rollouts[0]) == [(PROMPT, told), (POLICY, "4<eos>")]


def test_environment_that_says_nothing_first_leaves_a_chat_as_it_is(guess):
    source, _ = guess("""
        reset = Environment.reset
        def reset_quietly(self, prompt, label):
            reset(self, prompt, label)
            return " "
        Environment.reset = reset_quietly
    """)
    prompt = Prompt("p", [1], "rendered", "4", messages=({"role": "user", "content": "Find it."},))
    [episode], _ = run(source, writes(["4"], sign="assistant: "), prompts=[prompt], tokenizer=ToolTokenizer())
    assert texts_of(episode.rollouts[0]) == [(PROMPT, "<bos>user: Find it.<eos>\nassistant: "), (POLICY, "4<eos>")]


def test_each_is_closed_when_its_episode_is_done_cut_or_fails_alone(guess):
    source, log = guess("POOL_SIZE = 3\n")
    prompts = [make_prompt(str(number), label) for number, label in enumerate(["4", "5", "4", "bad"])]
    script = {"0": "4", "1": "1", "2": "99", "3": "1"}
    engine = FakeEngine(script=lambda prompt, _: [*script[TOKENIZER.decode(prompt)[5]].encode(), EOS_ID])
    limits = EpisodeLimits(max_length=500, max_turns=3)
    episodes, replaced = run(source, engine, prompts=prompts, limits=limits)
    kinds = [(episode.verdict.kind, episode.verdict.reward) for episode in episodes]
    assert kinds[:2] == [(VerdictKind.OK, 1.0), (VerdictKind.WRONG, -0.75)]
    assert [kind for kind, _ in kinds[2:]] == [VerdictKind.CRASH] * 2
    assert "KeyError: 'broken' (reward.py:19)" in episodes[2].verdict.detail
    assert "ValueError: invalid literal for int() with base 10: 'bad'" in episodes[3].verdict.detail
    assert episodes[1].rollouts[0].finish_reason is FinishReason.LENGTH
    assert log().count("made") == log().count("closed") >= 4
    assert replaced == 0


def test_environment_that_hangs_is_late_and_holds_up_nothing_else(guess):
    prompts = [make_prompt("97", "4"), make_prompt("4", "4")]
    engine = FakeEngine(script=lambda prompt, _: [*TOKENIZER.decode(prompt)[5:].split("g")[0].encode(), EOS_ID])
    started = time.monotonic()
    episodes, _ = run(guess()[0], engine, prompts=prompts, timeout_s=8.0)
    assert [episode.verdict.kind for episode in episodes] == [VerdictKind.TIMEOUT, VerdictKind.OK]
    assert time.monotonic() - started < 60


def test_process_that_an_environment_ends_is_counted(guess):
    [episode], replaced = run(guess()[0], writes(["98"]))
    assert "exited with status 7" in episode.verdict.detail
    assert replaced == 1  # counted when it dies; another one starts when an episode needs it


async def test_cancelled_episodes_close_their_environments(guess, tmp_path):
    source, log = guess(
        """
    class Slow(Environment):
        def step(self, action):
            log("steps")
            time.sleep(0.5)
            return super().step(action)
    """.replace("\n    ", "\n    ")
    )
    async with Hosted(source + ":Slow", writes(["1"])) as hosted:
        await hosted.agent.start()
        task = asyncio.create_task(hosted.episodes(make_prompt(), samples=3))
        assert await asyncio.to_thread(eventually, lambda: log().count("steps") >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert log().count("made") == log().count("closed") >= 3


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_environments_are_closed_when_the_program_is_interrupted_or_killed(guess, tmp_path, signal_number):
    source, log = guess("""
        class Slow(Environment):
            def step(self, action):
                log("steps")
                time.sleep(0.2)
                return super().step(action)

            def close(self):
                time.sleep(2)
                super().close()
    """)
    program = f"""if True:
        import sys
        sys.path[:] = {sys.path!r}
        from agent_testing import EpisodeLimits, run, writes
        run({source + ":Slow"!r}, writes(["1"]), samples=3, limits=EpisodeLimits(max_turns=10**4, max_length=10**6))
    """
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: (tmp_path / "log").exists() and log().count("steps") >= 3)
        process.send_signal(signal_number)
        assert eventually(lambda: log().count("closed") == log().count("made") >= 3)
        process.wait(60)
    finally:
        process.kill()


async def test_environment_that_is_made_while_its_episode_is_cancelled_is_closed(guess, tmp_path):
    source, log = guess("""
    POOL_SIZE = 0

    class Slow(Environment):
        def __init__(self):
            super().__init__()
            time.sleep(0.5)
    """)
    async with Hosted(source + ":Slow", writes(["1"])) as hosted:
        await hosted.agent.start()
        task = asyncio.create_task(hosted.episode())
        assert await asyncio.to_thread(eventually, (tmp_path / "log").exists)
        task.cancel()
        await asyncio.wait([task])
    assert log() == ["closed", "made"]


async def test_environments_are_made_ahead_and_reused_where_the_class_says_so(guess):
    source, log = guess("Environment.reusable = True\nPOOL_SIZE = 2\n")
    async with Hosted(source, writes(["4"])) as hosted:
        await hosted.agent.start()
        assert log() == ["made", "made"]
        for _ in range(6):
            await hosted.episode()
    assert log().count("made") == log().count("closed") <= 3


def test_client_with_named_values_and_results_of_attributes_is_an_environment(write):
    source = write("""
        from types import SimpleNamespace
        class Environment:
            async def reset(self, **given):
                return SimpleNamespace(observation=f" {given}: ", reward=None, done=False)
            async def step(self, action):
                return SimpleNamespace(observation="", reward=0.5, done=True)
    """)
    [episode], _ = run(source, writes(["4"]), prompts=[make_prompt("Go", "7")])
    expected = "<bos>Go {'prompt': 'Go', 'label': '7', 'seed': 7}: "
    assert texts_of(episode.rollouts[0]) == [(PROMPT, expected), (POLICY, "4<eos>")]
    assert (episode.verdict.reward, episode.rollouts[0].finish_reason) == (0.5, FinishReason.STOP)


def test_gymnasium_environment_is_used_as_it_is(write):
    source = write("""
        import gymnasium

        def Environment():
            return gymnasium.make("FrozenLake-v1", is_slippery=False)

        def render(observation):
            return f" at {observation}: "
    """)
    # Down, down, right, right, down, right reaches the goal of the fixed map; 7 is no direction.
    moves = ["1", "1", "I go\n<action>2</action>", "7", "2", "1", "2"]
    [episode], _ = run(source, writes(moves), prompts=[make_prompt("Go", "11")], limits=EpisodeLimits(max_length=900))
    [rollout] = episode.rollouts
    texts = [text for span, text in texts_of(rollout) if span is not POLICY]
    assert texts == ["<bos>Go at 0: ", " at 4: ", " at 8: ", " at 9: ", "\nInvalid action: '7' is not in Discrete(4)\n",
                     " at 10: ", " at 14: "]  # fmt: skip
    assert (rollout.verdict.reward, rollout.verdict.kind) == (1.0, VerdictKind.OK)
    assert dict(rollout.verdict.extra) == {"turns": 7.0, "invalid_actions": 1.0}


def test_gymnasium_time_limit_cuts_the_episode(write):
    source = write("""
        import gymnasium
        def Environment():
            return gymnasium.make("CartPole-v1", max_episode_steps=2)
    """)
    prompt = make_prompt("Go", "11")
    [episode], _ = run(source, writes(["0", "1"]), prompts=[prompt], limits=EpisodeLimits(max_length=900))
    [rollout] = episode.rollouts
    assert rollout.finish_reason is FinishReason.LENGTH and rollout.verdict.reward == 2.0
    first, _ = gymnasium.make("CartPole-v1").reset(seed=11)
    assert texts_of(rollout)[0] == (PROMPT, "<bos>Go" + str(first))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (("o", 1, True, {"a": 1}), ("o", 1.0, True, False, {"a": 1})),
        (("o", 1, False, None), ("o", 1.0, False, False, {})),
        (("o", np.float32(0.5), False, True, {}), ("o", 0.5, True, True, {})),
        (("o", 0, np.bool_(True), False, {}), ("o", 0.0, True, False, {})),
        ({"observation": "o", "reward": 2, "done": False}, ("o", 2.0, False, False, {})),
        (SimpleNamespace(observation="o", reward=None, done=True), ("o", 0.0, True, False, {})),
    ],
)
def test_results_of_steps_are_read(result, expected):
    step = read_step(result)
    assert (step.observation, step.reward, step.is_done, step.is_cut, dict(step.info)) == expected


@pytest.mark.parametrize("result", ["o", ("o", 1.0), {"observation": 1}, ("o", "high", True, {}), None])
def test_results_that_are_none_are_refused(result):
    with pytest.raises(TypeError, match="must"):
        read_step(result)


def test_small_readers():
    assert [read_reset(value) for value in ("o", ("o", {}), SimpleNamespace(observation="o"))] == ["o"] * 3
    assert read_reset((1, 2)) == (1, 2)
    actions = ["left\n up ", "<action> 3 </action> and\nmore", "<action>1</action><action>2</action>", ""]
    assert [find_action(text) for text in actions] == ["up", "3", "2", ""]
    assert episode_seed("p", "12") == 12
    assert episode_seed("p", "x") == episode_seed("p", "x") != episode_seed("q", "x")
    assert 0 <= episode_seed("p", "-1") < 2**31
    box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    np.testing.assert_array_equal(fit_action("[0.5, -1]", box), np.array([0.5, -1], np.float32))
    for action in ("[0.5]", "[5, 5]", "up", "0.5"):
        with pytest.raises(ValueError, match=r"."):
            fit_action(action, box)
    assert fit_action("abc", gymnasium.spaces.Text(5, charset="abc")) == "abc"


def test_environment_that_cannot_be_made_is_an_error_before_the_run(guess):
    source, _ = guess("POOL_SIZE = -1\n")
    with pytest.raises(RewardError, match="POOL_SIZE of the environments must not be negative, got -1"):
        run(source, writes(["4"]))
    source, _ = guess("def Environment(): raise OSError('no display')\n")
    with pytest.raises(RewardError, match=r"cannot import the agent from .*OSError: no display"):
        run(source, writes(["4"]))
