"""Seize: root takes what lies in a user's quarantine into root's own folder, to delete it with root's authority.

Where its owner may rename, root must not work by name: a claim there would make root's records and directories in
the user's folder, and read the user's. So root removes the whole container, as `trashd rm` would, by one rename between
two directories that it holds open: what comes after is root's own orphan, which root asked for, and root reaps it in
a folder that no other user can enter (I13). Of the user's folder root reads nothing; it locks the record, so that no
reaper and no restore is at it meanwhile.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack

from fusefs.core.errors import BadRecord
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name, RelPath, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import place_of, read_mounts
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.claim import ClaimLost
from fusefs.store.layout import RECORD, UserFolder
from fusefs.store.locate import Victim, mount_of
from fusefs.store.stage import SwapOptions, TakenContainer
from fusefs.store.swap import Swapped, remove
from fusefs.store.swap_path import explain
from fusefs.store.tidy_folder import not_proven
from fusefs.store.victim_rename import DirectRename

_QUARANTINE = Name(State.QUARANTINE.value.encode())


def seize(
    folder: UserFolder, container: ContainerId, own: UserFolder, note: str, retention_s: int | None = None
) -> Swapped | ClaimLost:
    """Make an orphan of root's of a container in a user's quarantine; to be run as root.

    folder   the user's; nothing is made in it
    own      root's in the same store
    note     kept with the orphan, which is restored with --to alone
    retention_s  None: it is kept until asked for
    Raises   NotProven if another user may have put it there; BadRecord if there is no record of that user's to lock;
             TrashdError as for `remove_path`: the container
             is where it was, or, Unsettled, kept and the message says where
    """
    kernel = folder.store.kernel
    name = Name(container.encode())
    if not folder.is_proven:
        raise not_proven(folder)
    with ExitStack() as owned:
        try:
            # Not by UserFolder.open, which makes what is missing: it would be root's.
            parent = owned.enter_context(kernel.open_dir(folder.fd, _QUARANTINE))
            fd = owned.enter_context(kernel.open_dir(parent, name))
            record = owned.enter_context(_open_to_lock(kernel, fd, folder.uid))
        except (FileNotFoundError, NotADirectoryError):
            return ClaimLost.GONE
        if not kernel.lock(record):
            return ClaimLost.BUSY
        if not (kernel.is_named(fd, parent, name) and kernel.is_named(record, fd, RECORD)):
            return ClaimLost.GONE
        victim = _victim(folder, parent, name, fd)
        try:
            # It looks again after the rename: what was put to the name meanwhile is given back.
            options = SwapOptions(retention_s, note, taken=_taken(kernel, fd, folder.uid))
            return remove(own, victim, victim.parent.relative, options, DirectRename(kernel, victim.parent.sides, name))
        except OSError as error:
            raise explain(error, victim) from error


def _taken(kernel: Kernel, fd: Fd, uid: int) -> TakenContainer:
    """What came into a user's container later than it was made is judged by root's reaper (reaper/late_arrivals.py)."""
    st = kernel.fstat(fd)
    is_his_alone = st.st_uid == uid and stat.S_IMODE(st.st_mode) == stat.S_IRWXU
    return TakenContainer(max(0, kernel.statx(fd, asks=True).btime_ns), uid if is_his_alone else None)


def _open_to_lock(kernel: Kernel, container_fd: Fd, uid: int) -> Fd:
    """The record's fd, looked at before it is opened: root's open of a device node that a user put there would act."""
    with kernel.open_beneath(container_fd, RECORD) as there:
        st = kernel.fstat(there)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != uid:
            raise BadRecord(f"not an ordinary file of uid {uid}")
        return kernel.reopen(there, os.O_RDWR | os.O_NONBLOCK)


def _victim(folder: UserFolder, parent: Fd, name: Name, fd: Fd) -> Victim:
    """The container as what root removes; it borrows all its fds."""
    kernel, store = folder.store.kernel, folder.store
    st = kernel.fstat(fd)
    if st.st_uid != folder.uid:
        raise BadRecord(f"its directory belongs to uid {st.st_uid}")
    mounts = read_mounts()
    mount = mount_of(kernel, fd, mounts, store.base_path)
    relative = RelPath(join(folder.way(), _QUARANTINE))
    place = place_of(os.readlink(b"/proc/self/fd/%d" % store.base.fd), mount)
    above = Scope(
        BackingAndMount(store.base.fd), store.base_path, place, relative, BackingAndMount(parent), mount, tuple(mounts)
    )
    return Victim(above, name, fd, st)
