"""A user's own store as root's service opens it: named in that user's registry, and not read or written by root.

The owner of a store can put anything into it at any moment. So root holds its directories open and has them watched;
every look into a file, and every change, is a process of its owner's, as everywhere below a user's folder (I13).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack

from fusefs.core.errors import NoStore, Untrusted
from fusefs.core.identity import Likelihood, compare
from fusefs.core.names import STORE
from fusefs.core.service_status import UNSEEN
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.mountinfo import Mount
from fusefs.linux.untrusted_path import open_way
from fusefs.store.backing_and_mount import ABSENT, DIRECTORY, READABLE, BackingAndMount
from fusefs.store.layout import USERS, Store, UserFolder, Volume, open_areas
from fusefs.store.registry_targets import LineOf
from fusefs.store.user_folders import FolderCensus, FolderRefusal, plain_name, why_not

ROOTS = (0,)
"""The users whose links and mounts root's service goes through."""
_OTHERS_LOOK = 0o005
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OF_ID = 8


def open_base(kernel: Kernel, wanted: LineOf, mounts: Sequence[Mount]) -> Fd:
    """The directory that a line names, gone to through nothing that a user could have put there. Raises  OSError"""
    return open_way(kernel, wanted.line.path, mounts, ROOTS)


def is_own(kernel: Kernel, wanted: LineOf, mounts: Sequence[Mount]) -> bool:
    """Whether there is something of the user's own: his registry names stores of root's too, which are no less served.

    May take for ever.
    """
    try:
        with open_base(kernel, wanted, mounts) as base:
            return kernel.stat(base, STORE).st_uid == wanted.uid
    except OSError:
        return False


def open_vouched(kernel: Kernel, base: Fd, wanted: LineOf) -> Store:
    """The store in a directory, if it is the one that its owner vouches for; takes over the fd.

    Raises  NoStore if it is gone, or another one; Untrusted if others may write in it; OSError
    """
    with ExitStack() as owned:
        owned.enter_context(base)
        try:
            fd = owned.enter_context(kernel.open_beneath(base, STORE, READABLE))
            areas = owned.enter_context(open_areas(kernel, fd))
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise Untrusted(wanted.line.path, "something is mounted over its store") from error
            if error.errno in ABSENT:
                raise NoStore(wanted.line.path) from error
            raise
        dev = kernel.fstat(base).st_dev
        for opened in (fd, *(area for _name, area in areas.all() if area is not areas.new_fd)):
            st = kernel.fstat(opened)
            if st.st_uid != wanted.uid or st.st_mode & OTHERS_WRITE or st.st_dev != dev:
                raise Untrusted(wanted.line.path, f"uid {wanted.uid} registered it, and it is not his alone")
        if compare(kernel.identify(fd), wanted.line.identity) is Likelihood.OTHER:
            raise NoStore(wanted.line.path, "another store is there now than the one that its owner registered")
        owned.pop_all()
    # What else its volume.json says his process reads (service/child.py).
    volume = Volume(wanted.line.volume, False, 0)
    kind = kernel.filesystem(fd)
    return Store(kernel, BackingAndMount(base), wanted.line.path, fd, areas, volume, wanted.uid, kind)


def unseen(wanted: LineOf) -> bytes:
    """What stands for a path where nobody has looked who may see it: some of the store's id."""
    return b"/" + UNSEEN + wanted.line.volume[:_OF_ID].encode()


def seen_by_all(base: Fd, wanted: LineOf) -> bytes:
    """So much of the path of an opened directory as everybody may see, for a status that everybody may read.

    A name in a directory that others may not list stands for nothing but some of the store's id, which tells it from
    others. Raises  OSError
    """
    real = os.readlink(b"/proc/self/fd/%d" % base)
    shown = b""
    with ExitStack() as owned:
        above = owned.enter_context(Fd(os.open(b"/", _STEP)))
        for name in real.strip(b"/").split(b"/"):
            if os.fstat(above).st_mode & _OTHERS_LOOK != _OTHERS_LOOK:
                return shown + unseen(wanted)
            above = owned.enter_context(Fd(os.open(name or b".", _STEP, dir_fd=above)))
            shown += b"/" + name
    return shown


def open_folder(store: Store, uid: int) -> UserFolder | None:
    """The owner's folder in a user's own store; None if it is not there, or not as only the owner can have made it.

    By its plain name alone: there no other user makes names, and what the owner fills `u/` with is not read.
    Raises  OSError
    """
    found = _look(store, uid)
    return found if isinstance(found, UserFolder) else None


def take_own_census(store: Store, uid: int) -> FolderCensus:
    """The folder of a store's owner as a census: it alone, or why it is refused. Raises  OSError"""
    found = _look(store, uid)
    if found is None:
        return FolderCensus({}, [])
    if isinstance(found, FolderRefusal):
        return FolderCensus({}, [found])
    with found:
        return FolderCensus({uid: store.kernel.fstat(found.fd).st_ino}, [])


def _look(store: Store, uid: int) -> UserFolder | FolderRefusal | None:
    kernel, name = store.kernel, plain_name(uid)
    try:
        fd = kernel.open_beneath(store.areas.u_fd, name, DIRECTORY)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return FolderRefusal(USERS, name, uid, None, "it is no directory, or something is mounted over it")
    with ExitStack() as owned:
        owned.enter_context(fd)
        st = kernel.fstat(fd)
        why = why_not(kernel, fd, st, uid, kernel.fstat(store.fd).st_dev)
        if why:
            return FolderRefusal(USERS, name, uid, st.st_uid, why)
        owned.pop_all()
    return UserFolder(store, uid, USERS, name, fd, is_proven=True)
