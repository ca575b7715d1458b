"""The few renames that others can see: done on the victim's name, between its parent and a container."""

from __future__ import annotations

import errno
import os
from enum import Enum
from typing import Protocol

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.container import Held
from fusefs.store.layout import FRESH, TREE


class Move(Enum):
    """What can be done to the name."""

    EXCHANGE = "the container's `tree` and the name's thing change places"
    ASIDE = "the name's thing goes to the container's `tree`"
    ASIDE_FRESH = "the name's thing goes to the container's `fresh`"
    PLACE = "the container's `fresh` goes to the name, which is free"
    BACK = "the container's `tree` goes to the name, which is free"


class Visible(Protocol):
    """Whoever does it: we ourselves, or root for a user's container."""

    def make(self, move: Move, held: Held) -> None:
        """Do it; OSError as the kernel says."""

    def found(self) -> tuple[int, int] | None:
        """Device and inode number of what has the name now; None if nothing has."""


class Direct:
    """By our own authority, with the fd of the parent."""

    def __init__(self, kernel: Kernel, parent_fd: Fd, name: Name) -> None:
        """parent_fd: stays open as long as this is used."""
        self._kernel = kernel
        self._parent_fd = parent_fd
        self._name = name

    def make(self, move: Move, held: Held) -> None:
        """See Visible."""
        self.make_in(move, held.fd)

    def make_in(self, move: Move, container: Fd) -> None:
        """The same for a container's bare fd."""
        parent_fd, name = self._parent_fd, self._name
        match move:
            case Move.EXCHANGE:
                self._kernel.exchange(container, TREE, parent_fd, name)
            case Move.ASIDE:
                self._kernel.rename(parent_fd, name, container, TREE)
            case Move.ASIDE_FRESH:
                self._kernel.rename(parent_fd, name, container, FRESH)
            case Move.PLACE:
                self._kernel.rename_free(container, FRESH, parent_fd, name)
            case Move.BACK:
                self._kernel.rename_free(container, TREE, parent_fd, name)

    def found(self) -> tuple[int, int] | None:
        """See Visible."""
        st = self.look()
        return None if st is None else (st.st_dev, st.st_ino)

    def look(self) -> os.stat_result | None:
        """What has the name now; None if nothing has, or something is mounted there."""
        try:
            return self._kernel.stat(self._parent_fd, self._name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EXDEV):
                raise
            return None
