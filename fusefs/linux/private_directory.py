"""A directory that only we can enter, beside what is made in it: there it gets its attributes, and then its name."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from typing import Self

from fusefs.core.names import Name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel

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
