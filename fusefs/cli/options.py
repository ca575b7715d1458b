"""What several commands share: options and their values, clocks, and recovery before a list."""

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
from fusefs.linux.machine_identity import moment
from fusefs.linux.runtime_directories import state_dir
from fusefs.linux.user_ids import uid_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from fusefs.store.silent_nodes import Waits

    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """One that can be told of which type its values are, as that of click before 8.4 can't (Debian 13 has 8.2)."""

        def __class_getitem__(cls, _value_type: object) -> type:
            return cls


T = TypeVar("T")
_COMPLETION_LIMIT_S = 0.15


class ParsedValue(ParamType[T], Generic[T]):
    """A value as a function reads it, which says by ValueError what is wrong."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Read one; a default is not read."""
        if not isinstance(value, str):
            default: T = value
            return default
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = ParsedValue("duration", parse_duration)
"""Seconds, typed as 90s, 15m, 24h, 3d, 2w."""
RATE = ParsedValue("rate", parse_rate)
"""An amount a second."""
NOTE = ParsedValue("text", read_note)
"""A sentence that lists show."""
_MOST_WORKERS = 64


class PathBytes(ParamType[bytes]):
    """A path as the kernel has it."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Bytes of an argument."""
        return value if isinstance(value, bytes) else os.fsencode(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Have the shell look for it."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")


def _check_volumes(_ctx: click.Context, _param: click.Parameter, volumes: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The volumes as they were given. Raises  TrashdError if one can't be looked at: it would seem to be empty"""
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
    help="Look only in the store in DIR, or else in the nearest above it on the same filesystem (may be repeated); "
    "default: all that are known.",
)
paths_argument: Decorator = click.argument("paths", type=PathBytes(), nargs=-1, metavar="PATH…")
whose_option: Decorator = click.option(
    "--user", "uid", type=ParsedValue("user", uid_of), metavar="USER", help="Whose orphan, for root."
)
null_option: Decorator = click.option(
    "-0", "--null", is_flag=True, help="Read more paths from standard input, separated by NUL (find -print0)."
)


def note_usage(error: UsageError, ctx: click.Context) -> None:
    """Have an error print the command whose command line is wrong, and its usage."""
    error.command = ctx.command_path
    error.usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])


class Command(click.Command):
    """A command whose `--help` lists its options under headings and ends with the name of its manual page.

    Options that no heading names are listed last, under `Options`.
    """

    def __init__(self, *args: Any, headings: Mapping[str, str] | None = None, **attributes: Any) -> None:
        """headings: the long names of options, separated by spaces, by their heading."""
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
        """Write the options, each heading a section of its own."""
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
    """Several options as one, listed in their order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


threads_option: Decorator = click.option(
    "--threads",
    "n_workers",
    type=click.IntRange(1, _MOST_WORKERS),
    metavar="N",
    help="Work on so many directories at a time; default: what is fastest on the filesystem.",
)
tempo_options = together(
    (
        click.option("--max-rate", type=RATE, metavar="N/s", help="At most N entries a second."),
        click.option(
            "--max-bytes", type=RATE, metavar="N/s", help="At most N bytes a second (K, M, G: powers of 1024)."
        ),
        click.option(
            "--paced", is_flag=True, help="Make way for whoever else works on the disk; full speed if nobody does."
        ),
    )
)
"""How fast it may go: `max_rate`, `max_bytes` and `paced`."""


def mpi_option(shares: Callable[[Any], Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command that gets `job`: what has the ranks of its MPI job share the work, as the first; None without --mpi.

    The other ranks do what the first sends them, and say nothing.

    shares  makes it of the job (engine.mpi_ranks.MpiJob)
    """

    def decorated(act: Callable[..., int]) -> Callable[..., int]:
        @click.option(
            "--mpi", is_flag=True, help="Be a rank of an MPI job (mpiexec -n N trashd …), all of which share it."
        )
        @wraps(act)
        def command(*args: Any, mpi: bool, **options: Any) -> int:
            if not mpi:
                return act(*args, **options, job=None)
            from fusefs.engine.mpi_ranks import joined

            with joined() as job:
                uids = job.uids()
                if not job.is_first:
                    # Root's takes no word from anybody: the first, which may be a user's, says why.
                    return job.serve(Kernel()) if os.geteuid() else 0
                as_whom = "start them as the user whose files they are"
                if 0 in uids:
                    raise Refused(f"rank {uids.index(0)} runs as root", as_whom)
                if len({*uids}) > 1:
                    raise Refused("the ranks run as different users", as_whom)
                return act(*args, **options, job=shares(job))

        return command

    return decorated


