"""systemd: notifications from a service (sd_notify(3), without libsystemd), unit properties, and log handlers.

The log handlers send messages with fields to journald, or write lines with a time or priority to standard error.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress

from fusefs.core.printable_names import printable, printable_text

_SEND_LIMIT_S = 1.0
"""We wait at most this long for the manager or journal to read, since the service has other work."""
_BOOTED = "/run/systemd/system"
_JOURNAL = "/run/systemd/journal/socket"
_NO_WAIT_S = 10.0
"""If the journal has not read for a second, the thread does not wait for it again for this long."""
_MOST_BYTES = 16 << 10
"""The limit of one field, so that a whole message fits into a datagram (net.core.wmem_default)."""
_LENGTH = struct.Struct("<Q")
_FORMATTER = logging.Formatter()
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


class SystemdNotifier:
    """Sends notifications to the manager that started us, if any."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """environment: contains the service manager's variables NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID"""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_LIMIT_S)
        self._watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._watchdog_pid = environment.get("WATCHDOG_PID", "")

    def notify_ready(self, status: str = "") -> None:
        """Notify the manager that the service is ready, at the start or after a reload."""
        self._send("READY=1", status)

    def set_status(self, text: str) -> None:
        """Set the status line in `systemctl status`."""
        self._send(status=text)

    def notify_reloading(self) -> None:
        """Notify the manager that the configuration is being reloaded, until `notify_ready` is called."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def notify_stopping(self) -> None:
        """Notify the manager that the service is about to end."""
        self._send("STOPPING=1")

    def reset_watchdog(self) -> None:
        """Reset the watchdog. Must be called at least once every `watchdog_s` seconds, preferably twice."""
        self._send("WATCHDOG=1")

    def watchdog_s(self) -> float | None:
        """Return after how many seconds without `reset_watchdog` the manager kills us; None: there is no watchdog."""
        if not self._watchdog_us.isdecimal() or self._watchdog_pid not in ("", str(os.getpid())):
            return None
        return int(self._watchdog_us) / 1e6 or None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str = "", status: str = "") -> None:
        if self._socket is None:
            return
        lines = [message, f"STATUS={' '.join(status.splitlines())}" if status else ""]
        # If the manager is gone or does not read, the service continues.
        with suppress(OSError):
            self._socket.sendto("\n".join(filter(None, lines)).encode("utf-8", "backslashreplace"), self._address)


class SystemdFailed(Exception):
    """A systemd tool failed; the text is the tool's message."""


def is_manager_running(*, for_user: bool = False) -> bool:
    """Return whether a systemd manager is running. Source  sd_booted(3)"""
    if for_user:
        return os.path.exists(f"{os.environ.get('XDG_RUNTIME_DIR', '')}/systemd/private")
    return os.path.isdir(_BOOTED)


def run_tool(program: str, *words: str, for_user: bool = False) -> str:
    """Run systemctl, systemd-sysusers or another systemd tool, and return its output.

    Raises  SystemdFailed, FileNotFoundError if the program does not exist
    """
    import subprocess  # imported late: a service starts no tool

    result = subprocess.run(
        [program, *(["--user"] if for_user else []), *words],
        env={**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )
    if result.returncode:
        raise SystemdFailed(result.stderr.strip() or f"{program}: exit code {result.returncode}")
    return result.stdout


def unit_properties(names: tuple[str, ...], units: tuple[str, ...], *, for_user: bool = False) -> list[dict[str, str]]:
    """Return these properties of each unit; a property that a unit's type lacks is empty.

    units   names of units, or patterns that match loaded units
    Raises  SystemdFailed, FileNotFoundError if there is no systemctl
    """
    text = run_tool("systemctl", "show", f"--property={','.join(names)}", "--", *units, for_user=for_user)
    blocks = (block.splitlines() for block in text.strip().split("\n\n") if block)
    none = dict.fromkeys(names, "")
    return [none | dict(line.split("=", 1) for line in lines if "=" in line) for lines in blocks]


def make_handler(identifier: str, environment: Mapping[str, str] = os.environ) -> logging.Handler:
    """Return a JournalHandler if standard error is the journal, otherwise a handler for lines that begin with the time.

    Source  systemd.exec(5), $JOURNAL_STREAM: device and inode of standard error if it still is the journal's stream
    """
    try:
        st = os.fstat(2)
    except OSError:
        return logging.NullHandler()
    if environment.get("JOURNAL_STREAM") == f"{st.st_dev}:{st.st_ino}":
        return JournalHandler(identifier)
    return StderrHandler(has_priorities=False)


class StderrHandler(logging.Handler):
    """Writes each message to standard error as one line, followed by the lines of a traceback."""

    def __init__(self, *, has_priorities: bool) -> None:
        """has_priorities: lines begin with a priority as in `<4>`, for journald (sd-daemon(3)); else with the time"""
        super().__init__()
        self._has_priorities = has_priorities

    def emit(self, record: logging.LogRecord) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        prefix = f"<{priority(record.levelno)}>" if self._has_priorities else f"{moment} "
        text = "".join(f"{prefix}{line}\n" for line in _lines(record))
        try:
            os.write(2, text.encode("utf-8", "backslashreplace"))
        except OSError:
            self.handleError(record)


class JournalHandler(logging.Handler):
    """Sends messages to journald's own socket: only there can a message have fields (the record's `fields`).

    If journald is not available, for example during its restart, messages are written to standard error.
    Source  systemd.io/JOURNAL_NATIVE_PROTOCOL
    """

    def __init__(self, identifier: str, address: str = _JOURNAL) -> None:
        """identifier: SYSLOG_IDENTIFIER, for `journalctl -t`"""
        super().__init__()
        self._identifier = identifier
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._fallback = StderrHandler(has_priorities=True)
        self._wait_again_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self._socket.settimeout(_SEND_LIMIT_S if time.monotonic() >= self._wait_again_at_s else 0.0)
        try:
            self._socket.sendto(self._message(record), self._address)
        except (TimeoutError, BlockingIOError):
            self._wait_again_at_s = time.monotonic() + _NO_WAIT_S
            self._fallback.emit(record)
        except OSError:
            self._fallback.emit(record)

    def close(self) -> None:
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
    """Encode a field in the format of the journal's socket; a path (bytes) is made printable."""
    text = printable(value) if isinstance(value, bytes) else value
    content = text.encode("utf-8", "backslashreplace")[:_MOST_BYTES]
    if b"\n" in content:
        return b"%s\n%s%s\n" % (name.encode(), _LENGTH.pack(len(content)), content)
    return b"%s=%s\n" % (name.encode(), content)


def priority(level: int) -> int:
    """Return the syslog priority for a logging level."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


def _lines(record: logging.LogRecord) -> list[str]:
    """Return the message as a single line, then the lines of a traceback. All of them are safe for a terminal."""
    lines = [record.getMessage()]
    if record.exc_info:
        lines += _FORMATTER.formatException(record.exc_info).split("\n")
    return [printable_text(line) for line in lines]


def set_log_handler(handler: logging.Handler) -> None:
    """Make this the only log handler of the process."""
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
