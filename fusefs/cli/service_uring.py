"""trashd service install --uring: the machine's switch for FUSE over io_uring, and whether this kernel may have it."""

from __future__ import annotations

from collections.abc import Iterable

import click

from fusefs.cli import output
from fusefs.cli.service_install import FileOutcome, FileReport
from fusefs.core.errors import Refused
from fusefs.core.mount_options import UringMode
from fusefs.core.uring_reasons import SWITCH, why_not
from fusefs.linux.uring_offer import enable, read_facts, take_back


def set_switch() -> None:
    """Set it if this kernel stands the trial; warn where no mount could use it.

    Raises  Refused: what its mounts do wrong; the switch is as it was
    """
    from fusefs.mount.life.uring_trial import failures

    wrong: list[str] = []
    try:
        has_set = enable()
        why = why_not(UringMode.ON, read_facts())
        if why is None:
            wrong = failures()
        if has_set and wrong:
            take_back()
    except OSError as error:
        why = f"{SWITCH}: {error.strerror}"
    if wrong:
        raise Refused(f"FUSE over io_uring on this kernel: {'; '.join(wrong)}", "leave out --uring; nothing was done")
    if why is not None:
        output.warn(f"as things are, no mount gets its messages by io_uring: {why}")


def tell_what_stays(told: Iterable[FileReport]) -> None:
    """Say that the switch outlives what sets it at boot, if that has gone."""
    gone = any(one.outcome is FileOutcome.REMOVED and one.path.endswith("/trashd-uring.conf") for one in told)
    if gone and read_facts().is_enabled:
        click.echo(f"FUSE over io_uring stays on until the machine restarts; now: echo N >{SWITCH}", err=True)


def is_all_that_lacks() -> bool:
    """Whether mounts would have their messages by io_uring if the switch were set."""
    facts = read_facts()
    return facts.is_enabled is False and why_not(UringMode.AUTO, facts._replace(is_enabled=True)) is None
