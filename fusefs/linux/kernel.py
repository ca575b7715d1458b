"""The system calls that the store makes, each by one method and announced to one callback before it is made.

That callback, `hook`, is why this is a class: a test counts the calls, fails the n-th with an errno, or dies at it and
reaches every window of every verb (tests/crash). In production the hook does nothing.
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
"""Names, and why not."""

EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, FUSE_MAGIC = 0xEF53, 0x58465342, 0x9123683E, syscalls.FUSE_MAGIC
OVERLAY_MAGIC, TMPFS_MAGIC = 0x794C7630, 0x01021994
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""With an access ACL the group's bits are its mask, so that these are all that those named in it may have."""
_LOCAL = frozenset({EXT_MAGIC, XFS_MAGIC, BTRFS_MAGIC, TMPFS_MAGIC, 0xF2F52010, 0x2FC12FC1, OVERLAY_MAGIC})
"""ext4, xfs, btrfs, tmpfs, f2fs, ZFS, overlayfs"""
NO_NOREPLACE = (errno.EINVAL, errno.ENOSYS)
"""What renameat2 says where a filesystem, or a kernel, has no such flag."""
RESTORED_XATTRS = ("trusted.trashd.restored", "user.trashd.restored")
"""See restored_mark.py."""
IDENTITY_XATTR = "user.trashd.fresh"
"""A mark on a directory, for filesystems where nothing else tells whether it is the one that was there before."""
_N_MARK_DIGITS = 32
_NAMES_BYTES = 32768
_FEW_BYTES = 4096
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _no_hook(_call: str) -> None:
    """Let every call pass."""


def is_local_kind(magic: int) -> bool:
    """Whether filesystems of a kind, by its magic number, are mounted by one kernel at a time."""
    return magic in _LOCAL


def is_at_once(magic: int) -> bool:
    """Whether such a filesystem needs no server to tell what an inode is; what lies below an overlayfs may need one."""
    return magic in _LOCAL - {OVERLAY_MAGIC}


def _read_mark(fd: int) -> str:
    """The mark of what an fd of any kind holds, as a handle; empty if there is none, or none that could be ours."""
    try:
        digits = os.getxattr(b"/proc/self/fd/%d" % fd, IDENTITY_XATTR).decode("ascii", "replace")
    except OSError:
        return ""
    return MARK + digits if len(digits) == _N_MARK_DIGITS and is_hex(digits) else ""


