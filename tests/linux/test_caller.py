"""Acting as somebody else: for a block, whatever happens in it, and blocks within blocks."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest

from fusefs.linux.caller import created_by, written_by
from tests.support.asking import Somebody

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 70_001, 70_002


def fsuid() -> int:
    """This thread's."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[4])


def test_who_writes_is_another_for_the_block_alone() -> None:
    with written_by(ALICE):
        inside = fsuid()
    assert (inside, fsuid()) == (ALICE, 0)


def test_a_write_that_fails_leaves_nobody_else() -> None:
    with suppress(OSError), written_by(ALICE):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert fsuid() == 0


def test_who_writes_while_another_creates_gives_him_back() -> None:
    with created_by(Somebody(BOB, BOB, 1, 0o022)):
        with written_by(ALICE):
            inside = fsuid()
        assert (inside, fsuid()) == (ALICE, BOB)
    assert fsuid() == 0


def test_root_writes_as_who_is_acting() -> None:
    with created_by(Somebody(BOB, BOB, 1, 0o022)), written_by(0):
        assert fsuid() == BOB
    assert fsuid() == 0
