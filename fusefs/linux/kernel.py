"""The store's system calls, each made by one method and announced to a callback first.

That callback, `hook`, is why this is a class. A test counts the calls, makes the n-th fail with an errno, or exits at
it, and so reaches every crash window of every command (tests/crash). In production, the hook does nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress

from fusefs.core.identity import MARK, Identity
from fusefs.core.names import is_hex
from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

CallHook = Callable[[str], None]
RefusedNames = list[tuple[str, int]]
"""Names, each with the errno of its refusal."""

EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, FUSE_MAGIC = 0xEF53, 0x58465342, 0x9123683E, syscalls.FUSE_MAGIC
OVERLAY_MAGIC, TMPFS_MAGIC = 0x794C7630, 0x01021994
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""If there is an access ACL, the group bits are its mask, which limits the rights of all users named in it."""
_LOCAL = frozenset({EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, TMPFS_MAGIC, 0xF2F52010, 0x2FC12FC1, OVERLAY_MAGIC})
"""ext4, xfs, btrfs, tmpfs, f2fs, ZFS, overlayfs."""
NO_NOREPLACE = (errno.EINVAL, errno.ENOSYS)
"""Errors from renameat2 if the filesystem or the kernel doesn't support the flag."""
RESTORED_XATTRS = ("trusted.trashd.restored", "user.trashd.restored")
"""The marks on restored files: see linux/xattrs.py."""
IDENTITY_XATTR = "user.trashd.fresh"
"""A mark on a directory, for filesystems where nothing else shows whether it is still the same directory."""
_N_MARK_DIGITS = 32
_NAMES_BYTES = 32768
_FEW_BYTES = 4096
_OPEN_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _no_hook(_call: str) -> None:
    """Do nothing."""


def is_local_kind(magic: int) -> bool:
    """Return whether a filesystem with this magic number is mounted by only one kernel at a time."""
    return magic in _LOCAL


def needs_no_server(magic: int) -> bool:
    """Return whether a stat on such a filesystem never needs a server; it may on overlayfs, depending on the layers."""
    return magic in _LOCAL - {OVERLAY_MAGIC}


def _read_mark(fd: int) -> str:
    """Return a directory's mark in the form of a handle; "" if it has none that could be ours."""
    try:
        digits = os.getxattr(b"/proc/self/fd/%d" % fd, IDENTITY_XATTR).decode("ascii", "replace")
    except OSError:
        return ""
    return MARK + digits if len(digits) == _N_MARK_DIGITS and is_hex(digits) else ""


