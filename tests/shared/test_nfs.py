"""trashd on NFS: two machines and a server, of which each may freeze, be cut off or die at any step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support import nfs_acts, uml_acts
from tests.support.nfs_machines import VERSIONS, Client, Site, Volume, site
from tests.support.uml_machine import Running
from tests.support.uml_switch import Cable

pytestmark = [pytest.mark.needs("root", "uml"), pytest.mark.timeout(300)]

_LONG_S = 45.0


_CHANGING = re.compile(
    # NFS 3's CREATE, MKDIR, REMOVE, RMDIR, RENAME, LINK; in 4.2 CREATE of a directory, REMOVE and RENAME with a name
    rb"\0\x01\x86\xa3\0\0\0\x03\0\0\0[\x08\x09\x0c-\x0f]|\0\0\0\x06\0\0\0\x02|\0\0\0[\x1c\x1d]\0\0\0[\x01-\xff][\x20-\x7e]",
    re.DOTALL,
)
N_SWAP, N_RESTORE, N_REAP = 20, 24, 62
"""Changes that a verb makes there at most; where it makes fewer the last cases look at one that has ended."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Site]:
    with site() as made:
        yield made


@pytest.fixture(params=list(VERSIONS))
def volume(machines: Site, request: pytest.FixtureRequest) -> Iterator[Volume]:
    """With a store, and a tree in `job`."""
    with machines.volume(VERSIONS[request.param]) as mounted:
        a, b = mounted.a, mounted.b
        for client, words in ((a, ["init", "{}"]), (b, ["init", "--known", "{}"])):
            done = client.trashd(*words)
            assert done.code == 0, done
        a.machine.call(uml_acts.make_tree, a.path("job"))
        yield mounted


def test_what_one_machine_swaps_the_other_lists_restores_and_reaps(volume: Volume) -> None:
    a, b = volume.a, volume.b
    swapped = a.machine.call(nfs_acts.swap, a.path("job"))
    assert [b.machine.call(nfs_acts.states, b.volume)] == [[(swapped, "orphans")]]
    done = b.trashd("restore", "--volume", "{}", swapped)
    assert done.code == 0, done
    assert _files(a) == uml_acts.N_FILES
    swapped = a.machine.call(nfs_acts.swap, a.path("job"))
    done = b.trashd("reap", "--volume", "{}", "--now", swapped)
    assert done.code == 0, done
    assert _files(a) == 0
    _assert_silent(volume)


def test_a_swap_tells_how_long_its_name_was_missing(volume: Volume) -> None:
    assert 0 < volume.a.machine.call(nfs_acts.swap_gap_ns, volume.a.path("job")) < 10e9


@pytest.mark.parametrize("n", range(N_SWAP))
def test_a_swap_that_freezes_loses_nothing_to_another_machines_repair(volume: Volume, n: int) -> None:
    late = volume.a.machine.start(nfs_acts.swap_stopping, volume.a.path("job"), n)
    _frozen(volume, late, _look_and_repair)
    _assert_nothing_lost(volume)


@pytest.mark.parametrize("n", range(N_RESTORE))
def test_a_restore_that_freezes_loses_nothing_to_another_machines_repair(volume: Volume, n: int) -> None:
    swapped = volume.a.machine.call(nfs_acts.swap, volume.a.path("job"))
    late = volume.a.machine.start(nfs_acts.restore_stopping, volume.a.volume, swapped, n)
    _frozen(volume, late, _look_and_repair)
    _assert_nothing_lost(volume)


@pytest.mark.parametrize("n", range(N_REAP))
def test_a_reap_that_freezes_touches_nothing_that_another_machine_restored(volume: Volume, n: int) -> None:
    swapped = volume.a.machine.call(nfs_acts.swap, volume.a.path("job"))
    late = volume.a.machine.start(nfs_acts.reap_stopping, volume.a.volume, swapped, n)
    codes: list[int] = []
    _frozen(volume, late, lambda b: codes.extend(_restore_all(b)))
    if 0 in codes:
        assert _files(volume.a) == uml_acts.N_FILES
    else:
        done = volume.b.trashd("reap", "--volume", "{}", "--all", "--now")
        assert done.code in (0, 5), done
    _assert_silent(volume)


def _frozen(volume: Volume, late: Running[str], meanwhile: Callable[[Client], None]) -> None:
    """Freeze A where it stops; then B acts, then A goes on to its end."""
    a = volume.a.machine
    if late.told_or_ended() is None:
        meanwhile(volume.b)
        return
    a.freeze()
    try:
        meanwhile(volume.b)
    finally:
        a.wake()
    late.go()
    late.result()


