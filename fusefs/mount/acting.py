"""What opens or changes something, done as whoever asks for it: the filesystem below judges, at that moment.

The kernel has judged too, by the owner, mode and groups that it was told last. If somebody has changed these behind the
mount, the inode may be another's by now: root's word alone would have a former owner make a set-user-ID program of it.
We reach the object as root, by an fd, and ask for the act as the caller; nothing of him is kept from one request to the
next, and nothing is looked up in a cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from fusefs.core.attributes import Attributes
from fusefs.core.inodes import Node
from fusefs.linux.caller import Caller, Rights, knows, rights_of
from fusefs.linux.capabilities import Capability, are_ours
from fusefs.linux.fd import Fd
from fusefs.linux.identity import NO_ID, Identity, call_as
from fusefs.mount.gate import Gate
from fusefs.mount.writers import NOBODY

P = ParamSpec("P")
R = TypeVar("R")

_BY_MODE = 1 << Capability.DAC_OVERRIDE | 1 << Capability.DAC_READ_SEARCH


class Need(NamedTuple):
    """A capability by which somebody may do something who is not the owner, and whose that is.

    gid  None: whatever it is
    """

    capability: Capability
    uid: int
    gid: int | None


def by_mode(seen: Attributes) -> Need:
    """For what an inode's mode and ACL allow."""
    return Need(Capability.DAC_OVERRIDE, seen.uid, seen.gid)


def by_mode_of(gate: Gate, fd: Fd) -> Need:
    """The same of what an fd holds."""
    seen = gate.call(os.stat, fd)
    return Need(Capability.DAC_OVERRIDE, seen.st_uid, seen.st_gid)


def by_owner(seen: Attributes) -> Need:
    """For what is the owner's to do with a name of it: in a sticky directory, or make a link."""
    return Need(Capability.FOWNER, seen.uid, seen.gid)


def by_owner_alone(seen: Attributes) -> Need:
    """For what is the owner's to change in it. Source  inode_owner_or_capable in the kernel's fs/inode.c"""
    return Need(Capability.FOWNER, seen.uid, None)


class AsCaller:
    """One act of a caller's: whatever it takes, made by `call`, with the identity that it takes.

    First by his ids alone where all is his own, since his groups can't matter there. Else, and if that is refused, with
    all that /proc tells of him: his other groups; his capabilities, if they are of our user namespace; if they are of
    another one, those that the act needs, over what that namespace knows. A user's own mount is himself.
    """

    def __init__(
        self,
        gate: Gate,
        refused: Callable[[Node], None],
        caller: Caller,
        needs: Sequence[Need],
        nodes: Sequence[Node],
        *,
        gid: int | None = None,
        umask: int | None = None,
    ) -> None:
        """Begin.

        refused  told of each of the nodes, if it is refused below
        needs    by the inodes as they are now
        nodes    those that the kernel has judged by
        gid      the group to act in; None: his own
        umask    for what is made
        """
        self._gate = gate
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
        below = self._gate.call
        uid, gid, umask = self._uid, self._gid, self._umask
        if os.geteuid():
            return below(call_as, Identity(umask=umask), act, *args, **kwargs)
        if all(need.uid == uid for need in self._needs):
            try:
                return below(call_as, Identity(uid, gid, (), None if uid else 0, umask), act, *args, **kwargs)
            except PermissionError:
                pass
        rights = below(rights_of, self._caller)
        capabilities = self._capabilities(rights)
        if uid or not are_ours(capabilities):
            whole = Identity(uid, gid, rights.groups, capabilities, umask)
        else:
            whole = Identity(0, gid, (), None, umask)
        try:
            return below(call_as, whole, act, *args, **kwargs)
        except PermissionError:
            for node in self._nodes:
                self._refused(node)
            raise

    def _capabilities(self, rights: Rights) -> int:
        """Those that he acts with, as bits."""
        if rights.is_ours or not rights.capabilities:
            return rights.capabilities
        needed = unknown = 0
        for capability, uid, gid in self._needs:
            bits = _BY_MODE if capability == Capability.DAC_OVERRIDE else 1 << capability
            needed |= bits
            if not self._gate.call(knows, self._caller, uid, gid):
                unknown |= bits
        return rights.capabilities & needed & ~unknown


def _known(number: int) -> int:
    """An id to act with: for one of another user namespace, or none (what the kernel writes back), nobody's."""
    return NOBODY if number == NO_ID else number


def told_as(gate: Gate, caller: Caller) -> Identity:
    """Who is to be told what the filesystem below may not tell everybody: a caller without his capabilities."""
    return Identity(caller.uid, caller.gid, gate.call(rights_of, caller).groups, 0)
