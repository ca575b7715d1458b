"""trashd resume."""

from __future__ import annotations

import click

from fusefs.cli import output
from fusefs.cli.pause import is_running, named, told, volumes_argument
from fusefs.core.errors import NotFound, NotRunning


@click.command("resume", short_help="Let the reaper go on.")
@volumes_argument
def command(volumes: tuple[bytes, ...]) -> int:
    """Let the reaper go on with volumes, with all of them if none is named.

    \b
    Examples:
      trashd resume
      trashd resume /scratch
    """
    from fusefs.linux.places import runtime_dir
    from fusefs.reaper.pause import read_pauses, remove_pause

    runtime = runtime_dir()
    paused = named(volumes) if volumes else list(read_pauses(runtime, 0.0))
    codes = []
    for volume in paused:
        if remove_pause(runtime, volume):
            print(f"{told(volume)}: goes on")
        else:
            codes.append(output.failed(NotFound(f"no pause of {told(volume)}", "trashd status shows what is paused")))
    if not paused and not is_running(runtime):
        codes.append(output.failed(NotRunning()))
    return output.exit_code(codes)
