"""trashd service install --uring: the machine's switch for FUSE over io_uring."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fusefs.cli import output
from fusefs.cli.service_install import FileOutcome, FileReport
from fusefs.core.uring_reasons import SWITCH, why_not, why_not_trusted
from fusefs.linux.uring_offer import enable, read_facts


def set_switch() -> None:
    """Set it, and warn where no mount can use it, or where this kernel may have faults in it."""
    try:
        enable()
        facts = read_facts()
        why, faults = why_not(facts), why_not_trusted(facts.release)
    except OSError as error:
        why, faults = f"{SWITCH}: {error.strerror}", None
    if why is not None:
        output.warn(f"no mount of this machine can use io_uring: {why}")
    elif faults is not None:
        output.warn(faults)


def tell_what_stays(told: Iterable[FileReport]) -> None:
    """Say that the switch outlives what sets it at boot, if that has gone."""
    gone = any(one.outcome is FileOutcome.REMOVED and one.path.endswith("/trashd-uring.conf") for one in told)
    if gone and read_facts().is_enabled:
        click.echo(f"FUSE over io_uring stays on until the machine restarts; now: echo N >{SWITCH}", err=True)
