"""What root's daemon may do: less than root, for good."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from enum import IntEnum
from functools import cache, lru_cache

from fusefs.linux.syscalls import capget, capset, prctl

_PR_CAPBSET_DROP = 24
_PR_GET_SECUREBITS = 27
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_VERSION_3 = 0x20080522
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; then the same of capabilities 32 and above

_N_KEPT = 64
_HEADER = struct.pack("=Ii", _VERSION_3, 0)


class Capability(IntEnum):
    """Numbers of linux/capability.h."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    FSETID = 4
    SYS_ADMIN = 21
    SYS_RESOURCE = 24
    SETFCAP = 31


def drop_capabilities(*dropped: Capability) -> None:
    """Take capabilities from this thread and those that it starts: from all its sets, so that no exec brings any back.

    Source  capabilities(7): CAP_FSETID lets a write keep set-user-ID bits, CAP_SYS_RESOURCE lets it pass quotas
    """
    for capability in dropped:
        prctl(_PR_CAPBSET_DROP, capability)
    keep = ~sum(1 << capability for capability in dropped)
    low, high = keep & 0xFFFFFFFF, (keep >> 32) & 0xFFFFFFFF
    mask = (low, low, low, high, high, high)
    kept = [has & may for has, may in zip(_SETS.unpack(_sets()), mask, strict=True)]
    take_up(_SETS.pack(*kept))


def act_as_others_can() -> None:
    """Have this thread, and those that it starts, act as others by linux/thread_credentials.py and be judged as them.

    The kernel takes the capabilities over files away with another fsuid, if it is not told to leave that; and what is
    done as another user is not to be allowed for a group of ours.
    Source  SECBIT_NO_SETUID_FIXUP in capabilities(7)
    """
    with suppress(PermissionError):  # in a user namespace that forbids setgroups
        os.setgroups(())
    bits = prctl(_PR_GET_SECUREBITS)
    if bits & _SECBIT_NO_SETUID_FIXUP:
        prctl(_PR_SET_SECUREBITS, bits & ~_SECBIT_NO_SETUID_FIXUP)


@lru_cache(_N_KEPT)
def with_effective(capabilities: int) -> bytes:
    """What all threads have, with none effective but those of some bits, as far as they have them."""
    _effective, permitted, inheritable, _more, more_permitted, more_inheritable = _SETS.unpack(at_rest())
    low, high = capabilities & 0xFFFFFFFF & permitted, capabilities >> 32 & more_permitted
    return _SETS.pack(low, permitted, inheritable, high, more_permitted, more_inheritable)


def are_ours(capabilities: int) -> bool:
    """Whether these bits are all that this process has, and perhaps more."""
    return not _ours() & ~capabilities


def may_use(capability: Capability) -> bool:
    """Whether this thread has it now."""
    return bool(_SETS.unpack(_sets())[0] >> capability & 1)  # all of ours are below 32


@cache
def at_rest() -> bytes:
    """What all threads have, for `take_up`: none of them gets any more, or loses any for good, from now on.

    To be asked first by a thread that acts as no other user.
    """
    return _sets()


@cache
def _ours() -> int:
    _effective, low, _inheritable, _more, high, _more_inheritable = _SETS.unpack(at_rest())
    return int(high << 32 | low)


def take_up(sets: bytes) -> None:
    """Give this thread the capabilities that it had, or fewer."""
    capset(_HEADER, sets)


def _sets() -> bytes:
    return capget(_HEADER, _SETS.size)
