"""Daemonising, but not before it works: the command's terminal gets the daemon's error and exit code."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from fusefs.core.errors import Exit
from fusefs.linux.systemd import SystemdNotifier, make_handler

Ready = Callable[[], None]
_SYSLOG = "/dev/log"


def run_in_background(body: Callable[[Ready], int]) -> int:
    """The exit code for the terminal: 0 as soon as the child that runs `body` says that it is ready.

    Returns twice: in the child with the exit code of `body`, when that ends. Until it is ready it has the terminal
    for its errors; after that it logs to syslog, belongs to no terminal, and stands in no directory. Until then it
    stays in our process group too: when systemd mounts for an automount, processes of other ones wait at the mount
    point until that is done.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.chdir("/")
        logging.raiseExceptions = False  # a syslog that is not there would be told of on the terminal, at length
        _log_to(_syslog())
        return body(lambda: _detach(tell))
    os.close(tell)
    try:
        with os.fdopen(told, "rb") as pipe:
            if pipe.read():
                return 0
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        raise
    _pid, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        return code
    if not code:
        print("trashd: the daemon ended before it was ready", file=sys.stderr)
        return Exit.FAILED
    print(f"trashd: the daemon was ended by {signal.strsignal(-code)} before it was ready", file=sys.stderr)
    return Exit.SIGNALLED - code


def run_in_foreground(body: Callable[[Ready], int]) -> int:
    """The exit code of `body`, which logs to stderr, or to the journal; systemd learns when it is ready."""
    os.chdir("/")  # or it would keep a volume busy
    _log_to(make_handler("trashd") if "JOURNAL_STREAM" in os.environ else logging.StreamHandler())
    notifier = SystemdNotifier()
    try:
        return body(notifier.ready)
    finally:
        notifier.close()


def _detach(tell: int) -> None:
    """Let go of the terminal, and then say that all is well; the parent may be gone by then."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with suppress(BrokenPipeError):
        os.write(tell, b"1")
    os.close(tell)


def _syslog() -> logging.Handler:
    try:
        return logging.handlers.SysLogHandler(_SYSLOG, logging.handlers.SysLogHandler.LOG_DAEMON)
    except OSError:
        return logging.NullHandler()


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(f"trashd[{os.getpid()}]: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("fusefs").setLevel(logging.INFO)
