"""`trashd reap --paced` beside a real neighbour, on a real block device."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.many_files import fill
from tests.support.real_filesystems import loop_volume
from tests.support.trashd_command import done_well, swapped

pytestmark = pytest.mark.needs("root")

SILENT_S = 0.5
"""A neighbour who says nothing for longer need not be heard: far less than a reap takes at its rate."""


@contextmanager
def fsyncing(root: Path) -> Iterator[Callable[[], float]]:
    """A process that writes and fsyncs all the time; it has begun when the `with` does.

    Yields  for how many seconds it was silent at most: a busy machine keeps it waiting too
    """
    fd = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
    has_begun, ends = threading.Event(), threading.Event()
    longest_s = 0.0

    def work() -> None:
        nonlocal longest_s
        spoke_s = time.monotonic()
        while not ends.is_set():
            # Always the same block: however long it takes, it never fills the volume.
            os.pwrite(fd, bytes(4096), 0)
            os.fdatasync(fd)
            now_s = time.monotonic()
            longest_s, spoke_s = max(longest_s, now_s - spoke_s), now_s
            has_begun.set()

    neighbour = threading.Thread(target=work)
    neighbour.start()
    has_begun.wait()
    try:
        yield lambda: longest_s
    finally:
        ends.set()
        neighbour.join()
        os.close(fd)


def test_it_says_to_whom_it_yields_and_comes_to_its_end() -> None:
    with loop_volume("ext4", 256) as root:
        done_well("init", root)
        says_so, silent_s = False, math.inf
        while not says_so and silent_s > SILENT_S:
            identifier = str(swapped(fill(root / "victim", 600))["id"])
            with fsyncing(root) as longest_s:
                done = done_well("reap", "--now", "--paced", "--max-rate", "200", "--volume", root, identifier)
                says_so, silent_s = "trashd: yielding: " in done.err, longest_s()
            assert done.out.startswith(f"{identifier}: 601 entries removed")
        assert says_so
