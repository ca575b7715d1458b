"""Makes the few renames that other processes can see: those between the victim's name and a container.

On shared filesystems, each of them passes through a transfer directory (store/transfer_directory.py) and is checked
afterwards. A rename may need a temporary permission: write access for a directory's owner, added for the duration of
the rename.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol

from fusefs.core.container_states import State
from fusefs.core.errors import NotPermitted, TakenOver
from fusefs.core.names import Name, RelPath, join_path
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import DAEMON_GONE
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    BackingAndMount,
    is_same_in_mount,
    refresh_in_mount,
    retry_stale,
    suppress_errno,
)
from fusefs.store.container import GONE_ERRNOS, HeldContainer, has_lost_record
from fusefs.store.layout import ANNOUNCED_PREFIX, REPLACEMENT, TREE, UserFolder, Volume
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.transfer_directory import late_name, transfer_directory


class VisibleMove(Enum):
    """The renames that can be made at the visible name."""

    EXCHANGE = "exchange the container's `tree` and the entry at the name"
    ASIDE = "move the entry at the name to the container's `tree`"
    REPLACE = "as ASIDE, and move the container's `fresh` to the name at once: on shared filesystems only"
    ASIDE_REPLACEMENT = "move the entry at the name to the container's `fresh`"
    PLACE = "move the container's `fresh` to the name, which is free"
    BACK = "move the container's `tree` to the name, which is free"


_SOURCE_NAMES = {
    VisibleMove.EXCHANGE: TREE,
    VisibleMove.PLACE: REPLACEMENT,
    VisibleMove.BACK: TREE,
    VisibleMove.REPLACE: REPLACEMENT,
}
_TARGET_NAMES = {VisibleMove.ASIDE: TREE, VisibleMove.ASIDE_REPLACEMENT: REPLACEMENT, VisibleMove.REPLACE: TREE}


class _RenameOutcome(NamedTuple):
    """The outcome of a rename's system calls.

    error       the error of the call that failed
    holds_name  whether a directory that we made to reserve the name may still have it
    gap_ns      for how long the name was missing
    """

    error: OSError | None = None
    holds_name: bool = False
    gap_ns: int = 0


class TransferRename(NamedTuple):
    """Renames an entry from a name into a container or back, through a transfer directory.

    container, parent  the container, and the parent directory of the name; opened in our mount if it shows both
    """

    kernel: Kernel
    volume: Volume
    container: Fd
    parent: Fd
    name: Name

    def make(self, move: VisibleMove) -> int:
        """Make the rename, and check whether it happened: a restarted server may report ENOENT for a rename it made.

        Returns  for how many ns the name was missing; 0 also for a REPLACE in which `fresh` did not get the name and
                 is where it was
        Raises   TakenOver if another node considers us dead or has taken over the container; OSError if the rename did
                 not happen
        """
        part, is_kept = _SOURCE_NAMES.get(move), False
        with self._convert_lost_record():
            # PLACE is not refused: the name is missing, and a node that takes over would make the same rename.
            names = [] if move is VisibleMove.PLACE else self.kernel.list_reopened(self.container)
            if any(name.startswith(ANNOUNCED_PREFIX) for name in names):
                raise TakenOver(self.name)
            if part is None:
                outcome = self._rename_through(move, None)
            else:
                with self.kernel.open_beneath(self.container, part) as given:
                    outcome = self._rename_through(move, given)
                    is_kept = self.kernel.is_named(given, self.container, part)
            is_renamed = (
                not is_kept
                if move not in _TARGET_NAMES
                else _TARGET_NAMES[move] in self.kernel.list_reopened(self.container)
            )
        if outcome.error is not None and is_kept:
            self._free_name(outcome)
        if outcome.error is not None and not is_renamed:
            raise outcome.error
        return outcome.gap_ns

    def _rename_through(self, move: VisibleMove, given: Fd | None) -> _RenameOutcome:
        with transfer_directory(self.kernel, self.container) as through:
            if given is not None:
                self.kernel.rename(self.container, _SOURCE_NAMES[move], through, _SOURCE_NAMES[move])
            began_ns = time.monotonic_ns()
            try:
                if move is VisibleMove.EXCHANGE:
                    self.kernel.exchange(through, TREE, self.parent, self.name)
                elif move in _TARGET_NAMES:
                    self.kernel.rename(self.parent, self.name, through, _TARGET_NAMES[move])
                if given is not None and move is not VisibleMove.EXCHANGE:
                    return self._rename_to_name(through, _SOURCE_NAMES[move], given, began_ns)
            except OSError as error:
                return _RenameOutcome(error)
        return _RenameOutcome()

    def move_into_container(self, to: Name) -> None:
        """Rename the entry at the name into the container. Raises  OSError"""
        with self._convert_lost_record(), transfer_directory(self.kernel, self.container) as through:
            self.kernel.rename(self.parent, self.name, through, to)

    def move_part_to_name(self, path: RelPath) -> None:
        """Rename a part of the container's tree to the name; move it back if that fails. Raises  OSError"""
        upper, _, last = join_path(TREE, path).rpartition(b"/")
        with self._convert_lost_record(), self.kernel.open_beneath(self.container, upper, DIRECTORY) as source:
            part = late_name()  # if we are killed here, recovery makes it a separate orphan
            with self.kernel.open_beneath(source, last) as entry_fd:
                with transfer_directory(self.kernel, self.container) as through:
                    self.kernel.rename(source, last, through, part)
                    try:
                        outcome = self._rename_to_name(through, part, entry_fd, time.monotonic_ns())
                    except OSError as error:
                        outcome = _RenameOutcome(error)
                if self.kernel.is_named(entry_fd, self.container, part):
                    self.kernel.rename_free(self.container, part, source, last)
                    self._free_name(outcome)
                    assert outcome.error is not None
                    raise outcome.error

    def _rename_to_name(self, transfer_fd: Fd, part: Name, given: Fd, began_ns: int) -> _RenameOutcome:
        """Rename to the name, which must be free.

        Without RENAME_NOREPLACE, a mkdir or O_EXCL reserves the name first, because another user's empty directory
        could appear there after a check.
        began_ns  the time since which the name has been missing
        """
        if self.volume.noreplace is True:
            self.kernel.rename_free(transfer_fd, part, self.parent, self.name)
            return _RenameOutcome(gap_ns=time.monotonic_ns() - began_ns)
        st = self.kernel.fstat(given)
        if stat.S_ISDIR(st.st_mode):
            self.kernel.mkdir(self.parent, self.name, stat.S_IMODE(st.st_mode) & 0o777)
        else:
            self.kernel.create(self.parent, self.name).close()
        gap_ns = time.monotonic_ns() - began_ns
        try:
            self.kernel.rename(transfer_fd, part, self.parent, self.name)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # another process has written into the directory
                return _RenameOutcome(FileExistsError(errno.EEXIST, "another file has the name", self.name))
            return _RenameOutcome(error, holds_name=stat.S_ISDIR(st.st_mode))
        return _RenameOutcome(gap_ns=gap_ns)

    def _free_name(self, outcome: _RenameOutcome) -> None:
        """Remove the directory that reserved the name.

        Call this only if the rename certainly did not happen. Otherwise it could remove an empty directory that the
        rename has moved there.
        """
        if outcome.holds_name:
            with suppress(OSError):
                self.kernel.rmdir(self.parent, self.name)

    @contextmanager
    def _convert_lost_record(self) -> Iterator[None]:
        """Raise TakenOver instead of an error that occurs because the container has lost its record."""
        try:
            yield
        except OSError as error:
            if error.errno in GONE_ERRNOS and has_lost_record(self.kernel, self.container):
                raise TakenOver(self.name) from error
            raise


