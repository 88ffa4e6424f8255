"""Reads the tool calls in a policy's answer. Runs in agent processes.

vLLM's own parsers take seconds and half a gigabyte to import, and drop a call that is no JSON. So the three common
forms are read here, and vLLM's parsers are used for the others.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_data.errors import RewardError, unknown
from rlhf_rollout.engines.vllm.internals import tool_parser
from rlhf_rollout.policy_json import read_json, read_json_start

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. With an `error`, which is written for the policy, it cannot be run."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


ParseCalls = Callable[[str], list[ToolCall]]


def make_parser(name: str, tokenizer: Any) -> ParseCalls:
    """Return a function that returns the calls in an answer, whose text has its special tokens.

    Args:
        name: "hermes" (also Qwen's form), "llama3_json", "mistral", or the name of one of vLLM's parsers.
        tokenizer: the policy's, which vLLM's parsers need.

    Raises:
        RewardError: neither knows the name.
    """
    if name in _PARSERS:
        return _PARSERS[name]
    find = tool_parser(name)
    if find is None:
        hint = "with vLLM installed, its parsers can be named, too"
        raise RewardError(unknown("tool parser", name, _PARSERS), hint=hint)
    return functools.partial(_vllm, functools.partial(find, tokenizer))


def _hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    return [_read_json(match[1]) for match in _HERMES.finditer(text)]


def _llama3_json(text: str) -> list[ToolCall]:
    """`{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`, several of them with `;` between."""
    _, tag, tagged = text.rpartition("<|python_tag|>")
    rest = tagged.strip()
    if not tag and not re.match(r'\{\s*"(name|type)"', rest):
        return []
    calls = []
    while rest and not rest.startswith("<|"):
        try:
            value, end = read_json_start(rest)
        except ValueError:
            return [*calls, _no_json(rest)]
        calls.append(_read(value))
        rest = rest[end:].lstrip("; \n")
    return calls


def _mistral(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name{...}` any number of times."""
    calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = _MISTRAL_NAME.match(part)
        body = part[named.end() :] if named else part.lstrip()
        try:
            value, _ = read_json_start(body)
        except ValueError:
            calls.append(_no_json(part))
            continue
        if named:
            value = {"name": named["name"], "arguments": value}
        calls += map(_read, value if isinstance(value, list) else [value])
    return calls


_PARSERS: dict[str, ParseCalls] = {"hermes": _hermes, "llama3_json": _llama3_json, "mistral": _mistral}


def _vllm(extract: Callable[[str], Any], text: str) -> list[ToolCall]:
    try:
        functions = [call.function for call in extract(text)]
    except Exception as error:  # they raise several kinds
        return [ToolCall("", error=f"the call cannot be read: {error}")]
    return [_read({"name": function.name, "arguments": function.arguments}) for function in functions]


def _read_json(text: str) -> ToolCall:
    try:
        return _read(read_json(text))
    except ValueError:
        return _no_json(text)


def _read(value: Any) -> ToolCall:
    """Return the call that a JSON value names. The arguments may be a JSON object in a string."""
    fields = value if isinstance(value, Mapping) else {}
    name = fields.get("name")
    arguments = fields.get("arguments", fields.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return ToolCall(str(name), error=f"the arguments are not JSON: {arguments:.80}")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall("", error='a call is {"name": "...", "arguments": {...}}' + f", got {json.dumps(value):.80}")
    return ToolCall(name, arguments)


def _no_json(text: str) -> ToolCall:
    return ToolCall("", error=f"the call is not JSON: {text.strip():.80}")
