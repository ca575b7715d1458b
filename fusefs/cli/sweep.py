"""trashd sweep: read the selection, ask, act with a progress bar, and print the result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import click

from fusefs.cli import output
from fusefs.cli.json_objects import PlannedRule, SweepAction, SweepMatch, SweepOutcome, ToldSums
from fusefs.cli.options import (
    DURATION,
    NOTE,
    AgeCutoffs,
    Command,
    Decorator,
    ParamType,
    ParsedValue,
    PathBytes,
    json_option,
    mpi_option,
    tempo_options,
    threads_option,
    together,
)
from fusefs.cli.output import can_confirm, is_confirmed
from fusefs.cli.reap import ProgressBar
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import standard_input
from fusefs.core import results, selection
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import Incomplete, OtherFilesystem, Refused, Unsettled, UsageError, errors_about, from_os
from fusefs.core.human_units import format_size, format_utc, is_file_time, parse_time
from fusefs.core.names import join_path
from fusefs.core.pacing import Speed
from fusefs.core.printable_names import printable
from fusefs.core.record import Failure
from fusefs.core.results import Match, ShouldStop, SweepSums, Swept
from fusefs.core.selection import DIRECTORY, TIMES, Field, ListedName, ListedPath, ListFormat, Selection, TimeBound
from fusefs.linux.batched_calls import lstat_all
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation
from fusefs.linux.user_ids import gid_of, uid_of
from fusefs.store.stage import SwapOptions

_SHOWN_MAX = 10
_LAST_DAY = "after 9999"
_OF_PATHS = (
    results.OUTSIDE, results.DOTS, results.UNCLEAR, results.KEPT_BY_OTHERS, results.LOCKED_BY_OTHERS,
    results.LOCKED_BY_UNKNOWN,
)  # fmt: skip
"""Values of `Failure.call` that describe a problem with a path, and do not name a system call."""


def as_json(action: SweepAction, swept: Swept, *first: PlannedRule) -> None:
    """Print a sweep's result as JSON. first: the rule that the sweep carried out"""
    sums = ToldSums(*(getattr(swept.sums, name) for name in ToldSums._fields))
    if not swept.looks:
        sums = sums._replace(n_bytes=None)
    undo = None if swept.orphan is None else output.restore_command(swept.orphan, swept.volume)
    output.as_json(*first, action, swept, SweepOutcome(sums, undo), without="looks")


def result_lines(swept: Swept, did: str) -> Iterator[str]:
    """Format a sweep's result. did: what happened, such as `deleted` or `would be deleted`"""
    yield f"{printable(swept.directory)}: {_sum(swept, did)}"
    if swept.orphan is not None:
        yield f"  id    {swept.orphan}"
        yield f"  undo  {output.restore_command(swept.orphan, swept.volume)}"
        yield f"  until {output.until(swept.expires_ns)}"
    for line in (*_matches("largest", swept.largest), *_matches("oldest", swept.oldest), *problem_lines(swept)):
        yield f"  {line}"


def _sum(swept: Swept, did: str) -> str:
    sums = swept.sums
    if not (sums.n_matched or sums.n_vanished or swept.is_limited or swept.is_stopped):
        return "no matches"
    size = f" ({format_size(sums.n_bytes)})" if swept.looks else ""
    inside = f", with {output.counted(sums.n_inside, 'entry', 'entries')} inside" if sums.n_inside else ""
    vanished = (
        f"; {output.counted(sums.n_vanished, 'match', 'matches')} vanished in the meantime" if sums.n_vanished else ""
    )
    return f"{output.counted(sums.n_done, 'match', 'matches')}{size} {did}{inside}{vanished}"


