"""The few renames that others can see: done on the victim's name, between its parent and a container."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

from fusefs.core.lifecycle import State
from fusefs.core.names import Name, RelPath, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.container import Held
from fusefs.store.layout import FRESH, TREE, UserFolder

_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_ROOT_INO, _PRIVATE_INOS = 1, 1 << 62
_STALE_PATIENCE, _STALE_PAUSE_S = 500, 0.001

T = TypeVar("T")


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
    """By our own authority, with the fd of the parent.

    Where a mount of ours shows both the parent and the store, the renames are done on the mount's names: the kernel
    then moves its own dentries along, and the mount's clients see it at once. What is looked at, here or to verify,
    is on the backing filesystem.
    """

    def __init__(self, kernel: Kernel, parent_fd: Fd, name: Name, mounted: Fd | None = None) -> None:
        """parent_fd, mounted: the parent on the backing filesystem and in a mount of ours; open as long as this is."""
        self._kernel = kernel
        self._parent_fd = parent_fd
        self._name = name
        self._mounted = mounted

    def make(self, move: Move, held: Held) -> None:
        """See Visible; ESTALE if the mount shows another container."""
        self.make_in(move, held.folder, held.state, held.name(), held.fd)

    def make_in(self, move: Move, folder: UserFolder, state: State, container: bytes, fd: Fd) -> None:
        """The same for a container that is not locked, but open."""
        with self._renamed_at(folder, state, container, fd) as (inside, parent):
            match move:
                case Move.EXCHANGE:
                    self._kernel.exchange(inside, TREE, parent, self._name)
                case Move.ASIDE:
                    self._kernel.rename(parent, self._name, inside, TREE)
                case Move.ASIDE_FRESH:
                    self._kernel.rename(parent, self._name, inside, FRESH)
                case Move.PLACE:
                    self._kernel.rename_free(inside, FRESH, parent, self._name)
                case Move.BACK:
                    self._kernel.rename_free(inside, TREE, parent, self._name)

    def bring(self, held: Held, path: RelPath) -> None:
        """Rename a part of a container's tree to the name, which is free."""
        upper, _, last = join(TREE, path).rpartition(b"/")
        with (
            self._renamed_at(held.folder, held.state, held.name(), held.fd) as (inside, parent),
            self._kernel.open_beneath(inside, upper, _DIR) as source,
        ):
            self._kernel.rename_free(source, last, parent, self._name)

    @contextmanager
    def _renamed_at(self, folder: UserFolder, state: State, container: bytes, fd: Fd) -> Iterator[tuple[Fd, Fd]]:
        """The container and the parent, between which it is renamed."""
        base, kernel = folder.store.mounted, self._kernel
        if base is None or self._mounted is None or kernel.fstat(base).st_dev != kernel.fstat(self._mounted).st_dev:
            yield fd, self._parent_fd
            return
        try:
            mounted = patiently(partial(self._open_mounted, base, folder.way_to(state, container)))
        except FileNotFoundError as error:
            raise _stale(container) from error
        with mounted:
            there, here = kernel.fstat(mounted), kernel.fstat(fd)
            if there.st_uid != here.st_uid or not is_shown_as(here, there):
                raise _stale(container)
            yield mounted, self._mounted

    def _open_mounted(self, base: Fd, way: RelPath) -> Fd:
        fd = self._kernel.open_beneath(base, way, _DIR)
        try:
            with suppress(FileNotFoundError):
                self._kernel.stat(fd, TREE)  # so that the rename finds it where it is now
        except BaseException:
            fd.close()
            raise
        return fd

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


def patiently(look: Callable[[], T]) -> T:
    """The result of a look at something in a mount that may have moved behind it.

    The kernel has a directory in one place only. It moves it when it sees it in another, unless somebody renames
    something at that moment: then it says ESTALE, even to who asks twice.
    Source  fs/dcache.c, __d_unalias
    """
    for _ in range(_STALE_PATIENCE):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_STALE_PAUSE_S)
    return look()


def _stale(container: bytes) -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), container)


def is_shown_as(backing: os.stat_result, mounted: os.stat_result) -> bool:
    """Whether a mount of ours may show the one as the other: it keeps inode numbers, but for a private range."""
    is_same_kind = stat.S_IFMT(backing.st_mode) == stat.S_IFMT(mounted.st_mode)
    return is_same_kind and (mounted.st_ino in (backing.st_ino, _ROOT_INO) or mounted.st_ino >= _PRIVATE_INOS)
