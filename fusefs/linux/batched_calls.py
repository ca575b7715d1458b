"""System calls for many entries of one directory at a time; an error for one entry does not affect the others.

If native/ was built, one call to it handles all entries, unless each system call must be announced (Kernel.announce).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

from fusefs.linux import getdents, syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import NO_NOREPLACE, Kernel, RefusedNames

_statx = syscalls.statx_with_gil
"""Called with Python's lock held: a local filesystem responds in less time than it takes to retake the lock."""
# Constants are ctypes objects: Python's ints would be converted for each call.
_LSTAT_FLAGS = ctypes.c_int(syscalls.AT_SYMLINK_NOFOLLOW | syscalls.AT_NO_AUTOMOUNT | syscalls.AT_STATX_DONT_SYNC)
_BY_FD = ctypes.c_int(syscalls.AT_SYMLINK_NOFOLLOW | syscalls.AT_EMPTY_PATH)
_BASIC, _BTIME, _MOUNT_ROOT = syscalls.STATX_BASIC_STATS, syscalls.STATX_BTIME, syscalls.STATX_ATTR_MOUNT_ROOT
_STATX_MASK = ctypes.c_uint(_BASIC | _BTIME)
_STATX = syscalls.statx_fields(
    "mask", "attributes", "nlink", "uid", "gid", "mode", "ino", "size", "blocks", "attributes_mask", "atime_s",
    "atime_ns", "btime_s", "btime_ns", "ctime_s", "ctime_ns", "mtime_s", "mtime_ns", "dev",
)  # fmt: skip
_CODING = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_NANO = 1_000_000_000
_HAS_FALLBACK = (*NO_NOREPLACE, errno.ESTALE)
"""Errors for which `Kernel.rename_free` has a fallback."""


def _load_bulk() -> ModuleType | None:
    """Load native/; None if it was not built (hatch_build.py), is disabled, or the encoding of names is not UTF-8."""
    if os.environ.get("TRASHD_NATIVE") == "0" or sys.getfilesystemencoding() != "utf-8":
        return None
    try:
        from fusefs.linux.native import _bulk
    except ImportError:
        return None
    return _bulk


_bulk = _load_bulk()


class StatxResult(NamedTuple):
    """The result of statx(2) for a name; fields that os.stat_result also has are named as there.

    Times and devices are converted only when they are read, since most callers read only one of them.
    """

    name: str
    has: int
    attributes: int
    st_nlink: int
    st_uid: int
    st_gid: int
    st_mode: int
    st_ino: int
    st_size: int
    st_blocks: int
    has_attributes: int
    atime_s: int
    atime_rest_ns: int
    btime_s: int
    btime_rest_ns: int
    ctime_s: int
    ctime_rest_ns: int
    mtime_s: int
    mtime_rest_ns: int
    dev: int

    @property
    def st_dev(self) -> int:
        return syscalls.device_number(self.dev)

    @property
    def st_atime_ns(self) -> int:
        return self.atime_s * _NANO + self.atime_rest_ns

    @property
    def st_mtime_ns(self) -> int:
        return self.mtime_s * _NANO + self.mtime_rest_ns

    @property
    def st_ctime_ns(self) -> int:
        return self.ctime_s * _NANO + self.ctime_rest_ns

    @property
    def btime_ns(self) -> int:
        """The birth time; 0 if not known."""
        return self.btime_s * _NANO + self.btime_rest_ns if self.has & _BTIME else 0


def read_more(kernel: Kernel, fd: int, first: bytes = b"", last: bytes = b"") -> getdents.DirentBlock | None:
    """Read some entries of a directory, starting at the fd's position; return None at the end.

    first, last  how the names that the caller needs begin and end. Directories and other names may be included, too
    """
    kernel.announce("getdents")
    if _bulk is None:
        return getdents.read_more(fd)
    block = _bulk.read(fd, first, last)
    if block is None:
        return None
    text, inos, kinds, n_seen = block
    return getdents.DirentBlock(text, text.split("/") if inos else [], inos, kinds, n_seen)


class DirectoryWindow(NamedTuple):
    """The first entries of a directory, in reverse order: the caller takes them from the end of the lists.

    bundles  names to unlink, packed (core.slices.unpack_names); these include directories if listings have no types
    subdirs  directories
    is_all   the directory has no other entries
    """

    bundles: list[bytes]
    subdirs: list[str]
    is_all: bool


