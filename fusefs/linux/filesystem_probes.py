"""Probes of a filesystem: features that a store relies on, renames, case-insensitive directories, mergerfs branches.

Everything that a killed probe leaves behind has a known name or prefix. But a user who may write to the parent
directory could give such a name to any of our directories. So if an entry inside has another name, neither the entry
nor the directory is removed.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from typing import Final, NamedTuple

from fusefs.core.names import Name
from fusefs.linux import syscalls
from fusefs.linux.credentials import ThreadCredentials, call_as
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.getdents import Dirents
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import NO_EXCHANGE, NO_TMPFILE

_NO_LINK = NO_TMPFILE | {errno.ENOENT, errno.EPERM, errno.EXDEV, errno.EMLINK}
_CONTENT = b"trashd\n"
_NOBODY = 65534
_ONE, _OTHER, _MOVED, _CLOSED = (Name(name) for name in (b"one", b"other", b"moved", b"closed"))
_OPEN_TO_ALL, _READ_ONLY = 0o777, 0o755
PROBE_PREFIX = b"trial-"
_MAX_DEPTH = 4


def keeps_unnamed(kernel: Kernel, dir_fd: Fd, name: bytes) -> bool:
    """Return whether a file that was created without a name still exists after it was given a name and closed.

    JuiceFS reports success, shows the file as long as it is open, and then loses it.
    name    the name to use; a file of this name that a killed probe left behind is removed first
    Raises  OSError: an error that proves nothing about such files, e.g. ENOSPC
    """
    _drop(kernel, dir_fd, name)
    try:
        with kernel.create_unnamed(dir_fd) as fd:
            kernel.write(fd, _CONTENT)
            kernel.link_unnamed(fd, dir_fd, name)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    try:
        with kernel.open_beneath(dir_fd, name, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            return kernel.fstat(fd).st_nlink == 1 and kernel.read(fd, len(_CONTENT) + 1) == _CONTENT
    except FileNotFoundError:
        return False
    finally:
        _drop(kernel, dir_fd, name)


def _drop(kernel: Kernel, dir_fd: Fd, name: bytes) -> None:
    with suppress(FileNotFoundError):
        kernel.unlink(dir_fd, name)


def refuses_strangers(kernel: Kernel, dir_fd: Fd, name: Name) -> bool:
    """Return whether other users can neither move a directory that they can't write to, nor open one of mode 0700.

    The move is to another parent. Both are refused on Linux's local filesystems, but not by every client of a network
    filesystem, on FUSE without default_permissions, or on vfat, where one user owns everything. Root tries both as the
    user nobody. For other users, and for root in a user namespace without a second UID, the filesystem's type decides.
    name    the name for a temporary directory
    Raises  OSError
    """
    discard_rights_probe(kernel, dir_fd, name)
    if os.geteuid() != 0:
        return kernel.is_local(dir_fd)
    kernel.mkdir(dir_fd, name)
    try:
        with ExitStack() as owned, suppress(_WrongMode):
            top = owned.enter_context(kernel.open_dir(dir_fd, name))
            one, other = (
                owned.enter_context(_make_directory(kernel, top, made, _OPEN_TO_ALL)) for made in (_ONE, _OTHER)
            )
            _make_directory(kernel, one, _MOVED, _READ_ONLY).close()
            _make_directory(kernel, top, _CLOSED, 0o700).close()
            kernel.announce("strangers")
            try:
                return call_as(ThreadCredentials(_NOBODY, _NOBODY), _is_refused, top, one, other)
            except PermissionError:
                return kernel.is_local(dir_fd)  # this user namespace has no other user
        return False
    finally:
        discard_rights_probe(kernel, dir_fd, name)


class _WrongMode(Exception):
    """A new directory does not have the mode that was set, or does not belong to root."""


def _make_directory(kernel: Kernel, dir_fd: Fd, name: Name, mode: int) -> Fd:
    kernel.mkdir(dir_fd, name)
    with close_on_error(kernel.open_dir(dir_fd, name)) as fd:
        kernel.chmod(fd, mode)
        st = kernel.fstat(fd)
        if st.st_mode & 0o777 != mode or st.st_uid != 0:
            raise _WrongMode
    return fd


def _is_refused(top: Fd, one: Fd, other: Fd) -> bool:
    """Return whether a move from `one` to `other`, and an open of a directory of mode 0700 in `top`, are both refused.

    This is called as another user, but with fds that root opened: the kernel checks permissions at each use of a name.
    Only EPERM and EACCES count as a refusal.
    """
    try:
        os.rename(_MOVED, _MOVED, src_dir_fd=one, dst_dir_fd=other)
    except PermissionError:
        pass
    except OSError:
        return False
    else:
        return False
    try:
        os.close(os.open(_CLOSED, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=top))
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def discard_rights_probe(kernel: Kernel, dir_fd: Fd, name: Name) -> None:
    """Remove the directories that `refuses_strangers` made, or that a killed process left behind. Raises  OSError"""
    try:
        top = kernel.open_dir(dir_fd, name)
    except FileNotFoundError:
        return
    with top:
        for parent in (_ONE, _OTHER):
            with suppress(FileNotFoundError), kernel.open_dir(top, parent) as fd, suppress(FileNotFoundError):
                kernel.rmdir(fd, _MOVED)
        for made in (_ONE, _OTHER, _CLOSED):
            with suppress(FileNotFoundError):
                kernel.rmdir(top, made)
    kernel.rmdir(dir_fd, name)


def probe_name(name: str) -> Name:
    return Name(PROBE_PREFIX + name.encode())


@contextmanager
def probe_directory(kernel: Kernel, dir_fd: int, name: Name) -> Iterator[Fd]:
    """Make a private directory, and remove it after the block. One that a killed probe left behind is removed first.

    Raises  OSError
    """
    discard_probe_directory(kernel, dir_fd, name)
    kernel.mkdir(dir_fd, name)
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            yield fd
    finally:
        discard_probe_directory(kernel, dir_fd, name)


def discard_probe_directory(kernel: Kernel, dir_fd: int, name: Name) -> None:
    """Remove a probe's directory, if it exists. Raises  OSError; ENOTEMPTY if any name in it lacks PROBE_PREFIX"""
    with suppress(FileNotFoundError):
        _discard(kernel, dir_fd, name, _MAX_DEPTH)


