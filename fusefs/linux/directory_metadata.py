"""A directory's metadata that a swap copies: owner, mode, ACLs, xattrs, inode flags, project ID, encryption policy.

docs/reference/filesystems.md lists the metadata of a directory by filesystem, and what can be neither read nor set.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import BTRFS_MAGIC, FUSE_MAGIC, IDENTITY_XATTR, RESTORED_XATTRS, Kernel, needs_no_server

_NOT_COPIED = (
    "security.evm", "security.ima", IDENTITY_XATTR, *RESTORED_XATTRS,
    "trusted.lma", "trusted.link", "trusted.fid", "trusted.version", "trusted.som", "trusted.hsm",
)  # fmt: skip
"""Attributes that belong to a single inode; those on the second line are Lustre's."""
_NOT_COPIED_PREFIXES = ("trusted.overlay.", "trusted.SGI_ACL_", "ceph.")
"""The second is xfs's copy of an ACL, which would be an arbitrary attribute on another filesystem. The third is for
CephFS's computed attributes, which old kernels list.
"""

_CEPH, _LUSTRE, _BEEGFS, _SCALE = 0x00C36400, 0x0BD00BD0, 0x19830326, 0x47504653
_CEPH_XATTRS = (
    "ceph.dir.layout", "ceph.dir.pin", "ceph.dir.pin.random", "ceph.dir.pin.distributed",
    "ceph.quota.max_bytes", "ceph.quota.max_files",
)  # fmt: skip
_UNLISTED_XATTRS = {
    _CEPH: _CEPH_XATTRS,
    FUSE_MAGIC: _CEPH_XATTRS,  # ceph-fuse
    0xFF534D42: ("system.cifs_acl",),
    0xFE534D42: ("system.cifs_acl",),
    0x7366746E: ("system.ntfs_attrib", "system.ntfs_security"),  # ntfs3
}
"""For each filesystem's magic number, attributes that can be read by name but are not listed."""
_UNREADABLE = {_BEEGFS: "stripe pattern and storage pool (BeeGFS)", _SCALE: "NFSv4 ACL (Storage Scale)"}
"""Metadata that only a filesystem's own tools can read."""
_UNREADABLE_BY_USERS = {_LUSTRE: "default directory striping (Lustre)"}

_GETFLAGS, _SETFLAGS = 0x80086601, 0x40086602
_GETXATTR, _SETXATTR = 0x801C581F, 0x401C5820
_FREEZING = 0x10 | 0x20  # immutable append
_ENCRYPTED = syscalls.STATX_ATTR_ENCRYPTED  # the flag has the same bit
_INTERNAL = (
    _FREEZING | _ENCRYPTED | 0x100 | 0x200 | 0x1000  # dirty comprblk index
    | 0x40000 | 0x80000 | 0x100000 | 0x200000 | 0x400000  # huge_file extent verity ea_inode eofblocks
    | 0x10000000 | 0x80000000  # inline_data reserved
)  # fmt: skip
"""Flags that are not copied: a filesystem sets them itself, or a swap handles them separately. All others are copied,
and the swap is refused if the new directory can't be given one of them.
"""
_STATX_ONLY = 0x04 | 0x40  # compr nodump
"""Flags that statx also reports, for filesystems without an ioctl for flags."""
_GET_POLICY, _SET_POLICY = 0xC0096616, 0x800C6613
_POLICY_SIZE, _POLICY_ROOM = struct.Struct("=Q"), 64
_SUBVOLUME_INO = 256
_PROJECT_INHERITED = 0x200
_XFLAGS_FIXED = 0x80000000 | 0x01 | 0x02 | 0x08 | 0x10  # hasattr, realtime, preallocated, immutable, append
_FLAGS = struct.Struct("=I4x")  # the kernel uses an int, though the ioctl number encodes a long
_FSXATTR = struct.Struct("=IIIII8x")
_ABSENT = frozenset({errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODATA})
_UNAVAILABLE = _ABSENT | {errno.EPERM, errno.EACCES, errno.E2BIG, errno.ERANGE}


