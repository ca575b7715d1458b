"""`trashd init --beside`: what a second mount of the volume shares with the first, for volume.json."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.errors import Refused
from fusefs.core.names import STORE, join
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import find_mount, read_mounts
from fusefs.linux.second_mount import NeverSeen, kernels_cache_s, see_beside, wait_until
from fusefs.linux.trial_directory import TRIAL, discard_trial_directory
from fusefs.store.backing_and_mount import DIRECTORY, READABLE
from fusefs.store.layout import Store, Volume
from fusefs.store.make_store import PROBE_BESIDE
from fusefs.store.mounted_paths import open_shown

LIMIT_S = 120.0
_SAME_MOUNT = "it is what VOLUME is, seen by the same client of the filesystem, and tells nothing of another one"
_SECOND = (
    "name another client's mount of it: one made by a second mount command on this machine "
    "(NFS: with -o nosharecache), or a container's"
)
_READ_ONLY = "it is read-only, and both are to write"
_OTHER = "it does not show what VOLUME does: of two names, one made by each, not both were seen by the other within"


class SecondMount(NamedTuple):
    """The directory of a volume as a second mount shows it; `path` is for people."""

    fd: Fd
    path: bytes
    limit_s: float

    def __enter__(self) -> Self:
        """Own its fd for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        self.fd.close()


def open_second(kernel: Kernel, base_fd: Fd, path: bytes, limit_s: float = LIMIT_S) -> SecondMount:
    """A second mount of a volume's directory, before anything is made in either.

    limit_s  how long to wait until one sees what the other does
    Raises   Refused if it can't be one; OSError; NoBacking
    """
    shown = open_shown(kernel, path)
    if shown.mounted is not None:
        shown.mounted.close()
    fd, where = shown.fd, printable(path)
    with closed_on_error(fd):
        if kernel.fstat(fd).st_dev == kernel.fstat(base_fd).st_dev:
            raise Refused(f"--beside {where}: {_SAME_MOUNT}", _SECOND)
        if kernel.is_read_only(fd):
            raise Refused(f"--beside {where}: {_READ_ONLY}", _SECOND)
    return SecondMount(fd, path, limit_s)


def prove_beside(store: Store, beside: SecondMount) -> tuple[Volume, tuple[str, ...]]:
    """What volume.json is to say of a store, now that a second mount of it is seen too; and what one of the two went on
    telling until nobody waited any longer, in words.

    Raises  Refused if it shows another directory; OSError
    """
    kernel, known = store.kernel, store.volume
    with ExitStack() as owned:
        _clean_up(kernel, store.fd, beside.limit_s)  # a killed one's
        owned.callback(_clean_up, kernel, store.fd, beside.limit_s)
        kernel.mkdir(store.fd, PROBE_BESIDE)
        here = owned.enter_context(kernel.open_dir(store.fd, PROBE_BESIDE))
        there = owned.enter_context(_the_same(kernel, here, beside))
        try:
            seen = see_beside(kernel, here, there, beside.limit_s, exchanges=known.exchange)
        except NeverSeen as error:
            raise _is_other(beside) from error
    volume = known._replace(
        noreplace=bool(known.noreplace) and seen.noreplace,
        shared_locks=seen.locks,
        handles=seen.handles,
        birth_times=seen.birth_times,
        cache_s=max(seen.cache_s, *(_kernels_cache_s(kernel, fd) for fd in (store.fd, beside.fd))),
    )
    return volume, seen.lying


def _the_same(kernel: Kernel, here: Fd, beside: SecondMount) -> Fd:
    """A directory of ours by the second mount, when a name made by each has been seen by the other.

    Raises  Refused if none was; OSError
    """
    way = join(STORE, PROBE_BESIDE)
    mine, theirs = (TRIAL + os.urandom(8).hex().encode() for _ in range(2))
    kernel.mkdir(here, mine)
    if wait_until(partial(_shows, kernel, beside.fd, join(way, mine)), beside.limit_s) is None:
        raise _is_other(beside)
    there = kernel.open_beneath(beside.fd, way, READABLE)
    with closed_on_error(there):
        kernel.mkdir(there, theirs)
        if wait_until(partial(_shows, kernel, here, theirs), beside.limit_s) is None:
            raise _is_other(beside)
        for name in (mine, theirs):
            kernel.rmdir(here, name)
    return there


def _shows(kernel: Kernel, dir_fd: Fd, way: bytes) -> bool:
    """Raises  OSError if it does not"""
    kernel.open_beneath(dir_fd, way, DIRECTORY).close()
    return True


def _is_other(beside: SecondMount) -> Refused:
    return Refused(f"--beside {printable(beside.path)}: {_OTHER} {beside.limit_s:g} s", _SECOND)


def _kernels_cache_s(kernel: Kernel, fd: Fd) -> float:
    mount = find_mount(kernel, fd, read_mounts())
    return 0.0 if mount is None else kernels_cache_s(mount.fstype, mount.flags())


def _clean_up(kernel: Kernel, store_fd: Fd, limit_s: float) -> None:
    """Remove what was tried, when this mount sees all that the other has made; the next init does it else."""

    def is_removed() -> bool:
        discard_trial_directory(kernel, store_fd, PROBE_BESIDE)
        return True

    wait_until(is_removed, limit_s)
