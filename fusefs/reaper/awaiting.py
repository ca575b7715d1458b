"""What one command swapped away and waits for: left to the reapers, followed, and its space waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.errors import NotFound
from fusefs.core.goal import Goal, Met, explain_impossible
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId
from fusefs.core.report import Progress
from fusefs.core.space import Kind, Reason, Survey, Waited, total
from fusefs.linux.kernel import Kernel
from fusefs.reaper.follow import Orphan, follow
from fusefs.reaper.handing import Handed, hand_over
from fusefs.reaper.serving import find_reaper
from fusefs.reaper.wait import Gauge, wait_for_goal
from fusefs.store.authority import as_owner
from fusefs.store.discover import discover, folders
from fusefs.store.layout import UserFolder
from fusefs.store.swap import Swapped

_MARKED_MAX = 200
"""So many trees are remembered by an fd each, to tell a restore from a reap."""


class Ways(NamedTuple):
    """How whoever waits is told, and may end it.

    counting  gets the entries and bytes that are counted, about every thousand
    tell      gets what came, what is expected, and what goes on, in words
    stops     whether to end now, and leave everything as it is
    """

    counting: Progress
    tell: Callable[[int, int, str], None]
    stops: Callable[[], bool]


class Outcome(NamedTuple):
    """How the waiting for one volume ended.

    base    the directory that holds the store
    ids     of the orphans that were waited for
    spared  those of them that were not left to the reaper: they have the retention that a swap gives
    """

    base: bytes
    met: Met
    ids: tuple[ContainerId, ...]
    spared: tuple[ContainerId, ...]


class _Volume:
    """The directory that holds a store, what was free when its first victim was gone, and what is waited for."""

    def __init__(self, kernel: Kernel, folder: UserFolder) -> None:
        self.store = folder.store
        self.gauge = Gauge(kernel, folder.store.base_fd)
        self.orphans: list[Orphan] = []
        self.handed: set[ContainerId] = set()

    def expected(self) -> Survey:
        """What was in all of them, as far as it was counted."""
        return total(orphan.survey for orphan in self.orphans)


class Awaiting:
    """The volumes of one command."""

    def __init__(self, goal: Goal, keep_for: int) -> None:
        """keep_for: the retention in seconds that the user asked for; 0 if it is given up."""
        self._goal = goal
        self._keep_for = keep_for
        self._kernel = Kernel()
        self._volumes: dict[bytes, _Volume] = {}
        self._folders: dict[bytes, UserFolder] = {}
        self._n_marked = 0
        self._owned = ExitStack()

    def __enter__(self) -> Self:
        """Own what is opened for it."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of the volumes."""
        self._owned.close()

    def add(self, swapped: Swapped) -> None:
        """One more. Raises  TrashdError, OSError if it can't be waited for"""
        folder = self._folders.get(swapped.store)
        if folder is None:
            folder = self._folders[swapped.store] = self._open(swapped)
        base = folder.store.base_path
        volume = self._volumes.get(base)
        if volume is None:
            volume = self._volumes[base] = _Volume(self._kernel, folder)
        orphan = Orphan(folder, swapped.id, time.time_ns() + self._keep_for * 1_000_000_000)
        self._owned.callback(orphan.close)
        if self._n_marked < _MARKED_MAX:
            self._n_marked += 1
            orphan.mark()
        volume.orphans.append(orphan)

    def _open(self, swapped: Swapped) -> UserFolder:
        """The folder that has it; ours until the end."""
        base = swapped.store.rsplit(b"/", 3)[0] or b"/"  # BASE/.trashd/u/FOLDER
        for store in discover(self._kernel, (base,)):
            with ExitStack() as mine:
                mine.enter_context(store)
                for folder in folders(store):
                    if folder.path() == swapped.store:
                        mine.enter_context(folder)
                        self._owned.push(mine.pop_all())
                        return folder
                    folder.fd.close()
        raise NotFound(swapped.store)

    def bases(self) -> Iterable[bytes]:
        """The volumes, each by the directory that holds its store."""
        return self._volumes.keys()

    def wait_for(self, base: bytes, ways: Ways) -> Outcome:
        """Wait for one of them.

        Raises  TrashdError, OSError of what can't be counted or followed
        """
        volume = self._volumes[base]
        ids = tuple(orphan.id for orphan in volume.orphans)
        met = self._wait_for(volume, ways)
        return Outcome(base, met, ids, tuple(one for one in ids if one not in volume.handed))

    def _wait_for(self, volume: _Volume, ways: Ways) -> Met:
        reaper = find_reaper(volume.store)
        if isinstance(reaper, Reason) and reaper.kind is Kind.NOBODY:
            return self._unmet(volume, reaper)  # nobody would take them, so that nothing is given up
        kept = self._hand_over(volume, ways)
        expected = volume.expected()
        impossible = explain_impossible(self._goal, expected)
        if ways.stops() or impossible is not None or not volume.orphans:
            return self._unmet(volume, *filter(None, [impossible]), *kept)

        def tell(what: str) -> None:
            ways.tell(max(volume.gauge.courses.space.came(), 0), expected.n_bytes, what)

        followed = follow(volume.orphans, volume.gauge, self._goal, tell=tell, stops=ways.stops)
        kept += followed.kept
        if ways.stops() or followed.hindrance is not None:
            return self._unmet(volume, *filter(None, [followed.hindrance]), *kept)
        return wait_for_goal(
            self._kernel,
            volume.store.base_fd,
            volume.gauge,
            self._goal,
            expected,
            known=kept,
            containers=[orphan.id for orphan in volume.orphans],
            tell=lambda _came, _expected: tell("reaped"),
            stops=ways.stops,
        )

    def _hand_over(self, volume: _Volume, ways: Ways) -> list[Reason]:
        """Let the reaper have all of a volume; why some of their space will not come."""
        kept = []
        for orphan in list(volume.orphans):
            if ways.stops():
                break
            handed = self._hand_over_one(orphan, ways)
            if handed.is_handed:
                volume.handed.add(orphan.id)
            if handed.survey is not None:
                orphan.survey = handed.survey
            elif orphan.state() is not State.REAPING:
                volume.orphans.remove(orphan)
                kept.append(orphan.why_untouched() or Reason(Kind.PINNED, 0, f"somebody else has {orphan.id}"))
        return kept

    def _hand_over_one(self, orphan: Orphan, ways: Ways) -> Handed:
        keeps = self._keep_for > 0
        act = partial(hand_over, orphan.folder, orphan.id, ways.counting, ways.stops, keeps=keeps)
        return as_owner(orphan.folder, lambda _visible: act(), Handed)

    def _unmet(self, volume: _Volume, *reasons: Reason) -> Met:
        courses = volume.gauge.courses
        waited = Waited(max(courses.space.came(), 0), volume.expected().n_bytes, reasons, False)
        return Met(self._goal, False, waited, courses.came_inodes())
