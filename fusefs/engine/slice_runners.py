"""What slices and their outcomes are to whoever runs them, in this process or by workers."""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING, Protocol, TypeVar
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import SliceDone

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from typing import Self

    from fusefs.engine.strategy import Strategy
    from fusefs.linux.kernel import Kernel


class WorkerLost(Exception):
    """A worker ended in the middle of a slice; how far it came is not known."""


class HasFds(Protocol):
    """A value that pickles, but for the fds in it."""

    def fds(self) -> Sequence[int]:
        """They."""

    def with_fds(self, fds: Sequence[int]) -> Self:
        """The value in the process that they came to, where they have these numbers."""


class SliceOutcome(HasFds, SliceDone, Protocol):
    """What comes back of a slice."""


Work = TypeVar("Work", bound=HasFds)
Done = TypeVar("Done", bound=SliceOutcome)
_Work_contra = TypeVar("_Work_contra", bound=HasFds, contravariant=True)
_Done_co = TypeVar("_Done_co", bound=SliceOutcome, covariant=True)


class RunsSlices(Protocol[_Work_contra, _Done_co]):
    """What runs a slice; a worker gets its own copy by fork."""

    def run(self, work: _Work_contra, budget: SliceBudget) -> _Done_co:
        """Do it. Its fds stay their owner's; those that come back with it may be the same."""


class SlicePool(Protocol[_Work_contra, Done]):
    """What runs slices beside each other: the one place that knows where."""

    def submit(self, work: _Work_contra, budget: SliceBudget) -> Future[Done]:
        """Have a slice done; the future raises WorkerLost if it is not known what became of it."""

    def finished(self, running: Collection[Future[Done]], most_s: float) -> set[Future[Done]]:
        """Those that are finished; waits for the first, but no longer than that."""


class RankRunner(RunsSlices[_Work_contra, _Done_co], Protocol[_Work_contra, _Done_co]):
    """What runs slices in a rank of an MPI job. strategy: the rank's own, so many slices beside each other"""

    @property
    def strategy(self) -> Strategy: ...


class Recipe(Protocol[_Work_contra, _Done_co]):
    """What a rank makes its runner of; it pickles."""

    def opened(self, kernel: Kernel, n_ranks: int) -> AbstractContextManager[RankRunner[_Work_contra, _Done_co]]:
        """The runner. Raises  TrashdError, OSError: the rank does not see what is to be worked on"""
