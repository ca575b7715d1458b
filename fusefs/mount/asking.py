"""Who asks for what we answer ourselves."""

from __future__ import annotations


class Asking:
    """A linux.caller.Caller; one for all requests, one after the other."""

    __slots__ = ("gid", "pid", "uid", "umask")

    def __init__(self) -> None:
        """Begin with nobody."""
        self.uid = self.gid = self.pid = self.umask = 0