def read_window(kernel: Kernel, fd: int, most: int, most_bytes: int, *, by_inode: bool) -> DirectoryWindow | None:
    """List the first entries of a directory with one call; return None if the caller must list it in Python.

    most, most_bytes  limits on the number of entries, and on the total length of their names
    by_inode  order the entries by inode number instead of by position in the listing; the order is always reversed
    Raises  OSError
    """
    if _bulk is None or kernel.is_watched:
        return None
    return DirectoryWindow(*_bulk.window(fd, most, most_bytes, by_inode))


def unlink_all(kernel: Kernel, dir_fd: int, names: Sequence[str], *, are_dirs: bool = False) -> RefusedNames:
    """Unlink each name, or rmdir it if `are_dirs`. Returns  the names that were refused, each with the errno"""
    if _bulk is not None and not kernel.is_watched:
        refused: RefusedNames = _bulk.unlink(dir_fd, list(names), syscalls.AT_REMOVEDIR if are_dirs else 0)
        return refused
    call, remove = ("rmdir", os.rmdir) if are_dirs else ("unlink", os.unlink)
    reach = kernel.announce
    refused = []
    for name in names:
        try:
            reach(call)
            remove(name, dir_fd=dir_fd)
        except OSError as error:
            refused.append((name, error.errno or errno.EIO))
    return refused


def rename_all_free(kernel: Kernel, old_dir: int, new_dir: int, names: Sequence[str]) -> RefusedNames:
    """Move each name to another directory with `Kernel.rename_free`. Returns  the names that were refused, and why"""
    refused: RefusedNames = []
    retried: Iterable[str] = names
    if _bulk is not None and not kernel.is_watched:
        refusals: RefusedNames = _bulk.rename(old_dir, new_dir, list(names), syscalls.RENAME_NOREPLACE)
        refused = [one for one in refusals if one[1] not in _HAS_FALLBACK]
        retried = (name for name, number in refusals if number in _HAS_FALLBACK)
    for name in retried:
        raw = os.fsencode(name)
        try:
            kernel.rename_free(old_dir, raw, new_dir, raw)
        except OSError as error:
            refused.append((name, error.errno or errno.EIO))
    return refused


def read_small_files(
    kernel: Kernel, dir_fd: int, names: list[str], tail: bytes, uid: int, most_bytes: int
) -> list[bytes | None]:
    """Read the file at the relative path `tail` in each of the named directories.

    Returns:
        For each directory, the content of the file, or None if the caller must read the file itself. That is so if the
        file can't be read, is larger than `most_bytes`, or is not a regular file that belongs to `uid` and that only
        its owner can write. Without native code, it is always so.
    """
    if _bulk is None or kernel.is_watched:
        return [None] * len(names)
    texts: list[bytes | None] = _bulk.read_files(dir_fd, names, tail, uid, most_bytes)
    return texts


def names_that_may_lack(kernel: Kernel, dir_fd: int, names: list[str], tail: bytes) -> list[str]:
    """Return the directories that may lack the entry `tail`; without native code, return all of them."""
    if _bulk is None or kernel.is_watched:
        return names
    return [name for name, _errno in _bulk.lacking(dir_fd, names, tail)]


class FileSizes(NamedTuple):
    """The lengths of files, and the disk space that they use; both lists are empty if they were not read."""

    lengths: list[int]
    spaces: list[int]

    def first(self, n: int | None) -> FileSizes:
        """Return the sizes of the first n files; None: all."""
        return FileSizes(self.lengths[:n], self.spaces[:n])


class MatchedByStat(NamedTuple):
    """Names that match the bounds, with their files' sizes, and names that the caller must check one by one."""

    names: list[str]
    sizes: FileSizes
    unsure: list[str]


def match_by_stat(
    kernel: Kernel, dir_fd: int, names: list[str], bounds: bytes | None, *, needs_no_server: bool
) -> MatchedByStat:
    """Find the names whose statx results are within the bounds.

    bounds   from StatBounds.packed; None: the caller must check all names one by one
    needs_no_server  whether the filesystem needs no server; if it needs one, the caller must check all names, too
    """
    if _bulk is None or bounds is None or kernel.is_watched or not needs_no_server:
        return MatchedByStat([], FileSizes([], []), names)
    names, lengths, spaces, unsure = _bulk.look(dir_fd, names, bounds)
    return MatchedByStat(names, FileSizes(lengths, spaces), unsure)


