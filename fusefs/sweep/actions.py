"""The actions of a sweep on its matches: delete, print, count, trash into one orphan, or move to another directory.

A directory that holds a trash store is never taken whole, because trashd commands would lose access to its orphans.

No action changes an entry that the owner of a destination could have put there. A new directory gets its owner and
mode in a place that no other user can enter; only then is it moved to its final name.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from fusefs.core.errors import AcrossUsers, NotFound, OtherFilesystem, UsageError, errors_about
from fusefs.core.names import Name, RelPath, join_path
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import TreeSize
from fusefs.core.results import SHOWN_MATCHES_MAX, Match, SweepSums, Swept
from fusefs.core.selection import Field, Selection, format_options
from fusefs.linux.batched_calls import StatxResult, lstat_all, rename_all_free, unlink_all
from fusefs.linux.directory_metadata import inherited_project, make_directory_like, project_of, read_metadata
from fusefs.linux.disk_usage import never_shares
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.linux.mountinfo import is_inside, relative_to
from fusefs.linux.runtime_directories import PrivateDirectory
from fusefs.store.backing_and_mount import NO_SPACE_ERRNOS, BackingAndMount, Scope, choose_rename_fds, is_same_directory
from fusefs.store.layout import COPY_PREFIX, NEW_PREFIX
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.stage import SwapOptions
from fusefs.store.sweep_container import SweepContainer, open_sweep_container
from fusefs.store.victim import find_held_store, find_scope, stores_below
from fusefs.store.walk import DeepOpener, DeepOpeners, check_giving, make_missing, must_check_owners
from fusefs.sweep.open_directories import open_directory
from fusefs.sweep.request import (
    Action,
    ActionPlace,
    ActionResult,
    Identified,
    IfExists,
    SweepRoot,
    ToMove,
    ToPrint,
    ToTrash,
    identify,
)

_CLOSE = "name a directory that only root can write to, or one with the sticky bit (chmod +t)"


class MoveDestination:
    """An open directory to which matches are moved.

    path        its path, with links resolved
    identified  its identity on the backing filesystem
    """

    def __init__(self, kernel: Kernel, top: SweepRoot, scope: Scope) -> None:
        self._kernel = kernel
        self._top = top
        self._root = BackingAndMount(scope.sides.names_fd())
        self.path = scope.path()
        self.identified = identify(kernel, scope.sides.fd)
        self._checked = b""
        # If the destination contains the swept directory, a path in the moved tree could lead back into it.
        self._inner_path = relative_to(top.path, self.path) if is_inside(top.path, self.path) else b""

    def open(self, upper: bytes, ways: DeepOpeners, source: Fd) -> Fd:
        """Open the directory that corresponds to one in the swept tree; if missing, create it with the same attributes.

        upper   the directory's path relative to the destination
        source  the corresponding directory in the swept tree
        Raises  OSError: ENOTDIR or ELOOP if the path has a link, EINVAL if it leads back into the swept directory;
                AcrossUsers
        """
        if self._inner_path and (upper == self._inner_path or upper.startswith(self._inner_path + b"/")):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        models, targets = ways.opener_of(BackingAndMount(self._top.sides.fd)), ways.opener_of(self._root)
        if must_check_owners():
            self._check_parents(os.path.dirname(upper), models, targets)
        target = targets.beneath(upper, partial(self._make_parents, models)).fd
        if must_check_owners() and upper:
            with close_on_error(target):
                self._check(upper, source, target)
        return target

    def _check_parents(self, above: bytes, models: DeepOpener, targets: DeepOpener) -> None:
        """Check the existing directories above a destination, each once. Raises  AcrossUsers, OSError"""
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
                return  # the remaining directories are created, or the source was moved
            self._checked = path

    def _check(self, path: bytes, source: Fd, target: Fd) -> None:
        check_giving(self._kernel, target, path, self._kernel.fstat(source).st_uid, source)

    def _make_parents(self, models: DeepOpener, above: BackingAndMount, way: bytes, missing: bytes) -> None:
        make_missing(self._kernel, above.fd, way, missing, models, partial(_make_like, self._kernel))


def _make_like(kernel: Kernel, above: Fd, name: Name, model: Fd) -> None:
    """Create a directory with the attributes of another, unless the name exists already."""
    with kernel.open_dir(model) as readable:
        likeness = read_metadata(kernel, readable)._replace(extended=None)  # the new place determines the project
    with PrivateDirectory(kernel, above, COPY_PREFIX) as private:
        place = private.open()
        make_directory_like(kernel, place, name, likeness, partial(kernel.rename_free, place, name, above, name))


def format_rsync_command(
    directory: bytes, selection: Selection, target: bytes, if_exists: IfExists, more: Sequence[bytes] = ()
) -> str:
    """Return the command that moves the same matches to another filesystem, which renames can't reach.

    rsync uses the part of each path after `/./` as the path below its destination.

    directory  absolute
    more       additional arguments for `trashd sweep`, such as a list of names or a limit
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
    """Open the destination that the user named; change nothing.

    Raises  UsageError: it is the swept directory; OtherFilesystem: no rename reaches it; Refused: the path has a link
            that another user can change; AcrossUsers; NotFound; the errors of `find_scope`
    """
    try:
        scope = find_scope(kernel, path)
    except NotFound as error:
        raise NotFound(path, f"create the destination first: mkdir {shell_word(path)}") from error
    with scope:
        _refuse_others_links(kernel, scope, path)
        if os.path.samestat(kernel.fstat(scope.sides.fd), kernel.fstat(top.sides.fd)):
            raise UsageError("--move-to names the swept directory itself")
        with errors_about(path):
            if _is_distant(kernel, top.sides, scope.sides):
                raise OtherFilesystem(path)
            owner = kernel.fstat(top.sides.fd).st_uid
            check_giving(kernel, scope.sides.fd, path, owner, top.sides.fd)
            destination = MoveDestination(kernel, top, scope)
        yield destination


