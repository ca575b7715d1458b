"""Where copies are tried: an original on one filesystem, and a directory on another that gets the copy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.copy_file import numbers
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import loop_volume


@pytest.fixture(scope="module")
def ext4() -> Iterator[Path]:
    with loop_volume("ext4", 64) as path:
        yield path


@pytest.fixture(scope="module")
def other() -> Iterator[Path]:
    with loop_volume("ext4", 64) as path:
        yield path


@pytest.fixture
def source(ext4: Path) -> Path:
    return make_tree(ext4 / f"source-{next(numbers)}", {})


@pytest.fixture
def target(other: Path) -> Path:
    return make_tree(other / f"target-{next(numbers)}", {})
