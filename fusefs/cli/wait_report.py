"""`--wait` of swap and reap: what users and programs see meanwhile, and what is printed at the end."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from shutil import get_terminal_size

from fusefs.cli import output
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import SwapBatch, swap_all
from fusefs.core.errors import Incomplete, TrashdError, from_os
from fusefs.core.human_units import format_duration, format_size
from fusefs.core.printable_names import printable
from fusefs.core.results import Waited
from fusefs.linux.kernel import Kernel
from fusefs.store.swap import Swapped


def swap_and_wait(batch: SwapBatch, goal_bytes: int, keep_for_s: int) -> int:
    """Swap one path after the other, then wait volume by volume; the exit code.

    goal_bytes  what has to come back on each; 0: all trees are gone
    keep_for_s  the retention that the user asked for; 0 if it is given up
    """
    from fusefs.waiting.wait_for_space import VolumeWait

    volumes: dict[bytes, VolumeWait] = {}

    def after(swapped: Swapped) -> int:
        base = swapped.base()
        if base not in volumes:
            volumes[base] = VolumeWait(Kernel(), base, owned, goal_bytes)
        volumes[base].add_swapped(swapped)
        return 0

    with ExitStack() as owned:
        code = swap_all(batch._replace(after=after))
        sys.stdout.flush()  # its reader knows now that the names are free
        if keep_for_s and not batch.json_lines:
            output.warn(f"nothing may be reaped before its retention ends, in {format_duration(keep_for_s)}")
        codes, show_progress = [code] if code else [], partial(_show_progress, batch.json_lines)
        stop = owned.enter_context(StopSignals())
        for base, volume in volumes.items():
            try:
                waited = volume.follow(show_progress, stop, keeps=bool(keep_for_s))
                show_progress("")
                codes.append(print_waited(waited, as_json=batch.json_lines))
            except (TrashdError, OSError) as error:
                show_progress("")
                codes.append(output.failed(from_os(error, base), as_json=batch.json_lines))
            if stop():
                return stop.exit_code()
    return output.exit_code(codes)


def print_waited(waited: Waited, *, as_json: bool) -> int:
    """Print how much space came back on a volume, and what keeps the rest; the exit code."""
    if as_json:
        output.as_json(waited)
    else:
        print(f"{printable(waited.volume)}: {format_size(waited.came_bytes)} came back")
        for reason in waited.reasons:
            print(f"  {format_size(reason.n_bytes)}: {reason.detail}" if reason.n_bytes else f"  {reason.detail}")
        if waited.hint:
            print(f"  hint: {waited.hint}", file=sys.stderr)
    return 0 if waited.is_reached else Incomplete.exit_code


def _show_progress(as_json: bool, text: str) -> None:
    """Draw the line of a terminal that shows the progress."""
    if not as_json and sys.stderr.isatty():
        os.write(2, b"\r" + text[: get_terminal_size().columns - 1].encode() + b"\x1b[K")
