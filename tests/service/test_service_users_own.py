"""Users' own stores in the root of a volume: root's service serves them as their owners, registered or not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.names import user_store
from fusefs.store.registry_lines import XATTR
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import QUICK, service
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import init, swap
from tests.support.user_homes import own_stores

pytestmark = pytest.mark.needs("root")

NOBODYS = 61234
"""A user whom the accounts don't list, and who has no home that could have a registry."""
OFTEN = f'poll = "1s"\n{QUICK}'


@pytest.fixture
def shared() -> Iterator[Path]:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        yield volume


def own(volume: Path) -> Path:
    return volume / os.fsdecode(user_store(NOBODYS))


def thrown(volume: Path) -> Path:
    """The container of what the user threw away, due at once."""
    path = make_tree(volume / "job", Dir({"file": "x"}, owner=(NOBODYS, NOBODYS)))
    identifier = as_user(NOBODYS, lambda: str(swap(path, options=EXPIRED).id))
    path.rmdir()
    (found,) = volume.glob(f".trashd*/*/{NOBODYS}/orphans/{identifier}")
    return found


def test_it_is_served_without_a_registry_before_and_after_roots_init(shared: Path, base: Path) -> None:
    first = thrown(shared)
    assert first.is_relative_to(own(shared))
    with service(base, config=OFTEN) as running:
        running.until(lambda: not first.exists())
        second = thrown(shared)
        running.until(lambda: not second.exists())
        running.until(lambda: {one.owner for one in own_stores(running)} == {NOBODYS})
        third = thrown(shared)
        init(shared)
        fourth = thrown(shared)
        assert not fourth.is_relative_to(own(shared))
        running.until(lambda: not third.exists() and not fourth.exists())
    assert {path.lstat().st_uid for path in (own(shared), *own(shared).rglob("*"))} == {NOBODYS}
    assert XATTR not in os.listxattr(own(shared))


def test_a_copy_is_not(shared: Path, base: Path) -> None:
    thrown(shared)
    subprocess.run(["cp", "-a", own(shared), shared / "copy"], check=True)
    shutil.rmtree(own(shared))
    (shared / "copy").rename(own(shared))
    with tmpfs_volume(options=("mode=1777",)) as other, service(base, config=OFTEN) as running:
        one = thrown(other)
        running.until(lambda: not one.exists())
        assert list(own(shared).glob(f"u/{NOBODYS}/orphans/*"))


def test_one_that_others_may_enter_is_not(shared: Path, base: Path) -> None:
    kept = thrown(shared)
    own(shared).chmod(0o750)
    with tmpfs_volume(options=("mode=1777",)) as other, service(base, config=OFTEN) as running:
        one = thrown(other)
        running.until(lambda: not one.exists())
        assert kept.exists()
