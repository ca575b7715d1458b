"""The renames that others can see, off local filesystems: each through a gate, and looked at afterwards."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fusefs.core.errors import TakenOver
from fusefs.core.names import Name, RelPath, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY
from fusefs.store.container import GONE, has_lost_record
from fusefs.store.gate import gate, late_name
from fusefs.store.layout import ANNOUNCED_PREFIX, FRESH, TREE, Volume
from fusefs.store.visible_move import VisibleMove

_GIVEN = {
    VisibleMove.EXCHANGE: TREE,
    VisibleMove.PLACE: FRESH,
    VisibleMove.BACK: TREE,
    VisibleMove.REPLACE: FRESH,
}
_TAKEN = {VisibleMove.ASIDE: TREE, VisibleMove.ASIDE_FRESH: FRESH, VisibleMove.REPLACE: TREE}


class _Said(NamedTuple):
    """What was said of a rename.

    holds_name  the directory that we made to take the name may have it still
    gap_ns      for how long the name was missing
    """

    error: OSError | None = None
    holds_name: bool = False
    gap_ns: int = 0


class GatedRename(NamedTuple):
    """Renames between a container and a name.

    container, parent  their directories, both in the mount if one shows them
    """

    kernel: Kernel
    volume: Volume
    container: Fd
    parent: Fd
    name: Name

    def make(self, move: VisibleMove) -> int:
        """Do it, and see whether it was done, whatever is said of it: a server that started again may say ENOENT of a
        rename that it did.

        Returns  for how many ns the name was missing; of REPLACE 0 too if `fresh` did not get it, and is where it was
        Raises  TakenOver if another node takes us for dead, or has taken the container over; OSError if it was not done
        """
        part, is_kept = _GIVEN.get(move), False
        with self._told_if_taken_over():
            if move is not VisibleMove.PLACE:  # the name is missing then: who takes over would place it as well
                self._withdraw_if_announced()
            if part is None:
                said = self._through(move, None)
            else:
                with self.kernel.open_beneath(self.container, part) as given:
                    said = self._through(move, given)
                    is_kept = self.kernel.is_named(given, self.container, part)
            is_done = not is_kept if move not in _TAKEN else _TAKEN[move] in self.kernel.list_anew(self.container)
        if said.error is not None and is_kept:
            self._leave_name(said)
        if said.error is not None and not is_done:
            raise said.error
        return said.gap_ns

    def _through(self, move: VisibleMove, given: Fd | None) -> _Said:
        """The rename, through a gate that is no more then."""
        with gate(self.kernel, self.container) as through:
            if given is not None:
                self.kernel.rename(self.container, _GIVEN[move], through, _GIVEN[move])
            began_ns = time.monotonic_ns()
            try:
                if move is VisibleMove.EXCHANGE:
                    self.kernel.exchange(through, TREE, self.parent, self.name)
                elif move in _TAKEN:
                    self.kernel.rename(self.parent, self.name, through, _TAKEN[move])
                if given is not None and move is not VisibleMove.EXCHANGE:
                    return self._give(through, _GIVEN[move], given, began_ns)
            except OSError as error:
                return _Said(error)
        return _Said()

    def take_away(self, to: Name) -> None:
        """Rename what has the name into the container. Raises  OSError"""
        with self._told_if_taken_over(), gate(self.kernel, self.container) as through:
            self.kernel.rename(self.parent, self.name, through, to)

    def bring(self, path: RelPath) -> None:
        """Rename a part of the container's tree to the name; if that can't be it goes back into the tree.

        Raises  OSError
        """
        upper, _, last = join(TREE, path).rpartition(b"/")
        with self._told_if_taken_over(), self.kernel.open_beneath(self.container, upper, DIRECTORY) as source:
            part = late_name()  # killed here, it is an orphan of its own
            with self.kernel.open_beneath(source, last) as thing:
                with gate(self.kernel, self.container) as through:
                    self.kernel.rename(source, last, through, part)
                    try:
                        said = self._give(through, part, thing, time.monotonic_ns())
                    except OSError as error:
                        said = _Said(error)
                if self.kernel.is_named(thing, self.container, part):
                    self.kernel.rename_free(self.container, part, source, last)
                    self._leave_name(said)
                    assert said.error is not None
                    raise said.error

    def _give(self, through: Fd, part: Name, given: Fd, began_ns: int) -> _Said:
        """Rename to the name, which must be free. Without RENAME_NOREPLACE it is taken first by what replaces nothing:
        after a look another's empty directory may come there.

        began_ns  since when it is missing
        """
        if self.volume.noreplace is True:
            self.kernel.rename_free(through, part, self.parent, self.name)
            return _Said(gap_ns=time.monotonic_ns() - began_ns)
        st = self.kernel.fstat(given)
        if stat.S_ISDIR(st.st_mode):
            self.kernel.mkdir(self.parent, self.name, stat.S_IMODE(st.st_mode) & 0o777)
        else:
            self.kernel.create(self.parent, self.name).close()
        gap_ns = time.monotonic_ns() - began_ns
        try:
            self.kernel.rename(through, part, self.parent, self.name)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # somebody wrote into it
                return _Said(FileExistsError(errno.EEXIST, "something else has the name", self.name))
            return _Said(error, holds_name=stat.S_ISDIR(st.st_mode))
        return _Said(gap_ns=gap_ns)

    def _leave_name(self, said: _Said) -> None:
        """Only of a rename that was seen to be not done: else an empty directory that it gave the name would go."""
        if said.holds_name:
            with suppress(OSError):
                self.kernel.rmdir(self.parent, self.name)

    def _withdraw_if_announced(self) -> None:
        if any(name.startswith(ANNOUNCED_PREFIX) for name in self.kernel.list_anew(self.container)):
            raise TakenOver(self.name)

    @contextmanager
    def _told_if_taken_over(self) -> Iterator[None]:
        """Without its record the container is not ours any more. Raises  TakenOver"""
        try:
            yield
        except OSError as error:
            if error.errno in GONE and has_lost_record(self.kernel, self.container):
                raise TakenOver(self.name) from error
            raise
