"""Changes of the mount table are told, each of them."""

import select
from pathlib import Path

import pytest
import trio

from fusefs.linux.mountinfo import MountWatch
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

_LIMIT_S = 10.0


def is_told(watch: MountWatch, limit_s: float) -> bool:
    return bool(select.select([watch], [], [], limit_s)[0])


def test_what_was_mounted_before_is_not_told() -> None:
    with tmpfs_volume(), MountWatch() as watch:
        assert not is_told(watch, 0)


def test_a_mount_and_an_unmount_are_told() -> None:
    with MountWatch() as watch:
        with tmpfs_volume():
            assert is_told(watch, _LIMIT_S)
            watch.seen()
        assert is_told(watch, _LIMIT_S)


def test_what_changes_while_nobody_waits_is_told_to_an_event_loop() -> None:
    async def wait() -> None:
        with MountWatch() as watch:
            for _ in range(3):
                with tmpfs_volume():
                    with trio.fail_after(_LIMIT_S):
                        await trio.lowlevel.wait_readable(watch)
                    watch.seen()

    trio.run(wait)


def test_it_lets_go_of_everything() -> None:
    n_before = len(list(Path("/proc/self/fd").iterdir()))
    with MountWatch():
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) == n_before
