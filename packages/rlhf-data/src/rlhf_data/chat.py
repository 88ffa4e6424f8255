"""Rendering and tokenizing of rows: chat template, input template, special tokens, and the mask of trained tokens.

A tokenizer is a loaded Hugging Face tokenizer, or an object with the same methods
(`rlhf_data.testing.ByteTokenizer`).
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.messages import Messages, calls_as_text, check_roles, joined_messages, row_messages, row_tools
from rlhf_data.rows import Row

_PLACEHOLDER = "{}"
_ANSWER = "answer7c41"  # stands for an answer in a rendered conversation
# Contexts of a text whose own is unknown, or has a token in common with it. Few tokens begin with them and go on.
_CONTEXTS = ("\n", "a")
_CONTEXT_LENGTH = 64  # characters of a context that count: tokens depend on what is near
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OPENING_TAG = re.compile(r"(<\w+>)(\s*)$")
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_CLOCK = "template_clock"  # the attribute of a tokenizer that holds the time of its chat template
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what models think, beside the content of a message


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this package uses."""

    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def __len__(self) -> int:
        """Return the number of tokens in the vocabulary."""

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return a mapping whose "input_ids" are the token ids of one text, or of each text of a list."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def get_chat_template(self, *, tools: Any = None) -> str:
        """Return the chat template, or that of several which is for tools."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Return the rendered conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTemplate:
    """Options that turn the input of a row into the text of a prompt.

    Attributes:
        tokenizer: the model's tokenizer, loaded.
        apply_chat_template: render with the tokenizer's chat template.
        input_template: text with one `{}` for the input; everything else in it is literal.
        tools_key: the key of a row's tools, which the chat template writes; None for no tools. See `row_tools`.

    Raises:
        ConfigError: both templates are given, one that the tokenizer cannot apply, or tools without the chat template.
    """

    tokenizer: Tokenizer = field(repr=False)
    apply_chat_template: bool = False
    input_template: str | None = None
    tools_key: str | None = None

    def __post_init__(self) -> None:
        message = hint = None
        if self.apply_chat_template and self.input_template is not None:
            message = "input_template has no effect when the chat template is applied"
            hint = "give either ``apply_chat_template`` or ``input_template``"
        elif self.apply_chat_template and not getattr(self.tokenizer, "chat_template", None):
            message = "the tokenizer has no chat template"
            hint = "use an instruction-tuned model, or ``input_template='User: {}'`` without ``apply_chat_template``"
            hint += "; sft, rm, dpo, kto and kd also take ``set_chat_template.text``"
        elif self.tools_key is not None and not self.apply_chat_template:
            message = "tools_key has no effect without apply_chat_template"
            hint = "apply the chat template, which writes the tools"
        elif self.input_template is not None and self.input_template.count(_PLACEHOLDER) != 1:
            message = f"input_template must contain `{{}}` exactly once, got {self.input_template!r}"
            hint = "`{}` is where the input goes, as in 'Question: {} Answer: '"
        if message:
            raise ConfigError(message, hint=hint)

    def render(self, row: Row, key: str) -> str:
        """Return the text of a row's prompt.

        With the chat template, the input is one user message (or already a list of messages); see `render_prompt`.
        Otherwise the input is inserted into `input_template`.

        Raises:
            DataError: a missing key, an input that is empty or of the wrong type, or messages the template refuses.
        """
        if self.apply_chat_template:
            options = {"origin": row.origin, "tools": row_tools(row, self.tools_key)}
            return render_prompt(row_messages(row, key), self.tokenizer, **options)
        return (self.input_template or _PLACEHOLDER).replace(_PLACEHOLDER, self.plain_text(row, key))

    def plain_text(self, row: Row, key: str) -> str:
        """Return a text of a row that no chat template renders. Raises DataError as `Row.filled`, and for messages."""
        if isinstance(row.cell(key), list):
            raise DataError(
                f"{row.origin}: `{key}` is a list of messages", hint="messages need ``apply_chat_template``"
            )
        return row.filled(key)


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
        origin: of the conversation, for messages.
        add_generation_prompt: end with what precedes an answer.
        is_continued: end with the content of the last message.
        tools: JSON schemas of functions in OpenAI's form, which the template writes where its model expects them.
        must_write_all: whether the text must have each message that is not the assistant's, and the name of each tool
            and of each function that the assistant calls, by the template or in a message.

    Raises:
        DataError: the template refuses the messages, or a message, a tool or a call is not in the text.
    """
    # return_dict=False, because transformers 5 returns a dictionary by default.
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "return_dict": False}
    if is_continued:
        options["continue_final_message"] = True
    text = _apply_template(messages, tokenizer, origin, tools, **options)
    if must_write_all:
        for index, message in enumerate(messages):
            if message["role"] != "assistant" and str(message["content"]).strip() not in text:
                marked = [*messages[:index], {**message, "content": _ANSWER}, *messages[index + 1 :]]
                _check_message(index, message, _apply_template(marked, tokenizer, origin, tools, **options), origin)
        _check_written("tool", tools, text, origin, "describe them in the system message")
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        _check_written("call of", calls, text, origin, "write calls into the content of their messages")
    return text


