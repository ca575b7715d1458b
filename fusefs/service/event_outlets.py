"""The outlets of events and figures: log, audit log, hooks, metrics; as the configuration says, which may change.

The audit log has for years which user took, restored and reaped what, and how much; one JSON object a line. Beside it
the service's log has the same events, for people, with journald's fields.
"""

from __future__ import annotations

import errno
import logging
import os
import stat

import trio

from fusefs.core.config import Config
from fusefs.core.config import MetricsConfig as Wanted
from fusefs.core.events import ERRORS, WARNINGS, Event, describe, encode, variables
from fusefs.core.service_status import Status
from fusefs.linux.fd import Fd
from fusefs.linux.runtime_directories import make_dir
from fusefs.service.hooks import HookRunner
from fusefs.service.prometheus import PrometheusMetrics, serve

_LOG = logging.getLogger(__name__)


class EventOutlets:
    """All of them; events may come before they are run."""

    def __init__(self, config: Config) -> None:
        self._hooks = HookRunner(config.hooks)
        self._audit = _open_audit(config)
        self._audit_path = config.audit
        self._metrics: PrometheusMetrics | None = None
        self._wanted = Wanted()
        self._listening = trio.CancelScope()

    def tell(self, event: Event, *, is_own: bool) -> None:
        """Report an event to all outlets. is_own: it happened in a store of its user's own"""
        log_event(event)
        if self._audit is not None:
            self._audit(event)
        self._hooks(event)
        if self._metrics is not None:
            self._metrics(event, is_own=is_own)

    def publish(self, status: Status) -> None:
        """These are the figures now."""
        if self._metrics is not None:
            self._metrics.publish(status, self._hooks.tally)

    def run(self, config: Config, nursery: trio.Nursery) -> None:
        """Work in a nursery until that is cancelled."""
        nursery.start_soon(self._hooks.run)
        self._serve_metrics(config.metrics, nursery)

    def configure(self, config: Config, nursery: trio.Nursery) -> None:
        """Go on as another configuration says. The audit log is opened anew: it may have been renamed."""
        self._hooks.hooks = config.hooks  # from the next event on
        self._serve_metrics(config.metrics, nursery)
        if config.audit == self._audit_path and self._audit is not None:
            self._audit.reopen()
            return
        if self._audit is not None:
            self._audit.close()
        self._audit, self._audit_path = _open_audit(config), config.audit

    def close(self) -> None:
        """Nothing more is told."""
        if self._metrics is not None:
            self._metrics.close()
        if self._audit is not None:
            self._audit.close()

    def _serve_metrics(self, wanted: Wanted, nursery: trio.Nursery) -> None:
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._listening.cancel()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if wanted.textfile is None and wanted.http is None:
            return
        self._metrics = PrometheusMetrics(None if wanted.textfile is None else os.fsencode(wanted.textfile))
        if wanted.http is not None:
            self._listening = trio.CancelScope()
            nursery.start_soon(_answer, *wanted.http, self._metrics, self._listening)


async def _answer(host: str, port: int, metrics: PrometheusMetrics, listening: trio.CancelScope) -> None:
    with listening:
        await serve(host, port, metrics.registry)


def _open_audit(config: Config) -> Audit | None:
    if config.audit is None:
        return None
    try:
        return Audit(os.fsencode(config.audit))
    except OSError as error:
        _LOG.error("no audit log: %s: %s", config.audit, error.strerror)
        return None


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
    fd = Fd(os.open(path, flags, 0o640))
    try:
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd, st.st_size > 0 and os.pread(fd, 1, st.st_size - 1) != b"\n"
    except BaseException:
        fd.close()
        raise
