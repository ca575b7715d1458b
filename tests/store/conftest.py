"""The volume of most tests here, and the mounted one; files that need more in it have their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.mount_and_backing import ALICE, TREE
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent, entries, init, reap_now, remove, tmpfs_store


@pytest.fixture
def volume(request: pytest.FixtureRequest) -> Iterator[Path]:
    """What the module's VOLUME makes; without one a tmpfs with a store, of which in the end the checker is silent."""
    with getattr(request.module, "VOLUME", tmpfs_store)() as path:
        yield path


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A volume with a store, and a directory of Alice's; mounted elsewhere."""
    with tmpfs_volume() if request.param == "tmpfs" else loop_volume("ext4", 64) as path:
        source = path / "below" / "source"
        make_tree(path / "below", {"source": {"home": Dir(owner=(ALICE, ALICE))}})
        (path / "mounted").mkdir()
        init(source)
        with trashd_mount(source, path / "mounted", limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted
        assert_silent(source)


@pytest.fixture
def job(mount: Mounted) -> Iterator[Path]:
    """A tree, every name of which the kernel has looked up in the mount; nothing of it is left in the end."""
    path = make_tree(mount.path / "job", TREE)
    snapshot(path)
    yield path
    for name in ("job", "job2", "file", "home/job"):
        if (mount.backing / name).exists():
            remove(mount.path / name)
    for entry in entries(mount.backing):
        reap_now(mount.backing, entry.id)
    assert_silent(mount.backing)
