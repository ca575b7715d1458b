"""What bench/listing.py times: commands as a person types them, in courses that each begin on a fresh mount."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.listing_scenes import serve_scene
from bench.operations import AGAIN, MISS, OPERATIONS, SCAN, Worker, drop_caches
from bench.subjects import (
    BINDFS,
    CPU,
    DEVICE,
    HP,
    HP_NO_XATTR,
    HP_URING,
    LL,
    LL_CHECKED,
    MERGERFS,
    NATIVE,
    OURS,
    Unable,
    Words,
    all_subjects,
    cpu_s,
    served,
)
from bench.support import make_files, time_command
from tests.support.fuse_watchdog import FuseMount

# Of one command. Direct on slow backing, a tree of 50,000 files takes a minute.
LIMIT_S = 300.0

FLAT, TREE = "flat", "tree"
DROPPED = " when dropped"
N_PER_DIRECTORY = 100
OF_SIZE = "ls -l of {}"


class Step(NamedTuple):
    """Something timed in a directory."""

    name: str
    at: str  # the directory below the one that it is given
    take: Callable[[Path], float]  # seconds
    is_loop: bool = False


class Course(NamedTuple):
    """Steps one after the other: the first finds a fresh mount, nothing in the caches, and its program in memory."""

    steps: tuple[Step, ...]
    has_xattrs: bool = True


class Work(NamedTuple):
    """A turn: who is to do it, and where."""

    subject: str
    scene: str
    source: Path
    n: int  # files, entries: as the part says
    example: Path | None


def without_xattrs() -> Words:
    """Who can do without extended attributes, so that ls -l has less to ask.

    Of libfuse's examples it depends on how they were built: `traits` tells.
    """
    words = all_subjects()
    found = {
        NATIVE: (),
        BINDFS: (*words[BINDFS], "--xattr-none"),
        MERGERFS: tuple(f"{word},xattr=nosys" if "," in word else word for word in words[MERGERFS]),
    }
    found |= {name: (*words[name], "--no-xattr") for name in (OURS, DEVICE) if name in words}
    return found | {name: words[name] for name in (HP_URING, HP, HP_NO_XATTR, LL, LL_CHECKED) if name in words}


def command(name: str, *words: str, at: str = FLAT) -> Step:
    """A command; in it `{}` is the directory, `{now}` a file newer than all in there, `{empty}` an empty directory."""

    def take(path: Path) -> float:
        with tempfile.TemporaryDirectory(prefix="trashd-bench-") as empty:
            found = [word.format(path / at, now=path / "now", empty=empty) for word in words]
            return time_command(found, timeout_s=LIMIT_S)

    return Step(name, at, take)


def loop(name: str, operation: str, n: int, n_tries: int = 1) -> Step:
    """A tight loop of system calls, as bench/mount.py times them; the quickest of some."""
    asked = next(one for one in OPERATIONS if one.name == operation)._replace(n=n)

    def take(path: Path) -> float:
        with Worker(path) as worker:
            return min(worker.do(asked) for _ in range(n_tries))

    return Step(name, asked.directory, take, is_loop=True)


def twice(step: Step, *, has_xattrs: bool = True) -> Course:
    """First, and again."""
    return Course((step, step._replace(name=step.name + AGAIN)), has_xattrs)


def dropped(step: Step) -> Step:
    """A step once more, when the kernel has forgotten everything; the program is in memory again."""

    def take(path: Path) -> float:
        drop_caches()
        rehearse(step)
        return step.take(path)

    return step._replace(name=step.name + DROPPED, take=take)


def list_long(at: str = FLAT) -> Step:
    """The command that the targets are about."""
    return command("ls -l", "ls", "-l", "{}", at=at)


def find_newer(at: str = FLAT) -> Step:
    """What looks at every file, and finds nothing."""
    return command("find -newer", "find", "{}", "-newer", "{now}", at=at)


COLOURED = command("ls -l --color=always", "ls", "-l", "--color=always", "{}")
COLOURS = command("ls --color=always", "ls", "--color=always", "{}")
NAMES = command("ls -U", "ls", "-U", "{}")
NO_XATTRS = "ls -l, no xattrs"
STAT = "stat"


def local_courses(n: int) -> list[Course]:
    """One directory on local backing."""
    loops = (
        *(loop(SCAN, SCAN, n), loop(SCAN + AGAIN, SCAN + AGAIN, n)),
        *(loop(STAT, "stat, cold", n), loop(STAT + AGAIN, "stat again", n)),
        *(loop(MISS, MISS, n), loop(MISS + AGAIN, MISS, n, n_tries=3)),
    )
    no_xattrs = list_long()._replace(name=NO_XATTRS)
    return [*map(twice, (list_long(), COLOURED, NAMES)), twice(no_xattrs, has_xattrs=False), Course(loops)]


def slow_courses(_n: int) -> list[Course]:
    """The courses on slow backing; a plain `ls` sorts, and asks for nothing."""
    return [*map(twice, (command("ls", "ls", "{}"), list_long(), COLOURS))]


def tree_courses(_n: int) -> list[Course]:
    """What goes through a whole tree."""
    git, status = ("git", "--no-optional-locks", "-C", "{}"), ("status", "--porcelain")
    steps = (
        find_newer(at=TREE),
        command("find", "find", "{}", at=TREE),
        command("du -s", "du", "-s", "{}", at=TREE),
        command("git status", *git, *status, at=TREE),  # looks at twenty files at a time, by itself
        command("git status, one thread", *git, "-c", "core.preloadIndex=false", *status, at=TREE),
    )
    return [twice(step) for step in steps]


def sizes(most: int) -> list[int]:
    """Powers of ten from a hundred."""
    return [10**digits for digits in range(2, len(str(most)))]


def size_courses(most: int) -> list[Course]:
    """Directories of different sizes."""
    return [twice(list_long(at=f"n{n}")._replace(name=OF_SIZE.format(n))) for n in sizes(most)]


def make_flat(source: Path, n: int) -> None:
    """Where the local and slow courses work; the loops call their directories so."""
    source.mkdir()
    for directory in (FLAT, "list", "stat"):
        (source / directory).mkdir()
        make_files(source / directory, n)


def make_sizes(source: Path, most: int) -> None:
    """A directory of each size."""
    source.mkdir()
    for n in sizes(most):
        (source / f"n{n}").mkdir()
        make_files(source / f"n{n}", n)


def make_repository(source: Path, n_files: int) -> None:
    """A git repository of directories of a hundred files each, everything committed.

    git believes an inode by its time and size alone here: some peers give it a number of their own, and each would
    then read all files the first time.
    """
    top = source / TREE
    top.mkdir(parents=True)
    for number in range(n_files // N_PER_DIRECTORY):
        directory = top / f"{number // 25}" / f"{number % 25}"
        directory.mkdir(parents=True)
        make_files(directory, N_PER_DIRECTORY, b"text\n")
        for name in os.listdir(directory):
            os.utime(directory / name, (1_700_000_000, 1_700_000_000))  # before the index is: not to be looked into
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for words in (
        ("init", "--quiet"),
        ("config", "core.checkStat", "minimal"),
        ("config", "core.trustctime", "false"),
        ("config", "gc.auto", "0"),
        ("add", "."),
        (*identity, "commit", "--quiet", "--message", "all"),
    ):
        subprocess.run(["git", "-C", top, *words], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    (source / "now").touch()


def rehearse(step: Step) -> None:
    """Have a command's program in memory, and what it reads beside the directory. A loop is of a program that runs."""
    if step.is_loop:
        return
    with tempfile.TemporaryDirectory(prefix="trashd-bench-") as name:
        if step.at == TREE:
            make_repository(Path(name), N_PER_DIRECTORY)
        else:
            (Path(name) / step.at).mkdir()
            make_files(Path(name) / step.at, N_PER_DIRECTORY)
            (Path(name) / "now").touch()
        step.take(Path(name))