def _discard(kernel: Kernel, dir_fd: int, name: bytes, depth: int) -> None:
    try:
        kernel.unlink(dir_fd, name)
    except (IsADirectoryError, PermissionError):  # POSIX allows either for a directory
        if depth:
            with kernel.open_dir(dir_fd, name) as fd:
                for inner in kernel.list(fd):
                    if inner.startswith(PROBE_PREFIX):
                        with suppress(FileNotFoundError):
                            _discard(kernel, fd, inner, depth - 1)
        kernel.rmdir(dir_fd, name)


_EXT, _F2FS, _TMPFS, _OVERLAY, _XFS = 0xEF53, 0xF2F52010, 0x01021994, 0x794C7630, 0x58465342
_BTRFS, _RAMFS, _GFS2, _OCFS2, _LUSTRE = 0x9123683E, 0x858458F6, 0x01161970, 0x7461636F, 0x0BD00BD0
_FAT, _EXFAT, _NTFS, _NTFS3, _HFS, _HFS_PLUS = 0x4D44, 0x2011BAB0, 0x5346544E, 0x7366746E, 0x4244, 0x482B
_SMB, _CIFS, _SMB2, _NCP, _VBOX = 0x517B, 0xFF534D42, 0xFE534D42, 0x564C, 0x786F4256
_AFFS, _ADFS, _HPFS = 0xADFF, 0xADF5, 0xF995E849
_EXACT = frozenset({_BTRFS, _RAMFS, _GFS2, _OCFS2, _LUSTRE})
_FOLDING = frozenset(
    {_FAT, _EXFAT, _NTFS, _NTFS3, _HFS, _HFS_PLUS, _SMB, _CIFS, _SMB2, _NCP, _VBOX, _AFFS, _ADFS, _HPFS}
)
_FLAGGED = frozenset({_EXT, _F2FS, _TMPFS, _OVERLAY})
"""Filesystems whose directories have a flag for case folding. A filesystem that is in none of these sets is probed."""
_INCOMPATIBLE, _INCOMPATIBLE_AT, _EXT4_CASEFOLD = struct.Struct("<I"), 1024 + 0x60, 0x20000
"""s_feature_incompat of an ext4 superblock."""
_TMPFS_FEATURE: Final = "/sys/fs/tmpfs/features/casefold"
"""This file exists on kernels with the feature, since Linux 6.13."""
_FS_IOC_GETFLAGS = 0x80086601
_FLAGS = struct.Struct("=I4x")
_FS_CASEFOLD_FL = 0x40000000
_XFS_IOC_FSGEOMETRY_V1 = 0x80705864
_XFS_GEOMETRY = struct.Struct("=92xI16x")
"""struct xfs_fsop_geom_v1; only its flags are read."""
_XFS_FSOP_GEOM_FLAGS_DIRV2CI, _XFS_FSOP_GEOM_FLAGS_PARENT = 1 << 12, 1 << 25
_N_TRIED = 256


