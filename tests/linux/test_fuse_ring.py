"""A ring of FUSE's, without a mount."""

from __future__ import annotations

import os

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.fuse_ring import FuseRing

pytestmark = pytest.mark.needs("root", "fuse", "uring")


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