class Fsxattr(NamedTuple):
    """struct fsxattr without the extent count: flags, extent size, project ID, copy-on-write extent size."""

    flags: int
    extent_size: int
    project: int
    cow_extent_size: int


class DirectoryMetadata(NamedTuple):
    """All metadata that is copied from the old directory to its replacement.

    extended    None if the filesystem has no such attributes
    encryption  the fscrypt policy as the kernel returns it; None: not encrypted; empty: the policy can't be read
    unreadable  metadata that the directory may have, but that this process can't read
    """

    uid: int
    gid: int
    mode: int
    xattrs: dict[str, bytes]
    flags: int
    extended: Fsxattr | None
    encryption: bytes | None
    is_subvolume: bool
    unreadable: tuple[str, ...]


class MetadataDifference(NamedTuple):
    """An attribute that could not be set."""

    what: str
    wanted: str
    got: str


def read_metadata(kernel: Kernel, fd: int) -> DirectoryMetadata:
    """Read the metadata of the directory behind an fd that is open for reading."""
    st, magic = kernel.fstat(fd), kernel.filesystem(fd)
    unreadable = [_UNREADABLE[magic]] if magic in _UNREADABLE else []
    if os.geteuid() and magic in _UNREADABLE_BY_USERS:
        unreadable.append(_UNREADABLE_BY_USERS[magic])
    flags, extended = 0, None
    try:
        (flags,) = _ioctl_values(kernel, fd, _GETFLAGS, _FLAGS) or (0,)
        extended = _read_extended(kernel, fd)
    except PermissionError:
        unreadable.append("inode flags and project id")
    if unreadable or not needs_no_server(magic):
        flags |= kernel.statx(fd).attributes & (_STATX_ONLY | _ENCRYPTED)
    return DirectoryMetadata(
        st.st_uid,
        st.st_gid,
        stat.S_IMODE(st.st_mode),
        _xattrs(kernel, fd, _UNLISTED_XATTRS.get(magic, ()), unreadable),
        flags & ~_INTERNAL,
        extended,
        _read_policy(kernel, fd) if flags & _ENCRYPTED else None,
        magic == BTRFS_MAGIC and st.st_ino == _SUBVOLUME_INO,
        tuple(unreadable),
    )


def apply_metadata(kernel: Kernel, fd: int, metadata: DirectoryMetadata) -> None:
    """Set an empty directory's metadata as far as the kernel allows; `differences` then returns what is missing.

    The order matters. chown clears set-id bits. Setting the ACL, which is an xattr, changes the mode. On btrfs,
    setting the compression flag resets the xattr to zlib. An encrypted directory can't be given the casefold flag
    without its key.
    Raises  OSError: ENOKEY if this encryption can't be set, EXDEV if the directory is already encrypted differently
    """
    present = read_metadata(kernel, fd)
    steps: list[Callable[[], None]] = []
    if metadata.gid != present.gid:
        steps.append(partial(kernel.chown, fd, -1, metadata.gid))  # apart: a user may set the group, but not the owner
    if metadata.uid != present.uid:
        steps.append(partial(kernel.chown, fd, metadata.uid, -1))
    if metadata.flags != present.flags:
        steps.append(partial(_set_flags, kernel, fd, metadata.flags))
    if metadata.extended is not None and metadata.extended != present.extended:
        steps.append(partial(_set_extended, kernel, fd, metadata.extended))
    if metadata.encryption is not None and metadata.encryption != present.encryption:
        steps.append(partial(_set_policy, kernel, fd, metadata.encryption))
    steps += [partial(kernel.remove_xattr, fd, name) for name in present.xattrs.keys() - metadata.xattrs.keys()]
    for name, value in metadata.xattrs.items():
        is_reset = name == "btrfs.compression" and metadata.flags != present.flags
        if is_reset or present.xattrs.get(name) != value:
            steps.append(partial(kernel.set_xattr, fd, name, value))
    steps.append(partial(kernel.chmod, fd, metadata.mode))
    for step in steps:
        try:
            step()
        except OSError as error:
            if error.errno not in _UNAVAILABLE:
                raise


