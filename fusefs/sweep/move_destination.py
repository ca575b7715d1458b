"""The destination of moved matches: a directory that a person named, and in it the tree that they come from.

Nothing here is ever done to a name that the owner of the place could have put there: a directory is made, with its
owner and mode, where no other user can enter, and then gets its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fusefs.core.errors import AcrossUsers, NotFound, OtherFilesystem, UsageError, errors_about
from fusefs.core.names import Name
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.selection import Selection
from fusefs.core.selection_syntax import format_options
from fusefs.linux.directory_metadata import inherited_project, make_like, project_of, read_likeness
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, is_inside
from fusefs.linux.private_directory import PrivateDirectory
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.deep_path import DeepOpener, DeepOpeners, make_missing
from fusefs.store.layout import COPY_PREFIX, NEW_PREFIX
from fusefs.store.locate import find_scope
from fusefs.store.user_boundary import check_giving, is_bounded
from fusefs.sweep.open_directories import found_directory
from fusefs.sweep.request import IfExists, SweepRoot, identify

_CLOSE = "name a directory of root's that nobody else can write in, or whose sticky bit is set (chmod +t)"


class MoveDestination:
    """A directory to move to, open.

    path        its path, links resolved
    identified  what it is on the backing side
    """

    def __init__(self, kernel: Kernel, top: SweepRoot, scope: Scope) -> None:
        self._kernel = kernel
        self._top = top
        self._root = BackingAndMount(scope.sides.names())
        self.path = scope.path()
        self.identified = identify(kernel, scope.sides.fd)
        self._checked = b""
        # A tree kept below a directory that the swept one is in may lead back into that.
        self._way_back = below(top.path, self.path) if is_inside(top.path, self.path) else b""

    def open(self, upper: bytes, ways: DeepOpeners, source: Fd) -> Fd:
        """The directory for the names of one of the swept tree; made like that if it is missing.

        upper   its path from the swept directory
        source  the one of the swept tree
        Raises  OSError: ENOTDIR or ELOOP if something is a link there, EINVAL if it is in the swept directory itself;
                AcrossUsers
        """
        if self._way_back and (upper == self._way_back or upper.startswith(self._way_back + b"/")):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        models, targets = ways.into(BackingAndMount(self._top.sides.fd)), ways.into(self._root)
        if is_bounded():
            self._check_way(os.path.dirname(upper), models, targets)
        target = targets.beneath(upper, partial(self._make_way, models)).fd
        if is_bounded() and upper:
            with closed_on_error(target):
                self._check(upper, source, target)
        return target

    def _check_way(self, above: bytes, models: DeepOpener, targets: DeepOpener) -> None:
        """Look at the directories on the way to one, once, as far as they are there. Raises  AcrossUsers, OSError"""
        unchecked = []
        path = above
        while path and path != self._checked and not self._checked.startswith(path + b"/"):
            unchecked.append(path)
            path = os.path.dirname(path)
        for path in reversed(unchecked):
            try:
                with targets.beneath(path) as target, models.beneath(path) as source:
                    self._check(path, source.fd, target.fd)
            except FileNotFoundError:
                return  # from here on it is made, or the source was moved
            self._checked = path

    def _check(self, path: bytes, source: Fd, target: Fd) -> None:
        check_giving(self._kernel, target, path, self._kernel.fstat(source).st_uid, source)

    def _make_way(self, models: DeepOpener, above: BackingAndMount, way: bytes, missing: bytes) -> None:
        make_missing(self._kernel, above.fd, way, missing, models, partial(_make_like, self._kernel))


def _make_like(kernel: Kernel, above: Fd, name: Name, model: Fd) -> None:
    """A new directory of that name made like another, unless it is there already."""
    with kernel.open_dir(model) as readable:
        wanted = read_likeness(kernel, readable)._replace(extended=None)  # its project is that of the place
    with PrivateDirectory(kernel, above, COPY_PREFIX) as private:
        place = private.open()
        make_like(kernel, place, name, wanted, partial(kernel.rename_free, place, name, above, name))


def rsync_line(
    directory: bytes, selection: Selection, target: bytes, if_exists: IfExists, more: Sequence[bytes] = ()
) -> str:
    """Write the command that moves the same matches to another filesystem, which no rename reaches.

    rsync takes what follows `/./` in each path as the path below its destination.

    directory  absolute
    more       more words for `trashd sweep`: a list of names, a limit
    """
    options = format_options(selection)
    if options is None:
        return "rsync -aHAX --remove-source-files moves files to another filesystem"
    words = [os.path.join(directory, b"."), *map(os.fsencode, options), *more, b"--print0"]
    sweep = " ".join(map(shell_word, words))
    flags = f"-a{'r' * ('d' in selection.types)}HAX --from0 --files-from=- --remove-source-files"
    if if_exists is not IfExists.REPLACE:
        flags += " --ignore-existing"
    return f"trashd sweep {sweep} | rsync {flags} / {shell_word(os.path.join(target, b''))}"


@contextmanager
def open_destination(kernel: Kernel, top: SweepRoot, path: bytes) -> Iterator[MoveDestination]:
    """The directory at a path that a person named; it touches nothing.

    Raises  UsageError if it is the swept one; OtherFilesystem if no rename reaches it; Refused if a link on the way is
            another user's; AcrossUsers; NotFound, and what `find_scope` raises
    """
    with _found(kernel, path) as scope:
        _refuse_others_way(kernel, scope, path)
        if os.path.samestat(kernel.fstat(scope.sides.fd), kernel.fstat(top.sides.fd)):
            raise UsageError("--move-to is the swept directory itself")
        with errors_about(path):
            if _is_distant(kernel, top.sides, scope.sides):
                raise OtherFilesystem(path)
            owner = kernel.fstat(top.sides.fd).st_uid
            check_giving(kernel, scope.sides.fd, path, owner, top.sides.fd)
            destination = MoveDestination(kernel, top, scope)
        yield destination


def _found(kernel: Kernel, path: bytes) -> Scope:
    try:
        return find_scope(kernel, path)
    except NotFound as error:
        raise NotFound(path, "the directory that matches are moved to must be there: mkdir makes it") from error


def _refuse_others_way(kernel: Kernel, scope: Scope, path: bytes) -> None:
    """A user who can put a link on the way would choose for us where things go. Raises  Refused, NotFound"""
    with found_directory(kernel, path, scope.mounts) as found:
        seen = kernel.fstat(found.fd)
        if is_bounded() and found.whose is None:
            raise AcrossUsers(f"the way to {printable(path)} leads from one user's directory into another's", _CLOSE)
        if not any(one is not None and os.path.samestat(seen, kernel.fstat(one)) for one in scope.sides):
            raise NotFound(path, "its directory was moved meanwhile")


def _is_distant(kernel: Kernel, here: BackingAndMount, there: BackingAndMount) -> bool:
    """Whether a rename from one directory to the other is refused whatever is renamed.

    The kernel compares mounts before it looks at names, so that a name of nothing tells of them; filesystems
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
