"""Keeps a scorer that always fails from costing its time limit again and again."""

import threading
import time
from collections import Counter
from dataclasses import dataclass

from rlhf_data.records import VerdictKind

_CHEAP_S = 1.0  # a failure that takes less, and breaks nothing, costs too little to be avoided
_REST_FACTOR = 4.0  # the scorer rests this many times as long as its last failure took


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave no rewards.

    Attributes:
        kind: `timeout` or `crash`.
        detail: the reason, for people.
        of_sample: whether a single sample of the call may be at fault.
        is_invalid: whether the scorer returned a result that cannot be used.
    """

    kind: VerdictKind
    detail: str
    of_sample: bool = True
    is_invalid: bool = False


class Breaker:
    """Lets calls through until several in a row were costly failures, then only one call from time to time.

    After a costly failure the scorer rests four times as long as that failure took. May be used from several threads.

    Args:
        max_failures: costly failures in a row after which calls are held back. At most half of them may be for the same
            prompt, so that one prompt alone does not hold back the calls for all others.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._most_per_prompt = (max_failures + 1) // 2
        self._failures: Counter[str | None] = Counter()  # costly ones in a row, by prompt
        self._num_counted = 0
        self._rests_until = 0.0
        self._rest_s = 0.0
        self._last: Failure | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        return self._num_counted >= self._max_failures

    def refusal(self) -> Failure | None:
        """Return why the scorer must not be called at this time; None if it may be called."""
        with self._lock:
            if self._last is None or not self.is_open:
                return None
            if time.monotonic() >= self._rests_until:
                self._rests_until = time.monotonic() + self._rest_s  # for other callers, while this one tries
                return None
            num_failures = self._failures.total()
            detail = f"not called, because {num_failures} calls in a row failed; the last one: {self._last.detail}"
            return Failure(self._last.kind, detail, of_sample=False)

    def note(
        self, failure: Failure | None, seconds: float, *, costly: bool = False, prompt_id: str | None = None
    ) -> bool:
        """Note the outcome of a call that took `seconds`; return whether it is the first that calls are held back for.

        Args:
            failure: None when the call gave rewards.
            seconds: how long it took.
            costly: whether the failure counts although it was quick.
            prompt_id: the prompt whose rollouts the call was for; None if it was for several prompts.
        """
        with self._lock:
            if failure is None or not (costly or seconds >= _CHEAP_S):
                self._failures.clear()
                self._num_counted = 0
                return False
            self._last = failure
            self._failures[prompt_id] += 1
            self._rest_s = _REST_FACTOR * seconds
            self._rests_until = time.monotonic() + self._rest_s
            counts = prompt_id is None or self._failures[prompt_id] <= self._most_per_prompt
            self._num_counted += counts
            return counts and self._num_counted == self._max_failures
