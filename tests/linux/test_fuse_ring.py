"""A ring of FUSE's, without a mount."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import _N_SUBMISSIONS, _WAKE, FuseRing

pytestmark = pytest.mark.needs("root", "fuse", "uring")

_NOP = 0


def test_who_wakes_a_closed_ring_writes_into_nothing_that_was_opened_since() -> None:
    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        before = set(os.listdir("/proc/self/fd"))
        ring = FuseRing(device, 1 << 13)
        numbers = {int(name) for name in set(os.listdir("/proc/self/fd")) - before}
        ring.close()
        files = [Fd(os.memfd_create("another's", os.MFD_CLOEXEC)) for _ in range(max(numbers) + 1)]
        try:
            assert numbers <= {int(file) for file in files} | {int(name) for name in before}
            ring.wake()
            assert not any(os.fstat(file).st_size for file in files)
        finally:
            for file in files:
                file.close()


def test_a_ring_that_was_woken_waits_for_nothing_though_a_flush_has_heard_of_it() -> None:
    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        ring = FuseRing(device, 1 << 13)
        try:
            ring.flush()
            ring.wake()
            ring.flush()
            assert ring.wait() == []
        finally:
            ring.close()


class _Answers:
    """Stands in for the native core: what it has done when `wait` asks it for what has come."""

    def __init__(self, ring: FuseRing, act: Callable[[FuseRing], list[tuple[int, int]]]) -> None:
        self._ring, self._act = ring, act

    def enter(self, _n_results: int, _timeout_s: float, /) -> list[tuple[int, int]]:
        return self._act(self._ring)

    def add(self, token: int, address: int, queue: int, /) -> None:
        """It reads no memory."""


def test_a_wake_is_awaited_anew_without_overwriting_an_answer_of_a_full_queue() -> None:
    def fill(ring: FuseRing) -> list[tuple[int, int]]:
        token = 0
        while not ring.is_full():
            token += 1
            ring.submit(_NOP, -1, token, address=0)
        return [(_WAKE, 8)]

    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        ring = FuseRing(device, 1 << 13)
        try:
            ring.flush()
            entries = [ring.new_entry(0) for _ in range(_N_SUBMISSIONS)]
            ring.answer_with(_Answers(ring, fill))
            assert ring.wait() == entries  # each of the queue was done, and came back
        finally:
            ring.close()


def test_memory_of_an_answer_that_was_not_submitted_is_not_given_back() -> None:
    content = b"x" * (1 << 17)

    def submit_one(ring: FuseRing) -> list[tuple[int, int]]:
        if ring.is_empty():
            ring.submit(_NOP, -1, 1, address=0)
        return []

    with Fd(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device:
        ring = FuseRing(device, len(content))
        try:
            ring.flush()
            entry = ring.new_entry(0)
            entry.answer(content)
            entry.is_ours = False  # committed
            ring.answer_with(_Answers(ring, submit_one))
            assert ring.wait() == []
            payload = ctypes.string_at(entry.address + mmap.PAGESIZE, len(content))
            assert payload == content
            ring.flush()
            assert ring.wait() == [entry]
            entry.is_ours = False
            ring.answer_with(_Answers(ring, lambda _ring: []))
            assert ring.wait() == []
            payload = ctypes.string_at(entry.address + mmap.PAGESIZE, len(content))
            assert not payload[1 << 16 :].strip(b"\0"), "the kernel has it: its memory is given back"
        finally:
            ring.close()
