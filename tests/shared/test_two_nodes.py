"""Two nodes on a shared filesystem: what one has swapped is everybody's, killed, frozen or cut off as they are."""

import fcntl
import os
import stat
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import Busy, NotFound, Occupied, Refused
from fusefs.linux.machine_identity import boot_id, host_id
from tests.support.cluster_nodes import ClusterNodes
from tests.support.fault_rounds import (
    N_ROUNDS,
    WATCHED_LIMIT_S,
    Verb,
    assert_quiet,
    calls_of,
    clear,
    contents,
    everywhere,
    last_rename,
    listed,
    names,
    play,
    rounds,
    states,
    swapped,
    tree,
    wait_until,
    watch_unrecorded,
    well,
    with_store,
    write,
)

OLD = {"file": "old", "sub/deep": "older"}
HOURS_2 = 7200


def test_a_store_that_one_node_made_is_the_others_too(nodes: ClusterNodes) -> None:
    well(nodes.a.trashd("init", nodes.a.volume))
    told = well(nodes.b.trashd("init", "--known", nodes.b.volume))
    assert ": exists;" in told.out
    assert "replaced the old store" not in told.out
    wait_until(nodes.a, partial(names, nodes.a.volume), [".trashd"])
    assert_quiet(nodes)


def test_a_swap_is_seen_by_the_other_node_within_the_time_of_its_caches(nodes: ClusterNodes) -> None:
    with_store(nodes)
    victim = tree(nodes.a)
    wait_until(nodes.b, partial(names, victim), ["file", "sub"])
    well(nodes.a.trashd("swap", victim))
    assert wait_until(nodes.b, partial(names, victim), [], every_s=nodes.cache_s) < 2 * nodes.cache_s
    assert nodes.b.run(partial(contents, victim)) == {}


