"""Where sweeps take place: a directory in a volume of its own; and one on each of two filesystems, for copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.move_entries import Volumes, directories, two_volumes
from tests.support.real_filesystems import tmpfs_volume


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume("256m") as path:
        yield path


@pytest.fixture
def top(volume: Path) -> Path:
    (volume / "top").mkdir()
    return volume / "top"


@pytest.fixture(scope="module")
def _volumes() -> Iterator[Volumes]:
    with two_volumes("ext4") as both:
        yield both


@pytest.fixture
def volumes(_volumes: Volumes) -> Iterator[Volumes]:
    yield from directories(*_volumes)


@pytest.fixture(scope="module")
def _quick() -> Iterator[Volumes]:
    with two_volumes("tmpfs") as both:
        yield both


@pytest.fixture
def quick(_quick: Volumes) -> Iterator[Volumes]:
    yield from directories(*_quick)
