"""Runtime and state directories, atomic replacement of files, and private directories for unfinished files."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from typing import Self

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import OTHERS_WRITE, Kernel

NEW = b".new"
"""The suffix of an unfinished file's name."""


def read_file(path: bytes, most_bytes: int, *, dir_fd: int | None = None, owner: int | None = None) -> bytes:
    """Read a small file as a whole.

    dir_fd  the directory that the path is relative to
    owner   UID of the only user who may have written the file; None: any user
    Raises  FileNotFoundError; OSError EPERM: not a regular file, or others can write to it; EFBIG; ELOOP: a link
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # so as not to wait for a FIFO's writer
    with Fd(os.open(path, flags, dir_fd=dir_fd)) as fd:
        st = os.fstat(fd)
        if owner is not None:
            require_owner(st, owner)
        if not stat.S_ISREG(st.st_mode) or (owner is not None and st.st_nlink != 1):
            raise OSError(errno.EPERM, "it is not a regular file with a single hard link")
        if st.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes // 1024} KiB")
        return os.pread(fd, most_bytes, 0)


def require_owner(st: os.stat_result, owner: int) -> None:
    """Raise OSError EPERM unless the file belongs to this user and no other user can write to it."""
    if st.st_uid != owner or st.st_mode & OTHERS_WRITE:
        raise OSError(errno.EPERM, f"it belongs to uid {st.st_uid}, or other users can write to it")


def replace_file(
    path: bytes,
    text: bytes,
    mode: int,
    *,
    ignores_umask: bool = False,
    is_durable: bool = False,
    owner: int | None = None,
    dir_fd: int | None = None,
) -> None:
    """Create or replace a file atomically.

    ignores_umask   set `mode` exactly, even if our umask is stricter
    is_durable      flush the file before it gets its name, so that a power failure leaves no empty file
    owner           UID of the file's owner, which root can set
    dir_fd          the directory that the path is relative to
    Raises          OSError; an unfinished file may remain, which the next call replaces
    """
    with suppress(FileNotFoundError):
        os.unlink(path + NEW, dir_fd=dir_fd)
    # The file must be new: an existing one may be another user's FIFO, which nobody ever opens for reading.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path + NEW, flags, mode, dir_fd=dir_fd)
    with open(fd, "wb") as file:
        if owner is not None:
            os.fchown(fd, owner, -1)
        if ignores_umask:
            os.fchmod(fd, mode)
        file.write(text)
        if is_durable:
            file.flush()
            os.fsync(fd)
    os.rename(path + NEW, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


_ATTEMPTS = 8


def temporary_name() -> bytes:
    """Return a random name for a file or directory that gets its real name later."""
    return os.urandom(8).hex().encode()


def is_temporary_name(name: bytes) -> bool:
    """Return whether `temporary_name` could have returned this name."""
    return len(name) == 16 and not name.strip(b"0123456789abcdef")


class PrivateDirectory:
    """A directory that only we (and root) can enter; it is created when first needed and removed at the end.

    If the process is killed, the directory remains, empty or with incomplete content.
    """

    def __init__(self, kernel: Kernel, parent: Fd, prefix: bytes) -> None:
        """parent: where the directory is created, and where its content is moved to. prefix: how its name begins"""
        self._kernel = kernel
        self._parent = parent
        self._prefix = prefix
        self._made: tuple[Name, Fd] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the directory if it is empty."""
        if self._made is not None:
            name, fd = self._made
            fd.close()
            self._remove(name)

    def open(self) -> Fd:
        """Return the directory's fd; create the directory at the first call. Raises  OSError: EPERM: it was replaced"""
        for _attempt in range(_ATTEMPTS):
            if self._made is None:
                self._made = self._make()
        if self._made is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._made[1]

    def _make(self) -> tuple[Name, Fd] | None:
        """Create and lock the directory; None if another process thought it abandoned and removed it first."""
        name = Name(self._prefix + temporary_name())
        self._kernel.mkdir(self._parent, name)
        with ExitStack() as owned:
            owned.callback(self._remove, name)
            try:
                fd = owned.enter_context(self._kernel.open_dir(self._parent, name))
            except FileNotFoundError:
                return None
            st = self._kernel.fstat(fd)
            if st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) & 0o077:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            with suppress(OSError):  # a network filesystem might not support locks on directories
                if not self._kernel.lock(fd) or not self._kernel.is_named(fd, self._parent, name):
                    return None
            owned.pop_all()
        return name, fd

    def _remove(self, name: Name) -> None:
        with suppress(OSError):  # e.g. the parent directory's owner has moved it
            self._kernel.rmdir(self._parent, name)


MOUNTS_RUNTIME = b"/run/trashd"
"""The parent of the directories of root's mounts and root's service."""
SYSTEM_RUNTIME = MOUNTS_RUNTIME + b"/reaper"
_SYSTEM_STATE = b"/var/lib/trashd"
_STATE_HOME, _NAME = b".local/state", b"trashd"
STATE_BELOW_HOME = _STATE_HOME + b"/" + _NAME
"""A user's state directory below the home directory if XDG_STATE_HOME is not set."""


def runtime_dir() -> bytes:
    """Return the directory for the status and the lock of this user's service; a reboot removes the directory.

    If systemd passed one, it is returned. Without XDG_RUNTIME_DIR (cron, su), the directory is where a login would
    have created it, or else below the user's state directory.
    """
    from_systemd = _systemd_directory(b"RUNTIME_DIRECTORY")
    if from_systemd is not None:
        return from_systemd
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME
    given = os.environb.get(b"XDG_RUNTIME_DIR", b"")
    usual = b"/run/user/%d" % os.geteuid()
    if given.startswith(b"/"):
        return given + b"/trashd"
    return usual + b"/trashd" if os.path.isdir(usual) else state_dir() + b"/run"


def state_dir() -> bytes:
    """Return the directory for the persistent data of this user's service; if systemd passed one, that is used.

    Raises  FileNotFoundError for a user without a home directory
    """
    from_systemd = _systemd_directory(b"STATE_DIRECTORY")
    return persistent_dir() if from_systemd is None else from_systemd


def persistent_dir() -> bytes:
    """Return the directory for data that this user's commands and service share, whatever directory systemd passed.

    Raises  FileNotFoundError for a user without a home directory
    """
    if os.geteuid() == 0:
        return _SYSTEM_STATE
    given = os.environb.get(b"XDG_STATE_HOME", b"")
    home = given if given.startswith(b"/") else os.path.expanduser(b"~/" + _STATE_HOME)
    if not home.startswith(b"/"):
        raise FileNotFoundError(errno.ENOENT, "there is no home directory, and XDG_STATE_HOME is not set")
    return home + b"/" + _NAME


def _systemd_directory(variable: bytes) -> bytes | None:
    """Return the first directory that systemd passed. Source  systemd.exec(5): colons separate several"""
    first = os.environb.get(variable, b"").partition(b":")[0]
    return first if first.startswith(b"/") else None


def make_dir(path: bytes) -> bytes:
    """Create a runtime or state directory and its missing parents, and return its path.

    Every user may read root's directories, because the status is public; only /run/trashd itself can't be listed.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_dir(parent)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if os.geteuid() == 0:
            os.chmod(path, 0o711 if path == os.path.dirname(SYSTEM_RUNTIME) else 0o755)
    return path
