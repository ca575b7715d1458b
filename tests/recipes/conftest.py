"""`node`: a booted machine on which trashd is installed and alice has an account, for all recipes of a worker."""

from collections.abc import Iterator

import pytest

from tests.recipes.node import Node, booted_node


@pytest.fixture(scope="session")
def booted() -> Iterator[Node]:
    """It has trashd's units, and none runs."""
    with booted_node() as made:
        yield made


@pytest.fixture
def node(booted: Node) -> Iterator[Node]:
    """Volumes that a test mounts there are unmounted at its end, after the checker had nothing to say."""
    yield booted
    booted.leave()
