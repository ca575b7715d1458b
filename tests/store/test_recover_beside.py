"""Recovery in the middle of a command, as the service runs it at any time: the command does what it does alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from tests.support.make_trees import make_tree, remove_tree_hard
from tests.support.store_verbs import (
    ActingAt,
    assert_silent,
    calls_of,
    entries,
    recover_all,
    remove,
    restore,
    swap,
    tmpfs_store,
)

pytestmark = pytest.mark.needs("root")

KEPT = SwapOptions(retention_s=None)


def beside(volume: Path, n_calls: int) -> Iterator[Kernel]:
    """A kernel for each call of an act, before which another process recovers the whole store."""
    for n in range(n_calls):
        yield Kernel(ActingAt(n, lambda: recover_all(volume)))


def restore_late(volume: Path, kernel: Kernel) -> None:
    """Restore a directory into whose successor something was written: that is an orphan, and its id is told."""
    job = make_tree(volume / "job", {"a": "1"})
    identifier = swap(job, options=KEPT).id
    (job / "late").write_text("late")
    restored = restore(volume, identifier, kernel)
    assert (restored.warnings, os.listdir(job)) == ((), ["a"])
    assert [one.id for one in entries(volume)] == [restored.rescued]
    remove(job)
    for entry in entries(volume):
        restore(volume, entry.id, to=volume / "out")
        remove_tree_hard(volume / "out")


def test_what_was_written_meanwhile_is_rescued_and_told() -> None:
    with tmpfs_store() as volume:
        n_calls = len(calls_of(lambda kernel: restore_late(volume, kernel)))
        for kernel in beside(volume, n_calls):
            restore_late(volume, kernel)
        assert_silent(volume)


class TakingFreshAt:
    """A hook that removes the staged fresh directory once, as a recovery does that had seen no record yet."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self.n_taken = 0

    def __call__(self, call: str) -> None:
        if call == "exchange" and not self.n_taken:
            for tree in self._volume.glob(".trashd/u/*/stage/*/tree"):
                tree.rmdir()
                self.n_taken += 1


def test_swap_whose_fresh_directory_a_late_recovery_took_starts_again() -> None:
    with tmpfs_store() as volume:
        victim = make_tree(volume / "job", {"a": "1"})
        hook = TakingFreshAt(volume)
        swapped = swap(victim, Kernel(hook), KEPT)
        assert hook.n_taken == 1
        assert not any(victim.iterdir())
        assert [entry.id for entry in entries(volume)] == [swapped.id]
        assert_silent(volume)
