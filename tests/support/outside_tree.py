"""A tree beside an orphan that nothing may touch: linked into the orphan, mounted into it, or only named there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.make_trees import Dir, EntrySnapshot, File, HardLink, Spec, SpecialFile, Symlink, make_tree, snapshot
from tests.support.real_filesystems import bind_mount, mounts, unmount
from tests.support.store_verbs import raw

N_LINKED = 8
_MOUNTED: Spec = {
    "data": File(b"d" * 5000, mode=0o600, xattrs={"user.kept": b"yes"}),
    "same": HardLink("mounted/data"),
    "sub": Dir({"deeper": {"file": "deep", "empty": {}}}, mode=0o700),
    "closed": Dir({"inside": File(b"i", mode=0)}, mode=0o555),
    "link": Symlink("sub/deeper"),
    "fifo": SpecialFile(0o010640),
}


class OutsideState(NamedTuple):
    """What of a canary must stay; with the times of change for what has no name in the orphan."""

    linked: tuple[EntrySnapshot, ...]
    mounted: tuple[EntrySnapshot, ...]
    changed_ns: tuple[int, ...]


class Canary:
    def __init__(self, volume: Path) -> None:
        linked = {f"{i}": File(b"%d" % i * 3000, mode=0o640 + i % 2) for i in range(N_LINKED)}
        self.path = make_tree(volume / "canary", {"linked": linked, "mounted": _MOUNTED, "file": "mounted alone"})
        self.first = self.read_state()

    def link_into(self, tree: Path) -> None:
        """Give each of some files another name in a tree's directories."""
        directories = [tree, *(path for path in sorted(tree.iterdir()) if path.is_dir())]
        for i in range(N_LINKED):
            os.link(self.path / f"linked/{i}", directories[i % len(directories)] / f"canary-{i}")

    @contextmanager
    def mounted_in(self, directory: Path, file: Path) -> Iterator[None]:
        """A directory and a file of it seen there too, until the end, wherever that is by then."""
        with bind_mount(self.path / "mounted", directory), bind_mount(self.path / "file", file):
            try:
                yield
            finally:
                unmount_below(self.path.parent / ".trashd")

    def read_state(self) -> OutsideState:
        linked = snapshot(self.path / "linked", with_times=True)
        mounted = (self.path / "mounted", self.path / "file")
        mounted_entries = tuple(one for path in mounted for one in snapshot(path, with_times=True))
        changed = tuple(os.lstat(path).st_ctime_ns for top in mounted for path in [top, *sorted(top.rglob("*"))])
        return OutsideState(
            tuple(one._replace(n_links=None, first_name=None) for one in linked), mounted_entries, changed
        )

    def assert_untouched(self) -> None:
        assert self.read_state() == self.first

    def assert_alone(self) -> None:
        """And the orphan's names for its files are gone."""
        self.assert_untouched()
        assert {path.stat().st_nlink for path in (self.path / "linked").iterdir()} == {1}


def unmount_below(directory: Path) -> None:
    """Unmount what is mounted below: a mount goes along when its container is renamed."""
    for mount in reversed(mounts()):
        if mount.mount_point.startswith(raw(directory) + b"/"):
            unmount(mount.mount_point)
