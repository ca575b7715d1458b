"""What bench/mount.py times, part by part: commands on trees that stay, and system calls on a fresh tree each turn."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import names, projects
from bench.listing_scenes import N_PER_ACL, SOMEBODYS
from bench.listing_steps import (
    NO_XATTRS,
    OF_SIZE,
    Course,
    Step,
    Work,
    list_long,
    make_repository,
    mounted,
    take_courses,
    tree_courses,
    twice,
)
from bench.messages import can_count, counted
from bench.operations import (
    AGAIN,
    DATA,
    DATA_DIRECTORY,
    DATA_FILE,
    DATA_MIB,
    FILES,
    LISTING,
    NEW_DATA,
    Operation,
    Worker,
    prepare,
)
from bench.subjects import (
    BEFORE,
    BINDFS,
    CPU,
    DEVICE,
    EXAMPLE,
    HP,
    HP_NO_XATTR,
    HP_URING,
    LL,
    LL_CHECKED,
    MERGERFS,
    NATIVE,
    OURS,
    SINGLE,
    cpu_s,
    traits,
)
from bench.support import make_flat
from tests.support.acls import ACCESS
from tests.support.fuse_watchdog import FuseMount

SHARE_QUICK = SHARE_COUNTED = 0.25
PEERS = (HP_URING, HP, HP_NO_XATTR, LL, LL_CHECKED, BINDFS, MERGERFS, EXAMPLE)
EVERYBODY = (NATIVE, OURS, DEVICE, BEFORE, *PEERS)
"""Who takes part in a mount for all."""
QUICK_ONES = (NATIVE, OURS, DEVICE, HP_URING, HP, BINDFS, MERGERFS)
"""Who does large things in a minute, and says what the others would."""
ALL_CORES, ONE_CORE = "all cores", "one core"
SIZES = (16_000, 100_000)
THIRD = ", a third time"
TREE_STEPS = ("find -newer", "du -s", "git status")
FIO_STEPS = MappingProxyType({"fio randread, 4 KiB": "read", "fio randwrite, 4 KiB": "write"})
_FIO_FILE, _FIO_MIB, _N_IOS, _N_IOS_QUICK = "random", 64, 100_000, 20_000
_DATA_KEPT = (_FIO_FILE, f"{DATA_DIRECTORY}/{DATA_FILE}")
_TURN = "turn"


class Part(NamedTuple):
    """What belongs to one question."""

    make: Callable[[Path, int], None]  # the trees that stay, of n files
    n: int
    n_quick: int
    courses: Callable[[int], Sequence[Course]]
    operations: Sequence[Operation] = ()  # in a fresh tree
    held: Sequence[Operation] = ()  # in those that stay
    kept: tuple[str, ...] = ()  # files of those that stay in memory
    subjects: tuple[str, ...] = EVERYBODY
    turn: Callable[[Work], dict[str, float]] | None = None  # what else is timed
    messages: Callable[[Work, int], Mapping[str, Counter[str]]] | None = None  # of that, for so many of each
    cores: tuple[str, ...] = (ALL_CORES,)
    patience: float = 1.0  # so many times as much as other parts get

    def of(self, share: float) -> "Part":
        """This part with its operations done less often."""
        fewer, held = ([one.of(share) for one in operations] for operations in (self.operations, self.held))
        return self._replace(operations=fewer, held=held)

    def quick(self) -> "Part":
        """This part with less of everything."""
        return self.of(SHARE_QUICK)._replace(n=self.n_quick)

    def counts(self) -> dict[str, dict[str, Any]]:
        """How often an operation is done for the time that a turn has of it, and of what; commands are done once."""
        return {one.name: {"n": one.n, "unit": one.unit} for one in (*self.operations, *self.held)}


def time_turn(part: Part, work: Work) -> dict[str, float]:
    """Seconds of each step, and of the daemon's processor time.

    Raises  Unable
    """
    found = take_courses(part.courses(work.n), work)
    if part.turn:
        found = _together(found, part.turn(work))
    for operations, place in _places(part, work):
        with place as (worker, fuse):
            before_s = cpu_s(fuse)
            found |= {operation.name: worker.do(operation) for operation in operations}
            found[CPU] += cpu_s(fuse) - before_s
    return found


def _together(figures: dict[str, float], also: dict[str, float]) -> dict[str, float]:
    return figures | also | {CPU: figures[CPU] + also[CPU]}


def collect_traits(part: Part, work: Work) -> dict[str, Any]:
    """Return the traits of a subject; and the messages of each operation, if this kernel can count them.

    Raises  Unable
    """
    with mounted(work, work.source) as (path, fuse):
        with contextlib.suppress(PermissionError):  # a mount of one user's
            os.listdir(path)  # it has begun to serve
        found = traits(path, fuse)
    return found | ({"messages": _messages(part, work)} if can_count() else {})


def _messages(part: Part, work: Work) -> dict[str, dict[str, float]]:
    """Of each operation, by opcode, the most frequent first.

    What comes once or twice a pass, however often the operation is done in it, does not count.
    Raises  Unable
    """
    found = {}
    if part.messages:
        n = max(1, round(work.n * SHARE_COUNTED))
        found = {name: _often(messages, n) for name, messages in part.messages(work, n).items()}
    for operations, place in _places(part.of(SHARE_COUNTED), work):
        with place as (worker, fuse):
            if fuse is None:
                return {}
            with counted(int(fuse.connection.name)) as messages:
                for operation in operations:
                    worker.do(operation)
                    found[operation.name] = _often(messages.take(), operation.n, operation.n_passes)
    return found


def _often(messages: Counter[str], n: int, n_passes: int = 1) -> dict[str, float]:
    """For each of n."""
    most = messages.most_common()
    return {opcode: round(count / n_passes / n, 5) for opcode, count in most if count > 2 * n_passes}


Place = contextlib.AbstractContextManager[tuple[Worker, FuseMount | None]]


def _places(part: Part, work: Work) -> Iterator[tuple[Sequence[Operation], Place]]:
    """Operations, and a worker for them in a tree, as a subject shows it. The places raise Unable"""
    if part.operations:
        yield part.operations, _fresh(part.operations, work)
    if part.held:
        yield part.held, _at(work.source, work)


@contextlib.contextmanager
def _fresh(operations: Sequence[Operation], work: Work) -> Iterator[tuple[Worker, FuseMount | None]]:
    tree = work.source.with_name(_TURN)
    prepare(tree, operations)
    try:
        with _at(tree, work) as at_work:
            yield at_work
    finally:
        shutil.rmtree(tree)


@contextlib.contextmanager
def _at(tree: Path, work: Work) -> Iterator[tuple[Worker, FuseMount | None]]:
    """Raises  Unable: also for what fails in the body"""
    with mounted(work, tree) as (path, fuse), Worker(path) as worker:
        yield worker, fuse


def _nothing(_n: int) -> Sequence[Course]:
    return ()


def _make_nothing(source: Path, _n: int) -> None:
    source.mkdir()


def _make_listing(source: Path, n: int) -> None:
    """A directory of each size; of its files a tenth have an ACL."""
    source.mkdir()
    for size in sizes(n):
        directory = source / _of(size)
        make_flat(directory, size)
        for number in range(0, size, N_PER_ACL):
            os.setxattr(directory / f"f{number}", ACCESS, SOMEBODYS)


def sizes(n: int) -> list[int]:
    """Of the directories that are listed, where the largest has so many files."""
    return [size * n // SIZES[-1] for size in SIZES]


def _of(size: int) -> str:
    return f"n{size}"


def _listing_courses(n: int) -> Sequence[Course]:
    """`ls -l` as people type it, and where there are no extended attributes to ask for."""
    smallest, *_ = found = sizes(n)
    no_xattrs = list_long(at=_of(smallest))._replace(name=NO_XATTRS)
    by_size = [twice(list_long(at=_of(size))._replace(name=OF_SIZE.format(f"{size:,}"))) for size in found]
    return [*by_size, twice(no_xattrs, has_xattrs=False)]


def _tree_courses(n: int) -> Sequence[Course]:
    """All on one mount. What counts is the second run; the third one asks nothing that the first has made old."""
    steps = {step.name: step for course in tree_courses(n) for step in course.steps}
    runs = ("", AGAIN, THIRD)
    return [Course(tuple(steps[name]._replace(name=name + run) for name in TREE_STEPS for run in runs))]


def _data_courses(n: int) -> Sequence[Course]:
    """Without fio, none."""
    return [Course(tuple(_fio(name, kind, n) for name, kind in FIO_STEPS.items()))] if shutil.which("fio") else ()


def _make_data(source: Path, _n: int) -> None:
    (source / DATA_DIRECTORY).mkdir(parents=True)
    for path, n_mib in ((source / _FIO_FILE, _FIO_MIB), (source / DATA_DIRECTORY / DATA_FILE, DATA_MIB)):
        with path.open("wb") as file:
            for _ in range(n_mib):
                file.write(os.urandom(1 << 20))


def _fio(name: str, kind: str, n_ios: int) -> Step:
    """Seconds of one of fio's own reads or writes, at random in a file that is open and was read."""
    command = (
        *("fio", "--name=random", f"--rw=rand{kind}", "--bs=4k", "--ioengine=psync", f"--size={_FIO_MIB}m"),
        *(f"--io_size={n_ios * 4}k", "--pre_read=1", "--norandommap", "--gtod_reduce=1", "--output-format=json"),
    )

    def take(path: Path) -> float:
        words = [*command, f"--filename={path / _FIO_FILE}"]
        os.sync()
        done = subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise OSError(errno.EIO, done.stderr.decode(errors="replace").strip(), "fio")
        (job,) = json.loads(done.stdout)["jobs"]
        return 1 / float(job[kind]["iops"])

    return Step(name, _FIO_FILE, take, is_loop=True)


PARTS = MappingProxyType(
    {
        "names": Part(
            *(_make_nothing, 1500, 200, _nothing),
            subjects=(*EVERYBODY, SINGLE),
            turn=names.take_names,
            messages=names.count_names,
            cores=(ALL_CORES, ONE_CORE),
        ),
        "clients": Part(_make_nothing, 2000, 300, _nothing, turn=names.take_clients, patience=2),
        "busy": Part(_make_nothing, 500, 100, _nothing, subjects=QUICK_ONES, turn=names.take_beside_busy, patience=4),
        "listing": Part(_make_listing, SIZES[-1], SIZES[-1] // 20, _listing_courses, LISTING, patience=4),
        "data": Part(_make_data, _N_IOS, _N_IOS_QUICK, _data_courses, (*FILES, *NEW_DATA), DATA, _DATA_KEPT),
        "tree": Part(make_repository, 50_000, 5000, _tree_courses, patience=3),
        "projects": Part(
            *(projects.make, 100_000, 5000, _nothing), subjects=QUICK_ONES, turn=projects.take, patience=8
        ),
    }
)
