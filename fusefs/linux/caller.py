"""Making things as somebody else would: with his uid, gid and umask, in a thread that keeps its capabilities."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from fusefs.linux import libc

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_FS = 0x200


class Caller(NamedTuple):
    """Who asks: what the kernel says of the process."""

    uid: int
    gid: int
    pid: int
    umask: int


@contextmanager
def created_by(caller: Caller, gid: int | None = None) -> Iterator[None]:
    """What is created in the block is the caller's, as if he had done it: owner, group, setgid, default ACLs, quota.

    For a thread of root's alone; anybody else is the caller himself. The umask is the whole process's, or the thread's
    (have_own_umask): nothing else may create anything with it meanwhile.
    gid     the group that he acts in; None: his own
    Source  setfsuid(2): one thread's; SECBIT_NO_SETUID_FIXUP in capabilities(7) keeps the capabilities
    """
    old_umask = os.umask(caller.umask)
    try:
        with _as_ids(caller.uid, caller.gid if gid is None else gid):
            yield
    finally:
        os.umask(old_umask)


def in_group(gid: int) -> AbstractContextManager[None]:
    """Be in a group for the block: a set-group-ID bit is only given by its members."""
    return _as_ids(0, gid)


@contextmanager
def _as_ids(uid: int, gid: int) -> Iterator[None]:
    is_other = (uid or gid) and os.geteuid() == 0
    if is_other:
        _libc.setfsgid(ctypes.c_uint(gid))
        _libc.setfsuid(ctypes.c_uint(uid))
    try:
        yield
    finally:
        if is_other:
            _libc.setfsuid(ctypes.c_uint(0))
            _libc.setfsgid(ctypes.c_uint(0))


def is_member(caller: Caller, gid: int) -> bool:
    """Whether a caller may give away set-group-ID bits of a group: it is one of his, or he is root."""
    if caller.uid == 0 or caller.gid == gid:
        return True
    try:
        with open(f"/proc/{caller.pid}/status", "rb") as lines:
            groups = next(line for line in lines if line.startswith(b"Groups:"))
    except (OSError, StopIteration):
        return False  # he has ended, or is in another pid namespace
    return gid in map(int, groups.split()[1:])


def have_own_umask() -> None:
    """From now on this thread's umask (root and working directory too) are its own, not the whole process's.

    Source  unshare(2), CLONE_FS; the C library's function takes a thread, and needs no privilege
    """
    libc.checked(_libc.unshare(_CLONE_FS))
