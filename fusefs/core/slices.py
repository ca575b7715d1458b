"""The plan of a removal: which slice of work is next, and what remains after a slice.

Pure: for the plan, directories are fds that the remover opens, reads and closes (reaper/remove_slice.py). The plan has
a node for each directory that a slice began but did not finish. It continues with the last one begun, so that few
directories are open at a time, whatever the tree's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from fusefs.core.names import join_path
from fusefs.core.record import MAX_ENTERED, Entered, Failure
from fusefs.core.results import Report, add_failures

MAX_FDS = 100
"""The approximate limit on directories that a plan and its slices keep open; also the limit for each worker."""
MIN_DEPTH = 4
MAX_PASSES = 16
MAX_FAILED_NAMES = 10_000
_MAX_NAMES, _MAX_SUBDIRS = 4096, 1024
_MOST_SHARING = 8
"""The most workers in one directory: its lock admits one unlink at a time, so more workers only wait (measured)."""
_SHARING_ELSEWHERE = 4
"""The same for each of several machines, each with its own lock: one worker unlinks while others look up names.
(Measured with 8 ranks: 1.5 times the rate of one worker per mount. In C, four workers are twice as fast as one, but
sixteen are slower than four.)
"""
_BEGUN_BY_EACH = 8
"""Unfinished directories that a plan allows for each worker on another machine: a slice may leave this many open."""
_FEW_NAMES = 8
"""The smallest share, unless fewer names remain: handing out fewer takes longer than unlinking them on a local disk."""


def encode_name(name: str) -> bytes:
    """Encode a name for the kernel. The remover uses names as os.scandir returns them, which is faster."""
    return name.encode("utf-8", "surrogateescape")


def pack_names(names: list[str]) -> list[bytes]:
    """Join names into bundles, each for one slice, in the same order."""
    parts = (names[at : at + _MAX_NAMES] for at in range(0, len(names), _MAX_NAMES))
    return [encode_name("/".join(part)) for part in parts]


def unpack_names(bundle: bytes) -> list[str]:
    return bundle.decode("utf-8", "surrogateescape").split("/")


class SliceWork(msgspec.Struct, eq=False):
    """The work in one directory, or on one large file.

    names          entries to unlink; directories among them are moved to `subdirs`
    bundles        more names, packed: as a list, those of a large directory would need ten times the memory
    subdirs        directories to remove with their content
    emptied        directories that were emptied and are to be removed, each with the number of its listings
    is_listed      everything that remains is listed above; otherwise the directory must be listed (again)
    failed         entries that can't be removed, which the next listing skips
    n_failed       number of such entries; if it is above MAX_FAILED_NAMES, not all are in `failed`
    n_passes       number of complete listings so far
    is_productive  something was removed since the last listing began
    cut_bytes      for a large file, which no longer has a name: the size still to be truncated; None for a directory
    """

    names: list[str] = []
    bundles: list[bytes] = []
    subdirs: list[str] = []
    emptied: list[tuple[str, int]] = []
    is_listed: bool = True
    failed: set[str] = set()
    n_failed: int = 0
    n_passes: int = 0
    is_productive: bool = False
    cut_bytes: int | None = None

    def skip_failed(self, name: str) -> None:
        """Skip an entry from now on, because it can't be removed."""
        self.n_failed += 1
        if len(self.failed) < MAX_FAILED_NAMES:
            self.failed.add(name)

    def has_rest(self) -> bool:
        return bool(self.names or self.bundles or self.subdirs or self.emptied or self.cut_bytes) or not self.is_listed

    def relist_if_needed(self) -> None:
        """Request another listing of a finished directory if some entries failed and others were removed.

        With some servers, readdir skips entries while others are removed. Usually, the failure of rmdir reveals this,
        but rmdir is not called on a directory with entries that can't be removed.
        """
        if self.failed and self.is_productive and self.n_failed <= MAX_FAILED_NAMES and self.n_passes < MAX_PASSES:
            self.is_listed = False

    def merge_rest(self, rest: SliceWork) -> None:
        """Take back the unfinished part of a slice's share."""
        self.names += rest.names
        self.bundles += rest.bundles
        self.subdirs += rest.subdirs
        self.emptied += rest.emptied
        self.is_listed &= rest.is_listed
        for name in rest.failed:
            self.skip_failed(name)
        self.n_failed += rest.n_failed - len(rest.failed)
        self.n_passes = max(self.n_passes, rest.n_passes)
        self.is_productive |= rest.is_productive
        self.cut_bytes = rest.cut_bytes


