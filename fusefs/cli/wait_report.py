"""`--wait` of swap and reap: what users and programs see meanwhile, and what is printed at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from fusefs.cli import output
from fusefs.cli.json_objects import WaitAdvice
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import SwapBatch, SwapVerb, swap_all
from fusefs.core.durations import format_duration
from fusefs.core.errors import Incomplete, TrashdError, UsageError, from_os
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.sizes import format_size
from fusefs.core.space_goal import SpaceGoal, Waited, WaitReason, WaitReasonKind
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped

_NAMED_MAX = 3
_TYPICAL_COLUMNS = 80


def swap_and_wait(batch: SwapBatch, goal: SpaceGoal, keep_for_s: int) -> int:
    """Swap one path after the other, then wait volume by volume; the exit code.

    keep_for_s  the retention that the user asked for; 0 if it is given up
    """
    from fusefs.waiting.wait_for_space import SwapWait

    def after(swapped: Swapped) -> int:
        swap_wait.add(swapped)
        return batch.after(swapped)

    with SwapWait(goal, keeps=bool(keep_for_s)) as swap_wait:
        code = swap_all(batch._replace(verb=_refuse_uncounted(goal, batch.verb), after=after))
        sys.stdout.flush()  # its reader knows now that the names are free
        if keep_for_s and not batch.json_lines:
            output.warn(f"nothing may be reaped before its retention ends, in {format_duration(keep_for_s)}")
        codes = [code] if code else []
        show_progress = partial(_show_progress, batch.json_lines)
        with StopSignals() as stop:
            for base, orphans in swap_wait.orphans.items():
                try:
                    waited = swap_wait.wait_for(base, show_progress, stop)
                except (TrashdError, OSError) as error:
                    show_progress("")
                    codes.append(output.failed(from_os(error, base), as_json=batch.json_lines))
                else:
                    show_progress("")
                    kept = [] if keep_for_s else [one.swapped for one in orphans if not one.is_given_up]
                    ids = [one.id for one in orphans]
                    codes.append(_print_swapped(waited, ids, kept, as_json=batch.json_lines))
                if stop():
                    return stop.exit_code()
    return output.exit_code(codes)


def print_reaped(volumes: Iterable[Waited], *, as_json: bool) -> list[int]:
    """Print how much space a reap with --wait freed, volume by volume, and what keeps the rest; exit codes."""
    codes = []
    for waited in volumes:
        if as_json:
            output.as_json(waited)
        else:
            _print(waited)
        codes.append(_exit_code(waited))
    return codes


def _refuse_uncounted(goal: SpaceGoal, verb: SwapVerb) -> SwapVerb:
    """A verb that refuses a goal of inodes where the filesystem (btrfs) does not count them."""

    def act(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
        with suppress(OSError):  # the verb explains better what is wrong with the path
            if goal.n_inodes is not None and not os.statvfs(path).f_files:
                option = f"--wait={goal.text} for {printable(path)}"
                raise UsageError(option, "its filesystem does not count inodes; wait for bytes, or for all")
        return verb(kernel, path, options)

    return act


def _show_progress(as_json: bool, text: str) -> None:
    """Draw the line of a terminal that shows the progress. A forked child that counts for another user does so too."""
    if not as_json and sys.stderr.isatty():
        n_columns = os.get_terminal_size(2).columns or _TYPICAL_COLUMNS
        os.write(2, b"\r" + text[: n_columns - 1].encode() + b"\x1b[K")


def _print_swapped(waited: Waited, ids: Sequence[str], kept: Sequence[Swapped], *, as_json: bool) -> int:
    """Print how the waiting for a volume ended, and what the user can do; the exit code.

    kept  what has a retention after all, so that the commands that restore it are printed
    """
    undo = tuple(output.restore_command(one.id, one.volume) for one in kept)
    hint = next(filter(None, (_find_hint(waited.volume, ids, reason) for reason in waited.reasons)), "")
    if as_json:
        output.as_json(waited, WaitAdvice(undo, hint))
    else:
        _print(waited)
        for command in undo:
            print(f"  undo  {command}")
        if hint:
            print(f"  hint: {hint}", file=sys.stderr)
    return _exit_code(waited)


def _exit_code(waited: Waited) -> int:
    return 0 if waited.is_reached else Incomplete.exit_code


def _print(waited: Waited) -> None:
    inodes = f"{waited.came_inodes:,} inodes and " if waited.goal.startswith("inodes:") else ""
    print(f"{printable(waited.volume)}: {inodes}{format_size(waited.came_bytes)} came back")
    for reason in waited.reasons:
        n_bytes = f"{format_size(reason.n_bytes)}: " if reason.n_bytes else ""
        print(f"  {n_bytes}{reason.detail}")


def _find_hint(base: bytes, ids: Sequence[str], reason: WaitReason) -> str:
    """The next step for a reason; empty for none."""
    volume = shell_word(base)
    match reason.kind:
        case WaitReasonKind.NOBODY:
            named = " ".join(ids[:_NAMED_MAX]) + (" ..." if len(ids) > _NAMED_MAX else "")
            return f"trashd reap --now --wait --volume {volume} {named}, or start the service (trashd service run)"
        case WaitReasonKind.PAUSED:
            return f"trashd resume {volume}"
        case WaitReasonKind.BROKEN:
            return "trashd status shows the errors"
        case WaitReasonKind.LEFT:
            return "trashd list --state quarantine"
        case _:
            return ""
