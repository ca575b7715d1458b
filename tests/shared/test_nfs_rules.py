"""What the design for shared filesystems takes from NFS, and what it can't: Linux's client and server, 3 and 4.2."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support import nfs_actions, uml_actions
from tests.support.nfs_machines import VERSIONS, NfsVolume, Site, site
from tests.support.uml_guest import Line
from tests.support.uml_machine import RunningAction
from tests.support.uml_switch import Cable

pytestmark = [pytest.mark.needs("root", "uml", "hours"), pytest.mark.timeout(300)]

REFUSED = ("ENOENT", "ESTALE")
"""How a rename from or to a removed directory may be refused; each is one of core's words for a lost race."""
_LONG_S = 45.0
_MOVED = re.compile(b"movedXYZ")


@pytest.fixture(scope="module")
def machines() -> Iterator[Site]:
    with site() as made:
        yield made


@pytest.fixture(params=list(VERSIONS))
def volume(machines: Site, request: pytest.FixtureRequest) -> Iterator[NfsVolume]:
    with machines.volume(VERSIONS[request.param]) as mounted:
        yield mounted


def test_the_clients_are_machines_of_their_own(machines: Site) -> None:
    told = [machines.machine(name).call(uml_actions.who) for name in ("a", "b", "server")]
    assert [len(set(values)) for values in zip(*told, strict=True)] == [3, 3, 3]


def test_exchange_and_noreplace_and_unnamed_files_are_refused(volume: NfsVolume) -> None:
    folder, machine = volume.a.volume, volume.a.machine
    assert machine.call(nfs_actions.renamed, folder, 2) == "EINVAL"
    machine.call(nfs_actions.make_directories, f"{folder}/n")
    assert machine.call(nfs_actions.renamed, f"{folder}/n", 1) == "EINVAL"
    assert machine.call(nfs_actions.made_unnamed, folder) == "ENOTSUP"


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
def test_a_lock_is_seen_by_the_other_client(volume: NfsVolume, kind: str) -> None:
    path = volume.a.path("file")
    held = volume.a.machine.start(nfs_actions.hold_lock, path, kind)
    assert held.told() == "locked"
    assert volume.b.machine.call(nfs_actions.try_lock, path, kind) == "EAGAIN"
    held.go()
    assert held.result() == nfs_actions.DONE
    assert volume.b.machine.call(nfs_actions.try_lock, path, kind) == nfs_actions.DONE


def test_a_machine_that_is_cut_off_loses_its_lock_with_its_lease_on_4_2_and_can_write_no_more(machines: Site) -> None:
    with machines.volume(VERSIONS["v4.2"]) as volume:
        path = volume.a.path("file")
        held = volume.a.machine.start(nfs_actions.hold_lock, path, "flock")
        assert held.told() == "locked"
        with volume.switch.cut(volume.a.machine.port):
            waited_s = volume.b.machine.call(nfs_actions.wait_for_lock, path, _LONG_S)
        assert waited_s > 1
        held.go()
        assert held.result() == "EIO"


def test_a_lock_of_a_machine_that_died_stays_on_3_until_the_server_starts_again(machines: Site) -> None:
    with machines.volume(VERSIONS["v3"]) as volume:
        path = volume.a.path("file")
        assert volume.a.machine.start(nfs_actions.hold_lock, path, "flock").told() == "locked"
        machines.lose(volume.a.machine)
        assert volume.b.machine.call(nfs_actions.try_lock, path, "flock") == "EAGAIN"
        machines.crash_server()
        assert volume.b.machine.call(nfs_actions.try_lock, path, "flock") == nfs_actions.DONE


@pytest.mark.parametrize("version", list(VERSIONS))
def test_another_machine_sees_a_name_s_new_directory_when_its_caches_time_is_over(machines: Site, version: str) -> None:
    with machines.volume(VERSIONS[version] + ",acregmin=2,acregmax=2,acdirmin=2,acdirmax=2") as volume:
        a, b = volume.a.machine, volume.b.machine
        a.call(nfs_actions.make_directories, volume.a.path("old/inner"), volume.a.path("new"))
        watch = b.start(nfs_actions.until_seen_ino, volume.b.path("old"), _LONG_S)
        assert watch.told() == "looked"
        a.call(nfs_actions.rename, volume.a.path("old"), volume.a.path("gone"))
        a.call(nfs_actions.rename, volume.a.path("new"), volume.a.path("old"))
        waited_s, _n_missing = watch.result()
        assert waited_s < _LONG_S


