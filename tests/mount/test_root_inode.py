"""The mount's root: the kernel keeps its ACL, and a process that passes it on the way to a name asks no daemon."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.mount_options import Coherence, parse_options
from fusefs.linux.mountinfo import TOP
from fusefs.mount.places.attach import attach_later
from fusefs.mount.places.find_mounts import mounts_of
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.open_files import held
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, mounts, tmpfs_volume

pytestmark = [pytest.mark.needs("root", "fuse"), pytest.mark.takes_engine]

ALICE, BOB = 70_001, 70_002
N_LOOKS = 100
OPEN_TREE, MOVE_MOUNT = 428, 429


@pytest.fixture(params=["exclusive", "shared"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tmpfs_volume() as volume:
        (volume / "source/sub").mkdir(parents=True)
        (volume / "source/sub/file").touch()
        volume.chmod(0o755)
        # The ACL of what is below is asked for again when its attributes are, or when it has been forgotten.
        with (
            trashd_mount(volume / "source", options=(f"coherence={request.param}", "timeout=3600")) as mounted,
            held(mounted.path / "sub/file"),
        ):
            yield mounted


def may(uid: int, path: Path) -> bool:
    """Whether a user comes to a path, again and again the same."""

    def look() -> list[bool]:
        return [os.access(path, os.F_OK) for _ in range(N_LOOKS)]

    [answer] = set(as_user(uid, look))
    return answer


def test_who_passes_the_root_asks_once(mount: Mounted) -> None:
    assert may(ALICE, mount.path / "sub/file")
    asked = mount.n_requests_for("getxattr")
    assert may(BOB, mount.path / "sub/file")
    assert mount.n_requests_for("getxattr") == asked


def test_an_acl_of_the_root_is_obeyed_at_once(mount: Mounted) -> None:
    for allows_alice in (False, True, False):
        hers = (USER, 5 if allows_alice else 0, ALICE)
        rest = (GROUP_OBJ, 5, NOBODY), (MASK, 5, NOBODY), (OTHER, 5, NOBODY)
        os.setxattr(mount.path, ACCESS, acl((USER_OBJ, 7, NOBODY), hers, *rest))
        assert may(ALICE, mount.path / "sub") is allows_alice
        assert may(BOB, mount.path / "sub")
    os.removexattr(mount.path, ACCESS)
    assert may(ALICE, mount.path / "sub")


def test_the_roots_mode_is_obeyed_at_once(mount: Mounted) -> None:
    for mode in (0o700, 0o755, 0o750):
        mount.path.chmod(mode)
        assert may(ALICE, mount.path / "sub") is bool(mode & stat.S_IXOTH)


def test_there_is_one_mount_and_it_goes_as_one(mount: Mounted) -> None:
    assert [entry.fs_type for entry in mounts() if entry.mount_point == os.fsencode(mount.path)] == ["fuse.trashd"]
    assert not (mount.path / os.fsdecode(TOP)).exists()
    assert os.path.ismount(mount.path)
    assert os.stat(mount.path).st_ino == os.stat(mount.backing).st_ino


def test_a_name_like_the_tops_is_a_name_like_any(mount: Mounted) -> None:
    (mount.path / os.fsdecode(TOP)).mkdir()
    (mount.path / os.fsdecode(TOP) / "file").touch()
    assert os.listdir(mount.backing / os.fsdecode(TOP)) == ["file"]
    with bind_mount(mount.path / os.fsdecode(TOP), mount.path / "sub"):
        assert os.listdir(mount.path / "sub") == ["file"]


def test_nobody_sees_the_mount_before_it_answers(mount: Mounted) -> None:
    """No daemon serves it, and no process has to wait for it."""
    target = mount.path.with_name("other")
    target.mkdir()
    options = parse_options([], as_root=True, default_coherence=Coherence.SHARED)
    before = mounts()
    attached = attach_later(os.fsencode(mount.backing), os.fsencode(target), options, [])
    assert mounts() == before
    assert attached.unattached_fd is not None
    attached.unattached_fd.close()
    attached.fd.close()


@pytest.mark.parametrize("call", [OPEN_TREE, MOVE_MOUNT])
def test_without_another_inode_the_root_itself_is_shown(mount: Mounted, call: int) -> None:
    """Before Linux 6.15 a mount that is apart can't be cloned; where move_mount is denied it can't be shown."""
    target = mount.path.with_name("other")
    with trashd_mount(mount.backing, target, ["coherence=shared"], denied=[call]) as other:
        assert os.listdir(other.path) == ["sub"]
        assert mounts_of(os.fsencode(target))[0].root == b"/"
        assert may(ALICE, other.path / "sub/file")


def test_a_source_whose_path_is_too_long_for_that_is_mounted_as_ever(mount: Mounted) -> None:
    deep = mount.backing / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    with trashd_mount(deep, mount.path.with_name("other"), ["coherence=shared"]) as other:
        assert os.listdir(other.path) == []


def test_where_mounts_are_shared_no_other_place_keeps_the_first_one(tmp_path: Path) -> None:
    """As on a machine with systemd: each mount appears in other namespaces too, and goes there when it goes here."""
    with tmpfs_volume() as volume:
        subprocess.run(["mount", "--make-shared", volume], check=True)
        with bind_mount(volume, tmp_path):
            with trashd_mount(volume / "source", volume / "target") as mounted:
                (mounted.path / "file").write_text("content")
                assert sorted(ours()) == sorted(map(os.fsencode, (volume / "target", tmp_path / "target")))
                assert (tmp_path / "target/file").read_text() == (mounted.path / "file").read_text() == "content"
            assert until(lambda: not ours())


def ours() -> list[bytes]:
    return [entry.mount_point for entry in mounts() if entry.fs_type == "fuse.trashd"]
