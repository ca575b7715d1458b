"""The request and the result of a sweep, the interface of its actions, and the check that access times are kept."""

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
    """The identity of an open file. Raises  OSError"""
    st = kernel.fstat(fd)
    return st.st_dev, st.st_ino


class IfExists(Enum):
    """The reaction of a move to an existing name."""

    SKIP = "skip"
    NUMBER = "number"
    REPLACE = "replace"


class ToTrash(NamedTuple):
    """Turn the matches into one orphan that keeps their tree.

    options  None for the default ones
    on_end   called in the end with that tree, open, and the sums
    """

    options: SwapOptions | None = None
    on_end: Callable[[Fd, SweepSums], None] | None = None


class ToDelete(NamedTuple):
    """Delete the matches at once.

    recursive  delete a matched directory with its content; otherwise only if it is empty
    """

    recursive: bool = False


class ToMove(NamedTuple):
    """Move the matches, keeping their tree. target: the directory to move to, as the user named it"""

    target: bytes
    if_exists: IfExists = IfExists.SKIP


class ToPrint(NamedTuple):
    """Print the matches only.

    print_names  called in this process with the open directory and names in it; returns names that could not be
          printed, with errnos as in `ActionResult.refused`; may raise, which ends the sweep
    """

    print_names: Callable[[ActionPlace, Sequence[str]], RefusedNames]


class ToCount(NamedTuple):
    """Count the matches with their sizes, and find the largest and the oldest ones: a dry run of another action.

    instead  that action, which decides which directories are entered and which entries are skipped
    """

    instead: ToTrash | ToDelete | ToMove | None = None


class TakingBoundary(NamedTuple):
    """The limits for root in users' trees (store.walk).

    whose      the owner of what is in the sweep's directory
    seen_directories  directories of one user in another's that an earlier run has seen; None: no such
    is_judged  the content of directories that are taken whole has just been checked
    """

    whose: int
    seen_directories: SeenDirectories | None = None
    is_judged: bool = False


ActionRequest = ToTrash | ToDelete | ToMove | ToPrint | ToCount


class Request(NamedTuple):
    """A sweep as requested.

    directory  where, as given by the user
    most       limit for matches to act on; the sweep ends exactly there
    names      only these, each relative to the directory (or absolute and inside it), instead of a walk
    n_workers  None: the best number for the filesystem
    inode      st_dev and st_ino that the directory must have; None: any
    spares     decides which directories are not even listed
    wraps      wraps the action in a caller's own
    late       read a name only when it can be acted on at once: the reason for its choice may soon be outdated
    boundary   limits for root; None: the default ones, except for printing
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

    pacer     the speed, read before each slice; by default at full speed
    progress  called with the sums after each slice
    stops     checked between slices
    job       the MPI job that shares it, as used by its first rank (SweepByRanks); only for ToDelete
    """

    pacer: Pacer = FULL_SPEED
    progress: Callable[[SweepSums], None] = lambda _sums: None
    stops: ShouldStop = lambda: False
    job: Any = None


class SweepRoot(NamedTuple):
    """The directory of a sweep, open.

    path    absolute, links resolved
    sides   the directory (O_PATH) on the backing filesystem, and as a trashd mount shows it
    mounts  paths relative to it on which something is mounted
    whose   the owner of its content as root sees it (store.walk); None: the path leads from one user's directory into
            another's
    """

    path: bytes
    sides: BackingAndMount
    mounts: tuple[bytes, ...] = ()
    whose: int | None = 0


class ActionPlace(NamedTuple):
    """A directory in which an action acts on names.

    sides     the open directory: read through `sides.fd`, change names through `sides.names()`
    upper     its path relative to the sweep's directory; empty for that itself
    are_dirs  the names are directories, each to be taken whole; otherwise none was a directory when it was listed
    ways      opens the corresponding directories in other trees
    """

    kernel: Kernel
    sides: BackingAndMount
    upper: bytes
    are_dirs: bool
    ways: DeepOpeners


class ActionResult(NamedTuple):
    """The result of an action on names: names neither refused nor spared are done.

    refused  names and errnos; ENOENT means vanished, which is no failure
    call     the system call that failed, for the report
    spared   names that the action skipped on purpose, and the reasons
    """

    refused: Sequence[tuple[str, int]] = ()
    call: str = ""
    spared: Sequence[tuple[str, str]] = ()


class Action:
    """An action on matches. Created before there are workers; each of them has a copy by fork, or shares it.

    is_single   only one worker runs it, as it keeps state that workers do not share
    takes_dirs  it takes a directory whole by one call, and does not list the content
    avoided     directories that are never listed, entered or taken: the destination of a move
    """

    is_single = False
    takes_dirs = False
    avoided: frozenset[Identified] = frozenset()

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """Act on some names of a directory (a hundred or so at a time), as os.scandir returns them.

        Runs in any worker, beside others: threads on network filesystems, otherwise processes. The first worker that
        needs a destination directory creates it; it is no failure if another worker was faster.
        Raises  nothing for a name: that is in `refused`. An OSError is a failure of all the names
        """
        raise NotImplementedError

    def end(self, swept: Swept) -> Swept:
        """Finish, in the first process, after all workers have ended; also after a stop, or without matches."""
        return swept


SparesDirectory = Callable[[Kernel, BackingAndMount], str | ReportedMark | None]
"""Why to skip a directory, with its content and its own name; None to include it.

Called before a directory is listed; the directory is open for reading while the caller works in it. Each worker has a
copy by fork, or shares it.
"""
_RELATIME_NS = 86_400 * SECOND_NS
"""Under `relatime` a read is recorded if the last recorded one is older than a day. Source  mount(8)"""


def refuse_stale(scope: Scope, times: Iterable[TimeBound], now_ns: int, *, takes_dirs: bool, key: str) -> None:
    """Refuse to choose by access times that the mounts of a directory do not keep.

    takes_dirs  directories are chosen too
    key         the option by which the user accepts these times all the same
    Raises      Refused
    """
    bounds = [bound for bound in times if bound.field == "atime"]
    if not bounds:
        return
    is_short = any(bound.before_ns is not None and now_ns - bound.before_ns < _RELATIME_NS for bound in bounds)
    why = next(_reasons(scope, takes_dirs=takes_dirs, is_short=is_short), "")
    if why:
        hint = f"select by another time (mtime), or mount it with relatime; {key} uses these access times anyway"
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
            yield f"files are read through {printable(view.mount.point)}, a mount of trashd that caches their pages"


def _mounts_of(scope: Scope) -> Iterator[Mount]:
    """All mounts through which entries of a directory are read; their options may differ."""
    place = scope.place()
    for mount in scope.mounts:
        if mount.device == place.device and (is_inside(mount.root, place.path) or is_inside(place.path, mount.root)):
            yield mount
