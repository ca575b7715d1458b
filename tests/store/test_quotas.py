"""Quotas that are used up, of a user, a group or a project: a swap needs nothing more, and a reap gives it all back.

Not every kernel has quotas: without them these tests are skipped and say so; under User-Mode Linux they run.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.cli.main import run
from fusefs.store.reserve import is_stocked
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import (
    Unsupported,
    limit_group,
    limit_project,
    limit_user,
    quota_volume,
    set_project,
)
from tests.support.store_verbs import assert_silent, entries, init, own, recover_all, restore, swap

pytestmark = pytest.mark.needs("root")

ALICE, PROJECT = 12101, 4711
SIZE_KIB, N_INODES = 4096, 200
USED_UP = (errno.EDQUOT, errno.ENOSPC)  # the second is what xfs says of a project


class Quota(NamedTuple):
    """What a limit is for: the mount's option, and what sets it."""

    option: str
    limit: Callable[..., None]
    of: int


USER, GROUP, OF_PROJECT = (
    Quota("usrquota", limit_user, ALICE), Quota("grpquota", limit_group, ALICE),
    Quota("prjquota", limit_project, PROJECT),
)  # fmt: skip
on_quotas = pytest.mark.parametrize("quota", [USER, GROUP, OF_PROJECT], ids=lambda quota: str(quota.option))
on_filesystems = pytest.mark.parametrize("fs_type", ["ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))])


@contextmanager
def limited(fs_type: str, quota: Quota) -> Iterator[Path]:
    """A directory with a store and two victims of Alice's, who, or whose group or project, can have no more."""
    with ExitStack() as stack:
        try:
            volume = stack.enter_context(quota_volume(fs_type, quota.option))
        except Unsupported as reason:
            pytest.skip(str(reason))
        home = make_tree(volume / "home", Dir(owner=(ALICE, ALICE)))
        if quota is OF_PROJECT:  # no rename leads into a project, so its store is in it
            set_project(home, PROJECT)
        init(home if quota is OF_PROJECT else volume)
        for name in ("job", "next"):
            as_user(ALICE, partial(make_tree, home / name, {"f": os.urandom(1 << 20), "sub": {"g": ""}}))
        as_user(ALICE, partial(stock, home if quota is OF_PROJECT else volume))
        quota.limit(volume, quota.of, SIZE_KIB, N_INODES)
        as_user(ALICE, partial(use_up, home))
        yield home


def stock(volume: Path) -> None:
    with own(volume) as folder:
        assert is_stocked(folder)


def use_up(home: Path) -> None:
    with (home / "filling").open("wb", buffering=0) as file:
        assert errno_of(partial(write, file)) in USED_UP
    assert errno_of(partial(make_many, home)) in USED_UP


def write(file: FileIO) -> None:
    while True:
        file.write(os.urandom(1 << 16))
        os.fsync(file.fileno())


def make_many(home: Path) -> None:
    for n in range(N_INODES + 1):
        (home / f"empty{n}").touch()


def errno_of(act: Callable[[], None]) -> int | None:
    """What the kernel says to it in the end; None if nothing."""
    try:
        act()
    except OSError as error:
        return error.errno
    return None


def store_of(home: Path) -> Path:
    return home if (home / ".trashd").exists() else home.parent


@on_filesystems
@on_quotas
def test_a_swap_and_its_restore_work_where_a_quota_is_used_up(fs_type: str, quota: Quota) -> None:
    with limited(fs_type, quota) as home:
        swapped = as_user(ALICE, partial(swap, home / "job"))
        assert os.listdir(home / "job") == []
        as_user(ALICE, partial(restore, store_of(home), swapped.id))
        assert (home / "job/f").stat().st_size == 1 << 20
        recover_all(store_of(home))
        assert_silent(store_of(home))


@on_filesystems
@on_quotas
def test_a_reap_gives_back_what_a_quota_counted(fs_type: str, quota: Quota) -> None:
    with limited(fs_type, quota) as home:
        swapped = as_user(ALICE, partial(swap, home / "job"))
        command = ["reap", "--now", "--volume", str(store_of(home)), swapped.id]
        assert as_user(ALICE, partial(run, command)) == 0
        assert entries(store_of(home)) == []
        as_user(ALICE, lambda: (home / "next/new").write_bytes(bytes(1 << 18)))
