"""A snapshot sees every difference."""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.make_trees import (
    IMMUTABLE,
    Dir,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    make_tree,
    remove_tree_hard,
    set_flags,
    snapshot,
)
from tests.support.real_filesystems import loop_volume

NO_ID = 2**32 - 1  # in ACLs
SPEC: Spec = {
    "empty": {},
    "file": "text",
    "other": File(b"\0" * 5000, mode=0o4711),
    "again": HardLink("other"),
    "link": Symlink(b"no\nwhere"),
    "fifo": SpecialFile(stat.S_IFIFO | 0o640),
    "dir": Dir({b"\xff": b"deeper"}, mode=0o2750),
}


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda path: (path / "dir" / os.fsdecode(b"\xff")).write_bytes(b"DEEPER"),
    "mode": lambda path: (path / "empty").chmod(0o700),
    "mode of the root": lambda path: path.chmod(0o700),
    "name": lambda path: (path / "file").rename(path / "FILE"),
    "place": lambda path: (path / "file").rename(path / "dir/file"),
    "target": lambda path: _replace(path / "link", lambda link: link.symlink_to("x")),
    "kind": lambda path: _replace(path / "fifo", Path.touch),
    "links": lambda path: _replace(path / "again", lambda again: again.hardlink_to(path / "file")),
    "gone": lambda path: (path / "fifo").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_snapshot_sees_a_change_of(change: str, tmp_path: Path) -> None:
    path = make_tree(tmp_path / "t", SPEC)
    before = snapshot(path)
    CHANGES[change](path)
    assert snapshot(path) != before


@pytest.mark.needs("root", "loop")
def test_snapshot_sees_owner_xattr_acl_flag_and_device() -> None:
    acl = struct.pack("<I" + 5 * "HHI", 2, 1, 7, NO_ID, 2, 5, 12001, 4, 5, NO_ID, 16, 5, NO_ID, 32, 0, NO_ID)
    with loop_volume("ext4") as volume:
        spec: Spec = {"f": "", "d": {}, "dev": SpecialFile(stat.S_IFCHR | 0o600, os.makedev(1, 3))}
        path = make_tree(volume / "t", spec)
        changes: list[Callable[[], object]] = [
            lambda: os.chown(path / "f", 12001, -1),
            lambda: os.chown(path / "f", -1, 12001),
            lambda: os.setxattr(path / "d", "user.x", b"1"),
            lambda: os.setxattr(path / "d", "trusted.x", b"1"),
            lambda: os.setxattr(path / "f", "system.posix_acl_access", acl),
            lambda: set_flags(path / "f", IMMUTABLE),
            lambda: _replace(path / "dev", lambda dev: os.mknod(dev, stat.S_IFCHR | 0o600, os.makedev(1, 5))),
        ]
        seen = [snapshot(path)]
        for change in changes:
            change()
            seen.append(snapshot(path))
            assert seen[-1] != seen[-2]
        remove_tree_hard(path)
