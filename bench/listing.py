"""Listing through `trashd mount`, beside the filesystem below it and other FUSE daemons: local, slow, large, disturbed.

    python -m bench.listing                       all parts; an hour and a quarter
    python -m bench.listing --quick               all parts in small, one round; five minutes
    python -m bench.listing --part local --scene tmpfs --rounds 7
    python -m bench.listing --table               the tables and verdicts of docs/internals/benchmarks
    python -m bench.listing --plot docs/listing.svg

local    10,000 entries: `ls` as people type it, and tight loops of system calls
slow     the same where a lookup or a getattr takes 1 ms (tests/support/slowfs.c), and there are no extended attributes;
         native is direct there
xattrs   where each look takes 1 ms, at an extended attribute too: a tenth of the files have an ACL, or none has, or the
         server has no such thing. It is believed for 5 s, or for none; then in 1000 files only, as all of a path is
         asked for again at each call. Direct is timed the first time alone: at the end of 10,000 files nothing is
         believed that was told at their beginning. The peers run one command, which asks for most. Half an hour of the
         whole; --quick: a minute and a half
tree     find, du and git status on a repository of 50,000 files; `tree on slow` likewise
sizes    `ls -l` by directory size, which the plot shows; `sizes on slow` likewise
million  a directory of a million: how soon its first names are there
memory   what the daemon keeps for each of a million entries that were looked at
stalls   a stat while 200,000 entries are swapped, and others reaped

All subjects take turns in one run, and the order rotates; the figures are medians of five rounds. Each command has a
fresh mount: first is with the caches of the whole machine dropped, again is right after, when dropped is with the
kernel's caches dropped once more. A subject whose turns have taken more than --patience seconds gets no more of them:
the time of direct on slow backing is its delays, and the same each time. A subject that is not installed, or has
failed, is left out and named.

bindfs, mergerfs and sshfs are Debian's packages, and sshfs asks an sftp-server of this machine; passthroughfs is the
example of pyfuse3, see bench/mount.py. libfuse's passthrough_hp takes part where TRASHD_BENCH_PASSTHROUGH_HP names it.

Each part appends a line for each scene to bench/results/listing.jsonl. As root only; in a mount namespace of its own,
so that nothing stays mounted, however it ends.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench import command
from bench import listing_million as million
from bench import listing_stalls as stalls
from bench import listing_steps as steps
from bench import listing_xattrs as xattrs
from bench.listing_plot import draw
from bench.listing_scenes import ABOUT_XATTRS, SERVERS, SLOW, scene
from bench.listing_steps import Course, Work, take_courses
from bench.listing_targets import N_ROUNDS, newest, table, tables, verdicts
from bench.subjects import EXAMPLE, HP, NATIVE, OURS, SSHFS, Row, all_subjects, take_turns, versions
from bench.support import keep, measuring, print_progress
from tests.support.mount_namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "listing.jsonl"
N_ROUNDS_QUICK = 1
PATIENCE_S = 120.0
PATIENCE_OF_SIX_S = 30.0  # where there are as many scenes
EVERYBODY = (NATIVE, OURS, "bindfs", "mergerfs", EXAMPLE, HP)
QUICK_ONES = (NATIVE, OURS, "bindfs", "mergerfs", HP)  # the example takes five minutes for a million entries
ON_SLOW = (NATIVE, OURS, "mergerfs")
BESIDE_XATTRS = (NATIVE, OURS, "mergerfs", "bindfs", SSHFS)


class Part(NamedTuple):
    """One table, for each of its scenes."""

    scenes: tuple[str, ...]
    n: int
    n_quick: int
    make: Callable[[Path, int], None]
    turn: Callable[[Work], dict[str, float]]
    subjects: tuple[str, ...] = EVERYBODY
    patience_s: float = PATIENCE_S

    def n_files(self, where: str, *, is_quick: bool) -> int:
        """How many there are in a scene; fewer where a server is asked anew at each step of a path."""
        n = self.n_quick if is_quick else self.n
        return n // 10 if where in SERVERS and not SERVERS[where].lifetime_s else n


def _by(courses: Callable[[int], list[Course]]) -> Callable[[Work], dict[str, float]]:
    return lambda work: take_courses(courses(work.n), work)


PARTS = MappingProxyType(
    {
        "local": Part(("tmpfs", "ext4"), 10_000, 2000, steps.make_flat, _by(steps.local_courses)),
        "slow": Part((SLOW,), 10_000, 1000, steps.make_flat, _by(steps.slow_courses), ON_SLOW),
        "xattrs": Part(ABOUT_XATTRS, 10_000, 500, xattrs.make, xattrs.take_turn, BESIDE_XATTRS, PATIENCE_OF_SIX_S),
        "tree": Part(("ext4",), 50_000, 5000, steps.make_repository, _by(steps.tree_courses)),
        "tree on slow": Part((SLOW,), 50_000, 2000, steps.make_repository, _by(steps.tree_courses), (NATIVE, OURS)),
        "sizes": Part(("ext4",), 100_000, 1000, steps.make_sizes, _by(steps.size_courses), QUICK_ONES),
        "sizes on slow": Part((SLOW,), 10_000, 1000, steps.make_sizes, _by(steps.size_courses), ON_SLOW),
        "million": Part(("tmpfs",), 1_000_000, 50_000, million.make, million.take_names, QUICK_ONES),
        "memory": Part(("tmpfs",), 1_000_000, 50_000, million.make, million.take_memory, QUICK_ONES[1:]),
        "stalls": Part(("ext4",), 200_000, 20_000, stalls.make, stalls.take_turn, (NATIVE, OURS)),
    }
)


def compete(part: Part, arguments: argparse.Namespace, where: str, n_rounds: int, patience_s: float) -> dict[str, Any]:
    """Return the seconds of each subject in a scene, or why it is left out."""
    n = part.n_files(where, is_quick=arguments.quick)
    names = [name for name in arguments.subject or part.subjects if name in all_subjects()]
    with scene(where, lambda path: part.make(path, n)) as source:
        return take_turns(
            names, n_rounds, patience_s, lambda name: part.turn(Work(name, where, source, n, arguments.example))
        )


def measure(name: str, where: str, arguments: argparse.Namespace) -> Row:
    """Measure one part in one scene. Returns  its row"""
    part = PARTS[name]
    n_rounds = arguments.rounds or (N_ROUNDS_QUICK if arguments.quick else N_ROUNDS)
    load_before = round(os.getloadavg()[0], 2)
    print_progress(name if where == SLOW else f"{name}, {where}")
    patience_s = part.patience_s if arguments.patience is None else arguments.patience
    subjects = compete(part, arguments, where, n_rounds, patience_s)
    return {
        "part": name,
        "scene": where,
        "n_files": part.n_files(where, is_quick=arguments.quick),
        "options": {
            "quick": arguments.quick,
            "n_rounds": n_rounds,
            "subjects": arguments.subject,
            "patience": patience_s,
        },
        "n_cpus": len(os.sched_getaffinity(0)),
        "commands": {one: " ".join(all_subjects()[one]) for one in subjects},
        "versions": versions(),
        "subjects": subjects,
        "load_before": load_before,
    }


def main() -> None:
    """Measure, append the results, print them."""
    scenes = ("tmpfs", "ext4", *SERVERS)
    arguments = command.parse_arguments(command.parser(__doc__, PARTS, scenes))
    if command.is_to_show(arguments):
        places = [(name, where) for name, part in PARTS.items() for where in part.scenes]
        command.show(arguments, newest(RESULTS, places), tables, draw)
        return
    with measuring():
        see_own_mounts_only()
        for name in arguments.part or PARTS:
            for where in PARTS[name].scenes:
                if arguments.scene in (None, where):
                    row = keep(RESULTS, measure(name, where, arguments))
                    print("\n".join([table(row), "", *verdicts(row), ""]), flush=True)


if __name__ == "__main__":
    main()
