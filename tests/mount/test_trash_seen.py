"""What the store changes of names that others see is seen at once, by all that had looked and may remember for long.

Nothing here is remembered for less than an hour (coherence=exclusive), so that what is done behind the mount stays
unseen.
"""

import errno
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.core.container_states import State
from fusefs.core.names import STORE
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME
from fusefs.store.as_owner import swap_for_owner
from fusefs.store.find_stores import discover_stores
from fusefs.store.make_store import make_store, unmake_store
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.stage import SwapOptions
from fusefs.store.tidy_folder import tidy_folder
from fusefs.store.user_folders import open_user_folder
from tests.support.background_mounts import backing_of, is_dead
from tests.support.crash_scenarios import DyingAfter, forbid_exchange
from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.make_trees import Dir, Spec, make_tree, snapshot
from tests.support.mount_and_backing import ALICE, NOGROUP
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    assert_silent,
    in_child,
    init,
    raw,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
)

pytestmark = pytest.mark.needs("root", "fuse")

TREE: Spec = {"results": "x", "deep": Dir({"er": Dir({"leaf": "y"}, mode=0o711)}, mode=0o750)}

NAMES = ("job", "job2", "job/results", "job/deep", "job/deep/er", "job/deep/er/leaf")
"""What a client asks for, there or not."""
_NUMBERS = itertools.count()


class Place(NamedTuple):
    """A home of Alice's in a mount, and on the backing filesystem."""

    mounted: Mounted
    top: Path
    backing: Path
    name: str

    def home(self) -> Path:
        """Where her things are, in the mount."""
        return self.top / self.name

    def job(self, mode: int = 0o755) -> Path:
        """A tree of hers, made through the mount."""
        path = self.home() / "job"
        as_user(ALICE, lambda: make_tree(path, Dir(TREE, mode=mode)) and None)
        return path

    def look(self) -> None:
        """Let a client see what there is and what there isn't, so that it may be remembered."""
        snapshot(self.home())
        # After the listings: each makes the kernel ask for the time of the last access, and so for all attributes.
        for name in ("", *NAMES):
            with suppress(FileNotFoundError):
                os.lstat(self.home() / name)

    def assert_seen(self) -> None:
        """The mount shows what there is: names one by one, listings, attributes."""
        home = self.backing / self.name
        shown = [[name for name in NAMES if os.path.lexists(side / name)] for side in (self.home(), home)]
        assert shown[0] == shown[1]
        for path in (home, *home.rglob("*")):
            assert seen_of(self.top / path.relative_to(self.backing)) == seen_of(path), path


def seen_of(path: Path) -> tuple[object, ...]:
    st = path.lstat()
    names = sorted(os.listdir(path)) if path.is_dir() else []
    return names, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_mtime_ns


