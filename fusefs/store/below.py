"""Stores below a directory, as far as somebody noted them: what they hold would be carried away with it, and deleted.

No tree is walked for it. Pointers in upper stores name lower ones, the caller's own or, for root, everybody's; the
caller's registry names those that he uses. What they say leads to a look, and to nothing else, so that a false one is
worth nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import chain, islice

from fusefs.core.names import STORE, RelPath, join
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.folders import plain_name, whose
from fusefs.store.inner import AREAS, list_at, things_in
from fusefs.store.layout import POINTERS
from fusefs.store.lines import registered
from fusefs.store.sides import DIRECTORY, OUT_OF_REACH

_MOST_FOLDERS, _MOST_ASKED = 2000, 100
"""Users whose pointers root looks for, and those of them who have any and are asked: the remover stops at the rest."""
_MOST_LOOKED_AT = 200
"""Stores: who notes thousands keeps nobody from anything for long."""
_Noted = tuple[int, RelPath]
"""Who noted a store, and the directory that holds it, relative to the one that was asked about."""


def stores_below(kernel: Kernel, root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[RelPath]:
    """Directories below a directory that hold a store which holds something: relative to it, one at a time.

    root_fd    the highest directory that is looked at (O_PATH); upper stores lie there, or on the way down
    root_path  of that, for people
    directory  relative to that; a store in itself is not told
    Raises     OSError
    """
    told = set()
    noted = chain(_registered(root_fd, root_path, directory), _pointed(kernel, root_fd, directory))
    for uid, lower in islice(noted, _MOST_LOOKED_AT):
        if lower in told:
            continue
        way = join(directory, lower, STORE)
        if next(things_in(kernel, root_fd, way, {0, os.geteuid(), uid}), None) is not None:
            told.add(lower)
            yield lower


def _registered(root_fd: Fd, root_path: bytes, directory: RelPath) -> Iterator[_Noted]:
    """What the caller's registry has, by the path there is without a mount of ours, or by that of one over itself."""
    lines = registered()
    if lines:
        with suppress(OSError):  # it has no path that could be told
            for root in dict.fromkeys((os.readlink(root_fd.path()), root_path)):
                top = os.path.join(root, directory).rstrip(b"/") + b"/"
                for line in lines:
                    if line.path.startswith(top):
                        yield os.geteuid(), RelPath(line.path[len(top) :])


def _pointed(kernel: Kernel, root_fd: Fd, directory: RelPath) -> Iterator[_Noted]:
    """What the pointers of the stores above say of stores below; each directory is opened from the one above it."""
    names = directory.split(b"/") if directory else []
    rest = directory + b"/"
    with ExitStack() as owned:
        here = root_fd
        for name in names:
            for uid, lower in _pointed_from(kernel, here):
                if lower.startswith(rest):
                    yield uid, RelPath(lower[len(rest) :])
            rest = rest[len(name) + 1 :]
            if not rest:
                return
            try:
                following = kernel.open_beneath(here, name, DIRECTORY)
            except OSError as error:
                if error.errno not in OUT_OF_REACH:
                    raise
                return  # somebody moved it
            owned.close()
            here = owned.enter_context(following)


def _pointed_from(kernel: Kernel, base_fd: Fd) -> Iterator[_Noted]:
    """What those of the store in one directory say, if there is one."""
    try:
        store = kernel.open_beneath(base_fd, STORE, DIRECTORY)
    except OSError as error:
        if error.errno not in OUT_OF_REACH:
            raise
        return
    with store:
        n_asked = 0
        for uid, folder in islice(_folders(kernel, store), _MOST_FOLDERS):
            try:
                with kernel.open_dir(store, join(folder, POINTERS)) as pointers:
                    if kernel.is_empty(pointers):
                        continue
                    n_asked += 1
                    if n_asked > _MOST_ASKED:
                        return
                    from fusefs.store.pointers import read_pointers  # hardly anybody has one

                    for lower in read_pointers(kernel, pointers, uid):
                        yield uid, lower
            except OSError as error:
                if error.errno not in OUT_OF_REACH:
                    raise


def _folders(kernel: Kernel, store: Fd) -> Iterator[tuple[int, RelPath]]:
    """The caller's folders in a store by their names alone; for root everybody's."""
    uid = os.geteuid()
    for area in AREAS:
        if uid != 0:
            yield uid, join(area, plain_name(uid))
            continue
        for name in list_at(kernel, store, area) or ():
            owner = whose(name)
            if owner is not None:
                yield owner, join(area, name)
