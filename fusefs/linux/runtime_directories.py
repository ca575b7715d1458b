"""Runtime and state directories, files replaced as a whole, and directories that are made in private first."""

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
"""What the name of an unfinished one ends with."""


def read_file(path: bytes, most_bytes: int, *, dir_fd: int | None = None, owner: int | None = None) -> bytes:
    """Read a small file whole.

    dir_fd  the directory that the path is relative to
    owner   uid of the only user who may have written it; None: others may
    Raises  FileNotFoundError; OSError EPERM: it is no regular file, or not only the owner's; EFBIG; ELOOP: it is a link
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not to wait for a writer of a FIFO
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
    """Raise OSError EPERM unless something is that user's, and no other user can write to it."""
    if st.st_uid != owner or st.st_mode & OTHERS_WRITE:
        raise OSError(errno.EPERM, f"it belongs to uid {st.st_uid}, or other users can write to it")


def replace_file(
    path: bytes,
    text: bytes,
    mode: int,
    *,
    whatever_umask: bool = False,
    is_durable: bool = False,
    owner: int | None = None,
    dir_fd: int | None = None,
) -> None:
    """Put a text into a file of that name, at once or not at all.

    whatever_umask  others are to read it though our umask is strict
    is_durable      before it has the name, so that a power failure leaves no empty file
    owner           uid of whom it is to be, by root
    dir_fd          the directory that the path is relative to
    Raises          OSError; an unfinished file beside it is replaced by the next one
    """
    with suppress(FileNotFoundError):
        os.unlink(path + NEW, dir_fd=dir_fd)
    # Only a new file: what another put there meanwhile may be a pipe, which nobody ever opens for reading.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path + NEW, flags, mode, dir_fd=dir_fd)
    with open(fd, "wb") as file:
        if owner is not None:
            os.fchown(fd, owner, -1)
        if whatever_umask:
            os.fchmod(fd, mode)
        file.write(text)
        if is_durable:
            file.flush()
            os.fsync(fd)
    os.rename(path + NEW, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


_ATTEMPTS = 8


def nameless() -> bytes:
    """What something is called that has no name yet."""
    return os.urandom(8).hex().encode()


def is_nameless(name: bytes) -> bool:
    """Whether a name is one of these."""
    return len(name) == 16 and not name.strip(b"0123456789abcdef")


class PrivateDirectory:
    """A directory in another that only we can enter (and root); made when it is first needed, gone in the end.

    What a killed one leaves is empty, or holds what was not complete.
    """

    def __init__(self, kernel: Kernel, parent: Fd, prefix: bytes) -> None:
        """parent: where it will be; what is made in it is renamed to there. prefix: what its name begins with."""
        self._kernel = kernel
        self._parent = parent
        self._prefix = prefix
        self._made: tuple[Name, Fd] | None = None

    def __enter__(self) -> Self:
        """Own it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove it, if nothing was left in it."""
        if self._made is not None:
            name, fd = self._made
            fd.close()
            self._remove(name)

    def open(self) -> Fd:
        """Itself. Raises  OSError: EPERM if another one has taken its place"""
        for _attempt in range(_ATTEMPTS):
            if self._made is None:
                self._made = self._make()
        if self._made is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self._made[1]

    def _make(self) -> tuple[Name, Fd] | None:
        """One, locked, so that it is not abandoned; None if another process took it as such before that."""
        name = Name(self._prefix + nameless())
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
            with suppress(OSError):  # a network filesystem may lock files alone
                if not self._kernel.lock(fd) or not self._kernel.is_named(fd, self._parent, name):
                    return None
            owned.pop_all()
        return name, fd

    def _remove(self, name: Name) -> None:
        with suppress(OSError):  # moved away by the owner of the place
            self._kernel.rmdir(self._parent, name)


HOME = b"/run/trashd"
"""Of root's: the directory of the directories of its mounts and its service."""
SYSTEM_RUNTIME = HOME + b"/reaper"
_SYSTEM_STATE = b"/var/lib/trashd"
_STATE_HOME, _OURS = b".local/state", b"trashd"
STATE_BELOW_HOME = _STATE_HOME + b"/" + _OURS
"""Where a user's state is without $XDG_STATE_HOME."""


def runtime_dir() -> bytes:
    """The directory of this user's running service: its status, its lock; gone after a reboot. systemd's, if that
    gave one.

    A user without $XDG_RUNTIME_DIR (cron, su) has it where a login would have made it, or else below the user's state.
    """
    told = _told(b"RUNTIME_DIRECTORY")
    if told is not None:
        return told
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME
    given = os.environb.get(b"XDG_RUNTIME_DIR", b"")
    usual = b"/run/user/%d" % os.geteuid()
    if given.startswith(b"/"):
        return given + b"/trashd"
    return usual + b"/trashd" if os.path.isdir(usual) else state_dir() + b"/run"


def state_dir() -> bytes:
    """The directory of what this user's service remembers from one run to the next; systemd's, if that gave one.

    Raises  FileNotFoundError for a user without a home
    """
    told = _told(b"STATE_DIRECTORY")
    return lasting_dir() if told is None else told


def lasting_dir() -> bytes:
    """The directory of what this user's commands and service remember together: at one place, whatever systemd gives.

    Raises  FileNotFoundError for a user without a home
    """
    if os.geteuid() == 0:
        return _SYSTEM_STATE
    given = os.environb.get(b"XDG_STATE_HOME", b"")
    home = given if given.startswith(b"/") else os.path.expanduser(b"~/" + _STATE_HOME)
    if not home.startswith(b"/"):
        raise FileNotFoundError(errno.ENOENT, "there is no home directory, and XDG_STATE_HOME is not set")
    return home + b"/" + _OURS


def _told(variable: bytes) -> bytes | None:
    """What systemd says. Source  systemd.exec(5): several are separated by colons"""
    first = os.environb.get(variable, b"").partition(b":")[0]
    return first if first.startswith(b"/") else None


def make_dir(path: bytes) -> bytes:
    """Make one of these, and what is missing above it; the same path.

    Every user may look into root's: status is for all. /run/trashd itself is the mounts' too, and can't be listed.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_dir(parent)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
        if os.geteuid() == 0:
            os.chmod(path, 0o711 if path == os.path.dirname(SYSTEM_RUNTIME) else 0o755)
    return path
