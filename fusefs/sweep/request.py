"""The request and the result of a sweep, what an action receives and returns, and whether access times count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from fusefs.core.errors import Refused
from fusefs.core.human_units import SECOND_NS
from fusefs.core.printable_names import printable
from fusefs.core.results import ReportedMark, Stops, SweepSums, Swept
from fusefs.core.selection import Listed, ListedTogether, Selection, TimeBound
from fusefs.engine.pace import FULL_SPEED, SetsSpeed
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.linux.mountinfo import Mount, is_inside, views
from fusefs.store.backing_and_mount import BackingAndMount, Scope
from fusefs.store.layout import trusted_owners
from fusefs.store.stage import SwapOptions
from fusefs.store.walk import DeepOpeners, SeenDirectories

Identified = tuple[int, int]
"""st_dev and st_ino of a directory that is open as long as this is used."""


def identify(kernel: Kernel, fd: int) -> Identified:
    """What an fd holds. Raises  OSError"""
    st = kernel.fstat(fd)
    return st.st_dev, st.st_ino


class IfExists(Enum):
    """What a move does where its name is taken."""

    SKIP = "skip"
    NUMBER = "number"
    REPLACE = "replace"


class ToTrash(NamedTuple):
    """The matches become one orphan that keeps their tree.

    options  None for the usual ones
    see      called in the end with that tree, open, and the sums
    """

    options: SwapOptions | None = None
    see: Callable[[Fd, SweepSums], None] | None = None


class ToDelete(NamedTuple):
    """The matches are gone at once.

    recursive  a matched directory goes with all that it holds; otherwise only if it is empty
    """

    recursive: bool = False


class ToMove(NamedTuple):
    """The matches are moved, in the tree that they were in. target: the directory to move to, as a person named it"""

    target: bytes
    if_exists: IfExists = IfExists.SKIP


class ToPrint(NamedTuple):
    """The matches are told, and nothing is done to them.

    tell  called in this process with the directory, open, and names in it; gives those that it could not tell, with
          errnos as in `ActionResult.refused`; may raise, which ends the sweep
    """

    tell: Callable[[ActionPlace, Sequence[str]], RefusedNames]


class ToCount(NamedTuple):
    """The matches are counted with their bytes, the largest and the oldest: a dry run of another action.

    instead  what would be done with them: it decides what is entered, and what is left out
    """

    instead: ToTrash | ToDelete | ToMove | None = None


class TakingBoundary(NamedTuple):
    """Where root stops that takes things (store.walk).

    whose      what is in the sweep's directory
    seen       of another user's directory in a user's: those that were there before; None: none was
    is_judged  what is in directories that are taken whole was looked at just now
    """

    whose: int
    seen: SeenDirectories | None = None
    is_judged: bool = False


Act = ToTrash | ToDelete | ToMove | ToPrint | ToCount


class Request(NamedTuple):
    """A sweep as a person asks for it.

    directory  where; as it was typed
    most       matches that it may be done to; then the sweep ends, exactly there
    names      only these, each relative to the directory (or absolute and inside of it), instead of a walk
    n_workers  None: what is best there
    inode      st_dev and st_ino that the directory must have; None: whatever is there
    spares     says what is not even looked into
    wraps      puts something of one's own around the action
    late       a name is asked for when it can be acted on at once: what it was chosen for may soon be past
    boundary   of root; None: the usual one, unless it only prints
    """

    directory: bytes
    selection: Selection
    act: Act
    most: int | None = None
    names: Iterable[Listed | ListedTogether] | None = None
    n_workers: int | None = None
    inode: Identified | None = None
    spares: SparesDirectory | None = None
    wraps: Callable[[Action], Action] = lambda action: action
    late: bool = False
    boundary: TakingBoundary | None = None


class SweepWishes(NamedTuple):
    """What the caller wants of a sweep beside that it happens.

    leads     how fast, asked before each slice; without one: as fast as the kernel
    progress  told the sums after each slice
    stops     asked between slices
    job       the MPI job that shares it, as its first rank has it (SweepByRanks); for ToDelete alone
    """

    pacer: SetsSpeed = FULL_SPEED
    progress: Callable[[SweepSums], None] = lambda _sums: None
    stops: Stops = lambda: False
    job: Any = None


class SweepRoot(NamedTuple):
    """The directory of a sweep, open.

    path    absolute, links resolved
    sides   itself (O_PATH) on the backing filesystem, and as a mount of ours shows it
    mounts  paths relative to it on which something is mounted
    whose   to root who was told its path (store.walk); None: that leads from one user's into another's
    """

    path: bytes
    sides: BackingAndMount
    mounts: tuple[bytes, ...] = ()
    whose: int | None = 0


class ActionPlace(NamedTuple):
    """Where an action is to take something.

    sides     the open directory: look by `sides.fd` (readable), change names by `sides.names()`
    upper     its path relative to the sweep's directory; empty for that itself
    are_dirs  the names are directories, each to be taken whole; otherwise none was one when it was listed
    ways      for the directories that correspond to this one in other trees
    """

    kernel: Kernel
    sides: BackingAndMount
    upper: bytes
    are_dirs: bool
    ways: DeepOpeners


class ActionResult(NamedTuple):
    """What became of the names that an action was given: those neither refused nor spared are done.

    refused  names and errnos; ENOENT is for one that vanished, which is no failure
    call     the call that refused, for people
    spared   names that it left alone on purpose, and why
    """

    refused: Sequence[tuple[str, int]] = ()
    call: str = ""
    spared: Sequence[tuple[str, str]] = ()


class Action:
    """What is done to matches. Made once, before there are workers; each of them has a copy by fork, or shares it.

    is_single   one worker alone does it: what it remembers, its others would not know
    takes_dirs  it takes a directory whole by one call: what is in there is not looked at any more
    avoided     directories that are never listed, entered or taken: where the matches are moved to
    """

    is_single = False
    takes_dirs = False
    avoided: frozenset[Identified] = frozenset()

    def take(self, here: ActionPlace, names: Sequence[str]) -> ActionResult:
        """Do it to some names of a directory (a hundred or so at a time), as os.scandir gives them.

        Called in any worker, beside others: threads on network filesystems, otherwise processes. A destination
        that is missing is made by whoever comes first; it is no failure that another worker was faster.
        Raises  nothing for a name: that is in `refused`. An OSError is a failure of all the names
        """
        raise NotImplementedError

    def end(self, swept: Swept) -> Swept:
        """Finish, in the first process, when all workers are gone; also after a stop, or with nothing done."""
        return swept


SparesDirectory = Callable[[Kernel, BackingAndMount], str | ReportedMark | None]
"""Why a directory is left alone, with all that is in it and its own name; None if it isn't.

It is asked before a directory is looked into, which is open for reading for as long as the caller is at it; each worker
has a copy by fork, or shares it.
"""
_RELATIME_NS = 86_400 * SECOND_NS
"""Under `relatime` a read is recorded if the last recorded one is older than a day. Source  mount(8)"""


def refuse_stale(scope: Scope, times: Iterable[TimeBound], now_ns: int, *, takes_dirs: bool, key: str) -> None:
    """Refuse to choose by access times that the mounts of a directory don't keep.

    takes_dirs  directories are chosen too
    key         what a person writes who means that all the same
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
    for view in views(scope.mounts, trusted_owners(os.geteuid())):
        if view.backing.holds(place) or place.holds(view.backing) or view.shown.holds(place):
            yield f"files are read through {printable(view.mount.point)}, a mount of trashd that caches their pages"


def _mounts_of(scope: Scope) -> Iterator[Mount]:
    """All mounts through which something in a directory is read: another one may be mounted otherwise."""
    place = scope.place()
    for mount in scope.mounts:
        if mount.device == place.device and (is_inside(mount.root, place.path) or is_inside(place.path, mount.root)):
            yield mount