def _check_message(index: int, message: Mapping[str, Any], text: str, origin: str) -> None:
    """Raise DataError unless a message with `_ANSWER` as content is in its rendered conversation `text`."""
    if _ANSWER not in text:
        problem = f"{origin}: the chat template does not write message {index}, of role `{message['role']}`"
        raise DataError(problem, hint="use another template, leave it out, or write it into a message of another role")


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
    base = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    # Tools may be described in a message that precedes the answer.
    options = {"origin": origin, "tools": tools, "must_write_all": False}
    options |= {"add_generation_prompt": not is_continued, "is_continued": is_continued}
    text = render_chat([*base, *messages], tokenizer, **options)
    if text.count(_ANSWER) != 1:
        raise DataError(f"{origin}: the chat template does not write an answer as it is once messages follow it")
    return text.partition(_ANSWER)[2]


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer, *, has_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of rendered prompts, with the tokenizer's start tokens exactly once and without end tokens.

    Set `has_special_tokens` for the output of a chat template, which already contains them.
    """
    texts = list(texts)
    if has_special_tokens:
        return _encode(texts, tokenizer, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    bare_ids = _encode(texts, tokenizer, add_special_tokens=False)
    prompts = []
    for ids, bare in zip(_encode(texts, tokenizer, add_special_tokens=True), bare_ids, strict=True):
        # Some tokenizers append an EOS. A prompt is to be continued, so it must not end with one.
        if ids and ids[-1] == eos and (not bare or bare[-1] != eos):
            ids = ids[:-1]
        # The text or the input template may already begin with the BOS that the tokenizer adds.
        if bos is not None and ids[:2] == [bos, bos] and bare[:1] == [bos]:
            ids = ids[1:]
        prompts.append(ids)
    return prompts


def encode_continuation(text: str, tokenizer: Tokenizer, before: str | None = None) -> list[int]:
    """Return the token ids of a text within a sequence, without special tokens that the tokenizer adds.

    They are a part of the tokens of the whole sequence. SentencePiece's tokenizers (Metaspace, or a Prepend normalizer)
    would write a space before a text that they get alone. If one token of the whole holds the end of `before` and the
    beginning of `text`, the text is tokenized by itself, without that space, because a policy that has read the tokens
    of `before` writes the text in tokens of its own.

    Args:
        text: the text.
        tokenizer: the model's tokenizer, loaded.
        before: the text up to there, or its end; "" begins the sequence; None if it is not known.
    """
    if before != "":
        for context in (*([before[-_CONTEXT_LENGTH:]] if before else []), *_CONTEXTS):
            start, whole = _encode([context, context + text], tokenizer, add_special_tokens=False)
            if whole[: len(start)] == start:
                return whole[len(start) :]
    return _encode([text], tokenizer, add_special_tokens=False)[0]


def encode_completion(text: str, tokenizer: Tokenizer, *, before: str = "", is_truncated: bool = False) -> list[int]:
    """Return the token ids of a completion that follows a prompt: without start tokens, with one EOS at the end.

    White space after an EOS in the text, which many chat templates write, is dropped. A truncated text gets no EOS. See
    `encode_continuation` for `before`, the text of the prompt.

    Raises:
        ConfigError: the tokenizer has no EOS token.
    """
    eos = _eos(tokenizer)
    ids = encode_continuation(text, tokenizer, before)
    if is_truncated:
        return ids
    if eos in ids:
        last = len(ids) - 1 - ids[::-1].index(eos)
        if not tokenizer.decode(ids[last + 1 :], skip_special_tokens=False).strip():
            return ids[: last + 1]
    return [*ids, eos]


def encode_conversation(
    row: Row,
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    all_turns: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids [L] int32 of a row's conversation, and the mask [L] bool of what the assistant wrote.

    If the chat template has `{% generation %}` marks, they define the mask, together with an EOS right after a mark.
    Otherwise the assistant's part is the text that the template appends to the rendered conversation so far, including
    the generation prompt. If the template does not write the last answer as it is, for example without what the model
    thought, that part is the answer itself, as a policy writes it after the generation prompt. The last answer ends
    with one EOS; what the template writes after it is dropped.

    The prompt has the tokens that it has in generation. All parts together have the tokens of the whole text, except
    where a token would lie in two parts; see `encode_continuation`.

    Args:
        row: the row of the messages. If it says that the answer was truncated, no EOS is appended and marks are not
            used, because they include the EOS.
        messages: a conversation that ends with the assistant; see `check_roles`.
        tokenizer: the model's tokenizer, loaded, with a chat template.
        all_turns: train every answer; otherwise only the last one.
        tools: JSON schemas of functions, which the template writes.

    Raises:
        ConfigError: the template renders earlier messages differently once others follow, so that no mask matches what
            the model sees in generation; marks that cannot be assigned to messages; no EOS token.
        DataError: roles out of order, messages that the template refuses, reasoning that it drops, or tool calls in an
            answer that was truncated.
    """
    check_roles(messages, origin=row.origin)
    if row.is_truncated and messages[-1].get("tool_calls"):  # the template would write calls only with an end
        hint = "leave its calls out, or write into its content what the model wrote of them"
        raise DataError(f"{row.origin}: a length limit cut the answer, so it cannot end with tool calls", hint=hint)
    if has_generation_marks(tokenizer) and _fit_marks(row, messages, tokenizer, all_turns, tools):
        return _encode_marked(messages, tokenizer, row.origin, all_turns, tools)
    *pieces, (last, _) = _pieces(row, messages, tokenizer, all_turns, tools)
    answer = messages[-1]["content"].strip()
    if row.is_truncated and answer in last:  # the template writes an end after every answer: cut it off
        last = last[: last.rindex(answer) + len(answer)]
    runs = []
    before = ""
    for text, _ in pieces:
        runs.append(encode_continuation(text, tokenizer, before))
        before += text
    runs.append(encode_completion(last, tokenizer, before=before, is_truncated=row.is_truncated))
    is_trained = [*(flag for _, flag in pieces), True]
    return np.concatenate(runs).astype(np.int32), np.repeat(is_trained, [len(run) for run in runs])


