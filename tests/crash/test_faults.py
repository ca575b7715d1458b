"""Every call failing once, with each errno that a disk, a quota or a limit can give: perhaps an error, never a loss."""

import errno
import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.errors import TrashdError, from_os
from tests.support.acts import SCENES
from tests.support.scenes import Before, Scene, assert_nothing_lost, home, look, settle
from tests.support.store import FailingAt
from tests.support.users import as_user
from tests.support.volumes import tmpfs_volume

pytestmark = pytest.mark.needs("root")

ERRNOS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EXDEV, errno.EROFS, errno.EINTR, errno.EMFILE,
)  # fmt: skip
BY_ROOT = (
    "swap", "swap-two-rename", "rm", "adopt", "restore-late", "restore-two-rename-late", "keep", "reap",
    "recover-swap", "recover-swap-in-the-gap", "recover-restore", "recover-restore-in-the-gap",
)  # fmt: skip
WITH_LOANS = ("swap-lent", "restore-late-lent", "adopt-lent")
CASES = [
    *((name, number) for name in BY_ROOT for number in ERRNOS),
    # What errno it is makes no difference to a loan.
    *((name, number) for name in WITH_LOANS for number in (errno.EIO, errno.EACCES)),
]


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield path


def fail(scene: Scene, volume: Path, n: int, number: int) -> str | None:
    """The call that failed, None if the act makes fewer; the act then succeeded or told a clear error."""
    gate = FailingAt(n, number)
    before = len(os.listdir("/proc/self/fd"))
    message = "it succeeded"
    try:
        scene.run(volume, gate)
    except TrashdError as error:
        message = error.message()
    except OSError as error:
        message = from_os(error, volume.name).message()
    assert message
    leaked = len(os.listdir("/proc/self/fd")) - before
    if leaked:
        raise AssertionError(f"{leaked} fds leaked")
    return gate.failed


def assert_law(scene: Scene, volume: Path, number: int) -> None:
    before: Before | None = None
    for n in itertools.count():
        # An act that came to nothing has left everything as it was: no need to make it again.
        before = before if before is not None and look(volume) == before else scene.set_up(volume)
        failed = None
        try:
            if scene.uid:
                failed = as_user(scene.uid, partial(fail, scene, volume, n, number))
            else:
                failed = fail(scene, volume, n, number)
            if scene.is_gapless:
                assert home(volume).is_dir()
            settle(volume)
            assert_nothing_lost(scene, volume, before)
        except BaseException as error:
            error.add_note(f"{errno.errorcode[number]} at call {n}, {failed}")
            raise
        if failed is None:
            return


@pytest.mark.parametrize(("name", "number"), CASES, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    assert_law(SCENES[name], volume, number)
