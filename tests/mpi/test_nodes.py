"""Ranks on machines of their own: each has a mount of its own of one server, which takes its time for each call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.many_files import bulky_tree, fill
from tests.support.mpi_jobs import USER, give_to_user, is_gone, run_ranks, store_of_user, swap_by_user
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_calls import assert_silent
from tests.support.trashd_command import Done

pytestmark = pytest.mark.needs("root", "fuse", "mpich")

N_NODES = 2
DELAY_US = 2_000


class Nodes(NamedTuple):
    """The mounts, all of which are seen at the first one's path by the ranks on them."""

    mounts: list[SlowVolume]

    @property
    def path(self) -> Path:
        return self.mounts[0].path

    def slow(self, us: int) -> None:
        for one in self.mounts:
            one.delay(us)
            one.delay_all()

    def shares(self, message: str) -> list[float]:
        """Which part of what was asked came from each."""
        n = [one.n_messages.get(message, 0) for one in self.mounts]
        return [one / sum(n) for one in n]

    def reap(self, n_ranks: int, identifier: str, *words: str) -> Done:
        at = ("--volume", self.path)
        mounts = [one.path for one in self.mounts]
        return run_ranks(
            "mpich", n_ranks, "reap", "--mpi", "--now", *words, *at, identifier, nodes=mounts, at=self.path
        )


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A user's volume, as two machines have it."""
    with ExitStack() as owned:
        source = owned.enter_context(tmpfs_volume("256m"))
        os.chown(source, USER, USER)
        made = Nodes([owned.enter_context(slow_volume(source, 0)) for _ in range(N_NODES)])
        store_of_user(made.path)
        yield made
        made.slow(0)
        as_user(USER, lambda: assert_silent(made.path))


def orphan(tree: Path) -> str:
    give_to_user(tree)
    return swap_by_user(tree)


def test_machines_share_a_large_flat_directory(nodes: Nodes) -> None:
    identifier = orphan(fill(nodes.path / "job", 1500))
    nodes.slow(DELAY_US)
    done = nodes.reap(N_NODES, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.25


def test_machines_share_a_tree_of_every_shape(nodes: Nodes) -> None:
    identifier = orphan(bulky_tree(nodes.path / "job", 8, 30, 300))
    nodes.slow(DELAY_US // 2)
    done = nodes.reap(3, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.2


def test_a_machine_that_has_not_the_volume_ends_the_job_before_anything_is_gone(nodes: Nodes, tmp_path: Path) -> None:
    identifier = orphan(fill(nodes.path / "job", 10))
    bare = tmp_path / "bare"
    bare.mkdir()
    mounts = [nodes.path, bare]
    words = ("reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    done = run_ranks("mpich", 2, *words, nodes=mounts, at=nodes.path)
    assert done.code == 3
    assert "trashd: Refused: rank 1: " in done.err
    assert "  hint: each rank needs the volume at the same path" in done.err
    left = [os.listdir(one) for one in (nodes.path / f".trashd/u/{USER}").glob(f"*/{identifier}/tree")]
    assert [len(names) for names in left] == [10]
