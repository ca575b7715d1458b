"""Who asks for what we answer ourselves."""

from __future__ import annotations

from typing import Self


class Asking:
    """A linux.caller.Caller; one for all requests, one after the other."""

    __slots__ = ("gid", "pid", "uid", "umask")

    def __init__(self) -> None:
        """Begin with nobody."""
        self.uid = self.gid = self.pid = self.umask = 0

    def as_now(self) -> Self:
        """Who asks now, for what goes on while others ask."""
        now = type(self)()
        now.uid, now.gid, now.pid, now.umask = self.uid, self.gid, self.pid, self.umask
        return now
