"""What journald and the service manager get, on real datagram sockets; log lines on a real standard error too."""

import logging
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusefs.linux.systemd import JournalHandler, SystemdNotifier, encode_field, make_handler, priority


def parse(message: bytes) -> dict[str, str]:
    """A datagram's fields, read as the protocol says."""
    fields = {}
    while message:
        head, _, rest = message.partition(b"\n")
        name, is_plain, value = head.partition(b"=")
        if is_plain:
            message = rest
        else:
            (size,) = struct.unpack_from("<Q", rest)
            value, message = rest[8 : 8 + size], rest[8 + size :]
            assert message[:1] == b"\n"
            message = message[1:]
        fields[name.decode()] = value.decode()
    return fields


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket where journald would have its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(str(tmp_path / "socket"))
        ours.settimeout(10)
        yield ours


@pytest.fixture
def handler(journald: socket.socket) -> Iterator[JournalHandler]:
    """What writes there."""
    found = JournalHandler("trashd-reaper", journald.getsockname())
    yield found
    found.close()


def record(level: int, message: str, *words: object, **fields: bytes) -> logging.LogRecord:
    """What a logger hands to its handlers, here without pytest's, whose reports can't hold such names."""
    info = sys.exc_info() if sys.exc_info()[0] else None
    found = logging.LogRecord("tests.journal", level, "/code.py", 7, message, words, info, "function")
    found.fields = fields
    return found


def test_a_message_has_its_fields(handler: JournalHandler, journald: socket.socket) -> None:
    handler.handle(record(logging.WARNING, "reaped %d", 7, TRASHD_ID=b"an id", TRASHD_UID=b"1000", TRASHD_BYTES=b""))
    assert parse(journald.recv(1 << 16)) == {
        "MESSAGE": "reaped 7", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "trashd-reaper", "LOGGER": "tests.journal",
        "CODE_FILE": "/code.py", "CODE_LINE": "7", "CODE_FUNC": "function",
        "TRASHD_ID": "an id", "TRASHD_UID": "1000",
    }  # fmt: skip


def test_a_name_makes_neither_a_line_nor_a_field_nor_moves_a_cursor(
    handler: JournalHandler, journald: socket.socket
) -> None:
    name = b"/v/a\nPRIORITY=0\n\x1b[2J\xff"
    handler.handle(record(logging.INFO, "gone: %s", name.decode("utf-8", "surrogateescape"), TRASHD_ORIGIN=name))
    told = parse(journald.recv(1 << 16))
    assert told["PRIORITY"] == "6"
    assert told["MESSAGE"].isprintable()
    assert told["TRASHD_ORIGIN"] == r"/v/a\x0aPRIORITY=0\x0a\x1b[2J\xff"


def test_a_traceback_is_in_the_message(handler: JournalHandler, journald: socket.socket) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        handler.handle(record(logging.ERROR, "broken"))
    lines = parse(journald.recv(1 << 16))["MESSAGE"].splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("broken", "Traceback (most recent call last):", "ValueError: why")


def test_a_message_of_any_length_fits(handler: JournalHandler, journald: socket.socket) -> None:
    handler.handle(record(logging.INFO, "x" * 10**6, TRASHD_ORIGIN=b"y" * 10**6))
    assert set(parse(journald.recv(1 << 20))["MESSAGE"]) == {"x"}


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.binary())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_value_is_one_field(value: str | bytes) -> None:
    assert set(parse(encode_field("NAME", value))) == {"NAME"}


@pytest.mark.parametrize(
    ("level", "number"), [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (60, 2)]
)
def test_a_level_has_its_priority(level: int, number: int) -> None:
    assert priority(level) == number


SAYS = """
import logging, sys
from fusefs.linux.systemd import JournalHandler, make_handler, set_log_handler
set_log_handler(eval(sys.argv[1]))
logging.getLogger("x").warning("a name: %s", "a\\nb\\udcff")
"""


def said(handler: str) -> bytes:
    """What a process with such a handler says on standard error."""
    argv = [sys.executable, "-c", SAYS, handler]
    return subprocess.run(argv, stderr=subprocess.PIPE, check=True, timeout=60).stderr


def test_a_reader_of_standard_error_gets_the_time() -> None:
    assert re.fullmatch(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d a name: a\\x0ab\\udcff\n", said("make_handler('x')"))


def test_without_journald_the_message_goes_to_standard_error(tmp_path: Path) -> None:
    assert said(f"JournalHandler('x', {str(tmp_path / 'nobody')!r})").startswith(b"<4>a name")


def test_the_journals_own_stream_is_known() -> None:
    st = os.fstat(2)
    handler = make_handler("x", {"JOURNAL_STREAM": f"{st.st_dev}:{st.st_ino}"})
    assert isinstance(handler, JournalHandler)
    handler.close()


def test_a_stream_that_was_replaced_is_not_the_journal() -> None:
    assert not isinstance(make_handler("x", {"JOURNAL_STREAM": "1:2"}), JournalHandler)


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
        notifier.notify_ready("serving 2 volumes")
        notifier.set_status("reaping")
        notifier.reset_watchdog()
        notifier.notify_stopping()
    assert [ours.recv(4096) for _ in range(4)] == [
        b"READY=1\nSTATUS=serving 2 volumes", b"STATUS=reaping", b"WATCHDOG=1", b"STOPPING=1",
    ]  # fmt: skip


def test_a_reload_says_when_it_began(manager: tuple[socket.socket, str]) -> None:
    ours, name = manager
    before_us = time.monotonic_ns() // 1000
    with closing(SystemdNotifier({"NOTIFY_SOCKET": name})) as notifier:
        notifier.notify_reloading()
    reloading, moment = ours.recv(4096).decode().splitlines()
    assert reloading == "RELOADING=1"
    assert before_us <= int(moment.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000


def test_a_status_cannot_say_more_than_a_status(manager: tuple[socket.socket, str]) -> None:
    ours, name = manager
    with closing(SystemdNotifier({"NOTIFY_SOCKET": name})) as notifier:
        notifier.set_status("it is\nSTOPPING=1 \udcff")
    assert ours.recv(4096) == b"STATUS=it is STOPPING=1 \\udcff"


@pytest.mark.parametrize("variables", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_without_a_manager_nothing_is_said(variables: dict[str, str]) -> None:
    with closing(SystemdNotifier(variables)) as notifier:
        notifier.notify_ready()
        notifier.reset_watchdog()


def test_a_manager_that_is_gone_is_no_reason_to_stop(tmp_path: Path) -> None:
    with closing(SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})) as notifier:
        notifier.notify_ready()


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