class CaseFolding(NamedTuple):
    """Whether a directory ignores the case of names.

    folds      whether it does; None: not known
    is_common  all directories of the filesystem behave alike
    """

    folds: bool | None
    is_common: bool


def find_case_folding(dir_fd: int) -> CaseFolding:
    """Determine whether a directory ignores the case of names, and whether all others on its filesystem do the same.

    dir_fd  the directory; O_PATH is enough
    Cost    a few calls that don't wait; on an unknown filesystem, also reading part of the directory and two lookups
    """
    is_flagged = False
    try:
        kind = syscalls.statfs_type(dir_fd)
        if kind in _EXACT or kind in _FOLDING:
            return CaseFolding(kind in _FOLDING, is_common=True)
        is_flagged = kind in _FLAGGED
        if is_flagged and not _may_have_flag(kind, dir_fd):
            return CaseFolding(folds=False, is_common=True)
        with Fd(os.open(b"/proc/self/fd/%d" % dir_fd, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            if is_flagged:
                flags = _ioctl_flags(fd, _FS_IOC_GETFLAGS, _FLAGS)
                return CaseFolding(bool(flags & _FS_CASEFOLD_FL), is_common=False)
            if kind == _XFS:
                flags = _ioctl_flags(fd, _XFS_IOC_FSGEOMETRY_V1, _XFS_GEOMETRY)
                return CaseFolding(bool(flags & _XFS_FSOP_GEOM_FLAGS_DIRV2CI), is_common=True)
            return CaseFolding(_finds_another_spelling(fd), is_common=True)
    except OSError as error:
        # A kernel that lacks this ioctl (on tmpfs until 6.6) doesn't fold. Other errors: the directory can't be read.
        return CaseFolding(False if is_flagged and error.errno == errno.ENOTTY else None, is_common=False)


def _may_have_flag(kind: int, dir_fd: int) -> bool:
    """Return whether a filesystem's directories can have the flag for case folding; True if that is unknown."""
    if kind == _TMPFS:
        return os.path.exists(_TMPFS_FEATURE)
    if kind == _EXT:
        with suppress(OSError):
            return has_ext4_casefold(_device_of(dir_fd))
    return True


def _device_of(dir_fd: int) -> str:
    device = os.fstat(dir_fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    return os.path.join("/dev", os.path.basename(os.readlink(f"/sys/dev/block/{number}")))


def has_ext4_casefold(path: str) -> bool:
    """Return whether directories of an ext4 filesystem may fold case. path: the path of its block device or image"""
    with Fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        (features,) = _INCOMPATIBLE.unpack(os.pread(fd, _INCOMPATIBLE.size, _INCOMPATIBLE_AT))
        return bool(features & _EXT4_CASEFOLD)


def _ioctl_flags(fd: Fd, request: int, answer: struct.Struct) -> int:
    buffer = bytearray(answer.size)
    syscalls.ioctl(fd, request, buffer)
    flags: int = answer.unpack(buffer)[0]
    return flags


def has_parent_pointers(kernel: Kernel, fd: Fd) -> bool:
    """Return whether an XFS filesystem has parent pointers. mkfs.xfs makes them by default since 2026.

    fd      opened for reading
    """
    buffer = bytearray(_XFS_GEOMETRY.size)
    with suppress(OSError):  # then renames are tried without spare files
        kernel.ioctl(fd, _XFS_IOC_FSGEOMETRY_V1, buffer)
    (flags,) = _XFS_GEOMETRY.unpack(buffer)
    return bool(flags & _XFS_FSOP_GEOM_FLAGS_PARENT)


def _finds_another_spelling(fd: Fd) -> bool | None:
    """Return whether the first name with letters leads to the same inode in swapped case; None: no name has letters."""
    for name, *_ in itertools.islice(Dirents(fd).read_from(0), _N_TRIED):
        other = name.swapcase()
        if other != name:
            try:
                other_stat = os.stat(other, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            return os.path.samestat(other_stat, os.stat(name, dir_fd=fd, follow_symlinks=False))
    return None


_CONTROL = b".mergerfs"
_KEEPS_PATHS = (b"ep", b"msp")


def mergerfs_branches(fd: Fd) -> frozenset[bytes]:
    """Return the branches that contain the file behind an fd; an empty set if unknown."""
    paths, below = _read_mergerfs_xattr(fd, b"allpaths"), _read_mergerfs_xattr(fd, b"relpath")
    return frozenset(path.removesuffix(below) for path in paths.split(b"\0") if path)


def check_mergerfs_rename(root: Fd, source: Fd, directory: Fd) -> None:
    """Check that mergerfs's policies allow moving one directory into another; the two may be on different branches.

    root    the mount's root, which has the settings; if they can't be read, nothing is checked
    Raises  OSError: EXDEV, EROFS

    Source  mergerfs 2.33, src/fuse_rename.cpp and the chapter on extended attributes of its README
    """
    here, there = mergerfs_branches(source), mergerfs_branches(directory)
    try:
        control = Fd(os.open(_CONTROL, os.O_PATH, dir_fd=root))
    except OSError:
        return
    with control:
        modes = dict(branch.rpartition(b"=")[::2] for branch in _read_mergerfs_xattr(control, b"branches").split(b":"))
        creates, ignores = (
            _read_mergerfs_xattr(control, b"func.create"),
            _read_mergerfs_xattr(control, b"ignorepponrename"),
        )
    if here and all(modes.get(branch, b"").startswith(b"RO") for branch in here):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if creates.startswith(_KEEPS_PATHS) and ignores != b"true" and not here <= there:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def check_overlay_rename(kernel: Kernel, parent: Fd, name: Name, filled: Name) -> None:
    """Check that overlayfs can rename a directory: try to rename it onto a non-empty directory, which must fail.

    overlayfs can't rename a directory of a lower layer, and refuses that before it checks the new name. Nothing else
    shows whether a directory is in a lower layer.
    filled  the name of the non-empty directory, in the same parent
    Raises  OSError EXDEV
    Source  fs/overlayfs/dir.c, ovl_rename
    """
    try:
        kernel.rename(parent, name, parent, filled)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:  # another process has just put an empty directory there
        kernel.rename_free(parent, filled, parent, name)


def _read_mergerfs_xattr(fd: Fd, name: bytes) -> bytes:
    from fusefs.linux.xattrs import read_xattr  # imported late: it loads pathlib

    value = read_xattr(fd, b"user.mergerfs." + name)
    return b"" if isinstance(value, int) else value


_PAIR = (Name(b"probe-a"), Name(b"probe-b"))


_NOREPLACE = Name(b"probe-noreplace")


_UNKNOWN_FLAG = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


_FULL, _EMPTY, _FREE, _MARK = (probe_name(name) for name in ("full", "empty", "free", "mark"))


_FILE, _SECOND_FILE, _FREE_FILE = (probe_name(name) for name in ("file", "other", "free-file"))


_CONTENTS = b"one", b"the other"


class RenameFlags(NamedTuple):
    """Whether renameat2 can exchange, and whether RENAME_NOREPLACE refuses a taken name and accepts a free one."""

    exchange: bool
    noreplace: bool


class FlagAnswer(Enum):
    """How a filesystem treats a flag."""

    KEPT = "it does what the flag says"
    REFUSED = "it says that it has no such flag"
    IGNORED = "it makes a plain rename, or nothing, and may even say that it is done"


def probe_renames(kernel: Kernel, dir_fd: Fd) -> RenameFlags:
    """Try RENAME_EXCHANGE and RENAME_NOREPLACE in one of our directories.

    If the kernel knows that a name is taken, it refuses the call itself, which proves nothing about the filesystem. If
    a filesystem ignores RENAME_EXCHANGE, we don't trust it to honour RENAME_NOREPLACE.
    Raises  OSError
    Source  fs/namei.c, do_renameat2
    """
    exchange = probe_exchange(kernel, dir_fd)
    noreplace = exchange is not FlagAnswer.IGNORED and _probe_noreplace(kernel, dir_fd)
    return RenameFlags(exchange is FlagAnswer.KEPT, noreplace)


def probe_exchange(kernel: Kernel, dir_fd: Fd) -> FlagAnswer:
    """Find out how the filesystem treats RENAME_EXCHANGE, with two temporary directories.

    Each of the two contains a directory with its own name. So a filesystem that ignores the flag can't replace one with
    the other (ENOTEMPTY). If a filesystem does nothing, or something else, and returns 0, the position of the inner
    directories shows this. After a 0, the kernel exchanges its own dentries, so that a lookup by name may show an
    exchange that never happened. Therefore the listing, which comes from the filesystem, is checked, too.
    Source  s3fs-fuse PR 2933 and cryfs PR 568: both make a plain rename and return 0; measured with a FUSE filesystem
            that returns 0 and does nothing
    """
    a, b = _PAIR
    for name in _PAIR:
        _discard_marked(kernel, dir_fd, name)  # from a killed probe
    try:
        for name in _PAIR:
            kernel.mkdir(dir_fd, name)
            with kernel.open_dir(dir_fd, name) as fd:
                kernel.mkdir(fd, name)
        before = kernel.list_inos(dir_fd)
        try:
            kernel.exchange(dir_fd, a, dir_fd, b)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            return FlagAnswer.REFUSED if error.errno in _UNKNOWN_FLAG else FlagAnswer.IGNORED
        after = kernel.list_inos(dir_fd)
        listed = (after.get(a), after.get(b)) == (before.get(b), before.get(a))
        is_kept = listed and _list_marks(kernel, dir_fd, a) == [b] and _list_marks(kernel, dir_fd, b) == [a]
        return FlagAnswer.KEPT if is_kept else FlagAnswer.IGNORED
    finally:
        for name in _PAIR:
            _discard_marked(kernel, dir_fd, name)


def _list_marks(kernel: Kernel, dir_fd: Fd, name: Name) -> list[bytes]:
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            return kernel.list(fd)
    except FileNotFoundError:
        return []


def _probe_noreplace(kernel: Kernel, dir_fd: Fd) -> bool:
    """Return whether RENAME_NOREPLACE works for directories and files, judging by what each name is afterwards."""
    with probe_directory(kernel, dir_fd, _NOREPLACE) as fd:
        for name in (_FULL, _EMPTY):
            kernel.mkdir(fd, name)
        for name, content in zip((_FILE, _SECOND_FILE), _CONTENTS, strict=True):
            with kernel.create(fd, name) as file:
                kernel.write(file, content)
        with kernel.open_dir(fd, _FULL) as full:
            kernel.mkdir(full, _MARK)
        refused = _refuses(kernel, fd, _FULL, _EMPTY) and _refuses(kernel, fd, _FILE, _SECOND_FILE)
        kept = _list_marks(kernel, fd, _FULL) == [_MARK] and _list_marks(kernel, fd, _EMPTY) == []
        contents = _read_file(kernel, fd, _FILE), _read_file(kernel, fd, _SECOND_FILE)
        if not refused or not kept or contents != _CONTENTS:
            return False
        accepted = _accepts(kernel, fd, _FULL, _FREE) and _accepts(kernel, fd, _FILE, _FREE_FILE)
        listed = set(kernel.list_reopened(fd))
        moved = _list_marks(kernel, fd, _FREE) == [_MARK] and _read_file(kernel, fd, _FREE_FILE) == _CONTENTS[0]
        return accepted and moved and listed == {_FREE, _EMPTY, _FREE_FILE, _SECOND_FILE}


def rename_noreplace(kernel: Kernel, dir_fd: int, old: Name, new: Name) -> None:
    """renameat2 with RENAME_NOREPLACE, without a fallback. Raises  OSError"""
    kernel.announce("renameat2")
    syscalls.renameat2(dir_fd, old, dir_fd, new, syscalls.RENAME_NOREPLACE)


def _refuses(kernel: Kernel, fd: Fd, old: Name, taken: Name) -> bool:
    try:
        rename_noreplace(kernel, fd, old, taken)
    except FileExistsError:
        return True
    except OSError as error:
        if error.errno not in NO_EXCHANGE:
            raise
    return False


def _accepts(kernel: Kernel, fd: Fd, old: Name, free: Name) -> bool:
    try:
        rename_noreplace(kernel, fd, old, free)
    except OSError as error:
        if error.errno not in NO_EXCHANGE:
            raise
        return False
    return True


def _read_file(kernel: Kernel, fd: Fd, name: Name) -> bytes | None:
    with suppress(FileNotFoundError), kernel.open_beneath(fd, name, os.O_RDONLY | os.O_NOFOLLOW) as file:
        return kernel.read(file, len(_CONTENTS[1]) + 1)
    return None


def discard_rename_probes(kernel: Kernel, dir_fd: Fd) -> None:
    """Remove the directories that a killed `probe_renames` left behind. Raises  OSError"""
    for name in _PAIR:
        _discard_marked(kernel, dir_fd, name)
    discard_probe_directory(kernel, dir_fd, _NOREPLACE)


def _discard_marked(kernel: Kernel, parent: Fd, name: Name) -> None:
    """Remove one of the two directories of `probe_exchange`, and the inner directories that mark them."""
    try:
        fd = kernel.open_dir(parent, name)
    except FileNotFoundError:
        return
    with fd:
        for mark in kernel.list(fd):
            if mark in _PAIR:
                kernel.rmdir(fd, mark)
    kernel.rmdir(parent, name)
