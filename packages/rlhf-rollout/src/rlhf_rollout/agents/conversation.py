"""Conversations as tokens: what the policy has seen and written stays as recorded, and what is new is tokenized."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlhf_data.chat.template import check_begun, render_chat, render_follow_up
from rlhf_data.chat.tokens import Tokenizer, encode_continuation, encode_prompts
from rlhf_data.errors import DataError

_ORIGIN = "a request"
_NO_TOKENS = np.empty(0, np.int32)
_CHECK = "a conversation with a second question"
_ANSWERS = {"answers": "It is 4.", "reasoning": "<think>\nTwo and two.\n</think>\n\nIt is 4."}

History = Literal["append", "split"]


@dataclass(frozen=True, slots=True)
class _Chat:
    """A conversation up to the end of an answer.

    Attributes:
        before: an earlier one that it continues, which shares its tokens; None for the first.
        added: [m] int32, its other tokens.
        size: the number of all its tokens.
        images: the paths of all its images.
        is_ended: a token that the policy wrote ends the answer.
    """

    before: "_Chat | None"
    added: np.ndarray
    size: int
    images: tuple[str, ...]
    is_ended: bool

    def tokens(self) -> np.ndarray:
        """Return all tokens, [size] int32."""
        parts = []
        chat: _Chat | None = self
        while chat is not None:
            parts.append(chat.added)
            chat = chat.before
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A conversation as tokens.

    Attributes:
        recorded: [m] int32, tokens that are known; none for a new conversation.
        images: the paths of their images.
        added: [n] int32, those of `messages`, as the chat template writes them: images lack most of their tokens.
        messages: what follows the recorded ones.
    """

    recorded: np.ndarray
    images: tuple[str, ...]
    added: np.ndarray
    messages: Sequence[Mapping[str, Any]]

    @property
    def token_ids(self) -> np.ndarray:
        """[m + n] int32."""
        return np.concatenate([self.recorded, self.added])