class Slice(NamedTuple):
    """A bounded piece of work in one directory.

    key         the plan's number for the directory
    fd          the open directory; negative: the worker must open it by its path
    path        path of the directory below the container, for failures
    max_depth   number of nested directories that may be open below this one; 0: its subdirectories are too deep
    is_hoisted  this is the directory to which directories that are too deep are moved
    is_below    the slice only works in subdirectories, and unlinks nothing in the directory itself
    is_shared   other slices unlink in the same directory
    """

    key: int
    fd: int
    path: bytes
    work: SliceWork
    max_depth: int
    is_hoisted: bool
    is_below: bool = False
    is_shared: bool = False

    def fds(self) -> Sequence[int]:
        """Return the fds to be sent to another process together with the slice."""
        return (self.fd,)

    def with_fds(self, fds: Sequence[int]) -> Slice:
        """Return the slice with the numbers that its fds have in the process that received them."""
        (fd,) = fds
        return self._replace(fd=fd)


class UnfinishedDirectory(NamedTuple):
    """A directory (or large file) that a slice began but did not finish.

    fd  negative if it is not open in this process
    """

    name: str
    fd: int
    work: SliceWork


class RemovalSliceResult(NamedTuple):
    """The result of a slice.

    n_bytes   bytes freed, as far as sizes were read (paced)
    rest      remaining work in the slice's own directory
    remaining  unfinished directories that the slice had entered, each inside the one before
    hoisted   directories that were too deep, by their new names in the directory for such directories
    made_hoisted  the first directory that was too deep became the directory for the others
    entered  directories of other users in which something failed, and to which the next reap will return
    busy_s    how long the slice took
    server_errno  the errno if a server did not respond: the slice ended, without a failure for the entry
    doubts    errnos of failures that the server may have caused
    """

    removed: int
    n_bytes: int
    failures: tuple[Failure, ...]
    n_failed: int
    rest: SliceWork
    remaining: tuple[UnfinishedDirectory, ...] = ()
    hoisted: tuple[str, ...] = ()
    made_hoisted: bool = False
    entered: tuple[Entered, ...] = ()
    busy_s: float = 0.0
    server_errno: int = 0
    doubts: frozenset[int] = frozenset()

    def fds(self) -> Sequence[int]:
        return [unfinished.fd for unfinished in self.remaining]

    def with_fds(self, fds: Sequence[int]) -> RemovalSliceResult:
        return self._replace(remaining=tuple(one._replace(fd=fd) for one, fd in zip(self.remaining, fds, strict=True)))


class FinishedDirectory(NamedTuple):
    """A directory in which no slice works any more; its fd may be closed if it is not negative."""

    fd: int
    has_failed: bool


class _Node(msgspec.Struct, eq=False):
    """A directory that was begun: the work that no slice has taken, and the number of running slices.

    is_whole     this plan is to remove everything in the directory, including entries that are not known yet
    n_unlinking  the number of running slices that unlink in the directory
    """

    parent: int | None
    name: str
    fd: int
    path: bytes
    work: SliceWork
    is_hoisted: bool = False
    is_whole: bool = True
    n_running: int = 0
    n_unlinking: int = 0
    n_children: int = 0

    def begin_slice(self, share: SliceWork) -> bool:
        """Register a slice that takes a share. Returns  whether the slice only works in subdirectories"""
        is_below = bool(share.subdirs or share.emptied)
        self.n_running += 1
        self.n_unlinking += not is_below
        return is_below

    def end_slice(self, ended: Slice, rest: SliceWork) -> None:
        """Record that a slice ended and left `rest` unfinished."""
        self.n_running -= 1
        self.n_unlinking -= not ended.is_below
        self.work.merge_rest(rest)


def _can_clear(node: _Node) -> bool:
    """Whether a slice can remove entries whose names are already listed, without disturbing another slice."""
    return bool(node.work.emptied) or (_has_names(node.work) and not node.n_unlinking)


def _can_descend(node: _Node) -> bool:
    """Whether a slice may list the directory, or descend into subdirectories."""
    # A listing would return entries on which other slices are working.
    return bool(node.work.subdirs) or (not node.n_running and not node.n_children and node.work.has_rest())


def _has_names(work: SliceWork) -> bool:
    return bool(work.names or work.bundles)


