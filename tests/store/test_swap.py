"""Swap on a plain store without interference, and what is moved into drop/."""

from pathlib import Path

import pytest

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import NotFound, Refused
from fusefs.core.identity import IdentityMatch, compare
from fusefs.core.record import Method
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id, host_id
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import make_tree, snapshot
from tests.support.small_orphans import victim_in
from tests.support.store_verbs import (
    ActingBefore,
    calls_of,
    entries,
    opened,
    record_of,
    recover_all,
    restore,
    swap,
    tree_of,
)

pytestmark = pytest.mark.needs("root")


# swap


@pytest.mark.quick("swap")
def test_swap_keeps_the_whole_tree_under_its_own_inode(volume: Path) -> None:
    job = victim_in(volume)
    before, ino = snapshot(job, with_times=True)[1:], job.stat().st_ino
    swapped = swap(job)
    assert (snapshot(tree_of(swapped), with_times=True)[1:], tree_of(swapped).stat().st_ino) == (before, ino)


def test_record_says_what_was_swapped_where_when_and_how(volume: Path) -> None:
    (volume / "up").mkdir()
    job = victim_in(volume, "up/job\n")
    kernel = Kernel()
    with kernel.open_path(bytes(job)) as fd, kernel.open_path(bytes(volume / "up")) as parent_fd:
        victim, parent = kernel.identify(fd), kernel.identify(parent_fd)
    record = record_of(swapped := swap(job, options=SwapOptions(90, "a note")))
    with kernel.open_path(bytes(job)) as fd:
        assert compare(record.fresh, kernel.identify(fd)) is IdentityMatch.SAME
    with opened(volume) as store:
        assert record.volume == store.volume.id
    assert (record.id, record.origin, record.method) == (swapped.id, b"up/job\n", Method.EXCHANGE)
    assert (record.victim, record.parent) == (victim, parent)
    assert (record.host, record.boot, record.retention_s, record.note) == (host_id(), boot_id(), 90, "a note")


def test_the_record_is_flushed_before_the_exchange_and_the_container_once_after_it(volume: Path) -> None:
    job = victim_in(volume)
    calls = list(calls_of(lambda kernel: swap(job, kernel)))
    exchange = calls.index("exchange")
    assert calls.index("write") < calls.index("fsync") < calls.index("link") < exchange
    assert calls[exchange:].count("fsync") == 1


@pytest.mark.parametrize("kind", ["file", "empty directory", "full directory"])
def test_what_took_the_name_just_before_the_exchange_keeps_it(volume: Path, kind: str) -> None:
    job = victim_in(volume)

    def take_the_name() -> None:
        job.rename(volume / "moved")
        job.touch() if kind == "file" else make_tree(job, {} if kind == "empty directory" else {"x": "y"})

    with pytest.raises(Refused) as caught:
        swap(job, Kernel(ActingBefore("exchange", take_the_name)))
    assert "nothing was changed" in caught.value.hint
    assert job.is_file() == (kind == "file")
    assert (kind == "full directory") == (job / "x").exists()
    assert (volume / "moved/sub/b").read_text() == "2"


# drop


def test_moving_something_into_drop_needs_no_tool_and_makes_it_an_orphan(volume: Path) -> None:
    before = snapshot(victim_in(volume))
    (volume / "job").rename(volume / ".trashd/u/0/drop/job")
    assert recover_all(volume) == []
    (entry,) = entries(volume)
    assert (entry.state, entry.method, entry.origin) == (State.ORPHANS, Method.DROPPED, None)
    assert entry.expires_ns == entry.created_ns + DEFAULT_RETENTION_S * 10**9
    with pytest.raises(NotFound) as caught:
        restore(volume, entry.id)
    assert "--to" in caught.value.hint
    restore(volume, entry.id, to=volume / "job")
    assert snapshot(volume / "job") == before
