"""`trashd mount` against the filesystem below it and against other FUSE daemons that pass everything through.

    python -m bench.mount                       all parts, on tmpfs and ext4; hours, see docs/internals/benchmarks
    python -m bench.mount --quick               all parts in small, one round, on tmpfs and all cores; minutes
    python -m bench.mount --part names --scene ext4 --cores one --rounds 9
    python -m bench.mount --table               the tables and verdicts of docs/internals/benchmarks; --json: the same
    python -m bench.mount --plot docs/mount.svg

names    eight operations on names and files, each call timed in C: by root, by a user in his own directory, and by one
         who may use another's by a group; processor time of daemon and client; on one core, too; in a user's own mount
clients  1, 2, 4 and 8 of them do all eight at a time: an operation's share of the time
busy     the eight beside 8 processes that compute
listing  `ls -l` of 16,000 and 100,000 files, a tenth with an ACL, first and again; a loop of its system calls
data     1 MiB at a time, mapped, and by fio 4 KiB at random, on files that are open and lie in memory; a new file, and
         one that does not lie there; small files opened and read
tree     find -newer, du and git status on a repository of 50,000 files, the first, second and third run
projects tar -x of 100,000 files, git clone, make -j2, and npm ci from a cache (bench/projects.py makes what they need)

A swap through the mount, and how long others wait meanwhile, is bench/swap_through.py; --table shows that, too.

All subjects take turns in one run, and the order rotates; the figures are means over five rounds, with the median call
beside them (of a command, the median round). Each turn has a fresh mount. A subject whose turns of a part have taken
more than --patience seconds gets no more of them; long parts have a multiple. A subject that is not installed, or has
failed, is left out and named. One more mount of each tells what its messages come by, whether the kernel checks
permissions, whether it answers GETXATTR, and counts what the kernel asks it.

FUSE over io_uring is switched on for the machine meanwhile (enable_uring, as root), and put back; both are said. trashd
has uring=on then; "trashd, /dev/fuse" is what users get as it comes. TRASHD_BENCH_BEFORE names another version's
command (a worktree's .venv/bin/trashd), which takes part over /dev/fuse.
Processor time is that of control groups, made below the benchmark's own and removed at its end.

bindfs and mergerfs are Debian's packages, mergerfs with its caches on. passthroughfs is the example in pyfuse3's
source: pip fetches it into ~/.cache/trashd-bench, or --example names it. libfuse's examples take part where the
environment names them: TRASHD_BENCH_PASSTHROUGH_HP (of 3.18 or later, it also runs over io_uring),
TRASHD_BENCH_PASSTHROUGH_HP_NO_XATTR (of a libfuse without extended attributes) and TRASHD_BENCH_PASSTHROUGH_LL.

Each part appends a line for each place to bench/results/mount.jsonl. As root only; in a mount namespace of its own, so
that nothing stays mounted, however it ends.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import command, processor_time, projects, swap_through, uring
from bench.listing_scenes import scene
from bench.listing_steps import Work
from bench.mount_parts import ALL_CORES, ONE_CORE, PARTS, Part, collect_traits, time_turn
from bench.mount_plot import draw
from bench.mount_tables import as_json, in_all, table, tables, verdicts
from bench.mount_targets import N_ROUNDS, newest
from bench.subjects import DEVICE, Row, Unable, all_subjects, take_turns, versions
from bench.support import keep, kept_in_memory, measuring, print_progress
from tests.support.mount_namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "mount.jsonl"
SCENES = ("tmpfs", "ext4")
CORES = {"all": ALL_CORES, "one": ONE_CORE}
N_ROUNDS_QUICK = 1
PATIENCE_S = 40.0
SWAP_TOLD = "A tree of 200,000 entries that the kernel knows, swapped through the mount (`bench/swap_through.py`):"
# libfuse's examples keep every file open that the kernel knows.
N_FDS = 200_000
NO_OPTION = "this trashd has no -o uring="
NOT_NAMED = "the environment does not name it"


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


def compete(part: Part, arguments: argparse.Namespace, where: str, n_rounds: int) -> dict[str, Any]:
    """Return the seconds and the traits of each subject in a scene, or why it is left out."""
    words = all_subjects()
    names = [name for name in arguments.subject or part.subjects if name in words and name in part.subjects]
    with (
        scene(where, lambda path: part.make(path, part.n)) as source,
        kept_in_memory([source / name for name in part.kept]),
    ):
        works = {name: Work(name, where, source, part.n, arguments.example) for name in names}
        found = take_turns(
            names, n_rounds, arguments.patience * part.patience, lambda name: time_turn(part, works[name])
        )
        for name in (name for name in names if "medians" in found[name]):
            print_progress(f"looking at {name}")
            with contextlib.suppress(Unable):
                found[name]["traits"] = collect_traits(part, works[name])
    return found


def measure(name: str, where: str, cores: str, arguments: argparse.Namespace) -> Row:
    """Measure one part in one place. Returns  its row"""
    part = PARTS[name].quick() if arguments.quick else PARTS[name]
    n_rounds = arguments.rounds or (N_ROUNDS_QUICK if arguments.quick else N_ROUNDS)
    load_before = round(os.getloadavg()[0], 2)
    print_progress(f"{name}, {where}, {cores}")
    with on(cores):
        n_cpus = len(os.sched_getaffinity(0))
        subjects = compete(part, arguments, where, n_rounds)
    words = all_subjects()
    return {
        "part": name,
        "scene": where,
        "cores": cores,
        "n_files": part.n,
        "options": {
            "quick": arguments.quick,
            "n_rounds": n_rounds,
            "subjects": arguments.subject,
            "patience": arguments.patience,
        },
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
    absent = [name for name in PARTS[part].subjects if name not in all_subjects()]
    found = [f"{name}: {NO_OPTION if name == DEVICE else NOT_NAMED}" for name in absent]
    if part == "data" and not shutil.which("fio"):
        found.append("fio: it is not installed")
    if part == "projects":
        found += [f"{name}: it is not installed" for name in projects.missing()]
    return "; ".join(found)


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = command.parser(__doc__, PARTS, SCENES, PATIENCE_S)
    parser.add_argument("--cores", choices=list(CORES), help="only on as many")
    parser.add_argument("--json", action="store_true", help="verdicts and figures as JSON on standard output")
    return command.parse_arguments(parser)


def measure_all(arguments: argparse.Namespace) -> None:
    """Measure everything requested, append the results, and print them with the verdicts on the targets."""
    scenes = [arguments.scene] if arguments.scene else SCENES[:1] if arguments.quick else SCENES
    cores = [CORES[arguments.cores]] if arguments.cores else [ALL_CORES] if arguments.quick else CORES.values()
    rows = []
    for where, how_many in [(where, how_many) for where in scenes for how_many in cores]:
        for name in arguments.part or PARTS:
            if how_many in PARTS[name].cores:
                rows.append(keep(RESULTS, measure(name, where, how_many, arguments)))
                if not arguments.json:
                    print(table(rows[-1]), end="\n\n", flush=True)
    print(
        json.dumps(as_json(rows, []), indent=1) if arguments.json else "\n\n".join([verdicts(rows), in_all(rows, [])])
    )


def format_report(rows: Sequence[Row]) -> str:
    """Return the Markdown of docs/internals/benchmarks, with the costs of a swap."""
    swaps = swap_through.newest()
    return "\n\n".join([tables(rows, swaps), *([SWAP_TOLD, swap_through.table(swaps)] if swaps else [])])


def format_json(rows: Sequence[Row]) -> str:
    """Return the results and the verdicts on the targets as JSON."""
    return json.dumps(as_json(rows, swap_through.newest()), indent=1)


def main() -> None:
    """Measure, or show what was measured."""
    arguments = parse()
    if command.is_to_show(arguments):
        command.show(arguments, newest(RESULTS), format_json if arguments.json else format_report, draw)
        return
    with measuring(), uring.switched_on(), processor_time.groups():
        see_own_mounts_only()
        with contextlib.suppress(ValueError):  # not every root may
            resource.setrlimit(resource.RLIMIT_NOFILE, (N_FDS, N_FDS))
        measure_all(arguments)


if __name__ == "__main__":
    main()
