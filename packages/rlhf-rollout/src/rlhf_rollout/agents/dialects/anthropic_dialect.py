"""Requests and answers in the form of Anthropic's messages."""

import json
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


def _read_messages(body: Mapping[str, Any]) -> Request:
    request = read_common(body, ("max_tokens",), "stop_sequences")
    system = text_of(body.get("system"), ("text",))
    request.messages = [{"role": "system", "content": system}] if system else []
    for message in list_of(body, "messages"):
        if not isinstance(message, Mapping):
            raise DataError(f"a message is no object: {message!r:.80}")
        request.messages += _from_blocks(string_of(message.get("role"), "a message's role"), message.get("content"))
    if not any(message["role"] != "system" for message in request.messages):
        raise DataError("`messages` is empty")
    choice = body.get("tool_choice")
    if not (isinstance(choice, Mapping) and choice.get("type") == "none"):
        request.tools = [read_tool(tool, "input_schema") for tool in list_of(body, "tools")]
    request.begin_answer()
    return request


def _from_blocks(role: str, content: Any) -> Iterator[dict[str, Any]]:
    """Yield a message of blocks as messages in OpenAI's form: a tool's result is a message of its own."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise DataError("a message's content is neither text nor a list of blocks")
    calls = [
        read_call(block.get("id"), {"name": block.get("name"), "arguments": block.get("input")})
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    for block in blocks:
        if block.get("type") == "tool_result":
            result = {"role": "tool", "content": text_of(block.get("content"), ("text",))}
            yield result | {"tool_call_id": string_of(block.get("tool_use_id"), "tool_use_id")}
    others = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result", "thinking")]
    if others or calls or not blocks:
        content = content_of(role, [_with_url(block) for block in others], ("text",), "image_url")
        yield {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _with_url(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the block of an image in OpenAI's form, and any other block as it is."""
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, Mapping):
        return block
    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": url if source.get("type") == "base64" else source.get("url")}


def _write_messages(request: Request, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for name, call in answer.calls:
        content.append({"type": "tool_use", "id": name, "name": call.name, "input": call.arguments})
    reason = "max_tokens" if answer.is_cut else "tool_use" if answer.calls else "end_turn"
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens}
    head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": request.model, "content": content}
    return head | {"stop_reason": reason, "stop_sequence": None, "usage": usage}


def _messages_events(request: Request, answer: Answer) -> Iterator[Event]:
    whole = _write_messages(request, answer)
    start = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield _named({"type": "message_start", "message": start})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty = block | {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _named({"type": "content_block_start", "index": index, "content_block": empty})
        yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    usage = {"output_tokens": answer.num_tokens}
    yield _named({"type": "message_delta", "delta": ending, "usage": usage})
    yield _named({"type": "message_stop"})


def _anthropic_error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _named(value: dict[str, Any]) -> Event:
    return value["type"], value


MESSAGES = Dialect(_read_messages, _write_messages, _messages_events, _anthropic_error)
