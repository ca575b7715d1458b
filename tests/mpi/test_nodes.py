"""Ranks on machines of their own: each has a mount of its own of one server, which takes its time for each call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.many_files import bulky_tree, fill
from tests.support.mpi_jobs import RankMounts, folder_of_user, is_gone, orphan_of_user, run_ranks

pytestmark = pytest.mark.needs("root", "fuse", "mpich")

N_NODES = 2
DELAY_US = 2_000


def test_machines_share_a_large_flat_directory(nodes: RankMounts) -> None:
    identifier = orphan_of_user(fill(nodes.path / "job", 1500))
    nodes.slow(DELAY_US)
    done = nodes.run(N_NODES, "reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.25


def test_machines_share_a_tree_of_every_shape(nodes: RankMounts) -> None:
    identifier = orphan_of_user(bulky_tree(nodes.path / "job", 8, 30, 300))
    nodes.slow(DELAY_US // 2)
    done = nodes.run(3, "reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.2


def test_a_machine_that_has_not_the_volume_ends_the_job_before_anything_is_gone(
    nodes: RankMounts, tmp_path: Path
) -> None:
    identifier = orphan_of_user(fill(nodes.path / "job", 10))
    bare = tmp_path / "bare"
    bare.mkdir()
    mounts = [nodes.path, bare]
    words = ("reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    done = run_ranks("mpich", 2, *words, nodes=mounts, at=nodes.path)
    assert done.code == 3
    assert "trashd: Refused: rank 1: " in done.err
    assert "  hint: each rank needs the volume at the same path" in done.err
    assert len(os.listdir(folder_of_user(nodes.path) / f"orphans/{identifier}/tree")) == 10
