"""A file, link, FIFO or device made again elsewhere: content and attributes, complete and on disk before it has a name.

What is made has no name (O_TMPFILE, where that lasts), or one in a directory that no other user can enter: the owner of
the place that it goes to can put nothing there that would get its owner, its mode or its content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.archived_files import may_be_archived
from fusefs.linux.copy_contents import GoesOn, copy_contents, forget_pages, is_same_content
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.private_directory import PrivateDirectory, nameless
from fusefs.linux.shared_extents import has_same_blocks
from fusefs.linux.statx import set_times
from fusefs.linux.syscalls import NO_TMPFILE
from fusefs.linux.thread_credentials import ThreadCredentials, call_as

_LOOKED_AT = os.O_PATH | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NONBLOCK
_ABOUT_THE_PLACE = (
    "security.evm", "security.ima", "system.nfs4", "system.cifs_acl", "system.ntfs", "trusted.overlay.",
    "trusted.lov", "trusted.lma", "trusted.link", "trusted.fid", "trusted.glusterfs.", "btrfs.", "ceph.", "lustre.",
)  # fmt: skip
"""Extended attributes by which a filesystem tells of itself, and not of the file."""
_ACL = "system.posix_acl_access"
_ACL_AGAIN_PREFIX = "trusted.SGI_ACL_"
"""What xfs tells of an ACL besides, in its own words."""
_LABEL_PREFIX = "security."


class CopySource(NamedTuple):
    """What is to be copied, open.

    fd         readable for a regular file, else O_PATH: to open a FIFO or a device is to do something to it
    seen       what it was before the first byte was read
    version    what changes with it: size, mtime, ctime
    is_leased  an open for writing waits until `fd` is closed
    """

    fd: Fd
    seen: os.stat_result
    version: tuple[int, int, int]
    is_leased: bool = False

    def is_regular(self) -> bool:
        """Whether it has content of its own."""
        return stat.S_ISREG(self.seen.st_mode)

    def is_untouched(self, kernel: Kernel) -> bool:
        """Whether it has not been written to, nor its attributes changed, since it was opened, and no writer waits."""
        return self._is_alone(kernel) and _version(kernel.fstat(self.fd)) == self.version

    def may_be(self, other: os.stat_result) -> bool:
        """Whether something may be this very file, shown by another mount under other numbers.

        Overlays, FUSE and NFS do that. The ctime of a copy can't be chosen, and is later.
        """
        return (other.st_ctime_ns, other.st_nlink) == (self.seen.st_ctime_ns, self.seen.st_nlink)

    def after_unlink(self, st: os.stat_result) -> CopySource:
        """This original after we have unlinked one of its names, which changes its ctime."""
        size, mtime_ns, _ = self.version
        return self._replace(version=(size, mtime_ns, st.st_ctime_ns))

    def _is_alone(self, kernel: Kernel) -> bool:
        if not self.is_leased:
            return True
        kernel.reach("lease")
        return fcntl.fcntl(self.fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def goes_on(self, kernel: Kernel, wanted: GoesOn) -> GoesOn:
        """`wanted`, which raises ETXTBSY once a writer waits for the file: it shall not wait for long."""

        def asked() -> bool:
            if not self._is_alone(kernel):
                raise _failure(errno.ETXTBSY)
            return wanted()

        return asked


def open_original(kernel: Kernel, dir_fd: int, name: bytes) -> CopySource:
    """What has a name, for a copy of it.

    Raises  OSError: EISDIR for a directory, EOPNOTSUPP for a socket, ETXTBSY if it is open for writing: what
            is written later would be lost
    """
    with kernel.open_beneath(dir_fd, name, _LOOKED_AT) as found:
        seen = kernel.fstat(found)
        kind = stat.S_IFMT(seen.st_mode)
        if kind == stat.S_IFDIR:
            raise _failure(errno.EISDIR)
        if kind == stat.S_IFSOCK:
            raise _failure(errno.EOPNOTSUPP)  # it is nothing without the program that listens
        if kind != stat.S_IFREG:
            return CopySource(Fd(os.dup(found)), seen, _version(seen))
        fd = kernel.reopen(found, _READ)
    try:
        _leave_atime(fd)
        is_leased = _lease(kernel, fd, seen.st_uid)
        seen = kernel.fstat(fd)
        return CopySource(fd, seen, _version(seen), is_leased)
    except BaseException:
        fd.close()
        raise


def _lease(kernel: Kernel, fd: Fd, uid: int) -> bool:
    """Whether we have a read lease, which says that it is not open for writing; False where that can't be had.

    uid     its owner, as which that needs no capability: root in a container, or as a service, may lack CAP_LEASE
    Raises  OSError: ETXTBSY if it is
    """
    try:
        kernel.reach("lease")
        fcntl.fcntl(fd, syscalls.F_SETSIG, signal.SIGURG)
        call_as(ThreadCredentials(uid), fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        # A network filesystem says the same when its server doesn't tell.
        if error.errno == errno.EAGAIN and kernel.is_local(fd):
            raise _failure(errno.ETXTBSY) from error
        return False
    return True


def _version(st: os.stat_result) -> tuple[int, int, int]:
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns


class UnnamedCopy(NamedTuple):
    """A copy without a name yet.

    fd       readable and writable for a regular file, else O_PATH
    private  where it has a name that only we know; None for what never had one
    name     that name
    shares   its blocks are the original's
    """

    fd: Fd
    private: Fd | None = None
    name: bytes = b""
    shares: bool = False

    def put(self, kernel: Kernel, dir_fd: int, name: bytes) -> None:
        """Give it a name that is free. Raises  OSError: EEXIST"""
        if self.private is None:
            kernel.link_unnamed(self.fd, dir_fd, name)
        else:
            kernel.rename_free(self.private, self.name, dir_fd, name)

    def replace(self, kernel: Kernel, private: PrivateDirectory, dir_fd: int, name: bytes) -> None:
        """Give it a name that something else may have, which is gone then."""
        staged = self
        if self.private is None:
            staged = UnnamedCopy(self.fd, private.open(), nameless())
            self.put(kernel, private.open(), staged.name)
        assert staged.private is not None
        try:
            kernel.rename(staged.private, staged.name, dir_fd, name)
        finally:
            staged.unname(kernel)  # of two links to one file a rename leaves both

    def unname(self, kernel: Kernel) -> None:
        """Have one gone that gets no name, as soon as it is closed."""
        if self.private is not None:
            with suppress(OSError):
                kernel.unlink(self.private, self.name)


def make_copy(
    kernel: Kernel, original: CopySource, dir_fd: int, private: PrivateDirectory, goes_on: GoesOn
) -> UnnamedCopy:
    """A copy with all attributes of the original, for a directory; not on disk yet.

    Raises  OSError: what could not be had as it was, ECANCELED if it was not to go on, ENODATA: it may be archived
    """
    if original.is_regular() and may_be_archived(kernel, original.fd):
        raise OSError(errno.ENODATA, "its data may be in an archive only")
    made = _make_file(kernel, dir_fd, private) if original.is_regular() else _make_special(kernel, original, private)
    try:
        if original.is_regular():
            shares = copy_contents(kernel, original.fd, made.fd, original.seen.st_size, goes_on)
            made = made._replace(shares=shares)
        _give_attributes(kernel, original, made.fd)
        if original.is_regular():
            forget_pages(kernel, made.fd)  # which has them written, without waiting for it
    except BaseException:
        made.unname(kernel)
        made.fd.close()
        raise
    return made


def verify(kernel: Kernel, original: CopySource, made: UnnamedCopy, goes_on: GoesOn) -> None:
    """Have a copy on disk, and read both to see that it is one; of blocks that they share, only where those are.

    Raises  OSError: EIO if it is none, ECANCELED if it was not to go on
    """
    if original.is_regular():
        kernel.fsync(made.fd)
        if made.shares and has_same_blocks(kernel, original.fd, made.fd):
            if _has_attributes(kernel, original, made.fd):
                return
            raise _failure(errno.EIO)
        forget_pages(kernel, made.fd)
    if not is_copy(kernel, original, made.fd, goes_on):
        raise _failure(errno.EIO)


def is_copy(kernel: Kernel, original: CopySource, other: Fd, goes_on: GoesOn) -> bool:
    """Whether something open has the content and all the attributes of an original."""
    seen = original.seen
    if not _has_attributes(kernel, original, other):
        return False
    if stat.S_ISREG(seen.st_mode):
        return is_same_content(kernel, original.fd, other, seen.st_size, goes_on)
    if stat.S_ISLNK(seen.st_mode):
        return _target_of(kernel, original.fd) == _target_of(kernel, other)
    return True


def open_like(kernel: Kernel, original: CopySource, dir_fd: int, name: bytes) -> Fd | None:
    """What has a name, open as the original is, if it looks like a copy of that; None if it doesn't.

    Raises  FileNotFoundError, OSError
    """
    with kernel.open_beneath(dir_fd, name, _LOOKED_AT) as fd:
        if _likeness(kernel.fstat(fd)) != _likeness(original.seen):
            return None
        return kernel.reopen(fd, _READ) if original.is_regular() else Fd(os.dup(fd))


def _has_attributes(kernel: Kernel, original: CopySource, other: Fd) -> bool:
    is_alike = _likeness(kernel.fstat(other)) == _likeness(original.seen)
    return is_alike and _has_xattrs(kernel, original.fd, other)


def _likeness(st: os.stat_result) -> tuple[int, ...]:
    size = st.st_size if stat.S_ISREG(st.st_mode) else 0
    return st.st_mode, st.st_uid, st.st_gid, st.st_rdev, size, st.st_mtime_ns


def _make_file(kernel: Kernel, dir_fd: int, private: PrivateDirectory) -> UnnamedCopy:
    made = _make_unnamed(kernel, dir_fd)
    if made is None:
        place, name = private.open(), nameless()
        made = UnnamedCopy(kernel.create(place, name), place, name)
    _leave_atime(made.fd)
    return made


def _make_unnamed(kernel: Kernel, dir_fd: int) -> UnnamedCopy | None:
    """One that never had a name; None where that is not known to last, and the original would be removed."""
    if not kernel.answers_at_once(dir_fd):
        return None
    try:
        return UnnamedCopy(kernel.create_unnamed(dir_fd))
    except OSError as error:
        if error.errno not in NO_TMPFILE | {errno.ENOENT}:
            raise
        return None


def _leave_atime(fd: Fd) -> None:
    """Have reading change nothing, where that is allowed: to the file's owner, and to root."""
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NOATIME)


