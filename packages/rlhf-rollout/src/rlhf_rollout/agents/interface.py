"""What a user's agent is written against: OpenRLHF's classes, and the session of an episode. Runs in agent processes.

    from rlhf_rollout.agents.interface import AgentInstanceBase, MultiTurnAgentExecutor
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase  # the same classes, found without OpenRLHF

Source of the classes: OpenRLHF, `openrlhf/utils/agent.py`, versions 0.8.8 to 0.11.2.
"""

import abc
import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rlhf_data.images.files import kept_image
from rlhf_data.images.rows import change_images
from rlhf_rollout.workers.threads import called

Ask = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class PolicyError(RuntimeError):
    """The policy cannot answer: an engine has failed, or the agent has asked for something that is refused."""


class BudgetSpentError(Exception):
    """The episode has no turns, tokens or seconds left. Agents need not catch it: the episode ends well by it."""


@dataclasses.dataclass(slots=True)
class Reply:
    """One answer of the policy.

    Attributes:
        text: the answer without special tokens.
        raw_text: the answer with special tokens, which some chat templates use for tool calls.
        token_ids: its tokens, the end token included.
        logprobs: nats, one per token.
        prompt_token_ids: the whole conversation before it.
        finish_reason: "stop" or "length".
    """

    text: str
    raw_text: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]
    finish_reason: str


class Session:
    """An episode under way: its prompt, and the way to the policy.

    Attributes:
        prompt: the rendered prompt.
        prompt_token_ids: its tokens.
        messages: the prompt as messages; one message of the user, unless the chat template has rendered it.
        is_chat: whether the chat template has rendered the prompt.
        label: the reference answer, "" without one.
        images: the paths of the prompt's images, which `messages` name in parts of type `image_url`.
        extra: further cells of the prompt's row, by the keys that the run names.
        max_turns, max_length: limits of the episode, in answers and tokens.
        timeout_s: seconds that the agent's code may take between two answers.
        sampling: names and values of the answers' sampling.
    """

    def __init__(self, request: Mapping[str, Any], ask: Ask) -> None:
        self.prompt: str = request["prompt"]
        self.prompt_token_ids: list[int] = request["prompt_token_ids"]
        self.is_chat = request.get("messages") is not None
        self.messages: list[dict[str, Any]] = request.get("messages") or [{"role": "user", "content": self.prompt}]
        self.images: list[str] = request.get("images", [])
        self.label: str = request["label"]
        self.extra: dict[str, Any] = request.get("extra", {})
        self.max_turns: int = request["max_turns"]
        self.max_length: int = request["max_length"]
        self.timeout_s: float = request["timeout_s"]
        self.sampling: dict[str, Any] = request["sampling"]
        self._url: str | None = request.get("url")
        self._ask = ask

    @property
    def base_url(self) -> str:
        """The episode's own URL for clients of OpenAI's protocol, with `/v1`; those of Anthropic's leave `/v1` out.

        Any API key does. Raises PolicyError where the run has no gateway.
        """
        if self._url is None:
            raise PolicyError("this run has no server for agents; install 'rlhf-rollout[server]'")
        return f"{self._url}/v1"

    async def reply(self, text: str = "", *, sampling: Mapping[str, Any] | None = None) -> Reply:
        """Return the policy's answer after `text` is added to the conversation, which begins with the prompt.

        `sampling` may override `max_tokens`, of which the run's is the limit, `stop_token_ids` and `stop`, texts that
        end the answer and are not part of its text. Raises BudgetSpentError or PolicyError.
        """
        return await self._request({"text": text}, sampling)

    async def begin(self, text: str, *, sampling: Mapping[str, Any] | None = None) -> Reply:
        """Return the policy's answer to a conversation that begins with `text` in place of the prompt."""
        return await self._request({"text": text, "new": True}, sampling)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Return the policy's answer after `messages`, rendered by the tokenizer's chat template.

        The first request of an episode begins the conversation with its messages, in place of the prompt. Later ones
        add theirs after the last answer, which is not rendered again. `tools` are JSON schemas in OpenAI's form.

        A message's content is text, or a list of parts in OpenAI's form. A part of type `image_url` or `image` names an
        image in any form that rows have, or is one of Pillow. Raises DataError for an image that is not there.
        """
        if any(isinstance(message.get("content"), list) for message in messages):
            keep = functools.partial(kept_image, origin="an agent", known=self.images)
            messages = await asyncio.to_thread(change_images, messages, keep)
        return await self._request({"messages": list(messages), "tools": list(tools)}, sampling)

    async def complete(self, token_ids: Sequence[int], *, sampling: Mapping[str, Any] | None = None) -> Reply:
        """Return the policy's answer to a whole conversation of tokens.

        Tokens that extend an earlier conversation and answer continue it. Others begin another rollout of the episode.
        """
        return await self._request({"token_ids": [int(token) for token in token_ids]}, sampling)

    async def _request(self, request: dict[str, Any], sampling: Mapping[str, Any] | None) -> Reply:
        answer = await self._ask(request | {"sampling": sampling})
        if "error" in answer:
            raise PolicyError(answer["error"])
        if answer.get("spent"):
            raise BudgetSpentError
        return Reply(**{field.name: answer[field.name] for field in dataclasses.fields(Reply)})


class AgentInstanceBase(abc.ABC):
    """One episode's environment: `reset` begins it, `step` answers each turn of the policy.

    `__init__` may be a coroutine function. `reset` receives {"observation": prompt, "label": reference answer} and
    returns {"observation": the text that the policy sees}. `step` receives {"observation_text": the conversation so
    far, "action_text": the policy's last answer, "label", "sampling_params"} and returns {"rewards": the turn's reward,
    "scores", "environment_feedback": text that follows the answer, "done", "sampling_params", "extra_logs"}. Both may
    be plain functions, which then run in a thread. `close`, if there is one, is called at the end of every episode.
    """

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the first observation; by default the prompt."""
        return {"observation": states["observation"]}

    @abc.abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return what the policy's answer leads to."""


