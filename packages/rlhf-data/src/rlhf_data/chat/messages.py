"""The messages and tools of rows, read in the forms that data sets have."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from rlhf_data.errors import DataError, unknown
from rlhf_data.rows.row import Row, kind_of

Messages = list[dict[str, Any]]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


def row_messages(row: Row, key: str) -> Messages:
    """Return a row's input as messages with a `role` and a text `content`: text becomes one user message.

    Roles are read in upper or lower case, `from` and `value` (ShareGPT) as `role` and `content`, and a content that is
    a list of text parts as their text. Beside tool calls, a content that is null or missing becomes empty text, and
    arguments in JSON become objects, as chat templates read them.

    Raises:
        DataError: an empty list, an unknown role, a part that is no text, or a message of another form.
    """
    value = row.cell(key)
    if not isinstance(value, list):
        return [{"role": "user", "content": row.filled(key)}]
    if not value:
        raise DataError(f"{row.origin}: `{key}` is an empty list of messages")
    messages = [_with_calls(_plain(message), partial(_as_object, is_table=not row.has_lines)) for message in value]
    for index, message in enumerate(messages):
        place = f"{row.origin}: message {index} of `{key}`"
        if others := _other_parts(message):
            raise DataError(f"{place} has a part of type `{others[0]}`; only parts of type `text` are read")
        if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
            problem = f"{place} needs a text `role` and a text `content`"
            hint = (
                'a message looks like {"role": "user", "content": "..."}; beside `tool_calls` the content may be null'
            )
            raise DataError(problem, hint=hint)
        row.check_json(key, message)
        if message["role"] not in _ROLES:
            raise DataError(f"{place}: {unknown('role', message['role'], _ROLES)}")
    return messages


def answer_messages(row: Row, key: str) -> Messages:
    """Return a row's answer as messages: text becomes one message of the assistant. Raises as `row_messages`."""
    if isinstance(row.cell(key), list):
        return row_messages(row, key)
    return [{"role": "assistant", "content": row.filled(key)}]


def joined_messages(prompt: Messages, answer: Messages) -> Messages:
    """Return the messages of a prompt and of its answer as one conversation.

    An answer that begins with the prompt, maybe behind a system message, is the whole conversation already.
    """
    starts = range(len(answer) - len(prompt)) if answer[0]["role"] not in ("assistant", "tool") else ()
    is_whole = any(answer[start : start + len(prompt)] == prompt for start in starts)
    return answer if is_whole else [*prompt, *answer]


def row_tools(row: Row, key: str | None) -> list[dict[str, Any]]:
    """Return a row's tools, which are JSON schemas of functions: a list or its JSON text; none for null.

    Raises:
        DataError: a missing key, text that is not JSON, or another value than a list of objects.
    """
    tools = None if key is None else row.decoded(key)
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problem = f"{row.origin}: `{key}` must be a list of tools, or its JSON text, got {kind_of(tools)}"
        raise DataError(problem, hint='a tool looks like {"type": "function", "function": {"name": ..., ...}}')
    row.check_json(str(key), tools)
    is_table = not row.has_lines and isinstance(row.cell(str(key)), list)
    return [_without_nulls(tool) for tool in tools] if is_table else tools


def check_roles(messages: Messages, *, origin: str) -> None:
    """Raise DataError unless the messages are a conversation that ends with the assistant's answer.

    System messages must come first, user and assistant must alternate, an assistant's message must follow a user's or a
    tool's, and no answer may be empty.
    """
    before = None
    for index, message in enumerate(messages):
        role = message["role"]
        place = f"{origin}: message {index}"
        if role in ("system", "developer") and before not in (None, "system", "developer"):
            raise DataError(f"{place}: a message of role `{role}` must come first, it follows `{before}`")
        if role == before == "user" or (role == "assistant" and before not in ("user", "tool")):
            raise DataError(f"{place}: `{role}` follows `{before or 'nothing'}`")
        if role == "assistant" and not (message["content"].strip() or message.get("tool_calls")):
            raise DataError(f"{place}: the assistant's answer is empty")
        before = role
    if before != "assistant":
        raise DataError(f"{origin}: the last message must be the assistant's, it is of role `{before}`")


def calls_as_text(messages: Messages) -> Messages:
    """Return messages with the arguments of tool calls as JSON text, which DeepSeek's templates expect."""
    return [_with_calls(message, _as_text) for message in messages]


def _plain(message: Any) -> Any:
    """Return a message with `role`, in lower case, and `content`, as text where it is a list of text parts.

    Keys are left out where they are null, because many templates ask whether a message has a key.
    """
    if not isinstance(message, dict):
        return message
    message = {name: value for name, value in message.items() if value is not None}
    if message.get("role") is None and "from" in message:
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = rest | {"role": message["from"], "content": message.get("value")}
    if isinstance(role := message.get("role"), str):
        message = message | {"role": _SHAREGPT_ROLES.get(role.lower(), role.lower())}
    parts = message.get("content")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    is_text = bool(texts) and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return message | {"content": "".join(texts)} if is_text and not _other_parts(message) else message


def _other_parts(message: Any) -> list[Any]:
    """Return the types of a content's parts that are no text."""
    parts = message.get("content") if isinstance(message, dict) else None
    kinds = [part.get("type") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [kind for kind in kinds if kind != "text"]


def _with_calls(message: Any, change: Callable[[Any], Any]) -> Any:
    """Return a message with text as content and changed arguments, if it has tool calls; else unchanged."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not calls or not isinstance(calls, list) or message.get("role") != "assistant":
        return message
    content = "" if message.get("content") is None else message["content"]
    return message | {"content": content, "tool_calls": [_with_arguments(call, change) for call in calls]}


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": change(function["arguments"])}}


def _as_object(arguments: Any, *, is_table: bool) -> Any:
    """Return the arguments of a call as an object, if they are one or its JSON text; else unchanged."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    return _without_nulls(arguments) if is_table else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls with which a table fills the keys that other rows' objects have."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
