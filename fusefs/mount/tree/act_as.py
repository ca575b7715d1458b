"""The credentials that the daemon acts with: it opens and changes as the caller, and the filesystem below judges then.

The kernel has judged too, by the owner, mode and groups that it was told last. If these were changed behind the
mount, the inode may be another's by now: root's word alone would have a former owner make a set-user-ID program of it.
We reach the object as root, by an fd, and ask for the act as the caller; nothing of it is kept from one request to the
next, and nothing is looked up in a cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from fusefs.core.inode_attributes import Attributes
from fusefs.linux.capabilities import Capability, are_ours
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_caller import Caller, Rights, knows, rights_of
from fusefs.linux.thread_credentials import NO_ID, ThreadCredentials, call_as
from fusefs.mount.native._core import Node
from fusefs.mount.tables.tables_lock import TablesLock

P = ParamSpec("P")
R = TypeVar("R")

NOBODY = 65_534
_BY_MODE = 1 << Capability.DAC_OVERRIDE | 1 << Capability.DAC_READ_SEARCH


class RequestCaller:
    """A linux.fuse_caller.Caller: the process that makes a request."""

    __slots__ = ("gid", "pid", "uid", "umask")

    def __init__(self, uid: int, gid: int, pid: int) -> None:
        """Begin with no umask: few requests have one."""
        self.uid, self.gid, self.pid, self.umask = uid, gid, pid, 0


class NeededCapability(NamedTuple):
    """A capability by which a process that is not the owner's may do something, and whose inode that is.

    gid  None: whatever it is
    """

    capability: Capability
    uid: int
    gid: int | None


def by_mode(seen: Attributes) -> NeededCapability:
    """For what an inode's mode and ACL allow."""
    return NeededCapability(Capability.DAC_OVERRIDE, seen.uid, seen.gid)


def by_mode_of(lock: TablesLock, fd: Fd) -> NeededCapability:
    """For what the mode and ACL of what an fd holds allow."""
    seen = lock.call(os.stat, fd)
    return NeededCapability(Capability.DAC_OVERRIDE, seen.st_uid, seen.st_gid)


def by_owner(seen: Attributes) -> NeededCapability:
    """For what is the owner's to do with a name of it: in a sticky directory, or make a link."""
    return NeededCapability(Capability.FOWNER, seen.uid, seen.gid)


class AsCaller:
    """One act of a caller's: whatever it takes, made by `call`, with the identity that it takes.

    First by its ids alone where all is its own, since its groups can't matter there. Else, and if that is refused, with
    all that /proc tells of it: its other groups; its capabilities, if they are of our user namespace; if they are of
    another one, those that the act needs, over what that namespace knows. A user's own mount acts as that user.
    """

    def __init__(
        self,
        lock: TablesLock,
        refused: Callable[[Node], None],
        caller: Caller,
        needs: Sequence[NeededCapability],
        nodes: Sequence[Node],
        *,
        gid: int | None = None,
        umask: int | None = None,
    ) -> None:
        """Begin.

        refused  told of each of the nodes, if it is refused below
        needs    by the inodes as they are now
        nodes    those that the kernel has judged by
        gid      the group to act in; None: the caller's
        umask    for what is made
        """
        self._lock = lock
        self._refused = refused
        self._caller = caller
        self._needs = needs
        self._nodes = nodes
        self._umask = umask
        self._uid = _known(caller.uid)
        self._gid = _known(caller.gid if gid is None else gid)

    def call(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What one system call returns.

        Raises  OSError: what it raises; EPERM, EACCES: it is refused
        """
        below = self._lock.call
        uid, gid, umask = self._uid, self._gid, self._umask
        if os.geteuid():
            return below(call_as, ThreadCredentials(umask=umask), act, *args, **kwargs)
        if all(need.uid == uid for need in self._needs):
            try:
                return below(call_as, ThreadCredentials(uid, gid, (), None if uid else 0, umask), act, *args, **kwargs)
            except PermissionError:
                pass
        rights = below(rights_of, self._caller)
        capabilities = self._capabilities(rights)
        if uid or not are_ours(capabilities):
            whole = ThreadCredentials(uid, gid, rights.groups, capabilities, umask)
        else:
            whole = ThreadCredentials(0, gid, (), None, umask)
        try:
            return below(call_as, whole, act, *args, **kwargs)
        except PermissionError:
            for node in self._nodes:
                self._refused(node)
            raise

    def _capabilities(self, rights: Rights) -> int:
        """Those that the caller acts with, as bits."""
        if rights.is_ours or not rights.capabilities:
            return rights.capabilities
        needed = unknown = 0
        for capability, uid, gid in self._needs:
            bits = _BY_MODE if capability == Capability.DAC_OVERRIDE else 1 << capability
            needed |= bits
            if not self._lock.call(knows, self._caller, uid, gid):
                unknown |= bits
        return rights.capabilities & needed & ~unknown


def _known(number: int) -> int:
    """An id to act with: that of nobody for one of another user namespace, or none (what the kernel writes back)."""
    return NOBODY if number == NO_ID else number
