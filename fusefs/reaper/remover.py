"""Removing a tree: by dirfd, one component at a time, never through a link, over a mount, or up again (I6).

Plain and correct: one thread, depth first, with bounded fds. Directories deeper than the limit are renamed up
into the container's `hoisted/` and removed from there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from fusefs.core.names import Name, join
from fusefs.core.report import MAX_FAILURES, Failure, Progress, Report
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.layout import HOISTED, TREE

DEPTH_LIMIT = 64
_PROGRESS_EVERY = 1000
_DENIED = (errno.EACCES, errno.EPERM)


def remove_contents(kernel: Kernel, container: Fd, progress: Progress = lambda _n: None) -> Report:
    """Remove `tree` and `hoisted` of a container, going on after failures.

    progress  told the entries removed, about every thousand
    Raises    nothing for an entry: its failure is in the report. What is created meanwhile is removed too.
    """
    remover = _Remover(kernel, container, progress)
    remover.remove_entry(container, TREE, TREE, 0)
    remover.remove_hoisted()
    return remover.report()


class _Remover:
    """One removal: what it has done so far, and where deep directories go."""

    def __init__(self, kernel: Kernel, container: Fd, progress: Progress) -> None:
        self._kernel = kernel
        self._container = container
        self._progress = progress
        self._removed = 0
        self._told = 0
        self._failures: list[Failure] = []
        self._n_failed = 0
        self._n_hoisted = 0

    def report(self) -> Report:
        self._tell()
        return Report(self._removed, tuple(self._failures), self._n_failed)

    def remove_hoisted(self) -> None:
        """Remove the directories that were too deep, and those that come up from them, until none is left."""
        try:
            hoisted = self._kernel.open_dir(self._container, HOISTED)
        except FileNotFoundError:
            return
        with hoisted:
            failed: set[bytes] = set()
            while names := [name for name in self._kernel.list(hoisted) if name not in failed]:
                for name in names:
                    if not self.remove_entry(hoisted, Name(name), join(HOISTED, name), 0):
                        failed.add(name)
        if not failed:
            self._kernel.rmdir(self._container, HOISTED)

    def remove_entry(self, parent: Fd, name: Name, path: bytes, depth: int) -> bool:
        """Remove one entry, whatever it is; whether it is gone."""
        try:
            st = self._kernel.stat(parent, name)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._failed(path, error, "stat")
            return False
        if stat.S_ISDIR(st.st_mode):
            return self._remove_directory(parent, name, path, depth)
        return self._try(lambda: self._kernel.unlink(parent, name), parent, path, "unlink")

    def _remove_directory(self, parent: Fd, name: Name, path: bytes, depth: int) -> bool:
        if depth >= DEPTH_LIMIT and self._hoist(parent, name):
            return True
        try:
            directory = self._open(parent, name)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._failed(path, error, "open")
            return False
        with directory:
            if not self._empty(directory, path, depth):
                return False
        return self._try(lambda: self._kernel.rmdir(parent, name), parent, path, "rmdir")

    def _open(self, parent: Fd, name: Name) -> Fd:
        """A directory for reading; its owner gives himself the permission if its mode forbids it."""
        try:
            return self._kernel.open_dir(parent, name)
        except PermissionError:
            with self._kernel.open_beneath(parent, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                self._kernel.chmod(fd, stat.S_IRWXU)
            return self._kernel.open_dir(parent, name)

    def _empty(self, directory: Fd, path: bytes, depth: int) -> bool:
        """Remove all entries; again until a pass finds none that is new, as readdir may skip some (pitfall 14)."""
        failed: set[bytes] = set()
        while True:
            names = [name for name in self._kernel.list(directory) if name not in failed]
            if not names:
                return not failed
            for name in names:
                if not self.remove_entry(directory, Name(name), join(path, name), depth + 1):
                    failed.add(name)

    def _hoist(self, parent: Fd, name: Name) -> bool:
        """Rename a deep directory up into the container; whether it went (a boundary or permission may forbid it)."""
        with suppress(FileExistsError):
            self._kernel.mkdir(self._container, HOISTED)
        self._n_hoisted += 1
        # The number alone could meet one of an earlier, killed run.
        new = b"%d-%s" % (self._n_hoisted, os.urandom(4).hex().encode())
        with self._kernel.open_dir(self._container, HOISTED) as hoisted:
            for attempt in range(2):
                try:
                    self._kernel.rename(parent, name, hoisted, new)
                except OSError as error:
                    if attempt or error.errno not in _DENIED:
                        return False
                    with suppress(OSError), self._open(parent, name) as fd:
                        self._kernel.chmod(fd, stat.S_IRWXU)
                else:
                    return True
        return False

    def _try(self, call: Callable[[], None], parent: Fd, path: bytes, told: str) -> bool:
        """Remove something; if its directory's mode forbids that, its owner lends himself the permission once."""
        for attempt in range(2):
            try:
                call()
            except FileNotFoundError:
                return True
            except OSError as error:
                if attempt or error.errno != errno.EACCES or not self._open_up(parent):
                    self._failed(path, error, told)
                    return False
            else:
                self._removed += 1
                if self._removed - self._told >= _PROGRESS_EVERY:
                    self._tell()
                return True
        return False

    def _open_up(self, directory: Fd) -> bool:
        try:
            self._kernel.chmod(directory, stat.S_IRWXU)
        except OSError:
            return False
        return True

    def _failed(self, path: bytes, error: OSError, call: str) -> None:
        self._n_failed += 1
        if len(self._failures) < MAX_FAILURES:
            self._failures.append(Failure(path, error.errno or errno.EIO, call))

    def _tell(self) -> None:
        self._progress(self._removed - self._told)
        self._told = self._removed
