"""trashd pause, trashd resume."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import click

from fusefs.cli import output
from fusefs.cli.json_objects import PausedVolume
from fusefs.cli.options import DURATION, Command, PathBytes, json_option
from fusefs.core.errors import NotFound, NotPermitted, NotRunning, TrashdError
from fusefs.core.human_units import format_duration
from fusefs.core.printable_names import printable
from fusefs.core.service_status import VolumePhase, VolumeStatus
from fusefs.linux.children import user_name
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir

_PATIENCE_S, _GLANCE_S = 3.0, 0.05

volumes_argument = click.argument("volumes", type=PathBytes(), nargs=-1, metavar="[VOLUME…]")


@click.command("pause", cls=Command, short_help="Pause deletion by the reaper service on some or all volumes.")
@click.option(
    "--for", "duration_s", type=DURATION, metavar="DURATION", help="End the pause after DURATION, such as 2h."
)
@volumes_argument
@json_option
def command(duration_s: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Pause the reaper service on VOLUMEs, or on all volumes, until you run trashd resume, or until the next boot.

    The service releases a volume within a second, so that it can be unmounted. Orphans that are partly deleted stay as
    they are. Users can pause only their own reaper service. To protect one orphan from root's reaper, use trashd keep.

    \b
    Examples:
      trashd pause --for 2h
      trashd pause /scratch && umount /scratch
    """
    from fusefs.service.state_files import Pause, write_pause

    until = "until resumed" if duration_s is None else f"for {format_duration(duration_s)}"
    who = user_name(os.getuid())
    pause = Pause(f"paused by {who} {until}", None if duration_s is None else time.time() + duration_s)
    runtime = runtime_dir()
    for volume in named(volumes):
        if volume is not None and not os.path.lexists(volume):
            raise NotFound(volume, "name an existing directory")
        if refusal := _find_refusal(volume, runtime, "to keep an orphan, use trashd keep ID"):
            raise refusal
    for volume in named(volumes):
        write_pause(runtime, volume, pause)
        if as_json:
            output.as_json(PausedVolume(volume), pause)
        else:
            print(f"{format_volume(volume)}: {pause.why}")
        if volume is not None and not _stores_at(volume):
            output.warn(f"{format_volume(volume)}: currently has no trash store")
    _wait_until_let_go(runtime, named(volumes))
    if not is_running(runtime):
        which = "the reaper service" if os.geteuid() == 0 else "your reaper service"
        output.warn(f"{which} is not running; the pause applies when it starts")
    if None in named(volumes):
        for one in served_by_root():
            output.warn(f"{printable(one.root_path())}: root's reaper there is not paused; use trashd keep ID instead")
    return 0


def _find_refusal(volume: bytes | None, runtime: bytes, advice: str) -> NotPermitted | None:
    """Return an error if root's reaper serves the volume, so that the caller can neither pause nor resume it.

    volume  None for all volumes: an error only if root's reaper serves one, and the caller's own is not running
    """
    roots = served_by_root()
    if volume is None and (is_running(runtime) or not roots):
        return None
    there = [] if volume is None else _stores_at(volume)
    for one in roots:
        # The ID is not secret: another user's store may have the same one, so the owner must match, too.
        if volume is None or one.root_path() == volume or (one.id, one.owner or 0) in there:
            return NotPermitted(one.root_path(), f"root's reaper serves this volume; {advice}")
    return None


def served_by_root() -> list[VolumeStatus]:
    """Return the volumes that root's reaper serves for the caller; an empty list if the caller is root."""
    from fusefs.service.state_files import served_volumes

    if os.geteuid() == 0:
        return []
    with suppress(TrashdError, OSError):  # a service of another version writes another format
        served = [one for one in served_volumes(SYSTEM_RUNTIME) if one.owner in (None, os.geteuid())]
        return [one for one in served if one.phase not in (VolumePhase.ELSEWHERE, VolumePhase.GONE)]
    return []


def _stores_at(volume: bytes) -> list[tuple[str, int]]:
    """Return the volume IDs and owners of those stores in a directory that the caller can use."""
    from fusefs.store.find_stores import stores_at

    there = list[tuple[str, int]]()
    with suppress(TrashdError, OSError):
        for store in stores_at(Kernel(), volume, read_mounts()):
            with store:
                there.append((store.volume.id, store.owner))
    return there


def _wait_until_let_go(runtime: bytes, volumes: list[bytes | None]) -> None:
    """Wait briefly until a running reaper has released the volumes, since they are often unmounted next."""
    from fusefs.service.state_files import served_volumes

    let_go = (VolumePhase.PAUSED, VolumePhase.GONE, VolumePhase.ELSEWHERE, VolumePhase.UNPROVEN)
    ends_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_at:
        paused = [one for one in served_volumes(runtime) if any(_may_be_in(one, volume) for volume in volumes)]
        if all(one.phase in let_go for one in paused):
            return
        time.sleep(_GLANCE_S)


def _may_be_in(one: VolumeStatus, volume: bytes | None) -> bool:
    """Return whether a pause may apply to a served volume; the path of a user's own store may be only partly known."""
    if volume is None or one.owner is None:
        return volume in (None, one.root_path())
    public_path = one.public_path()
    return is_inside(public_path, volume) or (public_path != one.root_path() and is_inside(volume, public_path))


def named(volumes: tuple[bytes, ...]) -> list[bytes | None]:
    return [os.path.realpath(volume) for volume in volumes] or [None]


def format_volume(volume: bytes | None) -> str:
    return "all volumes" if volume is None else printable(volume)


def is_running(runtime: bytes) -> bool:
    from fusefs.service.state_files import read_status

    status = read_status(runtime)
    return status is not None and status.is_running


@click.command("resume", cls=Command, short_help="Resume deletion by the reaper service after a pause.")
@volumes_argument
@json_option
def resume_command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Resume deletion by the reaper service on VOLUMEs, or on all paused volumes if no VOLUME is given.

    \b
    Examples:
      trashd resume
      trashd resume /scratch
    """
    from fusefs.service.state_files import read_pauses, remove_pause

    runtime = runtime_dir()
    paused = named(volumes) if volumes else list(read_pauses(runtime, 0.0))
    codes, advice = [], "only root can resume it: run trashd resume as root"
    for volume in paused:
        if not remove_pause(runtime, volume):
            not_paused = NotFound(f"pause of {format_volume(volume)}", "trashd status shows paused volumes")
            error = _find_refusal(volume, runtime, advice) or not_paused
            codes.append(output.print_error(error, as_json=as_json))
        elif as_json:
            output.as_json(PausedVolume(volume))
        else:
            print(f"{format_volume(volume)}: resumed")
    if not paused and not is_running(runtime):
        error = _find_refusal(None, runtime, advice) or NotRunning()
        codes.append(output.print_error(error, as_json=as_json))
    return output.exit_code(codes)