class OrphanId(ParamType[str]):
    """An id, or a part of one. A shell completes the caller's own, in a moment, whatever hangs somewhere."""

    name = "id"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Those of the caller's own orphans."""
        return _offered(incomplete)


class OrphanIdOrPath(PathBytes):
    """An id, or a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ids, where it may be one."""
        offered = [] if "/" in incomplete or incomplete.startswith(".") else _offered(incomplete)
        return offered or super().shell_complete(ctx, param, incomplete)


def _offered(incomplete: str) -> list[CompletionItem]:
    """Ids that begin so, and the ends of those whose end does; with what they were."""
    from click.shell_completion import CompletionItem

    offered = []
    for identifier, origin in _own():
        if identifier.startswith(incomplete):
            offered.append(CompletionItem(identifier, help=origin))
        elif identifier[-ID_RANDOM_CHARS:].startswith(incomplete):
            offered.append(CompletionItem(identifier[-ID_RANDOM_CHARS:], help=origin))
    return offered


def _own() -> list[tuple[str, str]]:
    """The ids of what the caller has in all stores that are known, and where that came from; newest first.

    A child looks, as a dead mount blocks whoever looks at it: what it has not told in time is not offered. It has
    nothing of ours open, or a shell would wait for it that reads what we say to the end.
    """
    from fusefs.linux.children import ask_each
    from fusefs.store.orphans import all_entries

    own = os.geteuid()

    def tell(_asked: None) -> bytes:
        found = (entry for entry in all_entries(Kernel(), (), []) if entry.uid == own)
        return "".join(f"{entry.id}\t{output.origin(entry.origin)}\n" for entry in found).encode()

    ((_asked, answer),) = ask_each((None,), tell, set(), lambda _asked: None, limit_s=_COMPLETION_LIMIT_S)
    pairs = [line.split(b"\t", 1) for line in (answer or b"").split(b"\n")[:-1]]
    return [(identifier.decode(), origin.decode()) for identifier, origin in reversed(pairs)]


def watched(*, notes: bool = True) -> tuple[Clock, ...]:
    """What this user's service and commands remember of the wall clock; nothing for a user without a home.

    notes  have the next command know what the clock is now
    """
    from fusefs.service.state_files import watched_clocks

    with suppress(FileNotFoundError):
        return watched_clocks(state_dir(), notes=notes)
    return ()


class AgeCutoffs:
    """The moments before which files are so old, however the wall clock was set since it was noted last."""

    def __init__(self, kernel: Kernel, *, notes: bool) -> None:
        """notes: have the next command know what the clock is now."""
        self.now = moment(kernel, watched(notes=notes))
        self._set_ns = 0

    def ago(self, span_ns: int) -> int:
        """The one for so many nanoseconds."""
        cutoff_ns = self.now.cutoff_ns(span_ns)
        self._set_ns = max(self._set_ns, self.now.wall_ns - span_ns - cutoff_ns)
        return cutoff_ns

    def tell(self) -> None:
        """Say so if files were called older than they are."""
        if self._set_ns >= STEP_NS:
            ahead = format_duration(round(self._set_ns / 1e9))
            output.warn(f"the wall clock was set forward by {ahead}: what only seems to be old because of it stays")


def tended(
    volumes: Sequence[bytes], kernel: Kernel | None = None, ended: Collection[str] = (), waits: Waits | None = None
) -> Kernel:
    """Recover, adopt drops and stock reserves as the caller may, and warn of what could not be settled.

    ended, waits  as for `recover`
    """
    from fusefs.store.orphans import tend_all  # late: half of the commands have options and no orphans

    kernel = kernel or Kernel()
    for problem in tend_all(kernel, volumes, ended, waits):
        output.warn(problem)
    return kernel
