"""trashd resume."""

from __future__ import annotations

import click

from fusefs.cli import output
from fusefs.cli.json_objects import PausedVolume
from fusefs.cli.options import json_option
from fusefs.cli.pause import is_running, named, told, volumes_argument
from fusefs.core.errors import NotFound, NotRunning


@click.command("resume", short_help="Let the reaper go on.")
@volumes_argument
@json_option
def command(volumes: tuple[bytes, ...], as_json: bool) -> int:
    """Let the reaper go on with volumes, with all of them if none is named.

    \b
    Examples:
      trashd resume
      trashd resume /scratch
    """
    from fusefs.linux.runtime_directories import runtime_dir
    from fusefs.service.pause_files import read_pauses, remove_pause

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
