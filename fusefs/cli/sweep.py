"""`trashd sweep`: what is asked for, a question, a bar, and what became of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import click

from fusefs.cli import output, sweep_text
from fusefs.cli.confirm import can_be_asked, is_confirmed
from fusefs.cli.mpi_option import mpi_option
from fusefs.cli.options import DURATION, NOTE, PathBytes, json_option, tempo_options, threads_option
from fusefs.cli.progress_bar import bar
from fusefs.cli.selection_options import selection_options, typed
from fusefs.cli.stop_signals import StopSignals
from fusefs.cli.typed_paths import standard_input
from fusefs.core.errors import Incomplete, OtherFilesystem, Refused, Unsettled, UsageError, errors_about
from fusefs.core.lifecycle import DEFAULT_RETENTION_S
from fusefs.core.listed_names import Listed, ListFormat
from fusefs.core.names import join
from fusefs.core.printable_names import printable
from fusefs.core.report import Stops
from fusefs.core.selection import Selection, letter_of
from fusefs.core.sizes import format_size
from fusefs.core.slice_budget import Speed
from fusefs.core.sweep_result import SweepSums, Swept
from fusefs.linux.batched_calls import look_at_all
from fusefs.linux.fd import Fd
from fusefs.linux.invocation import invocation
from fusefs.linux.kernel import Kernel

_NotTold = list[tuple[str, int]]
"""Names, each with its errno."""
_Prints = Callable[[Kernel, Fd, bytes, "Sequence[str]"], _NotTold]
"""Called with an open directory, its path relative to the sweep's, and names in it; gives those that it can't tell."""


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

    def end(self) -> bytes:
        """What ends a path that is printed."""
        return b"\0" if self.prints_null else b"\n"

    def action(self) -> str:
        """What is done, in a word."""
        return "move" if self.target is not None else "delete" if self.delete else "trash"

    def did(self) -> str:
        """What became of the matches, as a participle."""
        if self.target is not None:
            return f"moved to {printable(self.target)}"
        return "deleted" if self.delete else "trashed"


def _by_ranks(job: Any) -> Any:
    from fusefs.sweep.sweep_by_ranks import SweepByRanks  # with one machine nobody needs it

    return SweepByRanks(job)


@click.command("sweep", short_help="Trash, delete or move what a selection chooses.", no_args_is_help=True)
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
@threads_option
@tempo_options
@json_option
@mpi_option(_by_ranks)
def command(directory: bytes, **options: Any) -> int:
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
    return _sweep({"directory": directory, **options})


def _sweep(told: dict[str, Any]) -> int:
    """Do what a command line asks for; the exit code."""
    kernel = Kernel()
    selection = typed(told).selection(kernel)
    asked = SweepOptions(selection=selection, **told)
    asked.check()
    if selection.is_everything() and not asked.has_list() and not asked.prints_any():
        raise UsageError("nothing says what to take", "all of it is --name '*'; an empty DIR is trashd swap DIR")
    try:
        return _act_on(kernel, asked)
    except OtherFilesystem as error:
        raise OtherFilesystem(error.detail, _rsync_line(asked)) from error


def _rsync_line(asked: SweepOptions) -> str:
    from fusefs.sweep.move_destination import rsync_line
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
        read = owned.enter_context(_list(kernel, asked)) if asked.has_list() else lambda: None
        if asked.asks():
            _confirm(kernel, asked, read())
        with StopSignals() as stop:
            swept = _run(kernel, asked, read(), stop, counts=asked.dry)
            if asked.prints_any():  # standard output has the matches, and nothing else
                for line in sweep_text.beside(swept):
                    print(f"trashd: {line}", file=sys.stderr)
            else:
                _tell(asked, swept)
            if stop():
                return stop.exit_code()
    if swept.warnings:
        return Unsettled.exit_code
    is_short = swept.sums.n_failed or swept.sums.n_missing or swept.is_limited or swept.is_stopped
    return Incomplete.exit_code if is_short else 0


def _list(kernel: Kernel, asked: SweepOptions) -> AbstractContextManager[Callable[[], Iterator[Listed]]]:
    """Raises  UsageError for a format that is told twice"""
    from fusefs.sweep.names_from_list import open_list

    source = asked.source or b"-"
    fd = standard_input() if source == b"-" else None
    how = ListFormat.NUL if asked.null else ListFormat(asked.list_format or "lines")
    return open_list(kernel, source, fd, how, reads_twice=asked.asks())


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
    from fusefs.engine.foreground_pacing import pacer_in
    from fusefs.sweep.request import Request, SweepWishes, ToCount
    from fusefs.sweep.run import run as sweep

    act: Any = ToCount(_act(asked)) if counts else _act(asked)
    request = Request(asked.directory, asked.selection, act, asked.most, names, asked.n_workers)
    if counts or asked.prints_any():
        return sweep(kernel, request, SweepWishes(stops=stops))
    tempo = Speed(asked.max_rate, asked.max_bytes)
    with (
        _opened(kernel, asked.directory) as fd,
        pacer_in(kernel, fd, tempo, output.tell_why if asked.paced else None) as pacer,
        bar(printable(asked.directory), shown=not asked.as_json) as shows,
    ):
        before = SweepSums()

        def progress(sums: SweepSums) -> None:
            nonlocal before
            shows.advance(sums.n_done + sums.n_inside - before.n_done - before.n_inside, sums.n_bytes - before.n_bytes)
            before = sums

        return sweep(kernel, request, SweepWishes(pacer, progress, stops, asked.job))


def _opened(kernel: Kernel, directory: bytes) -> Fd:
    """Where the disk is listened to; the sweep opens it again, and says what is wrong with it if anything is."""
    with errors_about(directory):
        return kernel.open_path(directory, os.O_PATH | os.O_DIRECTORY)


def _act(asked: SweepOptions) -> Any:
    """What is to be done, as sweep.request has it."""
    from fusefs.sweep.request import IfExists, ToDelete, ToMove, ToPrint, ToTrash

    if asked.prints_any():
        prints = _objects(asked.directory) if asked.as_json else _paths(asked.directory, asked.end())
        return ToPrint(lambda here, names: prints(here.kernel, here.sides.fd, here.upper, names))
    if asked.delete:
        return ToDelete(asked.recursive)
    if asked.target is not None:
        return ToMove(asked.target, IfExists(asked.if_exists))
    from fusefs.store.stage import SwapOptions

    keep_for = DEFAULT_RETENTION_S if asked.keep_for is None else asked.keep_for
    return ToTrash(SwapOptions(keep_for, asked.note, invocation=invocation()))


def _tell(asked: SweepOptions, swept: Swept) -> None:
    did = f"would be {asked.did()}" if asked.dry else asked.did()
    if asked.as_json:
        from fusefs.cli.json_objects import SweepAction

        sweep_text.as_json(SweepAction(asked.action(), asked.dry), swept)
    else:
        for line in sweep_text.told(swept, did):
            print(line)
    for warning in swept.warnings:
        output.warn(warning)


def _paths(directory: bytes, end: bytes) -> _Prints:
    """Prints paths as find does, beginning with the directory as it was typed."""
    is_seen = end == b"\n" and sys.stdout.isatty()

    def tell(_kernel: Kernel, _fd: Fd, upper: bytes, names: Sequence[str]) -> _NotTold:
        above = join(directory.rstrip(b"/"), upper) + b"/"
        found = (above + os.fsencode(name) for name in names)
        lines = (printable(path).encode() for path in found) if is_seen else found
        sys.stdout.buffer.write(b"".join(line + end for line in lines))
        return []

    return tell


def _objects(directory: bytes) -> _Prints:
    """Prints an object for each that can be looked at."""
    import json

    from fusefs.cli.json_objects import SweepMatch

    def tell(kernel: Kernel, fd: Fd, upper: bytes, names: Sequence[str]) -> _NotTold:
        above = join(directory.rstrip(b"/"), upper)
        looked, refused = look_at_all(kernel, fd, names)
        for st in looked:
            path = os.fsdecode(above + b"/" + os.fsencode(st.name))
            found = SweepMatch(path, letter_of(st.st_mode), st.st_size, st.st_mtime_ns, st.st_uid, st.st_gid)
            sys.stdout.write(json.dumps(found._asdict()) + "\n")
        return refused

    return tell
