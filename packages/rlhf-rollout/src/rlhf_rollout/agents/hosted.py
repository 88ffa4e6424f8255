"""The workflow of a user's agent, which runs in processes of its own and asks for the policy's answers."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_data.chat.template import render_follow_up, render_prompt
from rlhf_data.chat.tokens import Tokenizer, encode_continuation
from rlhf_data.images.rows import change_images, with_image_parts
from rlhf_data.records import Episode, Prompt, Verdict, VerdictKind
from rlhf_rollout.agents.interface import BudgetSpentError
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.stopping import before_stop, texts_of
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.user_function import SUCCESS_THRESHOLD, Scored, verdict_of
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.pool import WorkerPool
from rlhf_rollout.workers.rpc import Call, CallError

if TYPE_CHECKING:
    from rlhf_data.images.reader import ImageReader
    from rlhf_rollout.agents.gateway import Gateway
    from rlhf_rollout.agents.gateway_session import GatewaySession

_SEED_STRIDE = 1_000_003  # between the seeds of a group's episodes; every answer of an episode adds one
# After how many collections Python's garbage collector goes through the next older objects, and through all; 10 and 10
# by default. With ten thousand episodes under way, they would stop the event loop for up to 0.1 and 1 s.
_COLLECTIONS = (1, 5000)

# Fields of `SamplingParams` that agents are not told. Those that they are told are also parameters of vLLM's class.
_UNTOLD = ("num_samples", "adapter")
_CUT = Verdict(VerdictKind.WRONG, 0.0, detail="a limit ended the episode before its reward")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HostedAgent:
    """A `Workflow` that runs a user's agent in the processes of a pool.

    An agent that raises, hangs or kills its process costs its own episode only: that episode has a failed verdict and
    is not trained, unless failed episodes have a reward.

    Attributes:
        router: answers the requests.
        pool: runs the agent; `close` closes it.
        tokenizer: turns the agent's texts into tokens, and the policy's tokens into texts.
        limits: the limits of each episode.
        gives_reward: an episode for which the agent gives no reward has a failed verdict, or the reward 0 if a limit
            has cut it. Otherwise another reward scores it.
        failed_reward: reward and score of an episode that failed after an answer of the policy; None for none.
        success_threshold: lowest score of an episode that counts as right, unless the agent says what is right.
        gateway: serves agents that speak HTTP; it starts and ends with the workflow. None without one.
        reader: of the images in prompts and in what agents say; `tokenizer` is then a `PartsTokenizer`. None for text
            alone.
    """

    router: EngineRouter
    pool: WorkerPool
    tokenizer: Tokenizer
    limits: EpisodeLimits
    _: KW_ONLY
    gateway: "Gateway | None" = None
    gives_reward: bool = True
    failed_reward: float | None = None
    success_threshold: float = SUCCESS_THRESHOLD
    reader: "ImageReader | None" = None

    async def run(self, prompt: Prompt, sampling: SamplingParams, group_id: str) -> tuple[Episode, ...]:
        """See `Workflow.run`: `sampling.num_samples` episodes, which run at the same time."""
        tasks = []
        for index in range(sampling.num_samples):
            seed = None if sampling.seed is None else (sampling.seed + _SEED_STRIDE * index) % 2**31
            alone = dataclasses.replace(sampling, num_samples=1, seed=seed)
            tasks.append(asyncio.create_task(self._episode(prompt, alone, f"{group_id}/{index}", group_id)))
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, prompt: Prompt, sampling: SamplingParams, name: str, group_id: str) -> Episode:
        make_recorder = functools.partial(
            EpisodeRecorder,
            self.router,
            prompt,
            sampling,
            name=name,
            group_id=group_id,
            limits=self.limits,
            decode=functools.partial(self.tokenizer.decode, skip_special_tokens=True),
            vocab_size=len(self.tokenizer),
            reader=self.reader,
        )
        told = {
            "episode": name,
            "prompt": prompt.text,
            "prompt_token_ids": prompt.token_ids.tolist(),
            "messages": with_image_parts(prompt.messages, prompt.images) if prompt.images else prompt.messages,
            "images": list(prompt.images),
            "label": prompt.label or "",
            "extra": dict(prompt.extra),
            "max_turns": self.limits.max_turns,
            "max_length": self.limits.max_length,
            "sampling": {key: value for key, value in dataclasses.asdict(sampling).items() if key not in _UNTOLD},
        }
        attempt = _Attempt(make_recorder, told, self)
        started = time.monotonic()
        try:
            said = await self.pool.call(attempt)
            is_cut = bool(said.get("truncated"))
            turn_rewards, verdict = read_outcome(said, self.success_threshold)
            if verdict is None and self.gives_reward:
                verdict = _CUT if is_cut else Verdict(VerdictKind.CRASH, detail="the agent gave no reward")
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            detail = f"the agent's rewards cannot be read: {error}"
            turn_rewards, verdict, is_cut = (), Verdict(VerdictKind.CRASH, detail=detail), False
        except CallError as failure:
            kind = VerdictKind.TIMEOUT if failure.is_late else VerdictKind.CRASH
            turn_rewards, verdict, is_cut = (), Verdict(kind, detail=str(failure)), False
            if attempt.is_refused:  # an agent that does not know of limits fails when the policy answers no more
                verdict = _CUT if self.gives_reward else None
        finally:
            attempt.end()
        recorder = attempt.recorder
        if recorder.error is not None:
            raise recorder.error
        if verdict is not None:
            if not recorder.num_answers and not verdict.kind.failed:
                what = "got no answer of the policy" if recorder.num_turns else "never asked the policy"
                verdict = Verdict(VerdictKind.CRASH, detail=f"the agent {what}")
            if verdict.kind.failed and recorder.num_answers and self.failed_reward is not None:
                turn_rewards = ()
                verdict = dataclasses.replace(verdict, reward=self.failed_reward)
            verdict = dataclasses.replace(verdict, seconds=time.monotonic() - started)
        return recorder.episode(turn_rewards, verdict, is_cut=is_cut)

    async def start(self) -> None:
        """Start the agent's processes and the gateway, and make full garbage collections of this process rare.

        Raises RewardError when the agent cannot be imported.
        """
        gc.set_threshold(gc.get_threshold()[0], *_COLLECTIONS)
        if self.gateway is not None:
            await self.gateway.start()
        await self.pool.start()

    async def close(self) -> None:
        """End the agent's processes and the gateway."""
        await self.pool.close()
        if self.gateway is not None:
            await self.gateway.close()

    def encode(self, text: str, before: str | None = None) -> list[int]:
        """Return the token ids of a text in a conversation, without start and end tokens; "" as `before` begins one."""
        return encode_continuation(text, self.tokenizer, before)

    def render(
        self, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]], before: Sequence[int], name: str
    ) -> list[int]:
        """Return the token ids of messages after the conversation `before`; nothing before begins one.

        Each image has the tokens that the chat template writes. Raises DataError when it refuses the messages.
        """
        options = {"origin": f"episode {name}", "tools": tools}
        if before:
            added = self.encode(render_follow_up(list(messages), self.tokenizer, **options))
            # The template writes the end of the answer, and an answer that was not cut has it already.
            return added[1:] if added[:1] == list(before[-1:]) else added
        text = render_prompt(list(messages), self.tokenizer, **options)
        return self.encode(text, "")


