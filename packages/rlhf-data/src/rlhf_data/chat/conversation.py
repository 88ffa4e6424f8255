"""Conversations as token ids, with the mask of the tokens that are trained."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlhf_data.chat.messages import Messages, check_roles, joined_messages
from rlhf_data.chat.template import ANSWER, apply_template, has_generation_marks, render_chat, render_prompt
from rlhf_data.chat.tokens import Tokenizer, encode_completion, encode_continuation, encode_prompts, eos_of
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.rows.row import Row

_OPENING_TAG = re.compile(r"(<\w+>)(\s*)$")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what models think, beside the content of a message


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
    marked = render_chat([*earlier, {"role": "assistant", "content": ANSWER}], tokenizer, **options)
    start = begun["content"]
    # Some templates trim what a message ends with.
    trimmed = "" if before.endswith(start) else start[len(start.rstrip()) :]
    text = trimmed + answer[0]["content"] + ("" if row.is_truncated else marked.rpartition(ANSWER)[2])
    [prompt_ids] = encode_prompts([before], tokenizer, has_special_tokens=True)
    answer_ids = encode_completion(text, tokenizer, before=before, is_truncated=row.is_truncated)
    ids = np.array([*prompt_ids, *answer_ids], np.int32)
    return ids, np.arange(len(ids)) >= len(prompt_ids)


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
    text = render([*messages[:-1], {"role": "assistant", "content": ANSWER}], add_generation_prompt=False)
    answer = messages[-1]["content"]
    if (opening := _OPENING_TAG.search(before)) and answer.lstrip().startswith(opening[1]):
        answer = answer.lstrip().removeprefix(opening[1]).removeprefix(opening[2])
    end = "" if is_truncated else text.partition(ANSWER)[2]
    return answer + end if text.count(ANSWER) == 1 else None


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
    encoded = apply_template(messages, tokenizer, origin, tools, return_assistant_tokens_mask=True, **options)
    ids = np.array(encoded["input_ids"])
    mask = np.array(encoded["assistant_masks"], bool)
    eos = eos_of(tokenizer)
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
