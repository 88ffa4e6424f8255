"""Requests and answers in the forms of OpenAI: chat completions and completions."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_data.errors import DataError
from rlhf_rollout.agents.dialects.dialect import (
    Answer,
    Dialect,
    Event,
    Request,
    list_of,
    new_id,
    read_call,
    read_common,
    string_of,
    text_of,
)

# OpenAI's chat completions


def _read_chat(body: Mapping[str, Any]) -> Request:
    request = read_common(body, ("max_completion_tokens", "max_tokens"), "stop")
    request.messages = [_chat_message(message) for message in list_of(body, "messages")]
    if not request.messages:
        raise DataError("`messages` is empty")
    if body.get("tool_choice") != "none":
        request.tools = list_of(body, "tools")
    has_header, is_continued = (_flag(body, name) for name in ("add_generation_prompt", "continue_final_message"))
    if has_header and is_continued:
        raise DataError("`add_generation_prompt` and `continue_final_message` exclude each other")
    request.begin_answer(False if has_header and is_continued is None else is_continued)
    if has_header is False and not request.is_continued:
        raise DataError("without `add_generation_prompt`, the last message must be the beginning of the answer")
    return request


def _flag(body: Mapping[str, Any], name: str) -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"`{name}` must be true or false, got {value!r:.40}")
    return value


def _write_chat(request: Request, answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _chat_calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": _chat_reason(answer)}
    choice["logprobs"] = _chat_logprobs(request, answer)
    return _head("chat.completion", request) | {"choices": [choice], "usage": _usage(answer)}


def _chat_events(request: Request, answer: Answer) -> Iterator[Event]:
    head = _head("chat.completion.chunk", request)

    def chunk(delta: dict[str, Any], **more: Any) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return None, head | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if answer.text or request.logprobs:
        yield chunk({"content": answer.text}, logprobs=_chat_logprobs(request, answer))
    for index, call in enumerate(_chat_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish_reason=_chat_reason(answer))
    yield from _openai_end(head, request, answer)


def _chat_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"a message is no object: {message!r:.80}")
    role = string_of(message.get("role"), "a message's role")
    read: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), ("text", "refusal")),
    }
    if calls := list_of(message, "tool_calls"):
        read["tool_calls"] = [read_call(call.get("id"), call["function"]) for call in map(_has_function, calls)]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            read[name] = string_of(message[name], name)
    return read


def _has_function(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise DataError(f"a tool call has no function: {call!r:.80}")
    return call


def _chat_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for name, call in answer.calls
    ]


def _chat_reason(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"


def _chat_logprobs(request: Request, answer: Answer) -> dict[str, Any] | None:
    return {"content": token_logprobs(answer), "refusal": None} if request.logprobs else None


# OpenAI's completions


def _read_completion(body: Mapping[str, Any]) -> Request:
    request = read_common(body, ("max_tokens",), "stop")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise DataError(f"`{name}` is not supported")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        [prompt] = prompt
    is_tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_tokens):
        raise DataError("`prompt` must be one text or one list of token ids")
    # A number of alternatives to each token, of which 0 still asks for those that were chosen.
    number = body.get("logprobs")
    request.logprobs = not (number is None or number is False)
    if request.logprobs and number is not True and number != 0:
        request.ignored.append("logprobs")  # the alternatives
    request.prompt = prompt if is_tokens else string_of(prompt, "prompt")
    return request


def _completion_choice(request: Request, answer: Answer) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        texts = [text for text, _ in answer.tokens]
        starts = [sum(map(len, texts[:index])) for index in range(len(texts))]
        logprobs = {"tokens": texts, "token_logprobs": [logprob for _, logprob in answer.tokens]}
        logprobs |= {"top_logprobs": None, "text_offset": starts}
    reason = "length" if answer.is_cut else "stop"
    return {"index": 0, "text": answer.text, "finish_reason": reason, "logprobs": logprobs}


def _write_completion(request: Request, answer: Answer) -> dict[str, Any]:
    choice = _completion_choice(request, answer)
    return _head("text_completion", request) | {"choices": [choice], "usage": _usage(answer)}


def _completion_events(request: Request, answer: Answer) -> Iterator[Event]:
    head = _head("text_completion", request)
    yield None, head | {"choices": [_completion_choice(request, answer)]}
    yield from _openai_end(head, request, answer)


# What they share, also with OpenAI's responses


def token_logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Return the text of each token of an answer with its log-prob."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]


def openai_error(kind: str, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}


def _head(kind: str, request: Request) -> dict[str, Any]:
    return {"id": new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.num_prompt_tokens + answer.num_tokens
    return {"prompt_tokens": answer.num_prompt_tokens, "completion_tokens": answer.num_tokens, "total_tokens": total}


def _openai_end(head: dict[str, Any], request: Request, answer: Answer) -> Iterator[Event]:
    if request.include_usage:
        yield None, head | {"choices": [], "usage": _usage(answer)}
    yield None, "[DONE]"


CHAT = Dialect(_read_chat, _write_chat, _chat_events, openai_error)
COMPLETIONS = Dialect(_read_completion, _write_completion, _completion_events, openai_error)
