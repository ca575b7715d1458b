"""Which extended attributes are fetched with the attributes: who asks for one of a file, asks the next file for it."""

from __future__ import annotations

import stat
from collections.abc import Iterable

from fusefs.core.attributes import Attributes
from fusefs.core.xattrs import NAMES, UNSUPPORTED, is_asked_of_all, is_worth_asking
from fusefs.mount.memory import Seen

_N_REFUSED_MAX = 64


class Wanted:
    """Of one mount. To be changed with the tables' lock; to be asked on any thread.

    device  of the backing filesystem: what one mounted in it has not, that may have
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._names: frozenset[bytes] = frozenset()
        self._new: frozenset[bytes] = frozenset()
        self._refused: frozenset[tuple[bytes, bool]] = frozenset()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._names)

    @property
    def is_list(self) -> bool:
        """Whether the list of all names is among them: io_uring has no operation for it."""
        return NAMES in self._names

    def begin(self) -> None:
        """A listing begins: what nobody has asked for since the one before is not wanted any more."""
        self._names, self._new = self._names & self._new, frozenset()

    def ask(self, name: bytes) -> bool:
        """Somebody asks for one: of this listing, and the next. Returns  whether it was not wanted before"""
        if not is_asked_of_all(name):
            return False
        is_new = name not in self._names
        self._names |= {name}
        self._new |= {name}
        return is_new

    def of(self, seen: Attributes) -> tuple[bytes, ...]:
        """Those of one inode."""
        if not self._names:
            return ()
        device, is_directory = seen.dev, seen.is_directory()
        wanted = (name for name in self._names if is_worth_asking(name, seen.mode))
        return tuple(name for name in wanted if not self.refuses(device, name, is_directory=is_directory))

    def refuses(self, device: int, name: bytes, *, is_directory: bool) -> bool:
        """Whether this filesystem has one not at all, of directories or of files."""
        return device == self._device and (name, is_directory) in self._refused

    def answered(self, seen: Attributes, answers: Iterable[tuple[bytes, bytes | int]]) -> None:
        """What was answered of one inode: what is unsupported, nobody need be asked for again."""
        if seen.dev != self._device or not (stat.S_ISREG(seen.mode) or stat.S_ISDIR(seen.mode)):
            return
        for name, answer in answers:
            if answer in UNSUPPORTED:
                if len(self._refused) >= _N_REFUSED_MAX:
                    self._refused = frozenset()
                self._refused |= {(name, seen.is_directory())}

    def answered_all(self, found: Iterable[Seen | None]) -> None:
        """The same of many."""
        for one in found:
            if one is not None and one[2]:
                self.answered(one[0], one[2].items())

    def supported(self, name: bytes, *, is_directory: bool) -> None:
        """Somebody has set one: it is there after all."""
        self._refused -= {(name, is_directory)}
