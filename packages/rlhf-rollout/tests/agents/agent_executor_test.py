"""Executors of OpenRLHF that serve the policy themselves: a server in a thread of its own, used for many episodes."""

from types import SimpleNamespace

import numpy as np

from agent_testing import Hosted, run, texts_of
from record_testing import make_prompt
from rlhf_data.records import FinishReason, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents.interface import overrides
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import VOCAB_SIZE, FakeEngine

PROMPT, POLICY = SpanSource.PROMPT, SpanSource.POLICY
OK, WRONG, CRASH = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH

# As OpenRLHF's example does: a server in a thread with its own event loop asks `llm_engine`, which the executor keeps
# from its first episode, and the episode asks the server by the library of OpenAI.
SERVING = """
import json, socket, threading, uuid
import openai, uvicorn
from openrlhf.utils.agent import AgentExecutorBase

# vLLM's class has slots in place of `__dict__`, and these values where nothing was asked for.
class SamplingParams:
    __slots__ = ("max_tokens", "temperature", "logprobs", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens",
                 "stop", "stop_token_ids", "seed")
    __struct_fields__ = __slots__
    def __init__(self, **given):
        defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
        defaults |= {"stop": [], "stop_token_ids": [], "seed": None}
        for name, value in (defaults | given).items():
            setattr(self, name, value)

class AgentExecutor(AgentExecutorBase):
    def begin(self, llm_engine):
        self.llm_engine = llm_engine
        self.traces = {}
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self.app, interface="asgi3", lifespan="off", log_config=None)
        serve = uvicorn.Server(config).run
        threading.Thread(target=serve, kwargs={"sockets": [listener]}, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        with open(LOG, "a") as log:
            log.write("server\\n")

    async def app(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body)
        params = SamplingParams(max_tokens=asked["max_tokens"], temperature=asked["temperature"], logprobs=1)
        tokens = [2, *asked["messages"][-1]["content"].encode()]
        try:
            output = (await self.llm_engine.generate(tokens, params)).outputs[0]
        except Exception as error:
            status, answer = 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
        else:
            status = 200
            pairs = zip(output.token_ids, output.logprobs)
            told = [{"token": chr(t), "logprob": each[t].logprob, "top_logprobs": []} for t, each in pairs]
            self.traces.setdefault(asked["session_id"], []).append(output.token_ids)
            choice = {"index": 0, "message": {"role": "assistant", "content": output.text}}
            choice |= {"finish_reason": output.finish_reason, "logprobs": {"content": told}}
            answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if not hasattr(self, "client"):
            self.begin(llm_engine)
        session = uuid.uuid4().hex
        assert sampling_params.logprobs is not None
        for _ in range(2 if label == "twice" else 1):
            answer = await self.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": prompt}], max_tokens=5, logprobs=True,
                temperature=sampling_params.temperature, extra_body={"session_id": session},
            )
        choice = answer.choices[0]
        [tokens] = self.traces.pop(session)
        assert label != "bad", "planted"
        logprob = sum(token.logprob for token in choice.logprobs.content)
        reward = float(choice.message.content == label)
        return {"reward": reward, "extra_logs": {"logprob": logprob, "length": max_length}, "truncated": False}
"""


def echo(prompt, _):
    """Write the last letter of a prompt nine times."""
    return [*bytes(prompt[-1:]) * 9, EOS_ID]


def test_episodes_at_the_same_time_get_their_own_answers_from_executors_with_servers(write, tmp_path):
    source = write(SERVING.replace("LOG", repr(str(tmp_path / "log"))))
    letters = ["a", "b", "x", "d"]
    prompts = [make_prompt(f"say {letter}", "bad" if letter == "x" else letter * 5) for letter in letters]
    episodes, _ = run(source, FakeEngine(script=echo, latency_s=0.05), prompts=prompts, samples=2)
    for episode, letter in zip(episodes, np.repeat(letters, 2), strict=True):
        [rollout] = episode.rollouts
        assert [source for source, _ in texts_of(rollout)] == [PROMPT, POLICY]
        assert texts_of(rollout)[1] == (POLICY, letter * 5)  # as long as the agent wanted
        assert rollout.finish_reason is FinishReason.STOP
        verdict = episode.verdict
        if letter == "x":
            assert verdict.kind is CRASH and "planted" in verdict.detail
            continue
        assert (verdict.kind, verdict.reward, verdict.extra["length"]) == (OK, 1.0, 200)
        np.testing.assert_allclose(verdict.extra["logprob"], -5 * np.log(VOCAB_SIZE), rtol=1e-6)


async def test_executor_whose_episode_ended_well_runs_the_next_ones(write, tmp_path):
    source = write(SERVING.replace("LOG", repr(str(tmp_path / "log"))))

    found = []
    limits = EpisodeLimits(max_length=200, max_turns=1)
    async with Hosted(source, FakeEngine(script=echo), limits=limits, timeout_s=60.0) as hosted:
        for number, label in enumerate(["00000", "", "bad", "twice", "44444", ""]):
            episode = await hosted.episode(label, f"say {number}")
            found.append((episode.verdict.kind, texts_of(episode.rollouts[0])[1][1]))
    # An agent that fails because the episode has no turns left is no failure of the agent.
    assert found == [
        (OK, "00000"),
        (WRONG, "11111"),
        (CRASH, "22222"),
        (WRONG, "33333"),
        (OK, "44444"),
        (WRONG, "55555"),
    ]
    # The first executor has the episodes up to the one that failed, and the next is not used again after its failure.
    assert (tmp_path / "log").read_text() == "server\n" * 3


def test_fields_of_vllm_that_nobody_has_set_ask_for_nothing():
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    run_samples = {"max_tokens": 32, "min_tokens": 0, "temperature": 0.7, "top_p": 1.0, "top_k": 20, "min_p": 0.1}
    run_samples |= {"repetition_penalty": 1.1, "stop_token_ids": [5], "stop": ["x"], "seed": 3}
    session = SimpleNamespace(sampling=run_samples)
    given = VllmSamplingParams(max_tokens=16, temperature=0.7)
    assert overrides(given, session) == {"max_tokens": 16}
    given = VllmSamplingParams(temperature=0.7, max_tokens=32, top_k=5, min_tokens=2, stop=["y"], stop_token_ids=[7])
    assert overrides(given, session) == {"top_k": 5, "min_tokens": 2, "stop": ["y"], "stop_token_ids": [7]}
    assert overrides(VllmSamplingParams(), session) == {"max_tokens": 16, "temperature": 1.0}
    # What an agent writes down itself is asked for.
    assert overrides({"top_k": 0, "min_p": None, "stop": ["x"]}, session) == {"top_k": 0}
    assert overrides(SimpleNamespace(top_k=0, max_tokens=32), session) == {"top_k": 0}
    assert overrides(None, session) is None
