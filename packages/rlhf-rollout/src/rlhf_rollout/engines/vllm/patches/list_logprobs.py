"""Gives sequences the log-probs of their tokens as lists of floats."""

from typing import Any

NEEDS = ("update_from_output",)


def patch(scheduler: Any) -> None:
    """Let the scheduler give each sequence the log-probs of its new tokens as a list of floats.

    vLLM slices arrays of ids, log-probs and ranks for each sequence in each step, though only log-probs are used.
    """
    update = scheduler.update_from_output

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = _StepLogprobs(model_runner_output.logprobs)
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_from_output


class _StepLogprobs:
    """Stands in for vLLM's `LogprobsLists` of one step, of which the scheduler only calls `slice_request`."""

    def __init__(self, rows: Any) -> None:
        self._values = rows.logprobs[:, 0].tolist()
        self._starts = rows.cu_num_generated_tokens

    def slice_request(self, index: int, num_positions: int) -> list[float]:
        start = index if self._starts is None else self._starts[index]
        return self._values[start : start + num_positions]
