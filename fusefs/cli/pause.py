"""trashd pause."""

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


@click.command("pause", cls=Command, short_help="Have the reaper leave volumes alone.")
@click.option("--for", "duration_s", type=DURATION, metavar="DURATION", help="Go on by itself after that (2h, 1d).")
@volumes_argument
@json_option
def command(duration_s: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Have the reaper leave volumes alone, all of them if none is named, until it is resumed or the machine restarts.

    It lets go of a volume within a second, so that it can be unmounted. What was being reaped stays as it is. Whoever
    isn't root pauses his own reaper alone, and is refused where root's serves: `trashd keep` holds an orphan of his.

    \b
    Examples:
      trashd pause --for 2h
      trashd pause /scratch && umount /scratch
    """
    from fusefs.service.state_files import Pause, write_pause

    until = "until it is resumed" if duration_s is None else f"for {format_duration(duration_s)}"
    who = user_name(os.getuid())
    pause = Pause(f"paused by {who} {until}", None if duration_s is None else time.time() + duration_s)
    runtime = runtime_dir()
    for volume in named(volumes):
        if volume is not None and not os.path.lexists(volume):
            raise NotFound(volume, "name a directory that is there; resume takes a path that is gone, too")
        _refuse_roots(volume, runtime)
    for volume in named(volumes):
        write_pause(runtime, volume, pause)
        if as_json:
            output.as_json(PausedVolume(volume), pause)
        else:
            print(f"{told(volume)}: {pause.why}")
        if volume is not None and not _stores_at(volume):
            output.warn(f"{told(volume)}: there is no trash store now")
    _wait_until_let_go(runtime, named(volumes))
    if not is_running(runtime):
        whose = "no reaper" if os.geteuid() == 0 else "no reaper of yours"
        output.warn(f"{whose} runs now; the next one will be paused")
    if None in named(volumes):
        for one in served_by_root():
            output.warn(f"{printable(one.root())}: root's reaper serves it, and goes on; trashd keep holds an orphan")
    return 0


def _refuse_roots(volume: bytes | None, runtime: bytes) -> None:
    """Raise NotPermitted where root's reaper serves, which no user pauses: for all, if it is the only one."""
    roots = served_by_root()
    if volume is None and (is_running(runtime) or not roots):
        return
    there = [] if volume is None else _stores_at(volume)
    for one in roots:
        # An id is no secret: a user's own store may have the same.
        if volume is None or one.root() == volume or (one.id, one.owner or 0) in there:
            hint = "ask root, or hold what is yours: trashd keep ID"
            raise NotPermitted(f"root's reaper serves {printable(one.root())}", hint)


def served_by_root() -> list[VolumeStatus]:
    """The volumes that root's reaper serves for a caller that is another user; none for root."""
    from fusefs.service.state_files import served_volumes

    if os.geteuid() == 0:
        return []
    with suppress(TrashdError, OSError):  # of another version
        served = [one for one in served_volumes(SYSTEM_RUNTIME) if one.owner in (None, os.geteuid())]
        return [one for one in served if one.phase not in (VolumePhase.ELSEWHERE, VolumePhase.GONE)]
    return []


def _stores_at(volume: bytes) -> list[tuple[str, int]]:
    """The ids of the stores in a directory that the caller may use, and their owners."""
    from fusefs.store.find_stores import stores_at

    there = list[tuple[str, int]]()
    with suppress(TrashdError, OSError):
        for store in stores_at(Kernel(), volume, read_mounts()):
            with store:
                there.append((store.volume.id, store.owner))
    return there


def _wait_until_let_go(runtime: bytes, volumes: list[bytes | None]) -> None:
    """Give a running reaper the moment that it needs: a paused volume is often unmounted next."""
    from fusefs.service.state_files import served_volumes

    let_go = (VolumePhase.PAUSED, VolumePhase.GONE, VolumePhase.ELSEWHERE, VolumePhase.UNPROVEN)
    ends_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_at:
        paused = [one for one in served_volumes(runtime) if any(_may_be_in(one, volume) for volume in volumes)]
        if all(one.phase in let_go for one in paused):
            return
        time.sleep(_GLANCE_S)


def _may_be_in(one: VolumeStatus, volume: bytes | None) -> bool:
    """Whether a pause of a directory holds for what is served: of a user's own store the path may be told in part."""
    if volume is None or one.owner is None:
        return volume in (None, one.root())
    seen = one.shown()
    return is_inside(seen, volume) or (seen != one.root() and is_inside(volume, seen))


def named(volumes: tuple[bytes, ...]) -> list[bytes | None]:
    return [os.path.realpath(volume) for volume in volumes] or [None]


def told(volume: bytes | None) -> str:
    return "all volumes" if volume is None else printable(volume)


def is_running(runtime: bytes) -> bool:
    from fusefs.service.state_files import read_status

    seen = read_status(runtime)
    return seen is not None and seen.is_running


@click.command("resume", cls=Command, short_help="Let the reaper go on.")
@volumes_argument
@json_option
def resume_command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Let the reaper go on with volumes, with all of them if none is named.

    \b
    Examples:
      trashd resume
      trashd resume /scratch
    """
    from fusefs.service.state_files import read_pauses, remove_pause

    runtime = runtime_dir()
    paused = named(volumes) if volumes else list(read_pauses(runtime, 0.0))
    codes = []
    for volume in paused:
        if not remove_pause(runtime, volume):
            error = NotFound(f"no pause of {told(volume)}", "trashd status shows what is paused")
            codes.append(output.failed(error, as_json=as_json))
        elif as_json:
            output.as_json(PausedVolume(volume))
        else:
            print(f"{told(volume)}: goes on")
    if not paused and not is_running(runtime):
        codes.append(output.failed(NotRunning(), as_json=as_json))
    return output.exit_code(codes)
