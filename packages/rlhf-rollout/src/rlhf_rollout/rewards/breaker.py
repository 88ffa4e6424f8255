"""Keeps a scorer that always fails from costing its time limit again and again."""

import threading
import time

from rlhf_rollout.rewards.outcomes import Failure

_CHEAP_S = 1.0  # a failure that takes less, and breaks nothing, costs too little to be avoided
_REST_FACTOR = 4.0  # the scorer rests this many times as long as its last failure took


class Breaker:
    """Lets calls through until several in a row were costly failures, then only one call from time to time.

    After a costly failure the scorer rests four times as long as that failure took. May be used from several threads.

    Args:
        max_failures: costly failures in a row after which calls are held back.
    """

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self._num_failures = 0
        self._rests_until = 0.0
        self._rest_s = 0.0
        self._last: Failure | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        return self._num_failures >= self._max_failures

    def refusal(self) -> Failure | None:
        """Return why the scorer must not be called at this time; None if it may be called."""
        with self._lock:
            if self._last is None or self._num_failures < self._max_failures:
                return None
            if time.monotonic() >= self._rests_until:
                self._rests_until = time.monotonic() + self._rest_s  # for other callers, while this one tries
                return None
            detail = (
                f"not called, because {self._num_failures} calls in a row failed; the last one: {self._last.detail}"
            )
            return Failure(self._last.kind, detail, of_sample=False)

    def note(self, failure: Failure | None, seconds: float, *, costly: bool = False) -> bool:
        """Note the outcome of a call that took `seconds`; return whether it is the first that calls are held back for.

        Args:
            failure: None when the call gave rewards.
            seconds: how long it took.
            costly: whether the failure counts although it was quick.
        """
        with self._lock:
            if failure is None or not (costly or seconds >= _CHEAP_S):
                self._num_failures = 0
                return False
            self._last = failure
            self._num_failures += 1
            self._rest_s = _REST_FACTOR * seconds
            self._rests_until = time.monotonic() + self._rest_s
            return self._num_failures == self._max_failures
