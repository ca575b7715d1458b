"""Making things as somebody else would: with his uid, gid and umask, in a thread that keeps its capabilities."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from fusefs.linux import libc
from fusefs.linux.capabilities import Capability

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None)
"""For calls that have nothing to wait for."""
_setfsuid, _setfsgid = _held.setfsuid, _held.setfsgid
_setfsuid.argtypes = _setfsgid.argtypes = (ctypes.c_uint,)
_CLONE_FS = 0x200


class Caller(Protocol):
    """Who asks: what the kernel says of the process."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def umask(self) -> int: ...


def created_by(caller: Caller, gid: int | None = None, *, umask: int | None = None) -> AbstractContextManager[None]:
    """What is created in the block is the caller's, as if he had done it: owner, group, setgid, default ACLs, quota.

    For a thread of root's alone; anybody else is the caller himself. The umask is the whole process's, or the thread's
    (have_own_umask): nothing else may create anything with it meanwhile.
    gid     the group that he acts in; None: his own
    umask   the same
    Source  setfsuid(2): one thread's; SECBIT_NO_SETUID_FIXUP in capabilities(7) keeps the capabilities
    """
    return _Acting(caller.uid, caller.gid if gid is None else gid, caller.umask if umask is None else umask)


def written_by(uid: int) -> AbstractContextManager[None]:
    """What is written in the block gets what the filesystem has for that user, not what it has for root.

    Whose file it is, and what the thread may do, stays: it keeps its capabilities.
    uid  0: as the thread is
    """
    return _Writing(uid) if uid else _AS_IT_IS


def in_group(gid: int) -> AbstractContextManager[None]:
    """Be in a group for the block: a set-group-ID bit is only given by its members."""
    return _Acting(0, gid, None)


class _Acting:
    """Another one's ids, and umask, for a block. A generator's would cost as much as the system calls."""

    __slots__ = ("_gid", "_is_other", "_uid", "_umask")

    def __init__(self, uid: int, gid: int, umask: int | None) -> None:
        self._uid = uid
        self._gid = gid
        self._umask = umask
        self._is_other = (uid or gid) and os.geteuid() == 0

    def __enter__(self) -> None:
        if self._umask is not None:
            self._umask = os.umask(self._umask)
        if self._is_other:
            _setfsgid(self._gid)
            _setfsuid(self._uid)

    def __exit__(self, *_error: object) -> None:
        if self._is_other:
            _setfsuid(0)
            _setfsgid(0)
        if self._umask is not None:
            os.umask(self._umask)


class _Writing:
    """The same of the uid alone: half of the system calls. Another one in it, or in an _Acting, gives back theirs."""

    __slots__ = ("_before", "_uid")

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._before = 0

    def __enter__(self) -> None:
        self._before = _setfsuid(self._uid)

    def __exit__(self, *_error: object) -> None:
        _setfsuid(self._before)


_AS_IT_IS = nullcontext()


def is_member(caller: Caller, gid: int) -> bool:
    """Whether a caller may give away set-group-ID bits of a group: it is one of his, or he is root."""
    if caller.uid == 0 or caller.gid == gid:
        return True
    return gid in map(int, _status(caller, b"Groups:"))


def keeps_privileges(caller: Caller) -> bool:
    """Whether what a caller changes keeps its set-user-ID bits: he has CAP_FSETID, in our user namespace."""
    try:
        if not os.path.samefile(f"/proc/{caller.pid}/ns/user", "/proc/self/ns/user"):
            return False
    except OSError:
        return False
    return any(int(capabilities, 16) >> Capability.FSETID & 1 for capabilities in _status(caller, b"CapEff:"))


def _status(caller: Caller, field: bytes) -> list[bytes]:
    """What the kernel tells of a process; nothing if it has ended, or is in another pid namespace."""
    try:
        with open(f"/proc/{caller.pid}/status", "rb") as lines:
            return next(line for line in lines if line.startswith(field)).split()[1:]
    except (OSError, StopIteration):
        return []


def have_own_umask() -> None:
    """From now on this thread's umask (root and working directory too) are its own, not the whole process's.

    Source  unshare(2), CLONE_FS; the C library's function takes a thread, and needs no privilege
    """
    libc.checked(_libc.unshare(_CLONE_FS))