class Kernel:
    """A process's access to the kernel. All methods raise only OSError."""

    def __init__(self, hook: CallHook = _no_hook) -> None:
        """hook: called with the name of each call before it is made; it may raise OSError, or never return"""
        self._hook = hook
        self.silent_mounts: set[Hashable] = set()
        """IDs of mounts that did not respond and are not accessed again."""
        self.cached_stores: object = None
        """The last result of store.find_stores, which reuses it for a short time."""

    @property
    def is_watched(self) -> bool:
        """Whether each call must be announced."""
        return self._hook is not _no_hook

    def announce(self, call: str) -> None:
        """Announce to the hook a call that another module makes."""
        self._hook(call)

    # Opening: the volume's root by its path, everything below it through fds.

    def open_path(self, path: bytes, flags: int = os.O_PATH | os.O_DIRECTORY) -> Fd:
        """Open a path that a user gave; links are followed."""
        self._hook("open")
        return Fd(os.open(path, flags | os.O_CLOEXEC))

    def open_long(self, path: bytes) -> Fd:
        """Open a directory (O_PATH) by a path of any length; links are followed if the path fits into PATH_MAX.

        A longer path is opened name by name, across mounts but not through links.
        """
        if len(path) <= syscalls.WALK_MAX_BYTES:
            return self.open_path(path)
        fd = self.open_path(b"/")
        for name in os.path.abspath(path)[1:].split(b"/"):
            with fd:
                fd = Fd(os.open(name, _OPEN_STEP, dir_fd=fd))
        return fd

    def open_plain(self, path: bytes) -> Fd:
        """Open a directory (O_PATH) by a path that a user gave; ELOOP if the path contains a link."""
        self._hook("openat2")
        return Fd(syscalls.openat2(syscalls.AT_FDCWD, path, os.O_PATH | os.O_DIRECTORY, syscalls.RESOLVE_NO_SYMLINKS))

    def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
        """Open a relative path of any length; fail if there is a link, a mount or `..` in it.

        Source  openat2(2); paths that are longer than PATH_MAX are opened in parts
        """
        if len(path) > syscalls.WALK_MAX_BYTES:
            return self._open_far(dir_fd, path, flags)
        self._hook("openat2")
        return Fd(syscalls.openat2(dir_fd, path, flags, syscalls.BENEATH))

    def _open_far(self, dir_fd: int, path: bytes, flags: int) -> Fd:
        with ExitStack() as above:
            while len(path) > syscalls.WALK_MAX_BYTES:
                cut = path.rfind(b"/", 0, syscalls.WALK_MAX_BYTES)
                if cut < 0:
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
                middle = self.open_beneath(dir_fd, path[:cut], os.O_PATH | os.O_DIRECTORY)
                above.close()
                dir_fd, path = above.enter_context(middle), path[cut + 1 :]
            return self.open_beneath(dir_fd, path, flags)

    def open_dir(self, dir_fd: int, path: bytes = b".") -> Fd:
        """Open a directory below another for reading: to list it, fsync it or set its attributes."""
        return self.open_beneath(dir_fd, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def reopen(self, fd: int, flags: int) -> Fd:
        """Open exactly the file behind an fd (O_PATH is enough) again, with other flags, through its magic link."""
        self._hook("open")
        return Fd(os.open(f"/proc/self/fd/{int(fd)}", flags | os.O_CLOEXEC))

    def create(self, dir_fd: int, name: bytes, flags: int = os.O_RDWR) -> Fd:
        """Create a file with mode 0600; EEXIST if the name is taken."""
        self._hook("create")
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return Fd(os.open(name, flags, 0o600, dir_fd=dir_fd))

    def create_unnamed(self, dir_fd: int) -> Fd:
        """Create a file without a name, mode 0600. Raises  OSError: one of syscalls.NO_TMPFILE if that is not safe"""
        self._hook("tmpfile")
        return Fd(syscalls.open_unnamed(dir_fd))

    # Reading.

    def stat(self, dir_fd: int, name: bytes) -> os.stat_result:
        """Lstat a name in a directory; EXDEV if something is mounted there.

        This does not use stat(2), which would access that mount: a user's FUSE filesystem that does not respond could
        block us so that not even SIGKILL would help.
        """
        self._hook("stat")
        with Fd(syscalls.openat2(dir_fd, name, os.O_PATH | os.O_NOFOLLOW, syscalls.BENEATH)) as fd:
            return os.fstat(fd)

    def fstat(self, fd: int) -> os.stat_result:
        self._hook("fstat")
        return os.fstat(fd)

    def statx(self, fd: int, *, asks_server: bool = False) -> syscalls.Statx:
        """Read the birth time and mount ID of an fd. asks_server: ask a FUSE daemon or server for the birth time"""
        self._hook("statx")
        return syscalls.statx(fd, asks_server=asks_server)

    def filesystem(self, fd: int) -> int:
        """Return the filesystem's magic number."""
        self._hook("statfs")
        return syscalls.statfs_type(fd)

    def free_bytes(self, fd: int) -> int:
        """Return the free space on the filesystem, including the space reserved for root."""
        self._hook("statfs")
        return (volume := os.fstatvfs(fd)).f_bfree * volume.f_frsize

    def is_read_only(self, fd: int) -> bool:
        """Return whether the filesystem, the mount or the subvolume is read-only."""
        self._hook("statfs")
        return syscalls.is_read_only(fd)

    def is_local(self, fd: int) -> bool:
        """Return whether only one kernel can have this filesystem mounted, so that its locks exclude every process."""
        return is_local_kind(self.filesystem(fd))

    def needs_no_server(self, fd: int) -> bool:
        return needs_no_server(self.filesystem(fd))

    def identify(self, fd: int) -> Identity:
        """Return the identity of the file behind an fd.

        The identity has no handle if the filesystem has none, or none that lasts (FUSE), unless the file is a directory
        that was marked (`mark`).
        """
        self._hook("identify")
        x = syscalls.statx(fd)
        lasts = syscalls.statfs_type(fd) != FUSE_MAGIC
        handle = syscalls.format_handle(syscalls.name_to_handle_at(fd)) if lasts else ""
        if not handle and not x.btime_ns:
            handle = _read_mark(fd)
        # libfuse assigns inode numbers on demand and forgets them: without a birth time, such a number proves nothing.
        return Identity(handle, x.ino if lasts or x.btime_ns else 0, x.btime_ns)

    def mark(self, fd: int) -> None:
        """Mark one of our directories, open for reading, if its filesystem has extended attributes.

        With the mark, `identify` can recognize it even if nothing else identifies it.
        """
        self._hook("setxattr")
        with suppress(OSError):
            os.setxattr(fd, IDENTITY_XATTR, os.urandom(_N_MARK_DIGITS // 2).hex().encode())

    def unmark(self, fd: int) -> None:
        self._hook("removexattr")
        os.removexattr(b"/proc/self/fd/%d" % fd, IDENTITY_XATTR)

    def is_named(self, fd: int, dir_fd: int, name: bytes) -> bool:
        """Return whether a name refers to the file behind an fd; an open file's inode number is not reused."""
        try:
            there = self.stat(dir_fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EXDEV):
                raise
            return False
        return os.path.samestat(self.fstat(fd), there)

    def list_reopened(self, dir_fd: int) -> list[bytes]:
        """List a directory that this fd may have listed before: on sshfs, an fd lists names only once."""
        with self.open_dir(dir_fd) as fd:
            return self.list(fd)

    def list(self, dir_fd: int) -> list[bytes]:
        """Return the names in a directory, sorted; the fd must be open for reading."""
        with self.scan(dir_fd) as entries:
            return sorted(os.fsencode(entry.name) for entry in entries)

    def list_inos(self, dir_fd: int) -> dict[bytes, int]:
        """Return the inode number (d_ino) of each name in a directory's listing."""
        with self.scan(dir_fd) as entries:
            return {os.fsencode(entry.name): entry.inode() for entry in entries}

    def first_names(self, dir_fd: int) -> bytes:
        """Return the raw result of one getdents64(2) on a directory that was just opened: its first names."""
        self._hook("getdents")
        return syscalls.getdents64(dir_fd, _NAMES_BYTES)

    def scan(self, dir_fd: int) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """Iterate over the entries of a directory that may be too large for `list`.

        Callers must not use methods of an entry that need a stat. If `lists_types` is false, these include is_dir().
        """
        self._hook("getdents")
        os.lseek(dir_fd, 0, os.SEEK_SET)  # btrfs lists the state at the last rewind; scandir rewinds only at its end
        return os.scandir(dir_fd)

    def lists_types(self, dir_fd: int) -> bool:
        """Return whether listings contain entries' types (d_type), judging by this directory's first entries."""
        from fusefs.linux.getdents import Dirents  # imported late: swap and rm list nothing, and it takes 0.5 ms

        self._hook("getdents")
        with self.open_dir(dir_fd) as fd:
            return all(kind for *_, kind in Dirents(fd).block(0, _FEW_BYTES))

    def is_empty(self, dir_fd: int) -> bool:
        """Return whether a directory has no entries; reads only the first one."""
        with self.scan(dir_fd) as entries:
            return next(entries, None) is None

    def read(self, fd: int, size: int) -> bytes:
        """Read the first `size` bytes of a file, or as many as there are."""
        self._hook("read")
        return os.pread(fd, size, 0)

    def now_ns(self) -> int:
        return time.time_ns()

    def boot_ns(self) -> int:
        """Return the time since boot, including suspend; this clock can't be set."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    # Changing names.

    def mkdir(self, dir_fd: int, name: bytes, mode: int = 0o700) -> None:
        self._hook("mkdir")
        os.mkdir(name, mode, dir_fd=dir_fd)

    def rmdir(self, dir_fd: int, name: bytes) -> None:
        self._hook("rmdir")
        os.rmdir(name, dir_fd=dir_fd)

    def unlink(self, dir_fd: int, name: bytes) -> None:
        self._hook("unlink")
        os.unlink(name, dir_fd=dir_fd)

    def lookup_names(self, dir_fd: int, names: Iterable[str]) -> None:
        """Make the kernel look up names now, so that later calls find them in its cache."""
        for name in names:
            self._hook("openat2")
            with suppress(OSError):  # a later call will report the error
                os.close(syscalls.openat2(dir_fd, os.fsencode(name), os.O_PATH | os.O_NOFOLLOW, syscalls.BENEATH))

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """rename(2). The new name must be ours and free, or that of one of our files, which is then replaced.

        ESTALE is not handled, since no other node moves the entries that are renamed with this method.
        """
        self._hook("rename")
        os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """Rename to a free name; EEXIST if it is taken.

        If the filesystem has no RENAME_NOREPLACE (EINVAL), we use a stat and a plain rename. In between, another
        process may take the name: then a file could be replaced, but not a tree, because a plain rename does not
        replace a directory that has content. If another node has moved a directory that this node still knows in its
        old place, the directory must be looked up first. The lookup makes Linux move the directory's dentry. That
        needs a lock which a rename already holds: without the lookup, each rename would fail with ESTALE
        (d_splice_alias in fs/dcache.c).
        """
        try:
            self._rename_free(old_dir, old, new_dir, new)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.lookup_names(old_dir, [os.fsdecode(old)])
            self._rename_free(old_dir, old, new_dir, new)

    def _rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        self._hook("renameat2")
        try:
            syscalls.renameat2(old_dir, old, new_dir, new, syscalls.RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in NO_NOREPLACE:
                raise
            self._rename_after_stat(old_dir, old, new_dir, new)

    def _rename_after_stat(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        try:
            self.stat(new_dir, new)
        except FileNotFoundError:
            self.rename(old_dir, old, new_dir, new)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)

    def exchange(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """renameat2(RENAME_EXCHANGE).

        `old` should be the empty directory of the two. If a filesystem ignores the flag (s3fs-fuse, cryfs and old
        ceph-fuse do), its plain rename then fails with ENOTEMPTY instead of destroying data.
        The caller must handle ESTALE and EIO: the exchange may have happened, and a second one would undo it.
        """
        self._hook("exchange")
        syscalls.renameat2(old_dir, old, new_dir, new, syscalls.RENAME_EXCHANGE)

    def link_unnamed(self, fd: int, dir_fd: int, name: bytes) -> None:
        """Give a file made by `create_unnamed` its first name."""
        self._hook("link")
        os.link(f"/proc/self/fd/{int(fd)}", name, dst_dir_fd=dir_fd, follow_symlinks=True)

    def link(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """Add a hard link to anything but a directory; for a symbolic link, to the link itself."""
        self._hook("link")
        os.link(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir, follow_symlinks=False)

    # Changing contents and attributes.

    def lock(self, fd: int) -> bool:
        """Take an exclusive flock if it is free. Returns  whether we have it now

        Raises  OSError ENOLCK if the filesystem has no locks, whatever errno it returns
        """
        try:
            self._hook("flock")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from error
            raise
        return True

    def write(self, fd: int, content: bytes) -> None:
        """Replace the whole content of a file."""
        self._hook("write")
        n_written = 0
        while n_written < len(content):
            n_written += os.pwrite(fd, content[n_written:], n_written)
        os.ftruncate(fd, len(content))

    def reserve_blocks(self, fd: int, size: int) -> None:
        """Allocate blocks for the first `size` bytes without changing the file's length; EOPNOTSUPP if unsupported."""
        self._hook("fallocate")
        syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, 0, size)

    def fsync(self, fd: int) -> None:
        """fsync of a file or of a directory opened for reading."""
        self._hook("fsync")
        os.fsync(fd)

    def syncfs(self, fd: int) -> None:
        """Make everything on a filesystem durable; needed if a directory can't be opened for reading."""
        self._hook("syncfs")
        syscalls.syncfs(fd)

    def chmod(self, fd: int, mode: int) -> None:
        """Set the mode of a file through its magic link, since fchmod does not work with O_PATH fds."""
        self._hook("chmod")
        os.chmod(f"/proc/self/fd/{int(fd)}", stat.S_IMODE(mode))

    def invalidate_attributes(self, mounted_fd: int) -> None:
        """Make the kernel request a directory's attributes from the FUSE daemon, even if they are cached.

        A chown that changes nothing is a SETATTR without fields, which every user may send. On a file, it would clear
        the set-id bits.
        Source  fs/open.c, chown_common; fs/fuse/dir.c, fuse_do_setattr
        """
        self._hook("refresh")
        os.chown(f"/proc/self/fd/{int(mounted_fd)}", -1, -1)

    def chown(self, fd: int, uid: int, gid: int) -> None:
        """fchown; -1 leaves an id as it is."""
        self._hook("chown")
        os.chown(fd, uid, gid)

    def xattr_names(self, of: int | bytes) -> Iterable[str]:
        """Return the names of all extended attributes; [] if the filesystem has none. of: an fd or a magic link"""
        self._hook("listxattr")
        try:
            return os.listxattr(of)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return []
            raise

    def read_xattr(self, of: int | bytes, name: str) -> bytes:
        """getxattr of an fd or a magic link. Raises  OSError ENODATA if the attribute does not exist"""
        self._hook("getxattr")
        return os.getxattr(of, name)

    def get_xattr(self, fd: int, name: str) -> bytes | None:
        """fgetxattr; None if the attribute does not exist or can't be read, or the filesystem has no attributes."""
        self._hook("getxattr")
        try:
            return os.getxattr(fd, name)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES):
                return None
            raise

    def set_xattr(self, fd: int | bytes, name: str, value: bytes) -> None:
        """fsetxattr, or setxattr for a path in /proc/self/fd."""
        self._hook("setxattr")
        os.setxattr(fd, name, value)

    def remove_xattr(self, fd: int, name: str) -> None:
        self._hook("removexattr")
        os.removexattr(fd, name)

    def lease(self, fd: int) -> None:
        """Take a write lease, which ends with the fd; EAGAIN if the file is open elsewhere.

        Processes that open the file then wait for us. The kernel notifies us with a signal that has no effect.
        Source  fcntl(2), F_SETLEASE, F_SETSIG
        """
        from signal import SIGURG  # imported late: a swap takes no lease, and it takes 0.5 ms

        self._hook("lease")
        fcntl.fcntl(fd, syscalls.F_SETSIG, SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def has_lease(self, fd: int) -> bool:
        """Return whether our write lease is intact, that is, whether no process waits to open the file."""
        self._hook("lease")
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK

    def truncate(self, fd: int, size: int) -> None:
        self._hook("truncate")
        os.ftruncate(fd, size)

    def next_data(self, fd: int, at: int, end: int) -> int:
        """Return the offset of a file's next data at or after `at`, or `end` if there is none. Source  lseek(2)"""
        self._hook("lseek")
        try:
            return os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return end

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        self._hook("ioctl")
        syscalls.ioctl(fd, request, buffer)
