"""`trashd swap --wait`: what people and programs see while they wait, and what they are told at the end."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, suppress

from fusefs.cli import output
from fusefs.cli.json_objects import WaitAdvice, WaitGoal
from fusefs.cli.reap_wait import tell_came
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import SwapBatch, SwapVerb, swap_all
from fusefs.core.durations import format_duration
from fusefs.core.errors import Incomplete, TrashdError, UsageError, from_os
from fusefs.core.freed_space import SpaceKeeper, SpaceKept
from fusefs.core.names import ContainerId
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.sizes import format_size
from fusefs.core.space_goal import GoalReached, SpaceGoal
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped

_NAMED_MAX = 3
_TYPICAL_COLUMNS = 80


def swap_and_wait(batch: SwapBatch, goal: SpaceGoal, keep_for: int) -> int:
    """Swap one path after the other, then wait volume by volume; the exit code.

    keep_for  the retention in seconds that the user asked for; 0 if it is given up
    """
    from fusefs.waiting.wait_for_reaper import SwapWait, WaitCallbacks

    undone_by: dict[ContainerId, str] = {}

    def after(swapped: Swapped) -> int:
        awaiting.add(swapped)
        if not keep_for:
            undone_by[swapped.id] = output.restore_command(swapped.id, swapped.volume)
        return batch.after(swapped)

    with SwapWait(goal, keep_for) as awaiting:
        code = swap_all(batch._replace(verb=_checked(goal, batch.verb), after=after))
        sys.stdout.flush()  # its reader knows now that the names are free
        if keep_for and not batch.json_lines:
            output.warn(f"nothing may be reaped before its retention ends, in {format_duration(keep_for)}")
        codes = [code] if code else []
        with StopSignals() as stop:
            for base in awaiting.bases():
                try:
                    with _WaitLine(goal, is_shown=not batch.json_lines) as line:
                        outcome = awaiting.wait_for(base, WaitCallbacks(line.counting, line.tell, stop))
                except TrashdError as error:
                    codes.append(output.failed(error, as_json=batch.json_lines))
                except OSError as error:
                    codes.append(output.failed(from_os(error, base), as_json=batch.json_lines))
                else:
                    undo = [undone_by[one] for one in outcome.spared if one in undone_by]
                    codes.append(_tell(base, outcome.met, outcome.ids, undo, as_json=batch.json_lines))
                if stop():
                    return stop.exit_code()
    return output.exit_code(codes)


def _checked(goal: SpaceGoal, verb: SwapVerb) -> SwapVerb:
    """A verb that refuses where a goal of inodes means nothing: btrfs makes as many as it likes."""

    def act(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
        with suppress(OSError):  # the verb says better what is wrong with the path
            if goal.n_inodes is not None and not os.statvfs(path).f_files:
                told = f"--wait={goal.text} for {printable(path)}"
                raise UsageError(told, "its filesystem does not count inodes; wait for bytes, or for all")
        return verb(kernel, path, options)

    return act


class _WaitLine(AbstractContextManager["_WaitLine"]):
    """The line of a terminal that says how far it is; a forked child, which counts for another user, draws it too."""

    def __init__(self, goal: SpaceGoal, *, is_shown: bool) -> None:
        self._enough = "" if goal.is_all() else f" ({goal.text} is enough)"
        self._is_shown = is_shown and sys.stderr.isatty()
        self._n_counted = 0

    def __exit__(self, *_error: object) -> None:
        if self._is_shown:
            os.write(2, b"\r\x1b[K")

    def counting(self, n_entries: int, _n_bytes: int) -> None:
        """So much more is counted."""
        self._n_counted += n_entries
        self._draw(f"counting: {self._n_counted:,} entries")

    def tell(self, came: int, expected: int, what: str) -> None:
        """So much came, and this goes on."""
        own = format_size(min(came, expected))
        self._draw(f"waiting: {own} of {format_size(expected)} came back{self._enough}; {what}")

    def _draw(self, text: str) -> None:
        if self._is_shown:
            os.write(2, b"\r" + text[: _columns() - 1].encode() + b"\x1b[K")


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or _TYPICAL_COLUMNS
    except OSError:
        return _TYPICAL_COLUMNS


def _tell(base: bytes, met: GoalReached, ids: tuple[ContainerId, ...], undo: list[str], *, as_json: bool) -> int:
    """Say what came, and what keeps the rest; the exit code."""
    hint = next(filter(None, (_next_step(base, ids, reason) for reason in met.waited.reasons)), "")
    if as_json:
        goal = WaitGoal(base, met.goal.text, met.is_reached)
        output.as_json(goal, met.waited, WaitAdvice(met.came_inodes, tuple(undo), hint))
    else:
        print(f"{printable(base)}: {_came(met)}")
        for reason in met.waited.reasons:
            n_bytes = f"{format_size(reason.n_bytes)}: " if reason.n_bytes else ""
            print(f"  {n_bytes}{reason.detail}")
        for command in undo:
            print(f"  undo  {command}")
        if hint:
            print(f"  hint: {hint}", file=sys.stderr)
    return 0 if met.is_reached else Incomplete.exit_code


def _came(met: GoalReached) -> str:
    """What came, for people."""
    waited = met.waited
    if not waited.expected_bytes:
        return "nothing was waited for"
    inodes = "" if met.goal.n_inodes is None else f"{met.came_inodes or 0:,} inodes and "
    return inodes + tell_came(waited.came_bytes, waited.expected_bytes, "swapped away")


def _next_step(base: bytes, ids: tuple[ContainerId, ...], reason: SpaceKept) -> str:
    """What a person can do about it; empty for nothing that we could tell."""
    volume = shell_word(base)
    match reason.kind:
        case SpaceKeeper.NOBODY:
            named = " ".join(ids[:_NAMED_MAX]) + (" ..." if len(ids) > _NAMED_MAX else "")
            return f"trashd reap --now --wait --volume {volume} {named}, or start the service (trashd service run)"
        case SpaceKeeper.PAUSED:
            return f"trashd resume {volume}"
        case SpaceKeeper.BROKEN:
            return "trashd status tells the errors"
        case SpaceKeeper.LEFT:
            return "trashd list --state quarantine"
        case _:
            return ""
