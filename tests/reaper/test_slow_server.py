"""A reap on a server: slices as long as they say, threads that share a directory, and a server that goes away."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import ServerAway
from fusefs.core.names import ContainerId
from fusefs.core.pacing import SLICE_S, UNLIMITED, NamesPerClockCheck, SliceBudget, Speed
from fusefs.core.results import Reaped
from fusefs.core.slices import SlicePlan, SliceWork
from fusefs.engine.strategy import AllocationGroups, Workers, choose_strategy
from fusefs.linux.kernel import Kernel
from fusefs.reaper.inner_stores import InnerStores
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.reaper.remove_slice import SliceRemover
from fusefs.reaper.server_outage import OutageOptions
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.make_trees import Spec, fill, make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.reap_process import all_given, empty_container, state_of
from tests.support.store_verbs import ActingBefore, assert_silent, init, own, swap
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root")


_DELAY_US = 10_000
_A_FEW_S = 0.4
"""The calls of one entry, and what a busy machine may be late."""


class _Notes:
    def __init__(self) -> None:
        self.busy_s: list[float] = []
        self.n_entries: list[int] = []

    def tempo(self) -> Speed:
        return UNLIMITED

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        self.busy_s.append(busy_s)
        self.n_entries.append(n_entries)

    def wait(self, seconds: float) -> None:
        raise AssertionError


@contextmanager
def slow_container(n_files: int) -> Iterator[tuple[SlowVolume, Path]]:
    """A container with one flat directory, every call about which takes its time."""
    with tmpfs_volume() as source, slow_volume(source, _DELAY_US) as slow:
        fill(source / "container" / "tree", n_files)
        slow.delay_all()
        yield slow, slow.path / "container"


def empty(container: Path, wishes: RemovalOptions) -> int:
    kernel = Kernel()
    with kernel.open_path(os.fsencode(container), os.O_RDONLY | os.O_DIRECTORY) as fd:
        return empty_container(kernel, fd, wishes).removed


def test_slice_is_as_long_as_it_says() -> None:
    notes = _Notes()
    with slow_container(60) as (_slow, container):
        assert empty(container, RemovalOptions(n_workers=1, pace=notes)) == 61
    # 128 names at a time would take four seconds.
    assert max(notes.busy_s) < SLICE_S + _A_FEW_S, notes.busy_s
    assert len(notes.busy_s) > 10


def test_listing_is_no_longer_than_its_slice_either() -> None:
    notes = _Notes()
    with slow_container(3000) as (slow, container):
        stops = iter([False] * 4)
        empty(container, RemovalOptions(n_workers=1, pace=notes, stops=lambda: next(stops, True)))
        n_read = slow.n_messages["readdir"]
    # The whole directory is more than forty answers.
    assert max(notes.busy_s) < SLICE_S + _A_FEW_S, notes.busy_s
    assert n_read < 20


def test_all_threads_are_at_one_flat_directory() -> None:
    notes = _Notes()
    with slow_container(120) as (slow, container):
        slow.forget_max()
        assert empty(container, RemovalOptions(n_workers=4, pace=notes)) == 121
        assert slow.max_under_way == 4


class _Ghosts(Kernel):
    """Lists names that nothing has beside those that there are."""

    def __init__(self, n_ghosts: int) -> None:
        super().__init__()
        self.n_listings = 0
        with tempfile.TemporaryDirectory() as elsewhere:
            for number in range(n_ghosts):
                Path(elsewhere, f"ghost{number}").touch()
            with os.scandir(elsewhere) as found:
                self._ghosts = list(found)

    @contextmanager
    def scan(self, dir_fd: int) -> Iterator[Iterator[os.DirEntry[str]]]:
        with super().scan(dir_fd) as entries:
            self.n_listings += 1
            yield chain(self._ghosts, entries)


def test_listing_in_parts_that_tells_names_which_nothing_has_comes_to_an_end() -> None:
    with tmpfs_volume() as volume:
        fill(volume / "container" / "tree", 500)
        kernel = _Ghosts(1000)
        with kernel.open_path(os.fsencode(volume / "container"), os.O_RDONLY | os.O_DIRECTORY) as fd:
            strategy = choose_strategy(kernel, fd, 1)._replace(workers=Workers.THREADS)
            given, stores = all_given(kernel, fd), InnerStores(kernel, fd)
            remover = SliceRemover(
                kernel, fd, strategy, AllocationGroups(kernel, None), given, stores, NamesPerClockCheck()
            )
            plan = SlicePlan(1, splits_names=False)
            plan.add(fd, b"", SliceWork(names=["tree"]))
            while work := plan.next():
                for finished in plan.finish_slice(work, remover.run_slice(work, SliceBudget(0.0))):
                    os.close(finished.fd)
                assert kernel.n_listings < 100
        assert os.listdir(volume / "container") == []


AWAY = [errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
TREE: Spec = {"d": {f"f{number}": "" for number in range(20)}, "e": {"deep": {"x": "", "y": ""}}}


@pytest.fixture
def server() -> Iterator[SlowVolume]:
    """A store on a filesystem whose answers are ours to give."""
    with tmpfs_volume() as source, slow_volume(source, 0) as slow:
        init(slow.path)
        yield slow
        slow.refuse(0)
        assert_silent(slow.path)


class Waits:
    """What a reap says of an outage; `then` is called in its first wait."""

    def __init__(self, then: Callable[[], None] = lambda: None, limit_s: float = 60.0) -> None:
        self.told: list[int | None] = []
        self._then: Callable[[], None] | None = then
        self.outage = OutageOptions(limit_s, self.told.append, self._wait)

    def _wait(self, _seconds: float) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def reap_on(volume: Path, identifier: str, wishes: RemovalOptions, kernel: Kernel | None = None) -> Reaped:
    with own(volume) as folder:
        if kernel is not None:
            folder = folder._replace(store=folder.store._replace(kernel=kernel))
        return reap(folder, ContainerId(identifier), wishes._replace(n_workers=1))


@pytest.mark.parametrize("number", AWAY, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["unlink", "rmdir", "getdents", "openat2"])
def test_outage_is_waited_out_and_is_no_failure(server: SlowVolume, number: int, call: str) -> None:
    identifier = swap(make_tree(server.path / "job", TREE)).id
    waits = Waits(lambda: server.refuse(0))
    kernel = Kernel(ActingBefore(call, lambda: server.refuse(number), 5 if call in ("unlink", "openat2") else 2))
    reaped = reap_on(server.path, identifier, RemovalOptions(outage=waits.outage), kernel)
    assert reaped.report.failures == ()
    assert waits.told == [number, None]
    assert state_of(server.path, identifier) is None


def test_directory_that_went_elsewhere_meanwhile_is_not_emptied_by_its_open_fd(server: SlowVolume) -> None:
    job, elsewhere = make_tree(server.path / "job", TREE), server.path / "elsewhere"
    identifier = swap(job).id
    inside = next((server.backing / ".trashd").glob("u/*/orphans/*/tree")) / "d"
    left: list[str] = []

    def move_and_go_on() -> None:
        claimed = Path(str(inside).replace("/orphans/", "/reaping/"))
        os.rename(claimed, server.backing / "elsewhere")
        left.extend(os.listdir(server.backing / "elsewhere"))
        server.refuse(0)

    waits = Waits(move_and_go_on)
    kernel = Kernel(ActingBefore("unlink", lambda: server.refuse(errno.ENOTCONN), 5))
    reap_on(server.path, identifier, RemovalOptions(outage=waits.outage), kernel)
    server.forget_all()
    assert left
    assert sorted(os.listdir(elsewhere)) == sorted(left)


def test_orphan_stays_where_the_next_reap_goes_on_if_the_server_stays_away(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", TREE)).id
    waits = Waits(limit_s=0.3)
    kernel = Kernel(ActingBefore("unlink", lambda: server.refuse(errno.ENOTCONN), 5))
    with pytest.raises(ServerAway) as caught:
        reap_on(server.path, identifier, RemovalOptions(outage=waits.outage), kernel)
    server.refuse(0)
    assert caught.value.errno == errno.ENOTCONN
    assert "mount it again" in caught.value.hint
    assert state_of(server.path, identifier) is State.REAPING
    assert reap_on(server.path, identifier, RemovalOptions()).report.failures == ()
    assert state_of(server.path, identifier) is None


def test_mount_that_is_dead_for_good_ends_a_reap_with_what_to_do_about_it() -> None:
    with tmpfs_volume() as source:
        with slow_volume(source, 0) as slow:
            init(slow.path)
            identifier = swap(make_tree(slow.path / "job", TREE)).id
            waits, kernel = Waits(limit_s=0.3), Kernel(ActingBefore("unlink", slow.fuse.abort, 5))
            with pytest.raises(ServerAway) as caught:
                reap_on(slow.path, identifier, RemovalOptions(outage=waits.outage), kernel)
            assert "mount it again" in caught.value.hint
        with slow_volume(source, 0) as mounted_again:
            assert state_of(mounted_again.path, identifier) is State.REAPING
            assert reap_on(mounted_again.path, identifier, RemovalOptions()).report.failures == ()
            assert_silent(mounted_again.path)


def test_outage_ends_the_slices_of_all_threads(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {f"d{n}": {f"f{m}": "" for m in range(50)} for n in range(20)})).id
    server.delay(1000)
    server.delay_all()
    waits = Waits(lambda: server.refuse(0))
    wishes = RemovalOptions(n_workers=8, outage=waits.outage)
    with own(server.path) as folder:
        store = folder.store._replace(kernel=Kernel(ActingBefore("unlink", lambda: server.refuse(errno.ENOTCONN), 300)))
        reaped = reap(folder._replace(store=store), ContainerId(identifier), wishes)
    assert reaped.report.failures == ()
    assert waits.told == [errno.ENOTCONN, None]


@pytest.mark.parametrize("how", ["stops", "parks"])
def test_stop_is_heard_while_the_server_is_waited_for(server: SlowVolume, how: str) -> None:
    identifier = swap(make_tree(server.path / "job", TREE)).id
    asked: list[bool] = []
    waits = Waits(lambda: asked.append(True))
    kernel = Kernel(ActingBefore("unlink", lambda: server.refuse(errno.ENOTCONN), 5))
    wishes = RemovalOptions(outage=waits.outage)
    wishes = (
        wishes._replace(stops=lambda: bool(asked)) if how == "stops" else wishes._replace(parks=lambda: bool(asked))
    )
    reaped = reap_on(server.path, identifier, wishes, kernel)
    server.refuse(0)
    assert reaped.report.stopped
    assert state_of(server.path, identifier) is State.REAPING
    assert reap_on(server.path, identifier, RemovalOptions()).report.failures == ()


def test_entry_that_can_not_be_read_while_all_else_can_is_a_failure_of_its_own(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {**TREE, "broken": ""})).id
    server.refuse(errno.EIO, "broken")
    waits = Waits()
    reaped = reap_on(server.path, identifier, RemovalOptions(outage=waits.outage))
    server.refuse(0)
    assert [(failure.name, failure.errno) for failure in reaped.report.failures] == [(b"tree/broken", errno.EIO)]
    assert waits.told == []
    assert state_of(server.path, identifier) is State.QUARANTINE


def test_all_else_goes_while_one_of_several_servers_is_waited_for(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {**TREE, "there": "", "z": {"there": ""}})).id
    server.refuse(errno.ENOTCONN, "there")
    left: list[list[str]] = []

    def come_back() -> None:
        tree = next((server.backing / ".trashd").glob("u/*/reaping/*/tree"))
        left.append(sorted(str(one.relative_to(tree)) for one in tree.rglob("*")))
        server.refuse(0)

    waits = Waits(come_back)
    assert reap_on(server.path, identifier, RemovalOptions(outage=waits.outage)).report.failures == ()
    assert left == [["there", "z", "z/there"]]
    assert waits.told == [errno.ENOTCONN, None]


def test_entry_whose_server_stays_away_is_not_put_aside(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {**TREE, "there": ""})).id
    server.refuse(errno.ENOTCONN, "there")
    with pytest.raises(ServerAway):
        reap_on(server.path, identifier, RemovalOptions(outage=Waits(limit_s=0.3).outage))
    server.refuse(0)
    assert state_of(server.path, identifier) is State.REAPING
    assert reap_on(server.path, identifier, RemovalOptions()).report.failures == ()


def test_failure_that_passes_is_none(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {**TREE, "broken": ""})).id
    server.refuse(errno.EIO, "broken")
    waits = Waits(lambda: server.refuse(0))
    assert reap_on(server.path, identifier, RemovalOptions(outage=waits.outage)).report.failures == ()
    assert state_of(server.path, identifier) is None


def test_stale_directory_that_somebody_else_removed_is_no_outage(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", TREE)).id
    inside = next((server.backing / ".trashd").glob("u/*/orphans/*/tree"))

    def remove_below() -> None:
        for file in (reaping := Path(str(inside).replace("/orphans/", "/reaping/"))).glob("d/*"):
            file.unlink()
        (reaping / "d").rmdir()
        server.refuse(errno.ESTALE, "(deleted)")

    waits = Waits()
    kernel = Kernel(ActingBefore("unlink", remove_below, 5))
    reaped = reap_on(server.path, identifier, RemovalOptions(outage=waits.outage), kernel)
    assert reaped.report.failures == ()
    assert waits.told == []


class _Lossy(Kernel):
    """A kernel that says ENOTCONN, once: of its n-th call, or of the n-th change of names, which was done."""

    def __init__(self, number: int, *, does_it: bool) -> None:
        super().__init__(self._count)
        self.left = number
        self._does_it = does_it

    def _count(self, call: str) -> None:
        if not self._does_it and call != "statfs":
            self._lose()

    def _lose(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    def _done(self) -> None:
        if self._does_it:
            self._lose()

    def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        super().rename_free(old_dir, old, new_dir, new)
        self._done()

    def rmdir(self, dir_fd: int, name: bytes) -> None:
        super().rmdir(dir_fd, name)
        self._done()

    def unlink(self, dir_fd: int, name: bytes) -> None:
        super().unlink(dir_fd, name)
        self._done()


@pytest.mark.parametrize("does_it", [False, True], ids=["not-done", "done"])
def test_reap_goes_on_after_an_outage_at_any_call(server: SlowVolume, does_it: bool) -> None:
    number = 1
    while True:
        identifier = swap(make_tree(server.path / f"job{number}", {"d": {"a": "", "b": ""}, "c": ""})).id
        waits = Waits()
        kernel = _Lossy(number, does_it=does_it)
        reaped = reap_on(server.path, identifier, RemovalOptions(outage=waits.outage), kernel)
        assert (reaped.lost, reaped.report.failures) == (None, ()), number
        assert 5 - does_it <= reaped.report.removed <= 5
        assert state_of(server.path, identifier) is None
        assert_silent(server.path)
        if kernel.left > 0:
            break
        number += 1
    assert number > (4 if does_it else 20)


def test_errors_of_a_local_disk_are_failures_at_once(volume: Path) -> None:
    identifier = swap(make_tree(volume / "job", TREE)).id
    waits = Waits()

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    reaped = reap_on(volume, identifier, RemovalOptions(outage=waits.outage), Kernel(ActingBefore("unlink", fail, 5)))
    assert [failure.errno for failure in reaped.report.failures] == [errno.EIO]
    assert waits.told == []
    assert reap_on(volume, identifier, RemovalOptions()).report.failures == ()


def test_person_is_told_that_the_server_is_waited_for(server: SlowVolume) -> None:
    identifier = swap(make_tree(server.path / "job", {"d": {f"hang{number}": "" for number in range(20)}})).id
    server.hang("hang7")
    words = [str(TRASHD), "reap", "--now", "--volume", str(server.path), identifier]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment({})) as command:
        server.wait_until_hung()
        server.refuse(errno.ENOTCONN)
        server.go_on()
        assert command.stderr is not None
        assert "does not respond (Transport endpoint is not connected); waiting at most 2m" in next(
            iter(command.stderr)
        )
        server.refuse(0)
        assert "responds again" in next(iter(command.stderr))
    assert command.returncode == 0
