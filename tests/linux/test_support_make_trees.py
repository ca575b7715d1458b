"""The builders make what they say, a snapshot sees every difference, and a user is nothing but that user."""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.make_trees import (
    APPEND_ONLY,
    IMMUTABLE,
    Dir,
    File,
    HardLink,
    Spec,
    SpecialFile,
    Symlink,
    flags_of,
    make_tree,
    remove_tree_hard,
    set_flags,
    snapshot,
    weird_names,
)
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import bind_mount, loop_volume

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


def test_snapshot_of_two_equal_trees_is_equal(tmp_path: Path) -> None:
    assert snapshot(make_tree(tmp_path / "a", SPEC)) == snapshot(make_tree(tmp_path / "b", SPEC))


def test_snapshot_says_what_was_made(tmp_path: Path) -> None:
    seen = {entry.name: entry for entry in snapshot(make_tree(tmp_path / "t", SPEC))}
    assert list(seen) == [b"", b"again", b"dir", b"\xff", b"empty", b"fifo", b"file", b"link", b"other"]
    assert [seen[name].depth for name in (b"", b"dir", b"\xff")] == [0, 1, 2]
    assert stat.S_IMODE(seen[b"dir"].mode) == 0o2750
    assert (seen[b"other"].n_links, seen[b"other"].first_name, seen[b"again"].first_name) == (2, 1, 1)
    assert seen[b"link"].content == repr(b"no\nwhere")
    assert seen[b"file"].first_name is None


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


def test_weird_names_are_all_made_seen_and_removed(tmp_path: Path) -> None:
    names = weird_names()
    assert len(set(names)) == len(names)
    assert {255} == {len(name) for name in names if len(name) > 100}
    path = make_tree(tmp_path / "t", {name: {name: b"x"} for name in names})
    assert [entry.name for entry in snapshot(path) if entry.depth == 1] == sorted(names)
    remove_tree_hard(path)
    assert not path.exists()


@pytest.mark.needs("root", "loop")
def test_remove_tree_hard_removes_what_resists_and_spares_what_is_mounted_below(tmp_path: Path) -> None:
    precious = make_tree(tmp_path / "precious", {"file": "text"})
    with loop_volume("ext4") as volume:
        path = make_tree(volume / "t", {"d": {"f": "1", "g": "2"}, "closed": Dir({"x": {}}, 0), "m": {}})
        set_flags(path / "d/f", IMMUTABLE)
        set_flags(path / "d/g", APPEND_ONLY)
        set_flags(path / "d", IMMUTABLE | APPEND_ONLY)
        assert flags_of(path / "d") & (IMMUTABLE | APPEND_ONLY) == IMMUTABLE | APPEND_ONLY
        with bind_mount(precious, path / "m"):
            remove_tree_hard(path)
        assert not path.exists()
        remove_tree_hard(path)
    assert (precious / "file").read_text() == "text"


@pytest.mark.needs("root")
def test_as_user_has_that_users_ids_and_no_capabilities() -> None:
    def look() -> tuple[tuple[int, ...], tuple[int, ...], list[int], list[str]]:
        lines = Path("/proc/self/status").read_text().splitlines()
        held = [line.split()[1] for line in lines if line.startswith(("CapPrm", "CapEff", "CapAmb", "CapInh"))]
        return os.getresuid(), os.getresgid(), os.getgroups(), held

    none = ["0" * 16] * 4
    assert as_user(12001, look) == ((12001,) * 3, (12001,) * 3, [], none)
    assert as_user(12001, look, gid=5, groups=(7, 8)) == ((12001,) * 3, (5,) * 3, [7, 8], none)
    assert as_user(0, look)[3] == none


@pytest.mark.needs("root")
def test_as_user_passes_exceptions() -> None:
    with pytest.raises(PermissionError) as caught:
        as_user(12001, Path("/etc/shadow").read_bytes)
    assert caught.value.filename == "/etc/shadow"
    assert "in the child of as_user(12001)" in caught.value.__notes__[0]


@pytest.mark.needs("root")
def test_run_as_runs_a_command_without_capabilities_even_for_root() -> None:
    assert run_as(12002, ["id", "-u"]).stdout == b"12002\n"
    assert run_as(12002, ["cat"], stdin=b"in").stdout == b"in"
    done = run_as(0, ["grep", "CapEff", "/proc/self/status"])
    assert done.stdout.split() == [b"CapEff:", b"0" * 16]
    assert run_as(12001, ["sh", "-c", "exit 3"]).returncode == 3
