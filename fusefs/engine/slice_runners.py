"""What slices and their outcomes are to whoever runs them, in this process or by workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import SliceDone
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

    @property
    def goes_on(self) -> bool:
        """It is not over: this is what it did since it was told of last."""


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
    """What runs slices beside each other: the one place that knows where.

    n_workers  how many slices may run at a time; fewer than were asked for where the system refuses more
    """

    n_workers: int

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """Have a slice done; no more of them at a time than there are workers."""

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """Those that have ended since; waits for the first, but no longer than that. Raises  mistakes of ours"""

    def hasten(self) -> None:
        """Have those end soon that are longer than others; what is left of them comes back."""


class SharedSlice(Protocol[Work, Done]):
    """A slice that several threads do: the plan of what is in it."""

    def is_dry(self) -> bool:
        """See SliceSource."""

    def is_crowded(self) -> bool:
        """Whether what `next` gives is in a directory where others are at work, who are slower for it."""

    def next(self) -> Work | None:
        """See SliceSource."""

    def lost(self, lost: Work) -> None:
        """See SliceSource."""

    def done(self, part: Work, outcome: Done) -> None:
        """Take in what a part of it did."""

    def told(self, *, goes_on: bool) -> Done:
        """What was done since it was told of last; unless it goes on, with what is left of it."""


class SharesSlices(Protocol[Work, Done]):
    """A rank of an MPI job whose threads share slices. strategy: the rank's own, so many threads"""

    @property
    def strategy(self) -> Strategy: ...

    def shared(self, work: Work) -> SharedSlice[Work, Done]:
        """A slice as all of them do it."""


class RankRunner(SharesSlices[Work, Done], RunsSlices[Work, Done], Protocol[Work, Done]):
    """What runs slices in a rank of an MPI job."""

    def may_share(self, work: Work) -> bool:
        """Whether a slice is for all threads of a rank, and not for one of them; of the first rank."""


class Recipe(Protocol[Work, Done]):
    """What a rank makes its runner of; it pickles."""

    def opened(self, kernel: Kernel, n_ranks: int) -> AbstractContextManager[RankRunner[Work, Done]]:
        """The runner. Raises  TrashdError, OSError: the rank does not see what is to be worked on"""
