"""What rules did, or would do, as it is told: lines for each directory that had something for them, and the sum."""

from __future__ import annotations

from typing import Any

from fusefs.cli import output, swepttext
from fusefs.cli.swepttext import counted
from fusefs.core.errors import Incomplete, Unsettled
from fusefs.core.names import printable
from fusefs.core.plan import Delete, Done, Listed, Move, NotDone, Rule, Told, Trash
from fusefs.core.sizes import format_size
from fusefs.core.swept import Swept


class Telling:
    """Told one after the other; the sum, and the exit code that comes of it."""

    def __init__(self, *, runs: bool, as_json: bool) -> None:
        self._runs = runs
        self._as_json = as_json
        self._codes: list[int] = []
        self._n_directories = 0
        self._n_matches = 0
        self._n_bytes = 0

    def tell(self, told: Told) -> None:
        """Print one."""
        match told:
            case Done(rule, swept):
                self._done(rule, swept)
            case NotDone():
                self._not_done(told)
            case Listed():
                self._listed(told)

    def end(self) -> None:
        """Print the sum."""
        if self._as_json:
            return
        size = f" ({format_size(self._n_bytes)})" if self._n_bytes else ""
        where = counted(self._n_directories, "directory", "directories")
        what = f"{counted(self._n_matches, 'match', 'matches')}{size} in {where}"
        print(f"{what} taken" if self._runs else f"{what} would be taken; nothing was touched (--run does it)")

    def exit_code(self) -> int:
        """A single error's own, or Incomplete's."""
        return output.exit_code([code for code in self._codes if code] or [0])

    def _done(self, rule: Rule, swept: Swept) -> None:
        sums = swept.sums
        self._n_directories += sums.n_done > 0
        self._n_matches += sums.n_done
        self._n_bytes += sums.n_bytes if swept.looks else 0
        is_short = bool(sums.n_failed or swept.is_limited or swept.why)
        self._codes.append(Unsettled.exit_code if swept.warnings else Incomplete.exit_code if is_short else 0)
        if self._as_json:
            fields: dict[str, Any] = {"rule": str(rule.place), "action": _action(rule), "dry_run": not self._runs}
            output.as_json(fields | swepttext.fields(swept))
        elif sums.n_matched or sums.n_spared or sums.n_mounts or is_short:
            did = _did(rule)
            first, *others = swepttext.told(swept, did if self._runs else f"would be {did}")
            print("\n".join([f"{rule.place}: {first}", *others]))
        for warning in swept.warnings:
            output.warn(warning)

    def _not_done(self, told: NotDone) -> None:
        error = told.error
        self._codes.append(0 if error is None else error.exit_code)
        if self._as_json:
            name = None if error is None else type(error).__name__
            directory = output.plain(told.directory)
            output.as_json({"rule": str(told.rule.place), "directory": directory, "why": told.why, "error": name})
            return
        print(f"{told.rule.place}: {printable(told.directory)}: {told.why}")
        if error is not None and error.hint:
            print(f"  hint: {error.hint}")

    def _listed(self, told: Listed) -> None:
        if told.error is not None:
            self._codes.append(output.failed(told.error, as_json=self._as_json))
            return
        if self._as_json:
            counts = {"n_users": told.n_users, "n_entries": told.n_entries, "is_whole": told.is_whole}
            output.as_json({"lists": output.plain(told.directory), **counts})
            return
        what = f"{counted(told.n_users, 'list')} of {counted(told.n_entries, 'path')}"
        lacking = "" if told.is_whole else "; not complete: not all could be looked at"
        print(f"{printable(told.directory)}: {what}{'' if self._runs else ' would be written'}{lacking}")


def _action(rule: Rule) -> str:
    match rule.act:
        case Trash():
            return "trash"
        case Delete():
            return "delete"
        case Move():
            return "move"


def _did(rule: Rule) -> str:
    match rule.act:
        case Trash():
            return "trashed"
        case Delete():
            return "deleted"
        case Move(target):
            return f"moved to {printable(target)}"
