"""Where a request goes: the least loaded engine, another one after a failure, one engine per conversation."""

import asyncio

import numpy as np
import pytest

from record_testing import make_prompt
from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import FinishReason
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter
from simulated import now, simulated

PROMPT = np.array([4, 5], np.int32)


class Engine:
    """Answers after `seconds`, or raises while `broken`; remembers what it was asked."""

    def __init__(self, seconds=0.0, broken=False):
        self.seconds = seconds
        self.broken = broken
        self.asked = []

    async def generate(self, token_ids, sampling, *, drafts=None):
        self.asked.append(sampling)
        await asyncio.sleep(self.seconds)
        if self.broken:
            raise EngineError("broken")
        return [Completion.single([7], [-0.5], FinishReason.STOP, 0)] * sampling.num_samples

    @property
    def num_asked(self):
        return len(self.asked)


async def ask(router, count=1, **options):
    return await asyncio.gather(*[router.generate(PROMPT, SamplingParams(), **options) for _ in range(count)])


async def test_router_spreads_requests_evenly():
    engines = [Engine(0.01) for _ in range(3)]
    await ask(EngineRouter(engines), 9)
    assert [engine.num_asked for engine in engines] == [3, 3, 3]


async def test_router_load_is_counted_in_completions():
    first, second = engines = [Engine(0.05), Engine(0.05)]
    router = EngineRouter(engines)

    large = asyncio.create_task(router.generate(PROMPT, SamplingParams(num_samples=4)))
    await asyncio.sleep(0)
    router.suspend(second)
    state = "engine 0 has 4 completions in flight; engine 1 has 0 completions in flight, suspended"
    assert router.describe() == state
    router.restore(second)
    await asyncio.gather(large, *[router.generate(PROMPT, SamplingParams()) for _ in range(4)])
    # Four completions are as much as four requests of one.
    assert (first.num_asked, second.num_asked) == (1, 4)


async def test_router_retries_elsewhere_and_prefers_engines_that_work():
    broken, works = Engine(broken=True), Engine()
    router = EngineRouter([broken, works])
    for _ in range(3):
        await ask(router)
    assert (broken.num_asked, works.num_asked, router.num_retries) == (1, 3, 1)
    broken.broken, works.broken = False, True
    await ask(router)
    # The one that failed last is asked last, until it has answered again.
    assert (broken.num_asked, works.num_asked, router.num_retries) == (2, 4, 2)
    works.broken = False
    await ask(router)
    assert (broken.num_asked, works.num_asked) == (3, 4)


async def test_router_dead_engine_is_asked_once_and_not_again_in_later_steps():
    dead, works = Engine(broken=True), Engine(0.01)
    router = EngineRouter([dead, works])
    await ask(router)
    for _ in range(5):
        # Many requests per step: a loaded engine that works is still better than an idle dead one.
        await ask(router, 8)
    assert (dead.num_asked, works.num_asked, router.num_retries) == (1, 41, 1)


async def test_router_single_engine_is_asked_again_and_then_the_reasons_are_raised():
    engine = Engine(broken=True)
    router = EngineRouter([engine])
    with pytest.raises(EngineError, match=r"^engine 0: EngineError: broken; engine 0: EngineError: broken$"):
        await ask(router)
    assert (engine.num_asked, router.num_retries) == (2, 1)


async def test_router_attaches_and_detaches_while_requests_run():
    old, new = Engine(0.1), Engine()
    router = EngineRouter([old])

    running = asyncio.create_task(router.generate(PROMPT, SamplingParams()))
    await asyncio.sleep(0.01)
    router.attach(new)
    router.detach(old)
    assert router.engines == [new]
    await router.generate(PROMPT, SamplingParams())
    assert len(await running) == 1
    assert (old.num_asked, new.num_asked) == (1, 1)
    router.detach(new)
    with pytest.raises(EngineError, match=r"no engine is attached\s+hint: attach an engine"):
        await ask(router)


def test_router_attached_twice_or_detached_without_being_there_raises():
    engine = Engine()
    router = EngineRouter([engine])
    with pytest.raises(ConfigError, match="attached already"):
        router.attach(engine)
    with pytest.raises(ConfigError, match="is not attached"):
        router.detach(Engine())
    assert router.engines == [engine]


async def test_router_numbers_of_engines_are_not_used_again():
    first, second = Engine(broken=True), Engine(broken=True)
    router = EngineRouter([first])
    router.detach(first)
    router.attach(second)
    with pytest.raises(EngineError, match=r"^engine 1: "):
        await ask(router)


