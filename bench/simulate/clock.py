"""A simulated clock: what happens next happens now, and no time passes between.

Two kinds of things live by it. Steps are generators, which yield what they wait for: the many calls of workers. Actors
are functions as they are, which call `sleep` and wait for a `Signal`: the engine's own loop, which is not to know that
time is simulated. Each actor is a thread, but one at a time runs, and which one is decided by the clock alone, so
that a seed gives the same run each time. Whoever waits lets happen what is next: with one actor no thread ever waits.
"""

import heapq
import threading
from collections.abc import Callable, Generator
from itertools import count
from typing import Any

Resume = Callable[[], None]
Wait = Callable[[Resume], None]
"""Begins something, and calls what it is given when that is over."""
Steps = Generator[Wait, None, Any]


class SimulatedClock:
    """Seconds since the beginning, and what is to happen when (engine.pace.MonotonicClock)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Resume | _Actor]] = []
        self._numbers = count()
        self._running: _Actor | None = None
        self._actors: set[_Actor] = set()
        self._is_over = threading.Semaphore(0)
        self._error: BaseException | None = None

    def monotonic(self) -> float:
        """See MonotonicClock."""
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        """See MonotonicClock; of an actor."""
        actor = self.here()
        self.after(seconds, actor)
        self.wait(actor)

    def after(self, seconds: float, happens: "Resume | _Actor") -> None:
        """Have something happen then; of what is to happen at one moment, first what was asked for first."""
        heapq.heappush(self._events, (self.now_s + max(seconds, 0.0), next(self._numbers), happens))

    def start(self, steps: Steps, then: Callable[[Any], None] = lambda _result: None) -> None:
        """Begin steps now; `then` is called with what they return."""

        def go_on() -> None:
            try:
                wait = next(steps)
            except StopIteration as end:
                then(end.value)
            else:
                wait(go_on)

        go_on()

    def act(self, work: Callable[[], None]) -> None:
        """Have an actor begin at this moment."""
        actor = _Actor(lambda: self._live(actor, work))
        self._actors.add(actor)
        self.after(0.0, actor)

    def run(self) -> None:
        """Let time pass until no actor is left; without any, until nothing is to happen any more.

        Raises  what an actor, or what happens, raises
        """
        if not self._actors:
            self._next_actor()
            return
        self._hand_over()
        self._is_over.acquire()
        if self._error is not None:
            raise self._error

    def here(self) -> "_Actor":
        """Who runs now."""
        assert self._running is not None, "only an actor can wait"
        return self._running

    def wait(self, actor: "_Actor") -> None:
        """Called by an actor: let happen what is next, until it is its own turn."""
        found = self._next_actor()
        if found is not actor:
            self._let(found)
            actor.may_run.acquire()
        self._running = actor

    def _next_actor(self) -> "_Actor | None":
        """Let all happen up to an actor's turn."""
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            if isinstance(happens, _Actor):
                return happens
            happens()
        return None

    def _let(self, actor: "_Actor | None") -> None:
        if actor is None:
            raise RuntimeError(f"{len(self._actors)} actors wait for what never happens")
        actor.go_on()

    def _live(self, actor: "_Actor", work: Callable[[], None]) -> None:
        try:
            self._running = actor
            work()
            self._actors.discard(actor)
            if self._actors:
                self._hand_over()
                return
        except BaseException as error:
            self._error = error
        self._is_over.release()

    def _hand_over(self) -> None:
        self._let(self._next_actor())


class Signal:
    """Set from anywhere; one actor waits for it."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._is_set = False
        self._waits: _Actor | None = None
        self._n_waits = 0

    def set(self) -> None:
        """Let the actor go on, or not wait at all."""
        self._is_set = True
        self._wake(self._n_waits)

    def wait(self, seconds: float) -> None:
        """Until it is set, but no longer than that; then it is not set any more."""
        if not self._is_set:
            self._n_waits += 1
            self._waits, number = self._clock.here(), self._n_waits
            self._clock.after(seconds, lambda: self._wake(number))
            self._clock.wait(self._waits)
        self._is_set = False

    def _wake(self, number: int) -> None:
        if number == self._n_waits and self._waits is not None:
            actor, self._waits = self._waits, None
            self._clock.after(0.0, actor)


class _Actor:
    """A thread that runs when it is let."""

    def __init__(self, live: Callable[[], None]) -> None:
        self.may_run = threading.Semaphore(0)
        self._thread = threading.Thread(target=live, daemon=True)

    def go_on(self) -> None:
        """Let it run; who calls this waits, or ends."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self.may_run.release()
