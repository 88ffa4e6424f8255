"""Watches engines: restarts those that died or hang, brings them to the current weights, and only then uses them."""

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from rlhf_data.errors import EngineError
from rlhf_rollout.engines.requests import deadline
from rlhf_rollout.protocols import EngineHealth, PauseMode, RolloutEngine
from rlhf_rollout.router import EngineRouter

MAX_RESTARTS = 3
NUM_CHECKS = 3
CHECK_INTERVAL_S = 10.0
_OUTCOMES: dict[PauseMode, str] = {"drain": "drained", "keep": "kept", "restart": "restarted"}


class EngineState(enum.StrEnum):
    """What the supervisor knows about an engine. Only READY engines get requests."""

    STARTING = "starting"  # its process starts
    SYNCING = "syncing"  # it lacks the current weights
    READY = "ready"
    SUSPECT = "suspect"  # a request or a health check failed
    DEAD = "dead"  # its process has ended, or does not answer
    LOST = "lost"  # it was restarted too often


class RestartableEngine(RolloutEngine, Protocol):
    """An engine in another process."""

    def kill(self) -> None:
        """End the process, whatever it does. Another one starts with `restart`."""

    def restart(self) -> None:
        """End the process, whatever it does, and start another one without waiting for it."""

    async def ready(self) -> None:
        """Wait until the process has started. Raises EngineError when it does not start."""


SendWeights = Callable[[Mapping[int, RestartableEngine]], Awaitable[Mapping[int, str]]]
"""Sends the current weights to engines by number; returns why some of them failed. One call runs at a time."""


@dataclass(slots=True)
class _Place:
    """A supervised engine."""

    number: int
    engine: RestartableEngine
    state: EngineState = EngineState.SYNCING
    num_deaths: int = 0  # since its last success
    is_back: bool = True  # since its last death, as `warn` was told
    num_paused: int = 0  # sequences that the last pause for an update found
    alarm: asyncio.Event = field(default_factory=asyncio.Event)  # ends the wait for the next check
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by who takes it to another state