def _look_and_repair(b: Client) -> None:
    _restore_all(b)
    b.trashd("doctor", "--repair", "{}")


def _restore_all(b: Client) -> list[int]:
    """The exit codes of B's restores of all that it sees."""
    found = b.machine.call(nfs_acts.states, b.volume)
    return [b.trashd("restore", "--volume", "{}", identifier).code for identifier, _state in found]


# One that died, or of which somebody says so while it lives.


@pytest.mark.parametrize("n", range(N_SWAP))
def test_a_swap_of_a_machine_that_died_is_completed_or_undone_by_another(volume: Volume, n: int) -> None:
    late = volume.a.machine.start(nfs_acts.swap_stopping, volume.a.path("job"), n)
    late.told_or_ended()
    _name, _host, boot = volume.a.machine.call(uml_acts.who)
    held = volume.a.machine.start(nfs_acts.hold_lock, volume.a.path("held"), "flock")
    held.told()
    volume.site.lose(volume.a.machine)
    if not volume.has_leases:
        volume.site.crash_server()
    volume.b.machine.call(nfs_acts.wait_for_lock, volume.b.path("held"), _LONG_S)
    _repair_for(volume.b, boot)
    _assert_nothing_lost_as_seen_by(volume.b)


@pytest.mark.parametrize("n", range(N_SWAP))
def test_a_swap_that_was_cut_off_and_taken_over_loses_nothing_when_it_comes_back(volume: Volume, n: int) -> None:
    late = volume.a.machine.start(nfs_acts.swap_stopping, volume.a.path("job"), n)
    _name, _host, boot = volume.a.machine.call(uml_acts.who)
    has_stopped = late.told_or_ended() is not None
    with volume.switch.cut(volume.a.machine.port):
        if has_stopped:
            late.go()
        _repair_for(volume.b, boot)
        _restore_all(volume.b)
    late.result()
    _assert_nothing_lost(volume)


@pytest.mark.parametrize("n", range(N_SWAP))
def test_a_change_of_a_swap_sent_once_more_to_a_restarted_server_loses_nothing(volume: Volume, n: int) -> None:
    a = volume.a.machine
    late = a.start(nfs_acts.swap_stopping, volume.a.path("job"), n)
    if late.told_or_ended() is not None:
        sent = volume.switch.when(a.port, _CHANGING, Cable.DROP, Cable.DROP, passes_first=True)
        late.go()
        if sent.wait(_LONG_S if n < 1 else 10):
            volume.server.call(uml_acts.who)  # so that it has done what was sent before
            volume.site.crash_server()
        volume.switch.mend(a.port)
        late.result()
    _assert_nothing_lost(volume)


def _repair_for(client: Client, boot: str) -> None:
    client.machine.call(nfs_acts.forget_caches)
    client.trashd("doctor", "--repair", "--ended", boot, "{}")


# What is looked at in the end.


def _files(client: Client, name: str = "job") -> int:
    client.machine.call(nfs_acts.forget_caches)
    return client.machine.call(uml_acts.count_files, client.path(name))


def _assert_nothing_lost(volume: Volume) -> None:
    """The tree is in place or can be restored, whole; no machine has anything to say in the end."""
    for client in (volume.a, volume.b):
        client.machine.call(nfs_acts.forget_caches)
        client.trashd("doctor", "--repair", "{}")
    _assert_nothing_lost_as_seen_by(volume.b)
    _assert_silent(volume)


def _assert_nothing_lost_as_seen_by(client: Client) -> None:
    if _files(client) != uml_acts.N_FILES:
        found = client.machine.call(nfs_acts.states, client.volume)
        ids = [identifier for identifier, state in found if state == "orphans"]
        told = [client.trashd("restore", "--volume", "{}", i, "--to", f"{{}}/back{k}") for k, i in enumerate(ids)]
        backs = [_files(client, f"back{k}") for k in range(len(ids))]
        assert uml_acts.N_FILES in backs, (found, told, backs, client.run("find", "{}", "-not", "-name", "f*"))


def _assert_silent(volume: Volume) -> None:
    for client in (volume.b, volume.a):
        client.machine.call(nfs_acts.forget_caches)
        done = client.trashd("doctor", "{}")
        assert (done.code, done.out) == (0, ""), done
