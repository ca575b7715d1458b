"""Where sweeps take place: a directory in a volume of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_filesystems import tmpfs_volume


@pytest.fixture
def volume() -> Iterator[Path]:
    with tmpfs_volume("256m") as path:
        yield path


@pytest.fixture
def top(volume: Path) -> Path:
    (volume / "top").mkdir()
    return volume / "top"
