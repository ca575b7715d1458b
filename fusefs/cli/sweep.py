"""trashd sweep: the selection, a question, a progress bar, and the result."""

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
from fusefs.cli.output import can_be_asked, is_confirmed
from fusefs.cli.reap import ProgressBar
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.swap_paths import standard_input
from fusefs.core import results, selection
from fusefs.core.container_states import DEFAULT_RETENTION_S
from fusefs.core.errors import Incomplete, OtherFilesystem, Refused, Unsettled, UsageError, errors_about, from_os
from fusefs.core.human_units import format_size, in_calendar, is_path, parse_when
from fusefs.core.names import join
from fusefs.core.pacing import Speed
from fusefs.core.printable_names import printable
from fusefs.core.record import Failure
from fusefs.core.results import Match, Stops, SweepSums, Swept
from fusefs.core.selection import DIRECTORY, TIMES, Field, Listed, ListedName, ListFormat, Selection, TimeBound
from fusefs.linux.batched_calls import look_at_all
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import invocation
from fusefs.linux.user_ids import gid_of, uid_of
from fusefs.store.stage import SwapOptions

_TOLD = 10
_LAST_DAY = "after 9999"
_OF_PATHS = (
    results.OUTSIDE, results.DOTS, results.UNCLEAR, results.KEPT_BY_OTHERS, results.LOCKED_BY_OTHERS,
    results.LOCKED_BY_UNKNOWN,
)  # fmt: skip
"""What failures name as their call that is said of a path."""


def as_json(action: SweepAction, swept: Swept, *first: PlannedRule) -> None:
    """Print a sweep's result for programs. first: whose sweep it was"""
    sums = ToldSums(*(getattr(swept.sums, name) for name in ToldSums._fields))
    if not swept.looks:
        sums = sums._replace(n_bytes=None)
    undo = None if swept.orphan is None else output.restore_command(swept.orphan, swept.volume)
    output.as_json(*first, action, swept, SweepOutcome(sums, undo), without="looks")


def told(swept: Swept, did: str) -> Iterator[str]:
    """What became of the matches. did: `deleted`, `would be deleted`"""
    yield f"{printable(swept.directory)}: {_sum(swept, did)}"
    if swept.orphan is not None:
        yield f"  id    {swept.orphan}"
        yield f"  undo  {output.restore_command(swept.orphan, swept.volume)}"
        yield f"  until {output.until(swept.expires_ns)}"
    for line in (*_matches("largest", swept.largest), *_matches("oldest", swept.oldest), *beside(swept)):
        yield f"  {line}"


def _sum(swept: Swept, did: str) -> str:
    sums = swept.sums
    if not (sums.n_matched or sums.n_vanished or swept.is_limited or swept.is_stopped):
        return "nothing matches"
    size = f" ({format_size(sums.n_bytes)})" if swept.looks else ""
    inside = f", with {output.counted(sums.n_inside, 'entry', 'entries')} in them" if sums.n_inside else ""
    vanished = f"; {output.counted(sums.n_vanished, 'match', 'matches')} vanished meanwhile" if sums.n_vanished else ""
    return f"{output.counted(sums.n_done, 'match', 'matches')}{size} {did}{inside}{vanished}"


def beside(swept: Swept) -> Iterator[str]:
    """What is to be known beside the count."""
    yield from _first([_failed(one) for one in swept.failures], swept.sums.n_failed)
    spared = [f"left: {printable(one.name) or '.'} ({one.why})" for one in swept.spared]
    yield from _first(spared, swept.sums.n_spared)
    if swept.sums.n_missing:
        is_one = swept.sums.n_missing == 1
        yield f"{output.counted(swept.sums.n_missing, 'path')} of the list {'is' if is_one else 'are'} not there"
    if swept.sums.n_unmatched:
        does = "does" if swept.sums.n_unmatched == 1 else "do"
        yield f"{output.counted(swept.sums.n_unmatched, 'path')} of the list {does} not match the selection"
        yield "  (directories match only with --type d)"
    if not swept.sums.n_seen and (swept.sums.n_missing or any(one.call == results.OUTSIDE for one in swept.failures)):
        yield "hint: none of the list was found; its paths are relative to where you are, as find tells them from there"
    if swept.sums.n_mounts:
        yield f"not entered: {output.counted(swept.sums.n_mounts, 'mount')}"
    if swept.is_limited:
        yield "there are more matches: the rest is left"
    if swept.why:
        yield f"stopped: {swept.why}"
    elif swept.is_stopped:
        yield "stopped; the same command does the rest"


