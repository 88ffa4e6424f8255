"""Examples of what is better than what: pairs, single judged answers, and judged steps."""

from dataclasses import dataclass

import numpy as np

from rlhf_data.errors import DataError
from rlhf_data.sft import SftExample


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """Two answers to one prompt, of which the first is preferred.

    Attributes:
        example_id: the row's id.
        chosen: the prompt with the preferred answer and one EOS; its mask is True for the answer.
        rejected: the same prompt with the other answer.
        margin: by how much the chosen answer is better; None when the data does not say.
    """

    example_id: str
    chosen: SftExample
    rejected: SftExample
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not np.isfinite(self.margin):
            raise DataError(f"{self.example_id}: the margin must be finite, got {self.margin}")

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences."""
        return self.chosen.num_tokens + self.rejected.num_tokens


@dataclass(frozen=True, slots=True)
class UnpairedExample:
    """One answer that was judged good or bad.

    Attributes:
        example_id: the row's id.
        token_ids: [L] int32: prompt, answer, one EOS.
        loss_mask: [L] bool: True for the answer and its EOS.
        is_desirable: the verdict.
    """

    example_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    is_desirable: bool

    def __post_init__(self) -> None:
        checked = SftExample(self.example_id, self.token_ids, self.loss_mask)
        object.__setattr__(self, "token_ids", checked.token_ids)
        object.__setattr__(self, "loss_mask", checked.loss_mask)

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ProcessExample:
    """A solution whose steps were judged one by one.

    Attributes:
        example_id: the row's id.
        token_ids: [L] int32: the problem and the solution, a placeholder token after each step.
        positions: [n] int32: where the placeholders are, ascending; the model's output there judges the step.
        labels: [n] float32: the probability that the step is good, 0.0 or 1.0 for hard labels.
    """

    example_id: str
    token_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("token_ids", np.int32), ("positions", np.int32), ("labels", np.float32)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if self.positions.shape != self.labels.shape or self.positions.ndim != 1 or not len(self.positions):
            raise DataError(
                f"{self.example_id}: {self.positions.size} steps with {self.labels.size} labels; "
                "there must be one label a step, and at least one step"
            )
        if self.positions[0] < 0 or self.positions[-1] >= len(self.token_ids) or (np.diff(self.positions) < 1).any():
            raise DataError(f"{self.example_id}: the steps' positions must ascend within {len(self.token_ids)} tokens")
        if not ((self.labels >= 0) & (self.labels <= 1)).all():
            raise DataError(f"{self.example_id}: the labels of steps must be from 0 to 1, got {self.labels.tolist()}")

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)
