"""A count beside others: at their pace, never for ever, and nobody is kept waiting who wants it to end."""

from __future__ import annotations

import os

import pytest

from fusefs.core.pacing import AT_ONCE, HOLD, Speed
from fusefs.engine.count_tree import survey
from fusefs.engine.pace import PacedLooks
from fusefs.linux.kernel import Kernel
from tests.cli.test_reap_paced import fsyncing
from tests.support.many_files import fill
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root")


class Waiting:
    """Who sets the speed: so often it has to wait, whenever it asks for a slice (engine.pace.SetsSpeed)."""

    def __init__(self, n_waits: float, speed: Speed = AT_ONCE) -> None:
        self.n_left = n_waits
        self.speed = speed
        self.n_done = 0
        self.n_waited = 0

    def tempo(self) -> Speed:
        return HOLD if self.n_left else self.speed

    def done(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        assert not n_bytes
        assert busy_s >= 0
        self.n_done += n_entries

    def wait(self, _seconds: float) -> None:
        """Not at all: time is no matter here."""
        self.n_left = max(self.n_left - 1, 0)
        self.n_waited += 1


def test_nothing_is_looked_at_before_it_may_be() -> None:
    pacer = Waiting(3)
    looks = PacedLooks(pacer, lambda: False)
    assert pacer.n_waited == 0
    looks()
    assert pacer.n_waited == 3


def test_who_wants_an_end_is_not_kept_waiting_nor_asked_again() -> None:
    pacer = Waiting(float("inf"))
    looks = PacedLooks(pacer, lambda: pacer.n_waited >= 5)
    for _ in range(100):
        looks()
    assert pacer.n_waited == 5


def test_a_walk_at_a_pace_finds_what_one_at_once_finds() -> None:
    with tmpfs_volume() as volume, Kernel().open_path(os.fsencode(volume), os.O_RDONLY) as fd:
        fill(fill(volume / "tree", 2500) / "sub", 500)
        pacer = Waiting(2, Speed(entries_per_s=20_000))  # more than one slice, however fast the machine is
        paced = survey(Kernel(), fd, pauses=PacedLooks(pacer, lambda: False))
        assert paced == survey(Kernel(), fd)
        assert 0 < pacer.n_done <= paced.n_entries


@pytest.mark.needs("loop")
def test_a_count_says_to_whom_it_yields_and_comes_to_its_end() -> None:
    with loop_volume("ext4", 256) as root:
        done_well("init", root)
        fill(root / "victim", 4000)
        identifier = str(swapped(root / "victim")["id"])
        says_so = False
        while not says_so:
            with fsyncing(root):
                done = done_well("du", "--json", "--count", "--volume", root, identifier)
            (one,) = done.objects()
            assert (one["n_entries"], one["is_at_least"]) == (4001, False)
            says_so = "trashd: yielding: " in done.err
        assert_silent(root)