def _failed(one: Failure) -> str:
    if one.call in _OF_PATHS:
        return f"{one.call}: {printable(one.name) or '.'}"
    if one.call in (results.NOT_TAKEN, results.NOT_GIVEN):
        return f"left: {printable(one.name) or '.'} ({one.call})"
    return f"{one.call} {printable(one.name) or '.'}: {os.strerror(one.errno)}"


def _first(lines: Sequence[str], count: int) -> Iterator[str]:
    """The first lines of so many."""
    yield from lines[:_TOLD]
    n_more = count - min(len(lines), _TOLD)
    if n_more > 0:
        yield f"and {n_more:,} more"


def _matches(head: str, matches: Sequence[Match]) -> Iterator[str]:
    for match in matches:
        day = in_calendar(match.time_ns, "%Y-%m-%d", _LAST_DAY)
        yield f"{head:<8}{format_size(match.n_bytes):>10}  {day}  {printable(match.path)}"
        head = ""


def _many(name: str, field: str, read: ParamType[Any], metavar: str, told: str) -> Decorator:
    return click.option(name, field, type=read, multiple=True, metavar=metavar, help=told)


selection_options = together((
    _many("--name", "names", ParsedValue("glob", selection.check_name), "GLOB", "The name matches, as find has it."),
    _many(
        "--iname", "inames", ParsedValue("glob", partial(selection.check_name, ignores_case=True)), "GLOB",
        "The same, ignoring case.",
    ),
    _many(
        "--path", "paths", ParsedValue("glob", selection.check_path), "GLOB",
        "The path below DIR matches; * takes slashes too.",
    ),
    _many(
        "--regex", "regexes", ParsedValue("regex", selection.check_regex), "REGEX",
        "That whole path matches (Python's re).",
    ),
    _many(
        "--type", "types", ParsedValue("types", selection.parse_types), "f,d,l,p,s,b,c",
        "Of one of these types; default: all but d.",
    ),
    _many(
        "--size", "sizes", ParsedValue("size", selection.parse_size_bound), "[+-]N[KMGT]",
        "Larger, smaller, exactly so many bytes.",
    ),
    click.option("--older", multiple=True, metavar="WHEN", help="Before WHEN: 7d, 2026-11-01, @SECONDS, ./FILE."),
    click.option("--newer", multiple=True, metavar="WHEN", help="After WHEN."),
    _many("--by", "by", click.Choice(TIMES), "|".join(TIMES), "The time that is meant (mtime)."),
    _many("--user", "uids", ParsedValue("user", uid_of), "USER", "Owned by that user, a name or number."),
    _many("--group", "gids", ParsedValue("group", gid_of), "GROUP", "Of that group."),
    click.option("--empty", is_flag=True, help="Empty files and directories."),
    _many(
        "--depth", "depths", ParsedValue("depth", selection.parse_depths), "N|A..B",
        "At most N levels below DIR, or from A to B; its own entries are at 1.",
    ),
    _many(
        "--exclude", "excludes", ParsedValue("glob", selection.check_exclude), "GLOB",
        "Neither take nor enter what matches; by path if it has a slash.",
    ),
))  # fmt: skip
"""For a command that takes them as keywords; `read_selection` makes one value of them."""


