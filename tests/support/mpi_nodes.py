"""Machines of ranks: each has a mount of its own of one server, which takes its time for each call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.mpi_jobs import USER, run_ranks, store_of_user
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent
from tests.support.trashd_command import CommandResult


class RankMounts(NamedTuple):
    """The mounts, all of which are seen at the first one's path by the ranks on them."""

    mounts: list[SlowVolume]

    @property
    def path(self) -> Path:
        return self.mounts[0].path

    def slow(self, us: int) -> None:
        """Let each call take so long."""
        for one in self.mounts:
            one.delay(us)
            one.delay_all()

    def shares(self, message: str) -> list[float]:
        """Which part of what was asked came from each."""
        n = [one.n_messages.get(message, 0) for one in self.mounts]
        return [one / sum(n) for one in n]

    def run(self, n_ranks: int, *words: str | Path) -> CommandResult:
        """`mpiexec -n N trashd WORDS` on them in turn, as the user."""
        return run_ranks("mpich", n_ranks, *words, nodes=[one.path for one in self.mounts], at=self.path)


@contextmanager
def user_nodes(n: int) -> Iterator[RankMounts]:
    """A user's volume, as so many machines have it; the checker must have nothing to say at the end."""
    with ExitStack() as owned:
        source = owned.enter_context(tmpfs_volume("256m"))
        os.chown(source, USER, USER)
        made = RankMounts([owned.enter_context(slow_volume(source, 0, limit_s=300)) for _ in range(n)])
        store_of_user(made.path)
        yield made
        made.slow(0)
        as_user(USER, lambda: assert_silent(made.path))
