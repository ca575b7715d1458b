"""A volume for the command line's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent, init


@pytest.fixture
def volume() -> Iterator[Path]:
    """A tmpfs with a store; the checker must have nothing to say at the end."""
    with tmpfs_volume("256m") as path:
        init(path)
        yield path
        assert_silent(path)


@pytest.fixture
def ext4() -> Iterator[Path]:
    """A small ext4 with a store; the checker must have nothing to say at the end."""
    with loop_volume("ext4", 64) as path:
        init(path)
        yield path
        assert_silent(path)