def problem_lines(swept: Swept) -> Iterator[str]:
    """Format what failed or was skipped, and why the sweep stopped."""
    yield from _first([_format_failure(one) for one in swept.failures], swept.sums.n_failed)
    skipped = [f"skipped: {printable(one.name) or '.'} ({one.why})" for one in swept.spared]
    yield from _first(skipped, swept.sums.n_spared)
    if swept.sums.n_missing:
        yield f"{output.counted(swept.sums.n_missing, 'listed path')} not found"
    if swept.sums.n_unmatched:
        does = "does" if swept.sums.n_unmatched == 1 else "do"
        yield f"{output.counted(swept.sums.n_unmatched, 'listed path')} {does} not match the selection"
        yield "  (directories match only with --type d)"
    if not swept.sums.n_seen and (swept.sums.n_missing or any(one.call == results.OUTSIDE for one in swept.failures)):
        yield "hint: run the sweep in the directory where find ran, since the relative paths in the list start there"
    if swept.sums.n_mounts:
        yield f"not entered: {output.counted(swept.sums.n_mounts, 'mount point')}"
    if swept.is_limited:
        yield "limit reached: there are more matches"
    if swept.why:
        yield f"stopped: {swept.why}"
    elif swept.is_stopped:
        yield "stopped; run the same command again to finish the sweep"


def _format_failure(one: Failure) -> str:
    path = printable(one.name) or "."
    if one.call in _OF_PATHS:
        return f"{path}: {one.call}"
    if one.call in (results.NOT_TAKEN, results.NOT_GIVEN):
        return f"skipped: {path} ({one.call})"
    return f"{path}: {os.strerror(one.errno)} ({one.call})"


def _first(lines: Sequence[str], count: int) -> Iterator[str]:
    """Yield the first lines, and how many more there are. count: the total, which may be larger than len(lines)"""
    yield from lines[:_SHOWN_MAX]
    n_more = count - min(len(lines), _SHOWN_MAX)
    if n_more > 0:
        yield f"and {n_more:,} more"


def _matches(head: str, matches: Sequence[Match]) -> Iterator[str]:
    for match in matches:
        day = format_utc(match.time_ns, "%Y-%m-%d", _LAST_DAY)
        yield f"{head:<8}{format_size(match.n_bytes):>10}  {day}  {printable(match.path)}"
        head = ""


def _many(name: str, field: str, read: ParamType[Any], metavar: str, text: str) -> Decorator:
    return click.option(name, field, type=read, multiple=True, metavar=metavar, help=text)


selection_options = together((
    _many(
        "--name", "names", ParsedValue("glob", selection.check_name), "GLOB",
        "The name matches GLOB, as with find -name.",
    ),
    _many(
        "--iname", "inames", ParsedValue("glob", partial(selection.check_name, ignores_case=True)), "GLOB",
        "The name matches GLOB, ignoring case.",
    ),
    _many(
        "--path", "paths", ParsedValue("glob", selection.check_path), "GLOB",
        "The path below DIR matches GLOB; * also matches slashes.",
    ),
    _many(
        "--regex", "regexes", ParsedValue("regex", selection.check_regex), "REGEX",
        "The whole path below DIR matches REGEX (Python syntax).",
    ),
    _many(
        "--type", "types", ParsedValue("types", selection.parse_types), "f,d,l,p,s,b,c",
        "The file type is one of these, as with find -type. [default: all but d]",
    ),
    _many(
        "--size", "sizes", ParsedValue("size", selection.parse_size_bound), "[+-]N[KMGT]",
        "The size is more than (+), less than (-) or exactly N bytes.",
    ),
    click.option(
        "--older", multiple=True, metavar="WHEN", help="Last modified before WHEN: 7d, 2026-11-01, @SECONDS or ./FILE."
    ),
    click.option(
        "--newer", multiple=True, metavar="WHEN", help="Last modified after WHEN: 7d, 2026-11-01, @SECONDS or ./FILE."
    ),
    _many(
        "--by", "by", click.Choice(TIMES), "|".join(TIMES),
        "The time that --older and --newer compare. [default: mtime]",
    ),
    _many("--user", "uids", ParsedValue("user", uid_of), "USER", "The owner is USER, a name or number."),
    _many("--group", "gids", ParsedValue("group", gid_of), "GROUP", "The group is GROUP, a name or number."),
    click.option("--empty", is_flag=True, help="The file or directory is empty."),
    _many(
        "--depth", "depths", ParsedValue("depth", selection.parse_depths), "N|A..B",
        "The level below DIR is at most N, or from A to B; entries directly in DIR are at level 1.",
    ),
    _many(
        "--exclude", "excludes", ParsedValue("glob", selection.check_exclude), "GLOB",
        "Skip entries that match GLOB, and do not enter them; a GLOB with a slash is matched against the path.",
    ),
))  # fmt: skip
"""Options that select entries, for a command with keyword arguments; `read_selection` converts them to a Selection."""


