"""Opens a directory by an untrusted absolute path, name by name, avoiding links and mounts of untrusted users."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container, Sequence

from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import OTHERS_WRITE, Kernel
from fusefs.linux.mountinfo import Mount

_AUTOFS = b"autofs"
_LINKS_MAX = 40
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""O_DIRECTORY is missing, because it would trigger an idle automount. Source  fs/namei.c, follow_automount"""


def is_trusted_link(directory: os.stat_result, link: os.stat_result, trusted: Container[int]) -> bool:
    """Return whether only trusted users can have put a link into its directory."""
    is_shared = directory.st_mode & OTHERS_WRITE and not directory.st_mode & stat.S_ISVTX
    return link.st_uid in trusted and directory.st_uid in trusted and not is_shared


def link_target(here: bytes, target: bytes) -> tuple[bytes, list[bytes]] | None:
    """Resolve a link. Return a directory to continue from (the root, or one visited before), and the names to walk.

    Returns None for a link that contains `..` after a name, since it is not known where that name leads.
    """
    names = [part for part in target.split(b"/") if part not in (b"", b".")]
    start = b"/" if target.startswith(b"/") else here
    while names and names[0] == b"..":
        start = os.path.dirname(start)
        del names[0]
    return None if b".." in names else (start, names)


def open_untrusted(kernel: Kernel, path: bytes, mounts: Sequence[Mount], trusted: Container[int]) -> Fd:
    """Open the directory (O_PATH) at an absolute path, which may be chosen by a hostile user.

    A link is followed only if only trusted users can have made it. Mounts of other users are not accessed. An idle
    automount is not triggered: a name in an automount is looked up only if something is mounted there.
    mounts  the mounts, read just before the call
    Raises  OSError: ELOOP for an untrusted link, EXDEV for an untrusted mount, ENOENT for an idle automount, and others
    """
    return _PathWalk(kernel, mounts, trusted).open(path)


class _PathWalk:
    """A walk along one path, starting at the root."""

    def __init__(self, kernel: Kernel, mounts: Sequence[Mount], trusted: Container[int]) -> None:
        self._kernel = kernel
        self._by_id = {mount.mnt_id: mount for mount in mounts}
        self._points = {mount.point for mount in mounts if mount.fstype != _AUTOFS}
        self._trusted = trusted
        self._n_links = _LINKS_MAX

    def open(self, path: bytes) -> Fd:
        names = _names(path)
        fd, here, mount = self._kernel.open_path(b"/"), b"/", None
        while names:
            with close_on_error(fd):
                name = names.pop()
                there = os.path.join(here, name)
                if mount is not None and mount.fstype == _AUTOFS and there not in self._points:
                    raise _refusal(errno.ENOENT, there)
                inner = Fd(os.open(name, _STEP, dir_fd=fd))
                with close_on_error(inner):
                    mount = self._mount_of(inner, there)
                    st = self._kernel.fstat(inner)
                    is_link = stat.S_ISLNK(st.st_mode)
                    if is_link:
                        start, added = self._resolve_link(fd, here, name, st)
                    elif not stat.S_ISDIR(st.st_mode):
                        raise _refusal(errno.ENOTDIR, there)
            fd.close()
            if is_link:
                inner.close()
                names += [*reversed(added), *_names(start)]
                fd, here, mount = self._kernel.open_path(b"/"), b"/", None
            else:
                fd, here = inner, there
        if mount is not None and mount.fstype == _AUTOFS:
            fd.close()
            raise _refusal(errno.ENOENT, here)
        return fd

    def _mount_of(self, fd: Fd, path: bytes) -> Mount:
        """Return the mount that a step led to. Must be called before any other access. Raises  OSError EXDEV"""
        mount = self._by_id.get(self._kernel.statx(fd).mnt_id)
        if mount is None or mount.owner not in self._trusted:
            raise _refusal(errno.EXDEV, path)
        return mount

    def _resolve_link(self, fd: Fd, here: bytes, name: bytes, link: os.stat_result) -> tuple[bytes, list[bytes]]:
        """Resolve a link if it may be followed. Raises  OSError ELOOP"""
        there = os.path.join(here, name)
        if not self._n_links or not is_trusted_link(self._kernel.fstat(fd), link, self._trusted):
            raise _refusal(errno.ELOOP, there)
        self._n_links -= 1
        target = link_target(here, os.readlink(name, dir_fd=fd))
        if target is None:
            raise _refusal(errno.ELOOP, there)
        return target


def _names(path: bytes) -> list[bytes]:
    """Split a path, which has no `..`, into its names, the last one first."""
    return [name for name in path.split(b"/") if name][::-1]


def _refusal(number: int, path: bytes) -> OSError:
    return OSError(number, os.strerror(number), path)
