"""One tree by one machine's threads, and by the ranks of an MPI job, each on a mount of its own.

All is on this machine: several FUSE mounts of one tmpfs, each of whose answers takes 1 or 10 ms
(tests/support/slowfs.c). So these are figures of the protocol's overhead, and none says that more machines are faster.

machine  one mount: `trashd reap` beside rmz and rm, whole commands
ranks    1 to 16 ranks, each with a mount and as much to do: what of its rate one rank keeps beside others. The removal
         alone is timed, without the start of the job; beside it stand processor time, and the part of their time that
         threads had a slice. For one thread a rank two cores are enough at 16: what is left is the protocol's. For four
         they may not be.
flat     one directory, by four ranks beside unlinks in C through the same four mounts (bench/bare_unlinks.c)
plan     the first rank's processor time for a slice: by MPI, where nothing is done in slices; and without, for up to
         1,000 ranks of 16 threads
drm      `trashd reap --mpi` beside drm of mpiFileUtils, which has no threads, on four mounts, whole jobs. drm is looked
         for in /opt/rivals/mpifileutils/bin; it must be built by the MPI of this environment

    python -m bench nodes
    python -m bench nodes --only ranks --only 1thread
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench import reap
from bench.nodes_rank import plan_alone
from bench.runner import Bed, Benchmark, Case, Turn
from bench.subjects import Unable
from bench.support import PYTHON, TRASHD, make_files, program, time_command
from bench.verdicts import Figure, Round, Target, times, times_best
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.mpi_jobs import give_to_user, is_gone, start_job, store_of_user, swap_by_user, why_no_mpi
from tests.support.proc_stat import stat_of
from tests.support.real_filesystems import tmpfs_volume

MPI = "mpich"
"""The one whose launcher tells a rank its number before MPI is there: it chooses the mount by it."""
RANKS = (1, 2, 4, 8, 16)
N_MOUNTS, THREADS = 4, 4
"""Of a flat directory, and beside drm."""
DRM = Path("/opt/rivals/mpifileutils/bin/drm")
PER_DIRECTORY = 50
WORKERS = (64, 1024, 16_000)
"""Of a plan; the last is 1,000 ranks of 16 threads."""
N_PLANNED = 8
SLICES = f"slices of {N_PLANNED} ranks"
LEAST_KEPT = 0.9
_MOST_PLANNING_MS = 0.4
_OF_RIVALS = ((reap.RMZ, 1.0), (reap.RM, 0.2))
VICTIM = reap.VICTIM
Command = Sequence[str | Path]
MakesTree = Callable[[Path, int], None]
_LIMIT_S = 3600.0


class Mounts(NamedTuple):
    """Mounts of one tmpfs, each as another machine has it."""

    source: Path
    each: Sequence[SlowVolume]

    @property
    def at(self) -> Path:
        """Where every rank sees its own."""
        return self.each[0].path

    def slow(self, ms: float) -> None:
        """Let each call take so long."""
        for one in self.each:
            one.delay(round(ms * 1e3))
            one.delay_all()

    def daemons_s(self) -> float:
        """Seconds of processor time of those that serve them."""
        ticks = sum(int(found) for one in self.each for found in stat_of(one.fuse.pid)[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    def orphan(self) -> str:
        """The id of what becomes of the tree. Its files are given away below: a mount has each open that it knows."""
        give_to_user(self.source / VICTIM)
        return swap_by_user(self.at / VICTIM)

    def start(self, n_ranks: int, command: Command) -> str:
        """What a job's ranks say, one on each mount in turn. Raises  Unable: it failed"""
        done = start_job(MPI, n_ranks, command, nodes=[one.path for one in self.each], at=self.at).wait(_LIMIT_S)
        if done.code:
            raise Unable("failed", f"exit code {done.code}: {' '.join(done.err.split())[:300]}")
        return done.out


@contextmanager
def mounts(n: int) -> Iterator[Mounts]:
    """So many; a store of a user's is on what they show."""
    with ExitStack() as owned:
        source = owned.enter_context(tmpfs_volume("2g", ["nr_inodes=1000000"]))
        made = Mounts(source, [owned.enter_context(slow_volume(source, 0, limit_s=_LIMIT_S)) for _ in range(n)])
        store_of_user(source)
        yield made
        made.slow(0)