def make_directory_like(
    kernel: Kernel, place: Fd, new: bytes, metadata: DirectoryMetadata | None, appear: Callable[[], None]
) -> None:
    """Make a directory with this metadata (None: mode 0700), and call `appear`, which renames it to its real name.

    The directory is made in `place`, which no other user can enter. Otherwise, a user who may rename entries in the
    target directory could replace it with another one, which would then get this owner and mode. If the real name is
    taken, the existing entry is kept.
    new         an unused name in `place`
    Raises      OSError; nothing remains in `place`
    """
    kernel.mkdir(place, new)
    try:
        with kernel.open_dir(place, new) as made:
            if metadata is not None:
                # An owner must be able to write to a directory to move it.
                apply_metadata(kernel, made, metadata._replace(mode=metadata.mode | stat.S_IRWXU))
            appear()
            if metadata is not None and metadata.mode & stat.S_IRWXU != stat.S_IRWXU:
                kernel.chmod(made, metadata.mode)
    except OSError as error:
        with suppress(OSError):
            kernel.rmdir(place, new)
        if not isinstance(error, FileExistsError):
            raise  # FileExistsError: another process has made the directory first


def differences(wanted: DirectoryMetadata, got: DirectoryMetadata) -> list[MetadataDifference]:
    """Return the attributes that differ from the wanted ones.

    Encryption is not compared, since `apply_metadata` fails if it can't be set.
    """
    result = [MetadataDifference(what, UNREADABLE, "unknown") for what in wanted.unreadable]
    result += [
        MetadataDifference(name, _format_xattr(wanted, name), _format_xattr(got, name))
        for name in sorted(wanted.xattrs.keys() | got.xattrs.keys())
        if wanted.xattrs.get(name) != got.xattrs.get(name)
    ]
    pairs = [
        ("owner", str(wanted.uid), str(got.uid)),
        ("group", str(wanted.gid), str(got.gid)),
        ("mode", f"{wanted.mode:04o}", f"{got.mode:04o}"),
        ("inode flags", f"{wanted.flags:#x}", f"{got.flags:#x}"),
        *(
            (what, str(getattr(wanted.extended, name)), str(getattr(got.extended, name, "none")))
            for what, name in _EXTENDED.items()
            if wanted.extended is not None
        ),
        ("kind", *("btrfs subvolume" if one.is_subvolume else "directory" for one in (wanted, got))),
    ]
    return result + [MetadataDifference(*pair) for pair in pairs if pair[1] != pair[2]]


UNREADABLE = "unreadable"
"""Replaces a wanted value that could not be read."""


def _format_xattr(likeness: DirectoryMetadata, name: str) -> str:
    value = likeness.xattrs.get(name)
    return "none" if value is None else value.hex()[:64]


_EXTENDED = {
    "project": "project",
    "extended flags": "flags",
    "extent size hint": "extent_size",
    "copy-on-write extent size hint": "cow_extent_size",
}
"""Maps names in messages to fields of Fsxattr."""


def _xattrs(kernel: Kernel, fd: int, unlisted: tuple[str, ...], unreadable: list[str]) -> dict[str, bytes]:
    """Read the xattrs to be copied; add the names of those that can't be read to `unreadable`."""
    values = {}
    listed = (one for one in kernel.xattr_names(fd) if one not in _NOT_COPIED)
    for name in (*(one for one in listed if not one.startswith(_NOT_COPIED_PREFIXES)), *unlisted):
        try:
            values[name] = kernel.read_xattr(fd, name)
        except OSError as error:
            if error.errno not in _UNAVAILABLE:
                raise
            if error.errno not in _ABSENT:
                unreadable.append(name)
    return values


