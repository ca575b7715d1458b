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
from fusefs.store.gate import gate, late_name
from fusefs.store.layout import ANNOUNCED_PREFIX, FRESH, RECORD, TREE, Volume
from fusefs.store.visible_move import VisibleMove

_GIVEN = {
    VisibleMove.EXCHANGE: TREE,
    VisibleMove.PLACE: FRESH,
    VisibleMove.BACK: TREE,
    VisibleMove.REPLACE: FRESH,
}
_TAKEN = {VisibleMove.ASIDE: TREE, VisibleMove.ASIDE_FRESH: FRESH, VisibleMove.REPLACE: TREE}
_GONE = (errno.ENOENT, errno.ESTALE)


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
        part = _GIVEN.get(move)
        with self._told_if_taken_over():
            if move is not VisibleMove.PLACE:  # the name is missing then: who takes over would place it as well
                self._withdraw_if_announced()
            if part is None:
                failed, gap_ns = self._through(move, None)
            else:
                with self.kernel.open_beneath(self.container, part) as given:
                    failed, gap_ns = self._through(move, given)
                    is_done = not self.kernel.is_named(given, self.container, part)
            if move in _TAKEN:
                is_done = _TAKEN[move] in self.kernel.list_anew(self.container)
        if failed is not None and not is_done:
            raise failed
        return gap_ns

    def _through(self, move: VisibleMove, given: Fd | None) -> tuple[OSError | None, int]:
        """The rename, through a gate that is no more then; what was said of it, if that was an error, and the gap."""
        gap_ns = 0
        with gate(self.kernel, self.container) as through:
            if given is not None:
                self.kernel.rename(self.container, _GIVEN[move], through, _GIVEN[move])
            try:
                began_ns = time.monotonic_ns()
                if move is VisibleMove.EXCHANGE:
                    self.kernel.exchange(through, TREE, self.parent, self.name)
                elif move in _TAKEN:
                    self.kernel.rename(self.parent, self.name, through, _TAKEN[move])
                if given is not None and move is not VisibleMove.EXCHANGE:
                    gap_ns = self._give(through, _GIVEN[move], given) - began_ns
            except OSError as error:
                return error, 0
        return None, gap_ns

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
                failed: OSError | None = None
                with gate(self.kernel, self.container) as through:
                    self.kernel.rename(source, last, through, part)
                    try:
                        self._give(through, part, thing)
                    except OSError as error:
                        failed = error
                if self.kernel.is_named(thing, self.container, part):
                    self.kernel.rename_free(self.container, part, source, last)
                    assert failed is not None
                    raise failed

    def _give(self, through: Fd, part: Name, given: Fd) -> int:
        """Rename to the name, which must be free; the moment at which that meant something, by the monotonic clock.

        Without RENAME_NOREPLACE it is taken first by what replaces nothing:
        after a look another's empty directory may come there.
        """
        if self.volume.noreplace is True:
            self.kernel.rename_free(through, part, self.parent, self.name)
            return time.monotonic_ns()
        st = self.kernel.fstat(given)
        if stat.S_ISDIR(st.st_mode):
            self.kernel.mkdir(self.parent, self.name, stat.S_IMODE(st.st_mode) & 0o777)
        else:
            self.kernel.create(self.parent, self.name).close()
        taken_ns = time.monotonic_ns()
        try:
            self.kernel.rename(through, part, self.parent, self.name)
        except OSError as error:
            if stat.S_ISDIR(st.st_mode):
                with suppress(OSError):
                    self.kernel.rmdir(self.parent, self.name)
            if error.errno == errno.ENOTEMPTY:  # somebody wrote into it
                raise FileExistsError(errno.EEXIST, "something else has the name", self.name) from error
            raise
        return taken_ns

    def _withdraw_if_announced(self) -> None:
        if any(name.startswith(ANNOUNCED_PREFIX) for name in self.kernel.list_anew(self.container)):
            raise TakenOver(self.name)

    @contextmanager
    def _told_if_taken_over(self) -> Iterator[None]:
        """Without its record the container is not ours any more. Raises  TakenOver"""
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                try:
                    self.kernel.stat(self.container, RECORD)
                except OSError as gone:
                    if gone.errno in _GONE:
                        raise TakenOver(self.name) from error
            raise
