"""What is restored is what it was, to the last of what a file has: of drops, of parts, and of what is half reaped.

Everything is compared, not only what is in the files: owners, modes, ACLs and default ACLs, extended attributes, links,
holes, all four times, inode numbers and project ids. The tree is thrown away and restored in the mount, beside one that
is handled on the plain filesystem.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fusefs.linux.kernel import RESTORED_XATTRS, Kernel
from fusefs.linux.statx import look_at
from fusefs.linux.syscalls import AT_FDCWD
from tests.support.acls import ACCESS, DEFAULT, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.crash_scenarios import DyingAfter
from tests.support.foreground_mount import trashd_mount
from tests.support.real_filesystems import WITH_XFS, project_of, set_project
from tests.support.store_verbs import assert_silent, entries, in_child, init, reap_now, recover_all, restore, swap

pytestmark = [pytest.mark.needs("root", "fuse", "loop"), WITH_XFS]

NAMED = acl((USER_OBJ, 7, NOBODY), (USER, 5, 4711), (GROUP_OBJ, 4, NOBODY), (MASK, 5, NOBODY), (OTHER, 0, NOBODY))
N_FILES = 12
PROJECT = 47


class Place(NamedTuple):
    """Where things are done, and where they are looked at."""

    top: Path
    below: Path
    has_projects: bool

    def make(self) -> Path:
        """A tree of every kind of thing."""
        tree = self.below / "tree"
        sub, deep = tree / "sub", tree / "sub" / "deep"
        deep.mkdir(parents=True)
        os.setxattr(sub, DEFAULT, NAMED)
        if self.has_projects:
            set_project(deep, PROJECT)
        for directory in (tree, sub, deep):
            for number in range(N_FILES):
                self._make_file(directory / f"file{number}", number)
            (directory / "link").symlink_to("file0")
            os.chown(directory / "link", 3, 4, follow_symlinks=False)
            os.mkfifo(directory / "fifo", 0o620)
            os.link(directory / "file1", directory / "again")
        os.link(deep / "file2", tree / "from-deep")
        for directory, mode in ((deep, 0o2711), (sub, 0o1773), (tree, 0o750)):
            os.chown(directory, 5, 6)
            directory.chmod(mode)
            os.utime(directory, ns=(1_000_000_001, 2_000_000_002 + mode))
        return self.top / "tree"

    def _make_file(self, path: Path, number: int) -> None:
        with path.open("wb") as file:
            file.write(os.urandom(1 + number * 1000))
            file.truncate(number * 10_000 + 1)
        os.chown(path, 10 + number, 20 + number)
        path.chmod(0o4600 + number)
        os.setxattr(path, "user.number", b"%d" % number)
        if number % 3 == 0:
            os.setxattr(path, ACCESS, NAMED)
        os.utime(path, ns=(1_234_567_891 + number, 9_876_543_219 + number))

    def look(self, top: str = "tree") -> dict[str, tuple[object, ...]]:
        """All that there is of a tree below, by path."""
        for _ in range(2):  # to look at it for the first time changes times of access
            found = dict(self._look(self.below / top))
        return found

    def _look(self, top: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
        with os.scandir(top) as listed:
            below = sorted(Path(entry) for entry in listed)
        for path in (top, *below):
            seen = look_at(AT_FDCWD, os.fsencode(path))
            yield str(path.relative_to(self.below)), (*seen, *self._inside(path))
            if path is not top and stat.S_ISDIR(seen.mode):
                yield from self._look(path)

    def _inside(self, path: Path) -> tuple[object, ...]:
        # The mark of a restore is all that it adds (linux/xattrs.py).
        names = sorted(set(os.listxattr(path, follow_symlinks=False)) - {*RESTORED_XATTRS})
        xattrs = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind == stat.S_IFLNK:
            return xattrs, os.readlink(path), None
        project = project_of(path) if self.has_projects and kind != stat.S_IFIFO else None
        if kind != stat.S_IFREG:
            return xattrs, None, project
        fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
        try:
            return xattrs, os.pread(fd, 1 << 20, 0), project
        finally:
            os.close(fd)


@pytest.fixture(params=["native", "exclusive", "shared", "slow"])
def place(volume: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    source = volume / request.node.name.replace("/", "-")
    source.mkdir()
    init(source)
    has_projects = "xfs" in request.node.name
    if request.param == "native":
        yield Place(source, source, has_projects)
    else:
        options = {"slow": ["coherence=exclusive", "backing=slow"]}.get(request.param, [f"coherence={request.param}"])
        with trashd_mount(source, options=options) as mounted:
            yield Place(mounted.path, source, has_projects)
    assert_silent(source)


MOVED = ("ctime_ns", "atime_ns")
"""What a rename changes of what is renamed, and who looks at it afterwards (relatime)."""
MARKED = ("blocks",)  # the mark of a restore may take a block of its own
EXCHANGED = ("mtime_ns", *MOVED)
"""What an exchange does: an xfs gives both directories a new mtime as well."""
EMPTIED = ("nlink", "size", "blocks", "mtime_ns", *MOVED)
"""What changes of a directory that loses entries, and of what loses a link."""
FIELDS = ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blocks", "blksize", "atime_ns", "mtime_ns",
          "ctime_ns", "btime_ns", "xattrs", "content", "project")  # fmt: skip


def assert_same(
    seen: dict[str, tuple[object, ...]], before: dict[str, tuple[object, ...]], but: dict[str, tuple[str, ...]]
) -> None:
    """Path by path. but: what may differ, by path"""
    for path, right in before.items():
        left_out = but.get(path, ())
        wrong = [
            (name, one, other)
            for name, one, other in zip(FIELDS, seen[path], right, strict=True)
            if one != other and name not in left_out
        ]
        assert (path, wrong) == (path, [])


def test_a_swapped_tree_comes_back_as_it_was(place: Place) -> None:
    tree = place.make()
    before = place.look()
    swapped = swap(tree)
    restore(place.top, swapped.id)
    seen = place.look()
    assert seen.keys() == before.keys()
    assert_same(seen, before, {"tree": (*EXCHANGED, *MARKED)})


def test_a_dropped_tree_comes_back_as_it_was(place: Place) -> None:
    tree = place.make()
    before = place.look()
    drop = place.top / ".trashd" / "u" / "0" / "drop"
    drop.mkdir(exist_ok=True)
    tree.rename(drop / "tree")
    assert recover_all(place.below) == []
    (entry,) = entries(place.top)
    restore(place.top, entry.id, to=tree)
    seen = place.look()
    assert seen.keys() == before.keys()
    assert_same(seen, before, {"tree": (*MOVED, *MARKED)})


@pytest.mark.parametrize("part", ["sub/deep", "sub/deep/file3", "sub", "link"])
def test_a_part_comes_back_as_it_was(place: Place, part: str) -> None:
    tree = place.make()
    before = {path: right for path, right in place.look().items() if f"{path}/".startswith(f"tree/{part}/")}
    swapped = swap(tree)
    restore(place.top, swapped.id, inside=os.fsencode(part))
    seen = {path: one for path, one in place.look().items() if f"{path}/".startswith(f"tree/{part}/")}
    assert seen.keys() == before.keys()
    assert_same(seen, before, {f"tree/{part}": (*MOVED, *MARKED)})
    reap_now(place.below, swapped.id)


@pytest.mark.parametrize("n", [3, 7, 20])
def test_what_is_left_of_a_half_reaped_tree_is_as_it_was(place: Place, n: int) -> None:
    tree = place.make()
    before = place.look()
    swapped = swap(tree)
    in_child(partial(reap_now, place.below, swapped.id, Kernel(DyingAfter("unlink", n))))
    assert restore(place.top, swapped.id).partial
    seen = place.look()
    assert 0 < len(seen) < len(before)
    lost = before.keys() - seen.keys()
    linked = {before[path][:2] for path in lost}
    but: dict[str, tuple[str, ...]] = {str(Path(path).parent): EMPTIED for path in lost}
    but |= {path: ("nlink", *MOVED) for path in seen if before[path][:2] in linked}
    but["tree"] = (*EMPTIED, *MARKED)
    # Killed in a directory of another, or one that others write in, the reaper leaves it root's and closed: else what
    # came in meanwhile could not be told from what the reaper had begun (docs/decisions/0025-what-came-in.md).
    mode, uid = FIELDS.index("mode"), FIELDS.index("uid")
    taken = {path for path in seen if seen[path][uid] == 0 != before[path][uid] and path != "tree"}
    assert {seen[path][mode] for path in taken} <= {stat.S_IFDIR | 0o700}
    but |= {path: (*but.get(path, ()), "mode", "uid") for path in taken}
    assert_same(seen, {path: before[path] for path in seen}, but)