class _Attempt(Call):
    """An episode under way. It begins again when the agent's process has died.

    Args:
        make_recorder: returns a recorder of the episode.
        told: what the agent is told.
        workflow: runs the episode.
    """

    def __init__(
        self, make_recorder: Callable[[], EpisodeRecorder], told: Mapping[str, Any], workflow: HostedAgent
    ) -> None:
        super().__init__(told)
        self._make_recorder = make_recorder
        self._workflow = workflow
        self._open = contextlib.ExitStack()
        self._session: GatewaySession | None = None
        self.recorder = make_recorder()

    def begin(self, ready: Mapping[str, Any]) -> Mapping[str, Any]:
        """Forget what was recorded, and open a session at the gateway."""
        self.end()
        self.recorder = self._make_recorder()
        gateway = self._workflow.gateway
        if gateway is None:
            return self._message
        self._session = self._open.enter_context(gateway.session(self.recorder, self.activity))
        return {**self._message, "url": self._session.url}

    def end(self) -> None:
        """Close the session at the gateway."""
        self._open.close()

    @property
    def is_refused(self) -> bool:
        """Whether the gateway has refused a request because a limit of the episode was reached."""
        return self._session is not None and self._session.is_refused

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the policy's answer to what an agent asks, as JSON values.

        A request has `token_ids`, the whole conversation; or `messages` and perhaps `tools`, of which the first begin
        the conversation; or `text`, which is added to the conversation, and `new` for a text that begins it. `sampling`
        holds overrides.
        """
        recorder = self.recorder
        try:
            token_ids, images = await self._conversation(request, recorder)
        except (LookupError, TypeError, ValueError, OverflowError) as error:  # also DataError
            return {"error": str(error)}
        try:
            with self.activity.waiting():
                completion = await recorder.generate(token_ids, request.get("sampling"), images)
        except BudgetSpentError:
            return {"spent": True}
        except (TypeError, ValueError) as error:  # also DataError and ConfigError, from what the agent asks for
            return {"error": str(error)}
        answer = completion.token_ids.tolist()
        decode = self._workflow.tokenizer.decode
        stop = texts_of((request.get("sampling") or {}).get("stop") or self._message["sampling"]["stop"])
        return {
            "prompt_token_ids": token_ids,
            "token_ids": answer,
            "logprobs": completion.logprobs.tolist(),
            "text": before_stop(decode(answer, skip_special_tokens=True), stop),
            "raw_text": before_stop(decode(answer, skip_special_tokens=False), stop),
            "finish_reason": str(completion.finish_reason),
        }

    async def _conversation(
        self, request: Mapping[str, Any], recorder: EpisodeRecorder
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return the whole conversation that a request asks about, as token ids, and the paths of its images."""
        if request.get("token_ids") is not None:
            return await recorder.with_images(request["token_ids"])
        if "messages" in request:
            paths: list[str] = []
            messages = change_images(request["messages"], paths.append)
            if paths:
                recorder.check_reads_images()
            before, images = (recorder.token_ids.tolist(), recorder.images) if recorder.num_answers else ([], ())
            added = self._workflow.render(messages, request["tools"], before, recorder.name)
            return await recorder.extended(before, images, added, paths)
        if request.get("new"):
            return await recorder.with_images(self._workflow.encode(request["text"], ""))
        added = self._workflow.encode(request.get("text", ""))
        return await recorder.extended(recorder.token_ids.tolist(), recorder.images, added)


def read_outcome(said: Mapping[str, Any], success_threshold: float) -> tuple[tuple[float, ...], Verdict | None]:
    """Return the rewards by turn and the verdict from what an agent says of an episode.

    `said` has `rewards`, the numbers by turn; optionally `score` (the sum of the rewards if left out), `extra`, numbers
    by name, and `verdict`, one of `VerdictKind`. Without `rewards` another reward scores the episode: the verdict is
    None.
    """
    rewards = said.get("rewards")
    if not rewards:
        return (), None
    rewards = [float(reward) for reward in rewards]
    total = sum(rewards)
    score = said.get("score")
    extra = {str(name): [float(value)] for name, value in (said.get("extra") or {}).items()}
    scored = Scored([total], [total if score is None else float(score)], extra, [said.get("verdict")])
    return tuple(rewards), verdict_of(scored, 0, success_threshold)
