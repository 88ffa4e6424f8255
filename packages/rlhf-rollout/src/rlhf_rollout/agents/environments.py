"""Environments: `reset`, `step` and `close`, made before the episodes that need them. Runs in agent processes.

    reset(prompt, label, seed, images) -> observation      it receives those that it has parameters for, or **kwargs
    step(action) -> (observation, reward, done, info), or a dictionary with these keys
    close()                                         optional

The methods may be coroutine functions. Plain ones run in a thread of the environment. Gymnasium's environments are used
as they are (https://gymnasium.farama.org/api/env), and so are OpenEnv's clients, whose results have the attributes
`observation`, `reward` and `done` (https://github.com/meta-pytorch/OpenEnv).
"""

import asyncio
import contextlib
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from rlhf_data.errors import RewardError
from rlhf_rollout.agents.interface import BudgetSpentError, Reply, Session, number
from rlhf_rollout.policy_json import read_json
from rlhf_rollout.workers.threads import CodeThread

_CLOSE_TIMEOUT_S = 5.0

Observed = str | list[Any]  # text, or parts of a message


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one action. `is_cut`: a limit of the environment has ended the episode."""

    observation: Any
    reward: float
    is_done: bool
    is_cut: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


def read_step(result: Any) -> Step:
    """Return the result of a `step` of any of the forms. Raises TypeError for anything else."""
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, is_terminated, is_cut, info = result
        return Step(observation, number(reward), bool(is_terminated or is_cut), bool(is_cut), info)
    if isinstance(result, tuple) and len(result) == 4:
        observation, reward, is_done, info = result
    elif isinstance(result, Mapping) and {"observation", "reward", "done"} <= result.keys():
        observation, reward, is_done = (result[name] for name in ("observation", "reward", "done"))
        info = result.get("info")
    elif all(hasattr(result, name) for name in ("observation", "reward", "done")):
        observation, reward, is_done, info = result.observation, result.reward, result.done, None
    else:
        raise TypeError(f"`step` must return (observation, reward, done, info), got {result!r:.80}")
    return Step(observation, number(0.0 if reward is None else reward), bool(is_done), info=info or {})


def read_reset(result: Any) -> Any:
    """Return the observation in the result of a `reset` of any of the forms."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0]
    return getattr(result, "observation", result)


def episode_seed(prompt: str, label: str) -> int:
    """Return the seed of a prompt's episodes: the label if it is a whole number, else a checksum of prompt and label.

    The episodes of a group have the same one, so that their rewards can be compared.
    """
    return int(label) if re.fullmatch(r"[0-9]{1,9}", label) else zlib.crc32(f"{prompt}\0{label}".encode()) >> 1


def find_action(text: str) -> str:
    """Return the last `<action>..</action>` of an answer, or else its last line."""
    before, _, _ = text.rpartition("</action>")
    _, opened, marked = before.rpartition("<action>")
    if opened:
        return marked.partition("</action>")[0].strip()
    return text.strip().rpartition("\n")[2].strip()


def fit_action(action: Any, space: Any) -> Any:
    """Return an action as a member of a Gymnasium space; text is read as JSON. Raises ValueError when it is none."""
    value = action
    if isinstance(action, str) and (space.shape or not space.contains(action)):
        value = read_json(action)
    try:
        value = np.array(value, space.dtype) if space.shape else value
        is_member = space.contains(value)
    except (TypeError, OverflowError):  # an object in place of a list, a whole number that the type cannot hold
        is_member = False
    if not is_member:
        raise ValueError(f"{action!r:.80} is not in {space}")
    return value