def _refuse_others_links(kernel: Kernel, scope: Scope, path: bytes) -> None:
    """Refuse a path in which another user can place a link to choose the destination. Raises  Refused, NotFound"""
    with open_directory(kernel, path, scope.mounts) as opened:
        st = kernel.fstat(opened.fd)
        if must_check_owners() and opened.whose is None:
            raise AcrossUsers(f"{printable(path)} (the path leads from one user's directory into another's)", _CLOSE)
        if not any(one is not None and os.path.samestat(st, kernel.fstat(one)) for one in scope.sides):
            raise NotFound(path, "its directory was moved in the meantime")


def _is_distant(kernel: Kernel, here: BackingAndMount, there: BackingAndMount) -> bool:
    """Whether every rename from one directory to the other is refused.

    The kernel compares mounts before it looks up names, so renaming a missing name detects different mounts.
    Filesystems compare subvolumes and projects only for existing names.
    Source  fs/namei.c, do_renameat2
    """
    missing_name = NEW_PREFIX + os.urandom(8).hex().encode()
    try:
        kernel.rename_free(here.names_fd(), missing_name, there.names_fd(), missing_name)
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
            project = inherited_project(kernel, target)
            return project is not None and project != project_of(kernel, source)
    except PermissionError:
        return False  # each rename will report this


class DeleteMatches(Action):
    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        refused = unlink_all(here.kernel, here.sides.names_fd(), names, are_dirs=here.are_dirs)
        return ActionResult(refused, "rmdir" if here.are_dirs else "unlink")


