"""What trashd does not touch, and why: asked before anything is made."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from fusefs.core.errors import CrossesBoundary, IsMountPoint, IsStore, MountInside, NotADirectory, TrashdError
from fusefs.core.names import STORE, join
from fusefs.core.printable_names import shell_word
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import MERGERFS, FilesystemPath, Mount, every_place, mounts_inside, other_namespaces, views
from fusefs.store.layout import VOLUME, is_stores_own, trusted_owners
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
        if holds_store(kernel, victim.fd, b""):
            yield _holds(victim.path(), f", then rm -r {shell_word(os.path.join(victim.path(), STORE))}")
        above = victim.parent
        if above.mount.fstype == MERGERFS and _is_merged(victim):
            yield CrossesBoundary(victim.path(), _MERGED)
        for lower in stores_below(kernel, above.root.fd, above.root_path, join(above.relative, victim.name)):
            yield _holds(os.path.join(victim.path(), lower))


def _is_merged(victim: Victim) -> bool:
    from fusefs.linux.mergerfs import branches_with  # few have it

    return len(branches_with(victim.fd)) > 1


def _holds(directory: bytes, then: str = "") -> IsStore:
    hint = f"trashd list --volume {shell_word(directory)} shows what it holds: restore that, or reap it, first{then}"
    return IsStore(os.path.join(directory, STORE), hint)


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


def holds_store(kernel: Kernel, dir_fd: Fd, name: bytes) -> bool:
    """Whether a directory by its name in another one, or by no name that one itself, has a trash store in it.

    Raises  OSError with ESTALE if that one itself is gone, as another node removed it
    """
    try:
        kernel.open_beneath(dir_fd, join(name, STORE, VOLUME)).close()
    except OSError as error:
        if error.errno == errno.ESTALE and not name:
            raise
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
    return True