def _make_special(kernel: Kernel, original: CopySource, private: PrivateDirectory) -> UnnamedCopy:
    place, name = private.open(), nameless()
    mode = original.seen.st_mode
    if stat.S_ISLNK(mode):
        target = _target_of(kernel, original.fd)
        kernel.reach("symlink")
        os.symlink(target, name, dir_fd=place)
    else:
        kernel.reach("mknod")
        os.mknod(name, stat.S_IFMT(mode) | 0o600, original.seen.st_rdev, dir_fd=place)
    try:
        return UnnamedCopy(kernel.open_beneath(place, name, _LOOKED_AT), place, name)
    except BaseException:
        with suppress(OSError):
            kernel.unlink(place, name)
        raise


def _target_of(kernel: Kernel, link: Fd) -> bytes:
    kernel.reach("readlink")
    return os.readlink(b"", dir_fd=link)


def _give_attributes(kernel: Kernel, original: CopySource, copy: Fd) -> None:
    """Owner, mode, ACLs, xattrs and times of the original, in an order in which none undoes another.

    By magic link, since an O_PATH fd has no other way to most of them.
    Raises  OSError for the first that can't be had
    """
    seen, magic = original.seen, b"/proc/self/fd/%d" % copy
    kernel.reach("chown")
    os.chown(magic, seen.st_uid, seen.st_gid)
    here, wanted = _all_xattrs(kernel, copy), _all_xattrs(kernel, original.fd)
    if _ACL in here and _ACL not in wanted:
        kernel.reach("removexattr")  # inherited from the directory
        os.removexattr(magic, _ACL)
    for name, value in wanted.items():
        if here.get(name) != value:
            _set_xattr(kernel, magic, name, value)
    if not stat.S_ISLNK(seen.st_mode):
        kernel.chmod(copy, seen.st_mode)
    kernel.reach("utimens")
    set_times(copy, seen.st_atime_ns, seen.st_mtime_ns)


def _set_xattr(kernel: Kernel, magic: bytes, name: str, value: bytes) -> None:
    try:
        kernel.reach("setxattr")
        os.setxattr(magic, name, value)
    except OSError:
        if not name.startswith(_ABOUT_THE_PLACE):
            raise


def _has_xattrs(kernel: Kernel, fd: Fd, copy: Fd) -> bool:
    """Whether a copy has all that it must have, and nothing else but what the system itself labels files with."""
    wanted, found = (
        {name: value for name, value in _all_xattrs(kernel, one).items() if not name.startswith(_ABOUT_THE_PLACE)}
        for one in (fd, copy)
    )
    extra = found.keys() - wanted.keys()
    return wanted.items() <= found.items() and all(name.startswith(_LABEL_PREFIX) for name in extra)


def _all_xattrs(kernel: Kernel, fd: Fd) -> dict[str, bytes]:
    found = kernel.xattrs(fd.path())
    return {name: value for name, value in found.items() if not name.startswith(_ACL_AGAIN_PREFIX)}


def _failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))
