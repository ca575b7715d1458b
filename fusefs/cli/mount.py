"""trashd mount, its --explain, and mount.fuse.trashd, which mount(8) calls for fstab's lines.

It daemonises, but not before the mount works: the command's terminal gets the daemon's error and exit code.
"""

from __future__ import annotations

import getopt
import logging
import logging.handlers
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import click

from fusefs.cli import output
from fusefs.cli.json_objects import FastPathReason, MountExplained, UnmountedPath
from fusefs.cli.main import settle_streams
from fusefs.cli.options import Command, Decorator, PathBytes, json_option, together
from fusefs.core.errors import DaemonGone, Exit, NotFound, NotPermitted, Refused, TrashdError, UsageError, from_os
from fusefs.core.mount_counters import SeenMount
from fusefs.core.mount_options import (
    LISTED,
    OPTIONS,
    Coherence,
    MountOption,
    UringMode,
    find_without_effect,
    parse_options,
)
from fusefs.core.printable_names import printable, show
from fusefs.core.results import Finding
from fusefs.core.uring_choice import why_not_trusted
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.runtime_directories import HOME, make_dir
from fusefs.linux.systemd import SystemdNotifier, make_handler
from fusefs.linux.uring_offer import read_facts

_FEW_FILES, _MANY_FILES = 1 << 16, 1 << 19
"""Of a daemon's; systemd gives a service as many as the latter, and one program may have thousands."""
_OPEN_FILES = re.compile(r"^Max open files +[0-9]+ +([0-9]+) ", re.MULTILINE)
"""The hard limit, to which a daemon raises its soft one. Source  proc_pid_limits(5)"""
_HELP = f"""Serve the directory SRC at MNT, or over itself: all passes through, and a swap reaches every client at once.

As root for all users, and SRC alone is enough: what is below is then only reached through the mount. Anybody
else mounts for himself, at another directory of his own. Returns as soon as the mount answers.

Options for -o: {", ".join(option.word() for option in OPTIONS if option.is_told)}, and ro, nosuid, nodev, noexec,
sync as in mount(8). What makes suid programs, devices or writing impossible in SRC does so in MNT.

With --explain PATH nothing is mounted: the command prints what makes the mount fast that PATH lies in, or that
serves PATH, and why something is off. It never asks the mount. Exit code 5: there is none, or its daemon is
gone.

\b
Examples:
  trashd mount /scratch
  trashd mount /data/scratch /scratch -o ro
  trashd mount --replace /scratch
  trashd mount --explain /scratch/job
"""
Ready = Callable[[], None]


def _command_line(option: MountOption) -> Decorator:
    """The command line's option for a word of `-o`."""
    if option.read is None:
        return click.option(option.switch(), is_flag=True, help=option.help)
    kind = click.Choice(option.value.split("|")) if "|" in option.value else None
    metavar = option.metavar or (option.value if kind is None else None)
    return click.option(option.switch(), type=kind, metavar=metavar, help=option.help)


