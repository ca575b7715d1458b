"""Lists and reads an orphan's contents in place, as its owner, and compares them with the entry now at its origin."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from fusefs.core.errors import NotFound, Refused, UsageError, from_os
from fusefs.core.names import RelPath, join_path, split_path
from fusefs.core.printable_names import printable
from fusefs.linux.disk_usage import may_be_archived
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import relative_to
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.orphans import ListedContainer, call_in_folder
from fusefs.store.victim_rename import VisibleRename

T = TypeVar("T")
_CHUNK = 1 << 18
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class EntryInside(NamedTuple):
    """An entry inside an orphan. target: the target of a symbolic link; None for other entries"""

    name: bytes
    mode: int
    n_links: int
    uid: int
    gid: int
    n_bytes: int
    mtime_ns: int
    target: bytes | None


def call_inside(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    path: bytes | None,
    visit: Callable[[Fd, UserFolder, RelPath], T],
    result_type: Any,
) -> T:
    """Call `visit` for a path in an orphan, in a process of the orphan's owner if we are root, and return the result.

    visit   gets the entry (O_PATH), the user's folder, and the path in the tree
    Raises  NotFound; UsageError; TrashdError
    """
    try:
        within = join_path(*split_path(path)) if path else RelPath(b"")
    except ValueError as error:
        raise UsageError(
            f"{printable(path or b'')}: not a path in an orphan",
            "write a path relative to the top of the orphan, without `..`",
        ) from error

    def visit_in_folder(folder: UserFolder, _visible: VisibleRename | None) -> T:
        with (
            folder.open(entry.state) as state,
            kernel.open_beneath(state, join_path(entry.id.encode(), TREE, within)) as fd,
        ):
            return visit(fd, folder, within)

    try:
        return call_in_folder(kernel, volumes, entry, visit_in_folder, result_type)
    except BrokenPipeError:
        raise  # from standard output, to which `visit` may print
    except FileNotFoundError as error:
        raise NotFound(within or entry.id, f"trashd ls {entry.id} lists the contents of the orphan") from error
    except OSError as error:
        raise from_os(error, within or entry.id) from error


def entries_inside(
    kernel: Kernel, fd: Fd, is_selected: Callable[[str], bool] = lambda _name: True, most: int | None = None
) -> list[EntryInside]:
    """Return the entries of a directory, sorted by name; for anything else, one entry with an empty name.

    is_selected  selects names, which are decoded with os.fsdecode
    most         the maximum number of entries
    Raises       OSError
    """
    if not stat.S_ISDIR((st := kernel.fstat(fd)).st_mode):
        return [_entry(b"", st, fd)]
    entries = []
    with kernel.open_dir(fd) as directory:
        for name in sorted(os.fsencode(name) for name in os.listdir(directory) if is_selected(name))[:most]:
            with kernel.open_beneath(directory, name) as one:
                entries.append(_entry(name, kernel.fstat(one), one))
    return entries


def _entry(name: bytes, st: os.stat_result, fd: Fd) -> EntryInside:
    target = os.readlink(b"", dir_fd=fd) if stat.S_ISLNK(st.st_mode) else None
    return EntryInside(name, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_size, st.st_mtime_ns, target)


def content_of(kernel: Kernel, fd: Fd, path: bytes) -> Iterator[bytes]:
    """Read a regular file in parts. fd: may be O_PATH. Raises  OSError; Refused if it is not regular, or is archived"""
    if not stat.S_ISREG(kernel.fstat(fd).st_mode):
        raise Refused(f"{printable(path or b'.')}: not a regular file", "trashd ls shows its type")
    if may_be_archived(kernel, fd):
        hint = "reading it would recall the data from the archive; restore it first, then read it: trashd restore ID"
        raise Refused(f"{printable(path or b'.')}: its data may exist only in an archive (HSM)", hint)
    with Fd(os.open(fd.path(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        while part := os.read(file, _CHUNK):
            yield part


def open_at_origin(kernel: Kernel, folder: UserFolder, entry: ListedContainer, within: RelPath) -> Fd:
    """Open the entry (O_PATH) that is now at the original path of a part of an orphan. Raises  NotFound; Refused"""
    if entry.origin is None:
        raise Refused(f"{entry.id}: the tree was moved into the drop directory, so its original path is unknown")
    way = join_path(relative_to(entry.origin, entry.base_path()), within) or b"."
    try:
        return kernel.open_beneath(folder.store.base.fd, way)
    except OSError as error:
        path = printable(os.path.join(entry.origin, within).rstrip(b"/"))
        raise NotFound(
            path, f"there is nothing to compare the orphan with ({os.strerror(error.errno or 0)})"
        ) from error


class Difference(NamedTuple):
    """A difference between an orphan and the entry now at its origin. how: `gone`, `new`, `changed`, `unreadable`"""

    path: bytes
    how: str


def find_differences(kernel: Kernel, tree: Fd, now: Fd, prefix: bytes, *, includes_new: bool) -> Iterator[Difference]:
    """Yield the differences between a directory in an orphan and the directory that is now at its original path.

    Types, sizes and link targets are compared, and contents if the times differ. An entry that exists on only one side
    counts as one difference, whatever it contains.
    prefix     prepended to the path of each difference
    includes_new  include entries that exist only in the directory at the original path
    """
    device = kernel.fstat(now).st_dev
    pending = [b""]
    while pending:
        upper = pending.pop()
        try:
            with _directory(kernel, tree, upper) as tree_fd, _directory(kernel, now, upper) as now_fd:
                for name in sorted({*map(os.fsencode, os.listdir(tree_fd)), *map(os.fsencode, os.listdir(now_fd))}):
                    path = join_path(upper, name)
                    before, after = _stat(tree_fd, name), _stat(now_fd, name)
                    if before is None or after is None:
                        if before is not None or includes_new:
                            yield Difference(join_path(prefix, path), "new" if before is None else "gone")
                    elif stat.S_ISDIR(before.st_mode) and stat.S_ISDIR(after.st_mode) and after.st_dev == device:
                        pending.append(path)
                    elif (how := _compare(kernel, tree_fd, now_fd, name, before, after)) is not None:
                        yield Difference(join_path(prefix, path), how)
        except OSError:
            yield Difference(join_path(prefix, upper) or b".", "unreadable")


def _directory(kernel: Kernel, top: Fd, path: bytes) -> Fd:
    return kernel.open_beneath(top, path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _stat(directory: Fd, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _compare(
    kernel: Kernel, one: Fd, other: Fd, name: bytes, before: os.stat_result, after: os.stat_result
) -> str | None:
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode) or before.st_rdev != after.st_rdev:
        return "changed"
    try:
        if stat.S_ISLNK(before.st_mode):
            is_same = os.readlink(name, dir_fd=one) == os.readlink(name, dir_fd=other)
        elif stat.S_ISREG(before.st_mode):
            is_same = before.st_size == after.st_size and (
                before.st_mtime_ns == after.st_mtime_ns or _have_same_content(kernel, one, other, name)
            )
        else:
            is_same = not stat.S_ISDIR(before.st_mode)  # something is mounted there now
    except OSError:
        return "unreadable"
    return None if is_same else "changed"


def _have_same_content(kernel: Kernel, one: Fd, other: Fd, name: bytes) -> bool:
    """Return whether two files have the same content. Raises  OSError, also if an archive would have to recall data"""
    with (
        Fd(os.open(name, _READ, dir_fd=one)) as before,
        Fd(os.open(name, _READ, dir_fd=other)) as after,
    ):
        if may_be_archived(kernel, before) or may_be_archived(kernel, after):
            raise OSError(errno.ENODATA, "its data may exist only in an archive")
        at, end = 0, kernel.fstat(before).st_size
        if kernel.fstat(after).st_size != end:
            return False
        # A hole reads as zeros, so ranges in which neither file has data are not compared.
        while (at := min(kernel.next_data(before, at, end), kernel.next_data(after, at, end))) < end:
            one_part, other_part = os.pread(before, _CHUNK, at), os.pread(after, _CHUNK, at)
            n_bytes = min(len(one_part), len(other_part))
            if not n_bytes or one_part[:n_bytes] != other_part[:n_bytes]:
                return False
            at += n_bytes
        return True
