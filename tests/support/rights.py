"""Processes with a right that their ids alone don't give them: a capability, or a user namespace of their own."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

from fusefs.linux.capabilities import Capability

HE = 72_001
FIRST, N_MAPPED = 720_000, 1000
CLONE_NEWUSER = 0x1000_0000
PR_SET_KEEPCAPS = 8


def in_child(act: Callable[[], object], become: Callable[[], None]) -> int:
    """The errno of an act by a process that has become somebody before."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            become()
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


_libc = ctypes.CDLL(None, use_errno=True)


def keep_only(capability: Capability) -> None:
    assert _libc.prctl(PR_SET_KEEPCAPS, ctypes.c_ulong(1), 0, 0, 0) == 0
    os.setgroups(())
    os.setresgid(HE, HE, HE)
    os.setresuid(HE, HE, HE)
    low, high = 1 << capability & 0xFFFF_FFFF, 1 << capability >> 32
    header, sets = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, 0, high, high, 0)
    assert _libc.capset(header, sets) == 0


def as_root_in_there() -> None:
    """Root of a user namespace that knows a thousand users, as one of rootless containers."""
    ready, go = os.pipe(), os.pipe()
    own = os.getpid()
    pid = os.fork()
    if pid == 0:  # the one who may write the maps
        os.read(ready[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{own}/{name}").write_text(f"0 {FIRST} {N_MAPPED}\n")
        os.write(go[1], b".")
        os._exit(0)
    assert _libc.unshare(CLONE_NEWUSER) == 0
    os.write(ready[1], b".")
    os.read(go[0], 1)
    os.setgroups(())
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
