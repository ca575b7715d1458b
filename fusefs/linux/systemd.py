"""systemd: what a service tells its manager (sd_notify(3), without its library), and what its tools show of units.

Log lines for journald, with fields; on a standard error that is not the journal, lines with their priority.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress

from fusefs.core.printable_names import printable, show

_PATIENCE_S = 1.0
"""A manager or journal that reads nothing for so long is not told: the service has other work."""
_BOOTED = "/run/systemd/system"
_JOURNAL = "/run/systemd/journal/socket"
_DISTRUST_S = 10.0
"""How long a journal that took no line for a second is not tried again: the logging thread has other work."""
_MOST_BYTES = 16 << 10
"""Of one field: all of a message fits into a datagram (net.core.wmem_default)."""
_LENGTH = struct.Struct("<Q")
_FORMATTER = logging.Formatter()
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


class SystemdNotifier:
    """The way to the manager that started us; without one nothing is said."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """environment: the service manager's variables NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_PATIENCE_S)
        self._watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._watchdog_pid = environment.get("WATCHDOG_PID", "")

    def ready(self, status: str = "") -> None:
        """The service serves, again after a reload too."""
        self._send("READY=1", status)

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(status=text)

    def reloading(self) -> None:
        """The configuration is being read again; `ready` ends that."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> None:
        """The service ends."""
        self._send("STOPPING=1", status)

    def alive(self) -> None:
        """The service still works: at least once in `watchdog_s`, better twice."""
        self._send("WATCHDOG=1")

    def watchdog_s(self) -> float | None:
        """After so many seconds of silence the manager kills us; None: it does not watch us."""
        if not self._watchdog_us.isdecimal() or self._watchdog_pid not in ("", str(os.getpid())):
            return None
        return int(self._watchdog_us) / 1e6 or None

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str = "", status: str = "") -> None:
        if self._socket is None:
            return
        lines = [message, f"STATUS={' '.join(status.splitlines())}" if status else ""]
        # A manager that is gone or does not listen is no reason to stop.
        with suppress(OSError):
            self._socket.sendto("\n".join(filter(None, lines)).encode("utf-8", "backslashreplace"), self._address)


class SystemdFailed(Exception):
    """A tool of systemd said no; the text is its own."""


def is_running(*, for_user: bool = False) -> bool:
    """Whether there is a manager to talk to. Source  sd_booted(3)"""
    if for_user:
        return os.path.exists(f"{os.environ.get('XDG_RUNTIME_DIR', '')}/systemd/private")
    return os.path.isdir(_BOOTED)


def run(program: str, *words: str, for_user: bool = False) -> str:
    """What systemctl, systemd-sysusers and their like print.

    Raises  SystemdFailed, FileNotFoundError without the program
    """
    import subprocess  # a service starts no tool

    done = subprocess.run(
        [program, *(["--user"] if for_user else []), *words],
        env={**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )
    if done.returncode:
        raise SystemdFailed(done.stderr.strip() or f"{program}: exit code {done.returncode}")
    return done.stdout


def properties(names: tuple[str, ...], units: tuple[str, ...], *, for_user: bool = False) -> list[dict[str, str]]:
    """Those properties of each unit, empty where its kind has none; a pattern stands for the units that are loaded.

    Raises  SystemdFailed, FileNotFoundError without systemctl
    """
    text = run("systemctl", "show", f"--property={','.join(names)}", "--", *units, for_user=for_user)
    blocks = (block.splitlines() for block in text.strip().split("\n\n") if block)
    none = dict.fromkeys(names, "")
    return [none | dict(line.split("=", 1) for line in lines if "=" in line) for lines in blocks]


def make_handler(identifier: str, environment: Mapping[str, str] = os.environ) -> logging.Handler:
    """A handler for where standard error goes: the journal itself, or anything else, which gets the time of each line.

    Source  systemd.exec(5), $JOURNAL_STREAM: device and inode of the stream that standard error is if it is unchanged
    """
    try:
        st = os.fstat(2)
    except OSError:
        return logging.NullHandler()
    if environment.get("JOURNAL_STREAM") == f"{st.st_dev}:{st.st_ino}":
        return JournalHandler(identifier)
    return StderrHandler(has_priorities=False)


class StderrHandler(logging.Handler):
    """One line a message; more for a traceback."""

    def __init__(self, *, has_priorities: bool) -> None:
        """has_priorities: `<4>` before each line (sd-daemon(3)), which journald reads; otherwise its time."""
        super().__init__()
        self._has_priorities = has_priorities

    def emit(self, record: logging.LogRecord) -> None:
        """Write it at once."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        prefix = f"<{priority(record.levelno)}>" if self._has_priorities else f"{moment} "
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

    def __init__(self, identifier: str, address: str = _JOURNAL) -> None:
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


def send_to(handler: logging.Handler) -> None:
    """Make a handler the only one of this process."""
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
