"""The service notes what orphans take, without being asked, while nobody else uses the disk."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import cast

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import ContainerId
from fusefs.core.pacing import AT_ONCE, HOLD, Speed
from fusefs.linux.kernel import Kernel
from fusefs.service import timers
from fusefs.service.forker import Child, _WhenIdle
from fusefs.service.messages import Measure
from fusefs.service.timers import ServiceTimers
from fusefs.service.user_state import _MOST_MEASURED, FolderPart
from fusefs.store.container import HeldContainer, hold
from tests.support.service_process import QUICK, places, service
from tests.support.small_orphans import orphan_in
from tests.support.store_verbs import assert_silent, entries, own, place, restore
from tests.support.volume_under_service import aged

BESIDE_OTHERS = Speed(is_alone=False, share=0.1)


@pytest.mark.needs("root")
@pytest.mark.timeout(180)
def test_the_service_notes_the_size_of_what_is_a_minute_old(volume: Path) -> None:
    old = aged(volume, "old", 3600, size_mb=1)
    new = orphan_in(volume, "new").id
    with places() as base, service(base, volume, config=QUICK) as running:
        running.until(lambda: "size" in json.loads((place(volume, old) / "record.json").read_text()))
        running.until(lambda: running.volume(volume).n_due == 0)
    sizes = {entry.id: entry.size for entry in entries(volume)}
    noted = sizes[ContainerId(old)]
    assert noted is not None
    assert noted.n_bytes >= 1 << 20
    assert sizes[ContainerId(new)] is None
    assert_silent(volume)


class Told:
    """A child that was told a tempo."""

    def __init__(self, tempo: Speed) -> None:
        self.now = tempo
        self.is_stopped = False

    def tempo(self) -> Speed:
        return self.now

    def is_told_to_stop(self) -> bool:
        return self.is_stopped


def test_beside_others_it_holds_and_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(AT_ONCE)
    idle = _WhenIdle(cast(Child, told))
    assert (idle.tempo(), idle.stops()) == (AT_ONCE, False)
    monkeypatch.setattr(timers, "current", ServiceTimers(beside_others_limit_s=0.0))
    told.now = HOLD  # another user's turn: that is waited for
    assert (idle.tempo(), idle.stops()) == (HOLD, False)
    told.now = BESIDE_OTHERS
    assert (idle.tempo(), idle.stops()) == (HOLD, True)
    told.now = AT_ONCE
    assert (idle.tempo(), idle.stops()) == (AT_ONCE, False)
    told.is_stopped = True
    assert idle.stops()


def test_what_could_not_be_measured_is_tried_later_and_not_for_ever() -> None:
    part = FolderPart(b"/v", 10, 0)
    part.looked("", 0.0, 0)
    part.measure_at("a", 0.0)
    now_s, n, pause_s = 0.0, 0, ServiceTimers().measure_pause_s
    while (order := part.next_order(now_s)) is not None:
        assert order == Measure(b"/v", ["a"], when_idle=True)
        assert part.urgent_at_s() > now_s
        n += 1
        part.put_back(now_s)
        assert part.next_order(now_s + pause_s - 1) is None
        now_s += pause_s
    assert n == _MOST_MEASURED


@pytest.mark.needs("root")
def test_a_restore_waits_for_the_moment_in_which_a_size_is_noted(volume: Path) -> None:
    swapped = orphan_in(volume)
    with own(volume) as folder:
        held = hold(folder, State.ORPHANS, swapped.id)
        assert isinstance(held, HeldContainer)
        threading.Timer(0.1, held.owned.close).start()
        restore(volume, swapped.id, Kernel())
    assert os.listdir(volume / "job") != []