class AgentExecutorBase:
    """Runs one episode: `execute` asks the policy through `llm_engine` and returns the rewards.

    An executor runs one episode at a time. One whose episode ended well runs others, so that what it starts in its
    first episode, such as a server, serves all of its episodes.

    `execute` receives `prompt`, `label`, `sampling_params`, and as far as it has parameters for them `max_length`,
    `hf_tokenizer` and `llm_engine`, which are attributes, too. It returns a dictionary with `reward` (or `rewards`),
    and optionally `scores`, `extra_logs` and `truncated`, or puts it into `result_queue`. Tokens and log-probs are
    recorded where the policy is asked; what the dictionary says of them is not read.

    Args:
        agent_instance_cls: the class of `AgentInstanceBase` that the inherited `execute` uses.
        max_steps: turns per episode at most; None for that of the run.
        max_length, llm_engine, hf_tokenizer, result_queue: given by the run; constructors may pass them on.
    """

    def __init__(
        self,
        agent_instance_cls: type | None = None,
        max_steps: int | None = None,
        max_length: int | None = None,
        llm_engine: Any = None,
        hf_tokenizer: Any = None,
        result_queue: Any = None,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

    async def execute(self, prompt: str, label: str, sampling_params: Any, **kwargs: Any) -> dict[str, Any]:
        """Run an episode of turns with an instance of `agent_instance_cls`."""
        if self.agent_instance_cls is None:
            raise TypeError(f"{type(self).__name__} has neither an `execute` nor an agent class")
        engine = kwargs.get("llm_engine") or self.llm_engine
        result = await run_turns(self.agent_instance_cls, engine.session, max_turns=self.max_steps)
        return {"prompt": prompt, "label": label, "reward": result["rewards"], **result}


class MultiTurnAgentExecutor(AgentExecutorBase):
    """An executor for a class of `AgentInstanceBase`: `super().__init__(AgentInstance)` is all that it needs."""


class PolicyEngine:
    """The `llm_engine` of an executor: `generate` returns an object like vLLM's `RequestOutput`.

    Attributes:
        session: the episode that the executor runs; None between two.
        is_spent: the episode has asked for an answer and had no turns, tokens or seconds left.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.is_spent = False

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any = None, **_: Any) -> Any:
        """Return the policy's answer to a conversation of tokens, in any event loop; see `Session.complete`."""
        session = self.session
        if session is None:
            raise PolicyError("the episode has ended")
        try:
            reply = await session.complete(prompt_token_ids, sampling=overrides(sampling_params, session))
        except BudgetSpentError:
            self.is_spent = True
            raise
        pairs = zip(reply.token_ids, reply.logprobs, strict=True)
        output = SimpleNamespace(
            index=0,
            text=reply.text,
            token_ids=reply.token_ids,
            logprobs=[{token: SimpleNamespace(logprob=logprob)} for token, logprob in pairs],
            finish_reason=reply.finish_reason,
        )
        return SimpleNamespace(prompt_token_ids=reply.prompt_token_ids, outputs=[output], finished=True)


# What vLLM's class has where nothing was asked for. Its other fields have the run's value or are asked for.
_VLLM_DEFAULTS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": [], "stop_token_ids": []}


def sampling_params(session: Session) -> SimpleNamespace:
    """Return the run's sampling as the object that OpenRLHF gives to agents; log-probs are always told."""
    return SimpleNamespace(**session.sampling, n=1, logprobs=1)


def overrides(params: Any, session: Session) -> dict[str, Any] | None:
    """Return the sampling that an agent asks for where it differs from the run's, as names and values.

    `params` is a mapping, any object with attributes, such as vLLM's `SamplingParams`, or None.
    """
    if params is None:
        return None
    given = params if isinstance(params, Mapping) else {name: getattr(params, name, None) for name in session.sampling}
    is_vllm = hasattr(params, "__struct_fields__")
    asked = {}
    for name, value in session.sampling.items():
        is_unasked = is_vllm and name in _VLLM_DEFAULTS and given[name] == _VLLM_DEFAULTS[name]
        if given.get(name) not in (None, value) and not is_unasked:
            asked[name] = given[name]
    return asked


async def run_turns(make: Callable[[], Any], session: Session, *, max_turns: int | None = None) -> dict[str, Any]:
    """Run an episode of turns: the policy answers, the instance steps, until it is done or a limit is reached.

    Returns {"rewards": one number per turn, "score", "extra", "truncated"}; the score is that of the last turn, if it
    gave one, and otherwise the sum of the rewards.
    """
    instance = await constructed(make)
    rewards: list[float] = []
    last: dict[str, Any] = {}
    is_done = False
    try:
        states = await called(instance.reset, {"observation": session.prompt, "label": session.label})
        conversation = states["observation"]
        is_same = conversation == session.prompt
        feedback = None
        params: Any = sampling_params(session)
        while not is_done and len(rewards) < (max_turns or session.max_turns):
            sampling = overrides(params, session)
            try:
                if feedback is None and not is_same:
                    reply = await session.begin(conversation, sampling=sampling)
                else:
                    reply = await session.reply(feedback or "", sampling=sampling)
            except BudgetSpentError:
                break
            states = {
                "observation_text": conversation,
                "action_text": reply.text,
                "label": session.label,
                "sampling_params": params,
            }
            last = await called(instance.step, states)
            rewards.append(number(last["rewards"]))
            is_done = bool(last.get("done"))
            params = last.get("sampling_params") or params
            feedback = str(last.get("environment_feedback") or "")
            conversation += reply.text + feedback
    finally:
        if hasattr(instance, "close"):
            await called(instance.close)
    score = last.get("scores")
    extra = {str(name): number(value) for name, value in (last.get("extra_logs") or {}).items()}
    extra["turns"] = float(len(rewards))
    result = {"rewards": rewards, "extra": extra, "truncated": not is_done}
    return result if score is None else {**result, "score": number(score)}


async def constructed(make: Callable[..., Any], **arguments: Any) -> Any:
    """Return an object of a class whose `__init__` may be a coroutine function, which Python itself does not allow."""
    if not (inspect.isclass(make) and inspect.iscoroutinefunction(make.__init__)):
        return make(**arguments)
    made = make.__new__(make)
    await made.__init__(**arguments)
    return made


def number(value: Any) -> float:
    """Return one number, also from a tensor, an array or a list of one number. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = (value.detach() if hasattr(value, "detach") else value).tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        [value] = value
    if not isinstance(value, bool | int | float):
        raise TypeError(f"a reward, score or extra log must be one number, got {value!r:.80}")
    return float(value)
