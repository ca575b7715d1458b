"""The caller of a FUSE request: what the kernel says of the process, and what /proc tells of it at that moment."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple, Protocol

from fusefs.linux import syscalls
from fusefs.linux.credentials import Capability

_CLONE_FS = 0x200
_STATUS_BYTES = 1 << 12
_ALL = -1
"""Capabilities: whatever there is."""


class Caller(Protocol):
    """The process that makes a request. pid: of its thread; 0: in another pid namespace"""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def umask(self) -> int: ...


class Rights(NamedTuple):
    """What a process has beside its ids.

    groups        supplementary
    capabilities  effective, as bits, in its own user namespace
    is_ours       that is ours, too; else a capability counts for ids that its namespace maps alone
    """

    groups: tuple[int, ...] = ()
    capabilities: int = 0
    is_ours: bool = False


def rights_of(caller: Caller) -> Rights:
    """What a caller has now; nothing if it can't be seen.

    A thread whose ids are not those of the request acts for another (overlayfs above, nfsd, io_uring), and what it
    has itself does not count. But nothing acts as root that root has not let do so.
    """
    if caller.pid <= 0:
        return Rights()
    try:
        told = _status(caller.pid)
    except OSError:
        return Rights()
    if (_words(told, b"\nUid:")[-1], _words(told, b"\nGid:")[-1]) != (b"%d" % caller.uid, b"%d" % caller.gid):
        return Rights((), _ALL, is_ours=True) if caller.uid == 0 else Rights()
    groups = tuple(map(int, _words(told, b"\nGroups:")))
    capabilities = int(_words(told, b"\nCapEff:")[0], 16)
    return Rights(groups, capabilities, is_ours=bool(capabilities) and _is_of_ours(caller.pid))


def is_capable(caller: Caller, capability: Capability) -> bool:
    """Whether a caller has a capability in our user namespace."""
    rights = rights_of(caller)
    return rights.is_ours and bool(rights.capabilities >> capability & 1)


def keeps_group(caller: Caller, uid: int, gid: int) -> bool:
    """Whether a caller may give or leave a set-group-ID bit of an inode with that owner and group.

    Source  in_group_or_capable in the kernel's fs/inode.c
    """
    if caller.gid == gid:
        return True
    rights = rights_of(caller)
    if gid in rights.groups:
        return True
    return bool(rights.capabilities >> Capability.FSETID & 1) and (rights.is_ours or knows(caller, uid, gid))


def knows(caller: Caller, uid: int, gid: int | None) -> bool:
    """Whether a caller's user namespace knows an owner and a group, by which a capability of the caller's counts there.

    gid     None: any
    Source  capable_wrt_inode_uidgid in the kernel's kernel/capability.c, inode_owner_or_capable in its fs/inode.c
    """
    return _is_mapped(caller, "uid_map", uid) and (gid is None or _is_mapped(caller, "gid_map", gid))


def is_killed(pid: int) -> bool:
    """Whether a thread ends as soon as the kernel lets it: SIGKILL, or what does the same, waits for it."""
    try:
        told = _status(pid)
    except OSError:
        return False  # in another pid namespace
    return bool(int(_words(told, b"\nSigPnd:")[0], 16) >> signal.SIGKILL - 1 & 1)


def _is_of_ours(pid: int) -> bool:
    try:
        return os.readlink(b"/proc/%d/ns/user" % pid) == os.readlink(b"/proc/self/ns/user")
    except OSError:
        return False


def _is_mapped(caller: Caller, name: str, number: int) -> bool:
    try:
        with open(f"/proc/{caller.pid}/{name}", "rb") as lines:
            ranges = [range(first, first + n) for _his, first, n in (map(int, line.split()) for line in lines)]
    except OSError:
        return False
    return any(number in one for one in ranges)


def _status(pid: int) -> bytes:
    """What the kernel tells of a thread."""
    fd = os.open(b"/proc/%d/status" % pid, os.O_RDONLY | os.O_CLOEXEC)
    try:
        told = b""
        while more := os.read(fd, _STATUS_BYTES):
            told += more
            if len(more) < _STATUS_BYTES:
                break
        return told
    finally:
        os.close(fd)


def _words(told: bytes, name: bytes) -> list[bytes]:
    at = told.index(name) + len(name)
    return told[at : told.index(b"\n", at)].split()


def have_own_umask() -> None:
    """From now on this thread's umask (root and working directory too) are its own, not the whole process's.

    Source  unshare(2), CLONE_FS; the C library's function takes a thread, and needs no privilege
    """
    syscalls.unshare(_CLONE_FS)
