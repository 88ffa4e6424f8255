"""Texts that end a completion: engines look for them token by token."""

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.pretrained import load_tokenizer
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.protocols import SamplingParams

Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"  # what decoders write for bytes that are no character yet
_CHARACTER_BYTES = 4  # at most
# Where transformers has the methods of tokenizers that add nothing to their backend but the cleaning of spaces.
_PLAIN_DECODERS = {"transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"}


class StopWatch:
    """Finds the token of one completion that completes a text of `SamplingParams.stop`.

    A token is decoded together with the tokens before it whose text ended last, because the text of a token depends on
    what is before it. A character may be made of several tokens.

    Args:
        sampling: its `stop` texts, and `min_tokens`, within which no text ends a completion.
        decode: returns the text of token ids, special tokens included.
        written: tokens of the completion that are there before; `min_tokens` are counted from their end.
    """

    def __init__(self, sampling: SamplingParams, decode: Decode, written: Sequence[int] = ()) -> None:
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        self._decode = decode
        self._num_kept = max(map(len, sampling.stop)) - 1 + _CHARACTER_BYTES
        self._num_tokens = 0
        self._token_ids: list[int] = []  # those decoded last, then those whose character is not complete
        self._num_decoded = 0  # how many of `_token_ids` were decoded last
        self._before = ""  # the last characters of the text so far, in which a text of `stop` may begin
        for token_id in written:
            self.completes(token_id)
        self._num_tokens = 0

    def completes(self, token_id: int) -> bool:
        """Add the next token; return whether it completes a text."""
        self._num_tokens += 1
        self._token_ids.append(token_id)
        known = self._decode(self._token_ids[: self._num_decoded])
        text = self._decode(self._token_ids)
        num_new = len(self._token_ids) - self._num_decoded
        if text.endswith(_BROKEN) and num_new < _CHARACTER_BYTES:
            return False
        self._token_ids = self._token_ids[self._num_decoded :]
        self._num_decoded = num_new
        # Bytes at the end that were no character may be the beginning of one now.
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, text, strict=False)))
        size = max(len(self._before) - len(known) + num_same, 0)
        whole = self._before[:size] + text[num_same:]
        self._before = whole[-self._num_kept :]
        # A text that ended before this token did so within `min_tokens`.
        found = any(whole.find(one, max(0, size + 1 - len(one))) >= 0 for one in self._stop)
        return found and self._num_tokens > self._min_tokens


def texts_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one text, as OpenAI's clients may write it, or several as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def before_stop(text: str, stop: Collection[str]) -> str:
    """Return a text up to the first text of `stop` in it."""
    return text[: min((text.index(one) for one in stop if one in text), default=len(text))]


@functools.cache
def decoder(tokenizer: str | Path | None) -> Decode:
    """Return the function that decodes token ids with a folder's tokenizer, special tokens included; None: as bytes.

    Raises ConfigError for a folder without a tokenizer.
    """
    loaded = ByteTokenizer() if tokenizer is None else load_tokenizer(tokenizer)
    # What transformers adds around the decoder takes several times as long as decoding a few tokens.
    backend = getattr(loaded, "backend_tokenizer", loaded)
    return functools.partial(backend.decode, skip_special_tokens=False)


def answer_decoder(tokenizer: Any) -> Callable[[np.ndarray], str]:
    """Return the function that decodes the token ids of an answer, [n], as `tokenizer` does without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = {getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")}
    if backend is None or tokenizer.clean_up_tokenization_spaces or not own <= _PLAIN_DECODERS:
        return functools.partial(tokenizer.decode, skip_special_tokens=True)
    return lambda token_ids: backend.decode(token_ids.tolist(), skip_special_tokens=True)
