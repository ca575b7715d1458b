"""`trashd sweep` against find, xargs, rm and mv: one job on one filesystem a case.

All subjects take turns in one run, each on a copy of the same image (on tmpfs on a tree made anew); a time is that of
the whole command from start to exit. In turns of their own ours is watched for its memory, and for the moment when it
has taken the first entry.
"""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.images import Fresh, equal_volumes
from bench.reap import MAX_ABOVE_INTERPRETER_MIB, PEAK, above_interpreter, cases, set_caches
from bench.runner import Bed, Benchmark, Case, Turn
from bench.support import running, time_command, wait
from bench.sweeps import BARE, JOBS, OURS, TOP, Command, Job
from bench.verdicts import Target, times, times_best, value

TIMEOUT_S = 600.0
SIZE_MB = 4 << 10
MAX_FIRST_S = 0.5
FIRST = "the first"
_GLANCE_S = 0.001


def count_remaining(root: Path) -> int:
    """Return the number of entries of the tree that are no directories."""
    found = subprocess.run(["find", root / TOP, "!", "-type", "d", "-printf", "x"], stdout=subprocess.PIPE, check=True)
    return len(found.stdout)


def rehearse(command: Command) -> None:
    """Have a subject's program in memory, whatever the caches hold."""
    with contextlib.suppress(OSError):
        time_command([command[0], "--version"])
        time_command(["find", "--version"])
        time_command(["mv", "--version"])
        time_command(["rm", "--version"])


def take_turn(name: str, job: Job, n_files: int, fresh: Fresh, *, cold: bool) -> float:
    """Seconds that one subject takes on a fresh volume.

    Raises  OSError: it failed, or left something else than it should
    """
    with fresh() as root:
        command = job.commands[name](root)
        set_caches(root, cold=cold)
        rehearse(command)
        seconds = time_command(command, timeout_s=TIMEOUT_S)
        left = count_remaining(root)
        if left != job.remaining(n_files):
            raise OSError(errno.ENOTEMPTY, f"{name} left {left} files", TOP)
    return seconds


def until_first(job: Job, fresh: Fresh, *, cold: bool) -> float:
    """Seconds until our command has taken the first entry, in a turn of its own: looking for it takes time."""
    with fresh() as root:
        command = job.commands[OURS](root)
        set_caches(root, cold=cold)
        rehearse(command)
        directories = [path for path in (root / TOP, *(root / TOP).glob("d*")) if path.is_dir()]
        before = [os.stat(path).st_mtime_ns for path in directories]
        began = time.perf_counter()
        with running(command) as pid:
            while [os.stat(path).st_mtime_ns for path in directories] == before:
                time.sleep(_GLANCE_S)
            seconds = time.perf_counter() - began
            wait(pid, TIMEOUT_S)
    return seconds


def _watch_ours(job: Job, fresh: Fresh) -> dict[str, float]:
    with fresh() as root:
        return above_interpreter(job.commands[OURS](root))


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """What there is to be swept, on a copy of the same image for each turn."""
    filesystem, name, *cold = case.words
    job = JOBS[name]
    n_inodes = case.n + case.n // 10 + 5000
    with equal_volumes(filesystem, SIZE_MB, n_inodes, lambda root: job.make(root, case.n)) as fresh:
        turns: dict[str, Turn] = {
            subject: partial(take_turn, subject, job, case.n, fresh, cold=bool(cold)) for subject in job.commands
        }
        turns[FIRST] = partial(until_first, job, fresh, cold=bool(cold))
        yield Bed(turns, {PEAK: partial(_watch_ours, job, fresh)})


def targets(case: Case) -> Sequence[Target]:
    """Those of the job, that it begins soon, and that it stays small."""
    filesystem, name, *_ = case.words
    job = JOBS[name]
    rivals = [subject for subject in job.commands if subject not in (OURS, BARE)]
    found = [
        Target(
            f"of {limit.rival or 'the best rival'}",
            times(OURS, limit.rival) if limit.rival else times_best(OURS, rivals),
            limit.times,
        )
        for limit in job.limits
        if (limit.on_ext4 if filesystem == "ext4" else limit.elsewhere)
    ]
    above = Target("above the interpreter", value(f"{PEAK}, MiB"), MAX_ABOVE_INTERPRETER_MIB, unit=" MiB")
    return [*found, Target("until the first is gone", value(FIRST), MAX_FIRST_S, unit=" s"), above]


BENCHMARK = Benchmark(
    "sweep",
    "trashd sweep beside find, xargs, rm and mv",
    tuple(case for name, job in JOBS.items() for case in cases(name, job.n_files)),
    (*(Case(("ext4", name), 20_000) for name in ("name", "size", "age", "move")), Case(("tmpfs", "size"), 20_000)),
    bed,
    targets,
    n_rounds=6,
)
