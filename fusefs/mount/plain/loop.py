"""pyfuse3's loop on an open /dev/fuse: libfuse reads each request, INIT first, and a task of trio serves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pyfuse3

from fusefs.mount.plain.handlers import PlainHandlers

_N_TASKS = 4096
"""Requests under way at a time: those that wait must leave others for whoever does not."""


@contextmanager
def session(handlers: PlainHandlers, device: int) -> Iterator[None]:
    """A session of libfuse's on /dev/fuse, which stays its owner's."""
    pyfuse3.init(handlers, f"/dev/fd/{os.dup(device)}", set())  # libfuse closes that
    try:
        yield
    finally:
        pyfuse3.close(unmount=False)


async def answer_requests() -> None:
    """Answer requests until the connection is gone, or cancelled. Checkpoint  everywhere"""
    await pyfuse3.main(min_tasks=1, max_tasks=_N_TASKS)
