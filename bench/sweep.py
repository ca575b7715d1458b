"""`trashd sweep` against find, xargs, rm and mv: one job on one filesystem.

    python -m bench.sweep --filesystem ext4 --job name            200,000 files, of which half go; a few minutes
    python -m bench.sweep --filesystem ext4 --job move --cold     500,000 files, with dropped caches
    python -m bench.sweep --filesystem ext4 --job memory          5 million entries in one directory
    python -m bench.sweep --filesystem xfs --job name --files 20000 --rounds 1
    python -m bench.sweep --table                                 the tables of docs/performance.md

All subjects take turns in one run, each on a copy of the same image (on tmpfs on a tree made anew); a time is that of
the whole command from start to exit. Medians of five; the order of the subjects rotates. In turns of
their own ours is watched for its memory, and for the moment when it has taken the first entry.

Each run appends a line to bench/results/sweep.jsonl. As root only.
"""

import argparse
import contextlib
import errno
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.images import FILESYSTEMS, Fresh, equal_volumes
from bench.subjects import markdown
from bench.support import keep, measuring, running, tell, time_command, wait
from bench.sweeps import JOBS, OURS, TOP, Command, Job
from bench.watch import watch, watch_interpreter
from tests.support.mount_namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "sweep.jsonl"
N_ROUNDS = 5
TIMEOUT_S = 600.0
SIZE_MB = 4 << 10
MAX_FIRST_S = 0.5
MAX_ABOVE_INTERPRETER_KIB = 64 << 10
_GLANCE_S = 0.001

Row = dict[str, Any]