@dataclass(slots=True, eq=False, repr=False)
class EnvironmentAgent:
    """Runs episodes of a policy in an environment: it answers, the environment steps, until that is done.

    An action that cannot be parsed, or that is not in the environment's `action_space`, is answered with what is wrong,
    and counted as `invalid_actions`. The score is `info["score"]` of the last step, or the sum of the rewards.

    Attributes:
        make: the environment's class, or a function without parameters that makes one.
        render: returns the text of an observation, or parts of a message in OpenAI's form.
        parse: returns the action in an answer, or raises ValueError.
        pool_size: environments that are kept ready. After an episode that has ended well, an environment returns to
            them if its attribute `reusable` is true, or left out with Gymnasium's `action_space`.
    """

    make: Callable[[], Any]
    _: KW_ONLY
    render: Callable[[Any], "Observed"] = lambda observation: observed(observation)
    parse: Callable[[str], Any] = find_action
    pool_size: int = 1
    _ready: list["_Environment"] = field(default_factory=list, init=False)
    _filling: asyncio.Task[None] | None = field(default=None, init=False)
    _closing: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.pool_size < 0:
            raise RewardError(f"POOL_SIZE of the environments must not be negative, got {self.pool_size}")

    async def start(self) -> None:
        """Make the first environments. Raises whatever their class raises."""
        while len(self._ready) < self.pool_size:
            self._ready.append(await _Environment.made_by(self.make))

    async def close(self) -> None:
        """Close the environments that no episode has, and wait for those that are being closed."""
        self.pool_size = 0
        if self._filling is not None:
            await asyncio.wait([self._filling])
        await asyncio.gather(*map(self._close, self._ready), *self._closing)

    async def __call__(self, session: Session) -> dict[str, Any]:
        """Run one episode; return what an agent returns."""
        environment = self._ready.pop() if self._ready else await self._made()
        if not environment.reusable and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())
        is_usable = False
        try:
            result = await self._play(environment, session)
            is_usable = environment.reusable
        finally:
            if is_usable and len(self._ready) < self.pool_size:
                self._ready.append(environment)
            else:
                await self._close(environment)
        return result

    async def _made(self) -> "_Environment":
        """Return a new environment. If this is cancelled meanwhile, it is closed as soon as it has been made."""
        making = asyncio.create_task(_Environment.made_by(self.make))

        async def end() -> None:
            with contextlib.suppress(Exception):
                await (await making).close()

        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._end(end())
            raise

    async def _close(self, environment: "_Environment") -> None:
        """Close an environment. It is closed also when this is cancelled meanwhile."""
        await asyncio.wait([self._end(environment.close())])

    def _end(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return the task of what `close` waits for."""
        task = asyncio.create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _fill(self) -> None:
        try:
            await self.start()
        except Exception as error:  # the episode that needs it makes it, and fails with the reason
            print(f"an environment could not be made ahead: {error}", file=sys.stderr)

    async def _play(self, environment: "_Environment", session: Session) -> dict[str, Any]:
        seen = self.render(await environment.reset(session))
        rewards: list[float] = []
        num_invalid = 0
        step = Step(None, 0.0, is_done=False)
        while not step.is_done:
            try:
                reply = await _ask(session, seen, is_first=not rewards)
            except BudgetSpentError:
                break
            try:
                action = environment.fit(self.parse(reply.text))
            except (ValueError, RecursionError) as error:  # the answer's fault, which must not leave it untrained
                num_invalid += 1
                rewards.append(0.0)
                seen = f"\nInvalid action: {error}\n"
                continue
            step = await environment.step(action)
            rewards.append(step.reward)
            seen = self.render(step.observation)
        extra = {"turns": len(rewards), "invalid_actions": num_invalid}
        result = {"rewards": rewards, "truncated": step.is_cut or not step.is_done, "extra": extra}
        return {**result, "score": step.info["score"]} if "score" in step.info else result


class _Environment:
    """A user's environment and its thread."""

    def __init__(self, thread: CodeThread, inner: Any) -> None:
        self._thread = thread
        self._inner = inner
        self._space = getattr(inner, "action_space", None)
        self.reusable = bool(getattr(inner, "reusable", self._space is not None))

    @classmethod
    async def made_by(cls, make: Callable[[], Any]) -> "_Environment":
        thread = CodeThread()
        try:
            return cls(thread, await thread.run(make))
        except BaseException:
            thread.close()
            raise

    async def reset(self, session: Session) -> Any:
        seed = episode_seed(session.prompt, session.label)
        given = {"prompt": session.prompt, "label": session.label, "seed": seed}
        parameters = inspect.signature(self._inner.reset).parameters
        if session.images or "images" in parameters:
            given["images"] = session.images
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        named = {name: value for name, value in given.items() if takes_all or name in parameters}
        return read_reset(await self._thread.run(self._inner.reset, **named))

    async def step(self, action: Any) -> Step:
        return read_step(await self._thread.run(self._inner.step, action))

    def fit(self, action: Any) -> Any:
        return action if self._space is None else fit_action(action, self._space)

    async def close(self) -> None:
        """Close it, after a call that is under way; one that hangs keeps it open until its process ends."""
        if hasattr(self._inner, "close"):
            closing = asyncio.create_task(self._thread.run(self._inner.close))
            await asyncio.wait([closing], timeout=_CLOSE_TIMEOUT_S)
            if closing.done() and closing.exception():
                print(f"an environment's close failed: {closing.exception()!r}", file=sys.stderr)
        self._thread.close()


def observed(observation: Any) -> Observed:
    """Return an observation as text; parts of a message stay as they are, and an image of Pillow becomes one."""
    parts = observation if isinstance(observation, list) else []
    if parts and all(isinstance(part, Mapping) and "type" in part for part in parts):
        return parts
    if callable(getattr(observation, "save", None)):
        return [{"type": "image", "image": observation}]
    return "" if observation is None else str(observation)


async def _ask(session: Session, seen: Observed, *, is_first: bool) -> Reply:
    """Return the policy's answer to an observation: text after the conversation, or a user's message in a chat."""
    if not session.is_chat:
        if not isinstance(seen, str):
            raise TypeError("an observation with parts is a message, and the run has no chat template")
        return await session.reply(seen)
    seen = seen.strip() if isinstance(seen, str) else seen
    if not is_first:
        return await session.chat([{"role": "user", "content": seen}])
    *earlier, last = session.messages
    if not seen:
        return await session.chat(session.messages)
    if last["role"] != "user":  # an answer that the prompt begins is the policy's, not the environment's
        return await session.chat([*session.messages, {"role": "user", "content": seen}])
    asked = last["content"]
    if isinstance(asked, str) and isinstance(seen, str):
        return await session.chat([*earlier, {**last, "content": f"{asked}\n\n{seen}"}])
    content = [*_parts(asked), {"type": "text", "text": "\n\n"}, *_parts(seen)]
    return await session.chat([*earlier, {**last, "content": content}])


def _parts(content: Observed) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
