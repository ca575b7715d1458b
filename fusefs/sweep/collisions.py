"""What becomes of a match whose name is taken where it goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import count

from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import IfExists


def candidates(name: bytes, if_exists: IfExists) -> Iterator[bytes]:
    """The names that a match may get, the best first."""
    yield name
    if if_exists is IfExists.NUMBER:
        for number in count(1):
            yield numbered(name, number)


def numbered(name: bytes, number: int) -> bytes:
    """A name with a number."""
    return b"%s.%d" % (name, number)


class Arrivals:
    """What came to the destination since the sweep began is not replaced: it may be another match of it."""

    def __init__(self, began_ns: int, *, remembers: bool) -> None:
        """Begin.

        began_ns   by the clock that the filesystem gives ctimes from
        remembers  matches of different directories may get one name: which were given is remembered, since ctimes may
                   be whole seconds, a server's, or no more than mtimes (sshfs)
        """
        self._began_ns = began_ns
        self._remembers = remembers
        self._given: set[int] = set()

    def note(self, names: Iterable[bytes]) -> None:
        """The sweep gave names to matches."""
        if self._remembers:
            self._given.update(map(hash, names))  # of two names with one hash the second is left, and told

    def check_replaceable(self, kernel: Kernel, dir_fd: int, name: bytes) -> os.stat_result:
        """What has a name, if it may be replaced. Raises  OSError: EEXIST"""
        st = kernel.stat(dir_fd, name)
        if st.st_ctime_ns >= self._began_ns or hash(name) in self._given:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return st
