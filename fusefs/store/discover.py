"""Which stores and which users' folders there are, for commands that are not about one path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from fusefs.core.errors import NoBacking, NotPermitted, TrashdError
from fusefs.core.names import printable
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, read_mounts
from fusefs.store.folders import Refusal, all_users, open_user, why_refused
from fusefs.store.layout import Store, UserFolder, open_store
from fusefs.store.mounted import open_shown
from fusefs.store.pointers import lower_stores

_NO_VOLUMES = frozenset(
    b"proc sysfs cgroup cgroup2 devpts devtmpfs securityfs debugfs tracefs pstore bpf mqueue hugetlbfs autofs "
    b"binfmt_misc configfs fusectl rpc_pipefs nsfs squashfs erofs iso9660".split()
)


def discover(kernel: Kernel, paths: Iterable[bytes] = ()) -> Iterator[Store]:
    """The trusted stores that matter for some paths, or all that can be seen; whoever takes one closes it.

    paths  each stands for the stores at it and above it; without any: those at every mount point and those
           above the working directory
    Raises NoBacking if one of the paths is in a mount of ours whose backing tree we can't use
    """
    seen: set[tuple[int, int]] = set()
    mounts = read_mounts()
    asked = [os.path.realpath(path) for path in paths]
    for path in _bases(asked, mounts):
        try:
            base = open_shown(kernel, path, mounts)
            store = open_store(kernel, base.fd, path, base.mounted)
        except NoBacking:
            if path in asked:
                raise
            continue
        except (OSError, TrashdError):
            continue  # nothing there for us; `trashd doctor PATH` says why
        if store is None:
            continue
        with ExitStack() as owned:
            owned.enter_context(store)
            st = kernel.fstat(store.fd)
            if (st.st_dev, st.st_ino) in seen:
                continue
            owned.pop_all()
        seen.add((st.st_dev, st.st_ino))
        yield store


def _bases(paths: list[bytes], mounts: list[Mount]) -> Iterator[bytes]:
    if not paths:
        yield from mount_points(mounts)
        paths = [os.path.realpath(os.getcwdb())]
    for path in paths:
        yield from _upwards(path)


def mount_points(mounts: Iterable[Mount]) -> list[bytes]:
    """Where there may be a store; mounts of ours first, so that a store has the path by which people know it."""
    volumes = [mount for mount in mounts if mount.fstype not in _NO_VOLUMES]
    return list(dict.fromkeys(mount.point for mount in sorted(volumes, key=lambda mount: not mount.is_ours())))


def _upwards(path: bytes) -> Iterator[bytes]:
    yield path
    while path != b"/":
        path = os.path.dirname(path)
        yield path


def folders(store: Store, refused: list[Refusal] | None = None) -> Iterator[UserFolder]:
    """The users' folders of a store that concern the caller: root sees all; whoever takes one closes it.

    refused  gets what is called so and is none
    """
    yield from all_users(store, [] if refused is None else refused, os.geteuid() or None)


def with_lower(folder: UserFolder) -> Iterator[UserFolder]:
    """A user's folder, and his folders in the stores that its pointers lead to; to be run as that user.

    The first is the caller's to close; the others are closed when the next one is asked for.
    Raises  NotPermitted if it is not as only he can have made it: who opened it may not have seen all of it
    """
    if why := why_refused(folder):
        raise NotPermitted(f"{printable(folder.path())}: {why}", "look into it; nothing in it was touched")
    yield folder
    for store in lower_stores(folder):
        with store:
            lower = open_user(store, folder.uid)
            if lower is not None:
                with lower:
                    yield lower
