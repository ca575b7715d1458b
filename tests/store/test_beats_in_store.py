"""The beats of nodes in a store: nothing that init or the checker mind, and nothing of another's goes with them."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pytest

from fusefs.core.node_beats import NodeBeat, beat_name, encode_beat
from tests.support.make_trees import make_tree
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import OTHER
from tests.support.store_verbs import assert_silent, init

pytestmark = pytest.mark.needs("root")

BEAT = beat_name("beta", str(uuid.UUID(int=7))).decode()


def beats_in(volume: Path) -> Path:
    nodes = volume / ".trashd/nodes"
    nodes.mkdir(0o700)
    (nodes / BEAT).write_bytes(encode_beat(NodeBeat(started_ns=1, n=1, version="0", phase="idle")))
    return nodes


def test_beats_are_left_where_they_are(volume: Path) -> None:
    nodes = beats_in(volume)
    init(volume)
    assert_silent(volume)
    assert [path.name for path in nodes.iterdir()] == [BEAT]


def test_what_is_no_directory_of_roots_alone_makes_way(volume: Path) -> None:
    nodes = volume / ".trashd/nodes"
    nodes.symlink_to("/etc")
    init(volume)
    assert not nodes.is_symlink()
    for mode, owner in ((0o777, 0), (0o700, OTHER)):
        make_tree(nodes, {"theirs": "1"})
        nodes.chmod(mode)
        os.chown(nodes, owner, owner)
        init(volume)
        assert not nodes.exists()
    kept = [path.read_text() for path in (volume / ".trashd").glob("nodes.planted-*/theirs")]
    assert kept == ["1", "1"]


def test_an_old_stores_beats_go_with_it_and_what_else_is_there_stays() -> None:
    for others in ((), ("precious",)):
        with tmpfs_volume() as volume:
            init(volume)
            nodes = beats_in(volume)
            (volume / ".trashd/reaper.lock").touch()
            shutil.rmtree(volume / ".trashd/u/0")
            for name in others:
                (nodes / name).touch()
            (volume / ".trashd").chmod(0o777)
            init(volume)
            init(volume)
            left = [path.name for path in volume.glob(".trashd/old-*/nodes/*")]
            assert left == list(others)
            assert bool(list(volume.glob(".trashd/old-*"))) is bool(others)
