"""What commands take on a slow server that may have extended attributes, of which an ACL is one."""

import os
import time
from pathlib import Path
from types import MappingProxyType

from bench.listing_steps import (
    COLOURED,
    COLOURS,
    FLAT,
    Course,
    Step,
    Work,
    command,
    dropped,
    find_newer,
    take_courses,
    twice,
)
from bench.subjects import NATIVE, OURS, SSHFS
from bench.support import make_flat
from fusefs.mount.places.find_mounts import mounts_of, read_counters

# A plain `ls -l` asks for nothing else than the coloured one: attributes, security.selinux, the access ACL.
LISTINGS = (COLOURED, COLOURS, find_newer())
COPIES = (
    command("getfacl -R", "getfacl", "-R", "-p", "{}"),
    command("rsync -aA --dry-run", "rsync", "-aA", "--dry-run", "{}/", "{empty}/"),
)
COMMANDS = (*LISTINGS, *COPIES)
MEMORY = "memory: its cache, as it tells"
"""A figure in bytes for each file; the others are seconds."""
REMARKS = MappingProxyType(
    {
        NATIVE: "the first time stands for all: after so long nothing is believed any more",
        SSHFS: "has no extended attributes",
    }
)
_TOLD_S = 1.0  # the daemon tells of its cache a moment after it has done something


def take_turn(work: Work) -> dict[str, float]:
    """Seconds of the commands; direct takes them once, and the peers only the first one, which asks for most.

    Raises  Unable
    """
    courses = [_thrice(COLOURED)]
    if work.subject == NATIVE:
        courses = [Course((step,)) for step in COMMANDS]
    elif work.subject == OURS:
        first, *others = map(_thrice, COMMANDS)
        courses = [Course((*first.steps, _memory(work.n))), *others]
    return take_courses(courses, work)


def make(source: Path, n: int) -> None:
    """One directory, and a file that is newer."""
    source.mkdir()
    make_flat(source / FLAT, n)
    (source / "now").touch()


def _thrice(step: Step) -> Course:
    """First, again, and with the kernel's caches dropped."""
    return Course((*twice(step).steps, dropped(step)))


def _memory(n: int) -> Step:
    def take(path: Path) -> float:
        time.sleep(_TOLD_S)
        return read_counters(mounts_of(os.fsencode(path))[0]).stats.gauges["cache_bytes"] / n

    return Step(MEMORY, FLAT, take)