@click.command(
    "mount",
    cls=Command,
    help=_HELP,
    short_help="Serve a directory so that swaps reach every client at once.",
    no_args_is_help=True,
)
@click.argument("source", type=PathBytes(), metavar="SRC")
@click.argument("mount_point", type=PathBytes(), required=False, metavar="[MNT]")
@click.option("-o", "texts", multiple=True, metavar="OPTIONS", help="Options as in fstab, separated by commas.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, and log to stderr.")
@click.option("--replace", "replaces", is_flag=True, help="Take the place of a mount of trashd whose daemon died.")
@together([_command_line(option) for option in LISTED if option.help])
@click.option(
    "--explain", "explains", is_flag=True, help="Mount nothing; print what makes a mount fast or not, and why."
)
@json_option
def command(
    source: bytes,
    mount_point: bytes | None,
    texts: tuple[str, ...],
    foreground: bool,
    replaces: bool,
    explains: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """See _HELP."""
    values = ((option, given.get(option.name)) for option in OPTIONS)
    words = [*texts, *(option.word(value) for option, value in values if value not in (None, False))]
    if explains:
        if foreground or replaces or mount_point is not None or words:
            raise UsageError("--explain with options for a mount", "it takes one PATH, and mounts nothing")
        return _explain(source, as_json=as_json)
    if as_json:
        raise UsageError("--json without --explain", "a mount prints nothing")
    target = source if mount_point is None else mount_point
    return serve(source, target, words, in_foreground=foreground, replaces=replaces)


def _explain(path: bytes, *, as_json: bool) -> int:
    """Tell of the mounts that a path belongs to; the exit code. No mount is asked: it may hang.

    Raises  NotFound: there is none, or nothing tells of it; NotPermitted: another user's
    """
    from fusefs.mount.places.find_mounts import mounts_of, read_counters

    seen = [read_counters(mount) for mount in mounts_of(path)]
    for one in seen:
        if not one.fast_paths:
            raise NotFound(f"the fast paths of {printable(one.point)}", "its daemon is of an older version")
    if as_json:
        for one in seen:
            reasons = {path.name: FastPathReason(path.is_on, path.why) for path in one.fast_paths}
            output.as_json(MountExplained(one.point, one.source, one.is_running, reasons))
    else:
        print("\n\n".join("\n".join(_explain_lines(one)) for one in seen))
    return output.exit_code(
        [0 if one.is_running else output.failed(DaemonGone(one.point), as_json=as_json) for one in seen]
    )


def _explain_lines(seen: SeenMount) -> list[str]:
    rows = [(f"  {show(one.name)}", "on" if one.is_on else "off", show(one.why)) for one in seen.fast_paths]
    few = few_files(seen)
    lines = [] if few is None else [f"  {few.what}", f"    hint: {few.hint}"]
    return [f"{printable(seen.point)} serves {printable(seen.source)}", *output.aligned(rows), *lines]


def serve(
    source: bytes,
    target: bytes,
    words: Sequence[str],
    *,
    in_foreground: bool = False,
    replaces: bool = False,
    is_sloppy: bool = False,
) -> int:
    """Mount by a daemon; the exit code."""
    from fusefs.mount.places.mount_points import real_path

    source, target = real_path(source), real_path(target)
    usual = Coherence.EXCLUSIVE if source == target else Coherence.SHARED
    options = parse_options(words, as_root=os.geteuid() == 0, is_sloppy=is_sloppy, usual=usual)
    for word, why in find_without_effect(words):
        output.warn(f"-o {word} has no effect: {why}")
    if options.uring is UringMode.AUTO and os.geteuid() == 0:
        _name_switched_off_transport()

    def body(ready: Ready) -> int:
        try:
            from fusefs.mount.life import daemon
        except ImportError as error:
            if error.name != "fusefs.mount.native._core":
                raise
            hint = "apt install trashd-mount; or reinstall it with gcc and python3-dev, and without TRASHD_NATIVE=0"
            raise Refused(f"the C part of the mount was not built, or can't be loaded: {error}", hint) from error

        if source == target and options.coherence is Coherence.EXCLUSIVE:
            _warn_of_other_ways(target)
        return daemon.serve(source, target, options, ready, replaces=replaces)

    return run_in_foreground(body) if in_foreground else run_in_background(body)


def _name_switched_off_transport() -> None:
    """Say once in each boot that this kernel has io_uring for FUSE, and what switches it on."""
    facts = read_facts()
    if facts.is_enabled is not False or why_not_trusted(facts.release) is not None:
        return
    with suppress(OSError):  # it has been said; or nothing can be written in /run
        os.close(os.open(make_dir(HOME) + b"/uring-named", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        print(
            "trashd: mounts can be faster: this kernel has FUSE over io_uring, switched off; "
            "`trashd service install --uring` switches it on",
            file=sys.stderr,
        )


def _warn_of_other_ways(target: bytes) -> None:
    """Warn of changes by other paths: they are not seen for as long as the kernel may believe what was there."""
    from fusefs.mount.places.mount_points import other_ways

    if ways := other_ways(target, read_mounts()):
        output.warn(
            f"{printable(target)}: what is changed by another path ({', '.join(map(printable, ways))}) is seen late; "
            "--coherence shared if anybody uses that"
        )


def few_files(seen: SeenMount) -> Finding | None:
    """What the limit of a mount's daemon, one of root's, costs its users; None: it is high, or can't be seen."""
    from fusefs.mount.native._core import most_of_one
    from fusefs.mount.tree.mount_state import n_handles

    try:
        with open(f"/proc/{seen.stats.table.pid}/limits", encoding="ascii") as file:
            limit = None if os.fstat(file.fileno()).st_uid else _OPEN_FILES.search(file.read())
    except OSError:
        return None
    if limit is None or not seen.is_running or int(limit[1]) >= _FEW_FILES:
        return None
    most = most_of_one(n_handles(int(limit[1])))
    what = f"all its users together can have fewer than {limit[1]} files open, and one user at most {most}"
    hint = f"LimitNOFILE={_MANY_FILES} in its unit, or ulimit -Hn {_MANY_FILES} before trashd mount"
    return Finding(printable(seen.point), what, hint)


def run_in_background(body: Callable[[Ready], int]) -> int:
    """The exit code for the terminal: 0 as soon as the child that runs `body` says that it is ready.

    Returns twice: in the child with the exit code of `body`, when that ends. Until it is ready it has the terminal
    for its errors; after that it logs to syslog, belongs to no terminal, and stands in no directory. Until then it
    stays in our process group too: when systemd mounts for an automount, processes of other ones wait at the mount
    point until that is done.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        os.chdir("/")
        logging.raiseExceptions = False  # a syslog that is not there would be told of on the terminal, at length
        syslog: logging.Handler = logging.NullHandler()
        with suppress(OSError):
            syslog = logging.handlers.SysLogHandler("/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON)
        _log_to(syslog)
        return body(lambda: _detach(tell))
    os.close(tell)
    try:
        with os.fdopen(told, "rb") as pipe:
            if pipe.read():
                return 0
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        raise
    _pid, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        return code
    if not code:
        print("trashd: the daemon ended before it was ready", file=sys.stderr)
        return Exit.FAILED
    print(f"trashd: the daemon was ended by {signal.strsignal(-code)} before it was ready", file=sys.stderr)
    return Exit.SIGNALLED - code


def run_in_foreground(body: Callable[[Ready], int]) -> int:
    """The exit code of `body`, which logs to stderr, or to the journal; systemd learns when it is ready."""
    os.chdir("/")  # or it would keep a volume busy
    _log_to(make_handler("trashd") if "JOURNAL_STREAM" in os.environ else logging.StreamHandler())
    notifier = SystemdNotifier()
    try:
        return body(notifier.ready)
    finally:
        notifier.close()


def _detach(tell: int) -> None:
    """Let go of the terminal, and then say that all is well; the parent may be gone by then."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with suppress(BrokenPipeError):
        os.write(tell, b"1")
    os.close(tell)


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(f"trashd[{os.getpid()}]: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("fusefs").setLevel(logging.INFO)


@click.command("umount", cls=Command, short_help="Unmount what trashd mounted.", no_args_is_help=True)
@click.argument("mount_point", type=PathBytes(), metavar="MNT")
@click.option("--lazy", is_flag=True, help="At once, but whoever has something open there may go on with it.")
@click.option("--force", is_flag=True, help="At once; whoever has something open there gets errors.")
@json_option
def umount_command(mount_point: bytes, lazy: bool, force: bool, as_json: bool) -> int:
    """Unmount MNT and wait until its daemon has ended, so that what is below can be unmounted too.

    Refused while somebody has something open there, or works there. A daemon that hangs is killed with
    --force. A mount whose daemon died is unmounted like any other.

    \b
    Examples:
      trashd umount /scratch
      trashd umount --force /scratch
    """
    if lazy and force:
        raise UsageError("--lazy with --force", "let them go on, or don't")
    from fusefs.mount.places.attach import UnmountMode, unmount
    from fusefs.mount.places.mount_points import real_path

    path = real_path(mount_point)
    done = unmount(path, UnmountMode.FORCE if force else UnmountMode.LAZY if lazy else UnmountMode.PLAIN)
    if as_json:
        output.as_json(UnmountedPath(path, done.is_ended, done.is_killed))
    where = printable(path)
    if done.is_killed:
        output.warn(f"{where}: its daemon did not end, and was killed")
    if not done.is_ended:
        output.warn(f"{where}: unmounted, but its daemon goes on: another mount namespace has it too, or it hangs")
    return 0


_USAGE, _INTERRUPTED, _FAILED = 1, 8, 32  # mount(8), EXIT STATUS
_HINT = "mount.fuse.trashd SRC MNT [-sfnv] [-o OPTIONS]; people use: trashd mount"


def main() -> None:
    """Run the helper of this process and exit with its code."""
    settle_streams()
    code = run(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of a command line, as mount(8) understands it."""
    try:
        code = _run(arguments)  # of this very function in the daemon, if that could tell one
        return code if code in (0, _USAGE) else _FAILED
    except TrashdError as error:
        output.failed(error)
        return _USAGE if isinstance(error, UsageError | NotPermitted) else _FAILED
    except OSError as error:
        output.failed(from_os(error, str(error.filename or "a system call")))
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    from fusefs.mount.places.attach import remount
    from fusefs.mount.places.mount_points import real_path

    try:
        given, paths = getopt.gnu_getopt(arguments, "sfnvN:o:t:")
    except getopt.GetoptError as error:
        raise UsageError(str(error), _HINT) from error
    if len(paths) != 2:
        raise UsageError("SRC and MNT are needed", _HINT)
    letters = {letter for letter, _value in given}
    if "-N" in letters:
        raise UsageError("-N: other namespaces", "run it in there: nsenter --mount=…")
    if "-f" in letters:
        return 0  # a dry run
    source, target = map(os.fsencode, paths)
    words = [value for letter, value in given if letter == "-o"]
    is_sloppy = "-s" in letters
    if remount(real_path(target), words, is_sloppy=is_sloppy):
        return 0
    if _stands(source, target, words, is_sloppy=is_sloppy):
        return 0  # `mount -a` asks for what stands, too: it knows those alone that show a filesystem's own root
    return serve(source, target, words, is_sloppy=is_sloppy)


def _stands(source: bytes, target: bytes, words: list[str], *, is_sloppy: bool) -> bool:
    """Whether this very mount, of this user, is there and works.

    Raises  UsageError: for what can't be asked; Refused: it does not answer
    """
    from fusefs.mount.places.mount_points import Health, health, real_path, silent, top_mount

    uid = os.geteuid()
    options = parse_options(words, as_root=uid == 0, is_sloppy=is_sloppy, usual=Coherence.SHARED)
    source, target = real_path(source), real_path(target)
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_ours() or mount.owner != uid or mount.root != b"/":
        return False
    is_it = mount.source == source or (source == target and is_inside(mount.source, HOME))
    is_alike = "ro" not in options.flags or b"ro" in mount.options.split(b",")
    if not (is_it and is_alike):
        return False
    found = health(target)
    if found is Health.SILENT:
        raise silent(target)
    return found is Health.ALIVE


if __name__ == "__main__":
    main()
