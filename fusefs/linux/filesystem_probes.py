"""What a store rests on and not every filesystem that says so holds: tried, not believed.

That a file keeps its first name, if it got that late; that others are refused what a folder's safety rests on.

Whatever a killed trial left in the directory where it was tried has one beginning of a name. Who may write above it
could give its name to any directory of ours: nothing else in it is removed, and it stays then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from fusefs.core.names import Name
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.syscalls import NO_TMPFILE
from fusefs.linux.thread_credentials import ThreadCredentials, call_as

_NO_LINK = NO_TMPFILE | {errno.ENOENT, errno.EPERM, errno.EXDEV, errno.EMLINK}
_CONTENT = b"trashd\n"
_NOBODY = 65534
_ONE, _OTHER, _MOVED, _CLOSED = (Name(name) for name in (b"one", b"other", b"moved", b"closed"))
_OPEN_TO_ALL, _READ_ONLY = 0o777, 0o755
TRIAL = b"trial-"
_MAX_DEPTH = 4


def keeps_unnamed(kernel: Kernel, dir_fd: Fd, name: bytes) -> bool:
    """Whether a file made without a name is still there, whole, when it got one and was closed: tried to the end.

    JuiceFS says that it linked one, shows it for as long as it is open, and then has none.
    name    for the trial; what a killed one left there is removed
    Raises  OSError: what says nothing about such files, as ENOSPC
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
    """Whether another user may neither move an unwritable directory to another parent, nor open a 0700 one.

    That holds on Linux's local filesystems; not for every client of a network's, FUSE without default_permissions,
    or vfat, where all has one owner. Root tries it as the user nobody; another user, or root without a second uid in
    its user namespace, goes by the kind of filesystem.
    name    of a directory that is made for it, and goes again
    Raises  OSError
    """
    discard_trial(kernel, dir_fd, name)
    if os.geteuid() != 0:
        return kernel.is_local(dir_fd)
    kernel.mkdir(dir_fd, name)
    try:
        with ExitStack() as owned, suppress(_WrongMode):
            top = owned.enter_context(kernel.open_dir(dir_fd, name))
            one, other = (owned.enter_context(_made(kernel, top, made, _OPEN_TO_ALL)) for made in (_ONE, _OTHER))
            _made(kernel, one, _MOVED, _READ_ONLY).close()
            _made(kernel, top, _CLOSED, 0o700).close()
            kernel.reach("strangers")
            try:
                return call_as(ThreadCredentials(_NOBODY, _NOBODY), _is_refused, top, one, other)
            except PermissionError:
                return kernel.is_local(dir_fd)  # there is no other user in this namespace
        return False
    finally:
        discard_trial(kernel, dir_fd, name)


class _WrongMode(Exception):
    """A directory has not the mode that it was given."""


def _made(kernel: Kernel, dir_fd: Fd, name: Name, mode: int) -> Fd:
    kernel.mkdir(dir_fd, name)
    with closed_on_error(kernel.open_dir(dir_fd, name)) as fd:
        kernel.chmod(fd, mode)
        st = kernel.fstat(fd)
        if st.st_mode & 0o777 != mode or st.st_uid != 0:
            raise _WrongMode
    return fd


def _is_refused(top: Fd, one: Fd, other: Fd) -> bool:
    """As another user, with root's fds: permissions are checked with each name. Only EPERM and EACCES will do."""
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


def discard_trial(kernel: Kernel, dir_fd: Fd, name: Name) -> None:
    """Remove what a trial, or a killed one, left. Raises  OSError"""
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


def trial(name: str) -> Name:
    """A name for something that is tried."""
    return Name(TRIAL + name.encode())


@contextmanager
def trial_directory(kernel: Kernel, dir_fd: int, name: Name) -> Iterator[Fd]:
    """A new directory of ours alone, gone again at the end. What a killed one left there is removed first.

    Raises  OSError
    """
    discard_trial_directory(kernel, dir_fd, name)
    kernel.mkdir(dir_fd, name)
    try:
        with kernel.open_dir(dir_fd, name) as fd:
            yield fd
    finally:
        discard_trial_directory(kernel, dir_fd, name)


def discard_trial_directory(kernel: Kernel, dir_fd: int, name: Name) -> None:
    """Remove one, if it is there. Raises  OSError; ENOTEMPTY if there is something else in it"""
    with suppress(FileNotFoundError):
        _discard(kernel, dir_fd, name, _MAX_DEPTH)


def _discard(kernel: Kernel, dir_fd: int, name: bytes, depth: int) -> None:
    try:
        kernel.unlink(dir_fd, name)
    except (IsADirectoryError, PermissionError):  # POSIX allows either for a directory
        if depth:
            with kernel.open_dir(dir_fd, name) as fd:
                for inner in kernel.list(fd):
                    if inner.startswith(TRIAL):
                        with suppress(FileNotFoundError):
                            _discard(kernel, fd, inner, depth - 1)
        kernel.rmdir(dir_fd, name)
