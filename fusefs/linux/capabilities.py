"""What root's daemon may do: less than root, for good."""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum

from fusefs.linux.libc import checked, prctl

_PR_CAPBSET_DROP = 24
_PR_GET_SECUREBITS = 27
_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_VERSION_3 = 0x20080522
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable; then the same of capabilities 32 and above

_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """Numbers of linux/capability.h."""

    FSETID = 4
    SYS_RESOURCE = 24


def drop_capabilities(*dropped: Capability) -> None:
    """Take capabilities from this thread and those that it starts: from all its sets, so that no exec brings any back.

    Source  capabilities(7): CAP_FSETID lets a write keep set-user-ID bits, CAP_SYS_RESOURCE lets it pass quotas
    """
    for capability in dropped:
        prctl(_PR_CAPBSET_DROP, capability)
    header = struct.pack("=Ii", _VERSION_3, 0)
    sets = ctypes.create_string_buffer(_SETS.size)
    checked(_libc.capget(header, sets))
    keep = ~sum(1 << capability for capability in dropped)
    low, high = keep & 0xFFFFFFFF, (keep >> 32) & 0xFFFFFFFF
    mask = (low, low, low, high, high, high)
    kept = [has & may for has, may in zip(_SETS.unpack(sets), mask, strict=True)]
    checked(_libc.capset(header, _SETS.pack(*kept)))


def keep_capabilities_as_others() -> None:
    """Let this thread, and those that it starts, keep its capabilities while its fsuid is another's.

    Source  SECBIT_NO_SETUID_FIXUP in capabilities(7)
    """
    bits = prctl(_PR_GET_SECUREBITS)
    if not bits & _SECBIT_NO_SETUID_FIXUP:
        prctl(_PR_SET_SECUREBITS, bits | _SECBIT_NO_SETUID_FIXUP)
