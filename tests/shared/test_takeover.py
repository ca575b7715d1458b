"""What a node left that froze is another's after its silence; a late reaper has nothing of what is kept or restored."""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import Busy, NotFound, Occupied, Refused
from tests.support.cluster_nodes import ClusterNodes
from tests.support.fault_rounds import N_ROUNDS, last_rename
from tests.support.node_steps import (
    WATCHED_LIMIT_S,
    assert_quiet,
    contents,
    everywhere,
    names,
    states,
    swapped,
    tree,
    wait_until,
    well,
    with_store,
    write,
)

OLD = {"file": "old", "sub/deep": "older"}


@pytest.mark.skipif(N_ROUNDS == 1, reason="the silence is a minute and a half long: make shared")
@pytest.mark.timeout(5 * WATCHED_LIMIT_S)
@pytest.mark.parametrize("wakes", [False, True], ids=["killed", "frozen"])
def test_a_swap_is_taken_over_after_its_silence_and_loses_nothing_should_its_node_wake(
    nodes: ClusterNodes, wakes: bool
) -> None:
    if wakes and nodes.filesystem == "glusterfs":
        pytest.skip("its servers keep the locks of a client that is frozen, and not cut off")
    with_store(nodes)
    victim = tree(nodes.a)
    running = nodes.a.start("swap", victim, hold_at=0, call=last_rename(nodes))
    assert running.is_held()
    wait_until(nodes.b, partial(_is_staged, nodes.b.volume), True)
    if wakes:
        nodes.a.freeze()
        running.thaw()
    else:
        running.kill()
        running.end()
    _watched(nodes)
    assert nodes.b.run(partial(_write_live, victim))
    if wakes:
        nodes.a.thaw()
        running.end(WATCHED_LIMIT_S)
    _assert_both_kept(nodes)


def _assert_both_kept(nodes: ClusterNodes) -> None:
    """The tree, and what was written into the name meanwhile."""
    wait_until(nodes.a, partial(_is_listed, nodes.a.volume), True, WATCHED_LIMIT_S)
    nodes.a.trashd("doctor", "--repair", nodes.a.volume)
    found = everywhere(nodes, "job")
    assert any(OLD.items() <= one.items() for one in found), found
    assert any(one.get("live") == "live" for one in found), found
    assert_quiet(nodes)


def test_a_swap_of_a_node_that_is_away_is_taken_over_at_somebodys_word_whoever_has_its_lock(
    nodes: ClusterNodes,
) -> None:
    """A server may keep a dead client's locks for a day."""
    with_store(nodes)
    victim = tree(nodes.a)
    running = nodes.a.start("swap", victim, hold_at=0, call=last_rename(nodes))
    assert running.is_held()
    wait_until(nodes.b, partial(_is_staged, nodes.b.volume), True)
    nodes.a.freeze()
    running.thaw()
    well(nodes.b.trashd("doctor", "--repair", "--ended", nodes.a.boot, nodes.b.volume))
    assert not nodes.b.run(partial(_is_staged, nodes.b.volume))
    assert nodes.b.run(partial(_write_live, victim))
    nodes.a.thaw()
    running.end(WATCHED_LIMIT_S)
    _assert_both_kept(nodes)


def _watched(nodes: ClusterNodes) -> None:
    """Watch until it is taken over: first servers that have locks give up who is frozen."""
    wait_until(nodes.b, partial(_can_be_locked, nodes.b.volume), True, WATCHED_LIMIT_S, every_s=1)
    well(nodes.b.trashd("doctor", "--repair", "--wait", nodes.b.volume, limit_s=WATCHED_LIMIT_S))
    assert not nodes.b.run(partial(_is_staged, nodes.b.volume))


@pytest.mark.parametrize("is_away", [False, True], ids=["slow", "away"])
def test_a_late_reaper_reaps_nothing_of_what_was_kept(nodes: ClusterNodes, is_away: bool) -> None:
    """Where its lock is seen, nothing is kept meanwhile."""
    identifier = swapped(with_store(nodes), words=("--keep-for", "0s"))
    running = nodes.a.start("reap", "--volume", nodes.a.volume, hold_at=0, call="rename")
    assert running.is_held()
    if is_away:
        nodes.a.freeze()
        running.thaw()
    kept = nodes.b.trashd("keep", "--volume", nodes.b.volume, identifier)
    if is_away:
        nodes.a.thaw()
    else:
        running.thaw()
    running.end()
    assert kept.code in (0, Busy.exit_code), kept
    if kept.code == 0:
        well(nodes.a.trashd("reap", "--volume", nodes.a.volume))
        assert OLD in everywhere(nodes, "job")
        well(nodes.b.trashd("restore", "--volume", nodes.b.volume, identifier))
    assert_quiet(nodes)


