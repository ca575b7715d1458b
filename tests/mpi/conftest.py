"""A user's volume, and each MPI that there is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DEMANDED_GROUPS
from tests.support.mpi_jobs import USER, RankMounts, store_of_user, user_nodes
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent

MPICH = pytest.param("mpich", marks=pytest.mark.needs("root", "mpich"))
OPEN_MPI = pytest.param("openmpi", marks=pytest.mark.needs("root", "openmpi"))
EACH_MPI = [MPICH, OPEN_MPI] if "mpi" in DEMANDED_GROUPS else [MPICH]
"""CI has MPICH alone, from PyPI: a law of which it ran the other's case would be left out."""


@pytest.fixture(params=EACH_MPI)
def mpi(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A user's; the checker must have nothing to say at the end."""
    with tmpfs_volume("512m") as path:
        store_of_user(path)
        yield path
        as_user(USER, lambda: assert_silent(path))


@pytest.fixture
def nodes() -> Iterator[RankMounts]:
    """A user's volume, as two machines have it."""
    with user_nodes(2) as two:
        yield two