def test_the_other_node_lists_it_and_gives_it_back(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    assert [one["id"] for one in listed(nodes.b)] == [identifier]
    well(nodes.b.trashd("restore", identifier))
    wait_until(nodes.a, partial(contents, nodes.a.volume / "job"), OLD)
    assert_quiet(nodes)


def test_the_other_node_reaps_it(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    well(nodes.b.trashd("reap", "--now", identifier))
    wait_until(nodes.a, partial(names, nodes.a.volume / ".trashd/u/0/orphans"), [])
    assert listed(nodes.a) == []
    assert_quiet(nodes)


def test_what_was_written_into_the_fresh_directory_is_not_lost_by_a_restore_elsewhere(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    wait_until(nodes.b, partial(names, nodes.b.volume / "job"), [])
    assert nodes.b.run(partial(write, nodes.b.volume / "job/new", "live"))
    wait_until(nodes.a, partial(names, nodes.a.volume / "job"), ["new"])
    nodes.a.trashd("restore", identifier)
    _assert_kept(nodes, identifier)


def test_a_name_that_was_taken_in_the_gap_is_its_takers(nodes: ClusterNodes) -> None:
    """Where there is no gap, the swap has not begun yet, and takes that too."""
    with_store(nodes)
    victim = tree(nodes.a)
    calls = nodes.a.calls("swap", tree(nodes.a, "other"))
    # The last mkdir takes the name that is missing, where there is no exchange.
    call, n = ("exchange", 0) if "exchange" in calls else ("mkdir", calls.count("mkdir") - 1)
    running = nodes.a.start("swap", victim, hold_at=n, call=call)
    assert running.is_held()
    nodes.b.run(partial(os.makedirs, victim, exist_ok=True))
    nodes.b.run(partial(write, victim / "live", "live"))
    running.thaw()
    running.end()
    kept = [{"live": "live"}, {"live": "live", **OLD}]
    found = everywhere(nodes, "job")
    assert any(one in kept for one in found), found
    assert any(OLD.items() <= one.items() for one in found), found


def test_an_empty_directory_that_was_made_in_the_gap_is_its_makers(nodes: ClusterNodes) -> None:
    with_store(nodes)
    victim = tree(nodes.a)
    calls = nodes.a.calls("swap", tree(nodes.a, "other"))
    if "exchange" in calls:
        pytest.skip("no gap on this filesystem")
    # The last mkdir takes the name; where the rename has NOREPLACE it makes the transfer directory of that.
    running = nodes.a.start("swap", victim, hold_at=calls.count("mkdir") - 1, call="mkdir")
    assert running.is_held()
    nodes.b.run(partial(os.mkdir, victim, 0o711))
    running.thaw()
    running.end()
    nodes.a.trashd("list")
    assert nodes.a.run(partial(_mode, victim)) == 0o711


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_swap_killed_in_its_gap_is_repaired_by_its_node(nodes: ClusterNodes) -> None:
    victim = _killed_in_gap(nodes)
    well(nodes.a.trashd("list"))
    wait_until(nodes.a, partial(os.path.isdir, victim), True)
    _assert_whole(nodes)


def test_a_swap_killed_in_its_gap_is_left_alone_by_the_other_node_until_somebody_says_that_it_is_over(
    nodes: ClusterNodes,
) -> None:
    victim = _killed_in_gap(nodes)
    (left,) = nodes.a.run(partial(names, nodes.a.volume / ".trashd/u/0/stage")) or ["nothing"]
    wait_until(nodes.b, partial(_record_is_seen, nodes.b.volume, left), True)
    wait_until(nodes.b, partial(names, nodes.b.volume / ".trashd/u/0/stage"), [left])  # listings have a cache of theirs
    done = nodes.b.trashd("doctor", "--repair", nodes.b.volume)
    assert "may still be working on it" in done.out + done.err
    well(nodes.b.trashd("doctor", "--repair", "--ended", nodes.a.boot, nodes.b.volume))
    wait_until(nodes.b, partial(os.path.isdir, victim), True)
    _assert_whole(nodes)


def test_what_one_node_reaps_is_not_given_back_on_the_other(nodes: ClusterNodes) -> None:
    identifier = swapped(with_store(nodes))
    running = nodes.a.start("reap", "--now", identifier, hold_at=1, call="unlink")
    assert running.is_held()
    wait_until(nodes.b, partial(names, nodes.b.volume / ".trashd/u/0/reaping"), [identifier])
    wait_until(nodes.b, partial(names, nodes.b.volume / ".trashd/u/0/orphans"), [])
    done = nodes.b.trashd("restore", "--volume", nodes.b.volume, identifier)
    assert done.code == Busy.exit_code, done
    running.thaw()
    well(running.end())
    assert nodes.b.run(partial(names, nodes.b.volume / "job")) == []
    assert_quiet(nodes)


def test_two_swaps_of_one_directory_at_once_leave_one_tree_and_one_name(nodes: ClusterNodes) -> None:
    with_store(nodes)
    victim = tree(nodes.a)
    wait_until(nodes.b, partial(names, victim), ["file", "sub"])
    both = [node.start("swap", victim) for node in nodes[:2]]
    for running in both:
        running.end()
    nodes.a.trashd("list")
    wait_until(nodes.a, partial(os.path.isdir, victim), True)
    _assert_whole(nodes)


def test_two_swaps_of_one_directory_step_by_step_leave_one_tree_and_one_name(nodes: ClusterNodes) -> None:
    with_store(nodes)
    victim = tree(nodes.a)
    wait_until(nodes.b, partial(names, victim), ["file", "sub"])
    call = "exchange" if "exchange" in nodes.a.calls("swap", tree(nodes.a, "other")) else "rename"
    n_renames = 2 if call == "rename" else 0  # of the record, of the reserve, then of the victim
    running = nodes.a.start("swap", victim, hold_at=n_renames, call=call)
    is_held = running.is_held()
    nodes.b.trashd("swap", victim)
    if is_held:
        running.thaw()
    running.end()
    nodes.a.trashd("list")
    wait_until(nodes.a, partial(os.path.isdir, victim), True)
    _assert_whole(nodes)


@pytest.mark.parametrize("call", ["rename", "unlink", "rmdir"])
def test_two_reapers_of_one_orphan_at_once_remove_it_once(nodes: ClusterNodes, call: str) -> None:
    identifier = swapped(with_store(nodes))
    running = nodes.a.start("reap", "--now", identifier, hold_at=0, call=call)
    assert running.is_held()
    nodes.b.trashd("reap", "--now", "--volume", nodes.b.volume, identifier)
    running.thaw()
    running.end()
    wait_until(nodes.b, partial(_all_gone, nodes.b.volume, identifier), True)
    assert_quiet(nodes)


def _all_gone(volume: os.PathLike[str], identifier: str) -> bool:
    parts = ("orphans", "reaping", "quarantine", "stage", "restoring")
    return not any(identifier in (names(Path(volume, ".trashd/u/0", part)) or []) for part in parts)


@pytest.mark.needs("faketime")
@pytest.mark.parametrize("ahead_s", [HOURS_2, -HOURS_2])
def test_a_clock_that_is_two_hours_off_ends_no_retention_of_a_day(nodes: ClusterNodes, ahead_s: int) -> None:
    identifier = swapped(with_store(nodes))
    well(nodes.b.trashd("reap", clock_s=ahead_s))
    assert states(nodes.b, identifier) == ["orphans"]
    (one,) = well(nodes.b.trashd("list", "--json", clock_s=ahead_s)).objects()
    assert abs(one["restorable_for_s"] - 24 * 3600 + ahead_s) < 100
    well(nodes.b.trashd("list", clock_s=ahead_s))


@pytest.mark.needs("faketime")
def test_what_a_node_with_a_clock_two_hours_off_swaps_is_restored_by_the_other(nodes: ClusterNodes) -> None:
    with_store(nodes)
    victim = tree(nodes.a)
    (swap_result,) = well(nodes.a.trashd("swap", "--json", victim, clock_s=HOURS_2)).objects()
    wait_until(nodes.b, partial(names, nodes.b.volume / ".trashd/u/0/orphans"), [swap_result["id"]])
    assert [one["id"] for one in listed(nodes.b)] == [swap_result["id"]]
    well(nodes.b.trashd("reap"))
    well(nodes.b.trashd("restore", swap_result["id"]))
    wait_until(nodes.b, partial(contents, victim), OLD)


@pytest.mark.timeout(4 * WATCHED_LIMIT_S)
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_servers_that_restart_in_a_swap_lose_nothing(nodes: ClusterNodes, call: str) -> None:
    if nodes.restart is None:
        pytest.skip("its server's end is the end of its mounts")
    with_store(nodes)
    victim = tree(nodes.a)
    running = nodes.a.start("swap", victim, hold_at=1 if call == "rename" else 0, call=call)
    assert running.is_held()
    nodes.restart()
    running.thaw()
    running.end()
    _settle(nodes)
    _assert_whole(nodes)


def test_servers_that_restart_in_a_reap_lose_nothing_else(nodes: ClusterNodes) -> None:
    if nodes.restart is None:
        pytest.skip("its server's end is the end of its mounts")
    identifier = swapped(with_store(nodes))
    live = tree(nodes.a, "live")
    running = nodes.a.start("reap", "--now", identifier, hold_at=0, call="unlink")
    assert running.is_held()
    nodes.restart()
    running.thaw()
    running.end()
    _settle(nodes)
    nodes.a.trashd("reap")
    wait_until(nodes.b, partial(_all_gone, nodes.b.volume, identifier), True)
    assert nodes.a.run(partial(contents, live)) == OLD
    assert_quiet(nodes)


def _killed_in_gap(nodes: ClusterNodes) -> os.PathLike[str]:
    """A victim whose swap A was killed in, before its name had the fresh directory; or before the exchange."""
    with_store(nodes)
    victim = tree(nodes.a)
    call = "exchange" if "exchange" in nodes.a.calls("swap", tree(nodes.a, "other")) else "renameat2"
    running = nodes.a.start("swap", victim, hold_at=0, call=call)
    assert running.is_held()
    running.kill()
    running.end()
    return victim


def _record_is_seen(volume: os.PathLike[str], identifier: str) -> bool:
    return "record.json" in (names(Path(volume, ".trashd/u/0/stage", identifier)) or [])


def _settle(nodes: ClusterNodes) -> None:
    """Wait until the mounts work again, and A's commands are repaired by A."""
    for node in nodes[:2]:
        wait_until(node, partial(_works, node.volume), True, 60)
    nodes.a.trashd("doctor", "--repair", nodes.a.volume)
    watch_unrecorded(nodes)


def _works(volume: os.PathLike[str]) -> bool:
    try:
        return bool(os.listdir(volume))
    except OSError:
        return False


def _assert_whole(nodes: ClusterNodes) -> None:
    """The tree is in its place, or an orphan that can be restored, whole; and nothing is left half done."""
    found = everywhere(nodes, "job")
    assert OLD in found, found
    assert_quiet(nodes)


def _assert_kept(nodes: ClusterNodes, identifier: str) -> None:
    """What was live is in view or in an orphan, and the tree is whole in one of them."""
    found = everywhere(nodes, "job")
    assert {"new": "live"} in found, (identifier, found)
    assert OLD in found, (identifier, found)


def test_a_node_is_a_machine_of_its_own(nodes: ClusterNodes) -> None:
    assert nodes.a.volume == nodes.b.volume
    seen = [(node.run(host_id), node.run(boot_id), node.run(os.uname).nodename) for node in nodes[:2]]
    assert [boot for _, boot, _ in seen] == [nodes.a.boot, nodes.b.boot]
    assert len({*seen[0], *seen[1], host_id(), boot_id()}) == 8


@pytest.mark.needs("faketime")
def test_a_node_may_have_a_clock_of_its_own(nodes: ClusterNodes) -> None:
    nodes.a.trashd("init", nodes.a.volume)
    nodes.a.run(partial(os.mkdir, nodes.a.volume / "job"))
    told = nodes.a.trashd("swap", "--json", nodes.a.volume / "job", clock_s=7200).objects()[0]
    record = nodes.a.volume / ".trashd/u/0/orphans" / told["id"] / "record.json"
    ahead_s = nodes.a.run(partial(_ahead_s, record, told["id"]))
    assert 7100 < ahead_s < 7300


def _ahead_s(record: Path, identifier: str) -> float:
    """How far the clock that gave an id its time was ahead of the filesystem's."""
    said = datetime.strptime(identifier[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    return said.timestamp() - record.stat().st_mtime


def test_what_one_node_sends_when_it_is_cut_off_comes_late(nodes: ClusterNodes) -> None:
    nodes.a.run(partial(os.mkdir, nodes.a.volume / "before"))
    wait_until(nodes.b, partial(os.listdir, nodes.b.volume), ["before"])
    running = nodes.a.start("init", nodes.a.volume, hold_at=0, call="mkdir")
    assert running.is_held()
    nodes.a.cut()
    running.thaw()
    assert nodes.b.run(partial(os.listdir, nodes.b.volume)) == ["before"]
    nodes.a.mend()
    running.end(100)
    wait_until(nodes.b, partial(_n_names, nodes.b.volume), 2, 60)


def _n_names(directory: Path) -> int:
    return len(os.listdir(directory))


@pytest.mark.timeout(300 + 200 * N_ROUNDS)
@pytest.mark.parametrize("verb", Verb, ids=lambda verb: verb.name.lower())
def test_nothing_is_lost_whatever_becomes_of(nodes: ClusterNodes, verb: Verb) -> None:
    with_store(nodes)
    calls = calls_of(nodes, verb)
    clear(nodes)
    for this in rounds(verb):
        print(nodes.filesystem, *play(nodes, this, calls), flush=True)
        clear(nodes)


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
    assert "copy the remaining files" in done.err
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