class OutputError(Exception):
    """Output could not be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


class PrintMatches(Action):
    """Prints the matches; runs only in this process."""

    is_single = True

    def __init__(self, to: ToPrint) -> None:
        self._to = to

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """See Action. Raises  OutputError"""
        try:
            return ActionResult(self._to.print_names(here, names), "stat")
        except OSError as error:
            raise OutputError(error) from error


class CountMatches(Action):
    """Counts the matches, and remembers the largest and the oldest ones; runs only in this process."""

    is_single = True

    def __init__(self, selection: Selection, avoided: frozenset[Identified], *, takes_dirs: bool) -> None:
        self.avoided = avoided
        self.takes_dirs = takes_dirs
        self._field: Field = next((bound.field for bound in selection.times), "mtime")
        self.n_bytes = 0
        self._largest: list[tuple[int, bytes, int]] = []
        self._oldest: list[tuple[int, bytes, int]] = []

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        stats, refused = lstat_all(here.kernel, here.sides.fd, names, needs_birth=self._field == "btime")
        for one in stats:
            self._count(here.upper, one)
        return ActionResult(refused, "stat")

    def _count(self, upper: bytes, one: StatxResult) -> None:
        n_bytes = one.st_size
        time_ns: int = one.btime_ns if self._field == "btime" else getattr(one, f"st_{self._field}_ns")
        self.n_bytes += n_bytes
        if len(self._largest) < SHOWN_MATCHES_MAX or n_bytes > self._largest[0][0] or -time_ns > self._oldest[0][0]:
            path = join_path(upper, os.fsencode(one.name))
            _keep(self._largest, (n_bytes, path, time_ns))
            _keep(self._oldest, (-time_ns, path, n_bytes))

    def end(self, swept: Swept) -> Swept:
        sums = swept.sums._replace(n_bytes=self.n_bytes)
        largest = [Match(path, n_bytes, time_ns) for n_bytes, path, time_ns in sorted(self._largest, reverse=True)]
        oldest = [Match(path, n_bytes, -time_ns) for time_ns, path, n_bytes in sorted(self._oldest, reverse=True)]
        return swept._replace(sums=sums, looks=True, largest=tuple(largest), oldest=tuple(oldest))


def _keep(heap: list[tuple[int, bytes, int]], one: tuple[int, bytes, int]) -> None:
    import heapq  # only counting needs it

    if len(heap) < SHOWN_MATCHES_MAX:
        heapq.heappush(heap, one)
    else:
        heapq.heappushpop(heap, one)


_CLOCK_REALTIME_COARSE = 5  # missing in Python's time module


def noted_stores(kernel: Kernel, directory: bytes) -> frozenset[RelPath]:
    """Return the relative paths of the known stores below a sweep's directory that are not empty.

    Raises  the errors of `find_scope`
    """
    with find_scope(kernel, directory) as scope:
        return frozenset(stores_below(kernel, scope.root.fd, scope.root_path, scope.relative))


def without_stores(
    here: ActionPlace, names: Sequence[str], noted: Collection[RelPath]
) -> tuple[Sequence[str], list[tuple[str, str]]]:
    """Divide names into those that may be taken, and those that are spared, each with the reason.

    noted  stores, from `noted_stores`, that may be deep inside one of the named directories
    """
    if not here.are_dirs:
        return names, []
    free: list[str] = []
    spared: list[tuple[str, str]] = []
    for name in names:
        raw = os.fsencode(name)
        path = join_path(here.upper, raw) + b"/"
        if find_held_store(here.kernel, here.sides.fd, raw) or any(one.startswith(path) for one in noted):
            spared.append((name, "contains a trash store"))
        else:
            free.append(name)
    return free, spared


@contextmanager
def open_trash(kernel: Kernel, top: SweepRoot, to: ToTrash) -> Iterator[Action]:
    """Open the action that trashes, with a container for the matches.

    At the end, the matches in the container become an orphan, even if this process is killed.
    Raises  TrashdError; then nothing is left behind
    """
    with find_scope(kernel, top.path) as scope:
        if not os.path.samestat(kernel.fstat(scope.sides.fd), kernel.fstat(top.sides.fd)):
            raise NotFound(top.path, "it was moved in the meantime")
        with open_sweep_container(kernel, scope, to.options or SwapOptions()) as basket:
            yield _TrashAction(basket, noted_stores(kernel, top.path), to.on_end)


class _TrashAction(Action):
    """Moves the matches into a container. The action's state is created before the workers, which share it."""

    takes_dirs = True

    def __init__(
        self, basket: SweepContainer, noted: frozenset[RelPath], on_end: Callable[[Fd, SweepSums], None] | None
    ) -> None:
        self._basket = basket
        self._noted = noted
        self._on_end = on_end
        self._has_joined = mmap.mmap(-1, 1)
        """Whether a directory may have been partly merged; such a directory is not counted as done."""

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        names, spared = without_stores(here, names, self._noted)
        try:
            into = self._basket.open_target(here.upper, here.ways)
        except FileNotFoundError:
            # The directory has another path now, so its entries are no longer in the place that the sweep covers.
            return ActionResult([(name, errno.ENOENT) for name in names], "openat2", spared)
        with into:
            owner = here.kernel.fstat(here.sides.fd).st_uid
            check_giving(here.kernel, into.fd, here.upper, owner, here.sides.fd)  # the target may already have existed
            if is_same_directory(here.kernel, here.sides.fd, into.fd):
                return ActionResult([(name, errno.ENOENT) for name in names], "openat2", spared)
            source, target = choose_rename_fds(here.sides, into)
            refused = [
                (name, final_errno)
                for name, number in rename_all_free(here.kernel, source, target, names)
                if (final_errno := self._retry(here, into, Name(os.fsencode(name)), number))
            ]
            return ActionResult(refused, "renameat2", spared)

    def _retry(self, here: ActionPlace, into: BackingAndMount, name: Name, number: int) -> int:
        """Retry the rename of a name after an error. Return 0, or the errno if it fails again."""
        if number == errno.EEXIST and here.are_dirs:
            # The name exists because parts of the directory were moved earlier: merge the rest.
            from fusefs.store.restore import merge_entry  # imported late, because it loads all code of restore

            self._has_joined[0] = 1
            leftovers = merge_entry(here.kernel, here.sides, into, name, RelPath(b""))
            return leftovers.failures[0].errno if leftovers.n else 0
        if number not in NO_SPACE_ERRNOS:
            return number
        source, target = choose_rename_fds(here.sides, into)
        try:
            call_with_room(
                self._basket.held.folder, SPARE_FOR_USER, partial(here.kernel.rename_free, source, name, target, name)
            )
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _size(self, sums: SweepSums) -> TreeSize | None:
        """Return the orphan's size without directories, their content and hard links, or None if no sizes were read."""
        if not sums.taken_bytes:
            return None
        held = self._basket.held
        kernel = held.folder.store.kernel
        shared = 0 if never_shares(kernel.filesystem(held.fd)) else None
        return TreeSize(sums.n_done + 1, sums.taken_bytes, 0, shared, True, "sweep", kernel.now_ns())

    def end(self, swept: Swept) -> Swept:
        if self._on_end is not None:
            self._on_end(self._basket.tree.fd, swept.sums)
        is_empty = not (swept.sums.n_done or self._has_joined[0])
        orphan, warnings = self._basket.finish(is_empty=is_empty, size=self._size(swept.sums))
        store = None if orphan is None else self._basket.held.folder.path()
        expires_ns = self._basket.held.record.adopted_expires_ns()
        swept = swept._replace(orphan=orphan, expires_ns=expires_ns, volume=self._basket.volume)
        return swept._replace(store=store, warnings=warnings)


