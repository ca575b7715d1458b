"""trashd pause."""

from __future__ import annotations

import os
import time

import click

from fusefs.cli import output
from fusefs.cli.options import Duration, PathBytes, json_option
from fusefs.core.durations import format_duration
from fusefs.core.names import STORE, printable
from fusefs.linux.credentials import user_name

_PATIENCE_S, _GLANCE_S = 3.0, 0.05

volumes_argument = click.argument("volumes", type=PathBytes(), nargs=-1, metavar="[VOLUME…]")


@click.command("pause", short_help="Have the reaper leave volumes alone.")
@click.option("--for", "duration_s", type=Duration(), metavar="DURATION", help="Go on by itself after that (2h, 1d).")
@volumes_argument
@json_option
def command(duration_s: int | None, volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Have the reaper leave volumes alone, all of them if none is named, until it is resumed or the machine restarts.

    It lets go of a volume within a second, so that it can be unmounted. What was being reaped stays as it is.

    \b
    Examples:
      trashd pause --for 2h
      trashd pause /scratch && umount /scratch
    """
    from fusefs.linux.places import runtime_dir
    from fusefs.reaper.pause import Pause, write_pause

    until = "until it is resumed" if duration_s is None else f"for {format_duration(duration_s)}"
    who = user_name(os.getuid())
    pause = Pause(f"paused by {who} {until}", None if duration_s is None else time.time() + duration_s)
    runtime = runtime_dir()
    for volume in named(volumes):
        write_pause(runtime, volume, pause)
        if as_json:
            output.as_json({"volume": output.plain(volume), **output.plain(pause)})
        else:
            print(f"{told(volume)}: {pause.why}")
        if volume is not None and not os.path.lexists(os.path.join(volume, STORE)):
            output.warn(f"{told(volume)}: there is no trash store now")
    _wait_until_let_go(runtime, named(volumes))
    if not is_running(runtime):
        output.warn("no reaper runs now; the next one will be paused")
    return 0


def _wait_until_let_go(runtime: bytes, volumes: list[bytes | None]) -> None:
    """Give a running reaper the moment that it needs: who pauses a volume often wants to unmount it next."""
    from fusefs.core.status import Phase
    from fusefs.reaper.status import read_status

    ends_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_at:
        seen = read_status(runtime)
        if seen is None or not seen.is_running:
            return
        paused = [one for one in seen.status.volumes if None in volumes or one.root() in volumes]
        if all(one.phase in (Phase.PAUSED, Phase.GONE, Phase.ELSEWHERE) for one in paused):
            return
        time.sleep(_GLANCE_S)


def named(volumes: tuple[bytes, ...]) -> list[bytes | None]:
    return [os.path.realpath(volume) for volume in volumes] or [None]


def told(volume: bytes | None) -> str:
    return "all volumes" if volume is None else printable(volume)


def is_running(runtime: bytes) -> bool:
    from fusefs.reaper.status import read_status

    seen = read_status(runtime)
    return seen is not None and seen.is_running
