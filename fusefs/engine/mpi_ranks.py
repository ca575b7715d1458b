"""Slices run by the ranks of an MPI job: threads within a rank, ranks on as many machines as mpiexec was given.

The first rank has the plan, and runs slices too; the others run what they are sent, each on its own mount. A slice goes
there by its path, without fds. Only one thread of a rank calls MPI, and none waits in it: any MPI will do, and a rank
that waits costs no processor. A rank that is lost ends the job, as MPI has it (docs/decisions/0051-mpi.md).
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue  # SimpleQueue may take a timeout that has just passed for none, and wait for ever
from typing import Any, Generic, NamedTuple, Self, TypeVar

from fusefs.core.errors import Exit, Refused, TrashdError, from_os
from fusefs.core.names import join
from fusefs.core.pacing import SliceBudget
from fusefs.engine.run_slices import Done, EndedSlice, RankRunner, Recipe, SharedSlice, SharesSlices, Work
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.8
"""Between two looks: each is twice as long as the one before."""
T = TypeVar("T")


def seen_in_time(look: Callable[[], T], most_s: float, *unseen: type[Exception]) -> T:
    """What a look finds, which is had again as long as it is not seen; the last one is after most_s at the earliest.

    unseen  what a look raises then
    Raises  what the last look does; anything else at once
    """
    ends_s, pause_s = time.monotonic() + most_s, _PAUSE_S
    while True:
        try:
            return look()
        except unseen:
            if time.monotonic() >= ends_s:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_MOST_OPEN = 256
_PATIENCE_S = 1.5
"""How long a name is looked for that another machine has just made: caches of names last a second, mostly."""
_UNSEEN = (errno.ENOENT, errno.ESTALE)


class DirectoriesByPath:
    """The open directories below one; in any thread."""

    def __init__(self, kernel: Kernel, top: Fd, takes: Callable[[Fd, bytes], bool], most: int = _MOST_OPEN) -> None:
        """Have none open.

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
        """A directory, readable, for the caller to close.

        Raises  OSError: ENOENT if it is not seen here, after some patience; EPERM if it may not be entered
        """
        return seen_in_time(lambda: self._look(path), _PATIENCE_S, FileNotFoundError)

    def _look(self, path: bytes) -> Fd:
        try:
            return self._find(path)
        except OSError as error:
            if error.errno not in _UNSEEN:
                raise
            self._forget(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error

    def keep(self, path: bytes, fd: Fd) -> None:
        """Own a directory that was opened and asked for, as long as there is room."""
        with self._lock:
            before = self._open.pop(path, None)
            self._open[path] = fd
            dropped = [] if before is None else [before]
            while len(self._open) > self._most:
                dropped.append(self._open.pop(next(iter(self._open))))
        for one in dropped:
            one.close()

    def close(self) -> None:
        """Close all that is open."""
        with self._lock:
            dropped = [*self._open.values()]
            self._open.clear()
        for one in dropped:
            one.close()

    def _find(self, path: bytes) -> Fd:
        at, fd = self._nearest(path)
        try:
            for name in path[len(at) :].strip(b"/").split(b"/") if at != path else ():
                inner, at = self._kernel.open_dir(fd, name), join(at, name)
                fd.close()
                fd = inner
                if not self._takes(fd, at):
                    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), at)
                self.keep(at, Fd(os.dup(fd)))
        except BaseException:
            fd.close()
            raise
        return fd

    def _nearest(self, path: bytes) -> tuple[bytes, Fd]:
        """The longest part of a path that is open, and a new fd for that."""
        with self._lock:
            at = path
            while at and at not in self._open:
                at = at.rpartition(b"/")[0]
            if not at:
                return b"", Fd(os.dup(self._top))
            fd = self._open.pop(at)
            self._open[at] = fd
            return at, Fd(os.dup(fd))

    def _forget(self, path: bytes) -> None:
        """Close what is open on the way: it may be another directory by now."""
        with self._lock:
            on_way = [at for at in self._open if path == at or path.startswith(at + b"/")]
            dropped = [self._open.pop(at) for at in on_way]
        for one in dropped:
            one.close()


_SLICE_S = 0.25
"""Of a slice, at least: beside that its messages, and its directory opened anew, cost little. With 50 ms 16 ranks of 4
threads on a server of 10 ms a call had half the rate on two cores (measured: bench/nodes.py).
"""
PLANNING_S = 0.0004
"""Of the first rank for a slice, about twice: slices are as much longer as there are workers, so that it keeps up."""


class UnseenHere(Exception):
    """A rank does not find a directory on its mount: the first rank is to look."""