class Conversations:
    """Turns the requests of one episode into tokens.

    A request that begins with the messages of an earlier one and its answer gets the recorded tokens of both. What
    follows them is the text that the chat template writes after that answer, the end of the answer included unless the
    policy has written it. Answers are compared without white space around them and without the ids of tool calls.

    Args:
        tokenizer: the policy's, loaded.
        history: what happens if the template renders the recorded tokens differently, for example without earlier
            reasoning. "append" keeps the recorded tokens; "split" takes the template's text, which begins another
            rollout.
    """

    def __init__(self, tokenizer: Tokenizer, history: History = "append") -> None:
        self._tokenizer = tokenizer
        self._history = history
        self._chats: dict[bytes, _Chat] = {}  # up to the end of an answer, by digest
        self._texts: dict[str, np.ndarray] = {}

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, is_continued: bool = False
    ) -> Encoded:
        """Return the tokens of messages with the generation prompt, or with `is_continued` up to the last text.

        Raises DataError if the template refuses the messages, or the last one cannot be continued.
        """
        if is_continued:
            check_begun(messages[-1], _ORIGIN)
        render = functools.partial(self._render, messages, tools, is_continued)
        digests = _digests(messages, tools)
        count = self._num_known(digests)
        if not count:
            return self._anew(render(), messages)
        chat = self._chats[digests[count - 1]]
        recorded = chat.tokens()
        following = [dict(message) for message in messages[count:]]
        if is_continued and not following:
            return self._anew(render(), messages) if chat.is_ended else Encoded(recorded, chat.images, _NO_TOKENS, ())
        try:
            text = render_follow_up(following, self._tokenizer, origin=_ORIGIN, tools=tools, is_continued=is_continued)
        except DataError:  # a template may ask for the tool call that a tool's message answers
            return self._anew(render(), messages)
        added = encode_continuation(text, self._tokenizer)
        if chat.is_ended and added[:1] == recorded[-1:].tolist():
            added = added[1:]
        encoded = Encoded(recorded, chat.images, np.array(added, np.int32), following)
        if self._history == "split":
            rendered = render()
            if self._tokenizer.decode(encoded.token_ids.tolist()) != rendered:
                return self._anew(rendered, messages)
        return encoded

    def add_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        token_ids: np.ndarray,
        *,
        is_ended: bool,
        images: tuple[str, ...] = (),
    ) -> None:
        """Remember the tokens of messages, [n] int32, of which the last is an answer of the assistant.

        `images` are the paths of all images of the messages.
        """
        *earlier, digest = _digests(messages, tools)
        count = self._num_known(earlier)
        before = self._chats[earlier[count - 1]] if count else None
        if before is not None and not np.array_equal(before.tokens(), token_ids[: before.size]):
            before = None  # the template has rewritten it
        size = 0 if before is None else before.size
        self._chats[digest] = _Chat(before, token_ids[size:].copy(), len(token_ids), images, is_ended)

    def encode_text(self, text: str) -> np.ndarray:
        """Return the tokens of a prompt for completion, [n] int32."""
        start = max(filter(text.startswith, self._texts), key=len, default="")
        if start:
            added = encode_continuation(text[len(start) :], self._tokenizer, start)
            return np.concatenate([self._texts[start], np.array(added, np.int32)])
        return np.array(encode_prompts([text], self._tokenizer, has_special_tokens=False)[0], np.int32)

    def add_text(self, text: str, token_ids: np.ndarray) -> None:
        """Remember the tokens of a prompt for completion and what was written after it, [n] int32."""
        self._texts.setdefault(text, token_ids)

    def _num_known(self, digests: Sequence[bytes]) -> int:
        """Return how many messages the longest conversation has that is known and begins these."""
        return max((number for number, digest in enumerate(digests, 1) if digest in self._chats), default=0)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], is_continued: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError("the tokenizer has no chat template", hint="ask for a completion of text instead")
        plain = [dict(message) for message in messages]
        # A program may describe its tools in its own words, or parse calls itself.
        options = {"origin": _ORIGIN, "tools": tools, "must_write_all": False}
        begin = {"add_generation_prompt": not is_continued, "is_continued": is_continued}
        return render_chat(plain, self._tokenizer, **begin, **options)

    def _anew(self, text: str, messages: Sequence[Mapping[str, Any]]) -> Encoded:
        added = np.array(encode_continuation(text, self._tokenizer, ""), np.int32)
        return Encoded(_NO_TOKENS, (), added, messages)


def rewritten_parts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return which answers a chat template rewrites when messages follow them: "answers", "reasoning", both, or none.

    "answers" are those without reasoning. Templates of thinking models often drop the reasoning of earlier answers, or
    the sign for it that their generation prompt ends with. `Conversations` says what follows from it.

    Raises:
        DataError: the template refuses a conversation of three messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return ()
    question = {"role": "user", "content": "What is 2+2?"}
    start = render_chat([question], tokenizer, origin=_CHECK, add_generation_prompt=True)
    found = []
    for part, answer in _ANSWERS.items():
        messages = [question, {"role": "assistant", "content": answer}, {"role": "user", "content": "And 3+3?"}]
        whole = render_chat(messages, tokenizer, origin=_CHECK, add_generation_prompt=True)
        if not whole.startswith(start + answer):
            found.append(part)
    return tuple(found)


def _digests(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[bytes]:
    """Return a digest of the tools and the messages up to each message."""
    state = hashlib.blake2b(json.dumps(tools).encode(), digest_size=16)
    digests = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        content = message["content"]
        content = json.dumps(content, sort_keys=True) if isinstance(content, list) else content.strip()
        parts = [message["role"], len(content), calls, message.get("tool_call_id")]
        state.update(json.dumps(parts, sort_keys=True).encode())
        state.update(content.encode(errors="surrogatepass"))
        digests.append(state.digest())
    return digests