def make_small(path: Path, n_files: int) -> None:
    """Directories of fifty files."""
    path.mkdir()
    for number in range(-(-n_files // PER_DIRECTORY)):
        (path / str(number)).mkdir()
        make_files(path / str(number), min(PER_DIRECTORY, n_files - number * PER_DIRECTORY))


def make_one(path: Path, n_files: int) -> None:
    """One directory."""
    path.mkdir()
    make_files(path, n_files)


def _delay_of(case: Case) -> float:
    return float(next(word for word in case.words if word.endswith("ms")).removesuffix("ms"))


# One machine.


def by_machine(name: str, n_files: int, ms: float) -> float:
    """Seconds of a command on one mount. Raises  Unable"""
    with tmpfs_volume("1g") as source, slow_volume(source, 0, limit_s=_LIMIT_S) as slow:
        time_command([TRASHD, "init", slow.path])
        make_small(source / VICTIM, n_files)
        command = reap.SUBJECTS[name](slow.path)
        slow.delay(round(ms * 1e3))
        slow.delay_all()
        seconds = reap.attempt(command)
        slow.delay(0)
        reap.refuse_remains(slow.path)
    return seconds


def _machine(case: Case) -> Bed:
    names = (reap.OURS, reap.RMZ, reap.RM)
    return Bed({name: partial(by_machine, name, case.n, _delay_of(case)) for name in names})


# Ranks.


def by_ranks(make: MakesTree, n_files: int, n_ranks: int, n_threads: int, ms: float) -> dict[str, float]:
    """A removal by ranks, each on a mount of its own. Raises  Unable"""
    if why := why_no_mpi(MPI):
        raise Unable("missing", why)
    with mounts(n_ranks) as made:
        make(made.source / VICTIM, n_files)
        identifier = made.orphan()
        made.slow(ms)
        before_s = made.daemons_s()
        output = made.start(n_ranks, [*_RANK, "reap", made.at, identifier, str(n_threads)])
        daemons_s = made.daemons_s() - before_s
        if not is_gone(made.source, identifier):
            raise Unable("failed", f"left {identifier}")
    first, used_s = _parse_output(output)
    all_s = used_s + daemons_s
    return {
        "": first["seconds"],
        "ms of processors an entry": 1e3 * all_s / first["removed"],
        "processors": all_s / first["seconds"],
        "threads at work": first["busy_s"] / (first["seconds"] * n_ranks * n_threads),
        "ms a slice": 1e3 * first["busy_s"] / first["n_slices"],
    }


_RANK = (PYTHON, "-m", "bench.nodes_rank")


def _parse_output(output: str) -> tuple[dict[str, float], float]:
    """Return the figures that the first rank wrote, and the processor time of all ranks."""
    lines = [json.loads(line) for line in output.splitlines()]
    (first,) = [line for line in lines if "seconds" in line]
    return first, sum(line["used_s"] for line in lines)


def _ranks_called(n: int) -> str:
    return f"{n} ranks" if n > 1 else "one rank"


def _ranks(case: Case) -> Bed:
    """n: files a rank"""
    n_threads = int(next(word for word in case.words if "thread" in word)[0])
    return Bed(
        {_ranks_called(n): partial(by_ranks, make_small, n * case.n, n, n_threads, _delay_of(case)) for n in RANKS}
    )


def _keeps(n: int) -> Target:
    """Of its rate alone, a rank beside others; each has as much to do."""
    return Target(
        f"{n} x one rank's rate, kept by {n} ranks", times(_ranks_called(1), _ranks_called(n)), LEAST_KEPT, True
    )


# A flat directory.


def in_c(n_workers: int, n_files: int, ms: float) -> float:
    """Seconds of bare unlinks by so many processes on each mount."""
    with mounts(N_MOUNTS) as made:
        make_one(made.source / VICTIM, n_files)
        made.slow(ms)
        return unlink_in_c(made, n_workers, n_files)


def unlink_in_c(made: Mounts, n_workers: int, n_files: int) -> float:
    """Seconds of it."""
    bare = program(Path(__file__).with_name("bare_unlinks.c"))
    paths = [one.path / VICTIM for one in made.each]
    return time_command([bare, str(n_workers), str(n_files), *paths], timeout_s=_LIMIT_S)


def _in_c_called(n_workers: int) -> str:
    return f"C, {n_workers} a mount"


IN_C = (1, THREADS, 4 * THREADS)


def _flat(case: Case) -> Bed:
    ours: Turn = partial(by_ranks, make_one, case.n, N_MOUNTS, THREADS, _delay_of(case))
    return Bed({reap.OURS: ours} | {_in_c_called(n): partial(in_c, n, case.n, _delay_of(case)) for n in IN_C})


# The plan.


def by_mpi(n_ranks: int, n_slices: int) -> dict[str, float]:
    """Seconds of the first rank's processor for a slice, where slices take no time. Raises  Unable"""
    if why := why_no_mpi(MPI):
        raise Unable("missing", why)
    done = start_job(MPI, n_ranks, [*_RANK, "plan", str(n_slices)]).wait(_LIMIT_S)
    if done.code:
        raise Unable("failed", done.err)
    first, _used_s = _parse_output(done.out)
    return {"": first["plan_s"] / first["n_slices"], "slices a second": first["n_slices"] / first["seconds"]}


def _workers_called(n: int) -> str:
    return f"plan of {n:,} workers"


def _plan(case: Case) -> Bed:
    alone: dict[str, Turn] = {_workers_called(n): partial(plan_alone, n, case.n) for n in WORKERS}
    return Bed(alone | {SLICES: partial(by_mpi, N_PLANNED, case.n)})


def _with_many() -> Figure:
    """Of a slice by MPI, and what the largest plan takes more than one for as many workers as were there."""

    def figure(rounds: Sequence[Round]) -> Sequence[float]:
        least, most = _workers_called(WORKERS[0]), _workers_called(WORKERS[-1])
        return [1e3 * (one[SLICES] + max(0.0, one[most] - one[least])) for one in rounds if SLICES in one]

    return figure


# Beside drm.


def whole_job(command: Callable[[Mounts], Command], n_ranks: int, n_files: int, ms: float) -> float:
    """Seconds of a job from start to exit. Raises  Unable"""
    if why := why_no_mpi(MPI):
        raise Unable("missing", why)
    with mounts(N_MOUNTS) as made:
        make_small(made.source / VICTIM, n_files)
        words = command(made)
        made.slow(ms)
        began_s = time.perf_counter()
        made.start(n_ranks, words)
        seconds = time.perf_counter() - began_s
        made.slow(0)
        reap.refuse_remains(made.source)
    return seconds


def reap_job(made: Mounts) -> Command:
    """What is to reap it."""
    identifier = made.orphan()
    words = ("reap", "--mpi", "--now", "--threads", str(THREADS), "--volume", made.at, identifier)
    return [PYTHON, "-m", "fusefs.cli.main", *words]


def drm_job(made: Mounts) -> Command:
    """What is to delete it. Raises  Unable"""
    if not DRM.exists():
        raise Unable("missing", str(DRM))
    give_to_user(made.source / VICTIM)
    return [DRM, "--lite", "--quiet", made.at / VICTIM]


def _drm_called(n_ranks: int) -> str:
    return f"drm, {n_ranks} ranks"


def _drm(case: Case) -> Bed:
    ms, n_drm = _delay_of(case), (N_MOUNTS, N_MOUNTS * THREADS)
    ours: Turn = partial(whole_job, reap_job, N_MOUNTS, case.n, ms)
    return Bed({reap.OURS: ours} | {_drm_called(n): partial(whole_job, drm_job, n, case.n, ms) for n in n_drm})


_KINDS = MappingProxyType[str, Callable[[Case], Bed]](
    {"machine": _machine, "ranks": _ranks, "flat": _flat, "plan": _plan, "drm": _drm}
)


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """Each turn makes what it needs."""
    yield _KINDS[case.words[0]](case)


def targets(case: Case) -> Sequence[Target]:
    """Of each kind."""
    match case.words[0]:
        case "machine":
            found = [Target(f"of {name}", times(reap.OURS, name), limit) for name, limit in _OF_RIVALS]
        case "ranks":
            found = [_keeps(n) for n in RANKS[1:]]
        case "flat":
            found = [Target("of unlinks in C", times_best(reap.OURS, [_in_c_called(n) for n in IN_C]), 1.25)]
        case "plan":
            found = [Target("a slice of 1,000 ranks' 16 threads", _with_many(), _MOST_PLANNING_MS, unit=" ms")]
        case _:
            found = [Target(f"of {_drm_called(n)}", times(reap.OURS, _drm_called(n)), 1) for n in (4, 16)]
    return found


BENCHMARK = Benchmark(
    "nodes",
    "one tree by one machine's threads and by the ranks of an MPI job, on servers each of whose answers takes its time",
    (
        Case(("machine", "1ms"), 6000),
        Case(("ranks", "10ms", "1thread"), 250),
        Case(("ranks", "10ms", "4threads"), 1000),
        Case(("flat", "1ms"), 100_000),
        Case(("plan",), 5000),
        Case(("drm", "10ms"), 8000),
    ),
    (Case(("machine", "1ms"), 600), Case(("plan",), 500)),
    bed,
    targets,
    n_rounds=3,
)
