"""Who still works in a tree: by the orphan's id, or by a directory's path before a swap."""

from __future__ import annotations

from typing import NamedTuple

from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Place, find_place, read_mounts
from fusefs.linux.processes import Holder, find_holders
from fusefs.store.locate import find_victim


class HeldTree(NamedTuple):
    """The holders of one tree."""

    path: bytes
    holders: tuple[Holder, ...]


def holders_of(paths: list[bytes]) -> list[HeldTree]:
    """The holders of the trees at some paths, in one look at /proc.

    Without root only one's own processes can be seen.
    """
    mounts = read_mounts()
    places = {path: find_place(path, mounts) for path in paths}
    found: dict[Place, list[Holder]] = {place: [] for place in places.values() if place is not None}
    for place, holder in find_holders(list(found)):
        found[place].append(holder)
    return [HeldTree(path, tuple(found[place]) if place is not None else ()) for path, place in places.items()]


def holders_of_path(kernel: Kernel, path: bytes) -> HeldTree:
    """The holders of the directory or file that a person named.

    Raises  TrashdError as `find_victim`
    """
    with find_victim(kernel, path) as victim:
        return holders_of([victim.path()])[0]
