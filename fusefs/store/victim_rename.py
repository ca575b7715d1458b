"""The few renames that others can see: done on the victim's name, between its parent and a container."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from functools import partial
from typing import Protocol

from fusefs.core.lifecycle import State
from fusefs.core.names import Name, RelPath, join
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import DAEMON_GONE
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount, is_shown_as, patiently, refresh, suppress_errno
from fusefs.store.container import HeldContainer
from fusefs.store.gated_rename import GatedRename
from fusefs.store.layout import FRESH, TREE, UserFolder
from fusefs.store.visible_move import VisibleMove

NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTEMPTY, errno.EEXIST)
"""What a filesystem says that can't exchange; the last two where it ignores the flag and tries a plain rename."""


class VisibleRename(Protocol):
    """What does it: we ourselves, or root for a user's container."""

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """Do it; for how many ns the name was missing, if the move is over then. OSError as the kernel says."""

    def found(self) -> tuple[int, int] | None:
        """Device and inode number of what has the name now; None if nothing has."""

    def refresh(self, held: HeldContainer) -> None:
        """Tell daemon and kernel, which remember it, of a mode that changed: the name's, or the container's tree's."""


class DirectRename:
    """By our own authority, with the parent opened.

    Where a mount of ours shows both the parent and the store, the renames are done on the mount's names: the kernel
    then moves its own dentries along, and the mount's clients see it at once. What is looked at, here or to verify,
    is on the backing filesystem.
    """

    def __init__(self, kernel: Kernel, parent: BackingAndMount, name: Name) -> None:
        """parent: open as long as this is."""
        self._kernel = kernel
        self._parent_fd, self._mounted = parent
        self._name = name

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """See Visible; ESTALE if the mount shows another container. Raises  TakenOver; OSError"""
        return self.make_in(move, held.folder, held.state, held.name(), held.fd)

    def make_in(self, move: VisibleMove, folder: UserFolder, state: State, container: bytes, fd: Fd) -> int:
        """Make a `VisibleMove` with a container that is open, but not locked; ESTALE if the mount shows another one."""
        with ExitStack() as owned:
            inside, parent = self._renamed_at(owned, folder, state, container, fd)
            if folder.store.is_shared():
                return self._gated(folder, inside, parent).make(move)
            match move:
                case VisibleMove.EXCHANGE:
                    self._kernel.exchange(inside, TREE, parent, self._name)
                case VisibleMove.ASIDE:
                    self._kernel.rename(parent, self._name, inside, TREE)
                case VisibleMove.ASIDE_FRESH:
                    self._kernel.rename(parent, self._name, inside, FRESH)
                case VisibleMove.PLACE:
                    self._kernel.rename_free(inside, FRESH, parent, self._name)
                case VisibleMove.BACK:
                    self._kernel.rename_free(inside, TREE, parent, self._name)
                case VisibleMove.REPLACE:
                    raise AssertionError("what is looked at in between is two moves")
        return 0

    def take_away(self, folder: UserFolder, state: State, container: bytes, fd: Fd, to: Name) -> None:
        """Rename what has the name into a container that is open, to a name that is free there."""
        with ExitStack() as owned:
            inside, parent = self._renamed_at(owned, folder, state, container, fd)
            if folder.store.is_shared():
                self._gated(folder, inside, parent).take_away(to)
            else:
                self._kernel.rename_free(parent, self._name, inside, to)

    def take_to(self, dir_fd: Fd, to: Name) -> None:
        """Rename what has the name into a directory of the backing filesystem."""
        self._kernel.rename_free(self._parent_fd, self._name, dir_fd, to)

    def bring(self, held: HeldContainer, path: RelPath) -> None:
        """Rename a part of a container's tree to the name, which is free."""
        upper, _, last = join(TREE, path).rpartition(b"/")
        with ExitStack() as owned:
            inside, parent = self._renamed_at(owned, held.folder, held.state, held.name(), held.fd)
            if held.folder.store.is_shared():
                self._gated(held.folder, inside, parent).bring(path)
                return
            with self._kernel.open_beneath(inside, upper, DIRECTORY) as source:
                self._kernel.rename_free(source, last, parent, self._name)

    def _gated(self, folder: UserFolder, inside: Fd, parent: Fd) -> GatedRename:
        from fusefs.store.gated_rename import GatedRename  # a swap on a local filesystem is spared it

        return GatedRename(self._kernel, folder.store.volume, inside, parent, self._name)

    def _renamed_at(
        self, owned: ExitStack, folder: UserFolder, state: State, container: bytes, fd: Fd
    ) -> tuple[Fd, Fd]:
        """The container and the parent, between which it is renamed. owned: closes what is opened for that"""
        mounted = self._open_shown(folder, state, container)
        if mounted is None or self._mounted is None:
            return fd, self._parent_fd
        owned.enter_context(mounted)
        there, here = self._kernel.fstat(mounted), self._kernel.fstat(fd)
        if there.st_uid != here.st_uid or not is_shown_as(here, there):
            raise _stale(container)
        return mounted, self._mounted

    def _open_shown(self, folder: UserFolder, state: State, container: bytes) -> Fd | None:
        """The container in the mount that shows the parent too; None if there is none to be seen."""
        base, kernel = folder.store.base.mounted, self._kernel
        if base is None or self._mounted is None:
            return None
        try:
            if kernel.fstat(base).st_dev != kernel.fstat(self._mounted).st_dev:
                return None
            return patiently(partial(self._open_mounted, base, folder.way_to(state, container)))
        except FileNotFoundError as error:
            raise _stale(container) from error
        except OSError as error:
            if error.errno not in DAEMON_GONE:
                raise
            return None

    def _open_mounted(self, base: Fd, way: RelPath) -> Fd:
        fd = self._kernel.open_beneath(base, way, DIRECTORY)
        with closed_on_error(fd), suppress(FileNotFoundError):
            self._kernel.stat(fd, TREE)  # so that the rename finds it where it is now
        return fd

    def found(self) -> tuple[int, int] | None:
        """See Visible."""
        fd = self.open()
        if fd is None:
            return None
        with fd:
            st = self._kernel.fstat(fd)
            return st.st_dev, st.st_ino

    def open(self) -> Fd | None:
        """What has the name now (O_PATH); None if nothing has, or something is mounted there."""
        with suppress_errno(errno.ENOENT, errno.EXDEV):
            return self._kernel.open_beneath(self._parent_fd, self._name)
        return None

    def has(self, fd: Fd) -> bool:
        """Whether the name means what an fd holds."""
        return self._kernel.is_named(fd, self._parent_fd, self._name)

    def refresh(self, held: HeldContainer) -> None:
        """See Visible."""
        self.refresh_in(held.folder, held.state, held.name())

    def refresh_in(self, folder: UserFolder, state: State, container: bytes) -> None:
        """Tell the daemon and kernel of a changed mode, as `refresh` does, for a container that is not locked."""
        if folder.store.base.mounted is not None and self._mounted is not None:
            refresh(self._kernel, self._mounted, self._name)
            refresh(self._kernel, folder.store.base.mounted, join(folder.way_to(state, container), TREE))


def _stale(container: bytes) -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), container)
