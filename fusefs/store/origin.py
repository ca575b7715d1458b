"""Where a tree came from: its old name, reached beneath the store's base, and what recovery and restore do there."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from fusefs.core.identity import Identity, Likelihood, compare, is_marked
from fusefs.core.names import Name, RelPath, join, split
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    OUT_OF_REACH,
    both_sides,
    suppress_errno,
    with_mounted,
)
from fusefs.store.container import HeldContainer
from fusefs.store.keep_entries import settle_kept
from fusefs.store.layout import FRESH, TREE
from fusefs.store.stage import identify_at
from fusefs.store.user_boundary import may_give
from fusefs.store.victim_rename import DirectRename, VisibleMove, take_back

_NOWHERE = (errno.ENAMETOOLONG, *OUT_OF_REACH)
_MOVED = {VisibleMove.PLACE: FRESH, VisibleMove.BACK: TREE}


class Origin:
    """The directory and name that a tree came from, if they can still be reached beneath the store's base."""

    def __init__(self, held: HeldContainer, path: RelPath | None = None) -> None:
        """path: another one than the record's origin. Users write records, so the way there goes through no link."""
        self._held = held
        self._kernel = held.folder.store.kernel
        self._upper = RelPath(b"")
        self.parent_fd: Fd | None = None
        self.name = Name(b"")
        if path is None and held.record.method is not Method.SWEEP:  # as that tree never had a name there
            path = held.record.origin
        if path is not None:
            *parents, self.name = split(path)
            self._upper = join(*parents)
            with suppress_errno(*_NOWHERE):
                self.parent_fd = self._kernel.open_beneath(held.folder.store.base.fd, self._upper or b".", DIRECTORY)

    def __enter__(self) -> Self:
        """Own its fd for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close it."""
        if self.parent_fd is not None:
            self.parent_fd.close()

    def identity(self) -> Identity | None:
        """What has the name now; None if nothing has, or the directory can't be reached."""
        return None if self.parent_fd is None else identify_at(self._kernel, self.parent_fd, self.name)

    @contextmanager
    def visible(self) -> Iterator[DirectRename]:
        """What changes the name, in the mount that shows it if there is one; only if the directory can be reached."""
        assert self.parent_fd is not None
        # Not opened before it is needed: to look at what needs no repair there, no mount's daemon is waited for.
        above = self._held.folder.store.base.mounted
        with with_mounted(self._kernel, self.parent_fd, above, self._upper) as sides:
            yield DirectRename(self._kernel, sides, self.name)

    def take_back(self, mode: int | None, lent_to: Identity | None) -> None:
        """End a loan at the name, if what has it is what the loan was for."""
        if mode is None or self.parent_fd is None:
            return
        with suppress(FileNotFoundError), self._kernel.open_beneath(self.parent_fd, self.name) as fd:
            if compare(self._kernel.identify(fd), lent_to) is Likelihood.SAME:
                with self.visible() as visible:
                    take_back(self._held, fd, mode, visible)

    def unmark(self) -> None:
        """Take the mark off our fresh directory, if that has the name still: it is not asked for any more."""
        fresh = self._held.record.fresh
        if is_marked(fresh) and self.parent_fd is not None:
            with suppress(OSError), self._kernel.open_beneath(self.parent_fd, self.name, DIRECTORY) as fd:
                if compare(self._kernel.identify(fd), fresh) is Likelihood.SAME:
                    self._kernel.unmark(fd)

    def place(self, move_to_it: VisibleMove) -> bool:
        """Move something of the container to the name and end its loan; whether it could: see `may_give`."""
        if self.parent_fd is None:
            return False
        with self._kernel.open_beneath(self._held.fd, _MOVED[move_to_it]) as fd, self.visible() as visible:
            if move_to_it is VisibleMove.BACK:
                owner, recorded = self._kernel.fstat(fd).st_uid, self._held.record.parent
                if not may_give(self._kernel, self.parent_fd, owner, None, recorded):
                    return False
            try:
                visible.make(move_to_it, self._held)
            except FileExistsError:
                return False
            self.settle_kept()
            take_back(self._held, fd, self._held.record.lent_mode, visible)
        return True

    def settle_kept(self) -> list[str]:
        """Settle what `swap --keep`, or a restore of a part, has in view, while a loan lasts.

        Returns  what did not come, in words
        Raises   OSError
        """
        if self._held.record.kept is None and not self._held.record.parts:
            return []
        if self.parent_fd is None:
            return settle_kept(self._held, None)
        try:
            fd = self._kernel.open_beneath(self.parent_fd, self.name, DIRECTORY)
        except OSError as error:
            if error.errno not in _NOWHERE:
                raise
            return settle_kept(self._held, None)
        above = self._held.folder.store.base.mounted
        with both_sides(self._kernel, fd, above, join(self._upper, self.name)) as here:
            return settle_kept(self._held, here)
