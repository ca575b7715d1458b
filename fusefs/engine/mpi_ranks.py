"""Run slices on the ranks of an MPI job: in threads within each rank, and in ranks on all machines given to mpiexec.

The first rank has the plan, and also runs slices. The other ranks run the slices that they receive, each rank on its
own mount. A slice is sent with its path, without fds. Only one thread of a rank calls MPI, and it never blocks there;
therefore any MPI library works, and a waiting rank uses no CPU. A lost rank ends the job.

Source  docs/internals/decisions/0051-mpi.md
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, NamedTuple, Self

from fusefs.core.errors import Exit, Refused, TrashdError, from_os
from fusefs.core.pacing import SliceBudget
from fusefs.engine.run_slices import EndedSlice, Outcome, Result, Work, WorkerThreads, worker_threads
from fusefs.engine.strategy import Strategy
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel

_SLICE_S = 0.25
"""Shortest slice: so long that messages and opening the directory cost little compared to it (bench/nodes.py)."""
_SLICE_S_EACH = 0.002
"""With many slices in progress, the shortest slice is this times their number, so that the first rank keeps up: it
needs 0.15 ms for each slice."""
_POLL_S, _LONGEST_POLL_S = 0.0005, 0.004
"""Pauses between two MPI polls: right after a message or the end of a slice, and after being idle for a while."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # set by mpiexec or srun


