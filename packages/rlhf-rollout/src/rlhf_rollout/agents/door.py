"""The door of one episode: answers requests and records them."""

import asyncio
import re
from bisect import bisect_left
from collections.abc import Collection

from rlhf_data.chat import Tokenizer
from rlhf_data.records import FinishReason
from rlhf_rollout.agents.conversation import Conversations, History
from rlhf_rollout.agents.dialect import Answer, Request, new_id
from rlhf_rollout.agents.interface import BudgetSpentError
from rlhf_rollout.agents.process import Activity
from rlhf_rollout.agents.recorder import EpisodeRecorder
from rlhf_rollout.agents.tool_calls import ParseCalls
from rlhf_rollout.protocols import Completion

_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|^\s*\{")  # what begins the first call of an answer


class RefusedError(Exception):
    """A request is refused with an HTTP status and a type of error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class DoorSession:
    """The door of one episode.

    Args:
        url: its address, without `/v1`.
        recorder: of the episode.
        activity: told when the agent waits for the policy.
        max_tokens: of an answer at most.
        tokenizer: of the policy.
        history: see `Conversations`.
        parse: finds the tool calls in an answer.

    Attributes:
        is_refused: a request was refused because the episode has reached a limit.
    """

    def __init__(
        self,
        url: str,
        recorder: EpisodeRecorder,
        activity: Activity,
        *,
        max_tokens: int,
        tokenizer: Tokenizer,
        history: History,
        parse: ParseCalls,
    ) -> None:
        self.url = url
        self._recorder = recorder
        self._activity = activity
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._parse = parse
        self._conversations = Conversations(tokenizer, history)
        self._is_spent = False
        self.is_refused = False
        self._tasks: set[asyncio.Task[Answer]] = set()

    def start(self, request: Request) -> asyncio.Task[Answer]:
        """Return the task that answers a request; `close` cancels it."""
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Cancel the requests under way."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, request: Request) -> Answer:
        """Return the policy's answer.

        Raises ValueError for a request that the template, the tokenizer or the recorder refuses, RefusedError when the
        episode has ended, EngineError.
        """
        given = request.prompt
        if request.messages:
            token_ids = self._conversations.encode_chat(request.messages, request.tools)
        else:
            token_ids = self._conversations.encode_text(given) if isinstance(given, str) else list(given or [])
        length = min(request.max_tokens or self._max_tokens, self._max_tokens)
        shorten = None if not request.stop else lambda completion: self._stopped(completion, request.stop)
        try:
            with self._activity.waiting():
                completion = await self._recorder.generate(token_ids, {"max_tokens": length}, shorten=shorten)
        except BudgetSpentError:
            if self._is_spent:
                self.is_refused = True
                raise RefusedError(
                    400, "episode_budget_spent", "the episode has no turns, tokens or time left"
                ) from None
            self._is_spent = True
            return Answer(text="", calls=[], is_cut=True, num_prompt_tokens=len(token_ids), num_tokens=0, tokens=[])
        return self._recorded(request, token_ids, completion)

    def _recorded(self, request: Request, token_ids: list[int], completion: Completion) -> Answer:
        """Return an answer, and remember its tokens for the requests that continue it."""
        ids = completion.token_ids.tolist()
        text = before_stop(self._decode(ids), request.stop)
        calls = []
        if request.tools:
            # Some tokenizers mark tool calls with special tokens.
            whole = before_stop(self._tokenizer.decode(_without_end(ids, self._tokenizer)), request.stop)
            found = self._parse(whole)
            if found and not any(call.error for call in found):
                calls = found
                text = _CALL.split(whole, maxsplit=1)[0].strip()
        logprobs = zip(ids, completion.logprobs.tolist(), strict=True) if request.logprobs else ()
        answer = Answer(
            text=text,
            calls=[(new_id("call"), call) for call in calls],
            is_cut=completion.finish_reason is FinishReason.LENGTH,
            num_prompt_tokens=len(token_ids),
            num_tokens=len(ids),
            tokens=[(self._tokenizer.decode([token]), logprob) for token, logprob in logprobs],
        )
        tokens = [*token_ids, *ids]
        if request.messages:
            is_ended = completion.finish_reason is FinishReason.STOP
            self._conversations.add_chat(request.messages, request.tools, answer.message, tokens, is_ended=is_ended)
        elif isinstance(request.prompt, str):
            self._conversations.add_text(request.prompt + text, tokens)
        return answer

    def _stopped(self, completion: Completion, stop: Collection[str]) -> Completion:
        """Return a completion up to the token that completes a text of `stop`."""
        ids = completion.token_ids.tolist()

        def has_stop(size: int) -> bool:
            text = self._decode(ids[:size])
            return any(one in text for one in stop)

        if not has_stop(len(ids)):
            return completion
        return completion.first(bisect_left(range(len(ids)), True, lo=1, key=has_stop))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def before_stop(text: str, stop: Collection[str]) -> str:
    """Return a text up to the first text of `stop` in it."""
    return text[: min((text.index(one) for one in stop if one in text), default=len(text))]


def _without_end(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return token_ids[:-1] if token_ids[-1:] == [tokenizer.eos_token_id] else token_ids
