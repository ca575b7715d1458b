"""A way down a tree of any depth, with few fds: back up it goes without `..`."""

from __future__ import annotations

from typing import Self

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_FDS_MAX = 64
_STRIDE_BYTES = 4000
"""How much of a path one openat2 walks."""
_NEAR_BYTES = 512


class Pebbles:
    """The path from a top directory to where we are, and the fds of some directories on it.

    Going down puts down one more fd; when there are too many, every other one is taken up. So they lie dense at the
    end and ever sparser towards the top. Going back to a directory whose fd was taken up walks there from the
    nearest one above, by its names, and puts down fds on the way again: a chain of n directories costs about
    n log n steps, not n².

    A mark says how far down a directory is: the length of the path to it. The top's is 0.
    """

    def __init__(self, kernel: Kernel, top: Fd) -> None:
        """top: stays its owner's."""
        self._kernel = kernel
        self._top = top
        self._path = bytearray()
        self._fds: dict[int, Fd] = {}  # by mark, ascending

    def __enter__(self) -> Self:
        """Own the fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Take all of them up."""
        self._drop_below(0)

    @property
    def mark(self) -> int:
        """Where we are."""
        return next(reversed(self._fds), 0)

    @property
    def fd(self) -> Fd:
        """The directory where we are, readable; ours to close."""
        return self._fds[self.mark] if self._fds else self._top

    def descend(self, name: Name) -> None:
        """Go into a directory of this one.

        Raises  OSError, and we are where we were: gone, no directory, a mount, not ours to open
        """
        self._put_down(self.mark + 1 + len(name), self._kernel.open_dir(self.fd, name))
        self._path += b"/" + name

    def go_back(self, mark: int) -> None:
        """Go to a directory above. Whoever cares that it is the same as before looks: names may have changed hands.

        Raises  OSError, and we are somewhere above it
        """
        self._drop_below(mark)
        del self._path[mark:]
        while (here := self.mark) < mark:
            stop = self._next_stop(here, mark)
            self._put_down(stop, self._kernel.open_dir(self.fd, bytes(self._path[here + 1 : stop])))

    def _next_stop(self, here: int, mark: int) -> int:
        """Half the way that is left, as we are likely to come back to directories just above; at most a stride."""
        left = mark - here
        if left <= _NEAR_BYTES:
            return mark
        stop = self._path.rfind(b"/", here + 1, here + 1 + min(_STRIDE_BYTES, max(left // 2, _NEAR_BYTES)))
        if stop < 0:  # FUSE may have names as long as that
            stop = self._path.find(b"/", here + 1)
        return stop if stop >= 0 else mark

    def _put_down(self, mark: int, fd: Fd) -> None:
        self._fds[mark] = fd
        if len(self._fds) > _FDS_MAX:
            for every_other in list(self._fds)[:-1:2]:
                self._fds.pop(every_other).close()

    def _drop_below(self, mark: int) -> None:
        while self.mark > mark:
            self._fds.popitem()[1].close()
