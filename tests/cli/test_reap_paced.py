"""`trashd reap --paced` beside a real neighbour, on a real block device."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.bulk import fill
from tests.support.command import done_well, swapped
from tests.support.volumes import loop_volume

pytestmark = pytest.mark.needs("root")


@contextmanager
def fsyncing(root: Path) -> Iterator[None]:
    """A neighbour who writes and fsyncs all the time; he has begun when the `with` does."""
    fd = os.open(root / "log", os.O_WRONLY | os.O_CREAT)
    has_begun, ends = threading.Event(), threading.Event()

    def work() -> None:
        while not ends.is_set():
            # Always the same block: however long it takes, he never fills the volume.
            os.pwrite(fd, bytes(4096), 0)
            os.fdatasync(fd)
            has_begun.set()

    neighbour = threading.Thread(target=work)
    neighbour.start()
    has_begun.wait()
    try:
        yield
    finally:
        ends.set()
        neighbour.join()
        os.close(fd)


def test_it_says_to_whom_it_yields_and_comes_to_its_end() -> None:
    with loop_volume("ext4", 256) as root:
        done_well("init", root)
        fill(root / "victim", 3000)
        identifier = str(swapped(root / "victim")["id"])
        with fsyncing(root):
            done = done_well("reap", "--now", "--paced", "--volume", root, identifier)
        assert "trashd: yielding: " in done.err
        assert done.out.startswith(f"{identifier}: 3,001 entries removed")
