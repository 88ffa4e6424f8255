"""Requests and answers in the form of OpenAI's responses: texts and function tools; a request has all that came before.

Source: https://platform.openai.com/docs/api-reference/responses
"""

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
    list_of,
    new_id,
    read_call,
    read_common,
    read_tool,
    string_of,
    text_of,
)
from rlhf_rollout.agents.dialects.openai_dialect import openai_error, token_logprobs

_TEXTS = ("input_text", "output_text", "text", "refusal")
_LOGPROBS = "message.output_text.logprobs"  # in `include`
_REFERENCES = ("previous_response_id", "conversation", "prompt")  # to what a server would have stored


def _read(body: Mapping[str, Any]) -> Request:
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
        _add(request.messages, item)
    if body.get("tool_choice") != "none":
        request.tools = [_tool(tool) for tool in list_of(body, "tools")]
    request.begin_answer()
    return request


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item to the messages of a conversation. Calls of tools belong to the assistant's message before them."""
    if not isinstance(item, Mapping):
        raise DataError(f"an item of `input` is no object: {item!r:.80}")
    kind = item.get("type") or "message"
    if kind == "message":
        role = string_of(item.get("role"), "a message's role")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": text_of(item.get("content"), _TEXTS)})
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


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise DataError(f"a tool must be a function, got {tool!r:.80}")
    return read_tool(tool, "parameters")


def _write(request: Request, answer: Answer) -> dict[str, Any]:
    status = "incomplete" if answer.is_cut else "completed"
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        part["logprobs"] = token_logprobs(answer) if request.logprobs else []
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


def _events(request: Request, answer: Answer) -> Iterator[Event]:
    whole = _write(request, answer)
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


RESPONSES = Dialect(_read, _write, _events, openai_error)
