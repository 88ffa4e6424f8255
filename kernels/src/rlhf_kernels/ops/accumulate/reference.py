"""The plain torch twin of `accumulate_`."""

from torch import Tensor


def accumulate_reference_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place, as `accumulate_` does."""
    total.add_(part.view_as(total))
