"""A command that is killed, frozen or cut off at any of its calls on one node loses nothing of what the others do."""

from __future__ import annotations

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.fault_rounds import N_ROUNDS, Verb, calls_of, clear, play, rounds
from tests.support.node_steps import with_store

pytestmark = pytest.mark.timeout(300 + 200 * N_ROUNDS)


@pytest.mark.parametrize("verb", Verb, ids=lambda verb: verb.name.lower())
def test_nothing_is_lost_whatever_becomes_of(nodes: ClusterNodes, verb: Verb) -> None:
    with_store(nodes)
    calls = calls_of(nodes, verb)
    clear(nodes)
    for this in rounds(verb):
        print(nodes.filesystem, *play(nodes, this, calls), flush=True)
        clear(nodes)
