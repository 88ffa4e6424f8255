"""Environments of other libraries: a real OpenEnv server and its client, and real environments of `verifiers`."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from agent_testing import run, texts_of, writes
from record_testing import make_prompt
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason, Prompt, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents.agent_spec import AgentSpec, make_workflow
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.user_agent import read_label
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
TOKENIZER = ByteTokenizer(add_bos=False)
LIFE = []


class Guess(Action):
    number: int


class Answer(Observation):
    text: str


class GuessingEnvironment(Environment):
    """Runs in OpenEnv's server: a session is a game, whose number is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        LIFE.append("made")

    def reset(self, seed=None, episode_id=None, **others):
        self.target = seed
        return Answer(text="guess: ", done=False, reward=None)

    def step(self, action, timeout_s=None, **others):
        if action.number == self.target:
            return Answer(text="yes", done=True, reward=1.0)
        return Answer(text=" higher: " if action.number < self.target else " lower: ", done=False, reward=-0.25)

    @property
    def state(self):
        return State()

    def close(self):
        LIFE.append("closed")


@contextlib.contextmanager
def openenv_server():
    """Yield the URL of OpenEnv's server with the game."""
    app = create_fastapi_app(GuessingEnvironment, Guess, Answer, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


# A client as authors of OpenEnv environments write it.
CLIENT = """
    from types import SimpleNamespace
    from openenv.core import EnvClient
    from openenv.core.client_types import StepResult

    class GuessingClient(EnvClient):
        def _step_payload(self, action):
            return {"number": action}
        def _parse_result(self, payload):
            observation = SimpleNamespace(**payload["observation"])
            return StepResult(observation, payload["reward"], payload["done"])
        def _parse_state(self, payload):
            return payload

    def Environment():
        return GuessingClient(base_url=URL)

    def render(observation):
        return observation.text

    def parse(text):
        return int(text)
"""


def test_openenv_client_is_an_environment_and_its_session_ends_with_the_episode(write):
    LIFE.clear()
    prompts = [make_prompt("7", "7"), make_prompt("3", "3")]
    with openenv_server() as url:
        source = write(CLIENT.replace("URL", repr(url)))
        episodes, replaced = run(source, writes(["5", "x", "7"]), prompts=prompts, limits=EpisodeLimits(max_turns=3))
        deadline = time.monotonic() + 60
        while LIFE.count("closed") < LIFE.count("made") and time.monotonic() < deadline:
            time.sleep(0.02)
    assert texts_of(episodes[0].rollouts[0]) == [
        (PROMPT, "<bos>7guess: "),
        (POLICY, "5<eos>"),
        (ENVIRONMENT, " higher: "),
        (POLICY, "x<eos>"),
        (ENVIRONMENT, "\nInvalid action: invalid literal for int() with base 10: 'x'\n"),
        (POLICY, "7<eos>"),
    ]
    assert [episode.verdict.turn_rewards for episode in episodes] == [(-0.25, 0.0, 1.0), (-0.25, 0.0, -0.25)]
    reasons = [episode.rollouts[0].finish_reason for episode in episodes]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH]
    assert replaced == 0
    assert LIFE.count("closed") == LIFE.count("made") >= 2


def run_verifiers(source, answers, *labels, limits=None):
    """Return an episode per label of an environment of `verifiers`, which asks through the door."""
    content = "2+2="
    messages = ({"role": "user", "content": content},)
    prompts = [Prompt("p", TOKENIZER.encode(content), content, label, messages=messages) for label in labels]

    def script(tokens, _):
        turn = min(bytes(tokens).count(b"assistant: ") - 1, len(answers) - 1)
        return [*answers[turn].encode(), EOS_ID]

    async def collect():
        spec = AgentSpec(path=source, limits=limits or EpisodeLimits(), num_processes=1, timeout_s=60.0)
        agent = make_workflow(spec, EngineRouter([FakeEngine(script=script)]), TOKENIZER)
        try:
            await agent.start()
            sampling = SamplingParams(max_tokens=128, seed=3)
            return [(await agent.run(prompt, sampling, f"g{n}"))[0] for n, prompt in enumerate(prompts)]
        finally:
            await agent.close()

    return asyncio.run(collect())


