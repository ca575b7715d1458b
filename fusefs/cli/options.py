"""Options that several commands share, their value types, clock readings, and the recovery that precedes a command."""

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
        """A ParamType that accepts a type argument; click's own class does so only since 8.4 (Debian 13 has 8.2)."""

        def __class_getitem__(cls, _value_type: object) -> type:
            return cls


T = TypeVar("T")
_COMPLETION_LIMIT_S = 0.15


class ParsedValue(ParamType[T], Generic[T]):
    """The type of a value that `parse` parses; `parse` raises ValueError with the message for the user."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Parse a value from the command line; return a default unchanged."""
        if not isinstance(value, str):
            default: T = value
            return default
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = ParsedValue("duration", parse_duration)
"""A duration in seconds, typed as 90s, 15m, 24h, 3d or 2w."""
RATE = ParsedValue("rate", parse_rate)
"""A number of entries or bytes per second."""
NOTE = ParsedValue("text", read_note)
"""A note to show in lists of orphans."""
_MOST_WORKERS = 64


class PathBytes(ParamType[bytes]):
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        return value if isinstance(value, bytes) else os.fsencode(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def _check_volumes(_ctx: click.Context, _param: click.Parameter, volumes: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the volumes unchanged.

    Raises  TrashdError if stat fails for one, because the list of its orphans would otherwise look empty
    """
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
    help="Use only the trash store in DIR, or the nearest one above DIR on the same filesystem (repeatable). "
    "[default: all known stores]",
)
paths_argument: Decorator = click.argument("paths", type=PathBytes(), nargs=-1, metavar="PATH…")
whose_option: Decorator = click.option(
    "--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="As root, choose among the orphans of USER."
)
null_option: Decorator = click.option(
    "-0", "--null", is_flag=True, help="Read more paths from standard input, each terminated by NUL (find -print0)."
)


def note_usage(error: UsageError, ctx: click.Context) -> None:
    """Add the command and its usage line to an error, so that they are printed with the error."""
    error.command = ctx.command_path
    error.usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


class Command(click.Command):
    """A command whose `--help` lists its options under headings and ends with the name of its manual page.

    Options without a heading are listed last, under `Options`.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] | None = None, **attributes: Any) -> None:
        """headings: maps each heading to the long names of the options below it, separated by spaces."""
        super().__init__(*args, **attributes)
        self._headings = dict(headings or {})

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and add its usage line to any UsageError."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            note_usage(error, ctx)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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
        super().format_epilog(ctx, formatter)
        write_manual_page(ctx, formatter)


def write_manual_page(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the name of the manual page for a command, or for the group that contains it."""
    formatter.write_paragraph()
    formatter.write_text(f"Manual page: man {'-'.join(ctx.command_path.split()[:2])}")


def together(options: Sequence[Decorator]) -> Decorator:
    """Combine several options into one decorator; the help lists them in the given order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


threads_option: Decorator = click.option(
    "--threads",
    "n_workers",
    type=click.IntRange(1, _MOST_WORKERS),
    metavar="N",
    help="Work on N directories at a time. [default: chosen for the filesystem]",
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
"""Options that limit the speed: `max_rate`, `max_bytes` and `paced`."""


def mpi_option(shares: Callable[[Any], Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add `--mpi` to a command and pass it `job`, which shares the work among the ranks; `job` is None without --mpi.

    Only the first rank runs the command. The others do the work that the first rank sends them, and print nothing.

    shares  converts an engine.mpi_ranks.MpiJob into `job`
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
                    # A rank that runs as root trusts no other rank and does not serve. The first rank prints the error.
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
    """The type of an ID or a part of one. Shells complete the IDs of the caller's orphans, even if a mount hangs."""

    name = "id"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _complete_id(incomplete)


class OrphanIdOrPath(PathBytes):
    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete IDs if the word may be an ID; otherwise complete paths."""
        items = [] if "/" in incomplete or incomplete.startswith(".") else _complete_id(incomplete)
        return items or super().shell_complete(ctx, param, incomplete)


def _complete_id(incomplete: str) -> list[CompletionItem]:
    """Return completions: IDs, or their random suffixes, that start with the typed text, with the origin as help."""
    from click.shell_completion import CompletionItem

    items = []
    for identifier, origin in _own_orphans():
        if identifier.startswith(incomplete):
            items.append(CompletionItem(identifier, help=origin))
        elif identifier[-ID_RANDOM_CHARS:].startswith(incomplete):
            items.append(CompletionItem(identifier[-ID_RANDOM_CHARS:], help=origin))
    return items


def _own_orphans() -> list[tuple[str, str]]:
    """Return the IDs and origins of the caller's orphans in all known stores, newest first.

    A child process lists them, since a dead mount may block it; if the child takes too long, nothing is completed.
    The child keeps none of our files open, because a shell reads our output until every process has closed it.
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
    """Return the wall clock readings that this user's service and commands stored; empty if the user has no home.

    notes  store the current reading for the next command
    """
    from fusefs.service.state_files import watched_clocks

    with suppress(FileNotFoundError):
        return watched_clocks(state_dir(), notes=notes)
    return ()


class AgeCutoffs:
    """Converts an age to the time that a file of that age has, and corrects it for changes to the wall clock."""

    def __init__(self, kernel: Kernel, *, notes: bool) -> None:
        """notes: store the current reading of the clock for the next command."""
        self.now = read_now(kernel, watched(notes=notes))
        self._set_ns = 0

    def ago(self, span_ns: int) -> int:
        cutoff_ns = self.now.cutoff_ns(span_ns)
        self._set_ns = max(self._set_ns, self.now.wall_ns - span_ns - cutoff_ns)
        return cutoff_ns

    def warn_of_clock(self) -> None:
        """Warn if files are younger than the wall clock makes them seem."""
        if self._set_ns >= STEP_NS:
            ahead = format_duration(round(self._set_ns / 1e9))
            output.warn(f"the wall clock was set forward by {ahead}: files that seem old only because of that are kept")


def tended(
    volumes: Sequence[bytes], kernel: Kernel | None = None, ended: Collection[str] = (), waits: Wait | None = None
) -> Kernel:
    """Complete unfinished operations, adopt dropped entries and fill reserves; print a warning for each failure.

    ended, waits  passed to `recover`
    """
    from fusefs.store.orphans import tidy_all_folders  # imported late: half of the commands use no orphans

    kernel = kernel or Kernel()
    for problem in tidy_all_folders(kernel, volumes, ended, waits):
        output.warn(problem)
    return kernel
