"""Pointers: in a user's folder of an upper store, the relative paths of the lower stores of that user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice

from fusefs.core.errors import TrashdError
from fusefs.core.names import Name, RelPath, join, split
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import OUT_OF_REACH
from fusefs.store.layout import POINTERS, Store, UserFolder, open_own_store, open_store, read_small, write_small

_POINTER_MAX_BYTES = 64 * 1024
MOST_READ = 1000
_NEW = b".new"


def add_pointer(folder: UserFolder, lower: RelPath) -> None:
    """Note a lower store, durably, if it is not noted yet.

    lower  the directory that holds it, relative to the one that holds this store
    """
    kernel = folder.store.kernel
    import hashlib  # 2 ms, which a swap into the highest store doesn't need to spend

    name = hashlib.sha256(lower).hexdigest()[:32].encode()
    with folder.open(POINTERS) as pointers:
        try:
            kernel.stat(pointers, name)
        except FileNotFoundError:
            new = name + b"." + os.urandom(4).hex().encode() + _NEW
            write_small(kernel, pointers, name, lower, new=new)


def pointed(folder: UserFolder) -> Iterator[tuple[Name, RelPath | None]]:
    """Each pointer's name and what it says; None for what is no plain relative path (users write them).

    None at all where `pointers/` itself is something else: its user did that, and the checker tells.
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        try:
            pointers = owned.enter_context(kernel.open_dir(folder.fd, POINTERS))
        except OSError as error:
            if error.errno not in OUT_OF_REACH:
                raise
            return
        for name in kernel.list(pointers):
            if not name.endswith(_NEW):
                yield Name(name), _read(kernel, pointers, name)


def read_pointers(kernel: Kernel, pointers: Fd, uid: int) -> list[RelPath]:
    """What the first pointers of a user say that are plain relative paths, read by a process of that user.

    pointers  the user's directory of them, readable
    Raises    OSError
    """

    def read() -> bytes:
        names = [name for name in kernel.list(pointers)[:MOST_READ] if not name.endswith(_NEW)]
        return b"\0".join(lower for name in names if (lower := _read(kernel, pointers, name)) is not None)

    if uid == os.geteuid():
        text = read()
    else:
        from fusefs.linux.children import ChildLost, call_as

        try:
            text = call_as(uid, lambda _ask: read())
        except ChildLost:
            return []  # its user stopped it
    found = []
    for one in text.split(b"\0"):
        with suppress(ValueError):  # it came from a process of the user's
            found.append(join(*split(one)))
    return found


def _read(kernel: Kernel, pointers: Fd, name: bytes) -> RelPath | None:
    try:
        text = read_small(kernel, pointers, name, _POINTER_MAX_BYTES)
        return None if text is None else join(*split(text))
    except (OSError, ValueError):
        return None


def lower_stores(folder: UserFolder) -> Iterator[Store]:
    """The stores that this user's pointers lead to, beneath the volume and through no link; the caller closes each.

    Each store once, whatever leads to it, and those of the first pointers alone: a pointer is a small file of a user's,
    and what it leads to is read each time. A pointer to a directory that is gone, or to a store that we don't trust,
    leads nowhere: `check` tells.
    """
    store = folder.store
    seen: set[tuple[int, int]] = set()
    for _name, lower in islice(pointed(folder), MOST_READ):
        if lower is None:
            continue
        for opener in (open_store, open_own_store):
            try:
                base = store.base.beneath(store.kernel, lower)
                found = opener(store.kernel, base, os.path.join(store.base_path, lower))
            except (OSError, TrashdError):
                continue
            if found is None:
                continue
            st = store.kernel.fstat(found.fd)
            if (st.st_dev, st.st_ino) in seen:
                with found:
                    continue
            seen.add((st.st_dev, st.st_ino))
            yield found._replace(is_named=True)
