"""`trashd reap` against every other way to delete a tree: one shape on one filesystem.

    python -m bench.reap --filesystem ext4 --shape tree             a million files; minutes
    python -m bench.reap --filesystem ext4 --shape flat-1m --cold   with dropped caches
    python -m bench.reap --filesystem xfs --shape tree --files 50000 --rounds 1
    python -m bench.reap --table                                    the tables of docs/performance.md

All subjects take turns in one run, each on a copy of the same image, so that all start from the same blocks; on
tmpfs the tree is made anew for each. A time is that of the whole command from start to exit; beside it stands the
time until a sync of the volume after it has ended, so that nobody wins by leaving work to the kernel. Before its
turn every subject deletes a small tree elsewhere: its own program is in memory, whatever the caches hold. Medians
of five rounds, of three above 400,000 files; the order of the subjects rotates. A subject that is not installed is
left out, and so is one that has failed or left something behind.

rmz:  cargo install --locked rmz --root /opt/rivals

Each run appends a line to bench/results/reap.jsonl. As root only.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.images import FILESYSTEMS, Fill, Fresh, equal_volumes
from bench.shapes import SHAPES
from bench.support import TRASHD, keep, make_tree, measuring, only_orphan, tell, time_command
from bench.targets import OURS, RM, RMZ, details, newest, tables, verdicts
from bench.watch import watch, watch_interpreter
from tests.support.real_filesystems import tmpfs_volume

RESULTS = Path(__file__).with_name("results") / "reap.jsonl"
VICTIM = "victim"
N_REHEARSED = 10
N_ROUNDS, N_ROUNDS_OF_MANY, MANY = 5, 3, 400_000
# Ten times what the slowest needs: for one that would never end.
TIMEOUT_S = 1200.0
RIVALS_BIN = "/opt/rivals/bin"

# -U spares it an lstat of each file: unlink itself says what a directory is.
PERL = """
sub clear {
    my ($name) = @_;
    my @directories;
    chdir $name or die "$name: $!";
    opendir my $open, "." or die "$name: $!";
    while (defined(my $entry = readdir $open)) {
        next if $entry eq "." || $entry eq "..";
        unlink $entry or push @directories, $entry;
    }
    closedir $open;
    clear($_) for @directories;
    chdir ".." or die "$name/..: $!";
    rmdir $name or die "$name: $!";
}
clear($ARGV[0]);
"""

Command = Sequence[str | Path]
Turn = tuple[float, float]  # seconds until the command has ended, and until its volume is synced


class Unable(Exception):
    """A subject that is not there or did not get it done; what else goes wrong ends the run."""

    def __init__(self, kind: str, told: str) -> None:
        super().__init__(f"{kind}: {told}")
        self.kind = kind  # missing or failed
        self.told = told


def trashd(root: Path) -> Command:
    """Reap the victim, which is swapped before."""
    time_command([TRASHD, "swap", root / VICTIM])
    return [TRASHD, "reap", "--now", "--volume", root, only_orphan(root)]


def rsync(root: Path) -> Command:
    """Make the victim the same as an empty directory."""
    empty = root / "empty"
    empty.mkdir()
    return ["rsync", "-a", "--delete", f"{empty}/", f"{root / VICTIM}/"]


# What each runs to delete the victim in a volume; what has to be done before that is done when it is asked.
SUBJECTS = MappingProxyType[str, Callable[[Path], Command]](
    {
        OURS: trashd,
        RMZ: lambda root: ["rmz", root / VICTIM],
        RM: lambda root: ["rm", "-rf", root / VICTIM],
        "find -delete": lambda root: ["find", root / VICTIM, "-delete"],
        "rsync": rsync,
        "perl": lambda root: ["perl", "-U", "-e", PERL, root / VICTIM],
    }
)


def filler(make: Callable[[Path, int], int], n_files: int) -> Fill:
    """What makes the victim, and beside it a store."""

    def fill(root: Path) -> None:
        time_command([TRASHD, "init", root])
        make(root / VICTIM, n_files)

    return fill


def attempt(command: Command) -> float:
    """Seconds of a subject's command.

    Raises  Unable
    """
    try:
        return time_command(command, timeout_s=TIMEOUT_S)
    except FileNotFoundError as error:
        raise Unable("missing", str(command[0])) from error
    except OSError as error:
        raise Unable("failed", error.strerror or str(error)) from error


def refuse_remains(root: Path) -> None:
    """Raise Unable if something is left of the victim, at its name or in the store."""
    places = (VICTIM, ".trashd/u/*/orphans", ".trashd/u/*/reaping", ".trashd/u/*/quarantine")
    for left in (left for place in places for left in root.glob(f"{place}/*")):
        raise Unable("failed", f"left {left.relative_to(root)}")


def rehearse(name: str) -> None:
    """Let a subject delete a small tree in memory.

    Raises  Unable
    """
    with tmpfs_volume() as root:
        filler(make_tree, N_REHEARSED)(root)
        attempt(SUBJECTS[name](root))
        refuse_remains(root)


def set_caches(root: Path, *, cold: bool) -> None:
    """Have nothing to write any more, and all entries of a volume in the caches, or none."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    else:
        # The number of links makes find ask for the inode of each entry; it goes as deep as a chain does.
        time_command(["find", root, "-links", "+1000000"])


