"""Doing things as somebody else would: with his ids and umask, and with or without this thread's capabilities."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from fusefs.linux import libc
from fusefs.linux.capabilities import Capability, put_down_all, set_groups, take_up

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None)
"""For calls that have nothing to wait for."""
_setfsuid, _setfsgid = _held.setfsuid, _held.setfsgid
_setfsuid.argtypes = _setfsgid.argtypes = (ctypes.c_uint,)
_setfsuid.restype = _setfsgid.restype = ctypes.c_uint
_CLONE_FS = 0x200
_NOBODY = 0xFFFF_FFFF
"""No id: who asks for it stays who he is, and is told who that is."""


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


def judged_as(caller: Caller, gid: int | None = None, groups: Sequence[int] = ()) -> AbstractContextManager[None]:
    """What is done in the block is allowed or refused as if the caller did it, who has no capability.

    For a thread of root's that is in no group but its own. Nothing in the block may suspend, or start a thread.
    gid     the group that he acts in; None: his own
    groups  those that he is in as well
    """
    return _Judged(caller.uid, caller.gid if gid is None else gid, groups)


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


class _Judged:
    """Another one's ids, and no capability: with SECBIT_NO_SETUID_FIXUP they would stay."""

    __slots__ = ("_acting", "_groups", "_had", "_ids")

    def __init__(self, uid: int, gid: int, groups: Sequence[int]) -> None:
        self._acting = _Acting(uid, gid, None)
        self._ids = uid, gid
        self._groups = groups
        self._had = b""

    def __enter__(self) -> None:
        if self._groups:
            set_groups(self._groups)
        self._acting.__enter__()
        try:
            self._had = put_down_all()
            if (_setfsuid(_NOBODY), _setfsgid(_NOBODY)) != self._ids:  # neither says whether it has worked
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_error: object) -> None:
        if self._had:
            take_up(self._had)
        self._acting.__exit__()
        if self._groups:
            set_groups(())


_AS_IT_IS = nullcontext()


def is_member(caller: Caller, gid: int) -> bool:
    """Whether a caller may give away set-group-ID bits of a group: it is one of his, or he is root."""
    return caller.uid == 0 or caller.gid == gid or gid in groups_of(caller)


def groups_of(caller: Caller) -> list[int]:
    """His supplementary groups; none if he can't be seen."""
    return [int(gid) for gid in _status(caller).get(b"Groups", ())]


def keeps_privileges(caller: Caller) -> bool:
    """Whether what a caller changes keeps its set-user-ID bits: he has CAP_FSETID, in our user namespace."""
    return _is_of_ours(caller) and _is_capable(caller, Capability.FSETID)


def has(caller: Caller, capability: Capability, *owners: tuple[int, int]) -> bool:
    """Whether he has a capability over inodes of these owners and groups: he has it in our user namespace, or in his
    own, which knows them all.

    Source  capable_wrt_inode_uidgid in the kernel's kernel/capability.c, inode_owner_or_capable in its fs/inode.c
    """
    if not _is_capable(caller, capability):
        return False
    if _is_of_ours(caller):
        return True
    uids, gids = _mapped(caller, "uid_map"), _mapped(caller, "gid_map")
    if capability is Capability.FOWNER:  # by which one is the owner, whatever the group is
        gids = [range(1 << 32)]
    return all(any(uid in some for some in uids) and any(gid in some for some in gids) for uid, gid in owners)


def is_killed(pid: int) -> bool:
    """Whether a thread ends as soon as the kernel lets it: SIGKILL, or what does the same, waits for it."""
    try:
        told = _fields(pid)
    except OSError:
        return False  # in another pid namespace
    return bool(int(told[b"SigPnd"][0], 16) >> signal.SIGKILL - 1 & 1)


def _is_of_ours(caller: Caller) -> bool:
    """Whether he is in our user namespace."""
    try:
        return os.path.samefile(f"/proc/{caller.pid}/ns/user", "/proc/self/ns/user")
    except OSError:
        return False


def _is_capable(caller: Caller, capability: Capability) -> bool:
    """Whether he has a capability in his own user namespace."""
    return any(int(capabilities, 16) >> capability & 1 for capabilities in _status(caller).get(b"CapEff", ()))


def _mapped(caller: Caller, name: str) -> list[range]:
    """Our ids that his user namespace knows."""
    try:
        with open(f"/proc/{caller.pid}/{name}", "rb") as lines:
            return [range(first, first + n) for _his, first, n in (map(int, line.split()) for line in lines)]
    except OSError:
        return []


def _status(caller: Caller) -> Mapping[bytes, list[bytes]]:
    """What the kernel tells of a thread; nothing if it has ended, is in another pid namespace, or is somebody else."""
    try:
        told = _fields(caller.pid)
    except OSError:
        return {}
    is_he = int(told[b"Uid"][-1]) == caller.uid and int(told[b"Gid"][-1]) == caller.gid
    return told if is_he else {}


def _fields(pid: int) -> dict[bytes, list[bytes]]:
    with open(f"/proc/{pid}/status", "rb") as lines:
        return {name: words.split() for name, _, words in (line.partition(b":") for line in lines)}


def have_own_umask() -> None:
    """From now on this thread's umask (root and working directory too) are its own, not the whole process's.

    Source  unshare(2), CLONE_FS; the C library's function takes a thread, and needs no privilege
    """
    libc.checked(_libc.unshare(_CLONE_FS))
