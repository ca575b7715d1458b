"""Benchmarks with a command of their own, started and recorded like the others.

Each appends rows to a file of its own, in its own form (bench/program_rows.py reads them).
"""

import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from bench.program_rows import READERS
from bench.runner import Result
from bench.runs import RESULTS, read
from bench.subjects import BINDFS, MERGERFS, NATIVE, OURS
from bench.support import PYTHON, print_progress

_ROOT = RESULTS.parents[1]


class Program(NamedTuple):
    """One of them, and its words in full and for a quick run, in which it takes no part without any."""

    name: str
    description: str
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def measure(self, *, is_quick: bool, limit_s: float | None = None) -> Iterator[Result]:
        """Run the program and yield its results; after limit_s only those that are complete."""
        results = RESULTS / f"{self.name}.jsonl"
        n_before = len(list(read(results)))
        command = [PYTHON, "-m", f"bench.{self.name}", *(self.quick if is_quick else self.full)]
        with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                print_progress(f"{self.name}: not done after {limit_s:.0f} s")
            finally:
                process.terminate()  # it unmounts what it has mounted
        if process.returncode:
            print_progress(f"{self.name}: ended with {process.returncode}")
        for row in list(read(results))[n_before:]:
            yield from READERS[self.name](row)


_SOME = tuple(word for name in (NATIVE, OURS, BINDFS, MERGERFS) for word in ("--subject", name))
PROGRAMS = (
    Program("neighbour", "who works on the same disk while a tree is deleted", full=("--filesystem", "ext4")),
    Program("mount", "trashd mount beside its peers", ("--quick", "--part", "names", "--rounds", "3", *_SOME)),
    Program(
        "swap_through",
        "a swap through the mount, and how long others wait",
        ("--quick", "--rounds", "3", "--scene", "tmpfs"),
    ),
    Program(
        "listing",
        "listing through the mount",
        ("--quick", "--part", "local", "--scene", "tmpfs", "--rounds", "3", *_SOME),
    ),
    Program("depth", "a level of a deep tree, and a jump in a listing, through the mount"),
)
