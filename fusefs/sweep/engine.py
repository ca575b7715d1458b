"""The loop of a sweep: slices handed out until nothing is left, somebody says stop, or there is enough."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple, Self

from fusefs.core.budget import Budget
from fusefs.core.record import Failure
from fusefs.core.selection import Matcher
from fusefs.core.swept import OUTSIDE, Spared, Sums
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.pressure import Queue
from fusefs.reaper.drive import Drive
from fusefs.reaper.groups import Groups
from fusefs.reaper.pace import Pace
from fusefs.reaper.strategy import Strategy, Workers, choose
from fusefs.store.sides import Sides
from fusefs.sweep.choosing import Dirs, Way
from fusefs.sweep.jobs import Agenda, Job, Kind, Outcome, Share
from fusefs.sweep.listed import BrokenList, jobs_of
from fusefs.sweep.request import Action, Request, Top, Wishes
from fusefs.sweep.tally import Tally
from fusefs.sweep.worker import Worker

_FIRST_S = 0.005
"""The first slice goes to nobody else: most sweeps are done then."""
_WINDOW = 65_536


class Walked(NamedTuple):
    """What a walk did; see Swept."""

    sums: Sums
    failures: tuple[Failure, ...]
    spared: tuple[Spared, ...]
    is_stopped: bool
    why: str
    is_limited: bool


def walk(kernel: Kernel, top: Top, request: Request, action: Action, dirs: Dirs, wishes: Wishes) -> Walked:
    """Act on all that a selection chooses below a directory.

    Raises  OSError if the directory itself can't be read; nothing for what is in it
    """
    with ExitStack() as owned:
        root = owned.enter_context(kernel.open_dir(top.sides.fd))
        n_workers = 1 if action.is_single or request.most is not None else request.n_workers
        strategy = choose(kernel, root, n_workers)
        if dirs is Dirs.WHOLE and n_workers is None and strategy.workers is Workers.PROCESSES:
            # The kernel has one lock a filesystem for renames into other directories: two workers are slower.
            strategy = strategy._replace(n_workers=1, group_shift=None)
        way = Way(dirs, min(_WINDOW, strategy.window), strategy.by_inode, top.mounts)
        hears = _Stop(wishes)
        sides = Sides(root, top.sides.mounted)
        groups = owned.enter_context(Groups(kernel, strategy.group_shift))
        matcher = Matcher(request.selection)
        worker = Worker(kernel, sides, matcher, action, way, groups, request.guard, hears.is_asked)
        queue = Queue(root)
        owned.callback(queue.close)
        pace = Pace(wishes.leads, queue.is_busy, strategy.afterwork)
        with _Walk(top, request, wishes, way, strategy, pace, hears) as walking:
            Drive(walking.agenda, worker, strategy, pace, walking.is_over, walking.done).run(_FIRST_S)
            return walking.result()


class _Stop:
    """Whether to stop, in this process and in those that it forks."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._shared = mmap.mmap(-1, 1)

    def is_asked(self) -> bool:
        """Somebody said so, here or in the first process."""
        if not self._shared[0] and self._wishes.stops():
            self._shared[0] = 1
        return self._shared[0] != 0


class _Walk:
    """One walk under way: what is left to do, and what was done."""

    def __init__(
        self, top: Top, request: Request, wishes: Wishes, way: Way, strategy: Strategy, pace: Pace, stop: _Stop
    ) -> None:
        self._wishes = wishes
        self._way = way
        self._pace = pace
        self._stop = stop
        self._tally = Tally(None)
        self._why = ""
        self._is_limited = False
        # Servers that tell an entry's offset by its position pass over some when others go meanwhile.
        lists_whole = strategy.workers is Workers.THREADS
        first = self._first(top, request)
        self.agenda = Agenda(
            first, strategy.n_workers, request.most,
            splits=strategy.splits, lists_whole=lists_whole, asks_late=request.late,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for fd in self.agenda.fds():
            Fd(fd).close()

    def _first(self, top: Top, request: Request) -> Iterator[Job]:
        if request.names is None:
            return iter([Job(Kind.ENTER, b"", [""])])
        tops = dict.fromkeys((os.path.abspath(request.directory), top.path))
        return jobs_of(self._read(request.names), tops, self._refuse, 1 if request.late else None)

    def _read(self, names: Iterable[bytes]) -> Iterator[bytes]:
        """Listed names; a list that can't be read to its end is an end, too, of which is told what was done."""
        try:
            yield from names
        except BrokenList as error:
            self._why = f"the list can't be read on: {error.detail}"

    def _refuse(self, name: bytes) -> None:
        self._tally.fail(name, errno.EXDEV, OUTSIDE)

    def is_over(self) -> bool:
        """Whether it ends here."""
        return (self._is_limited and self._way.ends_at_limit()) or bool(self._why) or self._stop.is_asked()

    def done(self, share: Share, budget: Budget, outcome: Outcome) -> None:
        """Take in what a slice did."""
        for fd in self.agenda.done(share, outcome):
            Fd(fd).close()
        self._tally.add(outcome.sums, outcome.failures, outcome.spared)
        self._why = self._why or outcome.why
        self._is_limited |= outcome.is_limited
        self._pace.done(budget, outcome)
        self._wishes.progress(self._tally.sums)

    def result(self) -> Walked:
        """What came of it."""
        tally = self._tally
        is_stopped = bool(self._why) or self._stop.is_asked()
        return Walked(tally.sums, tuple(tally.failures), tuple(tally.spared), is_stopped, self._why, self._is_limited)
