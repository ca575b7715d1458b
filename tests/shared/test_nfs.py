"""trashd on NFS: two machines and a server, of which each may freeze, be cut off or die at any step."""

import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fusefs.store.silent_nodes import DEFAULT_TAKEOVER_S
from tests.conftest import DEMANDED_GROUPS
from tests.support import nfs_actions, uml_actions
from tests.support.nfs_machines import UNLOCKED, VERSIONS, NfsClient, NfsVolume, Site, site
from tests.support.uml_machine import ActionDied, RunningAction
from tests.support.uml_switch import Cable

pytestmark = [pytest.mark.needs("root", "uml", "hours"), pytest.mark.timeout(300)]

_LONG_S, _FRAME_S = 45.0, 15.0
_UNRECORDED = re.compile(r"^.*/(?:stage|restoring)/[^/\n]*: no record: .*\n *hint: .*\n", re.MULTILINE)

_CHANGING = re.compile(
    # NFS 3's CREATE, MKDIR, REMOVE, RMDIR, RENAME, LINK; in 4.2 CREATE of a directory, REMOVE and RENAME with a name
    rb"\0\x01\x86\xa3\0\0\0\x03\0\0\0[\x08\x09\x0c-\x0f]|\0\0\0\x06\0\0\0\x02|\0\0\0[\x1c\x1d]\0\0\0[\x01-\xff][\x20-\x7e]",
    re.DOTALL,
)
N_SWAP, N_RESTORE, N_REAP, N_TAKEOVER = 24, 40, 56, 24
"""Changes that a verb makes there at most; where it makes fewer the last cases look at one that has ended."""
STRIDE = 4


@pytest.fixture(scope="module")
def machines() -> Iterator[Site]:
    with site() as made:
        yield made


@pytest.fixture(params=list(VERSIONS))
def volume(machines: Site, request: pytest.FixtureRequest) -> Iterator[NfsVolume]:
    """With a store, and a tree in `job`."""
    with machines.volume(VERSIONS[request.param]) as mounted:
        _fill(mounted)
        yield mounted


@pytest.fixture
def unlocked(machines: Site) -> Iterator[NfsVolume]:
    """Likewise; no machine sees another's locks, so what one left can be taken over at once."""
    with machines.volume(UNLOCKED) as mounted:
        _fill(mounted)
        yield mounted


def _fill(volume: NfsVolume) -> None:
    for client, words in ((volume.a, ["init", "{}"]), (volume.b, ["init", "--known", "{}"])):
        done = client.trashd(*words)
        assert done.code == 0, done
    volume.a.machine.call(uml_actions.make_tree, volume.a.path("job"))


def test_what_one_machine_swaps_the_other_lists_restores_and_reaps(volume: NfsVolume) -> None:
    a, b = volume.a, volume.b
    swapped = a.machine.call(nfs_actions.swap, a.path("job"))
    assert [b.machine.call(nfs_actions.states, b.volume)] == [[(swapped, "orphans")]]
    done = b.trashd("restore", "--volume", "{}", swapped)
    assert done.code == 0, done
    assert _files(a) == uml_actions.N_FILES
    swapped = a.machine.call(nfs_actions.swap, a.path("job"))
    done = b.trashd("reap", "--volume", "{}", "--now", swapped)
    assert done.code == 0, done
    assert _files(a) == 0
    _assert_silent(volume)


def test_a_swap_tells_how_long_its_name_was_missing(volume: NfsVolume) -> None:
    """In the order of what two bare renames take, which is told beside it."""
    a = volume.a
    gaps_ns = [a.machine.call(nfs_actions.swap_gap_ns, a.path("job")) for _ in range(5)]
    bare_ns = [a.machine.call(nfs_actions.bare_pair_ns, a.path("job")) for _ in range(5)]
    _tell("gaps, bare pairs (ms)", [[round(ns / 1e6, 1) for ns in sorted(each)] for each in (gaps_ns, bare_ns)])
    assert all(0 < ns < 10e9 for ns in gaps_ns)


def test_no_verb_changes_more_than_the_cases_look_at(volume: NfsVolume) -> None:
    changes = volume.a.machine.call(nfs_actions.changes, volume.a.volume, "job")
    for verb, most in (("swap", N_SWAP), ("restore", N_RESTORE), ("reap", N_REAP)):
        assert len(changes[verb]) < most, changes[verb]