@pytest.fixture(scope="module", params=["elsewhere", "over itself", "slow"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mounted volume with a store."""
    with tmpfs_volume() as path:
        source = path / "source"
        source.mkdir()
        init(source)
        as_user(ALICE, lambda: init(source))
        target = source if request.param == "over itself" else None
        # On slow backing the daemon remembers, too.
        options = ["coherence=exclusive", "backing=slow" if request.param == "slow" else "backing=local"]
        with trashd_mount(source, target, options, limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted


@pytest.fixture
def place(mounted: Mounted) -> Iterator[Place]:
    """A home of the test's own, whose name nothing has asked the mount for."""
    place = Place(mounted, mounted.path, backing_of(mounted.path), f"home{next(_NUMBERS)}")
    make_tree(place.backing / place.name, Dir(owner=(ALICE, ALICE)))
    volume_record = place.backing / ".trashd/volume.json"
    before = volume_record.read_bytes()
    yield place
    assert_silent(place.backing)
    volume_record.write_bytes(before)  # a test may have forbidden the exchange


def killed(act: Callable[[Kernel], object], call: str, n: int = 1, uid: int = ALICE) -> None:
    """Leave what an act leaves that is killed after its n-th call of that name."""

    def die() -> int:
        return in_child(lambda: act(Kernel(DyingAfter(call, n))))

    assert (as_user(uid, die) if uid else die()) == DyingAt.EXIT_CODE


# Names


def test_a_removed_name_is_gone_for_who_knew_it(place: Place) -> None:
    job = place.job()
    place.look()
    as_user(ALICE, lambda: remove(job))
    assert not job.exists()
    place.assert_seen()


def test_a_restored_name_is_there_for_who_missed_it(place: Place) -> None:
    job = place.job()
    removed = as_user(ALICE, lambda: remove(job))
    place.look()
    restore(place.top, removed.id)
    assert job.is_dir()
    place.assert_seen()


@pytest.mark.parametrize(("uid", "mode"), [(ALICE, 0o755), (0, 0o555)])
def test_a_tree_restored_elsewhere_is_there_for_who_missed_it(place: Place, uid: int, mode: int) -> None:
    job = place.job(mode)
    swapped = as_user(ALICE, lambda: swap(job))
    place.look()

    def restore_elsewhere() -> None:
        restore(place.top, swapped.id, to=place.home() / "job2")

    as_user(uid, restore_elsewhere) if uid else restore_elsewhere()
    place.assert_seen()


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_directories_made_for_a_restored_part_are_there_for_who_missed_them(place: Place, is_gone: bool) -> None:
    job = place.job()
    swapped = as_user(ALICE, lambda: swap(job))
    if is_gone:
        job.rmdir()
    place.look()
    as_user(ALICE, lambda: restore(place.top, swapped.id, inside=b"deep/er/leaf"))
    assert (job / "deep/er/leaf").read_text() == "y"
    assert [(job / name).stat().st_mode & 0o7777 for name in ("deep", "deep/er")] == [0o750, 0o711]
    place.assert_seen()


@pytest.mark.parametrize("is_roots", [False, True])
def test_the_fresh_directory_that_recovery_places_is_there_for_who_missed_it(place: Place, is_roots: bool) -> None:
    job = place.job()
    forbid_exchange(place.backing)
    killed(lambda kernel: swap(job, kernel), "rename", uid=0 if is_roots else ALICE)
    place.look()
    assert not job.exists()
    assert recover_all(place.top) == []
    assert os.listdir(job) == []
    place.assert_seen()


def test_the_tree_that_recovery_puts_back_is_there_for_who_missed_it(place: Place) -> None:
    job = place.job()
    before = snapshot(job)
    forbid_exchange(place.backing)
    swapped = as_user(ALICE, lambda: swap(job))
    killed(lambda kernel: restore(place.top, swapped.id, kernel), "rename", 2)
    place.look()
    assert not job.exists()
    assert recover_all(place.top) == []
    assert snapshot(job) == before
    place.assert_seen()


def test_what_was_reaped_of_a_restored_tree_is_missed_by_who_knew_it(place: Place) -> None:
    job = place.job()
    place.mounted.forget_all()
    place.look()  # what the kernel asks now, the daemon may remember, too
    swapped = as_user(ALICE, lambda: swap(job))
    killed(lambda kernel: reap_now(place.top, swapped.id, kernel), "unlink", 3)
    assert as_user(ALICE, lambda: restore(place.top, swapped.id).partial)
    left = [name for name in NAMES if os.path.lexists(place.backing / place.name / name)]
    assert left == ["job", "job/deep", "job/deep/er"]
    place.assert_seen()


def test_recovery_changes_names_by_the_mounts_own(place: Place) -> None:
    job = place.job()
    forbid_exchange(place.backing)
    killed(lambda kernel: swap(job, kernel), "rename")
    device = os.stat(place.home()).st_dev
    renamed: list[int] = []

    class Watching(Kernel):
        def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
            renamed.append(os.fstat(new_dir).st_dev)
            super().rename_free(old_dir, old, new_dir, new)

    assert as_user(ALICE, lambda: recover_all(place.top, Watching()) or renamed) == [device]


def test_a_mount_whose_daemon_is_dead_does_not_keep_recovery_from_its_work() -> None:
    with tmpfs_volume() as path:
        source = make_tree(path / "source", {"job": TREE})
        init(source)
        forbid_exchange(source)
        with trashd_mount(source, expect_end=True) as mounted:
            killed(lambda kernel: swap(mounted.path / "job", kernel), "rename", uid=0)
            [store] = discover_stores(Kernel(), [raw(mounted.path)])
            with store:
                os.kill(mounted.pid, signal.SIGKILL)
                assert until(lambda: is_dead(mounted.path))
                folder = open_user_folder(store, 0)
                assert folder is not None
                with folder:
                    assert tidy_folder(folder) == []
            assert os.listdir(source / "job") == []
        assert_silent(source)


def test_a_store_made_further_down_is_there_for_who_had_listed_its_directory(place: Place) -> None:
    above = place.home() / "above"
    as_user(ALICE, lambda: make_tree(above, {"job": TREE}) and None)
    moved = place.backing / ".trashd"
    moved.rename(place.backing / "aside")  # as if it could not be made at the mount's start
    try:
        place.look()
        swapped = as_user(ALICE, lambda: swap(above / "job"))
        assert swapped.volume is not None
        assert swapped.volume.endswith(b"/" + os.fsencode(place.name))
        assert not swapped.volume.startswith(MOUNTS_RUNTIME), "it is there without the mount too"
        place.assert_seen()
        as_user(ALICE, lambda: restore(place.home(), swapped.id))
    finally:
        (place.backing / "aside").rename(moved)


def test_a_store_made_in_vain_is_gone_for_who_had_seen_it(place: Place) -> None:
    kernel, path = Kernel(), raw(place.home())
    shown = open_both_sides(kernel, path)
    make_store(kernel, shown, path, STORE).__exit__()
    place.look()
    with open_both_sides(kernel, path) as base:
        unmake_store(kernel, base, path, STORE)
    assert os.listdir(place.home()) == []
    place.assert_seen()


# Modes


def test_the_fresh_directory_shows_its_mode_to_who_saw_it_in_the_moment_of_the_loan(place: Place) -> None:
    job = place.job(0o555)
    place.look()
    as_user(ALICE, lambda: swap(job, Kernel(AtChmod(2, job.stat))))
    assert job.stat().st_mode & 0o7777 == 0o555
    place.assert_seen()


def test_the_fresh_directory_of_a_swap_for_its_owner_shows_its_mode(place: Place) -> None:
    job = place.job(0o555)
    os.chown(job, ALICE, NOGROUP)
    place.look()
    swap_for_owner(Kernel(AtChmod(2, job.stat)), raw(job), SwapOptions())
    assert job.stat().st_mode & 0o7777 == 0o555
    place.assert_seen()


def test_who_holds_the_old_tree_sees_its_mode(place: Place) -> None:
    job = place.job(0o555)
    fd = os.open(job, os.O_RDONLY)
    try:
        as_user(ALICE, lambda: swap(job, Kernel(AtChmod(2, lambda: os.fstat(fd)))))
        assert os.fstat(fd).st_mode & 0o7777 == 0o555
    finally:
        os.close(fd)


def test_who_holds_the_old_tree_may_do_no_more_in_it_than_before(place: Place) -> None:
    job = place.job(0o555)

    def swap_and_write() -> None:
        fd = os.open(job, os.O_RDONLY)
        swap(job)
        with pytest.raises(PermissionError):
            os.mkdir("new", dir_fd=fd)

    as_user(ALICE, swap_and_write)


def test_a_victim_that_stayed_shows_its_mode_to_who_saw_it_in_the_moment_of_the_loan(place: Place) -> None:
    job = place.job(0o555)

    def look_and_fail() -> None:
        assert job.stat().st_mode & 0o7777 == 0o755
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(Exception, match="Input/output"):
        as_user(ALICE, lambda: swap(job, Kernel(ActingBefore("exchange", look_and_fail))))
    assert job.stat().st_mode & 0o7777 == 0o555
    place.assert_seen()


def test_a_restored_tree_shows_its_mode_to_who_saw_it_in_the_moment_of_the_loan(place: Place) -> None:
    job = place.job(0o555)
    swapped = as_user(ALICE, lambda: swap(job))
    place.look()
    as_user(ALICE, lambda: restore(place.top, swapped.id, Kernel(AtChmod(2, job.stat))))
    assert job.stat().st_mode & 0o7777 == 0o555
    assert os.listdir(job) != []
    place.assert_seen()


def test_the_loan_of_a_killed_restore_is_over_for_who_saw_it(place: Place) -> None:
    job = place.job(0o555)
    swapped = as_user(ALICE, lambda: swap(job))
    killed(lambda kernel: restore(place.top, swapped.id, kernel), "exchange")
    assert job.stat().st_mode & 0o7777 == 0o755
    assert recover_all(place.top) == []
    place.assert_seen()
    assert job.stat().st_mode & 0o7777 == 0o555


@pytest.mark.parametrize("call", ["chmod", "exchange"])
def test_the_loan_of_a_killed_swap_is_over_for_who_saw_it(place: Place, call: str) -> None:
    job = place.job(0o555)
    killed(lambda kernel: swap(job, kernel), call)
    place.mounted.forget_all()
    assert job.is_dir()
    assert recover_all(place.top) == []
    assert job.stat().st_mode & 0o7777 == 0o555
    place.assert_seen()
    folder = place.backing / ".trashd" / "u" / str(ALICE)
    assert [os.listdir(folder / state.value) for state in (State.STAGE, State.RESTORING)] == [[], []]


class AtChmod:
    """A hook that does something before the n-th chmod (from 0): 0 and 1 are before the exchange, 2 is after it."""

    def __init__(self, n: int, action: Callable[[], object]) -> None:
        self.left = n
        self.action = action

    def __call__(self, call: str) -> None:
        self.left -= call == "chmod"
        if call == "chmod" and self.left == -1:
            self.action()
