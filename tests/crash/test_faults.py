"""Every call failing once, with each errno that a disk, a quota or a limit can give: perhaps an error, never a loss."""

import errno
from functools import partial
from pathlib import Path

import pytest

from tests.support.crash_invariants import hold_when_failing
from tests.support.crash_scenarios import EVERY_CALL, settle_without_loss
from tests.support.verb_scenarios import SCENES

pytestmark = pytest.mark.needs("root")

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EXDEV)
FUSEFS = Path(__file__).resolve().parents[2] / "fusefs"
BELOW_THE_GATE = ("syscalls.py", "io_uring.py")
SAMPLED = (errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EMFILE)
"""Errnos that the store treats like one of the others: tried on a swap and on a restore alone, on all in the soak."""
BY_ROOT = ("swap", "swap-two-rename", "rm", "adopt", "restore-late", "restore-two-rename-late", "keep", "reap")
RECOVERIES = ("recover-swap", "recover-swap-in-the-gap", "recover-restore", "recover-restore-in-the-gap")
WITH_LOANS = ("swap-lent", "restore-late-lent", "adopt-lent")
CASES = [
    *((name, number) for name in BY_ROOT for number in ERRNOS),
    *((name, number) for name in (BY_ROOT if EVERY_CALL else ("swap", "restore-late")) for number in SAMPLED),
    # Recovery tells EACCES and EXDEV by one name: out of reach.
    *((name, number) for name in RECOVERIES for number in (errno.EIO, errno.ENOSPC, errno.EXDEV)),
    *(("swap-for-owner", number) for number in (errno.EIO, errno.ENOSPC, errno.EXDEV)),
    # What errno it is makes no difference to a loan.
    *((name, number) for name in WITH_LOANS for number in (errno.EACCES, errno.EIO)[: 1 + EVERY_CALL]),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "number"), CASES, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    hold_when_failing(SCENES[name], volume, number, partial(settle_without_loss, SCENES[name], volume))


@pytest.mark.parametrize("number", SAMPLED, ids=errno.errorcode.get)
def test_the_store_does_not_tell_sampled_errnos_apart(number: int) -> None:
    """It asks for none of them, but beside EACCES, and a full quota is a full disk; it may say one itself.

    What is below the hook never meets a hook's.
    """
    name = f"errno.{errno.errorcode[number]}"
    code = {*FUSEFS.glob("store/*.py"), *FUSEFS.glob("linux/*.py")} - {FUSEFS / "linux" / one for one in BELOW_THE_GATE}
    said = [line for path in code for line in path.read_text().splitlines() if name in line]
    lines = [line for line in said if "raise " not in line and "errno.EACCES" not in line]
    assert lines == (["FULL = (errno.ENOSPC, errno.EDQUOT)"] if number == errno.EDQUOT else [])
