"""Options that several commands share, types of their values, clocks, and the recovery before a list."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from fusefs.cli import output
from fusefs.cli.swap_paths import read_note
from fusefs.core.errors import Refused, UsageError, errors_about
from fusefs.core.human_units import format_duration, parse_duration, parse_rate
from fusefs.core.names import ID_RANDOM_CHARS
from fusefs.core.orphan_age import STEP_NS, Clock
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import read_now
from fusefs.linux.runtime_directories import state_dir
from fusefs.linux.user_ids import uid_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from fusefs.store.silent_nodes import Wait

    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """Accepts a type argument, which click's class does not before 8.4 (Debian 13 has 8.2)."""

        def __class_getitem__(cls, _value_type: object) -> type:
            return cls


T = TypeVar("T")
_COMPLETION_LIMIT_S = 0.15


class ParsedValue(ParamType[T], Generic[T]):
    """A value that a function parses; its ValueError has the message."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Parse a value; a default is used as it is."""
        if not isinstance(value, str):
            default: T = value
            return default
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = ParsedValue("duration", parse_duration)
"""Seconds, typed as 90s, 15m, 24h, 3d, 2w."""
RATE = ParsedValue("rate", parse_rate)
"""An amount per second."""
NOTE = ParsedValue("text", read_note)
"""A note that lists show."""
_MOST_WORKERS = 64


