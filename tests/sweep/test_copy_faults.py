"""Copies on a full or failing target, stopped and killed: each match is whole at one place, or at both."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.sweep.request import IfExists
from tests.support.make_trees import (
    File,
    HardLink,
    Spec,
    Symlink,
    remove_tree_hard,
)
from tests.support.move_entries import AfterThe, Volumes, fill, move, pass_a_tick, places
from tests.support.real_filesystems import full, tmpfs_volume
from tests.support.store_calls import (
    Counting,
    DyingAt,
    FailingAt,
    assert_silent,
    calls_of,
    die,
    in_child,
    init,
    problems,
)

pytestmark = pytest.mark.needs("root", "loop")

ALICE = 12001
_CHANGING = frozenset(
    {
        "mkdir",
        "rmdir",
        "link",
        "rename",
        "renameat2",
        "unlink",
        "symlink",
        "chown",
        "chmod",
        "setxattr",
        "utimens",
        "fsync",
    }
)
"""Calls before which to die: between two of them nothing changes that has a name."""


def test_a_full_target_keeps_the_original(volumes: Volumes) -> None:
    job, _ = volumes
    fill(job, {"large": os.urandom(1 << 20), "small": b""})
    with tmpfs_volume("2m") as small:
        (small / "archive").mkdir()
        with full(small, inodes=False):
            assert move(job, small / "archive", copy=True) == {"large": errno.ENOSPC}
            assert os.listdir(small / "archive") == ["small"]
        assert (job / "large").stat().st_size == 1 << 20


def test_a_stop_in_the_middle_leaves_what_is_not_begun(volumes: Volumes) -> None:
    job, archive = volumes
    fill(job, {str(n): os.urandom(100_000) for n in range(5)})
    before = places(job)
    counting = Counting()
    refused = move(job, archive, Kernel(counting), copy=True, is_stopped=lambda: counting.calls.count("ficlone") >= 3)
    assert refused == {}
    assert places(job, archive) == before
    assert len(places(job)) == 5 - len(places(archive)) > 1


SMALL: Spec = {
    "a": {"file": File(b"text" * 2000, 0o640, (ALICE, ALICE), {"user.a": b"b"}), "second": HardLink("a/file")},
    "link": Symlink("x"),
    "taken": b"new",
}


@pytest.mark.parametrize("if_exists", [IfExists.NUMBER, IfExists.REPLACE])
def test_nothing_is_lost_by_a_kill_before_any_call(quick: Volumes, if_exists: IfExists) -> None:
    job, archive = quick
    fill(job, SMALL)
    fill(archive, {"taken": b"old"})
    pass_a_tick()
    calls = calls_of(lambda kernel: move(job, archive, kernel, copy=True, if_exists=if_exists))
    for n in (*(n for n, call in enumerate(calls) if call in _CHANGING), len(calls)):
        fill(job, SMALL)
        fill(archive, {"taken": b"old"})
        before = places(job)
        pass_a_tick()
        code = in_child(partial(move, job, archive, Kernel(DyingAt(n)), copy=True, if_exists=if_exists))
        assert code in (0, DyingAt.EXIT_CODE)
        pass_a_tick()
        assert move(job, archive, copy=True, if_exists=if_exists) == {}
        after = places(archive)
        number = "taken.1" if if_exists is IfExists.NUMBER else "taken"
        assert {Path(number) if path.name == "taken" else path: seen for path, seen in before.items()} == {
            path: seen for path, seen in after.items() if path.name != "taken" or number == "taken"
        }
        assert places(job) == {}
    assert code == 0
    assert (archive / "a/file").stat().st_nlink == 2


@pytest.mark.parametrize("call", ["symlink", "chown", "mkdir"])
def test_what_a_killed_copy_has_left_at_a_volumes_root_goes_with_init(quick: Volumes, call: str) -> None:
    job, archive = quick
    fill(job, {"link": Symlink("x"), "a": {"link": Symlink("y")}})
    init(archive.parent)
    assert in_child(partial(move, job, archive.parent, Kernel(AfterThe(call, die)), copy=True)) == DyingAt.EXIT_CODE
    assert len(problems(archive.parent)) == 1
    init(archive.parent)
    assert_silent(archive.parent)
    assert len(places(job)) == 2
    remove_tree_hard(archive.parent / ".trashd")


@pytest.mark.parametrize("number", [errno.EIO, errno.EXDEV])
def test_nothing_is_lost_when_any_call_fails(quick: Volumes, number: int) -> None:
    job, archive = quick
    for n in itertools.count():
        fill(job, SMALL)
        fill(archive, {})
        before = places(job)
        hook = FailingAt(n, number)
        n_fds = len(os.listdir("/proc/self/fd"))
        with suppress(OSError, TrashdError):
            move(job, archive, Kernel(hook), copy=True)
        assert len(os.listdir("/proc/self/fd")) == n_fds, hook.failed
        try:
            assert places(job, archive) == before
        except AssertionError as error:
            error.add_note(f"call {n}, {hook.failed}")
            raise
        if hook.failed is None:
            return
