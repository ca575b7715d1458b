"""trashd mount."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable

import click

from fusefs.cli import output
from fusefs.cli.background import Ready, run_in_background, run_in_foreground
from fusefs.cli.options import PathBytes, json_option
from fusefs.core.errors import Refused, UsageError
from fusefs.core.names import printable

_FEW_FILES, _MANY_FILES = 1 << 16, 1 << 19
"""Of a daemon's; systemd gives a service as many as the latter, and one program may have thousands."""


@click.command("mount", short_help="Serve a directory so that swaps reach every client at once.", no_args_is_help=True)
@click.argument("source", type=PathBytes(), metavar="SRC")
@click.argument("mount_point", type=PathBytes(), required=False, metavar="[MNT]")
@click.option("-o", "texts", multiple=True, metavar="OPTIONS", help="Options as in fstab, separated by commas.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, and log to stderr.")
@click.option("--replace", "replaces", is_flag=True, help="Take the place of a mount of trashd whose daemon died.")
@click.option("--show-trash", is_flag=True, help="List .trashd in the root too (-o show_trash).")
@click.option(
    "--coherence",
    type=click.Choice(["exclusive", "shared"]),
    help="Whether others change SRC behind the mount (-o coherence=); default: shared, but exclusive over itself.",
)
@click.option(
    "--timeout",
    metavar="S",
    help="Let the kernel believe names and attributes for S seconds (-o timeout=); default: 1 if shared, 3600 if not.",
)
@click.option(
    "--cache-size",
    metavar="SIZE",
    help="Memory for what is known of a slow SRC when the kernel forgot it (-o cache_size=); default: 64M, 0: none.",
)
@click.option(
    "--no-xattr",
    is_flag=True,
    help="Show no extended attributes, nor ACLs (-o no_xattr): for a volume without any, where asking costs time.",
)
@click.option(
    "--backing",
    type=click.Choice(["auto", "local", "slow"]),
    help="How SRC answers (-o backing=): at once, or some time later, as over a network; default: auto, find out.",
)
@click.option(
    "--in-flight",
    metavar="N",
    help="Ask a slow SRC for N things at a time, 1 to 1024 (-o in_flight=); default: 64.",
)
@click.option(
    "--passthrough",
    type=click.Choice(["auto", "on", "off"]),
    help="Reads and writes go past the daemon (-o passthrough=); default: auto, where that can be; on: or fail.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="FAST-PATH",
    help="Do without one of those that --explain lists (-o without=), to find a fault; may be given more than once.",
)
@click.option("--explain", "explains", is_flag=True, help="Mount nothing; tell what makes a mount fast, and why not.")
@json_option
def command(
    source: bytes,
    mount_point: bytes | None,
    texts: tuple[str, ...],
    foreground: bool,
    replaces: bool,
    show_trash: bool,
    coherence: str | None,
    timeout: str | None,
    cache_size: str | None,
    no_xattr: bool,
    backing: str | None,
    in_flight: str | None,
    passthrough: str | None,
    without: tuple[str, ...],
    explains: bool,
    as_json: bool,
) -> int:
    """Serve the directory SRC at MNT, or over itself: all passes through, and a swap reaches every client at once.

    As root for all users, and SRC alone is enough: what is below is then only reached through the mount. Anybody
    else mounts for himself, at another directory of his own. Returns as soon as the mount answers.

    Options for -o: coherence=, timeout=, cache_size=, no_xattr, backing=, in_flight=, passthrough=, without=,
    show_trash, allow_other, and ro, nosuid, nodev, noexec, noatime, sync as in mount(8). What makes suid programs,
    devices or writing impossible in SRC does so in MNT.

    With --explain PATH nothing is mounted: of the mount that PATH lies in, or that serves PATH, each fast path is
    told, whether it is on, and why not if it is off. It never asks the mount. Exit code 5: there is none, or its
    daemon is gone.

    \b
    Examples:
      trashd mount /scratch
      trashd mount /data/scratch /scratch -o ro
      trashd mount --replace /scratch
      trashd mount --explain /scratch/job
    """
    if explains:
        given = (mount_point, *texts, coherence, timeout, cache_size, backing, in_flight, passthrough, *without)
        if any((foreground, replaces, show_trash, no_xattr, *(word is not None for word in given))):
            raise UsageError("--explain with options for a mount", "it takes one PATH, and mounts nothing")
        from fusefs.cli.explain import explain

        return explain(source, as_json=as_json)
    if as_json:
        raise UsageError("--json without --explain", "a mount prints nothing")
    switches = {"show_trash": show_trash, "no_xattr": no_xattr}
    values = {
        "coherence": coherence, "timeout": timeout, "cache_size": cache_size, "backing": backing,
        "in_flight": in_flight, "passthrough": passthrough,
    }  # fmt: skip
    words = [*texts, *(word for word, is_on in switches.items() if is_on)]
    words += [f"{key}={value}" for key, value in values.items() if value is not None]
    words += [f"without={name}" for name in without]
    target = source if mount_point is None else mount_point
    return serve(source, target, words, in_foreground=foreground, replaces=replaces)