async def test_router_requests_wait_while_all_engines_are_suspended():
    first, second, third = Engine(), Engine(), Engine()
    router = EngineRouter([first, second])
    router.suspend(first)
    await ask(router, 2)
    assert (first.num_asked, second.num_asked) == (0, 2)

    async def waits_for(change):
        request = asyncio.create_task(router.generate(PROMPT, SamplingParams()))
        await asyncio.sleep(0.02)
        assert not request.done()
        change()
        return await asyncio.wait_for(request, 5)

    def lose_all():
        for engine in (first, second, third):
            router.detach(engine)

    router.suspend(second)
    await waits_for(lambda: router.restore(first))
    router.suspend(first)
    await waits_for(lambda: router.attach(third))
    assert (first.num_asked, second.num_asked, third.num_asked) == (1, 2, 1)
    router.suspend(third)
    with pytest.raises(EngineError, match="no engine is attached"):
        await waits_for(lose_all)
    for method in (router.suspend, router.restore):
        with pytest.raises(ConfigError, match="is not attached"):
            method(first)


async def test_router_sends_a_conversation_elsewhere_while_its_engine_is_suspended():
    first, second = Engine(), Engine()
    router = EngineRouter([first, second])
    await ask(router, conversation="a")
    router.suspend(first)
    await ask(router, conversation="a")
    assert (first.num_asked, second.num_asked) == (1, 1)


async def test_router_restored_engine_is_as_good_as_one_that_never_failed():
    broken, works = Engine(broken=True), Engine()
    router = EngineRouter([broken, works])
    await ask(router)
    broken.broken = False
    router.restore(broken)
    await ask(router)
    assert (broken.num_asked, works.num_asked) == (2, 1)


async def test_router_conversation_stays_on_its_engine_until_that_fails_or_goes():
    first, second = Engine(0.01), Engine(0.01)
    router = EngineRouter([first, second])
    await ask(router, conversation="a")
    # Beside it the first engine is busy, and others go to the second.
    await ask(router, 4, conversation="a")
    assert (first.num_asked, second.num_asked) == (5, 0)
    first.broken = True
    await ask(router, conversation="a")
    first.broken = False
    await ask(router, conversation="a")
    assert (first.num_asked, second.num_asked) == (6, 2)
    router.detach(second)
    await ask(router, conversation="a")
    assert first.num_asked == 7


@simulated
async def test_router_counts_the_seconds_in_which_engines_have_something_to_do():
    first, second = Engine(10.0), Engine(4.0)
    router = EngineRouter([first, second])
    found = {}

    async def at(seconds):
        await asyncio.sleep(seconds - now())
        found[seconds] = router.busy_s

    await at(3)
    long = asyncio.create_task(router.generate(PROMPT, SamplingParams(num_samples=8)))
    await at(5)
    [asyncio.create_task(router.generate(PROMPT, SamplingParams())) for _ in range(2)]
    await at(8)
    router.detach(second)
    await at(11)
    await long
    await at(20)
    second.broken = True
    router.attach(second)
    router.suspend(first)
    with pytest.raises(EngineError):
        await router.generate(PROMPT, SamplingParams())
    await at(30)
    # The first engine from 3 to 13, the second from 5 to 9, and twice 4 s for a request that fails.
    assert found == {3: 0, 5: 2, 8: 8, 11: 12, 20: 14, 30: 22}


async def test_router_forgets_the_conversation_that_was_idle_longest(monkeypatch):
    monkeypatch.setattr("rlhf_rollout.router._MAX_CONVERSATIONS", 2)
    router = EngineRouter([Engine()])
    for name in ("a", "b", "a", "c"):
        await ask(router, conversation=name)
    assert list(router._conversations) == ["a", "c"]


@simulated
async def test_single_turn_keeps_the_spans_of_an_update():
    router = EngineRouter([FakeEngine(script=lambda prompt, seed: [9] * 20 + [0], token_latency_s=0.005)])
    workflow = SingleTurn(router, str)

    task = asyncio.create_task(workflow.run(make_prompt(), SamplingParams(max_tokens=21), "g"))
    await asyncio.sleep(0.042)
    (engine,) = router.engines
    await engine.pause("keep")
    await engine.begin_weight_update(3)
    await engine.finish_weight_update()
    await engine.resume()
    (episode,) = await task
    (rollout,) = episode.rollouts
    assert [span.policy_version for span in rollout.spans] == [None, 0, 3]
    assert rollout.num_response_tokens == 21
    assert rollout.turn_ends.tolist() == [rollout.num_tokens - 1]
