"""What slices and their outcomes are to whoever runs them, in this process or by workers."""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import SliceDone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    from fusefs.engine.strategy import Strategy
    from fusefs.linux.kernel import Kernel


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


class EndedSlice(NamedTuple, Generic[Work, Done]):
    """A slice that no worker has any more. outcome: None: it was lost with its worker, not known how far it came"""

    work: Work
    budget: SliceBudget
    outcome: Done | None


class SlicePool(Protocol[Work, Done]):
    """What runs slices beside each other: the one place that knows where."""

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """Have a slice done; no more of them at a time than there are workers."""

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """Those that have ended since; waits for the first, but no longer than that. Raises  mistakes of ours"""


class RankRunner(RunsSlices[_Work_contra, _Done_co], Protocol[_Work_contra, _Done_co]):
    """What runs slices in a rank of an MPI job. strategy: the rank's own, so many slices beside each other"""

    @property
    def strategy(self) -> Strategy: ...


class Recipe(Protocol[_Work_contra, _Done_co]):
    """What a rank makes its runner of; it pickles."""

    def opened(self, kernel: Kernel, n_ranks: int) -> AbstractContextManager[RankRunner[_Work_contra, _Done_co]]:
        """The runner. Raises  TrashdError, OSError: the rank does not see what is to be worked on"""
