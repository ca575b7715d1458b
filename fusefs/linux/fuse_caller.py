"""The caller of a FUSE request: what the request and /proc show about the process while it waits for the reply."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from fusefs.core.fuse_protocol import CallerIds
from fusefs.linux import syscalls
from fusefs.linux.credentials import Capability

_CLONE_FS = 0x200
_STATUS_BYTES = 1 << 12
_ALL = -1
"""All capabilities."""


class Rights(NamedTuple):
    """The rights of a process besides its IDs.

    groups        supplementary groups
    capabilities  effective capabilities, as bits, in the process's user namespace
    is_in_our_namespace  the process is in our user namespace; otherwise its capabilities apply only to IDs that its
                         namespace maps
    """

    groups: tuple[int, ...] = ()
    capabilities: int = 0
    is_in_our_namespace: bool = False


def read_rights(caller: CallerIds) -> Rights:
    """Return the current rights of a caller; an empty Rights if its process is not visible.

    A thread whose IDs differ from those of the request acts for another process (overlayfs above, nfsd, io_uring), so
    its own rights don't count. But a request as root always has root's rights, since only root can have allowed it.
    """
    if caller.pid <= 0:
        return Rights()
    try:
        status = _status(caller.pid)
    except OSError:
        return Rights()
    if (_status_words(status, b"\nUid:")[-1], _status_words(status, b"\nGid:")[-1]) != (
        b"%d" % caller.uid,
        b"%d" % caller.gid,
    ):
        return Rights((), _ALL, is_in_our_namespace=True) if caller.uid == 0 else Rights()
    groups = tuple(map(int, _status_words(status, b"\nGroups:")))
    capabilities = int(_status_words(status, b"\nCapEff:")[0], 16)
    return Rights(groups, capabilities, is_in_our_namespace=bool(capabilities) and _is_in_our_namespace(caller.pid))


def is_capable(caller: CallerIds, capability: Capability) -> bool:
    """Return whether a caller has a capability in our user namespace."""
    rights = read_rights(caller)
    return rights.is_in_our_namespace and bool(rights.capabilities >> capability & 1)


def maps_ids(caller: CallerIds, uid: int, gid: int | None) -> bool:
    """Return whether a caller's user namespace maps an owner and a group, so that its capabilities apply to them.

    gid     None: only the owner must be mapped
    Source  capable_wrt_inode_uidgid in the kernel's kernel/capability.c, inode_owner_or_capable in its fs/inode.c
    """
    return _is_mapped(caller, "uid_map", uid) and (gid is None or _is_mapped(caller, "gid_map", gid))


def is_killed(pid: int) -> bool:
    """Return whether SIGKILL or an equivalent is pending for a thread, which then ends as soon as it can."""
    try:
        status = _status(pid)
    except OSError:
        return False  # in another pid namespace
    return bool(int(_status_words(status, b"\nSigPnd:")[0], 16) >> signal.SIGKILL - 1 & 1)


def _is_in_our_namespace(pid: int) -> bool:
    try:
        return os.readlink(b"/proc/%d/ns/user" % pid) == os.readlink(b"/proc/self/ns/user")
    except OSError:
        return False


def _is_mapped(caller: CallerIds, name: str, number: int) -> bool:
    try:
        with open(f"/proc/{caller.pid}/{name}", "rb") as lines:
            ranges = [range(first, first + n) for _inner_first, first, n in (map(int, line.split()) for line in lines)]
    except OSError:
        return False
    return any(number in one for one in ranges)


def _status(pid: int) -> bytes:
    fd = os.open(b"/proc/%d/status" % pid, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while more := os.read(fd, _STATUS_BYTES):
            content += more
            if len(more) < _STATUS_BYTES:
                break
        return content
    finally:
        os.close(fd)


def _status_words(status: bytes, name: bytes) -> list[bytes]:
    at = status.index(name) + len(name)
    return status[at : status.index(b"\n", at)].split()


def unshare_umask() -> None:
    """Give this thread its own umask, root and working directory, independent of other threads.

    Source  unshare(2), CLONE_FS; the C library's function acts on one thread and needs no privilege
    """
    syscalls.unshare(_CLONE_FS)
