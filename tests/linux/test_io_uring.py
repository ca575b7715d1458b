"""A ring does what it is given, as many at a time as it may, and tells each result once."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.io_uring import OPENAT, READ, IoUring
from tests.support.seccomp import printed_without_uring

pytestmark = pytest.mark.needs("uring")

N_ENTRIES = 8
NOP = 0
LIMIT_S = 10.0


@pytest.fixture
def ring() -> Iterator[IoUring]:
    with IoUring(N_ENTRIES, 2) as ring:
        yield ring


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Fd]:
    with Fd(os.open(tmp_path, os.O_PATH)) as fd:
        yield fd


def results(ring: IoUring, n: int) -> dict[int, int]:
    found: dict[int, int] = {}
    while len(found) < n:
        found.update(ring.enter(n - len(found), LIMIT_S))
    return found


def test_what_was_opened_is_told_by_its_token(ring: IoUring, top: Fd, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    name = ctypes.create_string_buffer(b"x")
    ring.submit(OPENAT, top, 77, address=ctypes.addressof(name), flags=os.O_RDONLY | os.O_CLOEXEC)
    ((token, fd),) = results(ring, 1).items()
    assert token == 77
    with Fd(fd) as opened:
        assert os.read(opened, 100) == b"content"


def test_a_failure_is_a_negative_errno(ring: IoUring, top: Fd) -> None:
    name = ctypes.create_string_buffer(b"missing")
    ring.submit(OPENAT, top, 1, address=ctypes.addressof(name), flags=os.O_PATH)
    assert results(ring, 1) == {1: -errno.ENOENT}


def test_places_are_used_again_and_again(ring: IoUring, top: Fd) -> None:
    name = ctypes.create_string_buffer(b"missing")
    for number in range(10 * N_ENTRIES):
        tokens = range(number * N_ENTRIES, (number + 1) * N_ENTRIES)
        for token in tokens:
            ring.submit(OPENAT, top, token, address=ctypes.addressof(name), flags=os.O_PATH)
        assert results(ring, N_ENTRIES) == dict.fromkeys(tokens, -errno.ENOENT)


def test_the_wait_ends_with_its_time(ring: IoUring) -> None:
    with Fd(os.eventfd(0, os.EFD_CLOEXEC)) as never:
        into = ctypes.create_string_buffer(8)
        ring.submit(READ, never, 5, address=ctypes.addressof(into), length=8)
        assert ring.enter(1, 0.001) == []
        os.eventfd_write(never, 3)
        assert results(ring, 1) == {5: 8}
        assert int.from_bytes(into.raw, sys.byteorder) == 3


def test_a_closed_ring_leaves_no_fd() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        with IoUring(N_ENTRIES, 1):
            pass
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.needs("root")
def test_without_io_uring_there_is_no_ring() -> None:
    done = printed_without_uring(
        "from fusefs.linux.io_uring import IoUring\ntry: IoUring(8, 1)\nexcept OSError as error: print(error.errno)"
    )
    assert int(done) == errno.EPERM


def test_a_full_queue_takes_no_more_and_loses_nothing(ring: IoUring) -> None:
    for token in range(N_ENTRIES):
        ring.submit(NOP, -1, token, address=0)
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        ring.submit(NOP, -1, N_ENTRIES, address=0)
    assert results(ring, N_ENTRIES) == dict.fromkeys(range(N_ENTRIES), 0)
