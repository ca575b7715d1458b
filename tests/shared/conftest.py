"""`nodes`: two nodes on a fresh directory of each shared filesystem, which is up for all tests on it."""

from collections.abc import Iterator

import pytest

from tests.support.cluster_nodes import BEDS, PARAMETERS, Bed, ClusterNodes


@pytest.fixture(scope="session", params=PARAMETERS)
def shared_bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A filesystem with two clients."""
    with BEDS[request.param]() as up:
        yield up


@pytest.fixture
def nodes(shared_bed: Bed) -> Iterator[ClusterNodes]:
    """Two nodes whose volume is fresh; nothing has been done to it."""
    with shared_bed.nodes() as two:
        yield two