class GivenSlice(NamedTuple, Generic[Work]):
    """A slice for a rank; or a part of it for one of its threads, which has its number. is_shared: by all threads"""

    number: int
    work: Work
    budget: SliceBudget
    is_shared: bool = False


class LeftSlice(NamedTuple):
    """What is left of a slice is wanted, soon."""

    number: int


class ToldSlice(NamedTuple, Generic[Done]):
    """What a rank says of a slice.

    outcome    of what was done since it was told of last, perhaps not to its end
    is_unseen  nothing was done: the rank does not see the directory
    problem    it ended by a mistake of ours
    lacks      half of the rank's threads have nothing to do
    """

    number: int
    outcome: Done | None = None
    is_unseen: bool = False
    problem: str = ""
    lacks: bool = False


def least_slice_s(n_workers: int) -> float:
    """Seconds that a slice takes at least, so that the first rank keeps up with so many workers."""
    return max(_SLICE_S, PLANNING_S * n_workers)


class SlicesOfRanks(Generic[Work, Done]):
    """Which rank has which slices; of the first."""

    def __init__(self, n_slices: Sequence[int], may_share: Callable[[Work], bool]) -> None:
        """None has any.

        n_slices   that each may have
        may_share  whether all threads of a rank may be at a slice
        """
        self._most = n_slices
        self._may_share = may_share
        self._least_s = least_slice_s(sum(n_slices))
        self._n_had = [0] * len(n_slices)
        self._having = [dict.fromkeys(range(len(n_slices))), *({} for _ in range(max(n_slices) - 1))]
        """Ranks by how many they have, those without room left out."""
        self._lacking = dict.fromkeys(range(len(n_slices)))
        self._given: dict[int, tuple[int, GivenSlice[Work]]] = {}
        self._n_given = 0
        self._begun_s: dict[int, float] = {}
        """Of shared slices that were not asked for: since when they are given, the oldest first."""
        self._asked = set[int]()

    def give(self, work: Work, budget: SliceBudget, now_s: float) -> tuple[int, GivenSlice[Work]]:
        """A slice, and which rank it is for: one of those that have the fewest.

        So those that share a directory are on as many machines as there are.
        """
        rank = next(rank for ranks in self._having for rank in ranks)
        self._has(rank, self._n_had[rank] + 1)
        self._lacking.pop(rank, None)
        if not budget.is_paced():
            least_s = _SLICE_S if self._lacking else self._least_s
            budget = budget._replace(seconds=max(budget.seconds, least_s))
        given = GivenSlice(self._n_given, work, budget, not budget.is_paced() and self._may_share(work))
        self._n_given += 1
        self._given[given.number] = rank, given
        if given.is_shared:
            self._begun_s[given.number] = now_s
        return rank, given

    def rank_of(self, number: int) -> int:
        """Which one has a slice."""
        return self._given[number][0]

    def unseen(self, told: ToldSlice[Done], now_s: float) -> GivenSlice[Work]:
        """A slice that its rank does not see, which is the first rank's now."""
        rank, given = self._given[told.number]
        self._has(rank, self._n_had[rank] - 1)
        self._hear(rank, lacks=told.lacks)
        self._has(0, self._n_had[0] + 1)
        self._given[given.number] = 0, given
        if given.is_shared:
            self._asked.discard(given.number)
            self._begun_s.pop(given.number, None)
            self._begun_s[given.number] = now_s
        return given

    def told(self, told: ToldSlice[Done]) -> EndedSlice[Work, Done]:
        """Take in what a rank did of a slice."""
        rank, given = self._given[told.number]
        if told.outcome is None or not told.outcome.goes_on:
            del self._given[told.number]
            self._begun_s.pop(told.number, None)
            self._asked.discard(told.number)
            self._has(rank, self._n_had[rank] - 1)
        self._hear(rank, lacks=told.lacks)
        return EndedSlice(given.work, given.budget, told.outcome)

    def _hear(self, rank: int, *, lacks: bool) -> None:
        if lacks or not self._n_had[rank]:
            self._lacking[rank] = None
        else:
            self._lacking.pop(rank, None)

    def _has(self, rank: int, n: int) -> None:
        if self._n_had[rank] < self._most[rank]:
            del self._having[self._n_had[rank]][rank]
        if n < self._most[rank]:
            self._having[n][rank] = None
        self._n_had[rank] = n

    def to_be_left(self, now_s: float, *, each: bool) -> list[tuple[int, LeftSlice]]:
        """Slices of which the rest is wanted, each with its rank: as many as there are ranks that lack work.

        The oldest of those that are shared, once they were worked at for a slice's time: told of or not, as with many
        ranks one is told of seldom.

        each  all of them: it is to stop
        """
        n = len(self._begun_s) if each else len(self._lacking) - len(self._asked)
        found = list[int]()
        for number, begun_s in self._begun_s.items():
            if len(found) >= n or not (each or now_s - begun_s >= _SLICE_S):
                break
            found.append(number)
        for number in found:
            del self._begun_s[number]
        self._asked.update(found)
        return [(self.rank_of(number), LeftSlice(number)) for number in found]


