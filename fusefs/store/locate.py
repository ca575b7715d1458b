"""From a path that a person typed to the victim's fds, and to the stores that could take it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from fusefs.core.errors import IsMountPoint, NoStore, TrashdError, Untrusted, from_os
from fusefs.core.names import STORE, Name, RelPath, join
from fusefs.core.record import Staying
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Place, place_below, read_mounts
from fusefs.store.layout import Store, open_store
from fusefs.store.scope import Scope, mount_of, plain_scope, real_path, split_typed
from fusefs.store.sides import wholly_beneath


class Victim(NamedTuple):
    """What a person named, opened: always on the backing filesystem, if it is seen through a mount of ours.

    parent   the directory that it is in
    fd       itself (O_PATH): as long as it is open, its inode number means it and nothing else
    staying  what of it stays in view when it is swapped; None for nothing
    """

    parent: Scope
    name: Name
    fd: Fd
    stat: os.stat_result
    staying: Staying | None = None

    def __enter__(self) -> Self:
        """Own its fds for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close them."""
        with self.parent:
            self.fd.close()

    def path(self) -> bytes:
        """Its path, links resolved."""
        return os.path.join(self.parent.root_path, self.parent.relative, self.name)

    def place(self) -> Place:
        """Where it is in its filesystem, whatever namespace one looks from."""
        return place_below(self.parent.root_place, join(self.parent.relative, self.name))

    def is_directory(self) -> bool:
        """Whether it is a directory; a link to one is not."""
        return stat.S_ISDIR(self.stat.st_mode)


def find_victim(kernel: Kernel, path: bytes) -> Victim:
    """The victim at a path; links in its parent are followed, as a person expects, its own name is not.

    Raises  NotFound, IsMountPoint, NoStore, or what the kernel said
    """
    directory, name = split_typed(path)
    with ExitStack() as owned:
        try:
            with kernel.open_long(directory) as wanted:
                mounts = read_mounts()
                mount = mount_of(kernel, wanted, mounts, directory)
                real = real_path(wanted, directory)
                if any(one.is_ours() for one in mounts):
                    from fusefs.store.mounted import find_mounted  # a swap where nothing is mounted is spared it

                    found = find_mounted(kernel, path, real, name, wanted, mount, mounts)
                    if found is not None:
                        return found
                scope = owned.enter_context(plain_scope(kernel, wanted, path, real, mount, mounts))
            victim = victim_in(kernel, scope, name, path)
        except OSError as error:
            raise from_os(error, path) from error
        owned.pop_all()
    return victim


def victim_in(kernel: Kernel, scope: Scope, name: Name, path: bytes) -> Victim:
    """The victim that has a name in a directory; takes over its fds, unless it raises as `open_victim`."""
    fd = open_victim(kernel, scope.sides.fd, name, path)
    try:
        seen = kernel.fstat(fd)
    except BaseException:
        fd.close()
        raise
    return Victim(scope, name, fd, seen)


def open_victim(kernel: Kernel, parent_fd: Fd, name: Name, path: bytes) -> Fd:
    """What has a name. Raises  IsMountPoint, OSError"""
    try:
        return kernel.open_beneath(parent_fd, name, os.O_PATH | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise IsMountPoint(path) from error
        raise


def ancestors(scope: Scope) -> Iterator[tuple[RelPath, bytes]]:
    """The directories that could hold the store of what is in a directory, highest first: relative and full path."""
    yield RelPath(b""), scope.root_path
    names = scope.relative.split(b"/") if scope.relative else []
    for count in range(1, len(names) + 1):
        path = RelPath(b"/".join(names[:count]))
        yield path, os.path.join(scope.root_path, path)


def existing_stores(kernel: Kernel, scope: Scope, untrusted: list[Untrusted]) -> Iterator[tuple[RelPath, Store]]:
    """The trusted stores among those directories, highest first; whoever takes one closes it."""
    for relative, path in ancestors(scope):
        base = wholly_beneath(kernel, scope.root, relative)
        try:
            store = open_store(kernel, base.fd, path, base.mounted)
        except Untrusted as error:
            untrusted.append(error)
            continue
        if store is not None:
            yield relative, store


class Offered(NamedTuple):
    """A store that could take something: where it is, below the root; whoever takes it closes it.

    is_made  for this: it was not there before
    """

    relative: RelPath
    store: Store
    is_made: bool


def stores_for(kernel: Kernel, scope: Scope, wanted: bytes) -> Iterator[Offered]:
    """The stores to try for something in a directory, or for all that is in it, best first: those that are there, then
    those that we may make; highest first in both.

    wanted  the path of what a store is wanted for, for people
    Whoever asks for the next one says that the last could not take it: one that was made for it goes again.
    Raises  NoStore, or what making the last one met, after the last
    """
    untrusted: list[Untrusted] = []
    bases = set()
    for relative, store in existing_stores(kernel, scope, untrusted):
        bases.add(relative)
        yield Offered(relative, store, is_made=False)
    last: TrashdError = untrusted[0] if untrusted else NoStore(wanted)
    for relative, path in ancestors(scope):
        if relative in bases:
            continue
        try:
            made = _make_missing(kernel, scope, relative, path)
        except Untrusted as error:
            last = error
        except PermissionError:
            pass  # not ours to make one there
        else:
            if made is not None:
                yield Offered(relative, made, is_made=True)
                unmake_at(kernel, scope, relative)
    raise last


def _make_missing(kernel: Kernel, scope: Scope, relative: RelPath, path: bytes) -> Store | None:
    """A new store at an ancestor; None if there is somebody else's: not to be trusted, not to be made again."""
    with ExitStack() as owned:
        base = owned.enter_context(wholly_beneath(kernel, scope.root, relative))
        try:
            kernel.stat(base.fd, STORE)
        except FileNotFoundError:
            from fusefs.store.volume import make_store  # a swap into a store that is there is spared it

            owned.pop_all()
            return make_store(kernel, base.fd, path, base.mounted)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise  # else something is mounted over it
    return None


def unmake_at(kernel: Kernel, scope: Scope, relative: RelPath) -> None:
    """Remove a store that was made for it, and was not needed: an empty one left behind is untidy, and no more."""
    from fusefs.store.unmake import unmake_store

    with suppress(OSError, TrashdError), wholly_beneath(kernel, scope.root, relative) as base:
        unmake_store(kernel, base, os.path.join(scope.root_path, relative))
