"""The bed itself: nodes are machines of their own, a link that is cut is cut, and nothing hangs for long."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.machine_identity import boot_id, host_id
from tests.support.cluster_nodes import ClusterNodes
from tests.support.node_steps import wait_until


def test_a_node_is_a_machine_of_its_own(nodes: ClusterNodes) -> None:
    assert nodes.a.volume == nodes.b.volume
    seen = [(node.run(host_id), node.run(boot_id), node.run(os.uname).nodename) for node in nodes[:2]]
    assert [boot for _, boot, _ in seen] == [nodes.a.boot, nodes.b.boot]
    assert len({*seen[0], *seen[1], host_id(), boot_id()}) == 8


@pytest.mark.needs("faketime")
def test_a_node_may_have_a_clock_of_its_own(nodes: ClusterNodes) -> None:
    nodes.a.trashd("init", nodes.a.volume)
    nodes.a.run(partial(os.mkdir, nodes.a.volume / "job"))
    told = nodes.a.trashd("swap", "--json", nodes.a.volume / "job", clock_s=7200).objects()[0]
    record = nodes.a.volume / ".trashd/u/0/orphans" / told["id"] / "record.json"
    ahead_s = nodes.a.run(partial(_ahead_s, record, told["id"]))
    assert 7100 < ahead_s < 7300


def _ahead_s(record: Path, identifier: str) -> float:
    """How far the clock that gave an id its time was ahead of the filesystem's."""
    said = datetime.strptime(identifier[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    return said.timestamp() - record.stat().st_mtime


def test_what_one_node_sends_when_it_is_cut_off_comes_late(nodes: ClusterNodes) -> None:
    nodes.a.run(partial(os.mkdir, nodes.a.volume / "before"))
    wait_until(nodes.b, partial(os.listdir, nodes.b.volume), ["before"])
    running = nodes.a.start("init", nodes.a.volume, hold_at=0, call="mkdir")
    assert running.is_held()
    nodes.a.cut()
    running.thaw()
    assert nodes.b.run(partial(os.listdir, nodes.b.volume)) == ["before"]
    nodes.a.mend()
    running.end(100)
    wait_until(nodes.b, partial(_n_names, nodes.b.volume), 2, 60)


def _n_names(directory: Path) -> int:
    return len(os.listdir(directory))
