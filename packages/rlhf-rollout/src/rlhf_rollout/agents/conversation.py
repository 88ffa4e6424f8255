"""Conversations as tokens: what the policy has seen and written stays as recorded, and what is new is tokenized."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf_data.chat.template import check_begun, render_chat, render_follow_up
from rlhf_data.chat.tokens import Tokenizer, encode_continuation, encode_prompts
from rlhf_data.errors import DataError

_ORIGIN = "a request"
_CHECK = "a conversation with a second question"
_ANSWERS = {"answers": "It is 4.", "reasoning": "<think>\nTwo and two.\n</think>\n\nIt is 4."}

History = Literal["append", "split"]


class Conversations:
    """Turns the requests of one episode into tokens.

    A request that begins with the messages of an earlier one and its answer gets the recorded tokens of both. What
    follows them is the text that the chat template writes after that answer, the end of the answer included unless the
    policy has written it. Answers are compared without white space around them and without the ids of tool calls.

    Args:
        tokenizer: of the policy, loaded.
        history: what happens if the template renders the recorded tokens differently, for example without earlier
            reasoning. "append" keeps the recorded tokens; "split" takes the template's text, which begins another
            rollout.
    """

    def __init__(self, tokenizer: Tokenizer, history: History = "append") -> None:
        self._tokenizer = tokenizer
        self._history = history
        # By digest: tokens up to the end of an answer, and whether a token that the policy wrote ends it.
        self._chats: dict[bytes, tuple[list[int], bool]] = {}
        self._texts: dict[str, list[int]] = {}

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, is_continued: bool = False
    ) -> list[int]:
        """Return the tokens of messages with the generation prompt, or with `is_continued` up to the last text.

        Raises DataError if the template refuses the messages, or the last one cannot be continued.
        """
        if is_continued:
            check_begun(messages[-1], _ORIGIN)
        render = functools.partial(self._render, messages, tools, is_continued)
        digests = _digests(messages, tools)
        count = max((number for number, digest in enumerate(digests, 1) if digest in self._chats), default=0)
        if not count:
            return self._encode(render())
        recorded, is_ended = self._chats[digests[count - 1]]
        following = [dict(message) for message in messages[count:]]
        if is_continued and not following:
            return self._encode(render()) if is_ended else recorded
        try:
            text = render_follow_up(following, self._tokenizer, origin=_ORIGIN, tools=tools, is_continued=is_continued)
        except DataError:  # a template may ask for the tool call that a tool's message answers
            return self._encode(render())
        added = encode_continuation(text, self._tokenizer)
        if is_ended and added[:1] == recorded[-1:]:
            added = added[1:]
        token_ids = [*recorded, *added]
        if self._history == "split":
            rendered = render()
            if self._tokenizer.decode(token_ids) != rendered:
                return self._encode(rendered)
        return token_ids

    def add_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        token_ids: list[int],
        *,
        is_ended: bool,
    ) -> None:
        """Remember the tokens of messages, of which the last is an answer of the assistant."""
        self._chats[_digests(messages, tools)[-1]] = token_ids, is_ended

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a prompt for completion."""
        start = max(filter(text.startswith, self._texts), key=len, default="")
        if start:
            return [*self._texts[start], *encode_continuation(text[len(start) :], self._tokenizer, start)]
        return encode_prompts([text], self._tokenizer, has_special_tokens=False)[0]

    def add_text(self, text: str, token_ids: list[int]) -> None:
        """Remember the tokens of a prompt for completion and what was written after it."""
        self._texts.setdefault(text, token_ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], is_continued: bool) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError("the tokenizer has no chat template", hint="ask for a completion of text instead")
        plain = [dict(message) for message in messages]
        # A program may describe its tools in its own words, or parse calls itself.
        options = {"origin": _ORIGIN, "tools": tools, "must_write_all": False}
        begin = {"add_generation_prompt": not is_continued, "is_continued": is_continued}
        return render_chat(plain, self._tokenizer, **begin, **options)

    def _encode(self, text: str) -> list[int]:
        return encode_continuation(text, self._tokenizer, "")


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
        parts = [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]
        state.update(json.dumps(parts, sort_keys=True).encode())
        digests.append(state.digest())
    return digests