def spans_of(episode):
    [rollout] = episode.rollouts
    return [(span.source, TOKENIZER.decode(span.token_ids)) for span in rollout.spans]


VERIFIERS = """
    import verifiers as vf
    from datasets import Dataset

    class Retries(vf.MultiTurnEnv):
        async def is_completed(self, messages, state, **others):
            return state["turn"] > 0 and messages[-1]["content"] == state["answer"]

        async def env_response(self, messages, state, **others):
            return [{"role": "user", "content": f"no, it is {state['info']['hint']}"}], state

    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    def short(completion, task):
        return 1.0 / len(completion) if task == "sums" else -1.0

    def load_environment():
        rows = Dataset.from_list([{"question": "2+2=", "answer": "4"}])
        return Retries(dataset=rows, rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.5]), max_turns=3)
"""


def test_environment_of_verifiers_plays_through_the_door_and_its_rubric_gives_the_reward(write):
    source = write(VERIFIERS)
    label = json.dumps({"answer": "4", "info": {"hint": "even"}, "task": "sums"})
    episode, failed = run_verifiers(source, ["5", "4"], label, "4")  # the second row has no hint
    assert spans_of(episode) == [
        (PROMPT, "<bos>user: 2+2=<eos>\nassistant: "),
        (POLICY, "5<eos>"),
        (ENVIRONMENT, "\nuser: no, it is even<eos>\nassistant: "),
        (POLICY, "4<eos>"),
    ]
    assert episode.verdict.kind is VerdictKind.OK
    assert episode.verdict.reward == pytest.approx(1.0 + 0.5 / 3)  # three messages after the prompt
    assert dict(episode.verdict.extra) == pytest.approx({"right": 1.0, "short": 1 / 3})
    [cut] = run_verifiers(source, ["5"], label, limits=EpisodeLimits(max_turns=1))
    assert (cut.rollouts[0].finish_reason, cut.verdict.reward) == (FinishReason.LENGTH, 0.0)
    assert failed.verdict.kind is VerdictKind.CRASH and "KeyError: 'hint'" in failed.verdict.detail


def test_tools_of_verifiers_are_called(write):
    source = write("""
        import verifiers as vf
        from datasets import Dataset

        def double(number: int) -> int:
            \"\"\"Double a number.\"\"\"
            return 2 * number

        def right(completion, answer):
            return float(completion[-1]["content"] == answer)

        def load_environment():
            rows = Dataset.from_list([{"question": "?", "answer": "42"}])
            return vf.ToolEnv(tools=[double], dataset=rows, rubric=vf.Rubric(funcs=[right]))
    """)
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    [episode] = run_verifiers(source, [call, "42"], "42")
    texts = [text for source, text in spans_of(episode) if source is ENVIRONMENT]
    assert len(texts) == 1 and "tool: 42<eos>" in texts[0]
    assert (episode.verdict.reward, episode.verdict.kind) == (1.0, VerdictKind.OK)


def test_what_is_no_environment_of_verifiers_is_an_error_before_the_run(write):
    with pytest.raises(RewardError, match=r"`load_environment` returned 7\s+hint: .*verifiers 0\.1\.3 to 0\.1\.9"):
        run_verifiers(write("def load_environment():\n    return 7\n"), ["4"], "4")


@pytest.mark.parametrize(
    ("label", "columns"),
    [
        ("4", {"answer": "4"}),
        ("four", {"answer": "four"}),
        ("[4]", {"answer": "[4]"}),
        ("", {"answer": ""}),
        ('{"answer": "4", "info": null, "prompt": "x"}', {"answer": "4"}),
        ('{"info": {"a": 1}, "task": "t"}', {"info": {"a": 1}, "task": "t"}),
    ],
)
def test_labels_are_columns_of_a_row(label, columns):
    assert read_label(label) == columns
