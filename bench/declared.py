"""The benchmarks of the store: who takes turns, on what, and what is to come out."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench import cost, gap, many, reap, service, swap, sweep, threads
from bench.images import FILESYSTEMS, equal_volumes
from bench.runner import Bed, Benchmark, Case, Turn
from bench.runs import Run
from bench.shapes import SHAPES
from bench.subjects import Unable
from bench.support import PYTHON, TRASHD, make_tree, time_command, volume
from bench.sweeps import JOBS
from bench.targets import OURS, RM, TARGETS
from bench.verdicts import Figure, Round, Target, times, times_best, times_medians, value
from tests.support.shared_volume import ALICE, Shared, shared_volume

_LOOKS = ("list", "first look")
SMALL, BIG, FSYNCS, INTERPRETER = "swap of 10", "swap of all", "two fsyncs", "python3 -c pass"
COLD = "cold"


@contextmanager
def swap_bed(case: Case) -> Iterator[Bed]:
    """A small tree and a large one in a volume."""
    (filesystem,) = case.words
    with volume(filesystem) as root:
        small, big, flushed = root / "small", root / "big", root / "flushed"
        time_command([TRASHD, "init", root])
        make_tree(small, swap.N_SMALL)
        make_tree(big, case.n)
        flushed.mkdir()
        os.sync()
        swap.time_swap(root, small)
        numbers = iter(range(1_000_000))
        turns: dict[str, Turn] = {
            INTERPRETER: lambda: time_command([PYTHON, "-c", "pass"]),
            SMALL: lambda: swap.time_swap(root, small),
            BIG: lambda: swap.time_swap(root, big),
            FSYNCS: lambda: swap.time_fsyncs(flushed, next(numbers)),
            "swap --no-fsync": lambda: swap.time_swap(root, big, "--no-fsync"),
        }
        yield Bed(turns, {RM: lambda: time_command(["rm", "-rf", big])})


def _interpreters(rounds: Sequence[Round]) -> Sequence[float]:
    return [(one[BIG] - one[FSYNCS]) / one[INTERPRETER] for one in rounds if BIG in one]


def swap_targets(case: Case) -> Sequence[Target]:
    """Whatever the size, in a few bare interpreters, and long before rm."""
    found = [
        Target("10 files against all", times(BIG, SMALL), swap.MAX_SIZE_RATIO),
        Target("bare interpreters, besides the fsyncs", _interpreters, swap.MAX_INTERPRETERS),
    ]
    if case.n >= 1_000_000:
        found.append(Target(f"as fast as {RM}", times_medians(RM, BIG), swap.MIN_FASTER_THAN_RM, is_least=True))
    return found


@contextmanager
def reap_bed(case: Case) -> Iterator[Bed]:
    """A tree of one shape, on a copy of the same image for each turn."""
    filesystem, name, *cold = case.words
    shape = SHAPES[name]
    n_inodes = case.n + case.n // 10 + 5000

    def turn(subject: str) -> dict[str, float]:
        try:
            seconds, synced = reap.take_turn(subject, fresh, cold=bool(cold))
        except reap.Unable as error:
            raise Unable(error.kind, error.told) from error
        return {"": seconds, "synced": synced}

    with equal_volumes(filesystem, shape.size_mb, n_inodes, reap.filler(shape.make, case.n)) as fresh:
        yield Bed({subject: partial(turn, subject) for subject in reap.SUBJECTS})


def reap_targets(case: Case) -> Sequence[Target]:
    """Those of this filesystem and shape."""
    filesystem, shape, *cold = case.words
    rivals = [name for name in reap.SUBJECTS if name != OURS]
    return [
        Target(
            f"of {one.rival or 'the best rival'}",
            times(OURS, one.rival) if one.rival else times_best(OURS, rivals),
            one.limit,
        )
        for one in TARGETS
        if one.applies(filesystem, shape, bool(cold))
    ]


@contextmanager
def sweep_bed(case: Case) -> Iterator[Bed]:
    """What there is to be swept, on a copy of the same image for each turn."""
    filesystem, name, *cold = case.words
    job = JOBS[name]
    n_inodes = case.n + case.n // 10 + 5000

    def first() -> float:
        return sweep.until_first(job, fresh, cold=bool(cold))

    with equal_volumes(filesystem, sweep.SIZE_MB, n_inodes, lambda root: job.make(root, case.n)) as fresh:
        turns: dict[str, Turn] = {
            subject: partial(sweep.take_turn, subject, job, case.n, fresh, cold=bool(cold)) for subject in job.run
        }
        yield Bed(turns | {"the first": first})


def sweep_targets(case: Case) -> Sequence[Target]:
    """Those of the job, and that it begins soon."""
    filesystem, name, *_ = case.words
    job = JOBS[name]
    rivals = [subject for subject in job.run if subject != OURS]
    found = [
        Target(
            f"of {limit.rival or 'the best rival'}",
            times(OURS, limit.rival) if limit.rival else times_best(OURS, rivals),
            limit.times,
        )
        for limit in job.limits
        if (limit.on_ext4 if filesystem == "ext4" else limit.elsewhere)
    ]
    return [*found, Target("until the first is gone", value("the first"), sweep.MAX_FIRST_S, unit=" s")]


@contextmanager
def many_bed(case: Case) -> Iterator[Bed]:
    """A store with next to nothing in it, and one with very much."""
    (what,) = case.words
    options = ("size=2g", "nr_inodes=0")
    with shared_volume(*options) as plain, shared_volume(*options) as full:
        if what == "planted":
            many.plant(full, case.n)
        else:
            many.fill(full, ALICE, case.n)
        stores = {"plain": plain, what: full}
        turns: dict[str, Turn] = {f"list, {name}": partial(many.list_s, one, 1) for name, one in stores.items()}
        yield Bed(turns | {f"first look, {name}": partial(_look, one) for name, one in stores.items()})


def _look(store: Shared) -> dict[str, float]:
    seconds, kib = many.look(store)
    return {"": seconds, "MiB": kib / 1024}


def many_targets(case: Case) -> Sequence[Target]:
    """Who plants names delays nobody by more than a second."""
    if case.words != ("planted",):
        return []
    return [Target(f"{who}, more", _more(f"{who}, planted", f"{who}, plain"), 1, unit=" s") for who in _LOOKS]


def _more(key: str, than: str) -> Figure:
    return lambda rounds: [one[key] - one[than] for one in rounds if key in one and than in one]


def _cases(filesystems: Sequence[str], name: str, n: int, *, is_also_cold: bool = True) -> Iterator[Case]:
    """Of each filesystem, with what is in memory and what is not."""
    for filesystem in filesystems:
        yield Case((filesystem, name), n)
        if is_also_cold and filesystem != "tmpfs":
            yield Case((filesystem, name, COLD), n)


_REAPS = tuple(
    case
    for shape in SHAPES.values()
    for case in _cases(FILESYSTEMS, shape.name, shape.n_files)
    if shape.name != "large" or case.words[0] != "tmpfs"
)
_SWEEPS = tuple(case for name, job in JOBS.items() for case in _cases(FILESYSTEMS, name, job.n_files))

BENCHMARKS = (
    Benchmark(
        "swap",
        "trashd swap as a person waits for it: against its tree's size, the bare interpreter, and rm -rf",
        tuple(Case((filesystem,), 1_000_000) for filesystem in ("tmpfs", "ext4", "xfs")),
        tuple(Case((filesystem,), 50_000) for filesystem in ("tmpfs", "ext4")),
        swap_bed,
        swap_targets,
        n_rounds=25,
    ),
    Benchmark(
        "reap",
        "trashd reap beside every other way to delete a tree; all on copies of one image",
        _REAPS,
        (Case(("ext4", "tree"), 30_000), Case(("ext4", "flat-400k"), 40_000), Case(("xfs", "tree"), 30_000)),
        reap_bed,
        reap_targets,
        n_rounds=6,
    ),
    Benchmark(
        "sweep",
        "trashd sweep beside find, xargs, rm and mv",
        _SWEEPS,
        (
            *(Case(("ext4", name), 20_000) for name in ("name", "size", "age", "move")),
            Case(("tmpfs", "size"), 20_000),
        ),
        sweep_bed,
        sweep_targets,
        n_rounds=6,
    ),
    Benchmark(
        "many",
        "what names that somebody planted, or very many orphans, cost who looks at a store",
        (Case(("planted",), 10_000), Case(("orphans",), 100_000)),
        (Case(("planted",), 3000), Case(("orphans",), 3000)),
        many_bed,
        many_targets,
        n_rounds=3,
    ),
    cost.BENCHMARK,
    gap.BENCHMARK,
    threads.BENCHMARK,
    service.BENCHMARK,
)


def rivals_on_path() -> None:
    """Let rivals be found that are not where programs are: rmz, by cargo install --root."""
    if Path(reap.RIVALS_BIN).is_dir():
        os.environ["PATH"] += os.pathsep + reap.RIVALS_BIN


def targets_of(run: Run) -> Sequence[Target]:
    """Those of a run's case; none of a benchmark that is gone."""
    case = Case(tuple(run.case.split()), run.n)
    return next((one.targets(case) for one in BENCHMARKS if one.name == run.benchmark), ())
