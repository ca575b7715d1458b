"""`trashd mount` against the filesystem below it and against other FUSE daemons that pass everything through.

    python -m bench.mount            on ext4 in memory, five rounds; 3 to 4 minutes
    python -m bench.mount --quick    one round of less; half a minute
    python -m bench.mount --table    the tables of docs/performance.md

All subjects take turns in one run on the same volume, each with a fresh tree and a fresh mount; the order rotates,
and the figures are medians. Cold is after the caches of the whole machine were dropped. One more turn of each, not
timed, counts what the kernel asks the daemon. A subject that is not installed or has failed is left out, and named.

bindfs and mergerfs are Debian's packages, mergerfs with its caches on. passthroughfs is the example in pyfuse3's
source: pip fetches it into ~/.cache/trashd-bench, or --example names it. On one core: taskset --cpu-list 0 python ...

Each run appends a line to bench/results/mount.jsonl. As root only; in a mount namespace of its own, so that nothing
stays mounted, however it ends.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.messages import can_count, counted
from bench.operations import OPERATIONS, Operation, Worker, prepare
from bench.support import PYTHON, TRASHD, compiled, keep, volume
from tests.support.fuse import FuseMount, fuse_mount
from tests.support.namespaces import see_own_mounts_only

RESULTS = Path(__file__).with_name("results") / "mount.jsonl"
NATIVE, OURS, EXAMPLE = "native", "trashd", "passthroughfs"
MERGERFS_OPTIONS = (
    "allow_other,use_ino,minfreespace=0,cache.files=auto-full,cache.readdir=true,cache.symlinks=true,"
    "cache.attr=3600,cache.entry=3600,cache.negative_entry=3600"
)
# What each runs to serve a directory at a mount point, in the foreground; native serves itself.
SUBJECTS = MappingProxyType[str, tuple[str, ...]](
    {
        NATIVE: (),
        OURS: (TRASHD, "mount", "{source}", "{point}", "--foreground", "--coherence", "exclusive"),
        "bindfs": ("bindfs", "-f", "{source}", "{point}"),
        "mergerfs": ("mergerfs", "-f", "-o", MERGERFS_OPTIONS, "{source}", "{point}"),
        EXAMPLE: (PYTHON, "{example}", "{source}", "{point}"),
    }
)
N_ROUNDS, N_ROUNDS_QUICK, SHARE_QUICK = 5, 1, 0.25
SHARE_COUNTED = 0.25
# Ten times what the slowest needs for a turn; then its watchdog ends it.
LIMIT_S = 60.0
DOWNLOAD_LIMIT_S = 120.0

Row = dict[str, Any]


class Unable(Exception):
    """A subject that is not there or did not get it done; what else goes wrong ends the run."""

    def __init__(self, kind: str, told: str) -> None:
        super().__init__(f"{kind}: {told}")
        self.kind = kind  # missing or failed
        self.told = told


class Course(NamedTuple):
    """What every subject is to do, and where."""

    root: Path
    operations: Sequence[Operation]
    example: Path | None = None

    def of(self, share: float) -> "Course":
        """The same, with less of each operation."""
        return self._replace(operations=[operation.of(share) for operation in self.operations])


def tell(text: str) -> None:
    """Say to whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


