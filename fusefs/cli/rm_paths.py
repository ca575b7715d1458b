"""Removes paths for `trashd rm`, and parses its plain command lines without click and msgspec."""

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
from fusefs.linux.mountinfo import relative_to
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import Swapped, base_of, remove_path

_SHOWN_MAX = 10


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
    """Remove paths with the options of cli/rm.py; return the exit code."""
    if asks and force:
        raise UsageError("-i can't be combined with -f")
    if asks and null:
        raise UsageError("-i can't be combined with -0: both read standard input")
    if asks and not sys.stdin.isatty():
        raise UsageError("-i needs a terminal as standard input")
    if force and not paths and not null:
        return 0
    selected = every_path(paths, null=null)
    options = SwapOptions(keep_for, note, invocation=invocation())
    removal = _RmCommand([], options, force, verbose, now, as_json)
    if only_empty and not recursive:
        selected = _without_full(selected, removal.codes, as_json=as_json)
    return removal.remove_all(filter(_is_accepted, selected) if asks else iter(selected))


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


def _is_accepted(path: bytes) -> bool:
    """Return whether the user confirms a removal. Do not ask about a missing path, which the removal will report."""
    kind = "directory" if os.path.isdir(path) and not os.path.islink(path) else "file"
    return not os.path.lexists(path) or is_confirmed(f"Remove {kind} {printable(path)}?")


def _without_full(paths: Iterable[bytes], codes: list[int], *, as_json: bool) -> Iterator[bytes]:
    """Skip directories that are not empty, and report each as an error."""
    for path in paths:
        try:
            is_full = stat.S_ISDIR(os.lstat(path).st_mode) and bool(os.listdir(path))
        except OSError:
            is_full = False  # the removal reports the error
        if is_full:
            refusal = Refused(f"{printable(path)}: directory not empty", "-r removes it with its contents")
            codes.append(output.print_error(refusal, as_json=as_json))
        else:
            yield path


class _RmCommand(NamedTuple):
    """The removal that one command carries out. codes: the exit codes so far"""

    codes: list[int]
    options: SwapOptions
    force: bool
    verbose: bool
    now: bool
    as_json: bool

    def remove_all(self, paths: Iterator[bytes]) -> int:
        singles, groups = [*islice(paths, 2)], list[RemovalGroup]()
        if len(singles) > 1:
            from fusefs.sweep.remove_together import group_paths

            groups, singles = group_paths(Kernel(), chain(singles, paths))
        self._remove_each(singles)  # done first, since their paths may lead through a link that is removed as well
        for group in groups:
            with StopSignals() as stop:
                remaining = self._remove_together(group, stop)
                if stop():
                    return stop.exit_code()
            self._remove_each(remaining)
        return output.exit_code(self.codes)

    def _remove_each(self, paths: Sequence[bytes]) -> None:
        if self.force:
            paths = [*filter(os.path.lexists, paths)]
        if paths:
            batch = SwapBatch(paths, self.options, remove_path, self.as_json, kept=not self.now)
            if self.now:
                batch = batch._replace(after=lambda swapped: self._reap(swapped.base(), swapped.id))
            self.codes.append(swap_all(batch))

    def _remove_together(self, group: RemovalGroup, stop: StopSignals) -> list[bytes]:
        """Remove a group; return the paths that failed, to be removed one by one."""
        from fusefs.sweep.remove_together import remove_group
        from fusefs.sweep.request import SweepOptions

        try:
            swept, remaining = remove_group(Kernel(), group, self.options, SweepOptions(stops=stop))
        except TrashdError:
            return [*group.paths_as_given()]  # each then reports its own error, or succeeds
        if swept.orphan is not None:
            self._print_removed(group, swept, frozenset(remaining))
            self.codes.append(Unsettled.exit_code if swept.warnings else 0)
            if self.now and swept.store is not None:
                self.codes.append(self._reap(base_of(swept.store), swept.orphan))
        return [] if stop() else remaining

    def _reap(self, base: bytes, orphan: str) -> int:
        from fusefs.cli.reap import reap_one

        return reap_one(base, orphan, as_json=self.as_json)

    def _print_removed(self, group: RemovalGroup, swept: Swept, remaining: frozenset[bytes]) -> None:
        assert swept.orphan is not None
        assert swept.store is not None
        undo = output.restore_command(swept.orphan, swept.volume)
        if self.as_json:
            from fusefs.cli.json_objects import UndoCommand

            for path in group.paths_without(remaining):
                one = Swapped(swept.orphan, path, swept.store, Method.SWEEP, None, (), swept.warnings, swept.volume)
                one = one._replace(expires_ns=swept.expires_ns)
                restore = f"{undo} {shell_word(relative_to(path, group.directory))}"
                output.as_json(one, UndoCommand(None if self.now else restore))
            return
        n_removed = group.n_names() - len(remaining)
        if n_removed <= _SHOWN_MAX or self.verbose:
            for path in group.paths_without(remaining):
                print(f"{printable(path)}: removed")
        else:
            print(f"{printable(group.directory)}: {n_removed:,} removed")
        print(f"  id    {swept.orphan}")
        if not self.now:
            print(f"  undo  {undo}")
            print(f"  until {output.until(swept.expires_ns)}")
        for warning in swept.warnings:
            output.warn(warning)
