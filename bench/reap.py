"""`trashd reap` against every other way to delete a tree: one shape on one filesystem a case.

All subjects take turns in one run, each on a copy of the same image, so that all start from the same blocks; on
tmpfs the tree is made anew for each. A time is that of the whole command from start to exit; beside it stands the
time until a sync of the volume after it has ended, so that nobody wins by leaving work to the kernel. Before its
turn every subject deletes a small tree elsewhere: its own program is in memory, whatever the caches hold. A subject
that is not installed is left out, and so is one that has failed or left something behind.

rmz:  cargo install --locked rmz --root /opt/rivals
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.images import FILESYSTEMS, Fill, Fresh, equal_volumes
from bench.runner import Bed, Benchmark, Case
from bench.shapes import SHAPES
from bench.subjects import Unable
from bench.support import TRASHD, make_tree, only_orphan, time_command
from bench.verdicts import Target, times, times_best, value
from bench.watch import watch, watch_interpreter
from tests.support.real_filesystems import tmpfs_volume

OURS, RM, RMZ = "trashd", "rm -rf", "rmz"
COLD, SYNCED, PEAK = "cold", "synced", "its peak"
MAX_ABOVE_INTERPRETER_MIB, MAX_FDS = 64, 128
VICTIM = "victim"
N_REHEARSED = 10
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


def take_turn(name: str, fresh: Fresh, *, cold: bool) -> dict[str, float]:
    """Seconds that one subject takes on a fresh volume, and until that is synced.

    Raises  Unable
    """
    with fresh() as root:
        command = SUBJECTS[name](root)
        set_caches(root, cold=cold)
        rehearse(name)
        seconds = attempt(command)
        synced = seconds + time_command(["sync", "--file-system", root])
        refuse_remains(root)
    return {"": seconds, SYNCED: synced}


def above_interpreter(command: Command) -> dict[str, float]:
    """What a command takes at its peak, all its processes together, in a turn that is not timed."""
    peak, bare = watch(command), watch_interpreter()
    return {"MiB": (peak.pss_kib - bare.pss_kib) / 1024, "fds": peak.n_fds}


def _watch_ours(fresh: Fresh) -> dict[str, float]:
    with fresh() as root:
        return above_interpreter(trashd(root))


@contextmanager
def bed(case: Case) -> Iterator[Bed]:
    """A tree of one shape, on a copy of the same image for each turn."""
    filesystem, name, *cold = case.words
    shape = SHAPES[name]
    n_inodes = case.n + case.n // 10 + 5000  # the directories and the store need some too
    with equal_volumes(filesystem, shape.size_mb, n_inodes, filler(shape.make, case.n)) as fresh:
        turns = {subject: partial(take_turn, subject, fresh, cold=bool(cold)) for subject in SUBJECTS}
        yield Bed(turns, {PEAK: partial(_watch_ours, fresh)})


class Limit(NamedTuple):
    """Our time is to be at most that many times a rival's."""

    times: float
    rival: str | None  # None: the best of those that got it done
    applies: Callable[[str, str, bool], bool]  # to a filesystem, a shape, dropped caches?


LIMITS = (
    Limit(1.0, RMZ, lambda filesystem, shape, _cold: filesystem in ("ext4", "btrfs") and shape == "tree"),
    Limit(0.6, RM, lambda filesystem, shape, _cold: filesystem == "ext4" and shape == "tree"),
    Limit(0.65, None, lambda filesystem, shape, cold: filesystem == "ext4" and _is_flat(shape) and not cold),
    Limit(0.8, None, lambda filesystem, shape, cold: filesystem == "ext4" and _is_flat(shape) and cold),
    Limit(1.1, None, lambda filesystem, _shape, _cold: filesystem in ("xfs", "btrfs")),
    Limit(1.5, None, lambda _filesystem, shape, _cold: shape == "chain"),
)


def _is_flat(shape: str) -> bool:
    return shape.startswith("flat")


def targets(case: Case) -> Sequence[Target]:
    """Those of this filesystem and shape, and that it stays small."""
    filesystem, shape, *cold = case.words
    rivals = [name for name in SUBJECTS if name != OURS]
    found = [
        Target(
            f"of {one.rival or 'the best rival'}",
            times(OURS, one.rival) if one.rival else times_best(OURS, rivals),
            one.times,
        )
        for one in LIMITS
        if one.applies(filesystem, shape, bool(cold))
    ]
    above = Target("above the interpreter", value(f"{PEAK}, MiB"), MAX_ABOVE_INTERPRETER_MIB, unit=" MiB")
    return [*found, above, Target("open fds", value(f"{PEAK}, fds"), MAX_FDS)]


def cases(name: str, n: int) -> Iterator[Case]:
    """On each filesystem, with what is in memory and what is not."""
    for filesystem in FILESYSTEMS:
        yield Case((filesystem, name), n)
        if filesystem != "tmpfs":
            yield Case((filesystem, name, COLD), n)


BENCHMARK = Benchmark(
    "reap",
    "trashd reap beside every other way to delete a tree; all on copies of one image",
    tuple(
        case
        for shape in SHAPES.values()
        for case in cases(shape.name, shape.n_files)
        if shape.name != "large" or case.words[0] != "tmpfs"  # memory has no room for it
    ),
    (Case(("ext4", "tree"), 30_000), Case(("ext4", "flat-400k"), 40_000), Case(("xfs", "tree"), 30_000)),
    bed,
    targets,
    n_rounds=6,
)


def rivals_on_path() -> None:
    """Let those be found that are not where programs are."""
    if Path(RIVALS_BIN).is_dir():
        os.environ["PATH"] += os.pathsep + RIVALS_BIN