def encode_answer(
    row: Row,
    prompt: Messages,
    answer: Messages,
    tokenizer: Tokenizer,
    *,
    all_turns: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `encode_conversation` does, for a prompt and its answer, which `joined_messages` joins.

    Where the prompt ends with the beginning of an answer (see `render_prompt`), what continues it is trained.

    Raises:
        ConfigError: as `encode_conversation`.
        DataError: as `encode_conversation`, or `all_turns`, several messages or tool calls as such a continuation.
    """
    if not prompt or not prompt[-1]["role"] == answer[0]["role"] == "assistant":
        messages = joined_messages(prompt, answer)
        return encode_conversation(row, messages, tokenizer, all_turns=all_turns, tools=tools)
    if all_turns or len(answer) > 1:
        problem = f"{row.origin}: the answer continues the prompt's last message, so it must be one message"
        raise DataError(f"{problem}, and the only one that is trained")
    if answer[0].get("tool_calls"):
        hint = "leave that beginning out of the prompt, and put its text before the answer's own"
        raise DataError(f"{row.origin}: the answer continues the prompt's last message, but it calls tools", hint=hint)
    *earlier, begun = prompt
    check_roles([*earlier, begun | {"content": begun["content"] + answer[0]["content"]}], origin=row.origin)
    _check_reasoning(answer[0], answer[0]["content"], row.origin)
    before = render_prompt(prompt, tokenizer, origin=row.origin, tools=tools)
    options = {"origin": row.origin, "tools": tools, "add_generation_prompt": False}
    marked = render_chat([*earlier, {"role": "assistant", "content": _ANSWER}], tokenizer, **options)
    start = begun["content"]
    trimmed = (
        "" if before.endswith(start) else start[len(start.rstrip()) :]
    )  # some templates trim what a message ends with
    text = trimmed + answer[0]["content"] + ("" if row.is_truncated else marked.rpartition(_ANSWER)[2])
    [prompt_ids] = encode_prompts([before], tokenizer, has_special_tokens=True)
    answer_ids = encode_completion(text, tokenizer, before=before, is_truncated=row.is_truncated)
    ids = np.array([*prompt_ids, *answer_ids], np.int32)
    return ids, np.arange(len(ids)) >= len(prompt_ids)


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


def _fit_marks(
    row: Row, messages: Messages, tokenizer: Tokenizer, all_turns: bool, tools: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a template's marks hold the trained answers as they are."""
    text = render_chat(messages, tokenizer, origin=row.origin, add_generation_prompt=False, tools=tools)
    answers = [message for message in messages if message["role"] == "assistant"][0 if all_turns else -1 :]
    if row.is_truncated or not all(message["content"].strip() in text for message in answers):
        return False
    for message in answers:
        _check_reasoning(message, text, row.origin)
    prompt = render_chat(messages[:-1], tokenizer, origin=row.origin, add_generation_prompt=True, tools=tools)
    return all_turns or not _is_thinking(row, messages[-1], prompt)


def _pieces(
    row: Row, messages: Messages, tokenizer: Tokenizer, all_turns: bool, tools: Sequence[Mapping[str, Any]]
) -> list[tuple[str, bool]]:
    """Return the conversation as pieces of text, each with whether the assistant wrote it. The last is an answer."""
    render = partial(render_chat, tokenizer=tokenizer, origin=row.origin, tools=tools)
    pieces = []
    done = ""  # the conversation up to and including the latest answer
    carried = ""  # white space after that answer, which belongs to the piece that follows
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        if message["role"] != "assistant" or not (all_turns or is_last):
            continue
        before = render(messages[:index], add_generation_prompt=True)
        after = render(messages[: index + 1], add_generation_prompt=False)
        text = after.removeprefix(before) if after.startswith(before) else None
        if text is None or message["content"].strip() not in text or _is_thinking(row, message, before):
            is_raw = is_last and not message.get("tool_calls")
            text = _raw_answer(messages, before, render, row.is_truncated) if is_raw else None
        if text is None or not before.startswith(done):
            problem = f"{row.origin}: the chat template rewrites message {index}, or what precedes it, once it is there"
            hint = "use a template that only appends or has {% generation %} marks"
            hint += ", or train the last answer only, without ``multiturn``" if all_turns else ""
            raise ConfigError(problem, hint=hint)
        _check_reasoning(message, text, row.origin)
        # White space that the template writes after the EOS is not part of the answer.
        head, eos, tail = text.rpartition(tokenizer.eos_token or "\0")
        ends = bool(eos) and not tail.strip() and not is_last
        pieces += [(carried + before[len(done) :], False), (head + eos if ends else text, True)]
        done = after
        carried = tail if ends else ""
    return pieces


def _is_thinking(row: Row, message: Mapping[str, Any], before: str) -> bool:
    """Return whether an answer continues a thought that the generation prompt `before` begins.

    It then ends the thought, or is truncated. A template that expects thoughts beside the content would write such an
    answer after an empty thought.
    """
    opening = _OPENING_TAG.search(before)
    return opening is not None and (row.is_truncated or f"</{opening[1][1:]}" in message["content"])


def _raw_answer(messages: Messages, before: str, render: Callable[..., str], is_truncated: bool) -> str | None:
    """Return the last answer as it is, and the end that the template writes after an answer that is not truncated.

    Templates of reasoning models drop what an answer thinks, but the policy writes it after the generation prompt
    `before`. If that ends with a tag that begins the answer too, such as `<think>`, the tag is not repeated. None if
    the template writes no answer as it is.
    """
    text = render([*messages[:-1], {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    answer = messages[-1]["content"]
    if (opening := _OPENING_TAG.search(before)) and answer.lstrip().startswith(opening[1]):
        answer = answer.lstrip().removeprefix(opening[1]).removeprefix(opening[2])
    end = "" if is_truncated else text.partition(_ANSWER)[2]
    return answer + end if text.count(_ANSWER) == 1 else None


def _check_reasoning(message: Mapping[str, Any], text: str, origin: str) -> None:
    """Raise DataError if an answer has reasoning beside its content that `text`, its rendering, lacks."""
    for key in _REASONING:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip() not in text:
            hint = "write it into the content, as in <think>...</think>, which is trained as it is"
            raise DataError(f"{origin}: the chat template does not write the `{key}` of an answer", hint=hint)


def _encode_marked(
    messages: Messages, tokenizer: Tokenizer, origin: str, all_turns: bool, tools: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    options = {"tokenize": True, "add_generation_prompt": False, "return_dict": True}
    encoded = _apply_template(messages, tokenizer, origin, tools, return_assistant_tokens_mask=True, **options)
    ids = np.array(encoded["input_ids"])
    mask = np.array(encoded["assistant_masks"], bool)
    eos = _eos(tokenizer)
    mask[1:] |= mask[:-1] & (ids[1:] == eos)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(starts) < answers or (len(starts) > answers and not all_turns):
        message = f"{origin}: the chat template marks {len(starts)} runs of tokens for {answers} answers"
        hint = "train all of them, with ``multiturn``" if len(starts) > answers else "use a template without marks"
        raise ConfigError(message, hint=hint)
    if not all_turns:
        mask[: starts[-1]] = False
    last = int(np.flatnonzero(mask)[-1])
    ends = last + np.flatnonzero(ids[last:] == eos)
    if len(ends):
        return ids[: ends[0] + 1].astype(np.int32), mask[: ends[0] + 1]
    length = len(ids) if tokenizer.decode(ids[last + 1 :]).strip() else last + 1
    return np.append(ids[:length], eos).astype(np.int32), np.append(mask[:length], True)


def _apply_template(
    messages: Messages, tokenizer: Tokenizer, origin: str, tools: Sequence[Mapping[str, Any]], **options: Any
) -> Any:
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


def _eos(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS token, so no completion can end")
    return tokenizer.eos_token_id


def _encode(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]] if texts else []
