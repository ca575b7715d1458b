"""The request and result of a sweep, the interface of its actions, and the check that access times are recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from fusefs.core.errors import Refused
from fusefs.core.human_units import SECOND_NS
from fusefs.core.printable_names import printable
from fusefs.core.results import ReportedMark, ShouldStop, SweepSums, Swept
from fusefs.core.selection import ListedNames, ListedPath, Selection, TimeBound
from fusefs.engine.pace import FULL_SPEED, Pacer
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.linux.mountinfo import Mount, is_inside, trashd_views
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.layout import trusted_owners
from fusefs.store.stage import SwapOptions
from fusefs.store.walk import DeepOpeners, SeenDirectories

Identified = tuple[int, int]
"""st_dev and st_ino of a directory; valid while it is open."""


def identify(kernel: Kernel, fd: int) -> Identified:
    st = kernel.fstat(fd)
    return st.st_dev, st.st_ino


class IfExists(Enum):
    """The behaviour of a move if the name already exists at the destination."""

    SKIP = "skip"
    NUMBER = "number"
    REPLACE = "replace"


class ToTrash(NamedTuple):
    """Turn the matches into one orphan that preserves their directory structure.

    options  None for the default options
    on_end   called at the end with the orphan's open tree and the sums
    """

    options: SwapOptions | None = None
    on_end: Callable[[Fd, SweepSums], None] | None = None


class ToDelete(NamedTuple):
    """Delete the matches at once.

    recursive  delete matched directories with their content; otherwise, only empty ones are deleted
    """

    recursive: bool = False


class ToMove(NamedTuple):
    """Move the matches, and preserve their directory structure. target: the destination, as the user named it"""

    target: bytes
    if_exists: IfExists = IfExists.SKIP


class ToPrint(NamedTuple):
    """Only print the matches.

    print_names  called in this process with an open directory and names in it. It returns the names that could not be
          printed, with errnos as in `ActionResult.refused`. It may raise, which ends the sweep
    """

    print_names: Callable[[ActionPlace, Sequence[str]], RefusedNames]


class ToCount(NamedTuple):
    """Count the matches with their sizes, and find the largest and oldest ones, as a dry run of another action.

    instead  the other action, which determines which directories are entered and which entries are skipped
    """

    instead: ToTrash | ToDelete | ToMove | None = None


class TakingBoundary(NamedTuple):
    """The limits for root in users' trees (store.walk).

    whose      the owner of the content of the sweep's directory
    seen_directories  directories of one user inside another's that an earlier run has seen; None: none are known
    is_judged  the content of directories that are taken whole has already been checked
    """

    whose: int
    seen_directories: SeenDirectories | None = None
    is_judged: bool = False


ActionRequest = ToTrash | ToDelete | ToMove | ToPrint | ToCount


class Request(NamedTuple):
    """A sweep as requested.

    directory  the directory to sweep, as given by the user
    most       maximum number of matches to act on; the sweep ends exactly there
    names      the only names to consider, relative to the directory (or absolute and inside it), instead of a walk
    n_workers  None: the best number for the filesystem
    inode      st_dev and st_ino that the directory must have; None: any
    spares     determines which directories are not even listed
    wraps      wraps the action in an action of the caller's own
    late       read a name only when it can be acted on at once, because the reason for its choice may soon be outdated
    boundary   limits for root; None: the default limits, or none for printing
    """

    directory: bytes
    selection: Selection
    action: ActionRequest
    most: int | None = None
    names: Iterable[ListedPath | ListedNames] | None = None
    n_workers: int | None = None
    inode: Identified | None = None
    spares: SparesDirectory | None = None
    wraps: Callable[[Action], Action] = lambda action: action
    late: bool = False
    boundary: TakingBoundary | None = None


class SweepOptions(NamedTuple):
    """Options of a sweep.

    pacer     the speed, which is read before each slice; by default, full speed
    progress  called with the sums after each slice
    stops     checked between slices
    job       the MPI job that shares the sweep, as its first rank uses it (SweepByRanks); only for ToDelete
    """

    pacer: Pacer = FULL_SPEED
    progress: Callable[[SweepSums], None] = lambda _sums: None
    stops: ShouldStop = lambda: False
    job: Any = None


class SweepRoot(NamedTuple):
    """The open directory of a sweep.

    path    absolute, with links resolved
    sides   the directory (O_PATH) on the backing filesystem, and as a trashd mount shows it
    mounts  mount points in it, as relative paths
    whose   the owner of its content as root sees it (store.walk); None: the path leads from one user's directory into
            another's
    """

    path: bytes
    sides: BackingAndMount
    mounts: tuple[bytes, ...] = ()
    whose: int | None = 0


class ActionPlace(NamedTuple):
    """A directory in which an action acts on names.

    sides     the open directory: read through `sides.fd`, change names through `sides.names_fd()`
    upper     its path relative to the sweep's directory; empty for the sweep's directory itself
    are_dirs  the names are directories, which are taken whole; if not set, none was a directory when it was listed
    ways      opens the corresponding directories in other trees
    """

    kernel: Kernel
    sides: BackingAndMount
    upper: bytes
    are_dirs: bool
    ways: DeepOpeners


class ActionResult(NamedTuple):
    """The result of an action on names; names that are neither refused nor spared are done.

    refused  names and errnos; ENOENT means that the name vanished, which is not a failure
    call     the system call that failed, for the report
    spared   names that the action skipped on purpose, and the reasons
    """

    refused: Sequence[tuple[str, int]] = ()
    call: str = ""
    spared: Sequence[tuple[str, str]] = ()


class Action:
    """An action on matches. It is created before the workers, which share it, or have a copy after a fork.

    is_single   only one worker may run it, because it keeps state that workers do not share
    takes_dirs  it takes a whole directory with one call, and does not list the content
    avoided     directories that are never listed, entered or taken, such as the destination of a move
    """

    is_single = False
    takes_dirs = False
    avoided: frozenset[Identified] = frozenset()

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """Act on some names in a directory (about a hundred at a time), as os.scandir returns them.

        Runs in parallel in several workers, which are threads on network filesystems and processes on others. The first
        worker that needs a destination directory creates it; it is not a failure if another worker was faster.
        Errors of single names are returned in `refused`. An OSError means that all of the names failed.
        """
        raise NotImplementedError

    def end(self, swept: Swept) -> Swept:
        """Finish the action in the first process when all workers have ended, even after a stop or without matches."""
        return swept


SparesDirectory = Callable[[Kernel, BackingAndMount], str | ReportedMark | None]
"""Returns the reason to skip a directory with all its content, or None to include it.

