"""A caller for requests to the vfs, where no kernel makes them."""

from __future__ import annotations

from typing import NamedTuple


class Somebody(NamedTuple):
    """A process; linux.caller.Caller says what of it counts."""

    uid: int
    gid: int
    pid: int
    umask: int
