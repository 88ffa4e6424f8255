"""Prompts for generation, from a data file: rendered, tokenized, over-long ones dropped and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from rlhf_data.chat import Tokenizer, check_template, render_prompts
from rlhf_data.errors import ConfigError, DataError, with_hint
from rlhf_data.records import Prompt
from rlhf_data.sources import read_rows


@dataclass(frozen=True, slots=True)
class PromptSet(Sequence[Prompt]):
    """The usable prompts of a data file, and what became of the rest.

    Attributes:
        prompts: in the order of the file.
        num_rows: rows read; always `len(prompts) + num_too_long`.
        num_too_long: rows left out because their prompt has more tokens than the limit.
        longest_tokens: tokens of the longest prompt that was read, kept or not.
    """

    prompts: tuple[Prompt, ...]
    num_rows: int
    num_too_long: int
    longest_tokens: int

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self.prompts[index]

    @property
    def summary(self) -> str:
        """One line for people."""
        text = f"{len(self.prompts)} prompts, the longest read has {self.longest_tokens} tokens"
        return f"{text}; {self.num_too_long} of {self.num_rows} left out as too long" if self.num_too_long else text


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    apply_chat_template: bool = False,
    input_template: str | None = None,
    prompt_max_len: int = 1024,
    max_samples: int | None = None,
    source: str = "default",
    source_key: str | None = None,
) -> PromptSet:
    """Load the prompts of a data file.

    Args:
        path: see `rlhf_data.sources.read_rows`.
        tokenizer: the policy's, loaded.
        input_key: the key of the question: text, or a list of messages with `apply_chat_template`.
        label_key: the key of the reference answer; None for no labels.
        apply_chat_template: render the input with the tokenizer's chat template.
        input_template: text with one `{}` for the input; everything else in it is literal.
        prompt_max_len: tokens. A longer prompt is left out and counted, never cut.
        max_samples: read only that many rows.
        source: the data source's name in every prompt.
        source_key: the key of the data source's name in a row, instead of `source`.

    Returns:
        The prompts, each with the id `<file name>:<line>`.

    Raises:
        DataError: see `read_rows`; a missing key or a broken cell (file and line); every prompt too long.
        ConfigError: options that do not fit each other or the tokenizer.
    """
    if prompt_max_len < 1:
        raise ConfigError(f"prompt_max_len must be at least 1, got {prompt_max_len}")
    check_template(tokenizer, apply_chat_template=apply_chat_template, input_template=input_template)
    rows = read_rows(path, max_rows=max_samples)
    texts, encoded = render_prompts(
        rows, tokenizer, input_key=input_key, apply_chat_template=apply_chat_template, input_template=input_template
    )
    labels = [None if label_key is None else row.label(label_key) for row in rows]
    sources = [source if source_key is None else row.text(source_key) for row in rows]
    prompts = []
    for row, text, label, origin, token_ids in zip(rows, texts, labels, sources, encoded, strict=True):
        if not token_ids:
            raise DataError(f"{row.origin}: the tokenizer makes no token of {text!r}")
        if len(token_ids) <= prompt_max_len:
            prompts.append(Prompt(f"{row.path.name}:{row.line}", token_ids, text, label, origin))
    longest = max(map(len, encoded))
    if not prompts:
        raise DataError(
            with_hint(
                f"all {len(rows)} prompts of {path} are longer than prompt_max_len {prompt_max_len}",
                f"the shortest has {min(map(len, encoded))} tokens, the longest {longest}: raise --prompt_max_len",
            )
        )
    return PromptSet(tuple(prompts), len(rows), len(rows) - len(prompts), longest)