def _read_policy(kernel: Kernel, fd: int) -> bytes:
    """Return an encrypted directory's policy; b"" if it can't be read, e.g. through overlayfs. Source  fscrypt.rst"""
    buffer = bytearray(_POLICY_SIZE.pack(_POLICY_ROOM) + bytes(_POLICY_ROOM))
    try:
        kernel.ioctl(fd, _GET_POLICY, buffer)
    except OSError as error:
        if error.errno not in {*_UNAVAILABLE, errno.EOVERFLOW}:
            raise
        return b""
    (size,) = _POLICY_SIZE.unpack_from(buffer)
    return bytes(buffer[_POLICY_SIZE.size :][:size])


def _set_policy(kernel: Kernel, fd: int, policy: bytes) -> None:
    """Encrypt an empty directory. Raises  OSError: ENOKEY, EXDEV: as for `apply_metadata`"""
    if not policy:
        raise OSError(errno.ENOKEY, "its encryption policy can't be read on this kernel or filesystem")
    try:
        kernel.ioctl(fd, _SET_POLICY, bytearray(policy))
    except FileExistsError as error:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV)) from error
    except OSError as error:
        if error.errno not in _UNAVAILABLE:
            raise
        raise OSError(errno.ENOKEY, f"encrypting the new directory: {error.strerror}") from error


def _set_flags(kernel: Kernel, fd: int, flags: int) -> None:
    here = _ioctl_values(kernel, fd, _GETFLAGS, _FLAGS)
    if here:
        _put_flags(kernel, fd, here[0] & _INTERNAL | flags)


def _put_flags(kernel: Kernel, fd: int, flags: int) -> None:
    kernel.ioctl(fd, _SETFLAGS, bytearray(_FLAGS.pack(flags)))


def _read_extended(kernel: Kernel, fd: int) -> Fsxattr | None:
    fields = _ioctl_values(kernel, fd, _GETXATTR, _FSXATTR)
    if not fields:
        return None
    flags, extent_size, _count, project, cow = fields
    return Fsxattr(flags & ~_XFLAGS_FIXED, extent_size, project, cow)


def project_of(kernel: Kernel, fd: Fd) -> int | None:
    """Return the project ID of a directory that is open for reading; None if the filesystem has none."""
    extended = _read_extended(kernel, fd)
    return None if extended is None else extended.project


def inherited_project(kernel: Kernel, fd: Fd) -> int | None:
    """Return the project ID that new entries inherit, and that entries renamed into it must have; None if not set."""
    extended = _read_extended(kernel, fd)
    return extended.project if extended is not None and extended.flags & _PROJECT_INHERITED else None


def _set_extended(kernel: Kernel, fd: int, extended: Fsxattr) -> None:
    present = _ioctl_values(kernel, fd, _GETXATTR, _FSXATTR)
    if present:
        flags = present[0] & _XFLAGS_FIXED | extended.flags
        buffer = bytearray(_FSXATTR.pack(flags, extended.extent_size, 0, extended.project, extended.cow_extent_size))
        kernel.ioctl(fd, _SETXATTR, buffer)


def _ioctl_values(kernel: Kernel, fd: int, request: int, layout: struct.Struct) -> tuple[int, ...]:
    """Return the values from an ioctl; () if the filesystem doesn't support it. Raises  OSError"""
    buffer = bytearray(layout.size)
    try:
        kernel.ioctl(fd, request, buffer)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return ()
    return layout.unpack(buffer)


def is_frozen(fd: int) -> bool:
    """Return whether the file behind an fd (O_PATH is enough) is immutable or append-only; False if unknown."""
    buffer = bytearray(_FLAGS.size)
    try:
        with Fd(os.open(f"/proc/self/fd/{int(fd)}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as readable:
            syscalls.ioctl(readable, _GETFLAGS, buffer)
    except OSError:
        return False
    return bool(buffer[0] & _FREEZING)


def thaw(kernel: Kernel, fd: int) -> bool:
    """Clear the immutable and append-only flags of an inode that is open for reading. Returns  whether one was set

    Raises  OSError: EPERM without CAP_LINUX_IMMUTABLE
    """
    (flags,) = _ioctl_values(kernel, fd, _GETFLAGS, _FLAGS) or (0,)
    if not flags & _FREEZING:
        return False
    _put_flags(kernel, fd, flags & ~_FREEZING)
    return True
