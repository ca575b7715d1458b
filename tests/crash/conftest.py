"""The volume on which scenes are set up, one after the other; files that need another have their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_filesystems import tmpfs_volume


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path
