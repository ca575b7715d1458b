"""Slices run by the ranks of an MPI job: threads within a rank, ranks on as many machines as mpiexec was given.

The first rank has the plan, and runs slices too; the others run what they are sent, each on its own mount. A slice
travels by its path, without fds. One thread of a rank calls MPI, and never waits in MPI: any MPI will do, and a waiting
rank costs no processor. A lost rank ends the job (docs/decisions/0051-mpi.md).
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
from fusefs.engine.run_slices import Done, EndedSlice, Result, Work, WorkerThreads, worker_threads
from fusefs.engine.strategy import Strategy
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel

_SLICE_S = 0.25
"""A slice's time, at least: messages, and opening its directory, cost little beside it (measured: bench/nodes.py)."""
_SLICE_S_EACH = 0.002
"""For each slice under way: one takes the first rank 0.15 ms, so that it keeps up with any number of them."""
_POLL_S, _LONGEST_POLL_S = 0.0005, 0.004
"""Between two polls of MPI: just after a message or the end of a slice, and when there was neither for a while."""
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # by mpiexec or srun


class DirectoriesByPath:
    """The open directories below one; for any thread."""

    def __init__(self, kernel: Kernel, top: Fd, takes: Callable[[Fd, bytes], bool], most: int = 256) -> None:
        """Begin with none.

        top    stays its owner's
        takes  asked of each directory when it is opened, with its path below the top: whether it may be entered
        """
        self._kernel = kernel
        self._top = top
        self._takes = takes
        self._most = most
        self._open: dict[bytes, Fd] = {}  # the last used at the end
        self._lock = threading.Lock()

    def open(self, path: bytes) -> Fd:
        """Open a directory for reading, one component at a time, never through a link or a mount; the caller closes it.

        Raises  OSError: ENOENT or ESTALE if this machine does not see it; EPERM if it may not be entered
        """
        try:
            return self._open_below(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        self.close()  # what is open on the way may be another directory by now
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
        with closed_on_error(fd):
            if not self._takes(fd, path):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
            self.keep(path, Fd(os.dup(fd)))
        return fd

    def keep(self, path: bytes, fd: Fd) -> None:
        """Own a directory that was opened and may be entered, as long as there is room."""
        with self._lock:
            if path in self._open:
                self._open.pop(path).close()
            self._open[path] = fd
            if len(self._open) > self._most:
                self._open.pop(next(iter(self._open))).close()

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


class SentSlice(NamedTuple, Generic[Work]):
    """A slice for a rank. number: no other one that is under way has it"""

    number: int
    work: Work
    budget: SliceBudget


_Threads = WorkerThreads[SentSlice[Any], Any]


class RankRunner(NamedTuple, Generic[Work, Result]):
    """What runs slices in a rank. run: returns None if this rank does not see the directory; strategy: the rank's"""

    run: Callable[[Work, SliceBudget], Result]
    strategy: Strategy

    def run_sent(self, sent: SentSlice[Work], budget: SliceBudget) -> Result:
        """Run a slice, in a thread of the rank."""
        return self.run(sent.work, budget)


OpensRunner = Callable[[Kernel, int], AbstractContextManager[object]]
"""Makes a RankRunner for one of so many ranks, or anything else, if the rank has only to check something; it pickles.
Raises  TrashdError, OSError: the rank does not see what is to be worked on
"""


def least_slice_s(n_running: int) -> float:
    """Seconds that a slice takes at least, so that the first rank keeps up with so many under way."""
    return max(_SLICE_S, _SLICE_S_EACH * n_running)


class SlicesOfRanks(Generic[Work]):
    """Which rank has which slices; of the first rank."""

    def __init__(self, n_slices: Sequence[int]) -> None:
        """n_slices: that each rank runs beside each other"""
        places = sorted((place, rank) for rank, n in enumerate(n_slices) for place in range(n))
        self._ranks = [rank for _place, rank in places]  # the first place of each comes before the second of any
        self._free = deque(range(len(places)))  # the next at the left: ranks take turns, however little there is to do
        self.sent: dict[int, SentSlice[Work]] = {}

    def send(self, work: Work, budget: SliceBudget) -> tuple[int, SentSlice[Work]]:
        """A slice, and the rank that it is for: the one whose turn it is."""
        number = self._free.popleft()
        if not budget.is_paced():
            budget = budget._replace(seconds=max(budget.seconds, least_slice_s(len(self.sent) + 1)))
        sent = self.sent[number] = SentSlice(number, work, budget)
        return self._ranks[number], sent

    def end(self, number: int, outcome: Done | None) -> EndedSlice[Work, Done]:
        """A slice that has ended; its rank has room for another one."""
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
        """Be a rank for the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """End: the first rank ends the others, whatever happened, and unless it is root's receives what they send."""
        if kind is not None and not self.is_first:  # a mistake of ours ends the job, as a lost rank does
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
        """Of each rank, at the first; nothing at the others. As plain numbers: what is pickled can do anything."""
        uids = array("q", [0] * self.n_ranks) if self.is_first else None
        self._comm.Gather(array("q", [os.geteuid()]), uids)
        return [*uids] if uids is not None else []

    def send(self, message: object, rank: int) -> None:
        """Begin to send a message; it is under way as long as messages are received."""
        self._sending.append(self._comm.isend(message, rank))

    def receive(self) -> tuple[int, Any] | None:
        """A message that has arrived, with the rank that sent it."""
        self._settle()
        status = self._mpi.Status()
        message = self._comm.improbe(status=status)
        return None if message is None else (status.Get_source(), message.recv())

    def _settle(self) -> None:
        while self._sending and self._sending[0].Test():
            self._sending.popleft()

    @contextmanager
    def crew(self, ours: RankRunner[Work, Done], opens: OpensRunner) -> Iterator[RankCrew[Work, Done]]:
        """All ranks, ready for slices: this one with its runner, the others with their own. Raises  as prepare"""
        n_slices = self.prepare(opens)
        with worker_threads(ours.strategy.n_workers, ours.run_sent) as threads:
            yield RankCrew(self, ours, threads, [threads.n_workers, *n_slices])

    def prepare(self, opens: OpensRunner) -> list[int]:
        """Have the other ranks make their runners; how many slices each runs. Raises  Refused: one of them can't"""
        answers = dict[int, Any]()
        for rank in range(1, self.n_ranks):
            self.send(opens, rank)
        while len(answers) < self.n_ranks - 1:
            if (received := self.receive()) is not None:
                answers |= [received]
            time.sleep(_POLL_S)
        for rank, answer in sorted(answers.items()):
            if isinstance(answer, str):
                hint = "on the machine of each rank, the volume must be mounted at the same path"
                raise Refused(f"rank {rank}: {answer}", hint)
        return [answers[rank] for rank in sorted(answers)]

    def serve(self, kernel: Kernel) -> int:
        """Run slices until the first rank ends it; the exit code. Ctrl-C is the first rank's."""
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
                elif ended := threads.ended(pause_s):
                    self.send([(sent.number, outcome) for sent, _budget, outcome in ended], 0)
                else:
                    pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
                    continue
                pause_s = _POLL_S
        return 0

    def _open(self, kernel: Kernel, opens: OpensRunner, owned: ExitStack) -> _Threads | None:
        """The rank's threads, if it is to run slices; the first rank gets their number, or why there are none."""
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
    """End the rank, and so the job: a mistake of ours was met in one of its threads."""
    threading.__excepthook__(raised)
    os._exit(Exit.FAILED)


class RankCrew(Generic[Work, Done]):
    """All ranks, ready for slices. See SlicePool."""

    def __init__(self, job: MpiJob, ours: RankRunner[Work, Done], here: _Threads, n_slices: Sequence[int]) -> None:
        self.ours = ours
        self._job = job
        self._here = here
        self._slices = SlicesOfRanks[Work](n_slices)
        self.n_workers = sum(n_slices)
        self.n_ranks = len(n_slices)

    def submit(self, work: Work, budget: SliceBudget) -> None:
        """See SlicePool."""
        rank, sent = self._slices.send(work, budget)
        if rank:
            self._job.send(sent, rank)
        else:
            self._here.submit(sent, sent.budget)

    def ended(self, most_s: float) -> list[EndedSlice[Work, Done]]:
        """See SlicePool. What another rank does not see is run here; what is lost here is lost."""
        until_s, ended = time.monotonic() + most_s, list[EndedSlice[Work, Done]]()
        while True:
            while (received := self._job.receive()) is not None:
                for number, outcome in received[1]:
                    if outcome is None and self._here.n_workers:
                        unseen = self._slices.sent[number]
                        self._here.submit(unseen, unseen.budget)
                    else:
                        ended.append(self._slices.end(number, outcome))
            for sent, _budget, outcome in self._here.ended(0.0 if ended else _POLL_S):
                ended.append(self._slices.end(sent.number, outcome))
            if ended or time.monotonic() >= until_s:
                return ended


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
            "pip install mpi4py into trashd's environment (on a cluster, module load its MPI first); on Debian: apt "
            "install python3-mpi4py, or pip install mpi4py mpich, since the wheel does not find Debian's MPICH"
        )
        raise Refused(f"--mpi needs mpi4py, which can't be loaded ({error})", hint) from error
    job = MpiJob(MPI, MPI.COMM_WORLD)
    told = max((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdecimal()), default=1)
    if job.n_ranks == 1 < told:
        MPI.Finalize()
        library = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        hint = f"mpi4py uses {library}: start the ranks with the mpiexec of that MPI, or with the matching srun --mpi"
        raise Refused(f"{told} ranks were started, but the MPI of mpi4py sees only one", hint)
    return job