class DirectoriesByPath:
    """A thread-safe cache of open directories below a top directory."""

    def __init__(self, kernel: Kernel, top: Fd, may_enter: Callable[[Fd, bytes], bool], most: int = 256) -> None:
        """Start with an empty cache.

        top    the caller still owns this fd
        may_enter  called with each directory that is opened and its path below the top; returns whether the directory
                   may be entered
        """
        self._kernel = kernel
        self._top = top
        self._may_enter = may_enter
        self._most = most
        self._open: dict[bytes, Fd] = {}  # the most recently used one last
        self._lock = threading.Lock()

    def open(self, path: bytes) -> Fd:
        """Open a directory for reading, component by component, never through a link or a mount; the caller closes it.

        Raises  OSError: ENOENT or ESTALE if this machine does not see the directory; EPERM if it must not be entered
        """
        try:
            return self._open_below(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        self.close()  # by now, the path of a cached directory may lead to another directory
        return self._open_below(path)

    def _open_below(self, path: bytes) -> Fd:
        with self._lock:
            if not path:
                return Fd(os.dup(self._top))
            if path in self._open:
                self._open[path] = self._open.pop(path)
                return Fd(os.dup(self._open[path]))
        above, _, name = path.rpartition(b"/")
        with self._open_below(above) as upper:
            fd = self._kernel.open_dir(upper, name)
        with close_on_error(fd):
            if not self._may_enter(fd, path):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            self.keep(path, Fd(os.dup(fd)))
        return fd

    def keep(self, path: bytes, fd: Fd) -> None:
        """Add an open directory that may be entered, and take ownership of its fd.

        If the cache is full, close the directory that has not been used for the longest time.
        """
        with self._lock:
            if path in self._open:
                self._open.pop(path).close()
            self._open[path] = fd
            if len(self._open) > self._most:
                self._open.pop(next(iter(self._open))).close()

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class SentSlice(NamedTuple, Generic[Work]):
    """A slice sent to a rank. number: unique among the running slices"""

    number: int
    work: Work
    budget: SliceBudget


_Threads = WorkerThreads[SentSlice[Any], Any]


class RankRunner(NamedTuple, Generic[Work, Result]):
    """Runs slices in a rank. run_slice: returns None if this rank does not see the directory"""

    run_slice: Callable[[Work, SliceBudget], Result]
    strategy: Strategy

    def run_sent(self, sent: SentSlice[Work], budget: SliceBudget) -> Result:
        return self.run_slice(sent.work, budget)


OpensRunner = Callable[[Kernel, int], AbstractContextManager[object]]
"""Makes a RankRunner for a number of ranks, or another object if the rank only has to check something. Picklable.
Raises  TrashdError, OSError: the rank can't find the volume
"""


def least_slice_s(n_running: int) -> float:
    """Return the length of the shortest slice with which the first rank keeps up with this many slices in progress."""
    return max(_SLICE_S, _SLICE_S_EACH * n_running)


class SlicesOfRanks(Generic[Work]):
    """Records which rank is running which slices; used by the first rank."""

    def __init__(self, n_slices: Sequence[int]) -> None:
        """n_slices: the number of slices that each rank runs at a time"""
        places = sorted((place, rank) for rank, n in enumerate(n_slices) for place in range(n))
        self._ranks = [rank for _place, rank in places]  # each rank's first place precedes any second place
        self._free = deque(range(len(places)))  # next one at the left: ranks take turns even with little work
        self.sent: dict[int, SentSlice[Work]] = {}

    def send(self, work: Work, budget: SliceBudget) -> tuple[int, SentSlice[Work]]:
        """Assign a slice to the next rank in order, and return the rank and the message to send to it."""
        number = self._free.popleft()
        if not budget.is_paced():
            budget = budget._replace(seconds=max(budget.seconds, least_slice_s(len(self.sent) + 1)))
        sent = self.sent[number] = SentSlice(number, work, budget)
        return self._ranks[number], sent

    def end(self, number: int, outcome: Outcome | None) -> EndedSlice[Work, Outcome]:
        """Remove an ended slice from the list, so that its rank can run another one."""
        self._free.append(number)
        sent = self.sent.pop(number)
        return EndedSlice(sent.work, sent.budget, outcome)


class MpiJob:
    """The ranks that were started together; this process is one of them."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sending: deque[Any] = deque()
        self.is_first: bool = comm.Get_rank() == 0
        self.n_ranks: int = comm.Get_size()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """End the job: the first rank ends the others and, unless it runs as root, receives what they still send."""
        if kind is not None and not self.is_first:  # a bug in trashd ends the job, as the loss of a rank does
            traceback.print_exc()
            self._comm.Abort(Exit.FAILED)
        for rank in range(1, self.n_ranks) if self.is_first else (0,):
            self.send(None, rank)
        n_there = self.n_ranks - 1 if self.is_first and os.geteuid() else 0
        while n_there or self._sending:
            if n_there and (received := self.receive()) is not None:
                n_there -= received[1] is None
            self._settle()
            time.sleep(_POLL_S)
        self._mpi.Finalize()

    def uids(self) -> list[int]:
        """In the first rank, return the UIDs of all ranks; in the others, return an empty list.

        The UIDs are sent as plain numbers, because unpickling can run any code.
        """
        uids = array("q", [0] * self.n_ranks) if self.is_first else None
        self._comm.Gather(array("q", [os.geteuid()]), uids)
        return [*uids] if uids is not None else []

    def send(self, message: object, rank: int) -> None:
        """Start sending a message; MPI continues to send it while messages are being received."""
        self._sending.append(self._comm.isend(message, rank))

    def receive(self) -> tuple[int, Any] | None:
        """Return the sending rank and the message if one has arrived, otherwise None."""
        self._settle()
        status = self._mpi.Status()
        message = self._comm.improbe(status=status)
        return None if message is None else (status.Get_source(), message.recv())

    def _settle(self) -> None:
        while self._sending and self._sending[0].Test():
            self._sending.popleft()

    @contextmanager
    def crew(self, local_runner: RankRunner[Work, Outcome], opens: OpensRunner) -> Iterator[RankCrew[Work, Outcome]]:
        """Prepare all ranks for slices: this rank runs them with local_runner, the others with runners of their own.

        Raises  the errors of `prepare`
        """
        n_slices = self.prepare(opens)
        with worker_threads(local_runner.strategy.n_workers, local_runner.run_sent) as threads:
            yield RankCrew(self, local_runner, threads, [threads.n_workers, *n_slices])

    def prepare(self, opens: OpensRunner) -> list[int]:
        """Have the other ranks make their runners, and return how many slices each of them runs at a time.

        Raises  Refused: a rank can't make its runner
        """
        answers = dict[int, Any]()
        for rank in range(1, self.n_ranks):
            self.send(opens, rank)
        while len(answers) < self.n_ranks - 1:
            if (received := self.receive()) is not None:
                answers |= [received]
            time.sleep(_POLL_S)
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, str):
                hint = "on all machines that run a rank, the volume must be mounted at the same path"
                raise Refused(f"rank {rank}: {answer}", hint)
        return [answers[rank] for rank in sorted(answers)]

    def serve(self, kernel: Kernel) -> int:
        """Run slices until the first rank ends the job; return the exit code. Only the first rank handles Ctrl-C."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.excepthook = _end_rank
        with ExitStack() as owned:
            threads: _Threads | None = None
            pause_s = _POLL_S
            while (received := self.receive()) is None or received[1] is not None:
                message = None if received is None else received[1]
                if isinstance(message, SentSlice):
                    assert threads is not None
                    threads.submit(message, message.budget)
                elif message is not None:
                    owned.close()
                    threads = self._open(kernel, message, owned)
                elif threads is None:
                    time.sleep(_LONGEST_POLL_S)
                elif ended := threads.collect_ended(pause_s):
                    self.send([(sent.number, outcome) for sent, _budget, outcome in ended], 0)
                else:
                    pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
                    continue
                pause_s = _POLL_S
        return 0

    def _open(self, kernel: Kernel, opens: OpensRunner, owned: ExitStack) -> _Threads | None:
        """If this rank is to run slices, start its threads. Send the first rank the number of threads, or an error."""
        threads = None
        try:
            runner = owned.enter_context(opens(kernel, self.n_ranks))
        except (TrashdError, OSError) as error:
            self.send(f"{os.uname().nodename}: {from_os(error, 'the volume').message()}", 0)
            return None
        if isinstance(runner, RankRunner):
            threads = owned.enter_context(worker_threads(runner.strategy.n_workers, runner.run_sent))
        self.send(0 if threads is None else threads.n_workers, 0)
        return threads


def _end_rank(raised: threading.ExceptHookArgs) -> None:
    """End the rank, and with it the job, after a bug in trashd raised an exception in one of the threads."""
    threading.__excepthook__(raised)
    os._exit(Exit.FAILED)


class RankCrew(Generic[Work, Outcome]):
    """All ranks of a job, ready to run slices. See SlicePool."""

    def __init__(
        self, job: MpiJob, local_runner: RankRunner[Work, Outcome], local_threads: _Threads, n_slices: Sequence[int]
    ) -> None:
        self.local_runner = local_runner
        self._job = job
        self._local_threads = local_threads
        self._slices = SlicesOfRanks[Work](n_slices)
        self.n_workers = sum(n_slices)
        self.n_ranks = len(n_slices)

    def submit(self, work: Work, budget: SliceBudget) -> None:
        rank, sent = self._slices.send(work, budget)
        if rank:
            self._job.send(sent, rank)
        else:
            self._local_threads.submit(sent, sent.budget)

    def collect_ended(self, most_s: float) -> list[EndedSlice[Work, Outcome]]:
        """See SlicePool. If another rank does not see a slice's directory, a thread of this rank runs the slice."""
        until_s, ended = time.monotonic() + most_s, list[EndedSlice[Work, Outcome]]()
        while True:
            while (received := self._job.receive()) is not None:
                for number, outcome in received[1]:
                    if outcome is None and self._local_threads.n_workers:
                        unseen = self._slices.sent[number]
                        self._local_threads.submit(unseen, unseen.budget)
                    else:
                        ended.append(self._slices.end(number, outcome))
            for sent, _budget, outcome in self._local_threads.collect_ended(0.0 if ended else _POLL_S):
                ended.append(self._slices.end(sent.number, outcome))
            if ended or time.monotonic() >= until_s:
                return ended


def join_job() -> MpiJob:
    """Join the MPI job in which this process is a rank; a process started without mpiexec is a job with one rank.

    Raises  Refused: mpi4py is missing, or uses a different MPI than the one that started this process
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        hint = (
            "run pip install mpi4py in trashd's environment (on a cluster, load the MPI module first); on Debian, use "
            "apt install python3-mpi4py, or pip install mpi4py mpich, because the wheel does not find Debian's MPICH"
        )
        raise Refused(f"--mpi needs mpi4py, which can't be loaded ({error})", hint) from error
    job = MpiJob(MPI, MPI.COMM_WORLD)
    n_started = max((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdecimal()), default=1)
    if job.n_ranks == 1 < n_started:
        MPI.Finalize()
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        hint = f"mpi4py uses {library}; start the ranks with that MPI's mpiexec, or with the matching srun --mpi"
        raise Refused(f"{n_started} ranks were started, but mpi4py's MPI sees only one", hint)
    return job