def test_a_swap_takes_what_has_the_name_since_another_machine_gave_that_back(volume: NfsVolume) -> None:
    """And not the directory that this one's cache has, which is gone."""
    a, b = volume.a, volume.b
    swapped = a.machine.call(nfs_actions.swap, a.path("job"))
    assert a.trashd("list", "--volume", "{}").code == 0
    assert a.machine.call(uml_actions.count_files, a.path("job")) == 0
    assert b.machine.call(nfs_actions.restore, b.volume, swapped) == b.path("job")
    again = a.machine.call(nfs_actions.swap, a.path("job"))
    assert b.machine.call(nfs_actions.restore, b.volume, again) == b.path("job")
    assert _files(b) == uml_actions.N_FILES


@pytest.mark.parametrize("n", range(0, N_SWAP, STRIDE))
def test_a_swap_that_freezes_loses_nothing_to_another_machines_repair(volume: NfsVolume, n: int) -> None:
    _frozen(volume, _begin_swap(volume, n), _look_and_repair)
    _assert_nothing_lost(volume)


@pytest.mark.parametrize("n", range(0, N_RESTORE, STRIDE))
def test_a_restore_that_freezes_loses_nothing_to_another_machines_repair(volume: NfsVolume, n: int) -> None:
    _frozen(volume, _begin_restore(volume, n), _look_and_repair)
    _assert_nothing_lost(volume)


@pytest.mark.parametrize("n", range(0, N_REAP, STRIDE))
def test_a_reap_that_freezes_touches_nothing_that_another_machine_restored(volume: NfsVolume, n: int) -> None:
    swapped = volume.a.machine.call(nfs_actions.swap, volume.a.path("job"))
    late = volume.a.machine.start(nfs_actions.reap_stopping, volume.a.volume, swapped, n)
    codes: list[int] = []
    _frozen(volume, late, lambda b: codes.extend(_restore_all(b)))
    if 0 in codes:
        assert _files(volume.a) == uml_actions.N_FILES
    else:
        done = volume.b.trashd("reap", "--volume", "{}", "--all", "--now")
        assert done.code in (0, 5), done
    _assert_silent(volume)


def _frozen(volume: NfsVolume, late: RunningAction[str], meanwhile: Callable[[NfsClient], None]) -> None:
    """Freeze A where it stops; then B acts, then A goes on to its end."""
    a = volume.a.machine
    stopped = late.wait_report_or_end()
    _tell("stopped", stopped)
    if stopped is None:
        meanwhile(volume.b)
        return
    a.freeze()
    try:
        meanwhile(volume.b)
    finally:
        a.wake()
    late.go()
    _tell("result", late.result())


def _tell(what: str, of_a_case: object) -> None:
    """How far its first machine got, for who counts (pytest -rP)."""
    print(f"{what}: {of_a_case}")


def _look_and_repair(b: NfsClient) -> None:
    _restore_all(b)
    b.trashd("doctor", "--repair", "{}")


def _restore_all(b: NfsClient) -> list[int]:
    """The exit codes of B's restores of all that it sees."""
    found = b.machine.call(nfs_actions.states, b.volume)
    return [b.trashd("restore", "--volume", "{}", identifier).code for identifier, _state in found]


# What B takes over from A, which is frozen, cut off or dead.

Begin = Callable[[NfsVolume, int], RunningAction[str]]


def _begin_swap(volume: NfsVolume, n: int) -> RunningAction[str]:
    return volume.a.machine.start(nfs_actions.swap_stopping, volume.a.path("job"), n)


def _begin_restore(volume: NfsVolume, n: int) -> RunningAction[str]:
    swapped = volume.a.machine.call(nfs_actions.swap, volume.a.path("job"))
    return volume.a.machine.start(nfs_actions.restore_stopping, volume.a.volume, swapped, n)


def _die_in_swap(volume: NfsVolume, n: int) -> None:
    with suppress(ActionDied):
        volume.b.machine.call(nfs_actions.swap_dying, volume.b.path("job"), n)


def _begin_takeover(volume: NfsVolume, n: int) -> RunningAction[str]:
    """A's takeover of what B left in the middle of a swap; B itself does nothing any more."""
    _die_in_swap(volume, n)
    return volume.a.machine.start(nfs_actions.repair_stopping, volume.a.volume, _boot(volume.b), n)


def _with_trap(
    volume: NfsVolume, begin: Begin, frame: re.Pattern[bytes], then: Cable, back: Cable, *, passes_first: bool = False
) -> tuple[RunningAction[str], threading.Event]:
    """A's verb, at its first change, going on with a trap for a frame."""
    late = begin(volume, 0)
    assert late.wait_report_or_end() is not None
    sent = volume.switch.when(volume.a.machine.port, frame, then, back, passes_first=passes_first)
    late.go()
    return late, sent


