"""trashd status: what the reaper does, and the mounts."""

from __future__ import annotations

import os
import sys
import time

import click
from msgspec.structs import replace

from fusefs.cli import output, status_mounts, status_text
from fusefs.cli.json_objects import ServiceLife
from fusefs.cli.options import json_option
from fusefs.core.errors import NotRunning, TrashdError, Unwell, UsageError, errors_about
from fusefs.core.mount_counters import SeenMount
from fusefs.core.printable_names import printable
from fusefs.core.service_status import SeenStatus, Status, VolumePhase, VolumeStatus
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir


@click.command("status", short_help="Show what the reaper and the mounts do.")
@click.option("--watch", is_flag=True, help="Show the reaper live, until Ctrl-C.")
@click.option("--prometheus", is_flag=True, help="Print the numbers of the mounts in Prometheus' text format.")
@json_option
def command(watch: bool, prometheus: bool, as_json: bool) -> int:
    """Show what the reaper service does: backlog, rate, pressure, what it waits for, free space, last errors. Show the
    mounts of trashd: how many requests, how fast the answers, what their daemons hold.

    It reads files that the service and the daemons of mounts keep, so it is quick even if a mount hangs, and everybody
    may. What orphans take is shown of your own, and root sees everybody's, as far as it is known (trashd du counts).
    Root's service and mounts are shown, and your own. Exit code 5: no service runs, or the daemon of a mount is gone;
    14: a volume had too many errors and rests, or the service hangs.

    \b
    Examples:
      trashd status
      trashd status --watch
      trashd status --json | jq '.volumes[]? | {path, phase, n_due}'
      trashd status --json | jq '.mounts[]?.operations.lookup.p99_ns'
      trashd status --prometheus
    """
    if watch and as_json:
        raise UsageError("--watch with --json", "a program reads `trashd status --json` as often as it likes")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal", "leave it out, or use --json")
    if prometheus:
        if watch or as_json:
            raise UsageError("--prometheus with --watch or --json", "it is one or the other")
        return _print_metrics()
    if watch:
        from fusefs.cli.status_watch import watch_live

        watch_live(look)
        return 0
    mounts, errors = status_mounts.find_mounts()
    try:
        services = look()
    except TrashdError as error:
        services, errors = [], [error, *errors]
    return _tell(services, mounts, errors, as_json=as_json)


def _print_metrics() -> int:
    from fusefs.mount.places.mount_metrics import prometheus_text

    mounts, errors = status_mounts.find_mounts()
    print(prometheus_text(mounts), end="")
    return max((output.failed(error) for error in errors), default=0)


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
    from fusefs.service.status_file import read_held

    held = read_held(directory)
    volumes = tuple(replace(volume, held=held.get(volume.path, ())) for volume in seen.status.volumes)
    return seen._replace(status=replace(seen.status, volumes=volumes))


def _tell(
    services: list[tuple[bytes, SeenStatus]], mounts: list[SeenMount], errors: list[TrashdError], *, as_json: bool
) -> int:
    now_ns = time.time_ns()
    for index, (directory, seen) in enumerate(services):
        if as_json:
            output.as_json(_life(directory, seen), _named(seen.status))
        else:
            print("\n".join([*[""] * bool(index), *status_text.lines(seen, now_ns)]))
        errors += _errors(directory, seen)
    if mounts and as_json:
        output.as_json(status_mounts.as_object(mounts))
    elif mounts:
        print("\n".join([*[""] * bool(services), *status_mounts.lines(mounts, now_ns)]))
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
