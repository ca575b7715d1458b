"""A store within a directory that is to go: whether it holds something.

What somebody else may have put there counts for nothing: the store is one of certain owners, as is what it holds, and
nobody but these can have written there. Where that can't be seen for want of permission, something is there.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterator
from typing import NamedTuple

from fusefs.core.lifecycle import State
from fusefs.core.names import Name, RelPath, is_container_id, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.store.folders import whose
from fusefs.store.layout import DROP, MAGIC, NEW, OLD, USERS, VOLUME, VOLUME_MAX_BYTES
from fusefs.store.sides import ABSENT, OUT_OF_REACH, READABLE

AREAS = (USERS, NEW)
"""Where users' folders are."""


class Thing(NamedTuple):
    """Something that a store holds.

    uid    whose it is
    folder his folder, relative to the store
    state  of the container; None for what lies in `drop/`, or could not be looked at
    name   in the directory of that; empty for what could not be looked at
    """

    uid: int
    folder: RelPath
    state: State | None
    name: bytes

    def way(self) -> RelPath:
        """Its path, relative to the store."""
        return join(self.folder, b"" if self.state is None else self.state.value.encode(), self.name)


def things_in(kernel: Kernel, dir_fd: int, way: bytes, owners: Collection[int]) -> Iterator[Thing]:
    """What the store at a path beneath a directory holds, each when it is asked for; nothing if it is no such store.

    owners  whose store it must be; in one of root's everybody's things count for root, his own for a user, and in a
            user's own his alone
    Raises  OSError that says nothing of it, such as EMFILE
    """
    try:
        store = kernel.open_beneath(dir_fd, way, READABLE)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    with store:
        owner = _owner_of(kernel, store, owners)
        if owner is None:
            return
        for area in _areas(kernel, store):
            for folder in list_at(kernel, store, area) or ():
                uid = whose(folder)
                if uid is not None and (uid == owner or (owner == 0 and os.geteuid() in (0, uid))):
                    yield from _things_of(kernel, store, (uid, owner), join(area, folder))


def _areas(kernel: Kernel, store: Fd) -> Iterator[RelPath]:
    """Where users' folders are in a store, and in those that were set aside in it."""
    old = [Name(name) for name in list_at(kernel, store, b".") or () if name.startswith(OLD)]
    for above in ((), *((one,) for one in old)):
        yield from (join(*above, area) for area in AREAS)


def _owner_of(kernel: Kernel, store: Fd, owners: Collection[int]) -> int | None:
    """Whose store an open directory is; None if it is none, or another one's, or others can write in it.

    Looked at before anything is opened: another one's lease on his file, or a FIFO, would hold us or fail us.
    """
    st = kernel.fstat(store)
    try:
        told = kernel.stat(store, VOLUME)
        is_theirs = {st.st_uid, told.st_uid} <= set(owners)
        if not is_theirs or not stat.S_ISREG(told.st_mode) or (st.st_mode | told.st_mode) & OTHERS_WRITE:
            return None
        with kernel.open_beneath(store, VOLUME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            text = kernel.read(file, VOLUME_MAX_BYTES)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return None
    return st.st_uid if _is_ours(text) else None


def _is_ours(text: bytes) -> bool:
    """Whether that is the text of a volume.json, of whatever format."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("magic") == MAGIC


def _things_of(kernel: Kernel, store: Fd, owners: tuple[int, int], folder: RelPath) -> Iterator[Thing]:
    """What is in the folder of a user, if it is a directory in which nobody else can write.

    owners  the user, and the store's: of a copy all may be the latter's
    """
    uid = owners[0]
    try:
        st = kernel.stat(store, folder)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    if not stat.S_ISDIR(st.st_mode) or st.st_uid not in owners or st.st_mode & OTHERS_WRITE:
        return
    for state in (*State, None):
        names = list_at(kernel, store, join(folder, DROP if state is None else state.value.encode()))
        if names is None:
            yield Thing(uid, folder, None, b"")
            return
        for name in names:
            if state is None or is_container_id(name.decode("ascii", "replace")):
                yield Thing(uid, folder if state else join(folder, DROP), state, name)


def list_at(kernel: Kernel, dir_fd: int, way: bytes) -> list[bytes] | None:
    """The names in a directory; none if it is none; None if we may not see them."""
    try:
        with kernel.open_dir(dir_fd, way) as fd:
            return kernel.list(fd)
    except OSError as error:
        if error.errno == errno.EACCES:
            return None
        if error.errno not in ABSENT:
            raise
        return []
