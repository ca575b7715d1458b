"""Telling systemd how the service is: sd_notify(3), without its library."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_PATIENCE_S = 1.0
"""A manager that reads nothing for so long is not told: the service has other work."""


class Notifier:
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

    def is_heard(self) -> bool:
        """Whether there is a manager."""
        return self._socket is not None

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
