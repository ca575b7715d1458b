"""What came from a path: the origin in a record is its owner's word, so that whose it is has to be asked first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fusefs.core.errors import TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.names import join
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, below, is_inside, read_mounts
from fusefs.store.discover import discover
from fusefs.store.find_orphans import each_folder
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.mounted_paths import open_shown


class CameFrom(NamedTuple):
    """An orphan that came from a path, or has in it what did; `inside` says where, and is None for all of it."""

    entry: ListedContainer
    inside: bytes | None


def came_from(
    kernel: Kernel, volumes: Sequence[bytes], path: bytes, listed: Iterable[ListedContainer]
) -> list[CameFrom]:
    """Those of some orphans that came from a path, by whatever mount it is named, and can be restored; newest first.

    path    it need not be there any more, nor need directories above it; links in those are followed, it itself is not
    """
    mounts = read_mounts()
    ways = _ways(kernel, path, mounts)
    bases: dict[bytes, tuple[int, int] | None] = {}
    found = []
    for entry in listed:
        if entry.origin is None or entry.state is not State.ORPHANS:
            continue
        base = entry.base_path()
        if base not in bases:
            bases[base] = _identity(kernel, base, mounts)
        wanted, origin = ways.get(bases[base]), below(entry.origin, base)
        if wanted == origin:
            found.append(CameFrom(entry, None))
        elif wanted is not None and is_inside(b"/" + wanted, b"/" + origin):
            found.append(CameFrom(entry, below(b"/" + wanted, b"/" + origin)))
    return sorted(_there(kernel, volumes, found), key=lambda one: one.entry.created_ns, reverse=True)


def _there(kernel: Kernel, volumes: Sequence[bytes], found: Sequence[CameFrom]) -> list[CameFrom]:
    """Without those that don't have what is wanted of them; each folder's owner looks once."""
    parts: dict[bytes, list[tuple[str, bytes]]] = {}
    for entry, inside in found:
        if inside is not None:
            parts.setdefault(entry.path.rsplit(b"/", 2)[0], []).append((entry.id, inside))
    if not parts:
        return list(found)

    def look(folder: UserFolder) -> list[str]:
        return [name for name, inside in parts.get(folder.path(), ()) if _has(folder, name, inside)]

    stores = discover(kernel, volumes)
    there = {name for part in each_folder(stores, look, list[str], []) for name in part}
    return [one for one in found if one.inside is None or one.entry.id in there]


def _ways(kernel: Kernel, path: bytes, mounts: list[Mount]) -> dict[tuple[int, int] | None, bytes]:
    """The way to a path from each directory above it, and from itself, by the directory's identity."""
    above, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(above), name)
    ways: dict[tuple[int, int] | None, bytes] = {}
    at = real
    while True:
        ways.setdefault(_identity(kernel, at, mounts), below(real, at))
        if at == b"/":
            break
        at = os.path.dirname(at)
    ways.pop(None, None)
    return ways


def _identity(kernel: Kernel, path: bytes, mounts: list[Mount]) -> tuple[int, int] | None:
    """Of a directory, by a mount of ours of what that shows; None: there is none, or it can't be looked at."""
    try:
        with open_shown(kernel, path, mounts) as sides:
            st = kernel.fstat(sides.fd)
    except (OSError, TrashdError):
        return None
    return st.st_dev, st.st_ino


def _has(folder: UserFolder, name: str, inside: bytes) -> bool:
    kernel = folder.store.kernel
    try:
        with folder.open(State.ORPHANS) as orphans, kernel.open_beneath(orphans, join(name.encode(), TREE, inside)):
            return True
    except OSError:
        return False
