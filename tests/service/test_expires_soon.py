"""What is told before an orphan's term ends: by the running service, to a hook, once."""

import os
from pathlib import Path

import pytest

from fusefs.store.stage import SwapOptions
from tests.support.service_process import QUICK, configure, outwait, service
from tests.support.small_orphans import orphan_in, orphan_of
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root")

ALICE = 12001
TERM_S = 3600
SOON = SwapOptions(retention_s=TERM_S)
"""With `hooked` the hook runs a second after it came."""


def hooked(base: Path) -> str:
    """A configuration with a hook that writes a line for each event into `told`."""
    script = f'echo "$TRASHD_EVENT $TRASHD_UID $TRASHD_ID $TRASHD_SECONDS" >>{base}/told'
    when = f'user = "root"\nwarn_before = "{TERM_S - 1}s"\n'
    return f'{QUICK}[hooks]\n{when}on_expires_soon = ["/bin/sh", "-c", \'{script}\']\n'


def told(base: Path) -> list[list[str]]:
    try:
        return [line.split() for line in (base / "told").read_text().splitlines()]
    except FileNotFoundError:
        return []


def test_a_hook_is_told_whose_orphan_expires_soon_and_when(base: Path, volume: Path) -> None:
    os.chmod(volume, 0o777)
    with service(base, volume, config=hooked(base)) as running:
        identifier = orphan_of(ALICE, volume, SOON).id
        running.until(lambda: told(base))
        ((event, uid, container, seconds),) = told(base)
        assert (event, uid, container) == ("expires-soon", str(ALICE), identifier)
        assert TERM_S - 600 < float(seconds) <= TERM_S - 1


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_it_is_told_once_whatever_restarts_the_service(base: Path, volume: Path, ends: str) -> None:
    with service(base, volume, config=hooked(base)) as running:
        first = orphan_in(volume, "first", SOON).id
        running.until(lambda: told(base))
        running.reload()
        outwait(running, volume)
        # Killed before it has noted how far it is, it may tell the last again.
        told_ns = (base / "told").stat().st_mtime_ns
        running.until(lambda: (base / "clock.json").stat().st_mtime_ns > told_ns)
        getattr(running, ends)()
    with service(base, volume, config=hooked(base)) as running:
        outwait(running, volume)
        second = orphan_in(volume, "second", SOON).id
        running.until(lambda: len(told(base)) > 1)
    assert [line[2] for line in told(base)] == [first, second]


def test_what_was_due_to_be_told_while_no_service_ran_is_told_by_the_next(base: Path, volume: Path) -> None:
    with service(base, volume, config=hooked(base)) as running:
        outwait(running, volume)
        running.stop()
    identifier = orphan_in(volume, "job", SOON).id
    with service(base, volume, config=hooked(base)) as running:
        running.until(lambda: told(base))
    assert [line[2] for line in told(base)] == [identifier]


def test_who_keeps_it_for_longer_is_told_before_that_end(base: Path, volume: Path) -> None:
    with service(base, volume, config=hooked(base)) as running:
        identifier = orphan_in(volume, "job", SOON).id
        running.until(lambda: told(base))
        done_well("keep", "--for", f"{TERM_S + 1}s", "--volume", volume, identifier)
        running.until(lambda: len(told(base)) > 1)
    assert [line[2] for line in told(base)] == [identifier] * 2


def test_of_what_is_kept_no_longer_than_that_nothing_is_told(base: Path, volume: Path) -> None:
    with service(base, volume, config=hooked(base)) as running:
        orphan_in(volume, "short", SwapOptions(retention_s=TERM_S - 1))
        last = orphan_in(volume, "long", SOON).id
        running.until(lambda: told(base))
        outwait(running, volume)
    assert [line[2] for line in told(base)] == [last]


def test_nobody_is_told_who_did_not_ask(base: Path, volume: Path) -> None:
    with service(base, volume, config=QUICK) as running:
        orphan_in(volume, "job", SOON)
        outwait(running, volume)
        configure(base, hooked(base))
        running.reload()
        outwait(running, volume)
        second = orphan_in(volume, "second", SOON).id
        running.until(lambda: second in {line[2] for line in told(base)})
