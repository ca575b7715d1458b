"""A directory seen through a mount, compared with the backing one: no answer may be older than the last change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount
from tests.support.make_trees import Dir, Spec, make_tree, snapshot
from tests.support.oracle_subjects import outcome
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, volume_of


class Sides(NamedTuple):
    """One directory by two paths: through the mount, and in the backing filesystem."""

    mount_path: Path
    behind: Path  # a read here leaves no trace: the time of access stays

    def below(self, name: str) -> Sides:
        """A directory or file in it."""
        return Sides(self.mount_path / name, self.behind / name)

    def assert_alike(self, paths: Iterable[str]) -> None:
        """Assert that these paths are the same on both sides, in all attributes and contents, or missing on both.

        Attributes are read twice: reading a file or following a link changes its time of access.
        """
        paths = list(paths)
        for read in (_attributes, _inside, _attributes):
            unlike = {
                path: f"{actual}\n  instead of: {right}"
                for path in paths
                if (actual := outcome(read, self.mount_path / path)) != (right := outcome(read, self.behind / path))
            }
            assert not unlike, "\n".join(f"{path}: {how}" for path, how in unlike.items())

    def warm(self, paths: Iterable[str]) -> None:
        """Read these paths through the mount, so that each cache has them."""
        paths = list(paths)
        for read in (_inside, _attributes):
            for path in paths:
                outcome(read, self.mount_path / path)


def _attributes(path: Path) -> tuple[object, ...]:
    """All but the inode's number."""
    return stat_fields(os.lstat(path))


def stat_fields(st: os.stat_result) -> tuple[object, ...]:
    """Return the fields of a stat that must be equal on both sides; a directory's blocks may differ."""
    n_blocks = 0 if stat.S_ISDIR(st.st_mode) else st.st_blocks
    owner = st.st_nlink, st.st_uid, st.st_gid, st.st_rdev
    return stat.filemode(st.st_mode), *owner, st.st_size, n_blocks, st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns


def _inside(path: Path) -> tuple[object, ...]:
    """Extended attributes, and names, target or content."""
    names = sorted(os.listxattr(path, follow_symlinks=False))
    xattrs = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
    match stat.S_IFMT(os.lstat(path).st_mode):
        case stat.S_IFDIR:
            return xattrs, sorted(os.listdir(path))
        case stat.S_IFREG:
            return xattrs, path.read_bytes()
        case stat.S_IFLNK:
            return xattrs, os.readlink(path)
        case _:
            return xattrs, None


@contextmanager
def sides(
    source: Path, options: Iterable[str], *, backing: Path | None = None, limit_s: float = SHARED_LIMIT_S
) -> Iterator[tuple[Mounted, Sides]]:
    """A mount of a directory, on a directory beside it, and its two sides.

    backing  the same directory below, where the one that is mounted has a FUSE daemon of its own to leave traces
    """
    behind = source.with_name(source.name + "-behind")
    behind.mkdir()
    with (
        trashd_mount(source, options=list(options), limit_s=limit_s) as mounted,
        bind_mount(source if backing is None else backing, behind, ["noatime"]),
    ):
        yield mounted, Sides(mounted.path, behind)


@contextmanager
def sides_on(fs_type: str, options: Iterable[str]) -> Iterator[tuple[Mounted, Sides]]:
    """A mount of a directory on a fresh volume (see volume_of), and its two sides."""
    with volume_of(fs_type) as volume, sides(volume / "source", options) as both:
        yield both


_BY_DAEMON = "passthrough=off"
CLIENTS_ON: dict[str, tuple[list[str], str]] = {
    "native": ([], "bbb"),
    "exclusive": (["coherence=exclusive"], "mmm"),
    "exclusive, by the daemon": (["coherence=exclusive", _BY_DAEMON], "mmm"),
    "exclusive, slow": (["coherence=exclusive", "backing=slow"], "mmm"),
    "exclusive, slow, by the daemon": (["coherence=exclusive", _BY_DAEMON, "backing=slow"], "mmm"),
    "shared": (["coherence=shared"], "mmb"),
    "shared, by the daemon": (["coherence=shared", _BY_DAEMON], "mmb"),
    "shared, slow, by the daemon": (["coherence=shared", _BY_DAEMON, "backing=slow"], "mmb"),
}
"""A mount's options, and where each client is: in the mount, or behind it."""


@contextmanager
def tops_for_clients(source: Path, where: str, limit_s: float) -> Iterator[list[Path]]:
    """A directory, as each of the clients has it. where: of CLIENTS_ON"""
    options, places = CLIENTS_ON[where]
    if not options:
        yield [source] * len(places)
        return
    with trashd_mount(source, options=options, limit_s=max(limit_s, SHARED_LIMIT_S)) as mounted:
        yield [{"m": mounted.path, "b": source}[place] for place in places]


def directory_for(volume: Path, case: str) -> Path:
    """A new directory on a volume, named for a case."""
    path = volume / case.replace(", ", "-").replace(" ", "-")
    path.mkdir()
    return path


ALICE, NOGROUP = 4711, 65534
TREE: Spec = {"results": "x", "deep": {"er": "y"}}
STAGED = ".trashd/u/0/stage"


@contextmanager
def opened(path: Path) -> Iterator[Callable[[], str]]:
    """A directory that a process has open: where the kernel has it now."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lambda: os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def both(mount: Mounted, path: Path) -> tuple[Path, Path]:
    """A path in the mount, and the backing one."""
    return path, mount.backing / path.relative_to(mount.path)


def hers(mount: Mounted, mode: int = 0o755) -> Path:
    path = mount.path / "home" / "job"
    as_user(ALICE, lambda: make_tree(path, Dir({"results": "hers"}, mode=mode)) and None)
    snapshot(path)
    return path