def fetch_example() -> Path:
    """The example from the source of the pyfuse3 that is installed, which pip fetches once.

    Raises  Unable
    """
    version = importlib.metadata.version("pyfuse3")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trashd-bench"
    example = cache / f"{EXAMPLE}-{version}.py"
    if example.exists():
        return example
    with tempfile.TemporaryDirectory() as scratch:
        pip = [PYTHON, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pyfuse3", "--dest", scratch]
        try:
            subprocess.run([*pip, f"pyfuse3=={version}"], check=True, capture_output=True, timeout=DOWNLOAD_LIMIT_S)
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                member = files.extractfile(f"pyfuse3-{version}/examples/passthroughfs.py")
                text = member.read() if member else b""
        except (subprocess.SubprocessError, KeyError) as error:
            raise Unable("missing", f"the source of pyfuse3 {version}: {error}") from error
    cache.mkdir(parents=True, exist_ok=True)
    example.write_bytes(text)
    return example


@contextlib.contextmanager
def served(name: str, source: Path, example: Path | None) -> Iterator[tuple[Path, FuseMount | None]]:
    """A directory as a subject shows it, and its mount; native has none.

    Raises  Unable: its program is not there; see fuse_mount for the rest
    """
    if name == NATIVE:
        yield source, None
        return
    with tempfile.TemporaryDirectory(prefix="trashd-mount-") as point:
        if "{example}" in SUBJECTS[name]:
            example = example or fetch_example()
        command = [word.format(source=source, point=point, example=example) for word in SUBJECTS[name]]
        if not shutil.which(command[0]):
            raise Unable("missing", command[0])
        with fuse_mount(command, Path(point), LIMIT_S) as fuse:
            yield fuse.path, fuse


@contextlib.contextmanager
def turn_of(name: str, course: Course) -> Iterator[tuple[Worker, FuseMount | None]]:
    """A worker in a fresh tree, as a subject shows it.

    Raises  Unable: also for what fails in the body
    """
    source = course.root / "source"
    prepare(source, course.operations)
    try:
        with served(name, source, course.example) as (path, fuse), Worker(path) as worker:
            yield worker, fuse
    except (OSError, RuntimeError) as error:
        raise Unable("failed", str(error)) from error
    finally:
        shutil.rmtree(source)


def time_turn(name: str, course: Course) -> dict[str, float]:
    """Seconds of each operation, and of the daemon's processor time.

    Raises  Unable
    """
    with turn_of(name, course) as (worker, fuse):
        cpu_before = cpu_s(fuse) if fuse else 0.0
        seconds = {operation.name: worker.do(operation) for operation in course.operations}
        return seconds | {"cpu": cpu_s(fuse) - cpu_before if fuse else 0.0}


def cpu_s(fuse: FuseMount) -> float:
    """Seconds of processor time that a mount's daemon has used so far, all its threads together."""
    # pid (name) state …: the name may hold anything; user and system time are the 14th and 15th field.
    fields = Path(f"/proc/{fuse.pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count_turn(name: str, course: Course) -> dict[str, Any]:
    """The messages that each operation takes, by opcode, the most frequent first.

    What comes once or twice a pass, however often the operation is done in it, does not count.
    Raises  Unable
    """
    with turn_of(name, course) as (worker, fuse):
        if fuse is None:
            return {}
        found = {}
        with counted(int(fuse.connection.name)) as messages:
            for operation in course.operations:
                worker.do(operation)
                found[operation.name] = {
                    opcode: round(count / operation.n_passes / operation.n, 5)
                    for opcode, count in messages.take().most_common()
                    if count > 2 * operation.n_passes
                }
        return found


def compete(names: Sequence[str], course: Course, n_rounds: int) -> dict[str, Any]:
    """What each subject took and what it was asked, or why it is left out."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    messages: dict[str, dict[str, Any]] = {}
    out: dict[str, dict[str, str]] = {}
    for number in range(n_rounds + 1):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            if name in out:
                continue
            tell(f"round {number} of {n_rounds}: {name}" if number else f"counting: {name}")
            try:
                if number:
                    turns[name].append(time_turn(name, course))
                else:
                    messages[name] = count_turn(name, course.of(SHARE_COUNTED)) if can_count() else {}
            except Unable as error:
                out[name] = {error.kind: error.told}
                tell(f"{name}: {error}")
    return {name: out.get(name) or {**summary(turns[name]), "messages": messages[name]} for name in names}


def summary(turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """All turns of one subject: the medians, and each."""
    seconds = {key: [round(turn[key], 6) for turn in turns] for key in turns[0]}
    return {"medians": {key: statistics.median(values) for key, values in seconds.items()}, "seconds": seconds}


def measure(asked: argparse.Namespace) -> Row:
    """The row of one run."""
    n_rounds = asked.rounds or (N_ROUNDS_QUICK if asked.quick else N_ROUNDS)
    operations = [one.of(SHARE_QUICK) if asked.quick else one for one in OPERATIONS]
    names = asked.subject or list(SUBJECTS)
    load_before = round(os.getloadavg()[0], 2)
    with volume(asked.filesystem) as root:
        subjects = compete(names, Course(root, operations, asked.example), n_rounds)
    return {
        "filesystem": asked.filesystem,
        "options": {"quick": asked.quick, "n_rounds": n_rounds, "subjects": asked.subject},
        "n_cpus": len(os.sched_getaffinity(0)),
        "commands": {name: " ".join(SUBJECTS[name]) for name in names},
        "versions": versions(),
        "operations": {one.name: {"n": one.n, "n_passes": one.n_passes, "unit": one.unit} for one in operations},
        "subjects": subjects,
        "load_before": load_before,
    }


def versions() -> dict[str, str]:
    """Of what takes part and is there."""
    told = {name: importlib.metadata.version(name) for name in ("trashd", "pyfuse3", "trio")}
    commands = {"commit": ["git", "describe", "--always", "--dirty"]}
    commands |= {name: [name, "--version"] for name in ("bindfs", "mergerfs")}
    for name, command in commands.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
            told[name] = said.stdout.splitlines()[0].rpartition(" ")[2]
    return told


def tables(row: Row) -> str:
    """The Markdown of docs/performance.md: speeds, messages, and what it was measured on."""
    absent = [
        f"- {name}: {kind}: {found[kind]}"
        for name, found in row["subjects"].items()
        for kind in ("missing", "failed")
        if kind in found
    ]
    parts = [
        "In a second, medians; in brackets how many times native:",
        _speeds(row),
        "Messages for each operation, entry or MiB, without those that come once or twice in all:",
        _messages(row),
        *(["Left out:", "\n".join(absent)] if absent else []),
        f"Measured on {_conditions(row)}.",
    ]
    return "\n\n".join(parts)


def _speeds(row: Row) -> str:
    rates = {name: _rates(row, found["medians"]) for name, found in row["subjects"].items() if "medians" in found}
    rivals = [name for name in rates if name not in (NATIVE, OURS)]
    lines = []
    for operation, about in row["operations"].items():
        native = rates[NATIVE][operation] if NATIVE in rates else None
        cells = [operation if about["unit"] == "ops" else f"{operation}, {about['unit']}"]
        cells += [_speed(of[operation], None if name == NATIVE else native) for name, of in rates.items()]
        best = max((rates[name][operation] for name in rivals), default=None)
        cells.append(f"{rates[OURS][operation] / best:.2f}" if best and OURS in rates else "-")
        lines.append(cells)
    cpu = ["the daemon's processor time, s", *(_cpu(row["subjects"][name]["medians"]["cpu"]) for name in rates), "-"]
    return _markdown(["operation", *rates, f"{OURS} / best peer"], [*lines, cpu])


def _rates(row: Row, medians: dict[str, float]) -> dict[str, float]:
    return {name: about["n"] / medians[name] for name, about in row["operations"].items()}


def _speed(rate: float, native: float | None) -> str:
    """Three digits, and the ratio."""
    told = next((f"{rate / size:.3g} {sign}" for size, sign in ((1e6, "M"), (1e3, "k")) if rate >= size), f"{rate:.3g}")
    return f"{told} ({rate / native:.2g})" if native else told


def _cpu(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds else "-"


def _messages(row: Row) -> str:
    asked = {name: found["messages"] for name, found in row["subjects"].items() if found.get("messages")}
    lines = ([operation, *(_asked(of[operation]) for of in asked.values())] for operation in row["operations"])
    return _markdown(["operation", *asked], lines)


def _asked(counts: dict[str, float]) -> str:
    """Such as `lookup, read 8`."""
    return ", ".join(_count(opcode.lower(), each) for opcode, each in counts.items()) or "none"


def _count(opcode: str, each: float) -> str:
    return opcode if f"{each:.2g}" == "1" else f"{opcode} {each:.2g}" if each < 100 else f"{opcode} {each:.0f}"


def _conditions(row: Row) -> str:
    on, said = row["machine"], row["versions"]
    programs = ", ".join(f"{name} {version}" for name, version in said.items())
    return (
        f"{row['filesystem']}, {row['at']}, {programs}; Linux {on['kernel']}, "
        f"{row['n_cpus']} x {on['cpu']}, {on['memory_gib']} GiB, Python {on['python']}, load {row['load_before']}"
    )


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def newest(results: Path) -> Row | None:
    """The last complete run: full size, all subjects."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    complete = {"quick": False, "n_rounds": N_ROUNDS, "subjects": None}
    return next((row for row in map(json.loads, reversed(lines)) if row["options"] == complete), None)


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of each operation")
    parser.add_argument("--filesystem", default="ext4", help="below the mounts: ext4, xfs, btrfs or tmpfs")
    parser.add_argument("--rounds", type=int, help="turns of each subject")
    parser.add_argument("--subject", action="append", choices=list(SUBJECTS), help="only this one (may be repeated)")
    parser.add_argument("--example", type=Path, help="pyfuse3's passthroughfs.py")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest result says")
    asked = parser.parse_args()
    if not asked.table and os.geteuid():
        parser.error("only root may mount for all, and drop caches")
    return asked


def main() -> None:
    """Measure, append the result, print it; SIGTERM ends it as cleanly as Ctrl-C."""
    asked = parse()
    if asked.table:
        row = newest(RESULTS)
        print(tables(row) if row else "nothing measured yet")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        see_own_mounts_only()
        with compiled():
            print(tables(keep(RESULTS, measure(asked))))
    except KeyboardInterrupt:
        tell("interrupted: everything was unmounted and deleted")
        sys.exit(130)
    except OSError as error:
        sys.exit(f"not measured: {error}")


if __name__ == "__main__":
    main()
