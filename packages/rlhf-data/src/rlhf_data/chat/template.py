"""Conversations as text: what the tokenizer's chat template writes, and the time that it shows."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rlhf_data.chat.messages import Messages, calls_as_text
from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import DataError

ANSWER = "answer7c41"  # stands for an answer in a rendered conversation
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_CLOCK = "template_clock"  # the attribute of a tokenizer that holds the time of its chat template


def render_prompt(
    messages: Messages, tokenizer: Tokenizer, *, origin: str, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the text that a policy continues: a conversation with the generation prompt.

    A last message of the assistant is the beginning of the answer. The text then ends with it, as with transformers'
    `continue_final_message`.

    Raises:
        DataError: as `render_chat`, or a last message of the assistant that is empty or calls tools.
    """
    last = messages[-1]
    is_begun = last["role"] == "assistant"
    if is_begun:
        check_begun(last, origin)
    options = {"origin": origin, "tools": tools, "add_generation_prompt": not is_begun}
    return render_chat(messages, tokenizer, is_continued=is_begun, **options)


def check_begun(last: Mapping[str, Any], origin: str) -> None:
    """Raise DataError unless a last message of the assistant can be the beginning of an answer."""
    if last.get("tool_calls"):
        hint = "add their results as messages of role `tool`, or leave the message out"
        raise DataError(f"{origin}: the last message calls tools, so no answer can follow it", hint=hint)
    if not last["content"].strip():
        raise DataError(f"{origin}: the last message is the assistant's and empty", hint="leave the message out")


def render_chat(
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    origin: str,
    add_generation_prompt: bool,
    is_continued: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    must_write_all: bool = True,
) -> str:
    """Return a conversation as text rendered by the tokenizer's chat template, including special tokens.

    Args:
        messages: the conversation.
        tokenizer: the model's tokenizer, loaded, with a chat template.
        origin: where the conversation comes from, for messages.
        add_generation_prompt: end with what precedes an answer.
        is_continued: end with the content of the last message.
        tools: JSON schemas of functions in OpenAI's form, which the template writes where its model expects them.
        must_write_all: whether the text must have each message that is not the assistant's, and the name of each tool
            and of each function that the assistant calls, by the template or in a message. It must always have those
            of the user.

    Raises:
        DataError: the template refuses the messages, or a message, a tool or a call is not in the text.
    """
    # return_dict=False, because transformers 5 returns a dictionary by default.
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "return_dict": False}
    if is_continued:
        options["continue_final_message"] = True
    text = apply_template(messages, tokenizer, origin, tools, **options)
    for index, message in enumerate(messages):
        is_needed = message["role"] == "user" or (must_write_all and message["role"] != "assistant")
        if is_needed and not all(part.strip() in text for part in _texts(message["content"])):
            marked = [*messages[:index], {**message, "content": ANSWER}, *messages[index + 1 :]]
            if ANSWER not in apply_template(marked, tokenizer, origin, tools, **options):
                problem = f"{origin}: the chat template does not write message {index}, of role `{message['role']}`"
                hint = "use another template, leave it out, or write it into a message of another role"
                if message["role"] == "user":  # some templates of such models write no content that is plain text
                    hint = "use another template, or ``image_key`` if the model reads images"
                raise DataError(problem, hint=hint)
    if must_write_all:
        _check_written("tool", tools, text, origin, "describe them in the system message")
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        _check_written("call of", calls, text, origin, "write calls into the content of their messages")
    return text


def _texts(content: Any) -> list[str]:
    """Return the texts of a message's content, which is text or a list of parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return [str(part["text"]) for part in parts if "text" in part]


def _check_written(what: str, of_functions: Iterable[Any], text: str, origin: str, otherwise: str) -> None:
    """Raise DataError unless a rendered conversation has the name of each function of tools or calls."""
    for one in of_functions:
        function = one.get("function", one) if isinstance(one, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name not in text:
            hint = f"use a model whose template knows tools, or {otherwise}"
            raise DataError(f"{origin}: the chat template does not write the {what} {name!r}", hint=hint)


def render_follow_up(
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    origin: str,
    tools: Sequence[Mapping[str, Any]] = (),
    is_continued: bool = False,
) -> str:
    """Return what the chat template writes after the text of an assistant's answer, when messages follow it.

    That is the end of the answer, the messages, and the generation prompt, or with `is_continued` no more than the text
    of the last message. It does not depend on what precedes the
    answer, so that a conversation is continued without rendering it again.

    Raises:
        DataError: the template refuses the messages, or does not write an answer as it is.
    """
    base = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    # Tools may be described in a message that precedes the answer.
    options = {"origin": origin, "tools": tools, "must_write_all": False}
    options |= {"add_generation_prompt": not is_continued, "is_continued": is_continued}
    text = render_chat([*base, *messages], tokenizer, **options)
    if text.count(ANSWER) != 1:
        raise DataError(f"{origin}: the chat template does not write an answer as it is once messages follow it")
    return text.partition(ANSWER)[2]


def has_generation_marks(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer's chat template marks the assistant's part of its output."""
    return bool(_GENERATION_MARK.search(_template_text(tokenizer)))


def template_clock(tokenizer: Tokenizer, now: datetime | None = None) -> datetime | None:
    """Return the time that the chat template writes, in local time, or None for a template that writes no time.

    It is that of the first rendering, so that a run that lasts longer than a day renders all rows alike.

    Args:
        tokenizer: the model's tokenizer, loaded; it keeps the time.
        now: the time to keep, for example that of the run that is continued; None keeps the one that it has.
    """
    if not _DATE.search(_template_text(tokenizer)):
        return None
    if now is not None or getattr(tokenizer, _CLOCK, None) is None:
        setattr(tokenizer, _CLOCK, now or datetime.now())
    return getattr(tokenizer, _CLOCK)


def template_dates(tokenizer: Tokenizer) -> list[str]:
    """Return the dates and times that the chat template writes, in the order in which it has them."""
    now = template_clock(tokenizer)
    return [] if now is None else [now.strftime(found[2]) for found in _DATE.finditer(_template_text(tokenizer))]


def _template_text(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if isinstance(template, Mapping):  # a tokenizer with several named templates
        template = template.get("default", "")
    return template or ""


def apply_template(
    messages: Messages, tokenizer: Tokenizer, origin: str, tools: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
    """Return what the tokenizer makes of a conversation with `options`. Raises DataError if its template fails."""
    if tools:
        options["tools"] = list(tools)
    if (now := template_clock(tokenizer)) is not None:
        template = tokenizer.get_chat_template(tools=options.get("tools"))
        options["chat_template"] = _DATE.sub(lambda found: repr(now.strftime(found[2])), template)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program and may raise anything
        told = calls_as_text(messages)
        if told != messages:  # DeepSeek's templates expect the arguments of calls as text
            with contextlib.suppress(Exception):
                return tokenizer.apply_chat_template(told, **options)
        raise DataError(f"{origin}: the chat template refuses the messages: {error}") from error