class VisibleRename(Protocol):
    """The renames at a visible name, made by this process or, for a user's container, by root on request."""

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """Make the rename; return for how many ns the name was missing (0: it never was). Raises  OSError"""

    def stat_name(self) -> tuple[int, int] | None:
        """Return the device and inode number of the entry at the name, or None if there is none."""

    def refresh(self, held: HeldContainer) -> None:
        """Make the mount's daemon and the kernel notice that the mode of the entry or the container's tree changed."""


class DirectRename:
    """The renames made by this process.

    If one of our mounts shows both the parent and the store, the renames are made in the mount. The kernel then moves
    its own dentries, and clients of the mount see the change at once. All checks use the backing filesystem.
    """

    def __init__(self, kernel: Kernel, parent: BackingAndMount, name: Name) -> None:
        """parent: must stay open as long as this object is used."""
        self._kernel = kernel
        self._parent_fd, self._mounted = parent
        self._name = name

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """See VisibleRename. Raises  TakenOver; OSError: ESTALE if the mount shows another container"""
        return self.make_in(move, held.folder, held.state, held.name(), held.fd)

    def make_in(self, move: VisibleMove, folder: UserFolder, state: State, container: bytes, fd: Fd) -> int:
        """Like `make`, for a container that is open but not locked. Raises  as for `make`"""
        with ExitStack() as owned:
            inside, parent = self._choose_fds(owned, folder, state, container, fd)
            if folder.store.is_shared():
                return self._transfer_rename(folder, inside, parent).make(move)
            call_with_room(folder, SPARE_FOR_USER, partial(self._rename, move, inside, parent))
        return 0

    def _rename(self, move: VisibleMove, inside: int, parent: int) -> None:
        match move:
            case VisibleMove.EXCHANGE:
                self._kernel.exchange(inside, TREE, parent, self._name)
            case VisibleMove.ASIDE:
                self._kernel.rename(parent, self._name, inside, TREE)
            case VisibleMove.ASIDE_REPLACEMENT:
                self._kernel.rename(parent, self._name, inside, REPLACEMENT)
            case VisibleMove.PLACE:
                self._kernel.rename_free(inside, REPLACEMENT, parent, self._name)
            case VisibleMove.BACK:
                self._kernel.rename_free(inside, TREE, parent, self._name)
            case VisibleMove.REPLACE:
                raise AssertionError(
                    "unreachable: REPLACE is used only on shared filesystems; on others, callers make two moves"
                )

    def move_into_container(self, folder: UserFolder, state: State, container: bytes, fd: Fd, to: Name) -> None:
        """Rename the entry at the name to a free name in an open container."""
        with ExitStack() as owned:
            inside, parent = self._choose_fds(owned, folder, state, container, fd)
            if folder.store.is_shared():
                self._transfer_rename(folder, inside, parent).move_into_container(to)
            else:
                self._kernel.rename_free(parent, self._name, inside, to)

    def move_to_directory(self, dir_fd: Fd, to: Name) -> None:
        """Rename the entry at the name into a directory on the backing filesystem."""
        self._kernel.rename_free(self._parent_fd, self._name, dir_fd, to)

    def move_part_to_name(self, held: HeldContainer, path: RelPath) -> None:
        """Rename a part of a container's tree to the name, which is free."""
        upper, _, last = join_path(TREE, path).rpartition(b"/")
        with ExitStack() as owned:
            inside, parent = self._choose_fds(owned, held.folder, held.state, held.name(), held.fd)
            if held.folder.store.is_shared():
                self._transfer_rename(held.folder, inside, parent).move_part_to_name(path)
                return
            with self._kernel.open_beneath(inside, upper, DIRECTORY) as source:
                self._kernel.rename_free(source, last, parent, self._name)

    def _transfer_rename(self, folder: UserFolder, inside: Fd, parent: Fd) -> TransferRename:
        return TransferRename(self._kernel, folder.store.volume, inside, parent, self._name)

    def _choose_fds(
        self, owned: ExitStack, folder: UserFolder, state: State, container: bytes, fd: Fd
    ) -> tuple[Fd, Fd]:
        """Return the fds of the container and the parent for a rename: those in the mount if it shows both.

        owned   closes fds that this opens
        Raises  OSError: ESTALE if the mount shows another container, or none
        """
        base, kernel = folder.store.base.mounted, self._kernel
        if base is None or self._mounted is None:
            return fd, self._parent_fd
        try:
            if kernel.fstat(base).st_dev != kernel.fstat(self._mounted).st_dev:
                return fd, self._parent_fd
            lookup = partial(self._open_mounted, base, folder.relative_path_to(state, container))
            mounted = owned.enter_context(retry_stale(lookup))
        except FileNotFoundError as error:
            raise _stale(container) from error
        except OSError as error:
            if error.errno not in DAEMON_GONE:
                raise
            return fd, self._parent_fd
        mounted_stat, backing_stat = kernel.fstat(mounted), kernel.fstat(fd)
        if mounted_stat.st_uid != backing_stat.st_uid or not is_same_in_mount(backing_stat, mounted_stat):
            raise _stale(container)
        return mounted, self._mounted

    def _open_mounted(self, base: Fd, path: RelPath) -> Fd:
        fd = self._kernel.open_beneath(base, path, DIRECTORY)
        with close_on_error(fd), suppress(FileNotFoundError):
            self._kernel.stat(fd, TREE)  # makes the kernel find `tree` where it is now
        return fd

    def stat_name(self) -> tuple[int, int] | None:
        fd = self.open()
        if fd is None:
            return None
        with fd:
            st = self._kernel.fstat(fd)
            return st.st_dev, st.st_ino

    def open(self) -> Fd | None:
        """Open the entry at the name (O_PATH); return None if there is none, or something is mounted there."""
        with suppress_errno(errno.ENOENT, errno.EXDEV):
            return self._kernel.open_beneath(self._parent_fd, self._name)
        return None

    def refers_to(self, fd: Fd) -> bool:
        return self._kernel.is_named(fd, self._parent_fd, self._name)

    def refresh(self, held: HeldContainer) -> None:
        self.refresh_in(held.folder, held.state, held.name())

    def refresh_in(self, folder: UserFolder, state: State, container: bytes) -> None:
        """Like `refresh`, for a container that is not locked."""
        if folder.store.base.mounted is not None and self._mounted is not None:
            refresh_in_mount(self._kernel, self._mounted, self._name)
            refresh_in_mount(
                self._kernel, folder.store.base.mounted, join_path(folder.relative_path_to(state, container), TREE)
            )


