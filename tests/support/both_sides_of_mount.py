"""A mounted volume for the store's tests: what is in it, seen from both sides."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.foreground_mount import Mounted
from tests.support.make_trees import Dir, Spec, make_tree, snapshot
from tests.support.other_users import as_user

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
