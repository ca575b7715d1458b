"""What an orphan holds, looked at where it lies, by its owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fusefs.core.errors import NotFound, Refused, UsageError, from_os
from fusefs.core.names import RelPath, join, split
from fusefs.core.printable_names import printable
from fusefs.linux.archived_files import may_be_archived
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below
from fusefs.store.find_orphans import act_on
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.list_orphans import ListedContainer
from fusefs.store.victim_rename import VisibleRename

T = TypeVar("T")
_CHUNK = 1 << 18


class EntryInside(NamedTuple):
    """One entry of an orphan. target: of a symbolic link; None: it is none"""

    name: bytes
    mode: int
    n_links: int
    uid: int
    gid: int
    n_bytes: int
    mtime_ns: int
    target: bytes | None


def inside(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    path: bytes | None,
    look: Callable[[Fd, UserFolder, RelPath], T],
    kind: Any,
) -> T:
    """What `look` says of a path in an orphan; called by the orphan's owner, in a process of its own for root.

    look    gets that (O_PATH), the folder that has it, and the path in the tree
    kind    what it returns
    Raises  NotFound; UsageError; TrashdError
    """
    try:
        within = join(*split(path)) if path else RelPath(b"")
    except ValueError as error:
        raise UsageError(path or b"", "a path in an orphan is relative to its top, without `..`") from error

    def act(folder: UserFolder, _visible: VisibleRename | None) -> T:
        with (
            folder.open(entry.state) as state,
            kernel.open_beneath(state, join(entry.id.encode(), TREE, within)) as fd,
        ):
            return look(fd, folder, within)

    try:
        return act_on(kernel, volumes, entry, act, kind)
    except FileNotFoundError as error:
        raise NotFound(within or entry.id, f"trashd ls {entry.id} shows what it holds") from error
    except OSError as error:
        raise from_os(error, within or entry.id) from error


def entries_inside(
    kernel: Kernel, fd: Fd, is_meant: Callable[[str], bool] = lambda _name: True, most: int | None = None
) -> list[EntryInside]:
    """Those of a directory, sorted by name; of anything else, itself with no name.

    is_meant  of those whose name, as os.fsdecode has it, is
    most      the first so many; no others are looked at
    Raises    OSError
    """
    if not stat.S_ISDIR((st := kernel.fstat(fd)).st_mode):
        return [_entry(b"", st, fd)]
    found = []
    with kernel.open_dir(fd) as directory:
        for name in sorted(os.fsencode(name) for name in os.listdir(directory) if is_meant(name))[:most]:
            with kernel.open_beneath(directory, name) as one:
                found.append(_entry(name, kernel.fstat(one), one))
    return found


def _entry(name: bytes, st: os.stat_result, fd: Fd) -> EntryInside:
    target = os.readlink(b"", dir_fd=fd) if stat.S_ISLNK(st.st_mode) else None
    return EntryInside(name, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_size, st.st_mtime_ns, target)


def content_of(kernel: Kernel, fd: Fd, path: bytes) -> Iterator[bytes]:
    """The bytes of a regular file, held O_PATH. Raises  OSError; Refused: it is something else, or archived"""
    if not stat.S_ISREG(kernel.fstat(fd).st_mode):
        raise Refused(path or b".", "it is no file: trashd ls shows what it is")
    if may_be_archived(kernel, fd):
        hint = "reading it would bring it back; trashd restore moves it as it is, and there it can be read"
        raise Refused(f"{printable(path or b'.')}: its data may be in an archive only (HSM)", hint)
    with Fd(os.open(fd.path(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        while part := os.read(file, _CHUNK):
            yield part


def there_now(kernel: Kernel, folder: UserFolder, entry: ListedContainer, within: RelPath) -> Fd:
    """What has the name now that a path of an orphan came from (O_PATH); the caller's. Raises  NotFound; Refused"""
    if entry.origin is None:
        raise Refused(entry.id, "it was dropped: nothing tells where it came from")
    way = join(below(entry.origin, entry.base_path()), within) or b"."
    try:
        return kernel.open_beneath(folder.store.base.fd, way)
    except OSError as error:
        path = printable(os.path.join(entry.origin, within).rstrip(b"/"))
        raise NotFound(path, f"nothing is there to be compared with ({os.strerror(error.errno or 0)})") from error
