"""Slices run by the ranks of an MPI job: threads within a rank, ranks on as many machines as mpiexec was given.

The first rank has the plan, and runs slices too; the others run what they are sent, each on its own mount. A slice goes
there by its path, without fds. Only one thread of a rank calls MPI, and none waits in it: any MPI will do, and a rank
that waits costs no processor. A rank that is lost ends the job, as MPI has it (docs/decisions/0051-mpi.md).
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from queue import Empty, Queue  # SimpleQueue may take a timeout that has just passed for none, and wait for ever
from typing import Any, Generic, NamedTuple, Self

from fusefs.core.errors import Exit, Refused, TrashdError, from_os
from fusefs.core.slice_budget import SliceBudget
from fusefs.engine.rank_slices import GivenSlice, LeftSlice, SlicesOfRanks, SlicesOfThreads, ToldSlice
from fusefs.engine.slice_runners import Done, EndedSlice, RankRunner, Recipe, Work
from fusefs.linux.kernel import Kernel

_POLL_S, _LONGEST_POLL_S = 0.0005, 0.004
"""Between two looks whether something came: of one that just had something to do, and of one that has not."""
_BUSY_POLL_S = 0.05
"""Of a rank whose threads all have something to do: nothing that it is sent is in haste."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where mpiexec or srun say how many ranks there are."""


class _Ready(NamedTuple):
    """A rank has its runner, or why not."""

    n_slices: int
    problem: str = ""


class Look(NamedTuple):
    """What a rank is to look at, before there is anything to do: a function that pickles.

    act  raises TrashdError or OSError if it is not there
    """

    act: Callable[[Kernel], None]


