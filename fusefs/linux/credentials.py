"""Credentials: the capabilities that root's daemon keeps, and single calls as another user.

The C library's functions for IDs can't be used for this, since they act on all threads. The calls used here act on one
thread. The kernel treats each such change as a change of privileges: afterwards, the process is not dumpable and has no
parent-death signal. Nothing in trashd depends on either.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cache, lru_cache
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

from fusefs.linux.syscalls import capget, capset, prctl, setfsgid, setfsuid, setgroups

_PR_CAPBSET_DROP = 24
_PR_GET_SECUREBITS = 27
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_VERSION_3 = 0x20080522
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; then the same for capabilities from 32 on
_N_KEPT = 64
_HEADER = struct.pack("=Ii", _VERSION_3, 0)


class Capability(IntEnum):
    """Capability numbers from linux/capability.h."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    FSETID = 4
    SYS_ADMIN = 21
    SYS_RESOURCE = 24
    SETFCAP = 31


def drop_capabilities(*dropped: Capability) -> None:
    """Drop capabilities from all sets of this thread, and of threads that it starts, so that no exec restores them.

    Source  capabilities(7): with CAP_FSETID, a write keeps set-user-ID bits; CAP_SYS_RESOURCE overrides quotas
    """
    for capability in dropped:
        prctl(_PR_CAPBSET_DROP, capability)
    keep = ~sum(1 << capability for capability in dropped)
    low, high = keep & 0xFFFFFFFF, (keep >> 32) & 0xFFFFFFFF
    mask = (low, low, low, high, high, high)
    kept = [has & may for has, may in zip(_SETS.unpack(_read_sets()), mask, strict=True)]
    set_capability_sets(_SETS.pack(*kept))


def prepare_to_act_as_others() -> None:
    """Prepare this thread, and threads that it starts, to make calls as other users, with those users' rights.

    With SECBIT_NO_SETUID_FIXUP, the kernel would not drop the capabilities for files when the fsuid changes. Our groups
    are dropped because otherwise, a call as another user could succeed only because we are in one of them.
    Source  SECBIT_NO_SETUID_FIXUP in capabilities(7)
    """
    with suppress(PermissionError):  # in a user namespace that forbids setgroups
        os.setgroups(())
    bits = prctl(_PR_GET_SECUREBITS)
    if bits & _SECBIT_NO_SETUID_FIXUP:
        prctl(_PR_SET_SECUREBITS, bits & ~_SECBIT_NO_SETUID_FIXUP)


@lru_cache(_N_KEPT)
def sets_with_effective(capabilities: int) -> bytes:
    """Return our capability sets with only these bits effective; bits that are not permitted are left out."""
    _effective, permitted, inheritable, _more, more_permitted, more_inheritable = _SETS.unpack(own_capability_sets())
    low, high = capabilities & 0xFFFFFFFF & permitted, capabilities >> 32 & more_permitted
    return _SETS.pack(low, permitted, inheritable, high, more_permitted, more_inheritable)


def include_all_ours(capabilities: int) -> bool:
    """Return whether these bits include all capabilities of this process."""
    return not _permitted_bits() & ~capabilities


def may_use(capability: Capability) -> bool:
    """Return whether a capability of this thread is effective now."""
    return bool(_SETS.unpack(_read_sets())[0] >> capability & 1)  # all members of Capability are below 32


@cache
def own_capability_sets() -> bytes:
    """Return the capability sets that each thread has when it does not act as another user.

    They are read by the first call, which must come from such a thread. After that, no thread must permanently gain or
    lose a capability.
    """
    return _read_sets()


@cache
def _permitted_bits() -> int:
    _effective, low, _inheritable, _more, high, _more_inheritable = _SETS.unpack(own_capability_sets())
    return int(high << 32 | low)


def set_capability_sets(sets: bytes) -> None:
    """Set this thread's capability sets; capabilities that are no longer permitted can't be added."""
    capset(_HEADER, sets)


def _read_sets() -> bytes:
    return capget(_HEADER, _SETS.size)


P = ParamSpec("P")
R = TypeVar("R")
NO_GROUP = 0xFFFF_FFFE
"""The highest possible group ID, which no file and no user has."""
NO_ID = 0xFFFF_FFFF
"""Not an ID: with it, setfsuid(2) and setfsgid(2) change nothing and return the current ID."""


class ThreadCredentials(NamedTuple):
    """The credentials for a call.

    uid, gid      IDs for file access; 0: the thread's own. While the UID is another user's, the kernel suspends the
                  thread's capabilities for files
    groups        supplementary groups; a thread that acts as other users has none of its own
    capabilities  which of the thread's capabilities are effective, as bits; None: those that remain with this UID
    umask         None: the thread's own
    Source        setfsuid(2); cap_task_fix_setuid in the kernel's security/commoncap.c
    """

    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    capabilities: int | None = None
    umask: int | None = None


OWN_CREDENTIALS = ThreadCredentials()


def in_group(gid: int) -> ThreadCredentials:
    """Return the credentials for setting a set-group-ID bit: root acts in the group; other users must be members."""
    return OWN_CREDENTIALS if os.geteuid() else ThreadCredentials(gid=gid)


@cache
def in_no_group() -> ThreadCredentials:
    """Return credentials with which root is in no file's group, so that being in group 0 preserves no set-group-ID bit.

    In a user namespace, return root's own credentials, because any ID that is mapped there may be that of a file.
    """
    with open("/proc/self/gid_map", "rb") as mapped:
        maps_all_ids = mapped.read().split() == [b"0", b"0", b"4294967295"]
    return in_group(NO_GROUP) if maps_all_ids else OWN_CREDENTIALS


def call_as(credentials: ThreadCredentials, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function with these credentials. It must not let another task run on this thread, or start a thread.

    If the thread's own identity can't be restored, the process ends, so that nothing is done as the wrong user.
    Raises  OSError EPERM: these IDs are not available in our user namespace
    """
    uid, gid, groups, capabilities, umask = credentials
    effective = b"" if capabilities is None else sets_with_effective(capabilities)
    if groups and not _may_have_groups():  # setgroups is forbidden, even to drop them again
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    own_uid = own_gid = own_umask = -1
    is_itself = False
    try:
        try:
            if umask is not None:
                own_umask = os.umask(umask)
            if groups:
                setgroups(groups)
            if gid:
                own_gid = setfsgid(gid)
            if uid:
                own_uid = setfsuid(uid)
            if effective:
                set_capability_sets(effective)
            # Neither setfsgid nor setfsuid reports whether it succeeded.
            if (gid and setfsgid(NO_ID) != gid) or (uid and setfsuid(NO_ID) != uid):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            return function(*args, **kwargs)
        finally:
            if own_uid >= 0:
                setfsuid(own_uid)
            if own_gid >= 0:
                setfsgid(own_gid)
            if effective:
                set_capability_sets(own_capability_sets())
            if groups:
                setgroups(())
            if own_umask >= 0:
                os.umask(own_umask)
            is_itself = (own_gid < 0 or setfsgid(NO_ID) == own_gid) and (own_uid < 0 or setfsuid(NO_ID) == own_uid)
    finally:
        if not is_itself:
            _abort()


@cache
def _may_have_groups() -> bool:
    """Return whether our user namespace allows supplementary groups."""
    with open("/proc/self/setgroups", "rb") as setgroups_file:
        return setgroups_file.read() != b"deny\n"


def _abort() -> NoReturn:
    os.write(2, b"trashd: a thread could not restore its own identity\n")
    os._exit(os.EX_SOFTWARE)
