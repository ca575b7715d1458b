"""The removal of one container's contents: slices handed out until nothing is left, or it is stopped."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import NamedTuple, Protocol

from fusefs.core.freed_space import Survey
from fusefs.core.record import Entered
from fusefs.core.report import Progress, Report, Stops
from fusefs.core.slice_budget import NamesPerLook
from fusefs.core.slices import RemovalSliceResult, Slice, SlicePlan, SliceWork
from fusefs.engine.mpi_ranks import RankCrew
from fusefs.engine.run_slices import SliceRunner
from fusefs.engine.slice_pace import FULL_SPEED, SetsSpeed, SlicePace
from fusefs.engine.slice_runners import RunsSlices, SlicePool
from fusefs.engine.strategy import AllocationGroups, choose
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.pressure import DeviceQueue
from fusefs.reaper.inner_store_stop import InnerStores
from fusefs.reaper.late_arrivals import LateArrivals
from fusefs.reaper.remove_slice import SliceRemover
from fusefs.reaper.server_outage import CUT_OFF, OutageWishes, ServerOutage, ServerWasAway, may_be_away
from fusefs.store.container import HeldContainer
from fusefs.store.layout import HOISTED, TREE, UserFolder

Crew = AbstractContextManager[RankCrew[Slice, RemovalSliceResult]]


class SharesRemovals(Protocol):
    """An MPI job, as its first rank has it (RemovalByRanks)."""

    def look(self, folder: UserFolder) -> None:
        """Before anything is claimed. Raises  Refused: a rank does not find the folder"""

    def crew(self, held: HeldContainer, wishes: RemovalWishes) -> Crew:
        """Who removes what is in a container, for the block; its record is as on disk.

        Raises  Refused: a rank can't find it; TrashdError, OSError
        """


class RemovalWishes(NamedTuple):
    """What the caller wants of a removal beside that it happens.

    n_workers  slices at a time; None: what is best on that filesystem
    pace       how fast, asked before each slice; without one: as fast as the kernel
    progress   told what was removed, after each slice
    stops      asked between slices
    parks      the same, where there is time: not while a large file is being cut, whose rest would go at once
    by_force   immutable and append-only flags are taken off where they forbid something
    without_doubt  what came in after the swap goes too (reaper/late_arrivals.py): a person says so now
    with_stores  stores in it that hold something go too, but for what is pinned in them
    counted    told what there is before anything is removed; None: it is not counted, which costs a stat a file
    counting   told how the counting goes
    waits      the caller will wait for the space: count, and look for what snapshots share too
    outage     how long a server that does not answer is waited for
    job        who shares it
    """

    n_workers: int | None = None
    pace: SetsSpeed = FULL_SPEED
    progress: Progress = lambda _entries, _bytes: None
    stops: Stops = lambda: False
    parks: Stops = lambda: False
    by_force: bool = False
    without_doubt: bool = False
    with_stores: bool = False
    counted: Callable[[Survey], None] | None = None
    counting: Progress = lambda _entries, _bytes: None
    waits: bool = False
    outage: OutageWishes = OutageWishes()
    job: SharesRemovals | None = None

    def ends(self) -> bool:
        """Whether it is to end where there is nothing to be brought to an end first."""
        return self.stops() or self.parks()


NOTHING_SPECIAL = RemovalWishes()


def remove_contents(
    kernel: Kernel,
    container: Fd,
    given: LateArrivals,
    wishes: RemovalWishes = NOTHING_SPECIAL,
    outage: ServerOutage | None = None,
    crew: Crew | None = None,
) -> tuple[Report, tuple[Entered, ...]]:
    """Remove `tree` and `hoisted` of a container, as far as that was given, going on after failures.

    outage   of the reap that this is a part of
    crew     of the job that shares it
    Returns  what was done; and what `given` has to be told of the next time
    Raises  nothing for an entry: its failure is in the report. What is created meanwhile is removed too.
            ServerWasAway: it is to be called again, with the container opened anew; ServerAway, OSError
            Refused: a rank can't find the container
    """
    with ExitStack() as owned:
        outage = outage or ServerOutage(kernel, wishes.outage, wishes.ends)
        return _Removal(kernel, container, given, wishes, outage, crew, owned).run()


class _Removal:
    """One removal under way."""

    def __init__(
        self,
        kernel: Kernel,
        container: Fd,
        given: LateArrivals,
        wishes: RemovalWishes,
        outage: ServerOutage,
        crew: Crew | None,
        owned: ExitStack,
    ) -> None:
        self._kernel = kernel
        self._container = container
        self._given = given
        self._wishes = wishes
        self._outage = outage
        self._away = 0
        self._owned = owned
        self._opens: Callable[[], AbstractContextManager[SlicePool[Slice, RemovalSliceResult]]] | None = None
        self._remover: RunsSlices[Slice, RemovalSliceResult]
        n_machines = 0
        if crew is None:
            self._strategy = strategy = choose(kernel, container, wishes.n_workers)
            self._remover = self._remover_here()
        else:
            ready = owned.enter_context(crew)
            self._strategy = strategy = ready.ours.strategy._replace(n_workers=ready.n_workers)
            self._remover, self._opens, n_machines = ready.ours, ready.pool, ready.n_ranks
        self._plan = SlicePlan(
            strategy.n_workers,
            splits_names=strategy.splits,
            least_share=strategy.least_share,
            n_machines=n_machines,
        )
        queue = DeviceQueue(container)
        self._pace = SlicePace(wishes.pace, queue.is_busy, strategy.afterwork)
        owned.callback(queue.close)
        self._hoisted: int | None = None
        owned.callback(self._close)

    def _remover_here(self) -> SliceRemover:
        kernel, container, wishes = self._kernel, self._container, self._wishes
        groups = self._owned.enter_context(AllocationGroups(kernel, self._strategy.group_shift))
        inner_stores = InnerStores(kernel, container, with_stores=wishes.with_stores)
        return SliceRemover(
            kernel,
            container,
            self._strategy,
            groups,
            self._given,
            inner_stores,
            NamesPerLook(),
            wishes.by_force,
            has_server=may_be_away(kernel, container),
        )

    def run(self) -> tuple[Report, tuple[Entered, ...]]:
        names = [TREE.decode()]
        try:
            self._open_hoisted()
        except OSError:
            names.append(HOISTED.decode())  # something else has its name
        self._plan.add(self._container, b"", SliceWork(names=names))
        slices = SliceRunner(
            self._plan, self._remover, self._strategy, self._pace, self._is_stopped, self._done, self._opens
        )
        slices.run()
        stopped = not self._plan.is_dry()
        doubts = frozenset() if stopped else self._plan.doubts()
        number = self._away or min(doubts & CUT_OFF, default=0)
        if number or doubts:
            goes_on = self._outage.wait(number, self._container) if number else self._outage.wait_in_doubt()
            if goes_on:
                raise ServerWasAway(*self._end(stopped=True))
            stopped = number != 0 or self._wishes.ends()
        if self._hoisted is not None and not stopped:
            with suppress(OSError):  # what failed in there is told already
                self._kernel.rmdir(self._container, HOISTED)
                self._plan.count(1)
        return self._end(stopped=stopped)

    def _end(self, *, stopped: bool) -> tuple[Report, tuple[Entered, ...]]:
        report = self._plan.report(paced=self._pace.was_always_limited, stopped=stopped)
        self._note(self._plan.fds())
        return report, self._plan.entered()

    def _note(self, fds: list[int]) -> None:
        """Remember directories that the next reap comes to again."""
        with suppress(OSError):
            self._plan.note(self._given.note(fds))

    def _open_hoisted(self) -> None:
        """Make what is too deep part of the plan, what a killed reaper left there too."""
        if self._hoisted is None:
            with suppress(FileNotFoundError):
                fd = self._owned.enter_context(self._kernel.open_dir(self._container, HOISTED))
                if not self._given.takes(fd, HOISTED):
                    raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # put there while it was moved up
                work = SliceWork(is_listed=False)
                self._hoisted = self._plan.add(fd, HOISTED, work, is_hoisted=True, is_whole=True)

    def _is_stopped(self) -> bool:
        """Whether it is to end here."""
        return self._away != 0 or self._wishes.stops() or (self._wishes.parks() and not self._plan.is_cutting())

    def _done(self, work: Slice, outcome: RemovalSliceResult) -> None:
        for fd, has_failed in self._plan.done(work, outcome):
            if fd < 0:
                continue  # by paths: what has to be noted was brought to its end in a slice
            if has_failed:
                self._note([fd])
            Fd(fd).close()
        if outcome.hoisted or outcome.made_hoisted:
            with suppress(OSError):  # taken away: whatever is left will be found when the container is removed
                self._open_hoisted()
            if self._hoisted is not None:
                self._plan.push(self._hoisted, outcome.hoisted)
        if outcome.removed:
            self._outage.has_gone_on()
        self._away = self._away or outcome.away
        self._wishes.progress(outcome.removed, outcome.n_bytes)

    def _close(self) -> None:
        for fd in self._plan.fds():
            Fd(fd).close()