def read_selection(kernel: Kernel, options: dict[str, Any]) -> Selection:
    """The selection of a command's options, out of which it takes them.

    Times are read when it is known which of a file's is meant.
    Raises  UsageError; NotFound for a file whose time was meant
    """
    older, newer = options.pop("older"), options.pop("newer")
    by = _time_of(options.pop("by"), is_asked=bool(older or newer))
    times = list[TimeBound]()
    try:
        if older or newer:
            cutoffs = AgeCutoffs(kernel, notes=bool(older))
            now_ns = cutoffs.now.wall_ns
            times += [TimeBound(by, before_ns=_when(kernel, text, by, now_ns, cutoffs.ago)) for text in older]
            times += [TimeBound(by, after_ns=_when(kernel, text, by, now_ns)) for text in newer]
            cutoffs.tell()
        types = selection.common_types(options.pop("types"))
        least, most = selection.common_depths(options.pop("depths"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    others = {name: options.pop(name) for name in Selection._fields if name in options}
    return Selection(types=types, times=tuple(times), min_depth=least, max_depth=most, **others)


def _time_of(by: tuple[Field, ...], *, is_asked: bool) -> Field:
    """The time that is meant. Raises  UsageError if nothing is asked of it, or if several are meant"""
    if by and not is_asked:
        raise UsageError("--by without --older or --newer", "it says which time of a file they mean")
    match tuple(dict.fromkeys(by)):
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


_STDIN = b"-"
_CHUNK = 1 << 20


class SweepOptions(NamedTuple):
    """What a command line asks for, named as the parameters of `command`."""

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
        """Whether names are read, instead of a walk."""
        return self.source is not None or self.null

    def asks(self) -> bool:
        """Whether the matches are counted first, for a question."""
        return self.limit is not None and not self.yes and not self.dry

    def prints_any(self) -> bool:
        """Whether nothing is done but that."""
        return self.prints or self.prints_null

    def trashes(self) -> bool:
        """Whether the matches can be restored."""
        return not (self.delete or self.target is not None or self.prints_any())

    def check(self) -> None:
        """Raises  UsageError for options that don't go together"""
        actions = [
            name
            for name, is_asked in (
                ("--delete", self.delete), ("--move-to", self.target is not None), ("--print", self.prints),
                ("--print0", self.prints_null),
            )
            if is_asked
        ]  # fmt: skip
        if len(actions) > 1:
            raise UsageError(" with ".join(actions), "one action at a time")
        if self.prints_any() and sys.__stdout__ is None:
            raise UsageError("standard output is closed", "that is where paths are printed")
        if self.null and self.list_format not in (None, "nul"):
            raise UsageError(f"-0 with --from-format {self.list_format}", "they say two things of one list")
        needs = (
            ("--from-format", self.list_format is not None, self.has_list(), "--from"),
            ("--recursive", self.recursive, self.delete, "--delete"),
            ("--if-exists", self.if_exists != "skip", self.target is not None, "--move-to"),
            ("--keep-for", self.keep_for is not None, self.trashes(), "trashing"),
            ("--note", bool(self.note), self.trashes(), "trashing"),
            ("--dry-run", self.dry, not self.prints_any(), "an action that changes something"),
            ("--confirm-above", self.limit is not None, not self.prints_any(), "an action that changes something"),
        )
        if self.job is not None and not self.delete:
            hint = "trashing and moving are renames, for which a filesystem has one lock: ranks share a --delete"
            raise UsageError("--mpi without --delete", hint)
        if self.job is not None and (self.paced or self.most is not None):
            raise UsageError(
                f"--mpi with {'--paced' if self.paced else '--max-delete'}", "one machine alone can do that"
            )
        for name, is_asked, is_there, other in needs:
            if is_asked and not is_there:
                raise UsageError(f"{name} is for {other} only", "leave it out")

    def did(self) -> str:
        """What became of the matches, as a participle."""
        if self.target is not None:
            return f"moved to {printable(self.target)}"
        return "deleted" if self.delete else "trashed"


def _by_ranks(job: Any) -> Any:
    from fusefs.sweep.sweep_by_ranks import SweepByRanks  # with one machine nobody needs it

    return SweepByRanks(job)


@click.command("sweep", cls=Command, short_help="Trash, delete or move what a selection chooses.", no_args_is_help=True)
@click.argument("directory", type=PathBytes(), metavar="DIR")
@selection_options
@click.option(
    "--from",
    "source",
    type=PathBytes(),
    metavar="FILE",
    help="Only the paths in a list (-: standard input), as find tells them from here.",
)
@click.option("-0", "--null", is_flag=True, help="Its names end with NUL (find -print0), not with a newline.")
@click.option(
    "--from-format",
    "list_format",
    type=click.Choice([one.value for one in ListFormat]),
    help="Or it is as one of these writes it (lines).",
)
@click.option("--delete", is_flag=True, help="Delete the matches for good; directories only if they are empty.")
@click.option("--recursive", is_flag=True, help="With --delete: matching directories with all that they hold.")
@click.option("--move-to", "target", type=PathBytes(), metavar="DEST", help="Move them below DEST, keeping their tree.")
@click.option(
    "--if-exists",
    type=click.Choice(["skip", "number", "replace"]),
    default="skip",
    help="What to do where a name is taken in DEST: leave the match and say so, add a number, replace (skip).",
)
@click.option("--print", "prints", is_flag=True, help="Only print their paths; with --json one object for each.")
@click.option("--print0", "prints_null", is_flag=True, help="The same, each ended by NUL.")
@click.option("--keep-for", type=DURATION, help="Trashed, they can be restored that long (24h).")
@click.option("--note", type=NOTE, default="", help="A sentence kept with the orphan.")
@click.option("--max-delete", "most", type=click.IntRange(0), metavar="N", help="Act on so many matches at most.")
@click.option("-n", "--dry-run", "dry", is_flag=True, help="Only count them, and show the largest and the oldest.")
@click.option("--confirm-above", "limit", type=click.IntRange(0), metavar="N", help="Ask first if more than N match.")
@click.option("--yes", is_flag=True, help="The answer to that question.")
@click.option("--trust-atime", "trusts_atime", is_flag=True, help="Go --by atime where reads are not recorded, too.")
@threads_option
@tempo_options
@json_option
@mpi_option(_by_ranks)
def command(**told: Any) -> int:
    """Trash what a selection chooses below DIR: one orphan, restorable whole or in part. Or delete, move, print it.

    All that is told must hold, as with find. DIR itself is never chosen, a link is never followed, and what is mounted
    below DIR is neither entered nor taken. After Ctrl-C, or however it ended, the same command does the rest.

    With --mpi, started as `mpiexec -n N trashd sweep --mpi DIR … --delete`, N ranks on as many machines share it.

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
    selection = read_selection(kernel, told)
    asked = SweepOptions(selection=selection, **told)
    asked.check()
    if selection.is_everything() and not asked.has_list() and not asked.prints_any():
        raise UsageError("nothing says what to take", "all of it is --name '*'; an empty DIR is trashd swap DIR")
    if not asked.trusts_atime and any(bound.field == "atime" for bound in selection.times):
        _refuse_stale(kernel, asked)
    try:
        return _act_on(kernel, asked)
    except OtherFilesystem as error:
        raise OtherFilesystem(error.detail, _rsync_line(asked)) from error


def _refuse_stale(kernel: Kernel, asked: SweepOptions) -> None:
    """Refuse a choice by access times that are not kept there. Raises  Refused; what `find_scope` does"""
    from fusefs.store.victim import find_scope
    from fusefs.sweep.request import refuse_stale

    selection = asked.selection
    takes_dirs = selection.empty or bool(selection.types & DIRECTORY)
    with find_scope(kernel, asked.directory) as scope:
        refuse_stale(scope, selection.times, time.time_ns(), takes_dirs=takes_dirs, key="--trust-atime")


def _rsync_line(asked: SweepOptions) -> str:
    from fusefs.sweep.actions import rsync_line
    from fusefs.sweep.request import IfExists

    more = [b"--null"] if asked.null else []
    if asked.list_format is not None:
        more += [b"--from-format", asked.list_format.encode()]
    if asked.source is not None:
        more += [b"--from", asked.source]
    if asked.most is not None:
        more += [b"--max-delete", b"%d" % asked.most]
    directory, target = (os.path.abspath(path) for path in (asked.directory, asked.target or b""))
    return rsync_line(directory, asked.selection, target, IfExists(asked.if_exists), more)


def _act_on(kernel: Kernel, asked: SweepOptions) -> int:
    with ExitStack() as owned:
        read = owned.enter_context(_open_list(kernel, asked)) if asked.has_list() else lambda: None
        if asked.asks():
            _confirm(kernel, asked, read())
        with StopSignals() as stop:
            swept = _run(kernel, asked, read(), stop, counts=asked.dry)
            if asked.prints_any():  # standard output has the matches, and nothing else
                for line in beside(swept):
                    print(f"trashd: {line}", file=sys.stderr)
            else:
                _tell(asked, swept)
            if stop():
                return stop.exit_code()
    if swept.warnings:
        return Unsettled.exit_code
    is_short = swept.sums.n_failed or swept.sums.n_missing or swept.is_limited or swept.is_stopped
    return Incomplete.exit_code if is_short else 0


def _confirm(kernel: Kernel, asked: SweepOptions, names: Iterable[Listed] | None) -> None:
    """Ask whether so many are meant.

    Ctrl-C ends it at once, as nothing was begun: a question that waits for its answer can't come to a clean end.
    Raises  Refused if they aren't, or if there is no terminal to ask at; UsageError for a list that breaks off
    """
    limit = asked.limit or 0
    found = _run(kernel, asked, names, lambda: False, counts=True)
    if found.why:
        raise UsageError(found.why, "nothing was touched")
    if found.sums.n_done <= limit:
        return
    size = format_size(found.sums.n_bytes)
    what = f"{output.counted(found.sums.n_done, 'match', 'matches')} ({size}) would be {asked.did()}"
    if not can_be_asked() or asked.as_json:
        raise Refused(f"{what}, more than {limit:,}", "--yes does it all the same; --dry-run shows more of them")
    if not is_confirmed(f"{printable(found.directory)}: {what}. Go on?"):
        raise Refused("nothing was touched")


def _run(kernel: Kernel, asked: SweepOptions, names: Iterable[Listed] | None, stops: Stops, *, counts: bool) -> Swept:
    from fusefs.engine.pace import pacer_in
    from fusefs.sweep.request import Request, SweepWishes, ToCount
    from fusefs.sweep.run import run as sweep

    act: Any = ToCount(_act(asked)) if counts else _act(asked)
    request = Request(asked.directory, asked.selection, act, asked.most, names, asked.n_workers)
    if counts or asked.prints_any():
        return sweep(kernel, request, SweepWishes(stops=stops))
    tempo = Speed(asked.max_rate, asked.max_bytes)
    # Where the disk is listened to; the sweep opens it again, and says what is wrong with it if anything is.
    with errors_about(asked.directory):
        directory = kernel.open_path(asked.directory)
    with (
        directory as fd,
        pacer_in(kernel, fd, tempo, output.tell_why if asked.paced else None) as pacer,
        ProgressBar(printable(asked.directory), shown=not asked.as_json) as shows,
    ):
        before = SweepSums()

        def progress(sums: SweepSums) -> None:
            nonlocal before
            shows.advance(sums.n_done + sums.n_inside - before.n_done - before.n_inside, sums.n_bytes - before.n_bytes)
            before = sums

        return sweep(kernel, request, SweepWishes(pacer, progress, stops, asked.job))


def _act(asked: SweepOptions) -> Any:
    """What is to be done, as sweep.request has it."""
    from fusefs.sweep.request import IfExists, ToDelete, ToMove, ToPrint, ToTrash

    if asked.prints_any():
        return ToPrint(partial(_print_objects if asked.as_json else _print_paths, asked))
    if asked.delete:
        return ToDelete(asked.recursive)
    if asked.target is not None:
        return ToMove(asked.target, IfExists(asked.if_exists))

    keep_for = DEFAULT_RETENTION_S if asked.keep_for is None else asked.keep_for
    return ToTrash(SwapOptions(keep_for, asked.note, invocation=invocation()))


def _tell(asked: SweepOptions, swept: Swept) -> None:
    did = f"would be {asked.did()}" if asked.dry else asked.did()
    if asked.as_json:
        action = "move" if asked.target is not None else "delete" if asked.delete else "trash"
        as_json(SweepAction(action, asked.dry), swept)
    else:
        for line in told(swept, did):
            print(line)
    for warning in swept.warnings:
        output.warn(warning)


def _print_paths(asked: SweepOptions, here: Any, names: Sequence[str]) -> list[tuple[str, int]]:
    """Print paths as find does, beginning with the directory as it was typed. here: sweep.request.ActionPlace"""
    end = b"\0" if asked.prints_null else b"\n"
    above = join(asked.directory.rstrip(b"/"), here.upper) + b"/"
    paths = (above + os.fsencode(name) for name in names)
    is_seen = not asked.prints_null and sys.stdout.isatty()
    lines = (printable(path).encode() for path in paths) if is_seen else paths
    sys.stdout.buffer.write(b"".join(line + end for line in lines))
    return []


def _print_objects(asked: SweepOptions, here: Any, names: Sequence[str]) -> list[tuple[str, int]]:
    """Print an object for each that can be looked at; the names of the others, each with its errno."""
    above = join(asked.directory.rstrip(b"/"), here.upper)
    looked, refused = look_at_all(here.kernel, here.sides.fd, names)
    for st in looked:
        path = os.fsdecode(above + b"/" + os.fsencode(st.name))
        match = SweepMatch(path, selection.letter_of(st.st_mode), st.st_size, st.st_mtime_ns, st.st_uid, st.st_gid)
        sys.stdout.write(json.dumps(match._asdict()) + "\n")
    return refused


@contextmanager
def _open_list(kernel: Kernel, asked: SweepOptions) -> Iterator[Callable[[], Iterator[Listed]]]:
    """What reads a list from its beginning, as its names are needed.

    If it is read twice, what can't be read again is copied to a file without a name, not to memory.
    """
    from fusefs.sweep.names_from_list import read_list

    how = ListFormat.NUL if asked.null else ListFormat(asked.list_format or "lines")
    source = _STDIN if asked.source is None else asked.source
    with ExitStack() as owned:
        if source == _STDIN:
            fd = standard_input()
        else:
            with errors_about(source):
                fd = owned.enter_context(kernel.open_path(source, os.O_RDONLY))
        begins_at = None
        if asked.asks():
            try:
                os.lseek(fd, 0, os.SEEK_CUR)
            except OSError:
                fd = _copied(owned, fd, source)
            begins_at = os.lseek(fd, 0, os.SEEK_CUR)

        def read() -> Iterator[Listed]:
            if begins_at is not None:
                os.lseek(fd, begins_at, os.SEEK_SET)
            return _begun(read_list(fd, how), source)

        yield read


def _copied(owned: ExitStack, fd: int, source: bytes) -> int:
    """A file with what can be read from an fd. Raises  TrashdError"""
    import tempfile  # most lists are read once

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


def _begun(names: Iterator[Listed], source: bytes) -> Iterator[Listed]:
    """The names of a list as absolute paths, the first one read: what is no list is refused before anything is done."""
    try:
        first = next(names, None)
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise from_os(error.__cause__, source) from error
        raise
    if first is None:
        return iter(())
    return _absolute(os.getcwdb(), chain((first,), names))


def _absolute(here: bytes, names: Iterable[Listed]) -> Iterator[Listed]:
    """A name of a format that has more than names is so already, or it is none.

    Where we are is told without links, so that `..` in front of a name means what it says; not elsewhere.
    """
    for name in names:
        if isinstance(name, ListedName):
            yield name
            continue
        above = here
        while name == b".." or name.startswith(b"../"):
            above, name = os.path.dirname(above), name[3:].lstrip(b"/")
        yield os.path.join(above, name)