def set_caches(root: Path, *, cold: bool) -> None:
    """Have nothing to write any more, and all entries of a volume in the caches, or none."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    else:
        time_command(["find", root, "-links", "+1000000"])


def n_left(root: Path) -> int:
    """Entries of the tree that are no directories."""
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
        command = job.run[name](root)
        set_caches(root, cold=cold)
        rehearse(command)
        seconds = time_command(command, timeout_s=TIMEOUT_S)
        left = n_left(root)
        if left != job.left(n_files):
            raise OSError(errno.ENOTEMPTY, f"{name} left {left} files", TOP)
    return seconds


def until_first(job: Job, fresh: Fresh, *, cold: bool) -> float:
    """Seconds until our command has taken the first entry, in a turn of its own: looking for it takes time."""
    with fresh() as root:
        command = job.run[OURS](root)
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


def compete(job: Job, n_files: int, fresh: Fresh, n_rounds: int, *, cold: bool) -> dict[str, Any]:
    """What each subject took."""
    names = list(job.run)
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(n_rounds):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            turns[name].append(take_turn(name, job, n_files, fresh, cold=cold))
            tell(f"round {number + 1} of {n_rounds}: {name}: {turns[name][-1]:.2f} s")
    return {name: {"median": statistics.median(seconds), "seconds": seconds} for name, seconds in turns.items()}


def measure(asked: argparse.Namespace) -> Row:
    """The row of one run."""
    job = JOBS[asked.job]
    n_files = asked.files or job.n_files
    load_before = round(os.getloadavg()[0], 2)
    n_inodes = n_files + n_files // 10 + 5000

    def fill(root: Path) -> None:
        job.make(root, n_files)

    with equal_volumes(asked.filesystem, SIZE_MB, n_inodes, fill) as fresh:
        with fresh() as root:
            set_caches(root, cold=asked.cold)
            peak = watch(job.run[OURS](root))._asdict()
        first_s = until_first(job, fresh, cold=asked.cold)
        subjects = compete(job, n_files, fresh, asked.rounds, cold=asked.cold)
    return {
        "filesystem": asked.filesystem, "job": asked.job, "cold": asked.cold, "n_files": n_files,
        "options": {"files": asked.files, "rounds": asked.rounds}, "subjects": subjects, "first_s": first_s,
        "peak": peak, "interpreter": watch_interpreter()._asdict(), "load_before": load_before,
    }  # fmt: skip


def title(row: Row) -> str:
    """The filesystem, the job and the caches of a row."""
    return f"{row['filesystem']} {row['job']} {'cold' if row['cold'] else 'warm'}"


def verdicts(row: Row) -> Iterator[str]:
    """Each target that this run can judge, met or MISSED."""
    medians = {name: found["median"] for name, found in row["subjects"].items()}
    rivals = {name: median for name, median in medians.items() if name != OURS}
    for limit in JOBS[row["job"]].limits:
        if limit.on_ext4 if row["filesystem"] == "ext4" else limit.elsewhere:
            rival = limit.rival or min(rivals, key=lambda name: rivals[name])
            ratio = medians[OURS] / rivals[rival]
            yield f"{title(row)}: {ratio:.2f} x {rival} (at most {limit.times:.3g}): {_met(ratio <= limit.times)}"
    first_s = row["first_s"]
    yield f"{title(row)}: first after {first_s:.2f} s (at most {MAX_FIRST_S}): {_met(first_s <= MAX_FIRST_S)}"
    above_kib = row["peak"]["pss_kib"] - row["interpreter"]["pss_kib"]
    told = f"{above_kib / 1024:.0f} MiB above the interpreter (at most {MAX_ABOVE_INTERPRETER_KIB >> 10})"
    yield f"{title(row)}: {told}: {_met(above_kib <= MAX_ABOVE_INTERPRETER_KIB)}"


def _met(is_met: object) -> str:
    return "met" if is_met else "MISSED"


def details(row: Row) -> str:
    """One run, a line for each subject."""
    ours = row["subjects"][OURS]["median"]
    told = [f"{title(row)}, {row['n_files']:,} files; seconds"]
    for name, found in row["subjects"].items():
        single = " ".join(f"{value:.2f}" for value in found["seconds"])
        told.append(f"  {name:<13} {found['median']:6.2f}  ours/its {ours / found['median']:.2f}  all: {single}")
    return "\n".join(told)


def newest(results: Path) -> list[Row]:
    """The last run in full size of each filesystem, job and state of the caches."""
    found: dict[tuple[str, str, bool], Row] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        if not row["options"]["files"] and row["options"]["rounds"] >= N_ROUNDS:
            found[row["job"], row["filesystem"], row["cold"]] = row
    jobs = list(JOBS)
    return sorted(found.values(), key=lambda row: (jobs.index(row["job"]), row["filesystem"], row["cold"]))


def tables(rows: Sequence[Row]) -> str:
    """The Markdown of docs/performance.md: times, the first file, memory, verdicts, machines."""
    names = list(dict.fromkeys(name for row in rows for name in row["subjects"]))
    heads = ["sweep", "files", "filesystem", "caches", *names, "until the first", "memory above the interpreter"]
    machines = dict.fromkeys(_machine(row) for row in rows)
    parts = [
        "Seconds of the whole command, medians of five:",
        markdown(heads, (_cells(row, names) for row in rows)),
        "Targets:",
        "\n".join(f"- {line}" for row in rows for line in verdicts(row)),
        "Measured on:",
        "\n".join(f"- {line}" for line in machines),
    ]
    return "\n\n".join(parts)


def _cells(row: Row, names: Sequence[str]) -> list[str]:
    times = [f"{row['subjects'][name]['median']:.2f}" if name in row["subjects"] else "-" for name in names]
    above_kib = row["peak"]["pss_kib"] - row["interpreter"]["pss_kib"]
    told = [JOBS[row["job"]].told, f"{row['n_files']:,}", row["filesystem"], "cold" if row["cold"] else "warm"]
    return [*told, *times, f"{row['first_s']:.2f}", f"{above_kib / 1024:.0f} MiB"]


def _machine(row: Row) -> str:
    on = row["machine"]
    return f"Linux {on['kernel']}, {on['n_cpus']} x {on['cpu']}, {on['memory_gib']} GiB, Python {on['python']}"


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystem", choices=FILESYSTEMS)
    parser.add_argument("--job", choices=list(JOBS))
    parser.add_argument("--cold", action="store_true", help="drop the caches of this machine before each turn")
    parser.add_argument("--files", type=int, help="files of the tree, to have it quicker")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS, help="turns of each subject")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest results say")
    asked = parser.parse_args()
    if not asked.table:
        if not asked.filesystem or not asked.job:
            parser.error("--filesystem and --job, or --table")
        if asked.filesystem == "tmpfs" and asked.cold:
            parser.error("a tmpfs is never cold")
        if os.geteuid():
            parser.error("only root may mount")
    return asked


def main() -> None:
    """Measure, append the result, print it."""
    asked = parse()
    if asked.table:
        print(tables(newest(RESULTS)))
        return
    with measuring():
        see_own_mounts_only()  # whoever makes a namespace meanwhile would keep what we unmount, and the image in use
        row = keep(RESULTS, measure(asked))
    print(details(row))
    print("\n".join(verdicts(row)))


if __name__ == "__main__":
    main()