@dataclass(slots=True, eq=False, repr=False)
class EngineSupervisor:
    """Keeps engines running, and tells the router which of them can be used. Use it from one event loop.

    An engine whose request fails, or that misses a periodic health check, gets no more requests until it answers a
    check. After `NUM_CHECKS` missed ones it counts as dead. A dead engine is restarted while `watch` or `synchronize`
    runs, at most `max_restarts` times in a row without a request that it completes. Without a single engine left, the
    run cannot go on.

    An engine gets new weights while no request is on its way: the router holds new ones back, without any deadline, and
    those in flight finish first, are kept, or are restarted, as `at_update` says. If the engine dies meanwhile, the
    router has another one go on with them.

    Attributes:
        engines: started engines, which lack the weights.
        router: sends requests to them; the supervisor attaches them.
        send_weights: see `SendWeights`. Its errors end the run.
        warn: is told what fails and what recovers.
        max_restarts: see above.
        interval_s: seconds between two health checks.
        at_update: what happens to the requests in flight, see `RolloutEngine.pause`.
        on_state: called with an engine's number and its new state.
        updates: sequences that updates found in flight so far, by what became of them: "drained", "kept", "restarted",
            or "cut" if their engine died in the update.
        policy_version: version of the weights that the engines should have; None before `synchronize`.
        error: why the engines cannot be used any more; None while they can.
    """

    engines: Sequence[RestartableEngine]
    router: EngineRouter
    send_weights: SendWeights
    warn: Callable[[str], None]
    _: KW_ONLY
    max_restarts: int = MAX_RESTARTS
    interval_s: float = CHECK_INTERVAL_S
    at_update: PauseMode = "drain"
    on_state: Callable[[int, EngineState], None] = lambda number, state: None
    updates: Counter[str] = field(default_factory=Counter, init=False)
    policy_version: int | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    _places: list[_Place] = field(init=False)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._places = [_Place(number, engine) for number, engine in enumerate(self.engines)]
        for engine in self.engines:
            self.router.attach(engine)
            self.router.suspend(engine)
        self.router.on_result = self._on_result

    @property
    def states(self) -> list[EngineState]:
        """The states of the engines, in the order in which they were given."""
        return [place.state for place in self._places]

    async def watch(self) -> None:
        """Keep all engines running until this call is cancelled. Call it while requests are sent.

        If no engine can be used any more, `error` is set and requests fail.
        """
        await asyncio.gather(*[self._keep(place) for place in self._places])

    async def synchronize(self, policy_version: int) -> None:
        """Send the weights of `policy_version` to the engines, and wait until at least one has them.

        The others follow while `watch` runs, which may run at the same time. Raises EngineError when no engine can be
        used any more, and what `send_weights` raises.
        """
        while True:
            await self._together(self._advance, EngineState.SUSPECT)
            async with AsyncExitStack() as stack:
                places = self._in_state(EngineState.READY, EngineState.SYNCING)
                for place in places:
                    await stack.enter_async_context(place.lock)
                # A check that runs without the lock would take an engine for one that has lost its weights.
                self.policy_version = policy_version
                alive = [place for place in places if place.state in (EngineState.READY, EngineState.SYNCING)]
                await self._bring_up_to_date(alive)
            if self._in_state(EngineState.READY):
                return
            if self.error is not None:
                raise self.error
            await self._together(self._advance, EngineState.DEAD)
            await self._together(self._advance, EngineState.STARTING)

    async def sleep(self) -> None:
        """Have all engines that run free the device's memory, and drop their weights. They need `synchronize` again."""
        self.policy_version = None
        await self._call_all("sleep", False)

    async def wake_up(self) -> None:
        """Have all engines that run take the device's memory back."""
        await self._call_all("wake_up")

    async def _call_all(self, method: str, *arguments: bool) -> None:
        """Call a method of all engines that run. Those that fail count as dead, and their processes are ended.

        The caller relies on it: an engine that cannot sleep would keep memory that others take.
        """

        async def call(place: _Place) -> None:
            try:
                if place.state is EngineState.STARTING:
                    await place.engine.ready()
                    self._move(place, EngineState.SYNCING)
                await getattr(place.engine, method)(*arguments)
            except Exception as error:  # an engine in another process may raise anything
                with suppress(Exception):  # it has ended already
                    place.engine.kill()
                self._bury(place, error)

        running = [state for state in EngineState if state not in (EngineState.DEAD, EngineState.LOST)]
        await self._together(call, *running)

    # -- one engine ----------------------------------------------------------------------------------------------------

    async def _keep(self, place: _Place) -> None:
        """Move an engine from state to state until it is lost, or `error` is set."""
        try:
            while self.error is None and place.state is not EngineState.LOST:
                if place.state is EngineState.READY:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(place.alarm.wait(), self.interval_s)
                await self._advance(place)
        except Exception as error:  # raised by `send_weights`; it must not leave requests waiting
            self._fail(error)

    async def _advance(self, place: _Place) -> None:
        """Take an engine to its next state."""
        async with place.lock:
            match place.state:
                case EngineState.READY | EngineState.SUSPECT:
                    await self._examine(place)
                case EngineState.DEAD:
                    self._move(place, EngineState.STARTING)
                    self._try(place, place.engine.restart)
                case EngineState.STARTING:
                    await self._start(place)
                case EngineState.SYNCING:
                    await self._bring_up_to_date([place])

    def _try(self, place: _Place, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._bury(place, error)

    async def _start(self, place: _Place) -> None:
        try:
            await place.engine.ready()
        except Exception as error:  # whatever kept it from starting may keep it again: the restarts are counted
            self._bury(place, error)
        else:
            self._move(place, EngineState.SYNCING)

    async def _examine(self, place: _Place) -> None:
        """Check the health of an engine, and decide whether it is ready, lacks weights, or is dead."""
        place.alarm.clear()
        try:
            health = await self._health(place)
        except Exception as error:
            self._bury(place, error)
            return
        # Weights that were sent in the middle of a training step are newer.
        has_weights = health.policy_version >= (self.policy_version or 0)
        self._move(place, EngineState.READY if has_weights else EngineState.SYNCING)
        if has_weights:
            self.router.restore(place.engine)

    async def _health(self, place: _Place) -> EngineHealth:
        """Return the health of an engine. Raises when it misses `NUM_CHECKS` checks in a row."""
        for _ in range(NUM_CHECKS - 1):
            with suppress(Exception):  # the next check decides
                return await place.engine.health()
            if place.state is EngineState.READY:
                self._suspect(place)
        return await place.engine.health()

    async def _bring_up_to_date(self, places: Sequence[_Place]) -> None:
        """Send the current weights to engines, whose locks the caller holds, and use those that took them."""
        for place in places:
            self._move(place, EngineState.SYNCING)
            self.router.suspend(place.engine)
        busy = [place for place in places if self.router.num_in_flight(place.engine)]
        try:
            await asyncio.gather(*[self._pause(place) for place in busy])
            await self._send(places)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            # Also those that are given up: nobody ends their processes, where requests would wait.
            await asyncio.gather(*[self._resume(place) for place in busy if place.state is not EngineState.DEAD])
        for place in busy:
            outcome = _OUTCOMES[self.at_update] if place.state is EngineState.SYNCING else "cut"
            self.updates[outcome] += place.num_paused
        for place in places:
            if place.state is not EngineState.SYNCING:
                continue
            self._move(place, EngineState.READY)
            place.alarm.clear()
            self.router.restore(place.engine)
            if not place.is_back:
                place.is_back = True
                self.warn(f"engine {place.number} is back, with weights of version {self.policy_version}")

    async def _pause(self, place: _Place) -> None:
        """Pause an engine. It counts as dead if it fails, or stops answering health checks while requests finish."""
        place.num_paused = self.router.num_in_flight(place.engine)  # until the engine tells
        pausing = asyncio.ensure_future(place.engine.pause(self.at_update))
        try:
            while not (await asyncio.wait([pausing], timeout=self.interval_s))[0]:
                await self._health(place)
            place.num_paused = pausing.result()
        except Exception as error:
            self._bury(place, error)
        finally:
            pausing.cancel()

    async def _send(self, places: Sequence[_Place]) -> None:
        """Send the current weights to the engines that live."""
        engines = {place.number: place.engine for place in places if place.state is EngineState.SYNCING}
        async with self._sending:
            failures = await self.send_weights(engines) if engines else {}
        for number, reason in failures.items():
            self._bury(self._places[number], reason)

    async def _resume(self, place: _Place) -> None:
        """Resume an engine. It counts as dead if it takes longer than a dead one takes to be noticed."""
        try:
            async with deadline(NUM_CHECKS * self.interval_s, "`resume`"):
                await place.engine.resume()
        except Exception as error:
            if place.state is EngineState.SYNCING:
                self._bury(place, error)

    def _move(self, place: _Place, state: EngineState) -> None:
        place.state = state
        self.on_state(place.number, state)

    def _on_result(self, engine: RolloutEngine, error: Exception | None) -> None:
        place = next(place for place in self._places if place.engine is engine)
        if error is None:
            place.num_deaths = 0
        elif place.state is EngineState.READY:
            self._suspect(place)

    def _suspect(self, place: _Place) -> None:
        self._move(place, EngineState.SUSPECT)
        self.router.suspend(place.engine)
        place.alarm.set()

    def _bury(self, place: _Place, reason: object) -> None:
        """Count the death of an engine, and give the engine up if it has died too often."""
        self.router.suspend(place.engine)
        place.alarm.set()  # if it died in an update, `_keep` waits for its next check
        place.num_deaths += 1
        place.is_back = False
        text = f"engine {place.number} failed: {reason}"
        if place.num_deaths <= self.max_restarts:
            self._move(place, EngineState.DEAD)
            self.warn(f"{text}\nit is restarted ({place.num_deaths} of {self.max_restarts})")
            return
        self._move(place, EngineState.LOST)
        self.router.detach(place.engine)
        self.warn(f"{text}\nit is given up after {self.max_restarts} restarts in a row")
        if not self.router.engines:
            message = f"no engine is left; engine {place.number} failed {place.num_deaths} times in a row: {reason}"
            self._fail(EngineError(message))

    def _fail(self, error: Exception) -> None:
        """Make all requests fail: the run cannot go on."""
        self.error = self.error or error  # what fails because all engines are detached is no reason
        for engine in self.router.engines:
            self.router.detach(engine)
        for place in self._places:
            self._move(place, EngineState.LOST)

    # -- all engines ---------------------------------------------------------------------------------------------------

    def _in_state(self, *states: EngineState) -> list[_Place]:
        return [place for place in self._places if place.state in states]

    async def _together(self, action: Callable[[_Place], Awaitable[None]], *states: EngineState) -> None:
        """Run an action for all engines in one of `states` at once."""
        await asyncio.gather(*[action(place) for place in self._in_state(*states)])
