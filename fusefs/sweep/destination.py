"""Where matches are moved to: a directory that a person named, and in it the tree that they come from.

Nothing here is ever done to a name that whoever owns the place could have put there: a directory is made, with its
owner and mode, where nobody else can enter, and then gets its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from fusefs.core.errors import NotFound, OtherFilesystem, UsageError, from_os
from fusefs.core.names import Name, join, split
from fusefs.linux.copying import Private
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.likeness import inherited_project, make_like, project_of, read_likeness
from fusefs.linux.mountinfo import below, is_inside
from fusefs.store.layout import COPY_PREFIX, NEW_PREFIX
from fusefs.store.scope import Scope, find_scope
from fusefs.store.sides import Sides
from fusefs.sweep.directories import found_directory
from fusefs.sweep.request import Identified, Top

_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


class Destination:
    """A directory to move to, open.

    path        its path, links resolved
    identified  what it is on the backing side
    is_distant  a rename doesn't reach it: it is on another filesystem, or behind a boundary in ours
    """

    def __init__(self, kernel: Kernel, top: Top, scope: Scope, *, flat: bool) -> None:
        self._kernel = kernel
        self._top = top
        self._fd = scope.sides().names()
        self._flat = flat
        self.path = scope.path()
        seen = kernel.fstat(scope.parent_fd)
        self.identified: Identified = (seen.st_dev, seen.st_ino)
        self.is_distant = _is_distant(kernel, top.sides, scope.sides())
        # A tree kept below a directory that the swept one is in may lead back into that.
        self._way_back = b"" if flat or not is_inside(top.path, self.path) else below(top.path, self.path)

    def open(self, upper: bytes) -> Fd:
        """The directory for the names of one of the swept tree; made like that if it is missing.

        upper   its path from the swept directory
        Raises  OSError: ENOTDIR or ELOOP if something is a link there, EINVAL if it is in the swept directory itself
        """
        if self._way_back and (upper == self._way_back or upper.startswith(self._way_back + b"/")):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        path = b"" if self._flat else upper
        try:
            return self._kernel.open_beneath(self._fd, path or b".", _DIR)
        except FileNotFoundError:
            return self._make(split(path))

    def place(self, upper: bytes, name: bytes) -> bytes:
        """Where a name of one of the swept tree's directories goes, from the destination."""
        return name if self._flat else join(upper, name)

    def open_root(self) -> Fd:
        """The directory itself. Raises  OSError"""
        return self._kernel.open_beneath(self._fd, b".", _DIR)

    def _make(self, names: list[Name]) -> Fd:
        """The directory of a path of which the last parts are missing."""
        here, n_there = self._deepest(names)
        for count in range(n_there, len(names)):
            with here, self._kernel.open_dir(self._top.sides.fd, join(*names[: count + 1])) as like:
                here = _make_like(self._kernel, here, names[count], like)
        return here

    def _deepest(self, names: list[Name]) -> tuple[Fd, int]:
        """The deepest directory of a path that is there, and how many parts of the path lead to it."""
        for count in range(len(names) - 1, 0, -1):
            with suppress(FileNotFoundError):
                return self._kernel.open_beneath(self._fd, join(*names[:count]), _DIR), count
        return self.open_root(), 0


def _make_like(kernel: Kernel, above: Fd, name: Name, like: Fd) -> Fd:
    """A directory of that name: a new one made like another, or the one that somebody was faster to make."""
    wanted = read_likeness(kernel, like)._replace(extended=None)  # its project is that of the place
    with Private(kernel, above, COPY_PREFIX) as private:
        place = private.open()
        make_like(kernel, place, name, wanted, partial(kernel.rename_free, place, name, above, name))
    return kernel.open_beneath(above, name, _DIR)


@contextmanager
def open_destination(kernel: Kernel, top: Top, path: bytes, *, flat: bool, copies: bool) -> Iterator[Destination]:
    """The directory at a path that a person named; it touches nothing.

    copies  what a rename doesn't reach is no reason to refuse it
    Raises  UsageError if it is the swept one; OtherFilesystem; Refused if a link on the way is another user's;
            NotFound, and what `find_scope` raises
    """
    with _found(kernel, path) as scope:
        _refuse_others_way(kernel, scope, path)
        if os.path.samestat(kernel.fstat(scope.parent_fd), kernel.fstat(top.sides.fd)):
            raise UsageError("--move-to is the swept directory itself")
        try:
            destination = Destination(kernel, top, scope, flat=flat)
        except OSError as error:
            raise from_os(error, path) from error
        if destination.is_distant and not copies:
            raise OtherFilesystem(path)
        yield destination


def _found(kernel: Kernel, path: bytes) -> Scope:
    try:
        return find_scope(kernel, path)
    except NotFound as error:
        raise NotFound(path, "the directory that matches are moved to must be there: mkdir makes it") from error


def _refuse_others_way(kernel: Kernel, scope: Scope, path: bytes) -> None:
    """Whoever can put a link on the way would choose for us where things go. Raises  Refused, NotFound"""
    with found_directory(kernel, path) as found:
        seen = kernel.fstat(found.fd)
        if not any(one is not None and os.path.samestat(seen, kernel.fstat(one)) for one in scope.sides()):
            raise NotFound(path, "its directory was moved meanwhile")


def _is_distant(kernel: Kernel, here: Sides, there: Sides) -> bool:
    """Whether a rename from one directory to the other is refused whatever is renamed.

    The kernel compares mounts before it looks at names, so that a name that nobody has tells of them; filesystems
    compare subvolumes and projects only with something in hand.
    Source  fs/namei.c, do_renameat2
    """
    nobody = NEW_PREFIX + os.urandom(8).hex().encode()
    try:
        kernel.rename_free(here.names(), nobody, there.names(), nobody)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return True
    if kernel.fstat(here.fd).st_dev != kernel.fstat(there.fd).st_dev:
        return True
    try:
        with kernel.open_dir(there.fd) as target, kernel.open_dir(here.fd) as source:
            wanted = inherited_project(kernel, target)
            return wanted is not None and wanted != project_of(kernel, source)
    except PermissionError:
        return False  # each rename will say
