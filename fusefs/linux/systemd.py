"""systemd: what a service tells its manager (sd_notify(3), without its library), and what its tools show of units."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_PATIENCE_S = 1.0
"""A manager that reads nothing for so long is not told: the service has other work."""
_BOOTED = "/run/systemd/system"


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
