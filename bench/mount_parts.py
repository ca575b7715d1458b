"""What bench/mount.py times, part by part: commands on trees that stay, and system calls on a fresh tree each turn."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.listing_steps import (
    FLAT,
    LIMIT_S,
    NO_XATTRS,
    Course,
    Step,
    Work,
    list_long,
    make_repository,
    take_courses,
    tree_courses,
    twice,
)
from bench.messages import counted
from bench.operations import (
    AGAIN,
    CHANGES,
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
from bench.subjects import CPU, EXAMPLE, HP, LL, NATIVE, OURS, SINGLE, USER, Unable, all_subjects, cpu_s, served
from bench.support import make_flat
from tests.support.fuse_watchdog import FuseMount

SHARE_QUICK = SHARE_COUNTED = 0.25
PEERS = (NATIVE, OURS, HP, LL, "bindfs", "mergerfs", EXAMPLE)
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
    subjects: tuple[str, ...] = PEERS

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
    for operations, place in _places(part, work):
        with place as (worker, fuse):
            before_s = cpu_s(fuse)
            found |= {operation.name: worker.do(operation) for operation in operations}
            found[CPU] += cpu_s(fuse) - before_s
    return found


def count_turn(part: Part, work: Work) -> dict[str, dict[str, float]]:
    """The messages that each operation takes, by opcode, the most frequent first.

    What comes once or twice a pass, however often the operation is done in it, does not count.
    Raises  Unable
    """
    found = {}
    for operations, place in _places(part.of(SHARE_COUNTED), work):
        with place as (worker, fuse):
            if fuse is None:
                return {}
            with counted(int(fuse.connection.name)) as messages:
                for operation in operations:
                    worker.do(operation)
                    found[operation.name] = {
                        opcode: round(count / operation.n_passes / operation.n, 5)
                        for opcode, count in messages.take().most_common()
                        if count > 2 * operation.n_passes
                    }
    return found


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
    uid = USER if work.subject == SINGLE else 0
    for directory in (tree, *tree.iterdir()):
        os.chown(directory, uid, uid)
    try:
        with _at(tree, work, uid) as at_work:
            yield at_work
    finally:
        shutil.rmtree(tree)


@contextlib.contextmanager
def _at(tree: Path, work: Work, uid: int = 0) -> Iterator[tuple[Worker, FuseMount | None]]:
    """Raises  Unable: also for what fails in the body"""
    try:
        with (
            served(work.subject, tree, work.example, words=all_subjects(), limit_s=LIMIT_S) as (path, fuse),
            Worker(path, uid) as worker,
        ):
            yield worker, fuse
    except (OSError, RuntimeError) as error:
        raise Unable("failed", str(error)) from error


def _nothing(_n: int) -> Sequence[Course]:
    return ()


def _make_nothing(source: Path, _n: int) -> None:
    source.mkdir()


def _make_listing(source: Path, n: int) -> None:
    source.mkdir()
    make_flat(source / FLAT, n)


def _listing_courses(_n: int) -> Sequence[Course]:
    """`ls -l` as people type it, and where there are no extended attributes to ask for."""
    return [twice(list_long()), twice(list_long()._replace(name=NO_XATTRS), has_xattrs=False)]


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
        "listing": Part(_make_listing, 10_000, 1000, _listing_courses, LISTING),
        "files": Part(_make_nothing, 0, 0, _nothing, FILES),
        "changes": Part(_make_nothing, 0, 0, _nothing, CHANGES, subjects=(*PEERS[:2], SINGLE, *PEERS[2:])),
        "data": Part(_make_data, _N_IOS, _N_IOS_QUICK, _data_courses, NEW_DATA, DATA, _DATA_KEPT),
        "tree": Part(make_repository, 50_000, 5000, _tree_courses),
    }
)