class PathBytes(ParamType[bytes]):
    """A path as bytes."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Encode an argument as the filesystem does."""
        return value if isinstance(value, bytes) else os.fsencode(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete file names."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def _check_volumes(_ctx: click.Context, _param: click.Parameter, volumes: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the volumes. Raises  TrashdError if stat fails for one: a list of it would seem to be empty"""
    for volume in volumes:
        with errors_about(volume):
            os.stat(volume)
    return volumes


volume_option: Decorator = click.option(
    "--volume",
    "volumes",
    type=PathBytes(),
    multiple=True,
    metavar="DIR",
    callback=_check_volumes,
    help="Only the trash store in DIR, or the nearest one above DIR on the same filesystem (repeatable). "
    "[default: all known stores]",
)
paths_argument: Decorator = click.argument("paths", type=PathBytes(), nargs=-1, metavar="PATH…")
whose_option: Decorator = click.option(
    "--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="As root, restrict to orphans of USER."
)
null_option: Decorator = click.option(
    "-0", "--null", is_flag=True, help="Read more paths from standard input, each ended by NUL (find -print0)."
)


def note_usage(error: UsageError, ctx: click.Context) -> None:
    """Have an error print the command whose command line is wrong, and its usage."""
    error.command = ctx.command_path
    error.usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


class Command(click.Command):
    """A command whose `--help` lists its options under headings and ends with the name of its manual page.

    Options without a heading are listed last, under `Options`.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] | None = None, **attributes: Any) -> None:
        """headings: maps each heading to the long names of its options, separated by spaces."""
        super().__init__(*args, **attributes)
        self._headings = dict(headings or {})

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a UsageError that it raises gets its usage line."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            note_usage(error, ctx)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each heading."""
        listed = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                listed[param.opts[-1]] = record
        sections = [
            (heading, [listed.pop(name) for name in names.split()]) for heading, names in self._headings.items()
        ]
        for heading, records in [*sections, ("Options", list(listed.values()))]:
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog and the name of the manual page."""
        super().format_epilog(ctx, formatter)
        write_manual_page(ctx, formatter)


def write_manual_page(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the name of the manual page of a command, or of the group that it is in."""
    formatter.write_paragraph()
    formatter.write_text(f"Manual page: man {'-'.join(ctx.command_path.split()[:2])}")


def together(options: Sequence[Decorator]) -> Decorator:
    """Combine several options into one decorator; the help lists them in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


threads_option: Decorator = click.option(
    "--threads",
    "n_workers",
    type=click.IntRange(1, _MOST_WORKERS),
    metavar="N",
    help="Work on N directories at a time. [default: fastest for the filesystem]",
)
tempo_options = together(
    (
        click.option("--max-rate", type=RATE, metavar="N/s", help="Process at most N entries per second."),
        click.option(
            "--max-bytes",
            type=RATE,
            metavar="N/s",
            help="Process at most N bytes per second (K, M, G: powers of 1024).",
        ),
        click.option(
            "--paced", is_flag=True, help="Yield to other users of the disk; run at full speed while there are none."
        ),
    )
)
"""Limits of the speed: `max_rate`, `max_bytes` and `paced`."""


def mpi_option(shares: Callable[[Any], Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add `--mpi` to a command, which then gets `job`: shares the work among the ranks; None without --mpi.

    Only the first rank runs the command. The others carry out what it sends them, and print nothing.

    shares  makes `job` of an engine.mpi_ranks.MpiJob
    """

    def decorated(act: Callable[..., int]) -> Callable[..., int]:
        @click.option(
            "--mpi", is_flag=True, help="Share the work with the other ranks of an MPI job (mpiexec -n N trashd …)."
        )
        @wraps(act)
        def command(*args: Any, mpi: bool, **options: Any) -> int:
            if not mpi:
                return act(*args, **options, job=None)
            from fusefs.engine.mpi_ranks import join_job

            with join_job() as job:
                uids = job.uids()
                if not job.is_first:
                    # A rank of root's trusts no other: the first, which may be a user's, prints why it is refused.
                    return job.serve(Kernel()) if os.geteuid() else 0
                hint = "start all ranks as the user who owns the files"
                if 0 in uids:
                    raise Refused(f"rank {uids.index(0)} runs as root", hint)
                if len({*uids}) > 1:
                    raise Refused("the ranks run as different users", hint)
                return act(*args, **options, job=shares(job))

        return command

    return decorated


class OrphanId(ParamType[str]):
    """An ID, or a part of one. A shell completes the caller's own IDs, at once even if a mount hangs."""

    name = "id"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the IDs of the caller's own orphans."""
        return _complete_id(incomplete)


class OrphanIdOrPath(PathBytes):
    """An ID or a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete IDs if the word may be one, else paths."""
        items = [] if "/" in incomplete or incomplete.startswith(".") else _complete_id(incomplete)
        return items or super().shell_complete(ctx, param, incomplete)


def _complete_id(incomplete: str) -> list[CompletionItem]:
    """IDs that begin with a text, and random ends of IDs that do, each with its origin as help."""
    from click.shell_completion import CompletionItem

    items = []
    for identifier, origin in _own_orphans():
        if identifier.startswith(incomplete):
            items.append(CompletionItem(identifier, help=origin))
        elif identifier[-ID_RANDOM_CHARS:].startswith(incomplete):
            items.append(CompletionItem(identifier[-ID_RANDOM_CHARS:], help=origin))
    return items


def _own_orphans() -> list[tuple[str, str]]:
    """The IDs and origins of the caller's orphans in all known stores, newest first.

    A child process lists them, since a dead mount may block it; completion does without an answer that is late. The
    child keeps none of our files open: a shell reads our output until every process has closed it.
    """
    from fusefs.linux.children import ask_each
    from fusefs.store.orphans import list_all_containers

    own = os.geteuid()

    def list_own(_asked: None) -> bytes:
        entries = (entry for entry in list_all_containers(Kernel(), (), []) if entry.uid == own)
        return "".join(f"{entry.id}\t{output.origin(entry.origin)}\n" for entry in entries).encode()

    ((_asked, answer),) = ask_each((None,), list_own, set(), lambda _asked: None, limit_s=_COMPLETION_LIMIT_S)
    pairs = [line.split(b"\t", 1) for line in (answer or b"").split(b"\n")[:-1]]
    return [(identifier.decode(), origin.decode()) for identifier, origin in reversed(pairs)]


def watched(*, notes: bool = True) -> tuple[Clock, ...]:
    """Readings of the wall clock that this user's service and commands stored; none for a user without a home.

    notes  store the present reading for the next command
    """
    from fusefs.service.state_files import watched_clocks

    with suppress(FileNotFoundError):
        return watched_clocks(state_dir(), notes=notes)
    return ()


class AgeCutoffs:
    """Times before which a file has a certain age, corrected for changes of the wall clock since its last reading."""

    def __init__(self, kernel: Kernel, *, notes: bool) -> None:
        """notes: store the present reading of the clock for the next command."""
        self.now = read_now(kernel, watched(notes=notes))
        self._set_ns = 0

    def ago(self, span_ns: int) -> int:
        """The time that is so many nanoseconds ago."""
        cutoff_ns = self.now.cutoff_ns(span_ns)
        self._set_ns = max(self._set_ns, self.now.wall_ns - span_ns - cutoff_ns)
        return cutoff_ns

    def warn_of_clock(self) -> None:
        """Warn if files are not as old as the wall clock makes them seem."""
        if self._set_ns >= STEP_NS:
            ahead = format_duration(round(self._set_ns / 1e9))
            output.warn(f"the wall clock was set forward by {ahead}: files that seem old only because of that are kept")


def tended(
    volumes: Sequence[bytes], kernel: Kernel | None = None, ended: Collection[str] = (), waits: Wait | None = None
) -> Kernel:
    """Complete unfinished operations, adopt drops and stock reserves, as far as the caller may; warn of what failed.

    ended, waits  as for `recover`
    """
    from fusefs.store.orphans import tidy_all_folders  # late: half of the commands have options and no orphans

    kernel = kernel or Kernel()
    for problem in tidy_all_folders(kernel, volumes, ended, waits):
        output.warn(problem)
    return kernel
