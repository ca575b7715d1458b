"""Every call failing once, with each errno that a disk, a quota or a limit can give: perhaps an error, never a loss."""

import errno
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from tests.support.covering_sets import runs_every_case
from tests.support.crash_invariants import hold_when_failing, spread
from tests.support.crash_scenarios import settle_without_loss
from tests.support.verb_scenarios import SCENES

pytestmark = pytest.mark.needs("root")

ERRNOS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EXDEV)
FUSEFS = Path(__file__).resolve().parents[2] / "fusefs"
BELOW_THE_HOOK = ("syscalls.py", "io_uring.py")
SAMPLED = (errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EMFILE)
"""Errnos that the store treats like one of the others, as the test below shows: tried with `make every`."""
BY_ROOT = ("swap", "swap-two-rename", "rm", "adopt", "drop", "restore-late", "restore-two-rename-late", "keep", "reap")
RECOVERIES = ("recover-swap", "recover-swap-in-the-gap", "recover-restore", "recover-restore-in-the-gap")
WITH_LOANS = ("swap-lent", "restore-late-lent", "adopt-lent")
CASES = spread(product(BY_ROOT, ERRNOS))
CASES |= spread(product(BY_ROOT if runs_every_case() else (), SAMPLED))
# Recovery tells EACCES and EXDEV by one name: out of reach.
CASES |= spread(product((*RECOVERIES, "swap-for-owner"), (errno.EIO, errno.ENOSPC, errno.EXDEV)))
CASES |= spread(product(WITH_LOANS, (errno.EACCES, errno.EIO)))


@pytest.mark.parametrize(("name", "number"), CASES, ids=lambda value: errno.errorcode.get(value, value))
def test_nothing_is_lost_when_any_call_fails(volume: Path, name: str, number: int) -> None:
    settle = partial(settle_without_loss, SCENES[name], volume)
    hold_when_failing(SCENES[name], volume, number, settle, CASES[name, number])


@pytest.mark.parametrize("number", SAMPLED, ids=errno.errorcode.get)
def test_the_store_does_not_tell_sampled_errnos_apart(number: int) -> None:
    """It asks for none of them, but beside EACCES, and a full quota is a full disk; it may say one itself.

    What is below the hook never meets a hook's.
    """
    name = f"errno.{errno.errorcode[number]}"
    code = {*FUSEFS.glob("store/*.py"), *FUSEFS.glob("linux/*.py")} - {FUSEFS / "linux" / one for one in BELOW_THE_HOOK}
    said = [line for path in code for line in path.read_text().splitlines() if name in line]
    lines = [line for line in said if "raise " not in line and "errno.EACCES" not in line]
    assert lines == (["NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)"] if number == errno.EDQUOT else [])