def read_selection(kernel: Kernel, options: dict[str, Any]) -> Selection:
    """Convert the options of a command to a Selection, and remove them from the dictionary.

    Raises  UsageError; NotFound if `--older` or `--newer` names a file that does not exist
    """
    older, newer = options.pop("older"), options.pop("newer")
    by = _time_of(options.pop("by"), is_compared=bool(older or newer))
    times = list[TimeBound]()
    try:
        if older or newer:
            cutoffs = AgeCutoffs(kernel, notes=bool(older))
            now_ns = cutoffs.now.wall_ns
            times += [TimeBound(by, before_ns=_when(kernel, text, by, now_ns, cutoffs.ago)) for text in older]
            times += [TimeBound(by, after_ns=_when(kernel, text, by, now_ns)) for text in newer]
            cutoffs.warn_of_clock()
        types = selection.common_types(options.pop("types"))
        least, most = selection.common_depths(options.pop("depths"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    others = {name: options.pop(name) for name in Selection._fields if name in options}
    return Selection(types=types, times=tuple(times), min_depth=least, max_depth=most, **others)


def _time_of(by: tuple[Field, ...], *, is_compared: bool) -> Field:
    """Return the time that `--by` names. Raises  UsageError if it names several, or if no time is compared"""
    if by and not is_compared:
        raise UsageError("--by needs --older or --newer")
    match tuple(dict.fromkeys(by)):
        case ():
            return "mtime"
        case (field,):
            return field
        case fields:
            hint = "select by one time with --print0, and pass the list to a second sweep with -0"
            raise UsageError(f"{' and '.join(f'--by {field}' for field in fields)} can't be combined", hint)


def _when(kernel: Kernel, text: str, field: Field, now_ns: int, cutoff_ns: Callable[[int], int] | None = None) -> int:
    """Return the time that an argument of `--older` or `--newer` names. Raises  ValueError, TrashdError"""
    if not is_file_time(text):
        return parse_time(text, now_ns, time.mktime, cutoff_ns)
    path = os.fsencode(text)
    with errors_about(path), kernel.open_path(path, os.O_PATH) as fd:
        if field == "btime":
            born_ns = kernel.statx(fd, asks_server=True).btime_ns
            if not born_ns:
                raise ValueError(f"{text}: this filesystem does not record birth times")
            return born_ns
        time_ns: int = getattr(kernel.fstat(fd), f"st_{field}_ns")
        return time_ns


_STDIN = b"-"
_CHUNK = 1 << 20


class SweepOptions(NamedTuple):
    """The options of a command line, with the names of the parameters of `command`."""

    directory: bytes
    selection: Selection
    source: bytes | None = None
    null: bool = False
    list_format: str | None = None
    delete: bool = False
    recursive: bool = False
    target: bytes | None = None
    if_exists: str = "skip"
    prints: bool = False
    prints_null: bool = False
    keep_for: int | None = None
    note: str = ""
    most: int | None = None
    dry: bool = False
    limit: int | None = None
    yes: bool = False
    n_workers: int | None = None
    max_rate: int | None = None
    max_bytes: int | None = None
    paced: bool = False
    trusts_atime: bool = False
    as_json: bool = False
    job: Any = None

    def has_list(self) -> bool:
        """Return whether paths are read from a list, and not found by a walk."""
        return self.source is not None or self.null

    def confirms(self) -> bool:
        """Return whether the matches are counted first, to ask for confirmation."""
        return self.limit is not None and not self.yes and not self.dry

    def prints_any(self) -> bool:
        return self.prints or self.prints_null

    def trashes(self) -> bool:
        """Return whether the matches are trashed, so that they can be restored."""
        return not (self.delete or self.target is not None or self.prints_any())

    def check(self) -> None:
        """Raise UsageError if the options can't be combined."""
        actions = [
            name
            for name, is_given in (
                ("--delete", self.delete), ("--move-to", self.target is not None), ("--print", self.prints),
                ("--print0", self.prints_null),
            )
            if is_given
        ]  # fmt: skip
        if len(actions) > 1:
            raise UsageError(f"{' and '.join(actions)} can't be combined")
        if self.prints_any() and sys.__stdout__ is None:
            raise UsageError("standard output is closed, so paths can't be printed")
        if self.null and self.list_format not in (None, "nul"):
            raise UsageError(f"-0 can't be combined with --from-format {self.list_format}")
        if self.job is not None and not self.delete:
            hint = "MPI ranks can share only deletions, since a filesystem has a single lock for renames"
            raise UsageError("--mpi needs --delete", hint)
        if self.job is not None and (self.paced or self.most is not None):
            raise UsageError(f"--mpi can't be combined with {'--paced' if self.paced else '--max-delete'}")
        only_trashing = "can't be combined with --delete, --move-to or --print"
        needs = (
            ("--from-format", self.list_format is not None, self.has_list(), "needs --from"),
            ("--recursive", self.recursive, self.delete, "needs --delete"),
            ("--if-exists", self.if_exists != "skip", self.target is not None, "needs --move-to"),
            ("--keep-for", self.keep_for is not None, self.trashes(), only_trashing),
            ("--note", bool(self.note), self.trashes(), only_trashing),
            ("--dry-run", self.dry, not self.prints_any(), "can't be combined with --print"),
            ("--confirm-above", self.limit is not None, not self.prints_any(), "can't be combined with --print"),
        )
        for name, is_given, is_allowed, problem in needs:
            if is_given and not is_allowed:
                raise UsageError(f"{name} {problem}")

    def did(self) -> str:
        """Return the action as a participle."""
        if self.target is not None:
            return f"moved to {printable(self.target)}"
        return "deleted" if self.delete else "trashed"


def _by_ranks(job: Any) -> Any:
    from fusefs.sweep.sweep_by_ranks import SweepByRanks  # imported late: needed only with --mpi

    return SweepByRanks(job)


@click.command(
    "sweep",
    cls=Command,
    short_help="Find files by name, size or age, and trash, delete or move them.",
    headings={
        "Select": (
            "--name --iname --path --regex --type --size --older --newer --by --trust-atime --user --group --empty "
            "--depth --exclude --from --null --from-format"
        ),
        "Act": (
            "--keep-for --note --delete --recursive --move-to --if-exists --print --print0 --max-delete --dry-run "
            "--confirm-above --yes"
        ),
        "Pace": "--threads --max-rate --max-bytes --paced --mpi",
        "Output": "--json",
    },
)
@click.argument("directory", type=PathBytes(), metavar="DIR")
@selection_options
@click.option(
    "--from",
    "source",
    type=PathBytes(),
    metavar="FILE",
    help="Consider only the paths listed in FILE (- for standard input), relative to the current directory.",
)
@click.option("-0", "--null", is_flag=True, help="Read a NUL-separated list (find -print0) from --from or stdin.")
@click.option(
    "--from-format",
    "list_format",
    type=click.Choice([one.value for one in ListFormat]),
    help="The format of the list that --from reads. [default: lines]",
)
@click.option("--delete", is_flag=True, help="Delete the matches permanently; directories only if they are empty.")
@click.option("--recursive", is_flag=True, help="With --delete, delete matching directories with their contents.")
@click.option(
    "--move-to",
    "target",
    type=PathBytes(),
    metavar="DEST",
    help="Move the matches to DEST, preserving their paths below DIR.",
)
@click.option(
    "--if-exists",
    type=click.Choice(["skip", "number", "replace"]),
    default="skip",
    help="If the name exists in DEST: skip the match, add a number, or replace the existing file. [default: skip]",
)
@click.option("--print", "prints", is_flag=True, help="Only print the paths; with --json, print an object for each.")
@click.option("--print0", "prints_null", is_flag=True, help="Only print the paths, each followed by NUL.")
@click.option("--keep-for", type=DURATION, help="Keep trashed files restorable for DURATION. [default: 24h]")
@click.option("--note", type=NOTE, default="", help="Store TEXT as a note with the orphan.")
@click.option("--max-delete", "most", type=click.IntRange(0), metavar="N", help="Act on at most N matches.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only count matches and print the largest and oldest ones.")
@click.option(
    "--confirm-above", "limit", type=click.IntRange(0), metavar="N", help="Ask first if there are more than N matches."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--trust-atime", "trusts_atime", is_flag=True, help="Use access times even where they are not reliable.")
@threads_option
@tempo_options
@json_option
@mpi_option(_by_ranks)
def command(**arguments: Any) -> int:
    """Find files below DIR by name, size or age, and trash, delete, move or print them.

    By default, the matches become one orphan in the trash store, which can be restored whole or in part. A match must
    meet all conditions, as with find. DIR itself is never selected, symbolic links are never followed, and mount points
    below DIR are neither entered nor selected. If a sweep is interrupted, run the same command again to finish it.

    \b
    Examples:
      trashd sweep /var/log/app --name '*.log' --older 30d --dry-run
      trashd sweep /var/log/app --name '*.log' --older 30d
      trashd sweep /scratch --size +1G --by atime --older 90d --delete --confirm-above 1000
      trashd sweep /data/in --name '*.csv' --move-to /data/done
      trashd sweep /srv/build --type d --name node_modules --delete --recursive
      find /data -newer mark -print0 | trashd sweep /data -0 --from -
      trashd sweep /gpfs/fs1 --older 90d --from purge.list.old --from-format mmapplypolicy
    """
    kernel = Kernel()
    selection = read_selection(kernel, arguments)
    options = SweepOptions(selection=selection, **arguments)
    options.check()
    if selection.is_everything() and not options.has_list() and not options.prints_any():
        raise UsageError("no condition is given", "--name '*' selects everything; trashd swap DIR empties DIR")
    if not options.trusts_atime and any(bound.field == "atime" for bound in selection.times):
        _refuse_stale(kernel, options)
    try:
        return _act_on(kernel, options)
    except OtherFilesystem as error:
        raise OtherFilesystem(error.detail, _rsync_line(options)) from error


def _refuse_stale(kernel: Kernel, options: SweepOptions) -> None:
    """Refuse to select by access times if these are not reliable in the directory.

    Raises  Refused, and the errors of `find_scope`
    """
    from fusefs.store.victim import find_scope
    from fusefs.sweep.request import refuse_stale

    selection = options.selection
    takes_dirs = selection.empty or bool(selection.types & DIRECTORY)
    with find_scope(kernel, options.directory) as scope:
        refuse_stale(scope, selection.times, time.time_ns(), takes_dirs=takes_dirs, key="--trust-atime")


def _rsync_line(options: SweepOptions) -> str:
    from fusefs.sweep.actions import format_rsync_command
    from fusefs.sweep.request import IfExists

    more = [b"--null"] if options.null else []
    if options.list_format is not None:
        more += [b"--from-format", options.list_format.encode()]
    if options.source is not None:
        more += [b"--from", options.source]
    if options.most is not None:
        more += [b"--max-delete", b"%d" % options.most]
    directory, target = (os.path.abspath(path) for path in (options.directory, options.target or b""))
    return format_rsync_command(directory, options.selection, target, IfExists(options.if_exists), more)


def _act_on(kernel: Kernel, options: SweepOptions) -> int:
    with ExitStack() as owned:
        read = owned.enter_context(_open_list(kernel, options)) if options.has_list() else lambda: None
        if options.confirms():
            _confirm(kernel, options, read())
        with StopSignals() as stop:
            swept = _sweep(kernel, options, read(), stop, counts=options.dry)
            if options.prints_any():  # standard output is for the matches only
                for line in problem_lines(swept):
                    print(f"trashd: {line}", file=sys.stderr)
            else:
                _print_result(options, swept)
            if stop():
                return stop.exit_code()
    if swept.warnings:
        return Unsettled.exit_code
    is_short = swept.sums.n_failed or swept.sums.n_missing or swept.is_limited or swept.is_stopped
    return Incomplete.exit_code if is_short else 0


def _confirm(kernel: Kernel, options: SweepOptions, names: Iterable[ListedPath] | None) -> None:
    """Count the matches, and ask for confirmation if there are more than `--confirm-above` allows.

    Ctrl-C ends the command at once: nothing has been changed yet, and a stop request could not interrupt the question.
    Raises  Refused if the answer is no, or if there is no terminal; UsageError if a list can't be read to its end
    """
    limit = options.limit or 0
    swept = _sweep(kernel, options, names, lambda: False, counts=True)
    if swept.why:
        raise UsageError(swept.why, "nothing was touched")
    if swept.sums.n_done <= limit:
        return
    size = format_size(swept.sums.n_bytes)
    what = f"{output.counted(swept.sums.n_done, 'match', 'matches')} ({size}) would be {options.did()}"
    path = printable(swept.directory)
    if not can_confirm() or options.as_json:
        hint = "confirm with --yes, or see the largest and the oldest with --dry-run"
        raise Refused(f"{path}: {what}, more than {limit:,}", hint)
    if not is_confirmed(f"{path}: {what}. Continue?"):
        raise Refused("not confirmed, so nothing was touched")


def _sweep(
    kernel: Kernel, options: SweepOptions, names: Iterable[ListedPath] | None, stops: ShouldStop, *, counts: bool
) -> Swept:
    from fusefs.engine.pace import open_pacer
    from fusefs.sweep.request import Request, SweepOptions, ToCount
    from fusefs.sweep.run_sweep import run_request as sweep

    act: Any = ToCount(_act(options)) if counts else _act(options)
    request = Request(options.directory, options.selection, act, options.most, names, options.n_workers)
    if counts or options.prints_any():
        return sweep(kernel, request, SweepOptions(stops=stops))
    tempo = Speed(options.max_rate, options.max_bytes)
    # Opened only for the pacer; the sweep opens the directory again, and reports any error.
    with errors_about(options.directory):
        directory = kernel.open_path(options.directory)
    with (
        directory as fd,
        open_pacer(kernel, fd, tempo, output.print_pace if options.paced else None) as pacer,
        ProgressBar(printable(options.directory), shown=not options.as_json) as shows,
    ):
        before = SweepSums()

        def progress(sums: SweepSums) -> None:
            nonlocal before
            shows.advance(sums.n_done + sums.n_inside - before.n_done - before.n_inside, sums.n_bytes - before.n_bytes)
            before = sums

        return sweep(kernel, request, SweepOptions(pacer, progress, stops, options.job))


def _act(options: SweepOptions) -> Any:
    """Return the action, as an object from sweep.request."""
    from fusefs.sweep.request import IfExists, ToDelete, ToMove, ToPrint, ToTrash

    if options.prints_any():
        return ToPrint(partial(_print_objects if options.as_json else _print_paths, options))
    if options.delete:
        return ToDelete(options.recursive)
    if options.target is not None:
        return ToMove(options.target, IfExists(options.if_exists))

    keep_for = DEFAULT_RETENTION_S if options.keep_for is None else options.keep_for
    return ToTrash(SwapOptions(keep_for, options.note, invocation=invocation()))


def _print_result(options: SweepOptions, swept: Swept) -> None:
    did = f"would be {options.did()}" if options.dry else options.did()
    if options.as_json:
        action = "move" if options.target is not None else "delete" if options.delete else "trash"
        as_json(SweepAction(action, options.dry), swept)
    else:
        for line in result_lines(swept, did):
            print(line)
    for warning in swept.warnings:
        output.warn(warning)


def _print_paths(options: SweepOptions, here: Any, names: Sequence[str]) -> list[tuple[str, int]]:
    """Print paths as find does, starting with the directory as it was typed. here: a sweep.request.ActionPlace"""
    end = b"\0" if options.prints_null else b"\n"
    above = join_path(options.directory.rstrip(b"/"), here.upper) + b"/"
    paths = (above + os.fsencode(name) for name in names)
    is_escaped = not options.prints_null and sys.stdout.isatty()
    lines = (printable(path).encode() for path in paths) if is_escaped else paths
    sys.stdout.buffer.write(b"".join(line + end for line in lines))
    return []


def _print_objects(options: SweepOptions, here: Any, names: Sequence[str]) -> list[tuple[str, int]]:
    """Print an object for each entry for which statx succeeds; return the others, each with its errno."""
    above = join_path(options.directory.rstrip(b"/"), here.upper)
    entries, refused = lstat_all(here.kernel, here.sides.fd, names)
    for st in entries:
        path = os.fsdecode(above + b"/" + os.fsencode(st.name))
        match = SweepMatch(path, selection.kind_letter(st.st_mode), st.st_size, st.st_mtime_ns, st.st_uid, st.st_gid)
        sys.stdout.write(json.dumps(match._asdict()) + "\n")
    return refused


@contextmanager
def _open_list(kernel: Kernel, options: SweepOptions) -> Iterator[Callable[[], Iterator[ListedPath]]]:
    """Open the list, and yield a function that reads it from the beginning, path by path.

    If the list has to be read twice but can't be rewound, it is first copied to an unnamed file, not to memory.
    """
    from fusefs.sweep.names_from_list import read_list

    format_ = ListFormat.NUL if options.null else ListFormat(options.list_format or "lines")
    source = _STDIN if options.source is None else options.source
    with ExitStack() as owned:
        if source == _STDIN:
            fd = standard_input()
        else:
            with errors_about(source):
                fd = owned.enter_context(kernel.open_path(source, os.O_RDONLY))
        begins_at = None
        if options.confirms():
            try:
                os.lseek(fd, 0, os.SEEK_CUR)
            except OSError:
                fd = _copied(owned, fd, source)
            begins_at = os.lseek(fd, 0, os.SEEK_CUR)

        def read() -> Iterator[ListedPath]:
            if begins_at is not None:
                os.lseek(fd, begins_at, os.SEEK_SET)
            return _begun(read_list(fd, format_), source)

        yield read


def _copied(owned: ExitStack, fd: int, source: bytes) -> int:
    """Copy the rest of a file to an unnamed file, and return its fd. Raises  TrashdError"""
    import tempfile  # imported late: most lists are read once

    with errors_about(os.fsencode(tempfile.gettempdir())):
        file = owned.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  the stack closes it
    while chunk := _read(fd, source):
        with errors_about(os.fsencode(tempfile.gettempdir())):
            while chunk:
                chunk = chunk[file.write(chunk) :]
    file.seek(0)
    return file.fileno()


def _read(fd: int, source: bytes) -> bytes:
    with errors_about(source):
        return os.read(fd, _CHUNK)


def _begun(names: Iterator[ListedPath], source: bytes) -> Iterator[ListedPath]:
    """Return the absolute paths of a list. The first is read at once, to refuse a bad list before any action."""
    try:
        first = next(names, None)
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise from_os(error.__cause__, source) from error
        raise
    if first is None:
        return iter(())
    return _absolute(os.getcwdb(), chain((first,), names))


def _absolute(here: bytes, names: Iterable[ListedPath]) -> Iterator[ListedPath]:
    """Make paths absolute. In list formats that contain more than paths, the paths are absolute already.

    `here` contains no symbolic links, so a leading `..` can be resolved in the text; a later `..` can't.
    """
    for name in names:
        if isinstance(name, ListedName):
            yield name
            continue
        above = here
        while name == b".." or name.startswith(b"../"):
            above, name = os.path.dirname(above), name[3:].lstrip(b"/")
        yield os.path.join(above, name)
