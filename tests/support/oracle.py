"""The oracle: a native directory says what the vfs and the mount must answer to the same calls."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

import pytest

from fusefs.mount.tree.vfs import Vfs
from tests.support.covering_sets import Axes
from tests.support.fake_dev_fuse import vfs_at
from tests.support.foreground_mount import Mounted, until
from tests.support.oracle_subjects import Native, Story, Subject
from tests.support.simulated_kernel import Player
from tests.support.transports import by_ring


@dataclass(frozen=True)
class Way(Axes):
    """Options of a mount besides the usual ones: over what it gets its messages, and how it answers them."""

    transport: str = ""
    answers: str = ""

    def options(self) -> list[str]:
        return [option for option in (self.transport, self.answers) if option]


EACH_WAY = pytest.mark.parametrize(
    ("volume", "arena"),
    [
        ("tmpfs", Way()),
        ("ext4", Way()),
        by_ring("tmpfs", Way("uring=on")),
        by_ring("ext4", Way("uring=on")),
        ("tmpfs", Way("", "passthrough=off")),
        by_ring("tmpfs", Way("uring=on", "passthrough=off")),
        ("tmpfs", Way("engine=plain")),
        ("ext4", Way("engine=plain")),
    ],
    indirect=True,
    scope="module",
    ids=["tmpfs", "ext4", "tmpfs-uring", "ext4-uring", "daemon", "daemon-uring", "plain", "plain-ext4"],
)
"""On both filesystems over /dev/fuse and over io_uring; without passthrough; and in plain mode."""
SLOW = pytest.mark.takes_engine
"""Without these listings of a slow filesystem are others."""
DIRECT: Final[dict[str, pytest.MarkDecorator | tuple[()]]] = {
    "passthrough=auto": (), "passthrough=off": (), "backing=slow": SLOW,
}  # fmt: skip
"""Options with which requests that pyfuse3 doesn't know are answered in another way, and marks of tests with them."""
ALL_DIRECT = pytest.mark.parametrize(
    ("volume", "arena"),
    [pytest.param(kind, Way("", how), marks=marks) for kind in ("tmpfs", "ext4") for how, marks in DIRECT.items()],
    indirect=True,
    scope="module",
)
_N_SHOWN, _WIDTH = 6, 200

Act = Callable[[Subject, Story], None]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Empty directories of one filesystem, reached in different ways."""

    native: Native
    player: Player
    late: Player  # the same vfs, for a kernel that forgets all at the end
    mounted: Native
    behind: dict[str, Native]  # by a subject's name: the same directory on the backing filesystem
    mount: Mounted
    has_players: bool

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The one that is right, then those that have to agree."""
        return self.native, *((self.player, self.late) if self.has_players else ()), self.mounted

    def agree(self, act: Act) -> None:
        """Each answers as the native one does, and leaves the same tree, seen through it and behind it."""
        right = Story()
        act(self.native, right)
        expected = self.native.tree()
        unlike: list[str] = []
        for subject in self.subjects[1:]:
            story, behind = Story(), self.behind[subject.name]
            with subject.forgetting_late() if subject is self.late else contextlib.nullcontext():
                act(subject, story)
            unlike += _compare(subject.name, story.lines, right.lines)
            unlike += _compare(f"tree of {subject.name}", _lines(subject.tree()), _lines(expected))
            unlike += _compare(f"tree behind {subject.name}", _lines(behind.tree()), _lines(expected))
            if subject is not self.late:  # it still knows whose numbers are given out again
                unlike += self._compare_numbers(subject, behind)
        assert not unlike, "\n".join(unlike)
        assert not self.player.references
        assert not self.late.references

    def _compare_numbers(self, subject: Subject, behind: Native) -> list[str]:
        """What was made on a busy machine may have another number as long as the kernel knows it: not longer."""
        paths = list(behind.tree())

        def numbers(one: Subject) -> list[tuple[bytes, int]]:
            return [(path, one.ino(path)) for path in paths]

        def is_right() -> bool:
            if numbers(subject) == there:
                return True
            self.mount.forget_all()
            return False

        there = numbers(behind)
        return [] if until(is_right) else _compare(f"inode numbers of {subject.name}", numbers(subject), there)


def agreed(act: Act) -> Callable[[Oracle], None]:
    """A test of that name: all subjects, doing that, answer as the native one does."""

    def test(oracle: Oracle) -> None:
        oracle.agree(act)

    test.__name__, test.__doc__, test.__module__ = act.__name__, act.__doc__, act.__module__
    return test


@dataclass(frozen=True, slots=True)
class Arena:
    """Where the directories of many tests are."""

    native: Path
    inside: Path  # of the vfs in this process
    vfs: Vfs
    mount: Mounted
    has_players: bool  # whether the vfs is asked too

    @contextlib.contextmanager
    def oracle(self, case: bytes) -> Iterator[Oracle]:
        """The subjects in fresh directories."""
        name = os.fsdecode(case)
        tops = [self.native / name, self.inside / name, self.inside / f"{name}-late", self.mount.backing / name]
        for top in tops:
            top.mkdir()
        try:
            yield Oracle(
                Native("native", tops[0]),
                Player("vfs", self.vfs, case),
                Player("vfs forgetting late", self.vfs, case + b"-late"),
                Native("mount", self.mount.path / name),
                {
                    "vfs": Native("behind", tops[1]),
                    "vfs forgetting late": Native("behind", tops[2]),
                    "mount": Native("behind", tops[3]),
                },
                self.mount,
                self.has_players,
            )
        finally:
            for top in (*tops[:3], self.mount.path / name):
                shutil.rmtree(top)


def _lines(tree: Mapping[bytes, object]) -> list[object]:
    return [repr(item) for item in sorted(tree.items())]


def _compare(what: str, actual: Sequence[object], expected: Sequence[object]) -> list[str]:
    """Format the first lines that differ."""
    unlike = [(one, other) for one, other in zip_longest(actual, expected) if one != other]
    return [f"{what}: {str(one)[:_WIDTH]}\n  instead of: {str(other)[:_WIDTH]}" for one, other in unlike[:_N_SHOWN]]


@contextlib.contextmanager
def arena_on(volume: Path, mount: Mounted, *, has_players: bool = True) -> Iterator[Arena]:
    """The directories on a volume that `mount` is on too.

    has_players  False: only the mount has to agree; what it is mounted with makes no difference to a vfs without one
    """
    native, inside = volume / "native", volume / "inside"
    native.mkdir()
    inside.mkdir()
    with vfs_at(inside, max_fds=256) as vfs:
        yield Arena(native, inside, vfs, mount, has_players)
        assert len(vfs.nodes) == 1  # the root (I7)