def take_courses(courses: Sequence[Course], work: Work) -> dict[str, float]:
    """Seconds of all steps, without those that the subject can't do; and of the daemon's processor time, by `CPU`.

    Raises  Unable
    """
    found = {CPU: 0.0}
    for course in courses:
        words = all_subjects() if course.has_xattrs else without_xattrs()
        if work.subject in words:
            with taking_part(work, words) as (path, fuse):
                rehearse(course.steps[0])
                before_s = cpu_s(fuse)
                found |= {step.name: step.take(path) for step in course.steps}
                found[CPU] += cpu_s(fuse) - before_s
    return found


@contextlib.contextmanager
def taking_part(work: Work, words: Words) -> Iterator[tuple[Path, FuseMount | None]]:
    """The directory as a subject shows it, nothing of it in the caches.

    Raises  Unable: also for what fails in the body
    """
    try:
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(serve_scene(work.scene, work.source, 2 * LIMIT_S))
            path, fuse = stack.enter_context(
                served(work.subject, source, work.example, words=words, limit_s=2 * LIMIT_S)
            )
            drop_caches()
            yield path, fuse
    except (OSError, RuntimeError) as error:
        raise Unable("failed", str(error)) from error


@contextlib.contextmanager
def mounted(work: Work, tree: Path, limit_s: float = LIMIT_S) -> Iterator[tuple[Path, FuseMount | None]]:
    """A tree as a subject shows it, and its mount.

    Raises  Unable: also for what fails in the body
    """
    try:
        with served(work.subject, tree, work.example, words=all_subjects(), limit_s=limit_s) as found:
            yield found
    except (OSError, RuntimeError) as error:
        raise Unable("failed", str(error)) from error