def serve(
    source: bytes,
    target: bytes,
    words: Iterable[str],
    *,
    in_foreground: bool = False,
    replaces: bool = False,
    is_sloppy: bool = False,
) -> int:
    """Mount by a daemon; the exit code."""
    from fusefs.core.mount_options import Coherence, parse_options
    from fusefs.mount.attach import ACCESS
    from fusefs.mount.points import real_path

    source, target = real_path(source), real_path(target)
    usual = Coherence.EXCLUSIVE if source == target else Coherence.SHARED
    options = parse_options(words, as_root=os.geteuid() == 0, is_sloppy=is_sloppy, usual=usual)

    def body(ready: Ready) -> int:
        try:
            from fusefs.mount import daemon
        except ImportError as error:
            hint = "install the extra with it: pip install 'trashd[mount]' (Debian: apt install libfuse3-dev first)"
            raise Refused(f"mounting needs pyfuse3, which can't be loaded ({error})", hint) from error
        _warn_of_few_files(target)
        if source == target and options.coherence is Coherence.EXCLUSIVE:
            _warn_of_other_ways(target)
        if source != target and options.flags & ACCESS:
            _warn_of_times(source, target)
        return daemon.serve(source, target, options, ready, replaces=replaces)

    return run_in_foreground(body) if in_foreground else run_in_background(body)


def _warn_of_other_ways(target: bytes) -> None:
    """Who changes it there is not seen for as long as the kernel was told to believe what it was."""
    from fusefs.linux.mountinfo import read_mounts
    from fusefs.mount.points import other_ways

    if ways := other_ways(target, read_mounts()):
        output.warn(
            f"{printable(target)}: what is changed by another path ({', '.join(map(printable, ways))}) is seen late; "
            "--coherence shared if anybody uses that"
        )


def _warn_of_times(source: bytes, target: bytes) -> None:
    from fusefs.mount.points import is_followed

    if os.geteuid() or not is_followed(source):
        how = f"mount --make-shared on what {printable(source)} is on" if not os.geteuid() else "as root"
        output.warn(f"{printable(target)}: times of access are kept as its source's own mount says; else: {how}")


def _warn_of_few_files(target: bytes) -> None:
    """A program may have as many files open as its own limit says, and all of them together as many as the daemon's."""
    from fusefs.mount.vfs import shares_of

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid() == 0 and hard < _FEW_FILES:
        most = shares_of(hard, is_for_all=True).most_of_one()
        less = f", though a single program may have {soft} elsewhere" if most < soft else ""
        output.warn(
            f"{printable(target)}: all who use it together can have fewer than {hard} files open, and one user at most "
            f"{most}{less}; for more: LimitNOFILE= in the unit, or ulimit -Hn {_MANY_FILES} before this command"
        )
