"""What one episode asks the gateway for: its requests, their answers, and what is recorded of them."""

import asyncio
import contextlib
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import DataError
from rlhf_data.images.files import kept_image
from rlhf_data.images.rows import change_images
from rlhf_data.records import FinishReason
from rlhf_rollout.agents.conversation import Conversations, History
from rlhf_rollout.agents.dialects.dialect import Answer, Request, new_id
from rlhf_rollout.agents.interface import BudgetSpentError
from rlhf_rollout.agents.recorder import EpisodeRecorder, Sampled
from rlhf_rollout.agents.tools.tool_calls import ParseCalls
from rlhf_rollout.engines.stopping import before_stop
from rlhf_rollout.workers.rpc import Activity

_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|^\s*\{")  # what begins the first call of an answer


class RefusedError(Exception):
    """A request is refused with an HTTP status and a type of error."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(slots=True, eq=False)
class Asked:
    """A request under way, or answered.

    Attributes:
        request: what a client asks for; None when the answer is delivered, because requests hold whole conversations.
        task: samples the answer, and goes on when the client leaves.
        sampled: what is to be recorded when the answer is delivered; None for an answer without tokens.
        has_client: a client waits for the answer, or has it.
        is_delivered: a client has the answer.
    """

    request: Request | None
    task: asyncio.Task[Answer] = field(init=False)
    sampled: Sampled | None = None
    has_client: bool = False
    is_delivered: bool = False


@dataclass(slots=True, eq=False, repr=False)
class GatewaySession:
    """The gateway's session of one episode.

    A client that loses its connection, for example because its own timeout ends, sends its request again. It then gets
    the answer that was being sampled: another draw would favour answers that are fast, and so short. An answer becomes
    a part of the episode when it is delivered.

    Attributes:
        url: its address, without `/v1`.
        recorder: records the episode.
        activity: told when the agent waits for the policy.
        tokenizer: the policy's.
        history: see `Conversations`.
        parse: finds the tool calls in an answer.
        is_refused: a request was refused because the episode has reached a limit.
    """

    url: str
    recorder: EpisodeRecorder
    activity: Activity
    _: KW_ONLY
    tokenizer: Tokenizer
    history: History
    parse: ParseCalls
    is_refused: bool = field(default=False, init=False)
    _conversations: Conversations = field(init=False)
    _is_spent: bool = field(default=False, init=False)
    _is_closed: bool = field(default=False, init=False)
    # By the digest of the request.
    _asked: defaultdict[bytes, list[Asked]] = field(default_factory=lambda: defaultdict(list), init=False)

    def __post_init__(self) -> None:
        self._conversations = Conversations(self.tokenizer, self.history)

    def ask(self, request: Request, *, is_retry: bool) -> Asked:
        """Return an equal request whose client has left before its answer; otherwise begin this one.

        Args:
            request: what a client asks for.
            is_retry: the client says that it has sent the request before. It may have lost a delivered answer, too.

        Raises:
            RefusedError: the episode has ended while the request arrived.
        """
        if self._is_closed:
            raise RefusedError(404, "not_found_error", "the session has ended")
        equal = self._asked[request.digest()]
        for asked in equal:
            if not asked.has_client:
                return asked
        delivered = [asked for asked in equal if asked.is_delivered]
        if is_retry and delivered:
            return delivered[-1]
        asked = Asked(request)
        asked.task = asyncio.create_task(self._answer(asked, request))
        equal.append(asked)
        return asked

    def is_waited_for(self, request: Request) -> bool:
        """Return whether there are equal requests, and clients that wait for the answer to each of them."""
        equal = self._asked.get(request.digest(), ())
        return bool(equal) and all(asked.has_client and not asked.is_delivered for asked in equal)

    @contextlib.contextmanager
    def waiting(self, asked: Asked) -> Iterator[None]:
        """Return a context in which a client waits for an answer. It has left if the answer is not delivered then."""
        asked.has_client = True
        try:
            with self.activity.waiting():
                yield
        finally:
            asked.has_client = asked.is_delivered

    def deliver(self, asked: Asked) -> None:
        """Record an answer that is sent now, and remember its tokens for the requests that continue it."""
        answer = asked.task.result()
        request, sampled = asked.request, asked.sampled
        asked.request = asked.sampled = None
        asked.is_delivered = True
        if request is None or sampled is None:
            return
        self.recorder.add(sampled)
        tokens = np.concatenate([sampled.token_ids, sampled.completion.token_ids])
        if request.messages:
            is_ended = sampled.completion.finish_reason is FinishReason.STOP
            messages = request.conversation_with(answer.message)
            self._conversations.add_chat(messages, request.tools, tokens, is_ended=is_ended, images=sampled.images)
        elif isinstance(request.prompt, str):
            self._conversations.add_text(request.prompt + answer.text, tokens)

    def close(self) -> None:
        """Cancel the requests under way, and refuse others."""
        self._is_closed = True
        for equal in self._asked.values():
            for asked in equal:
                asked.task.cancel()  # also if it has failed and no client asked: asyncio would report its error

    async def _answer(self, asked: Asked, request: Request) -> Answer:
        """Return the policy's answer, and keep what is to be recorded of it.

        Raises ValueError for a request that the template, the tokenizer or the recorder refuses, RefusedError when the
        episode has ended, EngineError.
        """
        if request.has_images:
            self.recorder.check_reads_images()
            # What is remembered names the files of images, and not what a client has sent.
            keep = functools.partial(_kept, own=self.recorder.prompt.images)
            messages = await asyncio.to_thread(change_images, request.messages, keep)
            asked.request = request = dataclasses.replace(request, messages=messages)
        token_ids, images = await self._encoded(request)
        shorter = {"max_tokens": request.max_tokens, "stop": self._stop(request)}
        try:
            sampled = await self.recorder.sample(token_ids, shorter, images)
        except BudgetSpentError:
            if self._is_spent:
                self.is_refused = True
                message = "the episode has no turns, tokens or time left"
                raise RefusedError(400, "episode_budget_spent", message) from None
            self._is_spent = True
            size = len(token_ids)
            return Answer(text="", calls=[], is_cut=True, num_prompt_tokens=size, num_tokens=0, tokens=[])
        answer = self._read(request, sampled)
        asked.sampled = sampled
        return answer

    async def _encoded(self, request: Request) -> tuple[Any, tuple[str, ...]]:
        """Return the tokens that a request's answer follows, and the paths of their images."""
        given = request.prompt
        if not request.messages:
            token_ids = self._conversations.encode_text(given) if isinstance(given, str) else list(given or [])
            return await self.recorder.with_images(token_ids)
        encoded = self._conversations.encode_chat(request.messages, request.tools, is_continued=request.is_continued)
        if self.recorder.reader is None:
            return encoded.token_ids, ()
        paths: list[str] = []
        change_images(encoded.messages, paths.append)
        return await self.recorder.extended(encoded.recorded.tolist(), encoded.images, encoded.added.tolist(), paths)

    def _read(self, request: Request, sampled: Sampled) -> Answer:
        """Return an answer as text and tool calls."""
        completion = sampled.completion
        ids = completion.token_ids.tolist()
        stop = self._stop(request)
        text = before_stop(self.tokenizer.decode(ids, skip_special_tokens=True), stop)
        calls = []
        if request.tools:
            # Some tokenizers mark tool calls with special tokens.
            whole = before_stop(self.tokenizer.decode(_without_end(ids, self.tokenizer)), stop)
            found = self.parse(whole)
            if found and not any(call.error for call in found):
                calls = found
                text = _CALL.split(whole, maxsplit=1)[0].strip()
        logprobs = zip(ids, completion.logprobs.tolist(), strict=True) if request.logprobs else ()
        return Answer(
            text=text,
            calls=[(new_id("call"), call) for call in calls],
            is_cut=completion.finish_reason is FinishReason.LENGTH,
            num_prompt_tokens=len(sampled.token_ids),
            num_tokens=len(ids),
            tokens=[(self.tokenizer.decode([token]), logprob) for token, logprob in logprobs],
        )

    def _stop(self, request: Request) -> tuple[str, ...]:
        """Return the texts that end an answer: the run's and the request's."""
        return (*self.recorder.sampling.stop, *request.stop)


def _kept(value: Any, own: Sequence[str]) -> str:
    """Return the path of an image that a client names: one of the prompt's `own`, or what a data URL holds.

    Raises DataError for another: a program in a sandbox, or one that repeats what a policy or a page says, must not
    have this process read files for it.
    """
    path = next((path for path in own if value in (path, Path(path).as_uri())), None)
    if path is None and not value.startswith("data:"):
        message = f"a request names the image {value[:80]}, which is none of the prompt's"
        raise DataError(message, hint="send it as a data:image/...;base64, URL: over HTTP, no other file is read")
    return path or kept_image(value, "a request")


def _without_end(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return token_ids[:-1] if token_ids[-1:] == [tokenizer.eos_token_id] else token_ids