def test_a_reaper_that_looked_before_it_was_restored_ends_well_and_reaps_nothing(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    running = nodes.a.start("reap", "--now", "--volume", nodes.a.volume, identifier, hold_at=0, call="rename")
    assert running.is_held()
    done = nodes.b.trashd("restore", "--volume", nodes.b.volume, identifier)
    running.thaw()
    code = running.end().code
    assert done.code in (0, Busy.exit_code), done
    if done.code == 0:
        assert code in (0, NotFound.exit_code, Busy.exit_code)
        wait_until(nodes.a, partial(contents, nodes.a.volume / "job"), OLD)
    assert_quiet(nodes)


def test_a_restore_whose_name_is_taken_in_its_gap_says_so_and_is_an_orphan_again(nodes: ClusterNodes) -> None:
    sample = swapped(with_store(nodes), "sample")
    calls = nodes.a.calls("restore", "--volume", nodes.a.volume, sample)
    if "exchange" in calls:
        pytest.skip("no gap on this filesystem")
    for n in reversed(range(calls.count("mkdir"))):
        name = nodes.a.volume / f"job-{n}"
        identifier = swapped(nodes, name.name)
        running = nodes.a.start("restore", "--volume", nodes.a.volume, identifier, hold_at=n, call="mkdir")
        if running.is_held() and nodes.a.run(partial(names, name)) is None:
            break
        running.thaw()
        running.end()
    nodes.b.run(partial(os.mkdir, name))
    assert nodes.b.run(partial(write, name / "live", "live"))
    running.thaw()
    assert running.end().code == Occupied.exit_code
    wait_until(nodes.a, partial(contents, name), {"live": "live"})
    assert states(nodes.a, identifier) == ["orphans"]
    assert OLD in everywhere(nodes, name.name)
    assert_quiet(nodes)


def test_what_a_reaper_has_begun_on_is_not_kept(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    running = nodes.a.start("reap", "--now", identifier, hold_at=1, call="unlink")
    assert running.is_held()
    wait_until(nodes.b, partial(names, nodes.b.volume / ".trashd/u/0/orphans"), [], every_s=nodes.cache_s)
    done = nodes.b.trashd("keep", "--volume", nodes.b.volume, identifier)
    assert done.code in (Refused.exit_code, Busy.exit_code), done  # Busy: its lock is seen
    running.thaw()
    well(running.end())
    assert_quiet(nodes)


def test_what_is_in_quarantine_is_not_moved_back(nodes: ClusterNodes) -> None:
    """A reaper that was cut off may go on with it by the directories that it has open."""
    identifier = swapped(with_store(nodes))
    nodes.b.run(partial(_to_quarantine, nodes.b.volume, identifier))
    done = nodes.b.trashd("restore", "--volume", nodes.b.volume, identifier)
    assert done.code == Busy.exit_code, done
    assert "copy what is left of it" in done.err
    assert states(nodes.b, identifier) == ["quarantine"]
    kept = nodes.b.volume / ".trashd/u/0/quarantine" / identifier / "tree"
    assert nodes.b.run(partial(contents, kept)) == OLD


def _is_staged(volume: Path) -> bool:
    return any(path.name == "record.json" for path in volume.glob(".trashd/u/0/stage/*/*"))


def _can_be_locked(volume: Path) -> bool:
    (record,) = volume.glob(".trashd/u/0/stage/*/record.json")
    with record.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_listed(volume: Path) -> bool:
    try:
        return bool(os.listdir(volume))
    except OSError:
        return False


def _write_live(name: Path) -> bool:
    """A killed swap may have been undone, or its fresh directory be there."""
    name.mkdir(exist_ok=True)
    return write(name / "live", "live")


def _to_quarantine(volume: Path, identifier: str) -> None:
    folder = volume / ".trashd/u/0"
    (folder / "orphans" / identifier).rename(folder / "quarantine" / identifier)
