"""Requests and answers in the forms of OpenAI: chat completions, completions and responses."""

import itertools
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
    content_of,
    list_of,
    new_id,
    read_call,
    read_common,
    read_tool,
    string_of,
    text_of,
)

_TEXTS = ("input_text", "output_text", "text", "refusal")
_LOGPROBS = "message.output_text.logprobs"  # in `include`
_REFERENCES = ("previous_response_id", "conversation", "prompt")  # to what a server would have stored

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
        "content": content_of(role, message.get("content"), ("text", "refusal"), "image_url"),
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
    return {"content": _token_logprobs(answer), "refusal": None} if request.logprobs else None


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


# OpenAI's responses: texts and function tools; a request has all that came before. Source:
# https://platform.openai.com/docs/api-reference/responses


def _read_response(body: Mapping[str, Any]) -> Request:
    request = read_common(body, ("max_output_tokens",), "stop")
    for name in _REFERENCES:
        if body.get(name) is not None:
            raise DataError(f"`{name}` is not supported", hint="send the whole conversation as `input`")
    if body.get("background"):
        raise DataError("`background` is not supported", hint="wait for the answer, or stream it")
    request.logprobs = _LOGPROBS in list_of(body, "include")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input")
    if not items:
        raise DataError("`input` is empty")
    if instructions := text_of(body.get("instructions"), _TEXTS):
        request.messages.append({"role": "system", "content": instructions})
    for item in items:
        _add_item(request.messages, item)
    if body.get("tool_choice") != "none":
        request.tools = [_function_tool(tool) for tool in list_of(body, "tools")]
    request.begin_answer()
    return request


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item to the messages of a conversation. Calls of tools belong to the assistant's message before them."""
    if not isinstance(item, Mapping):
        raise DataError(f"an item of `input` is no object: {item!r:.80}")
    kind = item.get("type") or "message"
    if kind == "message":
        role = string_of(item.get("role"), "a message's role")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": content_of(role, item.get("content"), _TEXTS, "input_image")})
    elif kind == "function_call":
        call = read_call(string_of(item.get("call_id"), "call_id"), item)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        result = {"role": "tool", "content": text_of(item.get("output"), _TEXTS)}
        messages.append(result | {"tool_call_id": string_of(item.get("call_id"), "call_id")})
    elif kind != "reasoning":
        raise DataError(f"an item of type {kind!r:.80} is not supported")


def _function_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise DataError(f"a tool must be a function, got {tool!r:.80}")
    return read_tool(tool, "parameters")


def _write_response(request: Request, answer: Answer) -> dict[str, Any]:
    status = "incomplete" if answer.is_cut else "completed"
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        part["logprobs"] = _token_logprobs(answer) if request.logprobs else []
        message = {"type": "message", "id": new_id("msg"), "role": "assistant", "status": status}
        output.append(message | {"content": [part]})
    for name, call in answer.calls:
        told = {"call_id": name, "name": call.name, "arguments": json.dumps(call.arguments), "status": "completed"}
        output.append({"type": "function_call", "id": new_id("fc"), **told})
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens}
    usage["total_tokens"] = sum(usage.values())
    # Fields that the library requires: the gateway tells neither what was cached nor what is reasoning.
    details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details |= {"output_tokens_details": {"reasoning_tokens": 0}}
    head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": request.model}
    head |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
    head["incomplete_details"] = {"reason": "max_output_tokens"} if answer.is_cut else None
    return head | {"status": status, "output": output, "usage": usage | details}


def _response_events(request: Request, answer: Answer) -> Iterator[Event]:
    whole = _write_response(request, answer)
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> Event:
        name = f"response.{kind}"
        return name, {"type": name, "sequence_number": next(numbers), **fields}

    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        begin = {"status": "in_progress"} | ({"content": []} if item["type"] == "message" else {"arguments": ""})
        yield event("output_item.added", output_index=index, item=item | begin)
        if item["type"] == "message":
            [part] = item["content"]
            place["content_index"] = 0
            logprobs = part["logprobs"]
            yield event("content_part.added", **place, part=part | {"text": "", "logprobs": []})
            yield event("output_text.delta", **place, delta=part["text"], logprobs=logprobs)
            yield event("output_text.done", **place, text=part["text"], logprobs=logprobs)
            yield event("content_part.done", **place, part=part)
        else:
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            yield event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


# What they share


def _token_logprobs(answer: Answer) -> list[dict[str, Any]]:
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
RESPONSES = Dialect(_read_response, _write_response, _response_events, openai_error)
