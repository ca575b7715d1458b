"""What two mounts of one filesystem are seen to share, on real ones, and for how long one lies of the other."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.second_mount import NeverSeen, SeenBeside, kernels_cache_s, see_beside
from tests.support.fuse_watchdog import fuse_mount
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.sshfs_volumes import sshfs_of

pytestmark = pytest.mark.needs("root")

UNCACHED = ("dir_cache=no", "entry_timeout=0", "attr_timeout=0")
ONE_SECOND = ("dir_cache=no", "entry_timeout=1", "attr_timeout=1")
A_MINUTE = ("dir_cache=no", "entry_timeout=60", "attr_timeout=60")
ALICE = 4711


def opened(path: Path) -> Fd:
    return Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def seen(a: Path, b: Path, limit_s: float = 20) -> SeenBeside:
    with opened(a) as here, opened(b) as there:
        return see_beside(Kernel(), here, there, limit_s, exchanges=False)


@contextmanager
def two_sshfs(options: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as base, ExitStack() as owned:
        (backing := base / "backing").mkdir()
        a, b = (owned.enter_context(sshfs_of(backing, base / name, options)) for name in "ab")
        yield a.path, b.path


@contextmanager
def two_bindfs(*options: str) -> Iterator[tuple[Path, Path]]:
    with tmpfs_volume() as base, ExitStack() as owned:
        for name in ("backing", "a", "b"):
            (base / name).mkdir()
        for name in "ab":
            argv = ["bindfs", "-f", *options, str(base / "backing"), str(base / name)]
            owned.enter_context(fuse_mount(argv, base / name))
        yield base / "a", base / "b"


def test_one_kernel_shares_all_with_itself() -> None:
    with tmpfs_volume() as volume:
        found = seen(volume, volume)
        assert found._replace(cache_s=0) == SeenBeside(True, True, True, True, 0)


def test_only_root_can_try_handles() -> None:
    with tmpfs_volume() as volume:
        os.chown(volume, ALICE, ALICE)
        assert as_user(ALICE, lambda: seen(volume, volume)).handles is None


@pytest.mark.needs("fuse", "sshfs")
def test_two_sshfs_share_neither_locks_nor_handles_nor_birth_times() -> None:
    with two_sshfs(UNCACHED) as (a, b):
        found = seen(a, b)
        assert (found.locks, found.handles, found.birth_times) == (False,) * 3


@pytest.mark.needs("fuse")
def test_locks_that_a_daemon_forwards_are_shared() -> None:
    with two_bindfs("--enable-lock-forwarding", "--multithreaded") as (a, b):
        assert seen(a, b).locks


@pytest.mark.needs("fuse")
def test_locks_that_each_kernel_keeps_are_not() -> None:
    with two_bindfs() as (a, b):
        assert not seen(a, b).locks


@pytest.mark.needs("fuse", "sshfs")
def test_what_is_not_cached_is_seen_sooner_than_what_is_for_a_second() -> None:
    with two_sshfs(UNCACHED) as (a, b):
        uncached_s = seen(a, b).cache_s
    with two_sshfs(ONE_SECOND) as (a, b):
        found = seen(a, b)
        assert found.lying == ()
        assert found.cache_s > max(uncached_s, 0.5)


@pytest.mark.needs("fuse", "sshfs")
def test_what_is_never_seen_is_told_and_counts_as_the_limit() -> None:
    with two_sshfs(A_MINUTE) as (a, b):
        found = seen(a, b, 0.5)
        assert (found.lying, found.cache_s) == (("a name that is gone",), 0.5)


def test_another_directory_shows_nothing() -> None:
    with tmpfs_volume() as volume, tmpfs_volume() as other, pytest.raises(NeverSeen):
        seen(volume, other, 0)


def test_a_name_that_was_taken_meanwhile_is_spared_or_there_is_no_such_rename() -> None:
    """What a filesystem without the flag says is no error."""

    def refuse(call: str) -> None:
        if call == "renameat2":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with tmpfs_volume() as volume, opened(volume) as here, opened(volume) as there:
        assert not see_beside(Kernel(refuse), here, there, 5, exchanges=True).noreplace


@pytest.mark.parametrize(
    ("fstype", "options", "cache_s"),
    [
        (b"nfs4", "rw,vers=4.2", 60),
        (b"nfs", "rw,acregmax=3,acdirmax=9", 9),
        (b"nfs4", "rw,acdirmax=5", 60),
        (b"nfs4", "rw,noac", 0),
        (b"fuse.sshfs", "rw", 0),
    ],
)
def test_nfs_may_lie_longer_than_a_trial_takes(fstype: bytes, options: str, cache_s: float) -> None:
    assert kernels_cache_s(fstype, frozenset(options.split(","))) == cache_s