class UnlinkedMatches(NamedTuple):
    """The result of unlinking the names that match the bounds.

    n_removed, n_bytes, taken_bytes  the number of files removed, their total length and disk space
    refused  names that match but could not be removed
    unsure   names that the caller must check one by one; all others don't match
    """

    n_removed: int
    n_bytes: int
    taken_bytes: int
    refused: RefusedNames
    unsure: list[str]


def unlink_matching(kernel: Kernel, stat_fd: int, unlink_fd: int, names: list[str], bounds: bytes) -> UnlinkedMatches:
    """Check each name with statx; if it matches the bounds, unlink it before checking the next one.

    stat_fd    the directory on its backing filesystem, which must not need a server
    unlink_fd  another fd of the same directory, through which names are unlinked
    """
    if _bulk is None or kernel.is_watched:
        return UnlinkedMatches(0, 0, 0, [], names)
    return UnlinkedMatches(*_bulk.unlink_chosen(stat_fd, unlink_fd, names, bounds))


def lstat_all(
    kernel: Kernel, dir_fd: int, names: Iterable[str], *, needs_birth: bool = False, needs_no_server: bool | None = None
) -> tuple[list[StatxResult], RefusedNames]:
    """Lstat each name; refuse a name on which something is mounted (EXDEV), as `Kernel.stat` does.

    needs_birth  read birth times even if each one takes a request to the filesystem's server
    needs_no_server  whether the filesystem needs no server; None: find out, which takes as long as an lstat of a few
                names, and makes xfs do work that it has deferred
    """
    results: list[StatxResult] = []
    refused: RefusedNames = []
    mask = _BASIC | _BTIME if needs_birth else _BASIC
    if needs_no_server is None:
        needs_no_server = kernel.needs_no_server(dir_fd)
    reach, fast_stat = kernel.announce, _fast_stat_function(dir_fd) if needs_no_server else _no_fast_stat
    for name in names:
        try:
            reach("stat")
            results.append(fast_stat(name) or _stat_by_fd(dir_fd, name, mask))
        except OSError as error:
            refused.append((name, error.errno or errno.EIO))
    return results, refused


def _no_fast_stat(_name: str) -> None:
    """Stand in for `fast_stat` if a stat might contact a server: make the caller use `_stat_by_fd`."""


def _fast_stat_function(dir_fd: int) -> Callable[[str], StatxResult | None]:
    """Return a function that stats a name with one call, in a third of the time of `_stat_by_fd`.

    The function returns None if the caller must use `_stat_by_fd`. If the name is a mount point, the call reaches the
    mount, but does not wait, since it never contacts a server; the result shows that the name is a mount point.
    Source  statx(2): AT_STATX_DONT_SYNC, STATX_ATTR_MOUNT_ROOT (Linux 5.8)
    """
    fd, buffer = ctypes.c_int(dir_fd), ctypes.create_string_buffer(syscalls.STATX_SIZE)
    into, unpack = ctypes.byref(buffer), _STATX.unpack_from

    def fast_stat(name: str) -> StatxResult | None:
        if _statx(fd, name.encode(*_CODING), _LSTAT_FLAGS, _STATX_MASK, into):
            return None
        result = tuple.__new__(StatxResult, (name, *unpack(buffer)))  # the constructor would take twice as long
        is_certain = not result.attributes & _MOUNT_ROOT and result.has_attributes & _MOUNT_ROOT
        return result if is_certain else None

    return fast_stat


def _stat_by_fd(dir_fd: int, name: str, mask: int) -> StatxResult:
    buffer = ctypes.create_string_buffer(syscalls.STATX_SIZE)
    with Fd(syscalls.openat2(dir_fd, os.fsencode(name), os.O_PATH | os.O_NOFOLLOW, syscalls.BENEATH)) as fd:
        syscalls.check_result(syscalls.statx_function(fd, b"", _BY_FD, mask, buffer))
    return StatxResult(name, *_STATX.unpack_from(buffer))
