"""What trashd does not touch, and why: asked before anything is made."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator

from fusefs.core.errors import CrossesBoundary, IsMountPoint, IsStore, MountInside, NotADirectory, TrashdError
from fusefs.core.names import STORE, Name, join, user_store, whose_store
from fusefs.core.printable_names import shell_word
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import MERGERFS, FilesystemPath, Mount, every_place, mounts_inside, other_namespaces, views
from fusefs.store.backing_and_mount import OUT_OF_REACH, READABLE, suppress_errno
from fusefs.store.layout import FOLDER_MODE, VOLUME, is_stores_own, trusted_owners
from fusefs.store.locate import Victim
from fusefs.store.stores_inside import stores_below

_MERGED = "it is merged of directories on several branches, and a rename takes one: swap it on each branch itself"


def refusals(kernel: Kernel, victim: Victim, *, directory: bool) -> Iterator[TrashdError]:
    """Every reason to leave the victim alone.

    directory  whether it must be one (swap), or may be anything (rm)
    """
    if directory and not victim.is_directory():
        yield NotADirectory(victim.path())
    if any(is_stores_own(name) for name in victim.place().path.split(b"/")):
        yield IsStore(victim.path())
    if victim.is_directory():
        yield from _mounted(victim)
        held = held_store(kernel, victim.fd, b"")
        if held is not None:
            then = f", then rm -r {shell_word(os.path.join(victim.path(), held))}"
            yield _holds(os.path.join(victim.path(), held), then)
        above = victim.parent
        if above.mount.fstype == MERGERFS and _is_merged(victim):
            yield CrossesBoundary(victim.path(), _MERGED)
        for lower in stores_below(kernel, above.root.fd, above.root_path, join(above.relative, victim.name)):
            yield _holds(os.path.join(victim.path(), lower, STORE))


def _is_merged(victim: Victim) -> bool:
    from fusefs.linux.mergerfs import branches_with  # few have it

    return len(branches_with(victim.fd)) > 1


def _holds(store: bytes, then: str = "") -> IsStore:
    directory = shell_word(os.path.dirname(store))
    hint = f"trashd list --volume {directory} shows what it holds: restore that, or reap it, first{then}"
    return IsStore(store, hint)


def _mounted(victim: Victim) -> Iterator[TrashdError]:
    here = _places(victim.place(), victim.parent.mounts)
    for place in here:
        for mount in mounts_inside(place, victim.parent.mounts):
            yield IsMountPoint(mount.point) if mount.point == victim.path() else MountInside(mount.point)
    # An exchange below a mount point of another namespace succeeds, and detaches that mount there. Only root
    # may look into others' namespaces; for users the kernel's own check of this namespace has to do.
    if os.geteuid() == 0:
        for pid, mounts in other_namespaces():
            for place in dict.fromkeys((*here, *_places(victim.place(), mounts))):
                for mount in mounts_inside(place, mounts):
                    where = mount.point + b" in the mount namespace of process " + pid.encode()
                    yield MountInside(where)


def _places(place: FilesystemPath, mounts: Iterable[Mount]) -> list[FilesystemPath]:
    """Where it is, and where mounts of ours show it: what is mounted on something there is carried away as well."""
    return every_place(place, views(mounts, trusted_owners(os.geteuid())))


def held_store(kernel: Kernel, dir_fd: Fd, name: bytes) -> Name | None:
    """The trash store in a directory by its name in another one, or by no name in that one itself; None: none is seen.

    Of other users' names there those count that one system call tells, some hundreds: a swap takes as long whatever the
    directory holds, and a reaper stops at stores anyway.
    Raises  OSError with ESTALE if that one itself is gone, as another node removed it
    """
    try:
        kernel.open_beneath(dir_fd, join(name, STORE, VOLUME)).close()
    except OSError as error:
        if error.errno == errno.ESTALE and not name:
            raise
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
            return STORE
    else:
        return STORE
    with suppress_errno(*OUT_OF_REACH), kernel.open_beneath(dir_fd, name or b".", READABLE) as fd:
        for one in (user_store(os.geteuid()), *_names_like(kernel.first_names(fd), STORE + b"-")):
            if whose_store(one) is not None and _is_users(kernel, fd, Name(one)):
                return Name(one)
    return None


def _names_like(names: bytes, begin: bytes) -> Iterator[bytes]:
    """What of some names, each ended by a NUL, begins so; the ends of others, too."""
    at = names.find(begin)
    while at >= 0:
        yield names[at : names.index(0, at)]
        at = names.find(begin, at + 1)


def _is_users(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    """Whether something with the name of a user's store is one, as far as it can be seen from outside."""
    with suppress_errno(*OUT_OF_REACH):
        st = kernel.stat(dir_fd, name)
        return stat.S_ISDIR(st.st_mode) and stat.S_IMODE(st.st_mode) == FOLDER_MODE
    return False
