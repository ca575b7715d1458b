"""When a volume that could not be opened is tried again: under trio's mock clock, which jumps to the next due time."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.core.config import POLL_S
from fusefs.core.errors import NoStore
from fusefs.core.events import Event
from fusefs.service import volume_loop
from fusefs.service.forker import Forker
from fusefs.service.inotify_watches import InotifyWatches
from fusefs.service.open_volume import Elsewhere, OpenVolume
from fusefs.service.shared_context import ServiceContext
from fusefs.service.volume_loop import VolumeLoop
from tests.support.read_configs import read_config
from tests.support.service_timers import REAL

DAY_S = 86_400.0


class Opening:
    """A volume that can't be opened, and when that was tried."""

    def __init__(self, context: ServiceContext, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
        self._context = context
        self._monkeypatch = monkeypatch
        self.events = events

    def attempts_s(self, error: Exception, *, stays: bool = True, event_pause_s: float = math.inf) -> list[float]:
        """When a service tries to open it in the course of a day.

        event_pause_s  between two changes there, of which the kernel notifies the service
        """
        attempts_s: list[float] = []

        async def open_() -> OpenVolume:
            attempts_s.append(trio.current_time())
            raise error

        async def change(loop: VolumeLoop) -> None:
            while True:
                await trio.sleep(event_pause_s)
                loop.wake()

        async def body() -> None:
            loop = VolumeLoop(self._context, b"/volume", stays=stays)
            self._monkeypatch.setattr(loop, "_open", open_)
            with trio.move_on_after(DAY_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(change, loop)
                    await loop.run()
                    nursery.cancel_scope.cancel()

        trio.run(body, clock=trio.testing.MockClock(autojump_threshold=0.0))
        return attempts_s


@pytest.fixture
def opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    monkeypatch.setattr(volume_loop, "boot_s", trio.current_time)
    events = list[Event]()
    with Forker() as forker, InotifyWatches() as watcher:
        context = ServiceContext(forker, watcher, read_config([]), bytes(tmp_path), events.append, lambda: None)
        yield Opening(context, events, monkeypatch)


def pauses_s(attempts_s: list[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(attempts_s)]


def test_a_volume_that_fails_rests_twice_as_long_each_time_up_to_an_hour(opening: Opening) -> None:
    rests_s = pauses_s(opening.attempts_s(OSError(errno.EIO, "Input/output error")))
    assert rests_s[:7] == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0]
    assert set(rests_s[7:]) == {REAL.last_rest_pause_s}
    assert {event.kind.value for event in opening.events} == {"broken"}


def test_changes_in_a_volume_that_rests_do_not_end_its_rest(opening: Opening) -> None:
    error = OSError(errno.EIO, "Input/output error")
    assert pauses_s(opening.attempts_s(error, event_pause_s=50.0))[:4] == [60.0, 120.0, 240.0, 480.0]


def test_a_volume_of_another_reaper_is_tried_again_each_minute(opening: Opening) -> None:
    assert set(pauses_s(opening.attempts_s(Elsewhere(b"/volume")))) == {REAL.elsewhere_pause_s}
    assert opening.events == []


def test_a_volume_that_is_named_is_waited_for(opening: Opening) -> None:
    attempts_s = opening.attempts_s(NoStore(b"/volume"))
    assert set(pauses_s(attempts_s)) == {float(POLL_S)}
    assert len(attempts_s) == DAY_S / POLL_S


def test_a_volume_that_is_not_named_is_given_up_at_the_third_attempt(opening: Opening) -> None:
    assert opening.attempts_s(NoStore(b"/volume"), stays=False) == [0.0, POLL_S, 2 * POLL_S]
