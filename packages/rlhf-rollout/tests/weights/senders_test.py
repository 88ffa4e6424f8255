"""Several senders of one weight update: what they send is one call of the engine."""

import asyncio
import gc

import pytest

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket
from rlhf_rollout.weights.senders import Senders, merged

SLOT = TensorSlot("a", "uint8", (2,), 0, 2)


def test_a_call_is_made_once_with_the_parts_of_all_and_its_error_is_everybodys() -> None:
    made = []

    async def note(parts: list[int]) -> None:
        await asyncio.sleep(0)
        made.append(sorted(parts))
        if 9 in parts:
            raise WeightSyncError("not that one")

    async def run() -> None:
        senders = Senders(3)
        calls = [asyncio.ensure_future(senders.join(part, note)) for part in (1, 2)]
        await asyncio.sleep(0.01)
        assert not made and not any(call.done() for call in calls)
        await asyncio.gather(*calls, senders.join(3, note))
        outcomes = await asyncio.gather(*(senders.join(part, note) for part in (7, 8, 9)), return_exceptions=True)
        assert [str(error) for error in outcomes] == ["not that one"] * 3
        await asyncio.gather(*(senders.join(part, note) for part in (4, 5, 6)))
        await Senders(1).join(0, note)
        two = Senders(2)
        await asyncio.gather(two.join(5, note), two.join(6, note))

    asyncio.run(run())
    assert made == [[1, 2, 3], [7, 8, 9], [4, 5, 6], [0], [5, 6]]


def test_a_sender_that_gives_up_ends_the_call_and_the_next_one_begins_anew(caplog) -> None:
    made = []

    async def note(parts: list[int]) -> None:
        made.append(sorted(parts))

    async def run() -> None:
        senders = Senders(3)
        waits, gone = (asyncio.ensure_future(senders.join(part, note)) for part in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(EngineError, match="one of 3 senders"):
            await waits
        assert gone.cancelled()
        alone = asyncio.ensure_future(senders.join(0, note))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.wait([alone])
        await asyncio.gather(*(senders.join(part, note) for part in (3, 4, 5)))

    asyncio.run(run())
    gc.collect()
    assert made == [[3, 4, 5]] and caplog.text == ""  # no error that nobody has read


def test_one_bucket_has_the_handles_of_all_in_the_same_order_whoever_comes_first() -> None:
    one, two = (WeightBucket("ipc", (SLOT,), ((f"GPU-{gpu}", ("opens", gpu)),)) for gpu in (1, 2))
    both = WeightBucket("ipc", (SLOT,), (("GPU-1", ("opens", 1)), ("GPU-2", ("opens", 2))))
    assert merged([one, two]) == merged([two, one]) == both
    shared = WeightBucket("shared_memory", (SLOT,), ("/path", 3))
    assert merged([shared]) is shared
    other = WeightBucket("ipc", (TensorSlot("b", "uint8", (2,), 0, 2),), ())
    with pytest.raises(WeightSyncError, match="not at the same bucket: they begin with a, b"):
        merged([one, other])