Called before a directory is listed; the directory is open for reading while the caller works in it. Workers share this
object, or have a copy after a fork.
"""
_RELATIME_NS = 86_400 * SECOND_NS
"""With `relatime`, a read is recorded if the last recorded one is older than a day. Source  mount(8)"""


def refuse_stale(scope: Scope, times: Iterable[TimeBound], now_ns: int, *, takes_dirs: bool, key: str) -> None:
    """Refuse to choose by access times that a directory's mounts do not record.

    takes_dirs  directories are chosen, too
    key         the option with which the user accepts these times anyway
    Raises      Refused
    """
    bounds = [bound for bound in times if bound.field == "atime"]
    if not bounds:
        return
    is_short = any(bound.before_ns is not None and now_ns - bound.before_ns < _RELATIME_NS for bound in bounds)
    why = next(_reasons(scope, takes_dirs=takes_dirs, is_short=is_short), "")
    if why:
        hint = f"select by another time (mtime), or mount it with relatime; {key} accepts these access times anyway"
        raise Refused(f"{printable(scope.path())}: access times are not reliable: {why}", hint)


def _reasons(scope: Scope, *, takes_dirs: bool, is_short: bool) -> Iterator[str]:
    for mount in _mounts_of(scope):
        flags, where = mount.options.split(b","), printable(mount.point)
        if b"noatime" in flags:
            yield f"{where} is mounted with noatime"
        if takes_dirs and b"nodiratime" in flags:
            yield f"{where} is mounted with nodiratime"
        if is_short and b"relatime" in flags:
            yield f"{where} is mounted with relatime, which updates access times at most once a day"
    place = scope.place()
    for view in trashd_views(scope.mounts, trusted_owners(os.geteuid())):
        if view.backing.holds(place) or place.holds(view.backing) or view.shown.holds(place):
            yield f"files are read through {printable(view.mount.point)}, a trashd mount that caches their pages"


def _mounts_of(scope: Scope) -> Iterator[Mount]:
    """Yield all mounts through which a directory's entries are read; their options may differ."""
    place = scope.place()
    for mount in scope.mounts:
        if mount.device == place.device and (is_inside(mount.root, place.path) or is_inside(place.path, mount.root)):
            yield mount
