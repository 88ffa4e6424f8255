"""Arrays that threads read ahead and keep."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlhf_data.images.ahead import ReadAhead


class Source:
    """Makes 60 + 40 bytes of a number; says which it has made, and has some of them wait or fail."""

    def __init__(self, failing=()):
        self.made = []
        self.failing = set(failing)
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, key):
        assert self.gate.wait(10)
        self.made.append(key)
        if key in self.failing:
            raise ValueError(f"{key} is damaged")
        return {"pixels": np.full(60, key, np.uint8), "mask": np.zeros(5)}


def numbers(found):
    return [int(arrays["pixels"][0]) for arrays in found]


def test_many_who_ask_get_their_order_and_each_is_read_once():
    source = Source()
    kept = ReadAhead(source, 10_000)
    source.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(kept.get, keys) for keys in ([3, 1, 2], [1, 1, 3], [2, 4], [4, 3, 2, 1])]
        source.gate.set()
        found = [numbers(future.result(30)) for future in asking]
    assert found == [[3, 1, 2], [1, 1, 3], [2, 4], [4, 3, 2, 1]]
    assert sorted(source.made) == [1, 2, 3, 4]


def test_what_was_asked_for_longest_ago_makes_room():
    source = Source()
    kept = ReadAhead(source, 350)
    for key in (1, 2, 3, 1, 4):  # 2 must go
        kept.get([key])
    assert numbers(kept.get([1, 3, 4])) == [1, 3, 4]
    assert source.made == [1, 2, 3, 4]
    kept.get([2])
    assert source.made == [1, 2, 3, 4, 2]
    large = ReadAhead(source, 50)
    assert numbers(large.get([5, 6, 5])) == [5, 6, 5]  # more than there is room for


def test_reading_starts_before_anybody_waits_and_takes_half_of_the_room():
    source = Source()
    kept = ReadAhead(source, 600)
    kept.get([0])
    kept.start(iter([7, 7, 8, 9, 10]))
    kept.run(lambda key: None, range(100))  # behind what was started
    source.gate.clear()
    assert numbers(kept.get([9, 8, 7])) == [9, 8, 7]  # without reading, which would wait
    assert sorted(source.made) == [0, 7, 8, 9]


def test_an_error_is_of_the_first_that_fails_and_another_try_reads_again():
    source = Source(failing=[2, 3])
    kept = ReadAhead(source, 10_000)
    kept.start([3, 2, 1])
    for _ in range(2):
        with pytest.raises(ValueError, match="2 is damaged"):
            kept.get([1, 2, 3])
    with pytest.raises(ValueError, match="3 is damaged"):
        kept.get([3])  # nothing is being read now
    source.failing.clear()
    assert numbers(kept.get([1, 2, 3])) == [1, 2, 3]
    assert source.made.count(1) == 1


def test_a_forked_process_has_threads_of_its_own():
    kept = ReadAhead(Source(), 10_000)
    kept.get([1])
    child = os.fork()
    if child == 0:
        os._exit(0 if numbers(kept.get([2, 1])) == [2, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
