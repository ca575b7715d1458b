"""What the service manager hears, on a real datagram socket."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fusefs.linux.systemd import SystemdNotifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The manager's socket and its address as NOTIFY_SOCKET has it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@trashd-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind("\0" + name[1:] if name[0] == "@" else name)
        ours.settimeout(10)
        yield ours, name


def test_the_manager_hears_each_message(manager: tuple[socket.socket, str]) -> None:
    ours, name = manager
    with closing(SystemdNotifier({"NOTIFY_SOCKET": name})) as notifier:
        assert notifier.is_heard()
        notifier.ready("serving 2 volumes")
        notifier.status("reaping")
        notifier.alive()
        notifier.stopping()
    assert [ours.recv(4096) for _ in range(4)] == [
        b"READY=1\nSTATUS=serving 2 volumes", b"STATUS=reaping", b"WATCHDOG=1", b"STOPPING=1",
    ]  # fmt: skip


def test_a_reload_says_when_it_began(manager: tuple[socket.socket, str]) -> None:
    ours, name = manager
    before_us = time.monotonic_ns() // 1000
    with closing(SystemdNotifier({"NOTIFY_SOCKET": name})) as notifier:
        notifier.reloading()
    reloading, moment = ours.recv(4096).decode().splitlines()
    assert reloading == "RELOADING=1"
    assert before_us <= int(moment.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


def test_a_status_cannot_say_more_than_a_status(manager: tuple[socket.socket, str]) -> None:
    ours, name = manager
    with closing(SystemdNotifier({"NOTIFY_SOCKET": name})) as notifier:
        notifier.status("it is\nSTOPPING=1 \udcff")
    assert ours.recv(4096) == b"STATUS=it is STOPPING=1 \\udcff"


@pytest.mark.parametrize("variables", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_a_manager_nothing_is_said(variables: dict[str, str]) -> None:
    with closing(SystemdNotifier(variables)) as notifier:
        assert not notifier.is_heard()
        notifier.ready()
        notifier.alive()


def test_a_manager_that_is_gone_is_no_reason_to_stop(tmp_path: Path) -> None:
    with closing(SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})) as notifier:
        notifier.ready()


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_ours_if_it_names_us(variables: dict[str, str], seconds: float | None) -> None:
    with closing(SystemdNotifier(variables)) as notifier:
        assert notifier.watchdog_s() == seconds
