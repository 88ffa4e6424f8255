"""Process reward models: a language model judges each step of a response at a placeholder that follows the step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Unpack

import numpy as np
import torch

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import LoadOptions, load_config, load_reference, load_tokenizer
from rlhf_models.reward import InputLimits, check_sequences, length_batches

Sample = tuple[np.ndarray, np.ndarray]  # token ids [L] int32, and which of them the policy wrote, [L] bool
Steps = list[tuple[int, float]]  # position of a step's last token, and the probability that the step is good

_KEY = "process_reward"  # in config.json


@dataclass(frozen=True, slots=True)
class StepFormat:
    """The token ids by which a process reward model is asked; they are stored in its config.json.

    Attributes:
        placeholder: follows each step. The model answers with the token after it.
        good, bad: the answers. The probability of a good step is the softmax over their two logits.

    Raises:
        ConfigError: an id is no token id, or both answers are the same.
    """

    placeholder: int
    good: int
    bad: int

    def __post_init__(self) -> None:
        ids = (self.placeholder, self.good, self.bad)
        if self.good == self.bad or not all(type(index) is int and index >= 0 for index in ids):
            raise ConfigError(f"{_KEY} of a model's config.json is {asdict(self)}; it must be token ids, two answers")

    @property
    def fields(self) -> dict[str, Any]:
        """The field of config.json that stores the format."""
        return {_KEY: asdict(self)}


def stored_step_format(config: Any) -> StepFormat | None:
    """Return the format stored in a model's config, or None for a model that judges no steps.

    Raises ConfigError for a format that is not valid.
    """
    fields = getattr(config, _KEY, None)
    if fields is None:
        return None
    names = [*StepFormat.__dataclass_fields__]
    if not isinstance(fields, dict) or sorted(fields) != sorted(names):
        message = f"{_KEY} of a model's config.json is {fields!r}"
        raise ConfigError(message, hint=f"it must have the token ids {', '.join(names)}")
    return StepFormat(**fields)


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Return the positions of the last tokens of steps, ascending.

    A step ends with the token that completes the separator, or at the end. Blank steps are none: their tokens belong
    to the next step.

    Args:
        pieces: the text of each token; "" for special tokens.
        separator: such as a newline; "" makes all tokens one step.
    """
    text = "".join(pieces)
    until = np.cumsum([len(piece) for piece in pieces])  # characters up to the end of each token
    ends: list[int] = []
    start = 0  # where the step begins, in characters
    at = 0
    while separator and (found := text.find(separator, at)) >= 0:
        at = found + len(separator)
        if text[start:found].replace(separator, "").strip():
            ends.append(int(np.searchsorted(until, at)))
            start = at
    if text[start:].replace(separator or " ", "").strip():
        ends.append(len(pieces) - 1)
    return sorted(set(ends))


class StepJudge:
    """A frozen process reward model that judges the steps of responses.

    The model reads the policy's tokens and a placeholder after each step. If the policy writes placeholders itself, its
    steps end there, and none are added.

    Args:
        path: a folder or hub name of a language model whose config has a `StepFormat`.
        separator: the text that ends a step; see `step_ends`.
        device: torch's name of the device.
        batch_size: sequences per forward pass at most. A CPU runs each by itself, as in `score_sequences`.
        options: see `LoadOptions`.

    Attributes:
        model: the language model.

    Raises:
        ConfigError: the model cannot be loaded, or has no format.
    """

    def __init__(
        self, path: str, separator: str, *, device: str, batch_size: int, **options: Unpack[LoadOptions]
    ) -> None:
        steps = stored_step_format(load_config(path))
        if steps is None:
            message = f"the model {path} judges no steps: its config.json has no {_KEY}"
            raise ConfigError(message, hint="`rlhf prm` trains such models")
        self._steps = steps
        self._separator = separator
        self.model = load_reference(path, **options).to(device)
        self._limits = InputLimits.of(self.model.model)
        self._tokenizer = load_tokenizer(path)
        self._device = torch.device(device)
        self._batch_size = 1 if self._device.type == "cpu" else batch_size

    def __call__(self, samples: Sequence[Sample]) -> list[Steps]:
        """Return the judged steps of each sample, in order.

        Args:
            samples: token ids [L] int32, and which of them the policy wrote, [L] bool. A run of these ends with a step.

        Raises:
            DataError: as `check_sequences`. Placeholders count.
        """
        asked = [self._with_placeholders(ids, mask) for ids, mask in samples]
        check_sequences([tokens for tokens, _ in asked], self._limits, "the process reward model")
        found: list[Steps] = [[] for _ in samples]
        for batch in length_batches([len(tokens) for tokens, _ in asked], self._batch_size):
            rows = [row for row in batch if asked[row][1]]
            if rows:
                probabilities = iter(self._probabilities([asked[row] for row in rows]))
            for row in rows:
                found[row] = [(end, next(probabilities)) for _, end in asked[row][1]]
        return found

    @torch.inference_mode()
    def _probabilities(self, asked: Sequence[tuple[list[int], list[tuple[int, int]]]]) -> list[float]:
        """Return the probability of a good step at each placeholder, sequence by sequence."""
        batch = TokenBatch.padded([tokens for tokens, _ in asked], 0, self._device)
        width = batch.input_ids.shape[1]
        index = [row * width + at for row, (_, places) in enumerate(asked) for at, _ in places]
        logits = self.model(batch, logits_after=torch.tensor(index, device=self._device))
        return logits[:, [self._steps.good, self._steps.bad]].double().softmax(-1)[:, 0].tolist()

    def _with_placeholders(self, ids: np.ndarray, mask: np.ndarray) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens that the model reads, and per step its placeholder's place there and its end in `ids`."""
        if own := np.flatnonzero(mask & (ids == self._steps.placeholder)).tolist():
            return ids.tolist(), [(at, at) for at in own]
        tokens: list[int] = []
        places = []
        start = 0
        for is_policy, members in groupby(mask.tolist()):
            run = ids[start : start + len(list(members))].tolist()
            pieces = self._pieces(run) if is_policy else []
            first = 0
            for last in step_ends(pieces, self._separator):
                # Special tokens at the end, such as the one that ends a response, come after the placeholder.
                cut = max((at + 1 for at in range(first, last + 1) if pieces[at]), default=first)
                tokens += [*run[first:cut], self._steps.placeholder]
                places.append((len(tokens) - 1, start + last))
                tokens += run[cut : last + 1]
                first = last + 1
            tokens += run[first:]
            start += len(run)
        return tokens, places

    def _pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token, "" for special tokens."""
        special = set(self._tokenizer.all_special_ids)
        return ["" if index in special else self._tokenizer.decode([index]) for index in ids]
