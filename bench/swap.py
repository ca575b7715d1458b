"""`trashd swap` as a person waits for it: against its tree's size, the bare interpreter, and rm -rf."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.runner import Bed, Benchmark, Case, Turn
from bench.support import PYTHON, TRASHD, make_tree, only_orphan, time_command, volume
from bench.verdicts import Round, Target, times, times_medians

N_SMALL = 10
N_NAMES = 57_000
MANY = 1_000_000
RECORD_BYTES = 1000

SMALL, BIG, FSYNCS, INTERPRETER = "swap of 10", "swap of all", "two fsyncs", "python3 -c pass"
RM, NAMES, WITH_OPTIONS = "rm -rf", "rm -0 of 57,000 names", "swap with options"

MAX_SIZE_RATIO = 1.2
MAX_INTERPRETERS = 3.2
OPTIONS = ("--json", "--keep-for", "3d", "--note", "a word")
MAX_OPTIONS_RATIO = 1.1
MIN_FASTER_THAN_RM = 200


def time_swap(root: Path, victim: Path, *options: str) -> float:
    """Seconds of a swap, which is then taken back."""
    seconds = time_command([TRASHD, "swap", *options, victim])
    time_command([TRASHD, "restore", "--volume", root, only_orphan(root)])
    return seconds


def time_fsyncs(directory: Path, number: int) -> float:
    """Seconds of the fsyncs that a swap makes: of a new record, and of a directory that got a container."""
    container = directory / str(number)
    container.mkdir()
    record = os.open(container / "record.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(record, b"x" * RECORD_BYTES)
    began = time.perf_counter()
    os.fsync(record)
    seconds = time.perf_counter() - began
    os.close(record)
    container.rename(directory / f"adopted-{number}")
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    began = time.perf_counter()
    os.fsync(above)
    seconds += time.perf_counter() - began
    os.close(above)
    return seconds


def time_names(root: Path, n_names: int) -> float:
    """Seconds of `trashd rm -0` for that many names on its standard input."""
    parent = root / "names"
    parent.mkdir()
    listed = root / "listed"
    with listed.open("wb") as file:
        for number in range(n_names):
            name = parent / f"f{number}"
            name.touch()
            file.write(os.fsencode(name) + b"\0")
    return time_command([TRASHD, "rm", "-0"], stdin=listed)


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A small tree and a large one in a volume."""
    (filesystem,) = case.words
    with volume(filesystem) as root:
        small, big, flushed = root / "small", root / "big", root / "flushed"
        time_command([TRASHD, "init", root])
        make_tree(small, N_SMALL)
        make_tree(big, case.n)
        flushed.mkdir()
        os.sync()
        time_swap(root, small)
        numbers = iter(range(1_000_000))
        turns: dict[str, Turn] = {
            INTERPRETER: lambda: time_command([PYTHON, "-c", "pass"]),
            SMALL: lambda: time_swap(root, small),
            BIG: lambda: time_swap(root, big),
            FSYNCS: lambda: time_fsyncs(flushed, next(numbers)),
            WITH_OPTIONS: lambda: time_swap(root, big, *OPTIONS),
        }
        once: dict[str, Turn] = {RM: lambda: time_command(["rm", "-rf", big])}
        yield Bed(turns, once | {NAMES: lambda: time_names(root, N_NAMES)} if case.n >= MANY else once)


def _interpreters(rounds: Sequence[Round]) -> Sequence[float]:
    return [(one[BIG] - one[FSYNCS]) / one[INTERPRETER] for one in rounds if BIG in one]


def targets(case: Case) -> Sequence[Target]:
    """Whatever the size, in a few bare interpreters, and long before rm."""
    found = [
        Target("10 files against all", times(BIG, SMALL), MAX_SIZE_RATIO),
        Target("bare interpreters, besides the fsyncs", _interpreters, MAX_INTERPRETERS),
        Target("with options, of without", times(WITH_OPTIONS, BIG), MAX_OPTIONS_RATIO),
    ]
    if case.n >= MANY:
        found.append(Target(f"as fast as {RM}", times_medians(RM, BIG), MIN_FASTER_THAN_RM, is_least=True))
    return found


BENCHMARK = Benchmark(
    "swap",
    "trashd swap as a person waits for it: against its tree's size, the bare interpreter, and rm -rf",
    tuple(Case((filesystem,), MANY) for filesystem in ("tmpfs", "ext4", "xfs")),
    tuple(Case((filesystem,), 50_000) for filesystem in ("tmpfs", "ext4")),
    bed,
    targets,
    n_rounds=25,
)
