"""Log lines for journald, with fields; on a standard error that is not the journal, lines with their priority."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping

from fusefs.core.printable_names import printable, show

_SOCKET = "/run/systemd/journal/socket"
_PATIENCE_S = 1.0
_DISTRUST_S = 10.0
"""How long a journal that took no line for a second is not tried again: the logging thread has other work."""
_MOST_BYTES = 16 << 10
"""Of one field: all of a message fits into a datagram (net.core.wmem_default)."""
_LENGTH = struct.Struct("<Q")
_FORMATTER = logging.Formatter()
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def make_handler(identifier: str, environment: Mapping[str, str] = os.environ) -> logging.Handler:
    """A handler for where standard error goes: the journal itself, a terminal, or a reader of `<N>` before a line.

    Source  systemd.exec(5), $JOURNAL_STREAM: device and inode of the stream that standard error is if it is unchanged
    """
    try:
        st = os.fstat(2)
    except OSError:
        return logging.NullHandler()
    if environment.get("JOURNAL_STREAM") == f"{st.st_dev}:{st.st_ino}":
        return JournalHandler(identifier)
    return StderrHandler(has_priorities=not os.isatty(2))


class StderrHandler(logging.Handler):
    """One line a message; more for a traceback."""

    def __init__(self, *, has_priorities: bool) -> None:
        """has_priorities: `<4>` before each line (sd-daemon(3))."""
        super().__init__()
        self._has_priorities = has_priorities

    def emit(self, record: logging.LogRecord) -> None:
        """Write it at once."""
        prefix = f"<{priority(record.levelno)}>" if self._has_priorities else ""
        text = "".join(f"{prefix}{line}\n" for line in _lines(record))
        try:
            os.write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            self.handleError(record)


class JournalHandler(logging.Handler):
    """To journald's own socket, since only there a message has fields: those in the record's attribute `fields`.

    Without journald (it is being restarted) messages go to standard error.
    Source  systemd.io/JOURNAL_NATIVE_PROTOCOL
    """

    def __init__(self, identifier: str, address: str = _SOCKET) -> None:
        """identifier: SYSLOG_IDENTIFIER, what `journalctl -t` takes."""
        super().__init__()
        self._identifier = identifier
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._otherwise = StderrHandler(has_priorities=True)
        self._patient_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        self._socket.settimeout(_PATIENCE_S if time.monotonic() >= self._patient_at_s else 0.0)
        try:
            self._socket.sendto(self._message(record), self._address)
        except (TimeoutError, BlockingIOError):
            self._patient_at_s = time.monotonic() + _DISTRUST_S
            self._otherwise.emit(record)
        except OSError:
            self._otherwise.emit(record)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
        super().close()

    def _message(self, record: logging.LogRecord) -> bytes:
        fields: dict[str, str | bytes] = {
            "MESSAGE": "\n".join(_lines(record)),
            "PRIORITY": str(priority(record.levelno)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            **getattr(record, "fields", {}),
        }
        return b"".join(encode_field(name, value) for name, value in fields.items() if value)


def encode_field(name: str, value: str | bytes) -> bytes:
    """One field as the journal's socket takes it; a path's bytes are made printable."""
    text = printable(value) if isinstance(value, bytes) else value
    content = text.encode("utf-8", "backslashreplace")[:_MOST_BYTES]
    if b"\n" in content:
        return b"%s\n%s%s\n" % (name.encode(), _LENGTH.pack(len(content)), content)
    return b"%s=%s\n" % (name.encode(), content)


def priority(level: int) -> int:
    """The syslog priority of a logging level."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def _lines(record: logging.LogRecord) -> list[str]:
    """The message on one line, whatever names are in it, and the lines of a traceback; all safe for a terminal."""
    lines = [record.getMessage()]
    if record.exc_info:
        lines += _FORMATTER.formatException(record.exc_info).split("\n")
    return [show(line) for line in lines]


def send_to(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Make a handler the only one of this process."""
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level)
