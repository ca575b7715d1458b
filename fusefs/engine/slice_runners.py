"""What slices and their outcomes are to whoever runs them, in this process or by workers."""

from __future__ import annotations

from fusefs.core.lean import TYPE_CHECKING, Protocol, TypeVar
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.slice_pace import SliceDone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


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