class Kernel:
    """One process's way to the kernel. All methods raise OSError only."""

    def __init__(self, hook: CallHook = _no_hook) -> None:
        """hook: called with each call's name before it is made; it may raise OSError, or never return"""
        self._hook = hook
        self.silent: set[Hashable] = set()
        """The mounts that have not answered (by their id): they are asked nothing again."""
        self.discovered: object = None
        """What store.find_stores found last: it believes that for a moment."""

    @property
    def is_watched(self) -> bool:
        """Whether each call is to be announced."""
        return self._hook is not _no_hook

    def reach(self, call: str) -> None:
        """Announce a call that another module here makes to the hook."""
        self._hook(call)

    # Opening: the volume's root by path, everything below it by fd.

    def open_path(self, path: bytes, flags: int = os.O_PATH | os.O_DIRECTORY) -> Fd:
        """An fd for a path that a person named, links followed as they expect."""
        self._hook("open")
        return Fd(os.open(path, flags | os.O_CLOEXEC))

    def open_long(self, path: bytes) -> Fd:
        """A directory (O_PATH) by a path of any length; links followed where it fits into PATH_MAX.

        A longer one is spelled out: name by name, across mounts but through no link.
        """
        if len(path) <= syscalls.WALK_MAX_BYTES:
            return self.open_path(path)
        fd = self.open_path(b"/")
        for name in os.path.normpath(os.path.join(os.getcwdb(), path))[1:].split(b"/"):
            with fd:
                fd = Fd(os.open(name, _STEP, dir_fd=fd))
        return fd

    def open_plain(self, path: bytes) -> Fd:
        """A directory (O_PATH) by a path that a person named and that leads through no link: else ELOOP."""
        self._hook("openat2")
        return Fd(syscalls.openat2(syscalls.AT_FDCWD, path, os.O_PATH | os.O_DIRECTORY, syscalls.RESOLVE_NO_SYMLINKS))

    def open_beneath(self, dir_fd: int, path: bytes, flags: int = os.O_PATH | os.O_NOFOLLOW) -> Fd:
        """An fd for a relative path of any length: no link, no mount, no `..` on the way.

        Source  openat2(2); paths over PATH_MAX go in chunks
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
        """A directory beneath, opened for reading: to list it, fsync it or set its attributes."""
        return self.open_beneath(dir_fd, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def reopen(self, fd: int, flags: int) -> Fd:
        """One more fd, with other flags, for exactly what an fd of any kind holds (by its magic link)."""
        self._hook("open")
        return Fd(os.open(f"/proc/self/fd/{int(fd)}", flags | os.O_CLOEXEC))

    def create(self, dir_fd: int, name: bytes, flags: int = os.O_RDWR) -> Fd:
        """A new file, 0600; EEXIST if anything has the name."""
        self._hook("create")
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return Fd(os.open(name, flags, 0o600, dir_fd=dir_fd))

    def create_unnamed(self, dir_fd: int) -> Fd:
        """A new file without a name, 0600; an errno of syscalls.NO_TMPFILE where that can't be, or may be lost."""
        self._hook("tmpfile")
        return Fd(syscalls.open_unnamed(dir_fd))

    # Looking.

    def stat(self, dir_fd: int, name: bytes) -> os.stat_result:
        """lstat of a name in a directory; EXDEV if something is mounted there.

        Not by stat(2), which would ask that mount: a user's FUSE filesystem that never answers blocks the caller,
        beyond SIGKILL.
        """
        self._hook("stat")
        with Fd(syscalls.openat2(dir_fd, name, os.O_PATH | os.O_NOFOLLOW, syscalls.BENEATH)) as fd:
            return os.fstat(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """fstat."""
        self._hook("fstat")
        return os.fstat(fd)

    def statx(self, fd: int, *, asks: bool = False) -> syscalls.Statx:
        """Birth time and mount id of what an fd holds. asks: the FUSE daemon or server too, for the birth"""
        self._hook("statx")
        return syscalls.statx(fd, asks=asks)

    def filesystem(self, fd: int) -> int:
        """The filesystem's magic number."""
        self._hook("statfs")
        return syscalls.statfs_type(fd)

    def free_bytes(self, fd: int) -> int:
        """Free space on the filesystem, root's share included."""
        self._hook("statfs")
        return (volume := os.fstatvfs(fd)).f_bfree * volume.f_frsize

    def is_read_only(self, fd: int) -> bool:
        """Whether nothing can be written there, be it the filesystem, the mount or the subvolume that forbids it."""
        self._hook("statfs")
        return syscalls.is_read_only(fd)

    def is_local(self, fd: int) -> bool:
        """Whether only one kernel can have this filesystem mounted, so that its locks exclude every process."""
        return is_local_kind(self.filesystem(fd))

    def answers_at_once(self, fd: int) -> bool:
        """See is_at_once."""
        return is_at_once(self.filesystem(fd))

    def identify(self, fd: int) -> Identity:
        """The identity of what an fd holds; without a handle where handles don't last (FUSE) or aren't given,
        but for one that was marked (`mark`).
        """
        self._hook("identify")
        x = syscalls.statx(fd)
        lasts = syscalls.statfs_type(fd) != FUSE_MAGIC
        handle = syscalls.format_handle(syscalls.handle_of(fd)) if lasts else ""
        if not handle and not x.btime_ns:
            handle = _read_mark(fd)
        # libfuse numbers inodes as it goes and forgets: without a birth time beside it such a number proves nothing.
        return Identity(handle, x.ino if lasts or x.btime_ns else 0, x.btime_ns)

    def mark(self, fd: int) -> None:
        """Mark a directory of ours, which is open for reading, if its filesystem has attributes for that.

        So `identify` knows it again where nothing else tells.
        """
        self._hook("setxattr")
        with suppress(OSError):
            os.setxattr(fd, IDENTITY_XATTR, os.urandom(_N_MARK_DIGITS // 2).hex().encode())

    def unmark(self, fd: int) -> None:
        """Take the mark off. Raises  OSError"""
        self._hook("removexattr")
        os.removexattr(b"/proc/self/fd/%d" % fd, IDENTITY_XATTR)

    def is_named(self, fd: int, dir_fd: int, name: bytes) -> bool:
        """Whether a name means what an fd holds: certain, since a number is not reused while an fd has it."""
        try:
            there = self.stat(dir_fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EXDEV):
                raise
            return False
        return os.path.samestat(self.fstat(fd), there)

    def list_anew(self, dir_fd: int) -> list[bytes]:
        """Like `list`, of a directory that may have been listed by this fd before: sshfs tells its names only once."""
        with self.open_dir(dir_fd) as fd:
            return self.list(fd)

    def list(self, dir_fd: int) -> list[bytes]:
        """The names in a directory, sorted; the fd must be open for reading."""
        with self.scan(dir_fd) as entries:
            return sorted(os.fsencode(entry.name) for entry in entries)

    def list_inos(self, dir_fd: int) -> dict[bytes, int]:
        """The inode numbers that a directory's listing tells (d_ino), by name."""
        with self.scan(dir_fd) as entries:
            return {os.fsencode(entry.name): entry.inode() for entry in entries}

    def first_names(self, dir_fd: int) -> bytes:
        """What one getdents64(2) tells of a directory that was opened just now: its names, each ended by a NUL."""
        self._hook("getdents")
        return syscalls.getdents64(dir_fd, _NAMES_BYTES)

    def scan(self, dir_fd: int) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """A directory's entries one by one, for a directory that is too large for `list`.

        Don't ask an entry for what needs a stat, not even for its type where `tells_types` says no.
        """
        self._hook("getdents")
        os.lseek(dir_fd, 0, os.SEEK_SET)  # btrfs lists what was there at the last rewind, and scandir rewinds after
        return os.scandir(dir_fd)

    def tells_types(self, dir_fd: int) -> bool:
        """Whether a listing tells the type of each entry (d_type), judged by this directory's first ones."""
        from fusefs.linux.getdents import Dirents  # late: a swap and an rm list nothing, and it takes 0.5 ms

        self._hook("getdents")
        with self.open_dir(dir_fd) as fd:
            return all(kind for *_, kind in Dirents(fd).block(0, _FEW_BYTES))

    def is_empty(self, dir_fd: int) -> bool:
        """Whether a directory has no entries; reads no more than the first."""
        with self.scan(dir_fd) as entries:
            return next(entries, None) is None

    def read(self, fd: int, size: int) -> bytes:
        """The first `size` bytes of a file, or as many as there are."""
        self._hook("read")
        return os.pread(fd, size, 0)

    def now_ns(self) -> int:
        """Wall time."""
        return time.time_ns()

    def boot_ns(self) -> int:
        """Time since the boot, suspended or not; it is never set."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    # Changing names.

    def mkdir(self, dir_fd: int, name: bytes, mode: int = 0o700) -> None:
        """mkdirat."""
        self._hook("mkdir")
        os.mkdir(name, mode, dir_fd=dir_fd)

    def rmdir(self, dir_fd: int, name: bytes) -> None:
        """Remove an empty directory; refuses where our reasoning was wrong."""
        self._hook("rmdir")
        os.rmdir(name, dir_fd=dir_fd)

    def unlink(self, dir_fd: int, name: bytes) -> None:
        """unlinkat."""
        self._hook("unlink")
        os.unlink(name, dir_fd=dir_fd)

    def look_up_all(self, dir_fd: int, names: Iterable[str]) -> None:
        """Let the kernel know names, so that what is done by them next need not find them first."""
        for name in names:
            self._hook("openat2")
            with suppress(OSError):  # what is done next will say what is wrong
                os.close(syscalls.openat2(dir_fd, os.fsencode(name), os.O_PATH | os.O_NOFOLLOW, syscalls.BENEATH))

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """rename(2): only where the new name is ours and free, or a file of ours that it may replace.

        ESTALE and EIO are the caller's, as they are: what is renamed so no other node moves.
        """
        self._hook("rename")
        os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """Rename onto a free name, EEXIST otherwise.

        Where the filesystem has no RENAME_NOREPLACE (EINVAL) a look comes before a plain rename: the window
        between the two is a file's risk, not a tree's, since a plain rename replaces no directory with content.
        A directory that another node moved, and this one knows by its old place, has to be looked at first: Linux
        moves its own idea of it then, under the lock that a rename holds already, which says ESTALE instead, each time
        (d_splice_alias in fs/dcache.c).
        """
        try:
            self._rename_free(old_dir, old, new_dir, new)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.look_up_all(old_dir, [os.fsdecode(old)])
            self._rename_free(old_dir, old, new_dir, new)

    def _rename_free(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        self._hook("renameat2")
        try:
            syscalls.renameat2(old_dir, old, new_dir, new, syscalls.RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in NO_NOREPLACE:
                raise
            self._rename_looking(old_dir, old, new_dir, new)

    def _rename_looking(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
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

        `old` should be the empty one of the two: on a filesystem that ignores the flag a plain rename then
        meets ENOTEMPTY instead of destroying (s3fs-fuse, cryfs and old ceph-fuse do one, and say 0).
        ESTALE and EIO are the caller's, as they are: it may have happened, and a second one would take it back.
        """
        self._hook("exchange")
        syscalls.renameat2(old_dir, old, new_dir, new, syscalls.RENAME_EXCHANGE)

    def link_unnamed(self, fd: int, dir_fd: int, name: bytes) -> None:
        """Give a file made by `create_unnamed` its first name."""
        self._hook("link")
        os.link(f"/proc/self/fd/{int(fd)}", name, dst_dir_fd=dir_fd, follow_symlinks=True)

    def link(self, old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
        """One more name for anything but a directory; of a symbolic link for itself, not for what it leads to."""
        self._hook("link")
        os.link(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir, follow_symlinks=False)

    # Changing contents and attributes.

    def lock(self, fd: int) -> bool:
        """Take an exclusive flock if it is free; whether we have it now.

        Raises  OSError ENOLCK where there are no locks, whatever the filesystem calls that
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
        """Make the content the whole of a file."""
        self._hook("write")
        done = 0
        while done < len(content):
            done += os.pwrite(fd, content[done:], done)
        os.ftruncate(fd, len(content))

    def reserve_blocks(self, fd: int, size: int) -> None:
        """Blocks for the first `size` bytes, of whatever length the file is; EOPNOTSUPP where the filesystem can't."""
        self._hook("fallocate")
        syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, 0, size)

    def fsync(self, fd: int) -> None:
        """fsync of a file or of a directory opened for reading."""
        self._hook("fsync")
        os.fsync(fd)

    def syncfs(self, fd: int) -> None:
        """Everything on that filesystem becomes durable: for a directory that may not be opened for reading."""
        self._hook("syncfs")
        syscalls.syncfs(fd)

    def chmod(self, fd: int, mode: int) -> None:
        """Set permission bits of what an fd of any kind holds (by its magic link: O_PATH has no fchmod)."""
        self._hook("chmod")
        os.chmod(f"/proc/self/fd/{int(fd)}", stat.S_IMODE(mode))

    def refresh(self, mounted_fd: int) -> None:
        """Have a FUSE daemon asked for the attributes of a directory, however long they may be remembered.

        A chown that changes nothing is a SETATTR without fields, which every user may do. A file would lose its
        set-id bits by it.
        Source  fs/open.c, chown_common; fs/fuse/dir.c, fuse_do_setattr
        """
        self._hook("refresh")
        os.chown(f"/proc/self/fd/{int(mounted_fd)}", -1, -1)

    def chown(self, fd: int, uid: int, gid: int) -> None:
        """fchown; -1 leaves one as it is."""
        self._hook("chown")
        os.chown(fd, uid, gid)

    def xattr_names(self, of: int | bytes) -> Iterable[str]:
        """The names of all extended attributes; empty where the filesystem has none. of: an fd, or a magic link"""
        self._hook("listxattr")
        try:
            return os.listxattr(of)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return []
            raise

    def read_xattr(self, of: int | bytes, name: str) -> bytes:
        """getxattr of an fd, or a magic link. Raises  OSError ENODATA if it is not there"""
        self._hook("getxattr")
        return os.getxattr(of, name)

    def get_xattr(self, fd: int, name: str) -> bytes | None:
        """fgetxattr; None if it is not there, or the filesystem has none."""
        self._hook("getxattr")
        try:
            return os.getxattr(fd, name)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES):
                return None
            raise

    def set_xattr(self, fd: int | bytes, name: str, value: bytes) -> None:
        """fsetxattr; setxattr of a path in /proc/self/fd."""
        self._hook("setxattr")
        os.setxattr(fd, name, value)

    def remove_xattr(self, fd: int, name: str) -> None:
        """fremovexattr."""
        self._hook("removexattr")
        os.removexattr(fd, name)

    def lease(self, fd: int) -> None:
        """A write lease: EAGAIN if the file is open elsewhere; it ends with the fd.

        An open of the file then waits for us; the signal that tells us so is one that does nothing.
        Source  fcntl(2), F_SETLEASE, F_SETSIG
        """
        from signal import SIGURG  # late: a swap takes no lease, and it takes 0.5 ms

        self._hook("lease")
        fcntl.fcntl(fd, syscalls.F_SETSIG, SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def has_lease(self, fd: int) -> bool:
        """Whether our write lease is whole: no open waits for its end."""
        self._hook("lease")
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK

    def truncate(self, fd: int, size: int) -> None:
        """ftruncate."""
        self._hook("truncate")
        os.ftruncate(fd, size)

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        """ioctl."""
        self._hook("ioctl")
        syscalls.ioctl(fd, request, buffer)