def take_turn(name: str, fresh: Fresh, *, cold: bool) -> Turn:
    """What one subject takes on a fresh volume.

    Raises  Unable
    """
    with fresh() as root:
        command = SUBJECTS[name](root)
        set_caches(root, cold=cold)
        rehearse(name)
        seconds = attempt(command)
        synced = seconds + time_command(["sync", "--file-system", root])
        refuse_remains(root)
    return seconds, synced


def compete(names: Sequence[str], fresh: Fresh, n_rounds: int, *, cold: bool) -> dict[str, Any]:
    """What each subject took, or why it is left out."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    out: dict[str, dict[str, str]] = {}
    for number in range(n_rounds):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            if name in out:
                continue
            try:
                turns[name].append(take_turn(name, fresh, cold=cold))
            except Unable as error:
                out[name] = {error.kind: error.told}
                tell(f"{name}: {error}")
            else:
                seconds, synced = turns[name][-1]
                tell(f"round {number + 1} of {n_rounds}: {name}: {seconds:.2f} s, until synced {synced:.2f} s")
    return {name: out[name] if name in out else summary(turns[name]) for name in names}


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """All turns of one subject."""
    seconds, all_synced = zip(*turns, strict=True)
    return {
        "median": statistics.median(seconds),
        "least": min(seconds),
        "synced": statistics.median(all_synced),
        "seconds": seconds,
        "all_synced": all_synced,
    }


def watch_ours(fresh: Fresh) -> dict[str, int]:
    """The peak of our command in a turn that is not timed; nothing if it failed."""
    with fresh() as root:
        try:
            return watch(trashd(root))._asdict()
        except OSError as error:
            tell(f"{OURS}: failed while it was watched: {error}")
            return {}


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """The row of one run."""
    shape = SHAPES[asked.shape]
    n_files = asked.files or shape.n_files
    n_rounds = asked.rounds or (N_ROUNDS_OF_MANY if n_files > MANY else N_ROUNDS)
    names = asked.subject or list(SUBJECTS)
    n_inodes = n_files + n_files // 10 + 5000  # the directories and the store need some too
    load_before = round(os.getloadavg()[0], 2)
    with equal_volumes(asked.filesystem, shape.size_mb, n_inodes, filler(shape.make, n_files)) as fresh:
        peak = watch_ours(fresh) if OURS in names else {}
        subjects = compete(names, fresh, n_rounds, cold=asked.cold)
    return {
        "filesystem": asked.filesystem,
        "shape": shape.name,
        "n_files": n_files,
        "cold": asked.cold,
        "options": {"files": asked.files, "n_rounds": n_rounds, "subjects": asked.subject},
        "subjects": subjects,
        "peak": peak,
        "interpreter": watch_interpreter()._asdict(),
        "load_before": load_before,
    }


def parse() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filesystem", choices=FILESYSTEMS)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--cold", action="store_true", help="drop the caches of this machine before each turn")
    parser.add_argument("--files", type=int, help="files of the victim, to have it quicker")
    parser.add_argument("--rounds", type=int, help="turns of each subject")
    parser.add_argument("--subject", action="append", choices=list(SUBJECTS), help="only this one (may be repeated)")
    parser.add_argument("--table", action="store_true", help="measure nothing; print what the newest results say")
    asked = parser.parse_args()
    if not asked.table:
        if not asked.filesystem or not asked.shape:
            parser.error("--filesystem and --shape, or --table")
        if asked.filesystem == "tmpfs" and (asked.cold or asked.shape == "large"):
            parser.error("a tmpfs is never cold, and has no room for large files")
        if os.geteuid():
            parser.error("only root may mount")
    return asked


def main() -> None:
    """Measure, append the result, print it."""
    asked = parse()
    if asked.table:
        print(tables(newest(RESULTS)))
        return
    os.environ["PATH"] += os.pathsep + RIVALS_BIN
    with measuring():
        row = keep(RESULTS, measure(asked))
    print(details(row))
    print("\n".join(verdicts(row)))


if __name__ == "__main__":
    main()
