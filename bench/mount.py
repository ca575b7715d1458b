"""`trashd mount` against the filesystem below it and against other FUSE daemons that pass everything through.

    python -m bench.mount                       all parts, in four places; an hour
    python -m bench.mount --quick               all parts in small, one round, on tmpfs and all cores; minutes
    python -m bench.mount --part data --scene ext4 --cores one
    python -m bench.mount --table               the tables and verdicts of docs/performance.md
    python -m bench.mount --plot docs/mount.svg

listing  `ls -l` of 10,000 entries, as people type it and as a loop of system calls; plain listing again
files    small files opened, read, and appended to; a held one appended to; names that are not there
changes  create, rename, unlink, mkdir, rmdir; also by a mount for one user
data     1 MiB at a time, mapped, and by fio 4 KiB at random, on files that are open and lie in memory; a new file, and
         one that does not lie there
tree     find -newer, du and git status on a repository of 50,000 files, the first, second and third run

A swap through the mount, and how long others wait meanwhile, is bench/swap_through.py; --table shows that, too.

All subjects take turns in one run, and the order rotates; the figures are medians of five rounds. Each turn has a fresh
mount. Places are tmpfs and ext4, each on all cores and on one, where client and daemon share it. A subject whose turns
of a part have taken more than --patience seconds gets no more of them. A subject that is not installed, or has failed,
is left out and named. One more turn of each counts what the kernel asks the daemon.

bindfs and mergerfs are Debian's packages, mergerfs with its caches on. passthroughfs is the example in pyfuse3's
source: pip fetches it into ~/.cache/trashd-bench, or --example names it. libfuse's examples passthrough_hp and
passthrough_ll take part where TRASHD_BENCH_PASSTHROUGH_HP and TRASHD_BENCH_PASSTHROUGH_LL name them.

Each part appends a line for each place to bench/results/mount.jsonl. As root only; in a mount namespace of its own, so
that nothing stays mounted, however it ends.
"""

import argparse
import contextlib
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import command, swap_through
from bench.listing_scenes import scene
from bench.listing_steps import Work
from bench.messages import can_count
from bench.mount_parts import PARTS, Part, count_turn, time_turn
from bench.mount_plot import draw
from bench.mount_targets import N_ROUNDS, judged_cpu, newest, table, tables, verdicts
from bench.subjects import Row, Unable, all_subjects, take_turns, versions
from bench.support import keep, kept_in_memory, measuring, tell
from tests.support.mount_namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "mount.jsonl"
SCENES = ("tmpfs", "ext4")
ALL_CORES, ONE_CORE = "all cores", "one core"
CORES = {"all": ALL_CORES, "one": ONE_CORE}
N_ROUNDS_QUICK = 1
PATIENCE_S = 40.0
SWAP_TOLD = "A tree of 200,000 entries that the kernel knows, swapped through the mount (`bench/swap_through.py`):"
# libfuse's examples keep every file open that the kernel knows.
N_FDS = 200_000


@contextlib.contextmanager
def on(cores: str) -> Iterator[None]:
    """Run the measuring process, and all that it starts, on as many cores."""
    before = os.sched_getaffinity(0)
    if cores == ONE_CORE:
        os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def compete(part: Part, asked: argparse.Namespace, where: str, n_rounds: int) -> dict[str, Any]:
    """What each subject took in a scene and what it was asked, or why it is left out."""
    words = all_subjects()
    names = [name for name in asked.subject or part.subjects if name in words and name in part.subjects]
    with (
        scene(where, lambda path: part.make(path, part.n)) as source,
        kept_in_memory([source / name for name in part.kept]),
    ):
        works = {name: Work(name, where, source, part.n, asked.example) for name in names}
        found = take_turns(names, n_rounds, asked.patience, lambda name: time_turn(part, works[name]))
        if part.counts() and can_count():
            for name in (name for name in names if "medians" in found[name]):
                tell(f"counting: {name}")
                with contextlib.suppress(Unable):
                    found[name]["messages"] = count_turn(part, works[name])
    return found


def measure(name: str, where: str, cores: str, asked: argparse.Namespace) -> Row:
    """The row of one part in one place."""
    part = PARTS[name].quick() if asked.quick else PARTS[name]
    n_rounds = asked.rounds or (N_ROUNDS_QUICK if asked.quick else N_ROUNDS)
    load_before = round(os.getloadavg()[0], 2)
    tell(f"{name}, {where}, {cores}")
    with on(cores):
        n_cpus = len(os.sched_getaffinity(0))
        subjects = compete(part, asked, where, n_rounds)
    words = all_subjects()
    return {
        "part": name,
        "scene": where,
        "cores": cores,
        "n_files": part.n,
        "options": {"quick": asked.quick, "n_rounds": n_rounds, "subjects": asked.subject, "patience": asked.patience},
        "n_cpus": n_cpus,
        "commands": {one: " ".join(words[one]) for one in subjects},
        "versions": versions(),
        "counts": part.counts(),
        "subjects": subjects,
        "left_out": _left_out(name),
        "load_before": load_before,
    }


def _left_out(part: str) -> str:
    """Who would have taken part, and what would have been measured."""
    found = [f"{name}: the environment does not name it" for name in PARTS[part].subjects if name not in all_subjects()]
    if part == "data" and not shutil.which("fio"):
        found.append("fio: it is not installed")
    return "; ".join(found)


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = command.parser(__doc__, PARTS, SCENES, PATIENCE_S)
    parser.add_argument("--cores", choices=list(CORES), help="only on as many")
    return command.asked_of(parser)


def run(asked: argparse.Namespace) -> None:
    """Measure what is asked for, append the results, print them."""
    scenes = [asked.scene] if asked.scene else SCENES[:1] if asked.quick else SCENES
    cores = [CORES[asked.cores]] if asked.cores else [ALL_CORES] if asked.quick else CORES.values()
    for where, how_many in [(where, how_many) for where in scenes for how_many in cores]:
        rows = []
        for name in asked.part or PARTS:
            row = keep(RESULTS, measure(name, where, how_many, asked))
            rows.append(row)
            print("\n".join([table([row]), "", *verdicts(row), ""]), flush=True)
        if cpu := judged_cpu(rows):
            print(f"{where}, {how_many}: {cpu.told}\n", flush=True)


def tell_all(rows: Sequence[Row]) -> str:
    """The Markdown of docs/performance.md, with what a swap costs."""
    swaps = swap_through.newest()
    return "\n\n".join([tables(rows), *([SWAP_TOLD, swap_through.table(swaps)] if swaps else [])])


def main() -> None:
    """Measure, or show what was measured."""
    asked = parse()
    if command.is_to_show(asked):
        command.show(asked, newest(RESULTS), tell_all, draw)
        return
    with measuring():
        see_own_mounts_only()
        with contextlib.suppress(ValueError):  # not every root may
            resource.setrlimit(resource.RLIMIT_NOFILE, (N_FDS, N_FDS))
        run(asked)


if __name__ == "__main__":
    main()
