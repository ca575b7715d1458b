"""The removal of one container's contents: slices handed out until nothing is left, or somebody says stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.budget import SLICE_S, Allowance, Budget, Limits
from fusefs.core.report import Progress, Report
from fusefs.core.slices import Outcome, Plan, Slice, Work
from fusefs.core.space import Survey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.reaper.crew import Crew, WorkerLost, crew_of
from fusefs.reaper.groups import Groups
from fusefs.reaper.strategy import Strategy, choose
from fusefs.reaper.strip import Stripper
from fusefs.store.layout import HOISTED, TREE

_GLANCE_S = 0.2
"""How long a stop may go unseen while slices run."""


class Wishes(NamedTuple):
    """What somebody wants of a removal beside that it happens.

    n_workers  slices at a time; None: what is best on that filesystem
    limits     a pace; none: as fast as the kernel
    progress   told what was removed, after each slice
    stops      asked between slices
    by_force   immutable and append-only flags are taken off where they forbid something
    counted    told what there is before anything is removed; None: it is not counted, which costs a stat a file
    counting   told how the counting goes
    waits      somebody will wait for the space: count, and look for what snapshots share too
    """

    n_workers: int | None = None
    limits: Limits = Limits()
    progress: Progress = lambda _entries, _bytes: None
    stops: Callable[[], bool] = lambda: False
    by_force: bool = False
    counted: Callable[[Survey], None] | None = None
    counting: Progress = lambda _entries, _bytes: None
    waits: bool = False


NOTHING_SPECIAL = Wishes()


def remove_contents(kernel: Kernel, container: Fd, wishes: Wishes = NOTHING_SPECIAL) -> Report:
    """Remove `tree` and `hoisted` of a container, going on after failures.

    Raises  nothing for an entry: its failure is in the report. What is created meanwhile is removed too.
    """
    strategy = choose(kernel, container, wishes.n_workers)
    with ExitStack() as owned:
        return _Removal(kernel, container, strategy, wishes, owned).run()


class _Removal:
    """One removal under way."""

    def __init__(self, kernel: Kernel, container: Fd, strategy: Strategy, wishes: Wishes, owned: ExitStack) -> None:
        self._kernel = kernel
        self._container = container
        self._strategy = strategy
        self._wishes = wishes
        self._owned = owned
        groups = owned.enter_context(Groups(kernel, strategy.group_shift))
        self._stripper = Stripper(kernel, container, strategy, groups, by_force=wishes.by_force)
        self._plan = Plan(strategy.n_workers, splits_names=strategy.splits)
        self._pace = _Pace(wishes.limits)
        self._hoisted: int | None = None
        owned.callback(self._close)

    def run(self) -> Report:
        names = [TREE.decode()]
        try:
            self._open_hoisted()
        except OSError:
            names.append(HOISTED.decode())  # something else has its name
        self._plan.add(self._container, b"", Work(names=names))
        # Most orphans are small: nobody is forked for what one slice does.
        self._run_alone(once=True)
        if self._strategy.n_workers > 1 and not self._plan.is_dry() and not self._wishes.stops():
            with crew_of(self._strategy.n_workers, self._strategy.workers, self._stripper) as crew:
                self._run_with(crew)
        self._run_alone()
        stopped = not self._plan.is_dry()
        if self._hoisted is not None and not stopped:
            with suppress(OSError):  # what failed in there is told already
                self._kernel.rmdir(self._container, HOISTED)
                self._plan.count(1)
        return self._plan.report(paced=self._wishes.limits.is_paced(), stopped=stopped)

    def _open_hoisted(self) -> None:
        """Make what is too deep part of the plan, what a killed reaper left there too."""
        if self._hoisted is None:
            with suppress(FileNotFoundError):
                fd = self._owned.enter_context(self._kernel.open_dir(self._container, HOISTED))
                self._hoisted = self._plan.add(fd, HOISTED, Work(is_listed=False), is_hoisted=True)

    def _begin(self) -> tuple[Slice, Budget] | None:
        """A slice that may begin now, and what it may do; None if the pace or the other slices forbid it."""
        budget = self._pace.budget()
        if budget is None:
            return None
        work = self._plan.next()
        if work is None:
            self._pace.give_back(budget)
            return None
        return work, budget

    def _run_alone(self, *, once: bool = False) -> None:
        """Run slices ourselves, all or the first that there is."""
        while not self._plan.is_dry() and not self._wishes.stops():
            begun = self._begin()
            if begun is None:
                self._pace.sleep()
                continue
            self._done(*begun, self._stripper.run(*begun))
            if once:
                return

    def _run_with(self, crew: Crew) -> None:
        """Keep all workers busy until the plan is dry, or one of them is lost: then we had better go on alone."""
        running: dict[Future[Outcome], tuple[Slice, Budget]] = {}
        is_whole = True
        while True:
            goes_on = is_whole and not self._wishes.stops()
            while goes_on and len(running) < self._strategy.n_workers and (begun := self._begin()):
                running[crew.submit(*begun)] = begun
            if running:
                done, _ = wait(running, _GLANCE_S, FIRST_COMPLETED)
                for future in done:
                    is_whole &= self._collect(future, *running.pop(future))
            elif not goes_on or self._plan.is_dry():
                return
            else:
                self._pace.sleep()

    def _collect(self, future: Future[Outcome], work: Slice, budget: Budget) -> bool:
        """Take in the outcome of a slice; False if it was lost with its worker."""
        try:
            outcome = future.result()
        except WorkerLost:
            self._plan.lost(work)
            self._pace.give_back(budget)
            return False
        self._done(work, budget, outcome)
        return True

    def _done(self, work: Slice, budget: Budget, outcome: Outcome) -> None:
        for fd in self._plan.done(work, outcome):
            Fd(fd).close()
        if outcome.hoisted or outcome.made_hoisted:
            with suppress(OSError):  # taken away: whatever is left will be found when the container is removed
                self._open_hoisted()
            if self._hoisted is not None:
                self._plan.push(self._hoisted, outcome.hoisted)
        self._pace.give_back(budget, outcome.removed, outcome.n_bytes)
        self._wishes.progress(outcome.removed, outcome.n_bytes)

    def _close(self) -> None:
        for fd in self._plan.fds():
            Fd(fd).close()


class _Pace:
    """The limits that a person gave, as budgets for slices."""

    def __init__(self, limits: Limits) -> None:
        now = time.monotonic()
        self._entries = None if limits.entries_per_s is None else Allowance(limits.entries_per_s, now)
        self._bytes = None if limits.bytes_per_s is None else Allowance(limits.bytes_per_s, now)

    def budget(self) -> Budget | None:
        """What a slice may do now; None if it has to wait."""
        now = time.monotonic()
        n_entries = None if self._entries is None else self._entries.take(now)
        n_bytes = None if self._bytes is None else self._bytes.take(now)
        budget = Budget(SLICE_S, n_entries, n_bytes)
        if n_entries == 0 or n_bytes == 0:
            self.give_back(budget)
            return None
        return budget

    def give_back(self, budget: Budget, n_entries: int = 0, n_bytes: int = 0) -> None:
        """Return what a slice did not spend; what it overspent is waited for."""
        if self._entries is not None and budget.n_entries is not None:
            self._entries.give_back(budget.n_entries - n_entries)
        if self._bytes is not None and budget.n_bytes is not None:
            self._bytes.give_back(budget.n_bytes - n_bytes)

    def sleep(self) -> None:
        """Wait until there is a budget again, or long enough to look whether to stop."""
        waits = [allowance.wait_s() for allowance in (self._entries, self._bytes) if allowance is not None]
        time.sleep(min(max(waits, default=0.0), _GLANCE_S))
