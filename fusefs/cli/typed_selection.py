"""What a command line says of a selection, and the selection that this makes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fusefs.core.errors import UsageError, errors_about
from fusefs.core.selection import Selection
from fusefs.core.selection_syntax import common_depths, common_types
from fusefs.core.stat_bounds import Field, SizeBound, TimeBound
from fusefs.core.timestamps import is_path, parse_when
from fusefs.linux.kernel import Kernel


class SelectionOptions(NamedTuple):
    """What was typed of a selection, named as click's parameters in cli/selection_options.py.

    Times are read when it is known which of a file's is meant.
    """

    names: tuple[str, ...] = ()
    inames: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    types: tuple[frozenset[str], ...] = ()
    sizes: tuple[SizeBound, ...] = ()
    older: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()
    by: tuple[Field, ...] = ()
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    empty: bool = False
    depths: tuple[tuple[int, int | None], ...] = ()

    def selection(self, kernel: Kernel) -> Selection:
        """The selection. Raises  UsageError; NotFound for a file whose time was meant"""
        by = self._by()
        try:
            times = self._times(kernel, by) if self.older or self.newer else []
            types = common_types(self.types)
            least, most = common_depths(self.depths)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return Selection(
            self.names, self.inames, self.paths, self.regexes, self.excludes, types, self.sizes, tuple(times),
            self.uids, self.gids, self.empty, least, most,
        )  # fmt: skip

    def _times(self, kernel: Kernel, by: Field) -> list[TimeBound]:
        """What is asked of that time. Raises  ValueError, TrashdError"""
        from fusefs.cli.wall_clock import AgeCutoffs  # who asks for no time is spared it

        cutoffs = AgeCutoffs(kernel, notes=bool(self.older))
        now_ns = cutoffs.now.wall_ns
        times = [TimeBound(by, before_ns=_when(kernel, text, by, now_ns, cutoffs.ago)) for text in self.older]
        times += [TimeBound(by, after_ns=_when(kernel, text, by, now_ns)) for text in self.newer]
        cutoffs.tell()
        return times

    def _by(self) -> Field:
        """The time that is meant. Raises  UsageError if nothing is asked of it, or if several are meant"""
        if self.by and not (self.older or self.newer):
            raise UsageError("--by without --older or --newer", "it says which time of a file they mean")
        match tuple(dict.fromkeys(self.by)):
            case ():
                return "mtime"
            case (field,):
                return field
            case fields:
                hint = "all times of one sweep are the same; of what one prints, the next may choose: --print0, -0"
                raise UsageError(" with ".join(f"--by {field}" for field in fields), hint)


def _when(kernel: Kernel, text: str, field: Field, now_ns: int, cutoff_ns: Callable[[int], int] | None = None) -> int:
    """A moment. Raises  ValueError, TrashdError"""
    if not is_path(text):
        return parse_when(text, now_ns, time.mktime, cutoff_ns)
    path = os.fsencode(text)
    with errors_about(path), kernel.open_path(path, os.O_PATH) as fd:
        if field == "btime":
            born_ns = kernel.statx(fd, asks=True).btime_ns
            if not born_ns:
                raise ValueError(f"{text} has no birth time: its filesystem keeps none")
            return born_ns
        found: int = getattr(kernel.fstat(fd), f"st_{field}_ns")
        return found


def typed(options: dict[str, Any]) -> SelectionOptions:
    """Takes what belongs to the selection out of a command's options."""
    return SelectionOptions(**{field: options.pop(field) for field in SelectionOptions._fields if field in options})
