"""One mount for the tests of a file, on tmpfs and on ext4; each test has a directory of its own in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.mounted import trashd_mount
from tests.support.oracle import Arena, Oracle, arena_on
from tests.support.volumes import loop_volume, tmpfs_volume

_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem that gives a free inode number to the next file at once."""
    with tmpfs_volume("512m") if request.param == "tmpfs" else loop_volume("ext4", 512) as path:
        yield path


@pytest.fixture(scope="module")
def arena(volume: Path) -> Iterator[Arena]:
    """The places of the oracle; what their daemon has open at the end, it had at the start."""
    with ExitStack() as stack:
        source = volume / "mount"
        source.mkdir()
        mounted = stack.enter_context(trashd_mount(source, limit_s=300))
        yield stack.enter_context(arena_on(volume, mounted))


@pytest.fixture
def oracle(arena: Arena) -> Iterator[Oracle]:
    """Fresh directories; in the end the vfs knows nothing of what is forgotten."""
    with arena.oracle(b"case%d" % next(_NUMBERS)) as oracle:
        yield oracle