class MpiJob:
    """The ranks that were started together; this process is one of them."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sending: deque[Any] = deque()
        self.is_first: bool = comm.Get_rank() == 0
        self.n_ranks: int = comm.Get_size()

    def __enter__(self) -> Self:
        """Be a rank for the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """End: the first rank ends the others, whatever happened, and unless it is root's takes what they have to say.

        Another one that ends by a mistake of ours ends the job, as if it were lost.
        """
        if kind is not None and not self.is_first:
            self._comm.Abort(Exit.FAILED)
        if self.is_first:
            for rank in range(1, self.n_ranks):
                self.send(None, rank)
        else:
            self.send(None, 0)
        n_there = self.n_ranks - 1 if self.is_first and os.geteuid() else 0
        while n_there or self._sending:
            came = self.received() if n_there else None
            n_there -= came is not None and came[1] is None
            self._settle()
            time.sleep(_POLL_S)
        self._mpi.Finalize()

    def uids(self) -> list[int]:
        """Of each rank, at the first; nothing at the others. As plain numbers: what is pickled can do anything."""
        uids = array("q", [0] * self.n_ranks) if self.is_first else None
        self._comm.Gather(array("q", [os.geteuid()]), uids)
        return [*uids] if uids is not None else []

    def send(self, what: object, rank: int) -> None:
        """Begin to send something; it is on its way as long as MPI is called."""
        self._sending.append(self._comm.isend(what, rank))
        self._settle()

    def received(self) -> tuple[int, Any] | None:
        """Something that came, with the rank that it is from."""
        status = self._mpi.Status()
        message = self._comm.improbe(status=status)
        return None if message is None else (status.Get_source(), message.recv())

    def _settle(self) -> None:
        while self._sending and self._sending[0].Test():
            self._sending.popleft()

    # The first rank.

    @contextmanager
    def crew(
        self, ours: AbstractContextManager[RankRunner[Work, Done]], recipe: Recipe[Work, Done]
    ) -> Iterator[RankCrew[Work, Done]]:
        """The ranks, each with a runner for the block: this one ours, the others one that they make themselves.

        Raises  what making ours does; Refused if another rank can't make its own
        """
        with ours as runner:
            yield RankCrew(self, runner, [runner.strategy.n_workers, *self.prepare(recipe)])

    def prepare(self, recipe: Recipe[Any, Any] | Look) -> list[int]:
        """Have the other ranks make their runners, or have a look alone; how many slices each runs beside each other.

        Raises  Refused: one of them can't
        """
        n_slices, problems = [0] * self.n_ranks, list[str]()
        for rank in range(1, self.n_ranks):
            self.send(recipe, rank)
        for _ in range(1, self.n_ranks):
            while (came := self.received()) is None:
                time.sleep(_POLL_S)
            rank, ready = came
            n_slices[rank] = ready.n_slices
            if ready.problem:
                problems.append(f"rank {rank}: {ready.problem}")
        if problems:
            raise Refused(problems[0], "each rank needs the volume at the same path, mounted on its machine")
        return n_slices[1:]

    # The others.

    def serve(self, kernel: Kernel) -> int:
        """Run slices until the first rank ends it; the exit code. Ctrl-C is the first rank's."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with ExitStack() as owned:
            threads: RankThreads[Any, Any] | None = None
            pause_s = _POLL_S
            while True:
                while (came := self.received()) is not None:
                    pause_s = _POLL_S
                    _rank, message = came
                    if message is None:
                        return 0
                    if isinstance(message, GivenSlice | LeftSlice):
                        assert threads is not None
                        threads.take(message)
                    else:
                        owned.close()
                        threads, ready = self._made(kernel, message, owned)
                        self.send(ready, 0)
                if threads is None:
                    time.sleep(pause_s)
                elif told := threads.told(pause_s):
                    self.send(told, 0)
                    pause_s = _POLL_S
                    continue
                is_busy = threads is not None and threads.is_busy() and not self._sending
                pause_s = _BUSY_POLL_S if is_busy else min(1.5 * pause_s, _LONGEST_POLL_S)
                self._settle()

    def _made(
        self, kernel: Kernel, recipe: Recipe[Any, Any] | Look, owned: ExitStack
    ) -> tuple[RankThreads[Any, Any] | None, _Ready]:
        try:
            if isinstance(recipe, Look):
                recipe.act(kernel)
                return None, _Ready(0)
            runner = owned.enter_context(recipe.opened(kernel, self.n_ranks))
        except (TrashdError, OSError) as error:
            told = from_os(error, "the volume")
            return None, _Ready(0, f"{os.uname().nodename}: {told.message()}")
        n_slices = runner.strategy.n_workers
        return RankThreads(runner, owned.enter_context(ThreadPoolExecutor(n_slices))), _Ready(n_slices)


class RankThreads(Generic[Work, Done]):
    """The threads of a rank, at its slices."""

    def __init__(self, runner: RankRunner[Work, Done], threads: ThreadPoolExecutor) -> None:
        self._slices = SlicesOfThreads(runner)
        self._runner = runner
        self._threads = threads
        self._ended = Queue[tuple[GivenSlice[Work], Future[Done]]]()

    def is_busy(self) -> bool:
        """Whether each has something to do."""
        return self._slices.is_busy()

    def take(self, message: GivenSlice[Work] | LeftSlice) -> None:
        """What the first rank says."""
        self._slices.take(message, time.monotonic())

    def told(self, most_s: float) -> list[ToldSlice[Done]]:
        """What there is to tell; waits for a thread, but no longer than that."""
        self._begin()
        try:
            self._end(*(self._ended.get(timeout=most_s) if most_s else self._ended.get_nowait()))
            while True:
                self._end(*self._ended.get_nowait())
        except Empty:
            pass
        self._begin()
        return self._slices.told()

    def _begin(self) -> None:
        while (part := self._slices.next()) is not None:
            running = self._threads.submit(self._runner.run, part.work, part.budget)
            running.add_done_callback(partial(lambda part, running: self._ended.put((part, running)), part))

    def _end(self, part: GivenSlice[Work], running: Future[Done]) -> None:
        error, now_s = running.exception(), time.monotonic()
        if error is None:
            self._slices.done(part, running.result(), now_s)
        else:
            self._slices.failed(part, error, now_s)


class RankCrew(Generic[Work, Done]):
    """All ranks, ready for slices."""

    def __init__(self, job: MpiJob, ours: RankRunner[Work, Done], n_slices: list[int]) -> None:
        self._job = job
        self._n_slices = n_slices
        self.ours = ours
        self.n_workers = sum(n_slices)
        self.n_ranks = len(n_slices)

    @contextmanager
    def pool(self) -> Iterator[_RankPool[Work, Done]]:
        """See SliceRunner; nothing may be under way when it ends."""
        with ThreadPoolExecutor(self._n_slices[0]) as threads:
            slices = SlicesOfRanks[Work, Done](self._n_slices, self.ours.may_share)
            yield _RankPool(self._job, RankThreads(self.ours, threads), slices, self.n_workers)


class _RankPool(Generic[Work, Done]):
    """See SlicePool."""

    def __init__(
        self, job: MpiJob, here: RankThreads[Work, Done], slices: SlicesOfRanks[Work, Done], n_workers: int
    ) -> None:
        self.n_workers = n_workers
        self._job = job
        self._here = here
        self._slices = slices
        self._ended: list[EndedSlice[Work, Done]] = []

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        self._send(*self._slices.give(work, budget, time.monotonic()))

    def _send(self, rank: int, message: GivenSlice[Work] | LeftSlice) -> None:
        if rank:
            self._job.send(message, rank)
        else:
            self._here.take(message)

    def hasten(self) -> None:
        """See SlicePool."""
        self._ask(each=True)

    def _ask(self, *, each: bool) -> None:
        for rank, left in self._slices.to_be_left(time.monotonic(), each=each):
            self._send(rank, left)

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool. There is nothing to hand out now: those that lack work get of others'."""
        self._ask(each=False)
        until_s = time.monotonic() + most_s
        while True:
            while (came := self._job.received()) is not None:
                self._take(came[1])
            self._take(self._here.told(0.0 if self._ended else _POLL_S))
            if self._ended or time.monotonic() >= until_s:
                ended, self._ended = self._ended, []
                return ended

    def _take(self, told: list[ToldSlice[Done]]) -> None:
        for one in told:
            if one.problem:
                raise RuntimeError(f"rank {self._slices.rank_of(one.number)}: {one.problem}")
            if one.is_unseen:
                self._here.take(self._slices.unseen(one, time.monotonic()))
            else:
                self._ended.append(self._slices.told(one))


def joined() -> MpiJob:
    """The job that this process is a rank of; alone it is a job of one.

    Raises  Refused: there is no mpi4py, or it is another MPI's
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        hint = (
            "pip install mpi4py into trashd's environment; at a centre: module load its MPI first; on Debian: apt "
            "install python3-mpi4py, or pip install mpi4py mpich, as mpi4py's wheel does not find Debian's MPICH"
        )
        raise Refused(f"--mpi needs mpi4py, which can't be loaded ({error})", hint) from error
    job = MpiJob(MPI, MPI.COMM_WORLD)
    told = max((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdecimal()), default=1)
    if job.n_ranks == 1 < told:
        MPI.Finalize()
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        hint = f"that one is {library}: start it by that one's mpiexec, or srun --mpi as it needs"
        raise Refused(f"{told} ranks were started, but mpi4py's MPI knows of one", hint)
    return job