def test_a_handle_is_the_same_on_both_clients_and_there_is_no_birth_time(volume: NfsVolume) -> None:
    volume.a.machine.call(nfs_actions.make_directories, volume.a.path("x"))
    told = [client.machine.call(nfs_actions.handle, client.path("x")) for client in (volume.a, volume.b)]
    assert told[0] == told[1]
    found = volume.b.machine.call(nfs_actions.ino_by_handle, volume.b.volume, *told[0])
    assert found == volume.a.machine.call(nfs_actions.ino, volume.a.path("x"))
    assert volume.a.machine.call(nfs_actions.birth_ns, volume.a.path("x")) == 0


def test_a_file_that_its_own_client_has_open_keeps_a_name_and_its_directory(volume: NfsVolume) -> None:
    names, while_open, after = volume.a.machine.call(nfs_actions.silly_names, volume.a.path("d"))
    assert [name[:4] for name in names] == [".nfs"]
    assert (while_open, after) == ("ENOTEMPTY", nfs_actions.DONE)


# The fence: a directory that another client removed.


def test_a_rename_by_fd_into_or_out_of_a_directory_that_the_other_client_removed_is_refused(volume: NfsVolume) -> None:
    a, b = volume.a.machine, volume.b.machine
    gate, tree = volume.a.path("gate"), volume.a.path("tree")
    a.call(nfs_actions.make_directories, gate, tree)
    late = a.start(nfs_actions.move_by_fd, gate, tree, "tree")
    assert late.told() == "open"
    assert b.call(nfs_actions.rmdir, gate) == nfs_actions.DONE
    late.go()
    into, out = late.result()
    assert {into, out} <= set(REFUSED)
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/tree")


def test_a_rename_by_fd_finds_no_directory_of_that_name_that_was_made_since(volume: NfsVolume) -> None:
    a, b = volume.a.machine, volume.b.machine
    gate, tree = volume.a.path("gate"), volume.a.path("tree")
    a.call(nfs_actions.make_directories, gate, tree)
    late = a.start(nfs_actions.move_by_fd, gate, tree, "tree")
    assert late.told() == "open"
    assert b.call(nfs_actions.rmdir, gate) == nfs_actions.DONE
    b.call(nfs_actions.make_directories, f"{gate}/tree/new")
    late.go()
    into, out = late.result()
    assert {into, out} <= set(REFUSED)
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/tree")
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/gate/tree/new")


def test_a_rename_by_fd_held_by_the_network_finds_the_directory_removed(volume: NfsVolume) -> None:
    b = volume.b.machine
    gate, tree = volume.a.path("gate"), volume.a.path("treeXYZ")
    volume.a.machine.call(nfs_actions.make_directories, gate, tree)
    with _held(volume, nfs_actions.rename_into_fd, gate, tree, "movedXYZ") as late:
        assert b.call(nfs_actions.rmdir, gate) == nfs_actions.DONE
        b.call(nfs_actions.make_directories, gate)
    assert late.result() in REFUSED
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/treeXYZ")


def test_a_rename_by_path_held_by_the_network_is_done_in_a_directory_of_that_name_made_since(volume: NfsVolume) -> None:
    """Linux walks the path anew after ESTALE: a name of a gate is used once, or known by fd alone."""
    b = volume.b.machine
    gate, tree = volume.a.path("gate"), volume.a.path("treeXYZ")
    volume.a.machine.call(nfs_actions.make_directories, gate, tree)
    with _held(volume, nfs_actions.open_then_rename, gate, tree, f"{gate}/movedXYZ") as late:
        assert b.call(nfs_actions.rmdir, gate) == nfs_actions.DONE
        b.call(nfs_actions.make_directories, gate)
    assert late.result() == nfs_actions.DONE
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/gate/movedXYZ")


