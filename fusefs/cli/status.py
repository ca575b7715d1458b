"""trashd status."""

from __future__ import annotations

import os
import sys
import time

import click
from msgspec.structs import replace

from fusefs.cli import output, status_text
from fusefs.cli.json_objects import ServiceLife
from fusefs.cli.options import json_option
from fusefs.core.errors import NotRunning, TrashdError, Unwell, UsageError, errors_about
from fusefs.core.printable_names import printable
from fusefs.core.service_status import SeenStatus, Status, VolumePhase, VolumeStatus
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir


@click.command("status", short_help="Show what the reaper does.")
@click.option("--watch", is_flag=True, help="Show it live, until Ctrl-C.")
@json_option
def command(watch: bool, as_json: bool) -> int:
    """Show what the reaper service does: backlog, rate, pressure, what it waits for, free space, last errors.

    It reads files that the service keeps, so it is quick whatever there is to do, and everybody may. What orphans
    take is shown of your own, and root sees everybody's, as far as it is known (trashd du counts). Root's service is
    shown, and your own if you have one. Exit code 5: no service runs; 14: a volume had too many errors and rests, or
    the service hangs.

    \b
    Examples:
      trashd status
      trashd status --watch
      trashd status --json | jq '.volumes[] | {path, phase, n_due}'
    """
    if watch and as_json:
        raise UsageError("--watch with --json", "a program reads `trashd status --json` as often as it likes")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal", "leave it out, or use --json")
    if watch:
        from fusefs.cli.status_watch import watch_live

        watch_live(look)
        return 0
    return _tell(look(), as_json=as_json)


def look() -> list[tuple[bytes, SeenStatus]]:
    """Each service that lives and its directory, root's first; if none does, what the dead left.

    Raises  NotRunning if none ever ran
    """
    from fusefs.service.status_file import read_status

    found = []
    for directory in dict.fromkeys((SYSTEM_RUNTIME, runtime_dir())):
        with errors_about(directory):
            seen = read_status(directory)
        if seen is not None:
            found.append((directory, _with_held(directory, seen)))
    if not found:
        raise NotRunning
    return [(directory, seen) for directory, seen in found if seen.is_running] or found


def _with_held(directory: bytes, seen: SeenStatus) -> SeenStatus:
    """With what orphans take: the caller's own, for root everybody's."""
    from fusefs.service.held_files import read_held

    held = read_held(directory)
    volumes = tuple(replace(volume, held=held.get(volume.path, ())) for volume in seen.status.volumes)
    return seen._replace(status=replace(seen.status, volumes=volumes))


def _tell(services: list[tuple[bytes, SeenStatus]], *, as_json: bool) -> int:
    now_ns = time.time_ns()
    errors: list[TrashdError] = []
    for index, (directory, seen) in enumerate(services):
        if as_json:
            output.as_json(_life(directory, seen), _named(seen.status))
        else:
            print("\n".join([*[""] * bool(index), *status_text.lines(seen, now_ns)]))
        errors += _errors(directory, seen)
    return max((output.failed(error, as_json=as_json) for error in errors), default=0)


def _errors(directory: bytes, seen: SeenStatus) -> list[TrashdError]:
    """What a monitoring should hear of."""
    if not seen.is_running:
        return [NotRunning(f"the last one of {printable(directory)} had pid {seen.status.pid}")]
    return unwell(seen)


def unwell(seen: SeenStatus) -> list[TrashdError]:
    """What is wrong with a service that lives, and with its volumes."""
    found: list[TrashdError] = []
    if seen.is_stale():
        found.append(Unwell(f"pid {seen.status.pid} hangs", "its log says more: journalctl -u trashd-reaper"))
    return found + [Unwell(volume.root()) for volume in seen.status.volumes if _needs_help(volume)]


def _needs_help(volume: VolumeStatus) -> bool:
    """Whether a person should look: not if it is paused, or has another reaper.

    Nor at a user's own store, which that user can break at any time.
    """
    return volume.phase is VolumePhase.BROKEN and volume.owner is None


def _life(directory: bytes, seen: SeenStatus) -> ServiceLife:
    return ServiceLife(directory, seen.is_running, seen.is_stale(), round(seen.age_s, 3))


def _named(status: Status) -> Status:
    """A status for programs: paths as all of trashd's JSON has them, not quoted as in the file."""
    volumes = tuple(replace(volume, path=os.fsdecode(volume.root())) for volume in status.volumes)
    return replace(status, volumes=volumes)
