"""What makes one directory like another: owner, mode, ACLs, xattrs, inode flags, project id."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import IDENTITY_XATTR, RESTORED_XATTRS, Kernel

_NOT_COPIED = ("security.evm", "security.ima", IDENTITY_XATTR, *RESTORED_XATTRS)
_NOT_COPIED_PREFIXES = ("trusted.overlay.", "trusted.SGI_ACL_")
"""The latter is an ACL once more, as xfs has it: on another filesystem it would be some attribute."""

_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602
_GETXATTR, _SETXATTR = 0x801C581F, 0x401C5820
_FREEZING = 0x10 | 0x20  # immutable append
_SETTABLE = (
    0x01 | 0x02 | 0x04 | 0x08 | 0x40 | 0x80  # secrm unrm compr sync nodump noatime
    | 0x400 | 0x4000 | 0x8000 | 0x10000 | 0x20000  # nocomp journal_data notail dirsync topdir
    | 0x800000 | 0x02000000 | 0x20000000 | 0x40000000  # nocow dax projinherit casefold
)  # fmt: skip
_PROJECT_INHERITED = 0x200
_XFLAGS_FIXED = 0x80000000 | 0x01 | 0x02 | 0x08 | 0x10  # hasattr, realtime, preallocated, immutable, append
_FLAGS = struct.Struct("=I4x")  # the kernel takes an int where its number says long
_FSXATTR = struct.Struct("=IIIII8x")
_NOT_TO_BE_HAD = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.ENODATA}
)


class Fsxattr(NamedTuple):
    """struct fsxattr without the extent count: flags, extent size, project id, copy-on-write extent size."""

    flags: int
    extent_size: int
    project: int
    cow_extent_size: int


class DirectoryMetadata(NamedTuple):
    """All that a fresh directory takes over from the old one; flags are None where there is no such thing."""

    uid: int
    gid: int
    mode: int
    xattrs: dict[str, bytes]
    flags: int | None
    extended: Fsxattr | None


class MetadataDifference(NamedTuple):
    """One thing that could not be had.

    strict  owner, group, mode, ACL or label: a swap is refused for it; others are told only
    """

    what: str
    wanted: str
    got: str
    strict: bool


def read_likeness(kernel: Kernel, fd: int) -> DirectoryMetadata:
    """The likeness of the directory behind an fd that is open for reading."""
    st = kernel.fstat(fd)
    mode, flags = stat.S_IMODE(st.st_mode), _flags(kernel, fd)
    return DirectoryMetadata(st.st_uid, st.st_gid, mode, _xattrs(kernel, fd), flags, _extended(kernel, fd))


def apply_likeness(kernel: Kernel, fd: int, wanted: DirectoryMetadata) -> None:
    """Give an empty directory of ours a likeness as far as the kernel lets us; `differences` tells how far.

    The order matters: chown clears set-id bits, xattrs carry the ACL that chmod would change, and on btrfs the flag
    for compression alone means zlib, whatever the xattr said before.
    """
    for step in _steps(kernel, fd, read_likeness(kernel, fd), wanted):
        try:
            step()
        except OSError as error:
            if error.errno not in _NOT_TO_BE_HAD:
                raise


def make_like(
    kernel: Kernel, place: Fd, new: bytes, wanted: DirectoryMetadata | None, appear: Callable[[], None]
) -> None:
    """Make a directory with a likeness (None: 0700) and let `appear` give it its name, unless that is taken by then.

    It is made where no other user can enter: one who may rename in the directory that it goes to could put another one
    in its place, which would get its owner and mode.
    place, new  where it is made, and a free name there
    Raises      OSError; nothing is left there then
    """
    kernel.mkdir(place, new)
    try:
        with kernel.open_dir(place, new) as made:
            if wanted is not None:
                # To move a directory its owner must be able to write to it.
                apply_likeness(kernel, made, wanted._replace(mode=wanted.mode | stat.S_IRWXU))
            appear()
            if wanted is not None and wanted.mode & stat.S_IRWXU != stat.S_IRWXU:
                kernel.chmod(made, wanted.mode)
    except OSError as error:
        with suppress(OSError):
            kernel.rmdir(place, new)
        if not isinstance(error, FileExistsError):
            raise  # else another process was faster


def _steps(kernel: Kernel, fd: int, here: DirectoryMetadata, wanted: DirectoryMetadata) -> Iterator[Callable[[], None]]:
    yield partial(kernel.chown, fd, _changed(here.uid, wanted.uid), _changed(here.gid, wanted.gid))
    if wanted.flags is not None and wanted.flags != here.flags:
        yield partial(_set_flags, kernel, fd, wanted.flags)
    if wanted.extended is not None and wanted.extended != here.extended:
        yield partial(_set_extended, kernel, fd, wanted.extended)
    for name in here.xattrs.keys() - wanted.xattrs.keys():
        yield partial(kernel.remove_xattr, fd, name)
    for name, value in wanted.xattrs.items():
        if here.xattrs.get(name) != value:
            yield partial(kernel.set_xattr, fd, name, value)
    yield partial(kernel.chmod, fd, wanted.mode)


def differences(wanted: DirectoryMetadata, got: DirectoryMetadata) -> list[MetadataDifference]:
    """What of the wanted likeness is missing; the lent write permission of an owner does not count."""
    found = []
    for what, a, b in (("owner", wanted.uid, got.uid), ("group", wanted.gid, got.gid)):
        if a != b:
            found.append(MetadataDifference(what, str(a), str(b), strict=True))
    if wanted.mode != got.mode:
        found.append(MetadataDifference("mode", f"{wanted.mode:04o}", f"{got.mode:04o}", strict=True))
    for name in sorted(wanted.xattrs.keys() | got.xattrs.keys()):
        if wanted.xattrs.get(name) != got.xattrs.get(name):
            strict = name.startswith(("system.", "security."))
            found.append(MetadataDifference(name, _told(wanted, name), _told(got, name), strict))
    if wanted.flags is not None and wanted.flags != got.flags:
        found.append(MetadataDifference("inode flags", f"{wanted.flags:#x}", _hex(got.flags), strict=False))
    if wanted.extended is not None and wanted.extended != got.extended:
        project = None if got.extended is None else got.extended.project
        strict = wanted.extended.project != project
        found.append(MetadataDifference("project", str(wanted.extended.project), str(project), strict))
    return found


def _told(likeness: DirectoryMetadata, name: str) -> str:
    value = likeness.xattrs.get(name)
    return "none" if value is None else value.hex()[:64]


def _hex(flags: int | None) -> str:
    return "none" if flags is None else f"{flags:#x}"


def _changed(here: int, wanted: int) -> int:
    return -1 if here == wanted else wanted


def _xattrs(kernel: Kernel, fd: int) -> dict[str, bytes]:
    return {
        name: value
        for name, value in kernel.xattrs(fd).items()
        if name not in _NOT_COPIED and not name.startswith(_NOT_COPIED_PREFIXES)
    }


def _flags(kernel: Kernel, fd: int) -> int | None:
    flags = _all_flags(kernel, fd)
    return None if flags is None else flags & _SETTABLE


def _all_flags(kernel: Kernel, fd: int) -> int | None:
    told = _told_if_any(kernel, fd, _GETFLAGS, _FLAGS)
    return None if told is None else told[0]


def _set_flags(kernel: Kernel, fd: int, flags: int) -> None:
    (here,) = _asked(kernel, fd, _GETFLAGS, _FLAGS)
    _put_flags(kernel, fd, here & ~_SETTABLE | flags)


def _put_flags(kernel: Kernel, fd: int, flags: int) -> None:
    kernel.ioctl(fd, _SETFLAGS, bytearray(_FLAGS.pack(flags)))


def _extended(kernel: Kernel, fd: int) -> Fsxattr | None:
    told = _told_if_any(kernel, fd, _GETXATTR, _FSXATTR)
    if told is None:
        return None
    flags, extent_size, _count, project, cow = told
    return Fsxattr(flags & ~_XFLAGS_FIXED, extent_size, project, cow)


def project_of(kernel: Kernel, fd: Fd) -> int | None:
    """The project id of a directory that is open for reading; None where there is no such thing."""
    extended = _extended(kernel, fd)
    return None if extended is None else extended.project


def inherited_project(kernel: Kernel, fd: Fd) -> int | None:
    """The project id that a directory gives to all made in it, without which nothing is renamed into it; or None."""
    extended = _extended(kernel, fd)
    return extended.project if extended is not None and extended.flags & _PROJECT_INHERITED else None


def _set_extended(kernel: Kernel, fd: int, wanted: Fsxattr) -> None:
    here, *_ = _asked(kernel, fd, _GETXATTR, _FSXATTR)
    flags = here & _XFLAGS_FIXED | wanted.flags
    buffer = bytearray(_FSXATTR.pack(flags, wanted.extent_size, 0, wanted.project, wanted.cow_extent_size))
    kernel.ioctl(fd, _SETXATTR, buffer)


def _asked(kernel: Kernel, fd: int, request: int, layout: struct.Struct) -> tuple[int, ...]:
    buffer = bytearray(layout.size)
    kernel.ioctl(fd, request, buffer)
    return layout.unpack(buffer)


def _told_if_any(kernel: Kernel, fd: int, request: int, layout: struct.Struct) -> tuple[int, ...] | None:
    try:
        return _asked(kernel, fd, request, layout)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM):
            return None
        raise


def is_frozen(fd: int) -> bool:
    """Whether what an fd of any kind holds is immutable or append-only, as far as that can be seen."""
    buffer = bytearray(_FLAGS.size)
    try:
        with Fd(os.open(f"/proc/self/fd/{int(fd)}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as readable:
            syscalls.ioctl(readable, _GETFLAGS, buffer)
    except OSError:
        return False
    return bool(buffer[0] & _FREEZING)


def thaw(kernel: Kernel, fd: int) -> bool:
    """Take immutable and append-only off a file or directory that is open for reading; whether it had either.

    Raises  OSError: EPERM without CAP_LINUX_IMMUTABLE
    """
    flags = _all_flags(kernel, fd) or 0
    if not flags & _FREEZING:
        return False
    _put_flags(kernel, fd, flags & ~_FREEZING)
    return True