@contextmanager
def _held(
    volume: NfsVolume, act: Callable[[Line, str, str, str], str], *arguments: str
) -> Iterator[RunningAction[str]]:
    """A's action, whose first frame with movedXYZ in it is on its way as long as the block lasts."""
    late = volume.a.machine.start(act, *arguments)
    assert late.told() == "open"
    sent = volume.switch.when(volume.a.machine.port, _MOVED, Cable.HOLD)
    late.go()
    assert sent.wait(_LONG_S)
    yield late
    volume.switch.mend(volume.a.machine.port)


def test_a_rename_sent_once_more_to_a_restarted_server_finds_the_directory_removed(volume: NfsVolume) -> None:
    """And its sender is told that it failed, though it was done: another has moved the tree on since."""
    b = volume.b.machine
    gate, tree = volume.a.path("gate"), volume.a.path("treeXYZ")
    volume.a.machine.call(nfs_actions.make_directories, gate, tree)
    with _unanswered(volume, nfs_actions.rename_into_fd, gate, tree, "movedXYZ") as late:
        volume.server.call(uml_actions.wait_for_path, f"{volume.below}/gate/movedXYZ")
        b.call(nfs_actions.forget_caches)
        assert b.call(nfs_actions.rename, f"{gate}/movedXYZ", tree) == nfs_actions.DONE  # where its sender had it
        assert b.call(nfs_actions.rmdir, gate) == nfs_actions.DONE
        volume.site.crash_server()
    assert late.result() in REFUSED
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/treeXYZ")


def test_a_restarted_server_says_enoent_to_a_rename_that_it_did(volume: NfsVolume) -> None:
    tree = volume.a.path("treeXYZ")
    volume.a.machine.call(nfs_actions.make_directories, tree)
    with _unanswered(volume, nfs_actions.rename_into_fd, volume.a.volume, tree, "movedXYZ") as late:
        volume.server.call(uml_actions.wait_for_path, f"{volume.below}/movedXYZ")
        volume.site.crash_server()
    assert late.result() == "ENOENT"
    assert volume.server.call(nfs_actions.is_there, f"{volume.below}/movedXYZ")


def test_a_restarted_server_says_eexist_to_a_mkdir_that_it_did(volume: NfsVolume) -> None:
    with _unanswered(volume, nfs_actions.make_in_fd, volume.a.volume, "movedXYZ", "") as late:
        volume.server.call(uml_actions.wait_for_path, f"{volume.below}/movedXYZ")
        volume.site.crash_server()
    assert late.result() == "EEXIST"


def test_an_unlink_by_fd_finds_its_directory_wherever_another_moved_it(volume: NfsVolume) -> None:
    """So that what is in reaping/ is never given back."""
    tree = volume.a.path("tree")
    volume.a.machine.call(nfs_actions.make_directories, tree)
    volume.a.machine.call(nfs_actions.write_file, f"{tree}/file")
    late = volume.a.machine.start(nfs_actions.unlink_by_fd, tree, "file")
    assert late.told() == "open"
    assert volume.b.machine.call(nfs_actions.rename, tree, volume.b.path("restored")) == nfs_actions.DONE
    late.go()
    assert late.result() == nfs_actions.DONE
    assert not volume.server.call(nfs_actions.is_there, f"{volume.below}/restored/file")


@contextmanager
def _unanswered(
    volume: NfsVolume, act: Callable[[Line, str, str, str], str], *arguments: str
) -> Iterator[RunningAction[str]]:
    """A's action, whose first frame with movedXYZ in it comes through, and nothing more as long as the block lasts."""
    late = volume.a.machine.start(act, *arguments)
    assert late.told() == "open"
    port = volume.a.machine.port
    sent = volume.switch.when(port, _MOVED, Cable.DROP, Cable.DROP, passes_first=True)
    late.go()
    assert sent.wait(_LONG_S)
    yield late
    volume.switch.mend(port)