def _stale(container: bytes) -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), container)


_TEMPORARY_MODE = 0o700


def mode_to_restore(st: os.stat_result) -> int | None:
    """Return the mode to restore later, if we own a directory whose mode forbids a move to another parent; else None.

    Such a move changes the directory's `..`, so the kernel requires write permission on the directory itself. Reading
    its metadata requires read and search permission. The owner may grant these permissions temporarily.
    """
    uid = os.geteuid()
    if uid == 0 or st.st_uid != uid or not stat.S_ISDIR(st.st_mode) or st.st_mode & _TEMPORARY_MODE == _TEMPORARY_MODE:
        return None
    return stat.S_IMODE(st.st_mode)


def grant_temporary_permission(
    held: HeldContainer, fd: Fd, mode: int | None, visible: VisibleRename | None = None
) -> None:
    """Add the permissions that the move needs. The record already has the old mode, so recovery can restore it.

    visible  the directory's visible name, which must be refreshed because a mount would use the cached mode
    Raises   NotPermitted if this would lose the set-group-ID bit, which chmod clears for users outside the group
    """
    if mode is None:
        return
    kernel = held.folder.store.kernel
    if mode & stat.S_ISGID and kernel.fstat(fd).st_gid not in (os.getegid(), *os.getgroups()):
        raise NotPermitted(
            "the directory has the set-group-ID bit for a group that you are not in, and is not writable"
        )
    kernel.chmod(fd, mode | _TEMPORARY_MODE)
    if visible is not None:
        visible.refresh(held)


def end_temporary_permission(
    held: HeldContainer, fd: Fd, mode: int | None, visible: VisibleRename | None = None
) -> None:
    """Restore the mode that the directory had before the temporary permission, unless it already has that mode.

    Even setting the same mode would clear the set-group-ID bit if the owner is not in the directory's group.
    visible  as for `grant_temporary_permission`; always refreshed, since a killed process may have left it stale
    """
    if mode is None:
        return
    kernel = held.folder.store.kernel
    if stat.S_IMODE(kernel.fstat(fd).st_mode) != mode:
        kernel.chmod(fd, mode)
    if visible is not None:
        visible.refresh(held)
