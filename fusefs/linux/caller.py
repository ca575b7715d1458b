"""Making things as somebody else would: with his uid, gid and umask, in a thread that keeps its capabilities."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_libc = ctypes.CDLL(None)


class Caller(NamedTuple):
    """Who asks: what the kernel says of the process."""

    uid: int
    gid: int
    pid: int
    umask: int


@contextmanager
def created_by(caller: Caller) -> Iterator[None]:
    """What is created in the block is the caller's, as if he had done it: owner, group, setgid, default ACLs, quota.

    For a thread of root's alone; anybody else is the caller himself. The umask is the whole process's: nothing else
    may create anything meanwhile.
    Source  setfsuid(2): one thread's; SECBIT_NO_SETUID_FIXUP in capabilities(7) keeps the capabilities
    """
    old_umask = os.umask(caller.umask)
    is_other = (caller.uid or caller.gid) and os.geteuid() == 0
    if is_other:
        _libc.setfsgid(ctypes.c_uint(caller.gid))
        _libc.setfsuid(ctypes.c_uint(caller.uid))
    try:
        yield
    finally:
        if is_other:
            _libc.setfsuid(ctypes.c_uint(0))
            _libc.setfsgid(ctypes.c_uint(0))
        os.umask(old_umask)


@contextmanager
def in_group(gid: int) -> Iterator[None]:
    """Be in a group for the block: a set-group-ID bit is only given by its members."""
    is_other = gid and os.geteuid() == 0
    if is_other:
        _libc.setfsgid(ctypes.c_uint(gid))
    try:
        yield
    finally:
        if is_other:
            _libc.setfsgid(ctypes.c_uint(0))