def _begin_takeover_of_whole(volume: NfsVolume, n: int) -> RunningAction[str]:
    """Likewise, when B has done all but the last of it."""
    _die_in_swap(volume, N_SWAP // 2)
    return volume.a.machine.start(nfs_actions.repair_stopping, volume.a.volume, _boot(volume.b), n)


def _boot(client: NfsClient) -> str:
    return client.machine.call(uml_actions.who)[2]


VERBS = {
    "swap": (_begin_swap, N_SWAP),
    "restore": (_begin_restore, N_RESTORE),
    "takeover": (_begin_takeover, N_TAKEOVER),
}
EACH_STEP, SOME_STEPS = (
    [pytest.param(begin, n, id=f"{verb}-{n}") for verb, (begin, most) in VERBS.items() for n in range(0, most, stride)]
    for stride in (1, 3 * STRIDE)
)


@pytest.mark.parametrize(("begin", "n"), EACH_STEP)
def test_what_was_taken_over_while_its_machine_was_frozen_is_not_lost_when_it_wakes(
    unlocked: NfsVolume, begin: Begin, n: int
) -> None:
    boot = _boot(unlocked.a)
    _frozen(unlocked, begin(unlocked, n), lambda b: _take_over(b, boot, restores=n % 2 == 0))
    _assert_nothing_lost(unlocked)


@pytest.mark.parametrize(("begin", "n"), EACH_STEP)
def test_what_was_taken_over_while_its_machine_was_cut_off_is_not_lost_when_it_comes_back(
    unlocked: NfsVolume, begin: Begin, n: int
) -> None:
    boot, late = _boot(unlocked.a), begin(unlocked, n)
    stopped = late.wait_report_or_end()
    _tell("stopped", stopped)
    with unlocked.switch.cut(unlocked.a.machine.port):
        if stopped is not None:
            late.go()
        _take_over(unlocked.b, boot, restores=n % 2 == 0)
    _tell("result", late.result())
    _assert_nothing_lost(unlocked)


@pytest.mark.parametrize(("begin", "n"), SOME_STEPS)
def test_what_a_machine_that_died_had_begun_is_completed_or_undone_by_another(
    volume: NfsVolume, begin: Begin, n: int
) -> None:
    boot = _boot(volume.a)
    _tell("stopped", begin(volume, n).wait_report_or_end())
    held = volume.a.machine.start(nfs_actions.hold_lock, volume.a.path("held"))
    held.wait_report()
    volume.site.lose(volume.a.machine)
    if not volume.has_leases:
        volume.site.crash_server()
    volume.b.machine.call(nfs_actions.wait_for_lock, volume.b.path("held"), _LONG_S)
    _take_over(volume.b, boot, restores=n % 2 == 0)
    _assert_nothing_lost_as_seen_by(volume.b)


@pytest.mark.parametrize(("begin", "n"), SOME_STEPS)
def test_a_change_that_is_sent_once_more_to_a_restarted_server_loses_nothing(
    volume: NfsVolume, begin: Begin, n: int
) -> None:
    a, late = volume.a.machine, begin(volume, n)
    stopped = late.wait_report_or_end()
    _tell("stopped", stopped)
    if stopped is not None:
        sent = volume.switch.when(a.port, _CHANGING, Cable.DROP, Cable.DROP, passes_first=True)
        late.go()
        has_come = sent.wait(_FRAME_S)
        _tell("frame", has_come)
        if has_come:
            volume.server.call(uml_actions.who)  # so that it has done what was sent before
            volume.site.crash_server()
        volume.switch.mend(a.port)
        _tell("result", late.result())
    _assert_nothing_lost(volume)


def _take_over(client: NfsClient, boot: str, *, restores: bool) -> None:
    client.machine.call(nfs_actions.forget_caches)
    client.trashd("doctor", "--repair", "--ended", boot, "{}")
    if restores:
        _restore_all(client)


@pytest.mark.skipif("shared" not in DEMANDED_GROUPS, reason="it takes two minutes")
def test_a_long_silence_is_enough_to_take_over(unlocked: NfsVolume) -> None:
    """And what was silent finds nothing when it wakes."""
    late = _begin_swap(unlocked, N_SWAP // 2)
    late.wait_report()
    unlocked.a.machine.freeze()
    begun = time.monotonic()
    done = unlocked.b.machine.start(uml_actions.trashd, ["doctor", "--repair", "--wait", unlocked.b.volume]).result(200)
    waited_s = time.monotonic() - begun
    assert done.code == 0, done
    assert waited_s > DEFAULT_TAKEOVER_S
    _assert_quiet_end(unlocked, late)


def _assert_quiet_end(volume: NfsVolume, late: RunningAction[str]) -> None:
    """A wakes, goes on to its end, and changes nothing."""
    before = volume.server.call(nfs_actions.everything, volume.below)
    volume.a.machine.wake()
    late.go()
    late.result()
    assert volume.server.call(nfs_actions.everything, volume.below) == before
    _assert_nothing_lost(volume)


# The fence: a rename that is on its way while another takes over.


def _renaming(source: bytes, target: bytes) -> re.Pattern[bytes]:
    """In a frame: a RENAME of these names."""
    words = [re.escape(struct.pack(">I", len(word)) + word + bytes(-len(word) % 4)) for word in (source, target)]
    return re.compile(b".{0,120}".join(words), re.DOTALL)


RENAMES = {
    "aside": (_begin_swap, _renaming(b"job", b"tree"), "u/0/stage/*/gate.*/tree/d0"),
    "place": (_begin_swap, _renaming(b"fresh", b"job"), "u/0/../../../job"),
    "fresh": (_begin_restore, _renaming(b"job", b"fresh"), "u/0/restoring/*/gate.*/fresh"),
    "back": (_begin_restore, _renaming(b"tree", b"job"), "u/0/../../../job/d0"),
    "takeover": (_begin_takeover_of_whole, re.compile(rb"\0\0\0\x03old\0", re.DOTALL), "u/0/stage/*/old/*"),
}


@pytest.mark.parametrize("kind", list(RENAMES))
def test_a_rename_that_was_on_its_way_while_another_took_over_changes_nothing(unlocked: NfsVolume, kind: str) -> None:
    begin, frame, _done = RENAMES[kind]
    a = unlocked.a.machine
    boot = _boot(unlocked.a)
    late, sent = _with_trap(unlocked, begin, frame, Cable.HOLD, Cable.PASS)
    assert sent.wait(_FRAME_S)
    _take_over(unlocked.b, boot, restores=False)
    before = unlocked.server.call(nfs_actions.everything, unlocked.below)
    unlocked.switch.mend(a.port)
    result = late.result(2 * _LONG_S)
    assert unlocked.server.call(nfs_actions.everything, unlocked.below) == before, result
    _assert_nothing_lost(unlocked)


@pytest.mark.parametrize("kind", list(RENAMES))
def test_a_rename_that_was_done_is_seen_to_be_done_whatever_a_restarted_server_says(
    volume: NfsVolume, kind: str
) -> None:
    begin, frame, done = RENAMES[kind]
    late, sent = _with_trap(volume, begin, frame, Cable.DROP, Cable.DROP, passes_first=True)
    assert sent.wait(_FRAME_S)
    volume.server.call(nfs_actions.wait_for_lasting, f"{volume.below}/.trashd/{done}")
    volume.site.crash_server()
    volume.switch.mend(volume.a.machine.port)
    result = late.result(2 * _LONG_S)
    assert "Error" not in result, result
    assert "TakenOver" not in result, result
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/job")
    if begin is _begin_restore:
        assert _files(volume.b) == uml_actions.N_FILES
    _assert_nothing_lost(volume)


# What is looked at in the end.


def _files(client: NfsClient, name: str = "job") -> int:
    client.machine.call(nfs_actions.forget_caches)
    return client.machine.call(uml_actions.count_files, client.path(name))


def _assert_nothing_lost(volume: NfsVolume) -> None:
    """The tree is in place or can be restored, whole; no machine has anything to say in the end."""
    for client in (volume.a, volume.b):
        client.machine.call(nfs_actions.forget_caches)
        client.trashd("doctor", "--repair", "{}")
    _assert_nothing_lost_as_seen_by(volume.b)
    _assert_silent(volume)


def _assert_nothing_lost_as_seen_by(client: NfsClient) -> None:
    if _files(client) != uml_actions.N_FILES:
        found = client.machine.call(nfs_actions.states, client.volume)
        ids = [identifier for identifier, state in found if state == "orphans"]
        told = [client.trashd("restore", "--volume", "{}", i, "--to", f"{{}}/back{k}") for k, i in enumerate(ids)]
        backs = [_files(client, f"back{k}") for k in range(len(ids))]
        assert uml_actions.N_FILES in backs, (found, told, backs, client.run("find", "{}", "-not", "-name", "f*"))


def _assert_silent(volume: NfsVolume) -> None:
    """Only what never had a record may be told: it is seen off by a long silence alone."""
    for client in (volume.b, volume.a):
        client.machine.call(nfs_actions.forget_caches)
        done = client.trashd("doctor", "{}")
        assert done.code in (0, 1), done
        assert not _UNRECORDED.sub("", done.out), done
