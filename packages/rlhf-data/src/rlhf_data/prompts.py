"""Prompts for generation: rendered and tokenized rows. Prompts above a length are left out and counted."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.messages import row_messages
from rlhf_data.chat.tokens import Tokenizer, encode_prompts
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.images.reader import ImageReader, PartsTokenizer
from rlhf_data.images.rows import take_image_files
from rlhf_data.records import Prompt
from rlhf_data.rows.row import Counts, RowErrors, unknown_id
from rlhf_data.rows.sources import Rows


def check_has_images(found: Sequence[Any], flag: str, image_key: str | None) -> None:
    """Raise DataError if none of the prompts or examples of a flag has images, though there is an `image_key`."""
    if image_key is not None and not any(one.images for one in found):
        message = f"no row of {flag} has images, neither under `{image_key}` nor in its messages"
        raise DataError(message, hint="name their key with ``image_key``, or drop it")


@dataclass(frozen=True, slots=True)
class PromptSet(Sequence[Prompt]):
    """The usable prompts, in the order of their rows, and counts of those left out."""

    prompts: tuple[Prompt, ...]
    counts: Counts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int | slice) -> Any:
        return self.prompts[index]

    @property
    def summary(self) -> str:
        """One line for people."""
        return self.counts.summary(f"{len(self.prompts)} prompts")


def load_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    apply_chat_template: bool = False,
    input_template: str | None = None,
    tools_key: str | None = None,
    prompt_max_len: int = 1024,
    num_ids: int | None = None,
    skip_bad_rows: bool = False,
    source: str | None = "default",
    source_key: str | None = None,
    extra_keys: Sequence[str] = (),
    image_key: str | None = None,
    reader: ImageReader | None = None,
) -> PromptSet:
    """Load prompts, each with the id `<file name>:<line>`, with folders where sources have one file name.

    Args:
        rows: see `rlhf_data.rows.sources.open_sources`.
        tokenizer: the policy's tokenizer, loaded.
        input_key: the key of the question: text, or a list of messages with `apply_chat_template`.
        label_key: the key of the reference answer; None if rows have none.
        apply_chat_template: render the input with the tokenizer's chat template.
        input_template: text with one `{}` for the input; everything else in it is literal.
        tools_key: the key of the tools, which the chat template writes; see `rlhf_data.chat.messages.row_tools`.
        prompt_max_len: largest number of tokens per prompt. Longer prompts are left out and counted, never cut.
        num_ids: number of token ids that the model knows; a row with another one cannot be used. None: it knows all.
        skip_bad_rows: leave out any number of rows that cannot be used. Otherwise more than 1 % is an error.
        source: name of the data source, stored in every prompt; None for the name of each row's file or data set.
        source_key: the key under which a row names its data source; replaces `source`.
        extra_keys: the keys of further cells, see `Prompt.extra`.
        image_key: the key of a row's images, which are files; see `rlhf_data.images.rows.take_images`. None for text
            alone.
        reader: reads the images, if there is an `image_key`.

    Raises:
        DataError: too many rows cannot be used (the message shows the first with file and line), or all prompts are too
            long.
        ConfigError: options that exclude each other or do not suit the tokenizer.
    """
    if prompt_max_len < 1:
        raise ConfigError(f"prompt_max_len must be at least 1, got {prompt_max_len}")
    template = InputTemplate(
        tokenizer=tokenizer if reader is None else PartsTokenizer(tokenizer, reader),
        apply_chat_template=apply_chat_template,
        input_template=input_template,
        tools_key=tools_key,
    )
    errors = RowErrors(skip_bad_rows=skip_bad_rows)
    drafts = []
    for row in rows.read(errors):
        try:
            images: tuple[str, ...] = ()
            if image_key is not None:
                row, images = take_image_files(row, input_key, image_key)
            text = template.render(row, input_key)
            label = None if label_key is None else row.label(label_key)
            named = row.source_name if source is None else source
            origin = named if source_key is None else row.text(source_key)
            messages = tuple(row_messages(row, input_key)) if apply_chat_template else None
            extra = {key: row.plain(key) for key in extra_keys}
            drafts.append((row, text, label, origin, messages, extra, images))
        except DataError as error:
            errors.add(error)
    encoded = encode_prompts([text for _, text, *_ in drafts], tokenizer, has_special_tokens=apply_chat_template)
    prompts = []
    lengths = []
    digest = hashlib.blake2b(digest_size=8)
    for (row, text, *known), token_ids in zip(drafts, encoded, strict=True):
        if reader is not None and token_ids:
            try:
                token_ids = reader.expand_prompt(token_ids, known[-1], row.origin)
            except DataError as error:
                errors.add(error)
                continue
        if not token_ids:
            errors.add(f"{row.origin}: the tokenizer makes no token of {text!r}")
        elif num_ids is not None and max(token_ids) >= num_ids:
            errors.add(unknown_id(row, max(token_ids), tokenizer, num_ids))
        else:
            lengths.append(len(token_ids))
            if len(token_ids) > prompt_max_len:
                continue
            prompts.append(Prompt(row.row_id, token_ids, text, *known))
            digest.update(row.digest((input_key, label_key, tools_key, source_key, image_key, *extra_keys)))
    num_rows = len(lengths) + errors.num_bad
    errors.check(num_rows)
    if not prompts:
        message = f"all {len(lengths)} prompts of {rows.name} are longer than ``prompt_max_len={prompt_max_len}``"
        hint = f"the shortest has {min(lengths)} tokens, the longest {max(lengths)}: raise ``prompt_max_len``"
        raise DataError(message, hint=hint)
    numbers = (num_rows, len(lengths) - len(prompts), errors.num_bad, max(lengths))
    return PromptSet(tuple(prompts), Counts(*numbers, tuple(errors.first), digest.hexdigest()))
