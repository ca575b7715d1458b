"""A tree that a team works in, its owner's orphan of it, and a mate who has a way in there.

The twin is the same tree in the open, where the same mate has the same way in and removes all that is possible.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TypeVar

from fusefs.core.names import ContainerId
from fusefs.core.results import Reaped
from fusefs.reaper.reap import DEFAULT_REMOVAL, RemovalOptions, reap
from tests.support.make_trees import Dir, File, Spec, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.small_orphans import PINNED
from tests.support.store_verbs import assert_silent, init, own, swap

Result = TypeVar("Result")
ALICE, BOB, MATE, TEAM = 12001, 12002, 12003, 5000
FILESYSTEMS = ("ext4", "xfs", "btrfs", "tmpfs")
THESIS = b"years of work"
DEEP = "results/chapters/thesis"
"""Where it lies in what the mate moves: below a directory that only its owner may write in."""


_SOME_TIME_NS = 30_000_000
"""More than two looks at two clocks are apart, and than a kernel's tick."""


@contextmanager
def team_volume(fs_type: str = "tmpfs") -> Iterator[Path]:
    """A volume with a store and a directory that the team may write in; in the end the checker has nothing to say."""
    with tmpfs_volume() if fs_type == "tmpfs" else loop_volume(fs_type) as volume:
        init(volume)
        make_tree(volume / "project", Dir(mode=0o2775, owner=(0, TEAM)))
        yield volume
        assert_silent(volume)


def shared(entries: Spec, owner: int = ALICE) -> Dir:
    """A directory of one of the team as umask 002 makes it."""
    return Dir(entries, mode=0o2775, owner=(owner, TEAM))


def closed(entries: Spec, owner: int = ALICE) -> Dir:
    """A directory that its owner alone may write in, with that owner's files."""
    return Dir(entries, mode=0o755, owner=(owner, owner))


def results(owner: int = ALICE) -> Dir:
    """What a mate may move, and not delete."""
    thesis = File(THESIS, mode=0o644, owner=(owner, owner))
    return shared({"chapters": closed({"thesis": thesis}, owner), "notes": "n"}, owner)


def job(owner: int = ALICE) -> Dir:
    """What its owner swaps: directories of two of the team, one that others may write in below each."""
    return shared({"a": shared({"b": shared({"c": "1"}, BOB), "d": "2"}, owner), "in": shared({}, owner)}, owner)


def make_project(volume: Path, owner: int = ALICE) -> Path:
    """The project with a job in it, results that are in use, and the twin of both; made some time ago."""
    project = volume / "project"
    for name in ("", "twin-"):
        make_tree(project / f"{name}job", job(owner))
        make_tree(project / f"{name}results", results())
    tick(volume)
    return project


def tick(volume: Path) -> None:
    """Wait until all that is there was made some time ago, by the filesystem's clock."""
    mode = volume.stat().st_mode & 0o7777
    volume.chmod(mode)
    began_ns = volume.stat().st_ctime_ns
    while volume.stat().st_ctime_ns < began_ns + _SOME_TIME_NS:
        volume.chmod(mode)


class WayIn(Enum):
    """How a mate still gets at a directory that has been moved away."""

    FD = "fd"
    CWD = "cwd"


@contextmanager
def way_into(directory: Path) -> Iterator[int]:
    """An fd that follows a directory wherever it goes; to be opened before that."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def move_in(what: Path, fd: int, way: WayIn = WayIn.FD, mate: int = MATE) -> None:
    """A mate moves a directory there."""

    def act() -> None:
        if way is WayIn.CWD:
            os.fchdir(fd)
            os.rename(what, what.name.removeprefix("twin-"))
        else:
            os.rename(what, what.name.removeprefix("twin-"), dst_dir_fd=fd)

    as_user(mate, act, groups=[TEAM])


def remove_what_he_can(tree: Path, mate: int = MATE) -> None:
    """A user removes a tree with plain calls, as far as possible."""

    def act() -> None:
        for where, directories, files in os.walk(tree, topdown=False):
            for name in files:
                with suppress(OSError):
                    os.unlink(os.path.join(where, name))
            for name in directories:
                with suppress(OSError):
                    os.rmdir(os.path.join(where, name))
        with suppress(OSError):
            os.rmdir(tree)

    as_user(mate, act, groups=[TEAM])


def as_asker(uid: int, act: Callable[[], Result]) -> Result:
    """What a user does in the store: one of the team, or root."""
    return act() if uid == 0 else as_user(uid, act, groups=[TEAM])


def swap_as(uid: int, path: Path) -> str:
    return as_asker(uid, lambda: str(swap(path, options=PINNED).id))


def reap_as(uid: int, volume: Path, identifier: str, wishes: RemovalOptions = DEFAULT_REMOVAL) -> Reaped:
    def act() -> Reaped:
        with own(volume) as folder:
            return reap(folder, ContainerId(identifier), wishes)

    return as_asker(uid, act)


def reap_with_thesis(
    volume: Path,
    asker: int = ALICE,
    into: str = "in",
    *,
    way: WayIn = WayIn.FD,
    wishes: RemovalOptions = DEFAULT_REMOVAL,
    first: Callable[[Path], object] = bool,
) -> tuple[str, Reaped]:
    """The id of a swapped job, into which a mate moved the results before it was reaped; and what came of that.

    first  done to the project before the swap
    """
    project = make_project(volume)
    first(project)
    with way_into(project / "job" / into) as fd:
        identifier = swap_as(asker, project / "job")
        move_in(project / "results", fd, way)
        return identifier, reap_as(asker, volume, identifier, wishes)
