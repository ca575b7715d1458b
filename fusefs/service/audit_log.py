"""The audit log: which user took, restored and reaped what, and how much; one JSON object a line, for years.

Beside it the same events in the service's log, for people, with journald's fields.
"""

from __future__ import annotations

import errno
import logging
import os
import stat

from fusefs.core.events import ERRORS, WARNINGS, Event, describe, encode, variables
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import make_dir

_LOG = logging.getLogger(__name__)
_MODE = 0o640


def log_event(event: Event) -> None:
    """Tell an event in the service's log."""
    level = logging.ERROR if event.kind in ERRORS else logging.WARNING if event.kind in WARNINGS else logging.INFO
    _LOG.log(level, "%s", describe(event), extra={"fields": variables(event)})


class Audit:
    """A file that is only ever appended to; a disk that is full costs lines, not the service."""

    def __init__(self, path: bytes) -> None:
        """Open it, made 0640 if need be, its directory too. Raises  OSError"""
        self._path = path
        self._fd, self._is_cut = _open(path)
        self._n_lost = 0

    def __call__(self, event: Event) -> None:
        """Write one line. Of one that the disk had no place for, what was written stays; the next one begins anew."""
        line = b"\n" * self._is_cut + encode(event) + b"\n"
        try:
            n_written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror)
            return
        if n_written == len(line):
            self._is_cut = False
            self._tell_lost()
        else:
            self._is_cut = n_written != self._is_cut
            self._lose("cut short, there is no space left")

    def reopen(self) -> None:
        """Go on in the file that has the name now: after logrotate renamed the old one."""
        try:
            fd, is_cut = _open(self._path)
        except OSError as error:
            _LOG.error("audit log: can't be opened anew, the old file is used on: %s", error.strerror)
            return
        self._fd.close()
        self._fd, self._is_cut = fd, is_cut

    def close(self) -> None:
        """Write nothing any more."""
        self._fd.close()

    def _lose(self, why: str | None) -> None:
        self._n_lost += 1
        if self._n_lost == 1:
            _LOG.error("audit log: can't be written, events are only in this log until it can: %s", why)

    def _tell_lost(self) -> None:
        if self._n_lost:
            _LOG.warning("audit log: written again; it lacks %d events that are only in this log", self._n_lost)
            self._n_lost = 0


def _open(path: bytes) -> tuple[Fd, bool]:
    """The file, and whether its last line has no end."""
    make_dir(os.path.dirname(os.path.abspath(path)))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = Fd(os.open(path, flags, _MODE))
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd, st.st_size > 0 and os.pread(fd, 1, st.st_size - 1) != b"\n"
    except BaseException:
        fd.close()
        raise
