"""Users' agents in processes of their own: what is recorded, and what counts as its reward."""

import numpy as np
import pytest

from agent_testing import TOKENIZER, run, texts_of, writes
from record_testing import make_prompt
from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason, SpanSource, VerdictKind
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines.fake import VOCAB_SIZE, FakeEngine

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT

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


def test_stop_of_an_agent_ends_an_answer_whose_text_ends_before_it(write):
    source = """
        async def run_episode(session):
            stop = {"one": " END", "list": [" END", "never"], "other": "never"}[session.label]
            reply = await session.reply(sampling={"stop": stop})
            texts = ("one END two", "one END two<eos>") if session.label == "other" else ("one", "one")
            assert (reply.text, reply.raw_text, reply.finish_reason) == (*texts, "stop"), reply
            return 1.0
    """
    prompts = [make_prompt("x", label) for label in ("one", "list", "other")]
    episodes, _ = run(write(source), writes(["one END two"]), prompts=prompts)
    assert [(episode.verdict.kind, episode.verdict.detail) for episode in episodes] == [(OK, "")] * 3
    recorded = [texts_of(episode.rollouts[0])[1:] for episode in episodes]
    assert recorded == [[(POLICY, text)] for text in ("one END", "one END", "one END two<eos>")]


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


def test_result_of_an_executor_is_what_it_returns_or_else_what_it_puts_into_its_queue(write):
    source = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, llm_engine):
        await llm_engine.generate(list(prompt.encode()), sampling_params)
        await self.result_queue.put({"reward": 9.0})
        return {"reward": 2.0} if label == "both" else None
"""
    prompts = [make_prompt(f"x{number}", label) for number, label in enumerate(["both", "queue", "both", "queue"])]
    episodes, _ = run(write(source), writes(["a"]), prompts=prompts)
    assert [episode.verdict.reward for episode in episodes] == [2.0, 9.0, 2.0, 9.0]


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


def test_function_is_an_agent_and_must_give_a_reward(write):
    prompts = [make_prompt("x", label) for label in ("4", "none", "quit")]
    episodes, _ = run(write(FUNCTION), writes(["abc"]), prompts=prompts)
    assert [(episode.verdict.kind, episode.verdict.reward, episode.verdict.detail) for episode in episodes] == [
        (WRONG, 0.5, ""),
        (CRASH, None, "the agent gave no reward"),
        (WRONG, 0.0, "a limit ended the episode before its reward"),
    ]


def test_agent_says_whose_fault_it_was(write):
    source = """
async def run_episode(session):
    await session.reply()
    return {"reward": 0.25, "verdict": session.label}
"""
    labels = ["unparsable", "ok", "crash", "guilty"]
    episodes, _ = run(write(source), writes(["a"]), prompts=[make_prompt("x", label) for label in labels])
    verdicts = [(str(episode.verdict.kind), episode.verdict.reward) for episode in episodes]
    assert verdicts == [("unparsable", 0.25), ("ok", 0.25), ("crash", None), ("crash", None)]
    assert "'guilty' is not a valid VerdictKind" in episodes[3].verdict.detail


def test_agent_without_a_reward_leaves_the_verdict_to_another(write):
    prompts = [make_prompt("x", "none")]
    [episode], _ = run(write(FUNCTION), writes(["abc"]), prompts=prompts, gives_reward=False)
    assert episode.verdict is None
    assert episode.rollouts[0].text == "ab"


def test_engine_that_fails_fails_the_group(write):
    engine = FakeEngine(fail_after=1)
    with pytest.raises(EngineError, match="told to fail"):
        run(write(RETRIES), engine, samples=2)
