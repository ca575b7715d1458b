"""What `trashd rm` does with its paths, and its plain lines: loaded without click and msgspec."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from fusefs.cli import output
from fusefs.cli.output import is_confirmed
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import PlainLine, PlainOption, SwapBatch, every_path, read_note, swap_all
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import Refused, TrashdError, Unsettled, UsageError
from fusefs.core.human_units import parse_duration
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import Method
from fusefs.core.results import RemovalGroup, Swept
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation
from fusefs.linux.mountinfo import below
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, base_of, remove_path

_MOST_TOLD = 10


def remove_paths(
    paths: tuple[bytes, ...],
    *,
    null: bool = False,
    force: bool = False,
    asks: bool = False,
    recursive: bool = False,
    only_empty: bool = False,
    verbose: bool = False,
    keep_for: int = DEFAULT_RETENTION_S,
    note: str = "",
    now: bool = False,
    as_json: bool = False,
) -> int:
    """Remove paths with the options of cli/rm.py; the exit code."""
    if asks and force:
        raise UsageError("-i with -f", "it is asked, or it is not")
    if asks and (null or not sys.stdin.isatty()):
        raise UsageError("-i asks at a terminal", "paths can't be read from there, too")
    if force and not paths and not null:
        return 0
    wanted = every_path(paths, null=null)
    options = SwapOptions(keep_for, note, invocation=invocation())
    removal = _RmCommand([], options, force, verbose, now, as_json)
    if only_empty and not recursive:
        wanted = _emptied(wanted, removal.codes, as_json=as_json)
    return removal.run(filter(_is_meant, wanted) if asks else iter(wanted))


LINE = PlainLine(
    "paths",
    {
        "-f": PlainOption("force"),
        "--force": PlainOption("force"),
        "-r": PlainOption("recursive"),
        "-R": PlainOption("recursive"),
        "--recursive": PlainOption("recursive"),
        "-v": PlainOption("verbose"),
        "--verbose": PlainOption("verbose"),
        "--keep-for": PlainOption("keep_for", parse_duration),
        "--note": PlainOption("note", read_note),
        "--now": PlainOption("now"),
        "--json": PlainOption("as_json"),
    },
    remove_paths,
)


def _is_meant(path: bytes) -> bool:
    what = "directory" if os.path.isdir(path) and not os.path.islink(path) else "file"
    return not os.path.lexists(path) or is_confirmed(f"Remove {what} {printable(path)}?")


def _emptied(paths: Iterable[bytes], codes: list[int], *, as_json: bool) -> Iterator[bytes]:
    """Without directories that are not empty, each of which is an error."""
    for path in paths:
        try:
            is_full = stat.S_ISDIR(os.lstat(path).st_mode) and bool(os.listdir(path))
        except OSError:
            is_full = False  # its removal tells what is wrong
        if is_full:
            refusal = Refused(path, "it is a directory that is not empty: -r takes it with all that it holds")
            codes.append(output.failed(refusal, as_json=as_json))
        else:
            yield path


class _RmCommand(NamedTuple):
    """One command's. codes: of what was done so far"""

    codes: list[int]
    options: SwapOptions
    force: bool
    verbose: bool
    now: bool
    as_json: bool

    def run(self, paths: Iterator[bytes]) -> int:
        """Remove them; the exit code."""
        alone, groups = [*islice(paths, 2)], list[RemovalGroup]()
        if len(alone) > 1:
            from fusefs.sweep.remove_together import in_groups

            groups, alone = in_groups(Kernel(), chain(alone, paths))
        self._remove_each(alone)  # first: they may be named through a link that goes, too
        for group in groups:
            with StopSignals() as stop:
                left = self._remove(group, stop)
                if stop():
                    return stop.exit_code()
            self._remove_each(left)
        return output.exit_code(self.codes)

    def _remove_each(self, paths: Sequence[bytes]) -> None:
        if self.force:
            paths = [*filter(os.path.lexists, paths)]
        if paths:
            batch = SwapBatch(paths, self.options, remove_path, self.as_json, kept=not self.now)
            if self.now:
                batch = batch._replace(after=lambda swapped: self._reap(swapped.base(), swapped.id))
            self.codes.append(swap_all(batch))

    def _remove(self, group: RemovalGroup, stop: StopSignals) -> list[bytes]:
        """Remove a group; the paths of what did not go, and is to be removed one by one."""
        from fusefs.sweep.remove_together import remove_group
        from fusefs.sweep.request import SweepWishes

        try:
            swept, left = remove_group(Kernel(), group, self.options, SweepWishes(stops=stop))
        except TrashdError:
            return [*group.all_given()]  # each tells what is wrong with it, or works by itself
        if swept.orphan is not None:
            self._tell(group, swept, frozenset(left))
            self.codes.append(Unsettled.exit_code if swept.warnings else 0)
            if self.now and swept.store is not None:
                self.codes.append(self._reap(base_of(swept.store), swept.orphan))
        return [] if stop() else left

    def _reap(self, base: bytes, orphan: str) -> int:
        """Reap what was removed; the exit code."""
        from fusefs.cli.reap import reap_one

        return reap_one(base, orphan, as_json=self.as_json)

    def _tell(self, group: RemovalGroup, swept: Swept, left: frozenset[bytes]) -> None:
        assert swept.orphan is not None
        assert swept.store is not None
        undo = output.restore_command(swept.orphan, swept.volume)
        if self.as_json:
            from fusefs.cli.json_objects import UndoCommand

            for path in group.paths_without(left):
                one = Swapped(swept.orphan, path, swept.store, Method.SWEEP, None, (), swept.warnings, swept.volume)
                one = one._replace(expires_ns=swept.expires_ns)
                restore = f"{undo} {shell_word(below(path, group.directory))}"
                output.as_json(one, UndoCommand(None if self.now else restore))
            return
        n_gone = group.n() - len(left)
        if n_gone <= _MOST_TOLD or self.verbose:
            for path in group.paths_without(left):
                print(f"{printable(path)}: removed")
        else:
            print(f"{printable(group.directory)}: {n_gone:,} removed")
        print(f"  id    {swept.orphan}")
        if not self.now:
            print(f"  undo  {undo}")
            print(f"  until {output.until(swept.expires_ns)}")
        for warning in swept.warnings:
            output.warn(warning)