@dataclass(slots=True)
class _Shared(Generic[Work, Done]):
    """A slice that a rank's threads share.

    tells_s    when it is told of next
    is_left    no more of it is begun: what is left goes back
    is_unseen  a thread did not find its directory
    """

    given: GivenSlice[Work]
    plan: SharedSlice[Work, Done]
    tells_s: float
    is_left: bool = False
    is_unseen: bool = False
    has_begun: bool = False
    n_running: int = 0


class SlicesOfThreads(Generic[Work, Done]):
    """What each thread of a rank does next, and what the first rank is to be told."""

    def __init__(self, rank: SharesSlices[Work, Done]) -> None:
        """There is nothing to do."""
        self._rank = rank
        self._n_threads = rank.strategy.n_workers
        self._n_running = 0
        self._alone = deque[GivenSlice[Work]]()
        self._shared: dict[int, _Shared[Work, Done]] = {}
        self._told = list[ToldSlice[Done]]()

    def is_busy(self) -> bool:
        """Whether each thread has something to do."""
        return self._n_running == self._n_threads

    def take(self, message: GivenSlice[Work] | LeftSlice, now_s: float) -> None:
        """What the first rank says: a slice, or to end one soon, unless it is over."""
        if isinstance(message, LeftSlice):
            shared = self._shared.get(message.number)
            if shared is not None:
                shared.is_left = True
                self._look(shared, now_s)
        elif message.is_shared:
            plan = self._rank.shared(message.work)
            self._shared[message.number] = _Shared(message, plan, now_s + message.budget.seconds)
        else:
            self._alone.append(message)

    def next(self) -> GivenSlice[Work] | None:
        """Something for a thread; None if there is nothing at the moment, or no thread."""
        if self.is_busy():
            return None
        found = self._alone.popleft() if self._alone else self._part()
        self._n_running += found is not None
        return found

    def _part(self) -> GivenSlice[Work] | None:
        """Of the oldest slice; where others are at the same directory only if there is nothing else in any."""
        for may_crowd in (False, True):
            for number, shared in self._shared.items():
                if shared.is_left or (shared.plan.is_crowded() and not may_crowd):
                    continue
                if (work := shared.plan.next()) is not None:
                    shared.n_running += 1
                    return GivenSlice(number, work, SliceBudget(_SLICE_S))
        return None

    def done(self, part: GivenSlice[Work], outcome: Done, now_s: float) -> None:
        """A thread did that."""
        self._n_running -= 1
        shared = self._shared.get(part.number)
        if shared is None:
            self._told.append(ToldSlice(part.number, outcome))
            return
        shared.n_running -= 1
        shared.has_begun = True
        shared.plan.done(part.work, outcome)
        self._look(shared, now_s)

    def failed(self, part: GivenSlice[Work], error: BaseException, now_s: float) -> None:
        """A thread did nothing."""
        self._n_running -= 1
        shared = self._shared.get(part.number)
        if not isinstance(error, UnseenHere):
            self._told.append(ToldSlice(part.number, problem=repr(error)))
        elif shared is None:
            self._told.append(ToldSlice(part.number, is_unseen=True))
        else:
            # Of a part that is seen by nobody the first rank is told when that is all of a slice, which it will be.
            shared.n_running -= 1
            shared.plan.lost(part.work)
            shared.is_left = shared.is_unseen = True
            self._look(shared, now_s)

    def _look(self, shared: _Shared[Work, Done], now_s: float) -> None:
        """Tell of a shared slice if it is over, or if it is time to."""
        number, is_over = shared.given.number, not shared.n_running and (shared.is_left or shared.plan.is_dry())
        if is_over:
            del self._shared[number]
        elif now_s < shared.tells_s:
            return
        shared.tells_s = now_s + shared.given.budget.seconds
        is_unseen = is_over and shared.is_unseen and not shared.has_begun
        outcome = None if is_unseen else shared.plan.told(goes_on=not is_over)
        self._told.append(ToldSlice(number, outcome, is_unseen))

    def told(self) -> list[ToldSlice[Done]]:
        """What there is to tell; asked when threads have what they can have."""
        if not self._told:
            return []
        told, self._told = self._told, []
        lacks = 2 * self._n_running <= self._n_threads
        return [one._replace(lacks=lacks) for one in told]


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