class _LastBegun:
    """Finds the most recently begun directory for which a condition holds; fast even if very many were begun."""

    def __init__(self, holds: Callable[[_Node], bool], nodes: dict[int, _Node]) -> None:
        self._holds = holds
        self._nodes = nodes
        self._keys: list[int] = []  # a heap of negated keys of directories for which the condition may hold
        self._in_heap: set[int] = set()

    def reconsider(self, key: int) -> None:
        """Note that the condition may hold for this directory now."""
        if key not in self._in_heap:
            self._in_heap.add(key)
            heappush(self._keys, -key)

    def find(self) -> int | None:
        """Return the most recently begun directory for which the condition holds, and forget those begun after it."""
        while self._keys:
            key = -self._keys[0]
            node = self._nodes.get(key)
            if node is not None and self._holds(node):
                return key
            heappop(self._keys)
            self._in_heap.discard(key)
        return None


class SlicePlan:
    """Hands out the slices of one removal, sums up their results, and returns directories that are finished."""

    def __init__(
        self, n_workers: int, *, splits_names: bool, least_share: int = _FEW_NAMES, n_machines: int = 0
    ) -> None:
        """Create a plan without work.

        splits_names  whether two workers are faster than one in a flat directory on this filesystem
        least_share   the fewest names of such a directory that a slice gets, unless fewer remain
        n_machines    number of machines on which the workers run; 0: they run on this one, and share its fds
        """
        self._n_workers = n_workers
        most_sharing = max(_MOST_SHARING, _SHARING_ELSEWHERE * n_machines)
        self._n_sharing = min(n_workers, most_sharing) if splits_names else 1
        self._most_begun = MAX_FDS if not n_machines else MAX_FDS + _BEGUN_BY_EACH * n_workers
        self._least_share = least_share
        self._nodes: dict[int, _Node] = {}
        n_sharing = self._n_sharing
        # Known names come first, wherever they are: they use memory, and listing a directory adds more of them.
        self._choices = (
            _LastBegun(_can_clear, self._nodes),
            _LastBegun(_can_descend, self._nodes),
            _LastBegun(lambda node: _has_names(node.work) and node.n_unlinking < n_sharing, self._nodes),
        )
        """The last choice is a directory where other slices unlink."""
        self._n_added = 0
        self._removed = 0
        self._n_bytes = 0
        self._failures: list[Failure] = []
        self._n_failed = 0
        self.doubts: frozenset[int] = frozenset()
        """Errnos of failures whose cause may be the server, not the entries."""
        self._entered: dict[str, Entered] = {}

    def add(self, fd: int, path: bytes, work: SliceWork, *, is_hoisted: bool = False, is_whole: bool = False) -> int:
        """Add a directory; its fd still belongs to the caller. Returns  its key

        is_whole  the directory may be listed again; otherwise some of its entries are kept, or belong to another plan
        """
        return self._add(_Node(None, "", fd, path, work, is_hoisted=is_hoisted, is_whole=is_whole))

    def _add(self, node: _Node) -> int:
        key = self._n_added
        self._n_added += 1
        self._nodes[key] = node
        self._reconsider(key)
        return key

    def _reconsider(self, key: int) -> None:
        """Note that a directory may have more work or fewer workers now."""
        for choice in self._choices:
            choice.reconsider(key)

    def add_subdirs(self, key: int, subdirs: tuple[str, ...]) -> None:
        """Add subdirectories to the work in a directory that was added before."""
        self._nodes[key].work.subdirs += subdirs
        self._reconsider(key)

    def is_dry(self) -> bool:
        """Whether `next` would return None."""
        return self._find() is None

    def is_cutting(self) -> bool:
        """Whether a large file no longer has a name but is not completely truncated yet."""
        return any(node.work.cut_bytes for node in self._nodes.values())

    def next(self) -> Slice | None:
        """Return a slice that may run in parallel with the running ones, or None if there is none at the moment."""
        key = self._find()
        if key is None:
            return None
        node = self._nodes[key]
        n_free = self._most_begun - len(self._nodes)
        depth = max(n_free // self._n_workers, MIN_DEPTH)
        if (n_free <= 0 or node.path.count(b"/") > MAX_FDS) and node.parent is not None:
            depth = 0  # slices that end early leave their directories open, so others must not go deeper
        share = self._take_share(node)
        is_below = node.begin_slice(share)
        is_shared = self._n_sharing > 1 and not is_below and (node.n_unlinking > 1 or _has_names(node.work))
        return Slice(key, node.fd, node.path, share, depth, node.is_hoisted, is_below, is_shared)

    def _find(self) -> int | None:
        """Return the most recently begun directory with work, preferably one in which no other slice is unlinking."""
        return next((key for choice in self._choices if (key := choice.find()) is not None), None)

    def _take_share(self, node: _Node) -> SliceWork:
        """Take a share of a directory's work; if other slices unlink there, take names only if nothing else remains."""
        work = node.work
        if work.emptied:
            share = SliceWork(emptied=work.emptied)
            work.emptied = []
            return share
        if work.subdirs and (node.n_unlinking or not _has_names(work)):
            n = min(-(-len(work.subdirs) // self._n_workers), _MAX_SUBDIRS)
            share = SliceWork(subdirs=work.subdirs[-n:])
            del work.subdirs[-n:]
            return share
        if not work.names and 0 < len(work.bundles) < self._n_sharing:
            work.names = unpack_names(work.bundles.pop())
        if work.names:
            # Enough remains for each of the other workers, and a slice returns what it can't finish in its time.
            n_names = len(work.names) + len(work.bundles) * _MAX_NAMES
            n = min(max(-(-n_names // self._n_sharing), self._least_share), _MAX_NAMES)
            share = SliceWork(work.names[-n:])
            del work.names[-n:]
            return share
        if work.bundles:
            return SliceWork(bundles=[work.bundles.pop()])
        share = SliceWork(
            is_listed=work.is_listed,
            failed=work.failed,
            n_failed=work.n_failed,
            n_passes=work.n_passes,
            is_productive=work.is_productive,
            cut_bytes=work.cut_bytes,
        )
        work.is_listed, work.failed, work.n_failed, work.cut_bytes = True, set(), 0, None
        work.is_productive = False
        return share

    def finish_slice(self, finished: Slice, outcome: RemovalSliceResult) -> list[FinishedDirectory]:
        """Record the result of a slice. Returns  the directories that are finished now"""
        self.record_entered(outcome.entered)
        self._removed += outcome.removed
        self._n_bytes += outcome.n_bytes
        add_failures(self._failures, outcome.failures)
        self._n_failed += outcome.n_failed
        self.doubts |= outcome.doubts
        self._nodes[finished.key].end_slice(finished, outcome.rest)
        self._reconsider(finished.key)
        key, path = finished.key, finished.path
        for unfinished in outcome.remaining:
            self._nodes[key].n_children += 1
            path = join_path(path, encode_name(unfinished.name))
            key = self._add(_Node(key, unfinished.name, unfinished.fd, path, unfinished.work))
        return self._finish(key)

    def lost(self, lost: Slice) -> None:
        """Record that a slice was lost with its worker. The slice's progress is unknown, so all of it is repeated."""
        self._nodes[lost.key].end_slice(lost, lost.work)
        self._reconsider(lost.key)

    def _finish(self, key: int) -> list[FinishedDirectory]:
        """Drop a directory and its ancestors, up to the first that has work left. Returns  the dropped directories"""
        finished: list[FinishedDirectory] = []
        while True:
            node = self._nodes[key]
            if node.n_running or node.n_children or node.work.has_rest():
                return finished
            if node.is_whole:
                node.work.relist_if_needed()
            if node.parent is None or node.work.has_rest():
                return finished
            del self._nodes[key]
            finished.append(FinishedDirectory(node.fd, bool(node.work.n_failed)))
            above = self._nodes[node.parent]
            above.n_children -= 1
            self._reconsider(node.parent)
            if node.work.n_failed:
                above.work.skip_failed(node.name)
            elif node.work.cut_bytes is None:
                above.work.emptied.append((node.name, node.work.n_passes))
            key = node.parent

    def record_entered(self, entered: Iterable[Entered]) -> None:
        """Record directories of other users for the next reap, as many as a record can hold."""
        for one in entered:
            if len(self._entered) < MAX_ENTERED:
                self._entered[one.handle] = one

    def entered(self) -> tuple[Entered, ...]:
        return tuple(self._entered.values())

    def count_removed(self, removed: int) -> None:
        """Count entries that were removed outside slices."""
        self._removed += removed

    def unfinished_fds(self) -> list[int]:
        """Return the fds of unfinished directories, which the caller must close if it abandons the removal."""
        return [node.fd for node in self._nodes.values() if node.parent is not None and node.fd >= 0]

    def report(self, *, paced: bool, stopped: bool) -> Report:
        """Return the sum of the results so far."""
        return Report(self._removed, tuple(self._failures), self._n_failed, self._n_bytes if paced else None, stopped)
