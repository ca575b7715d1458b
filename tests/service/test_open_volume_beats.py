"""A node's own beat as a file: one for a boot, locked, and never another file by its number."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.errors import Untrusted
from fusefs.core.node_beats import NodeBeat
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import HeldBeat, hold_beat, own_name
from tests.support.store_verbs import ActingBefore

BEAT = NodeBeat(started_ns=1, n=1, version="0", phase="idle")


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Fd]:
    with Fd(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        yield fd


def beat_in(hold: Fd, kernel: Kernel | None = None) -> HeldBeat:
    held = hold_beat(kernel or Kernel(), hold)
    assert held is not None
    return held


def test_a_beat_is_told_to_all_that_look(hold: Fd) -> None:
    with beat_in(hold) as held:
        held.write(BEAT)
        assert held.all() == {own_name(): BEAT}


def test_another_service_of_this_boot_has_it_as_long_as_it_is_open(hold: Fd) -> None:
    with beat_in(hold):
        assert hold_beat(Kernel(), hold) is None
    with beat_in(hold):
        pass


def test_one_that_was_removed_is_made_anew(hold: Fd, tmp_path: Path) -> None:
    for _ in range(2):
        with beat_in(hold) as held:
            held.write(BEAT)
            held.remove(held.name)
    assert list((tmp_path / "nodes").iterdir()) == []


def test_nodes_that_others_can_write_are_not_used(hold: Fd, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes").chmod(0o777)
    with pytest.raises(Untrusted, match="mode 0777"):
        hold_beat(Kernel(), hold)


def test_what_a_thread_that_hung_writes_late_goes_into_the_beat_and_no_other_file(hold: Fd, tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        goes_on.wait()

    with beat_in(hold, Kernel(ActingBefore("write", hang))) as held:
        late = threading.Thread(target=held.write, args=(BEAT,))
        late.start()
        begun.wait()
    others = [Fd(os.open(tmp_path / f"other{n}", os.O_RDWR | os.O_CREAT)) for n in range(20)]
    goes_on.set()
    late.join()
    for other in others:
        with other:
            assert os.fstat(other).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        held.write(BEAT)
    assert (tmp_path / "nodes" / os.fsdecode(own_name())).stat().st_size > 0