@contextmanager
def open_move(kernel: Kernel, top: SweepRoot, to: ToMove) -> Iterator[Action]:
    """Open the action that moves; called in the first process, before the workers start.

    Raises  UsageError, OtherFilesystem, Refused, NotFound
    """
    with open_destination(kernel, top, to.target) as destination:
        yield _MoveAction(destination, to, noted_stores(kernel, top.path))


class _MoveAction(Action):
    """Moves names in a directory to the corresponding destination directory."""

    takes_dirs = True

    def __init__(self, destination: MoveDestination, to: ToMove, noted: frozenset[RelPath]) -> None:
        self._destination = destination
        self._noted = noted
        self._to = to
        # The kernel takes ctimes from this clock, which is slightly behind the precise one.
        self._began_ns = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
        self.avoided = frozenset({destination.identified})
        # A worker would not know which names another worker has just created.
        self.is_single = to.if_exists is IfExists.REPLACE

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """Move some names. Raises  OSError: their destination directory is not available"""
        names, spared = without_stores(here, names, self._noted)
        with self._destination.open(here.upper, here.ways, here.sides.fd) as target:
            if is_same_directory(here.kernel, here.sides.names_fd(), target):
                return ActionResult([(name, errno.ENOENT) for name in names], "openat2", spared)
            refused = rename_all_free(here.kernel, here.sides.names_fd(), target, names)
            return ActionResult(self._settle_existing(here, target, refused), "renameat2", spared)

    def end(self, swept: Swept) -> Swept:
        return swept._replace(where=self._destination.path) if swept.sums.n_done else swept

    def _settle_existing(self, here: ActionPlace, target: Fd, refused: RefusedNames) -> RefusedNames:
        """Number, replace or skip the names that exist at the destination, and return the remaining errors."""
        final = []
        for name, number in refused:
            try:
                if number != errno.EEXIST or self._to.if_exists is IfExists.SKIP:
                    final.append((name, number))
                elif self._to.if_exists is IfExists.NUMBER:
                    self._number(here, target, name)
                else:
                    self._replace(here, target, os.fsencode(name))
            except OSError as error:
                final.append((name, error.errno or errno.EIO))
        return final

    def _number(self, here: ActionPlace, target: Fd, name: str) -> None:
        old = os.fsencode(name)
        for number in count(1):
            with suppress(FileExistsError):
                here.kernel.rename_free(here.sides.names_fd(), old, target, b"%s.%d" % (old, number))
                return

    def _replace(self, here: ActionPlace, target: Fd, name: bytes) -> None:
        kernel, names = here.kernel, here.sides.names_fd()
        target_stat, source = kernel.stat(target, name), kernel.stat(names, name)
        if must_check_owners() and target_stat.st_uid != source.st_uid:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), name)
        if target_stat.st_ctime_ns >= self._began_ns:  # changed since the sweep began: it may be another match
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        if os.path.samestat(target_stat, source) and not stat.S_ISDIR(target_stat.st_mode):
            kernel.unlink(names, name)  # rename does nothing for two links to one file
        else:
            kernel.rename(names, name, target, name)
