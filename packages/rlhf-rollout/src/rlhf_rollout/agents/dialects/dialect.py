"""Requests and answers in no particular form, and the parts that all HTTP protocols of the gateway share.

Answers are written when they are complete. A stream therefore holds each part of an answer as one event.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_data.errors import DataError
from rlhf_rollout.agents.tools.tool_calls import ToolCall
from rlhf_rollout.policy_json import read_json

# They would change the distribution that the policy learns from: the run's own values are used.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "response_format", "text", "thinking", "reasoning", "reasoning_effort", "top_logprobs"),
    *("min_tokens", "ignore_eos", "stop_token_ids"),  # parameters that vLLM's server has beside OpenAI's
)
_FREE_CHOICES = (None, "auto", "none")  # values of `tool_choice` that leave the choice to the policy

Event = tuple[str | None, Any]  # its name, if the form names events, and its JSON value


@dataclass(slots=True, kw_only=True)
class Request:
    """A request in no particular form.

    Attributes:
        messages: the conversation, each with `role` and `content`; a chat template gets them as they are. A content is
            text, or a list of texts and images as parts.
        is_continued: the last message is the beginning of the answer.
        prompt: text or token ids that are continued, in place of messages.
        tools: functions in OpenAI's form.
        max_tokens: the most tokens of the answer; None for the run's limit.
        stop: texts that end the answer; they are not part of it.
        logprobs: the answer tells its tokens' log-probs.
        stream: the answer is sent as events.
        include_usage: events tell the number of tokens, too.
        ignored: names of sampling parameters that are given and not used.
        model: the name that the answer repeats.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    is_continued: bool = False
    prompt: str | list[int] | None = None
    tools: list[Any] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    ignored: list[str] = field(default_factory=list)
    model: str = "policy"

    @property
    def has_images(self) -> bool:
        """Whether a message has an image."""
        return any(isinstance(message["content"], list) for message in self.messages)

    def begin_answer(self, wanted: bool | None = None) -> None:
        """Decide whether the last message is the beginning of the answer: if `wanted`, or it is the assistant's."""
        is_assistant = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        self.is_continued = is_assistant if wanted is None else wanted
        if self.is_continued and not is_assistant:
            raise DataError("the last message is not the assistant's, so that no answer continues it")

    def conversation_with(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages with the message of the answer, which a message that it continues becomes a part of."""
        if not self.is_continued:
            return [*self.messages, answer]
        *before, begun = self.messages
        return [*before, answer | {"content": begun["content"] + answer["content"]}]

    def digest(self) -> bytes:
        """Return a digest of all that the answer depends on: equal requests have equal ones."""
        parts = [self.messages, self.is_continued, self.prompt, self.tools, self.max_tokens, self.stop, self.logprobs]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer in no particular form.

    Attributes:
        text: without tool calls.
        calls: the tool calls, each with an id.
        is_cut: a limit of length has ended it.
        num_prompt_tokens, num_tokens: number of tokens before the answer, and in it.
        tokens: the text of each token with its log-prob in nats.
    """

    text: str
    calls: list[tuple[str, ToolCall]]
    is_cut: bool
    num_prompt_tokens: int
    num_tokens: int
    tokens: list[tuple[str, float]]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, as a later request repeats it and as chat templates read it."""
        calls = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for name, call in self.calls
        ]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of requests and answers.

    Attributes:
        read: returns the request of a body. Raises DataError.
        write: returns the body of an answer.
        events: yields the events of an answer.
        error: returns the body that tells an error, from its type and message.
    """

    read: Callable[[Mapping[str, Any]], Request]
    write: Callable[[Request, Answer], dict[str, Any]]
    events: Callable[[Request, Answer], Iterator[Event]]
    error: Callable[[str, str], dict[str, Any]]


def new_id(kind: str) -> str:
    """Return an id that begins with `kind`."""
    return f"{kind}_{secrets.token_hex(12)}"


def read_common(body: Mapping[str, Any], lengths: Sequence[str], stop: str) -> Request:
    """Return a request with what all forms have. `lengths` are the names of the greatest length, the first one counts.

    `stop` is the name of the texts that end the answer. Raises DataError for values of the wrong type, and for more
    than one answer.
    """
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        raise DataError("`n` must be 1: an episode has one answer per request")
    length = next((body[name] for name in lengths if body.get(name) is not None), None)
    if length is not None and (type(length) is not int or length < 1):
        raise DataError(f"`{lengths[0]}` must be a positive whole number, got {length!r:.40}")
    stops = body.get(stop) or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > 64:
        raise DataError(f"`{stop}` must be at most 64 texts")
    options = body.get("stream_options")
    return Request(
        max_tokens=length,
        stop=tuple(string_of(text, stop) for text in stops if text != ""),
        logprobs=bool(body.get("logprobs")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        ignored=_ignored(body),
        model=string_of(body.get("model") or "policy", "model"),
    )


def _ignored(body: Mapping[str, Any]) -> list[str]:
    names = [name for name in _SAMPLING if body.get(name) is not None]
    if body.get("top_logprobs") == 0:
        names.remove("top_logprobs")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return names if kind in _FREE_CHOICES else [*names, "tool_choice"]


def text_of(content: Any, kinds: Sequence[str]) -> str:
    """Return content that is a text, a list of texts with a type of `kinds`, or None, as one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return string_of(content, "content")
    if not isinstance(content, list):
        raise DataError(f"a message's content is neither text nor a list: {content!r:.80}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in kinds:
            raise DataError(f"the policy reads text only, got {part!r:.80}")
        texts.append(string_of(part.get("text", part.get("refusal")), "a part's text"))
    return "".join(texts)


def content_of(role: str, content: Any, kinds: Sequence[str], image: str) -> str | list[dict[str, Any]]:
    """Return content that `text_of` takes as one text; with parts of the type `image`, a list of texts and images.

    Answers have no images.
    """
    parts = content if isinstance(content, list) and role != "assistant" else []
    is_image = [isinstance(part, Mapping) and part.get("type") == image for part in parts]
    if not any(is_image):
        return text_of(content, kinds)
    found = []
    for part, has_url in zip(parts, is_image, strict=True):
        url = part.get("image_url") if has_url else None
        url = url.get("url") if isinstance(url, Mapping) else url
        own = {"type": "image", "image": string_of(url, "the URL of an image")} if has_url else None
        found.append(own or {"type": "text", "text": text_of([part], kinds)})
    return found


def string_of(value: Any, name: str) -> str:
    """Return a value that is a text. Raises DataError for any other, which the message calls `name`."""
    if not isinstance(value, str):
        raise DataError(f"{name} must be a text, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name} holds half of a surrogate pair, which is no text") from None
    return value


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list of this name, empty without one. Raises DataError for anything else."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"`{name}` must be a list, got {value!r:.80}")
    return value


def read_call(call_id: Any, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as chat templates read it: its arguments are an object, not JSON."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # the agent's own words remain as they are
            arguments = read_json(arguments or "{}")
    name = string_of(function.get("name"), "the name of a called function")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tool(tool: Any, schema: str) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's chat completions. `schema` is the name of its parameters in `tool`."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise DataError(f"a tool has no name: {tool!r:.80}")
    described = {"description": tool.get("description") or "", "parameters": tool.get(schema) or {}}
    return {"type": "function", "function": {"name": tool["name"], **described}}
