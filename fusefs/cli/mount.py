"""trashd mount, its --explain, trashd umount, and mount.fuse.trashd, which mount(8) runs for lines in fstab.

The daemon detaches from the terminal only once the mount works, so that errors until then appear on the terminal.
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
from fusefs.core.mount_counters import ObservedMount
from fusefs.core.mount_options import (
    LISTED,
    OPTIONS,
    Coherence,
    MountOption,
    UringMode,
    find_without_effect,
    parse_options,
)
from fusefs.core.printable_names import printable, printable_text
from fusefs.core.results import Finding
from fusefs.core.uring_choice import known_faults
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME, make_dir
from fusefs.linux.systemd import SystemdNotifier, make_handler
from fusefs.linux.uring_facts import read_facts

_FEW_FILES, _MANY_FILES = 1 << 16, 1 << 19
"""Limits of open files: the command warns below the first; the second is systemd's hard limit for a service."""
_OPEN_FILES = re.compile(r"^Max open files +[0-9]+ +([0-9]+) ", re.MULTILINE)
"""Matches the hard limit, to which a daemon raises its soft limit. Source  proc_pid_limits(5)"""
_HELP = f"""Serve the directory SRC at MNT through FUSE, so that all users of the mount see a swap at once.

Without MNT, the mount covers SRC itself. A mount made by root can be used by all users. Other users can mount only for
themselves, on a directory of their own that is not SRC. The command returns once the mount is ready. If SRC is mounted
with ro, nosuid, nodev, noexec or nosymfollow, that option applies to MNT as well.

Options for -o: {", ".join(option.word() for option in OPTIONS if option.is_documented)}, and ro, nosuid, nodev, noexec,
sync as in mount(8).

\b
Examples:
  trashd mount /scratch
  trashd mount /data/scratch /scratch -o ro
  trashd mount --replace /scratch
  trashd mount --explain /scratch/job
"""
Ready = Callable[[], None]


def _command_line(option: MountOption) -> Decorator:
    """Return the command-line option that is equivalent to an option of `-o`."""
    if option.read is None:
        return click.option(option.switch(), is_flag=True, help=option.help)
    kind = click.Choice(option.value.split("|")) if "|" in option.value else None
    metavar = option.metavar or (option.value if kind is None else None)
    return click.option(option.switch(), type=kind, metavar=metavar, help=option.help)


@click.command(
    "mount",
    cls=Command,
    help=_HELP,
    short_help="Serve a directory through FUSE, so that all its users see a swap at once.",
    headings={
        "Mount": "-o --foreground --replace",
        "Contents": "--show-trash --no-xattr",
        "Cache": "--coherence --timeout --cache-size",
        "Speed": "--backing --in-flight --passthrough --uring",
        "Diagnosis": "--explain --json",
    },
)
@click.argument("source", type=PathBytes(), metavar="SRC")
@click.argument("mount_point", type=PathBytes(), required=False, metavar="[MNT]")
@click.option("-o", "texts", multiple=True, metavar="OPTIONS", help="Mount options as in fstab, separated by commas.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground and log to standard error.")
@click.option("--replace", "replaces", is_flag=True, help="Replace a trashd mount whose daemon has died.")
@together([_command_line(option) for option in LISTED if option.help])
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Mount nothing; print which fast paths the existing mount of SRC uses, and why the others are off.",
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
    values = ((option, given.get(option.name)) for option in OPTIONS)
    words = [*texts, *(option.word(value) for option, value in values if value not in (None, False))]
    if explains:
        if foreground or replaces or mount_point is not None or words:
            raise UsageError("--explain takes one PATH and no mount options")
        return _explain(source, as_json=as_json)
    if as_json:
        raise UsageError("--json requires --explain")
    target = source if mount_point is None else mount_point
    return serve(source, target, words, in_foreground=foreground, replaces=replaces)


def _explain(path: bytes, *, as_json: bool) -> int:
    """Print the fast paths of the mounts that a path belongs to. Never access a mount, since it may hang.

    Returns  the exit code
    Raises   NotFound if there is no mount, or if a daemon publishes no fast paths; NotPermitted for another user's
             mount
    """
    from fusefs.mount.places.find_mounts import mounts_of, read_counters

    observed_mounts = [read_counters(mount) for mount in mounts_of(path)]
    for one in observed_mounts:
        if not one.fast_paths:
            raise NotFound(
                f"information on the fast paths of {printable(one.point)}",
                "the daemon of this mount runs an older version of trashd; unmount the mount and mount it again",
            )
    if as_json:
        for one in observed_mounts:
            reasons = {path.name: FastPathReason(path.is_on, path.why) for path in one.fast_paths}
            output.as_json(MountExplained(one.point, one.source, one.is_running, reasons))
    else:
        print("\n\n".join("\n".join(_explain_lines(one)) for one in observed_mounts))
    return output.exit_code(
        [0 if one.is_running else output.print_error(DaemonGone(one.point), as_json=as_json) for one in observed_mounts]
    )


def _explain_lines(mount: ObservedMount) -> list[str]:
    rows = [
        (f"  {printable_text(one.name)}", "on" if one.is_on else "off", printable_text(one.why))
        for one in mount.fast_paths
    ]
    few = few_files(mount)
    lines = [] if few is None else [f"  {few.what}", f"    hint: {few.hint}"]
    return [f"{printable(mount.point)} serves {printable(mount.source)}", *output.aligned(rows), *lines]


def serve(
    source: bytes,
    target: bytes,
    words: Sequence[str],
    *,
    in_foreground: bool = False,
    replaces: bool = False,
    is_sloppy: bool = False,
) -> int:
    """Start a daemon that creates the mount. Returns  the exit code"""
    from fusefs.mount.places.mount_points import real_path

    source, target = real_path(source), real_path(target)
    usual = Coherence.EXCLUSIVE if source == target else Coherence.SHARED
    options = parse_options(words, as_root=os.geteuid() == 0, is_sloppy=is_sloppy, default_coherence=usual)
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
            hint = (
                "run: apt install trashd-mount; or install gcc and python3-dev, and reinstall without TRASHD_NATIVE=0"
            )
            raise Refused(f"the C module for mounts was not built, or can't be loaded: {error}", hint) from error

        if source == target and options.coherence is Coherence.EXCLUSIVE:
            _warn_of_other_ways(target)
        return daemon.serve(source, target, options, ready, replaces=replaces)

    return run_in_foreground(body) if in_foreground else run_in_background(body)


def _name_switched_off_transport() -> None:
    """Print, once per boot, that FUSE over io_uring is available but off, and how to switch it on."""
    facts = read_facts()
    if facts.is_enabled is not False or known_faults(facts.release) is not None:
        return
    with suppress(OSError):  # the file exists, since this was printed before; or /run is not writable
        os.close(
            os.open(
                make_dir(MOUNTS_RUNTIME) + b"/uring-named", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644
            )
        )
        print(
            "trashd: mounts can be faster: FUSE over io_uring is switched off in this kernel\n"
            "  hint: trashd service install --uring",
            file=sys.stderr,
        )


def _warn_of_other_ways(target: bytes) -> None:
    """Warn that changes made through other paths appear in the mount only after the kernel's cache has expired."""
    from fusefs.mount.places.mount_points import other_paths

    if ways := other_paths(target, read_mounts()):
        output.warn(
            f"{printable(target)}: changes made through another path ({', '.join(map(printable, ways))}) appear late; "
            "use --coherence shared if programs use that path"
        )


def few_files(mount: ObservedMount) -> Finding | None:
    """Return a finding if a mount's daemon runs as root and its limit of open files is known to be low."""
    from fusefs.mount.native._core import max_handles_of_user
    from fusefs.mount.tree.mount_state import n_client_handles

    try:
        with open(f"/proc/{mount.stats.table.pid}/limits", encoding="ascii") as file:
            limit = None if os.fstat(file.fileno()).st_uid else _OPEN_FILES.search(file.read())
    except OSError:
        return None
    if limit is None or not mount.is_running or int(limit[1]) >= _FEW_FILES:
        return None
    most = max_handles_of_user(n_client_handles(int(limit[1])))
    what = f"the limit on open files is {limit[1]} for the whole mount ({most} per user)"
    hint = f"set LimitNOFILE={_MANY_FILES} in the unit, or run ulimit -Hn {_MANY_FILES} before trashd mount"
    return Finding(printable(mount.point), what, hint)


def run_in_background(body: Callable[[Ready], int]) -> int:
    """Run `body` in a child process; the parent waits until the child reports that it is ready.

    Until then, the child prints its errors on the terminal. It also stays in our process group, because processes in
    other groups wait at the mount point of an automount. Afterwards, the child logs to syslog and has no terminal.

    Returns  twice: in the parent, the exit code, which is 0 if the child is ready; in the child, the result of `body`
    """
    ready_fd, report_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready_fd)
        os.chdir("/")
        logging.raiseExceptions = False  # otherwise, without a syslog, logging would print a traceback on the terminal
        syslog: logging.Handler = logging.NullHandler()
        with suppress(OSError):
            syslog = logging.handlers.SysLogHandler("/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON)
        _log_to(syslog)
        return body(lambda: _detach(report_fd))
    os.close(report_fd)
    try:
        with os.fdopen(ready_fd, "rb") as pipe:
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
        print("trashd: the daemon exited before the mount was ready", file=sys.stderr)
        return Exit.FAILED
    print(f"trashd: the daemon was killed ({signal.strsignal(-code)}) before the mount was ready", file=sys.stderr)
    return Exit.SIGNALLED - code


def run_in_foreground(body: Callable[[Ready], int]) -> int:
    """Run `body`, which logs to stderr or the journal, and notify systemd when it is ready. Returns  its exit code"""
    os.chdir("/")  # the working directory would keep its volume busy
    _log_to(make_handler("trashd") if "JOURNAL_STREAM" in os.environ else logging.StreamHandler())
    notifier = SystemdNotifier()
    try:
        return body(notifier.notify_ready)
    finally:
        notifier.close()


def _detach(report_fd: int) -> None:
    """Detach from the terminal, then report success to the parent, which may have exited."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    with suppress(BrokenPipeError):
        os.write(report_fd, b"1")
    os.close(report_fd)


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter(f"trashd[{os.getpid()}]: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("fusefs").setLevel(logging.INFO)


@click.command("umount", cls=Command, short_help="Unmount a trashd mount and wait for its daemon to exit.")
@click.argument("mount_point", type=PathBytes(), metavar="MNT")
@click.option("--lazy", is_flag=True, help="Detach the mount now; programs that use it can continue.")
@click.option("--force", is_flag=True, help="Detach the mount now; programs that use it get errors.")
@json_option
def umount_command(mount_point: bytes, lazy: bool, force: bool, as_json: bool) -> int:
    """Unmount MNT and wait until its daemon has exited, so that the underlying filesystem can be unmounted, too.

    Unmounting is refused while a program has an open file or its working directory in the mount. A mount whose daemon
    has died is unmounted like any other.

    \b
    Examples:
      trashd umount /scratch
      trashd umount --force /scratch
    """
    if lazy and force:
        raise UsageError("--lazy can't be combined with --force")
    from fusefs.mount.places.attach import UnmountMode, unmount
    from fusefs.mount.places.mount_points import real_path

    path = real_path(mount_point)
    done = unmount(path, UnmountMode.FORCE if force else UnmountMode.LAZY if lazy else UnmountMode.PLAIN)
    if as_json:
        output.as_json(UnmountedPath(path, done.is_ended, done.is_killed))
    where = printable(path)
    if done.is_killed:
        output.warn(f"{where}: the daemon did not exit and was killed")
    if not done.is_ended:
        output.warn(
            f"{where}: unmounted, but the daemon is still running: it hangs, or another mount namespace has the mount"
        )
    return 0


_USAGE, _INTERRUPTED, _FAILED = 1, 8, 32  # mount(8), EXIT STATUS
_HINT = "mount.fuse.trashd SRC MNT [-sfnv] [-o OPTIONS]"


def main() -> None:
    """Run as the helper of mount(8), with the arguments of this process, and exit with the helper's exit code."""
    settle_streams()
    code = run_mount_helper(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)


def run_mount_helper(arguments: list[str]) -> int:
    """Run mount.fuse.trashd. Returns  the exit code as mount(8) defines it"""
    try:
        code = _mount_by_helper(arguments)  # the daemon returns here, too
        return code if code in (0, _USAGE) else _FAILED
    except TrashdError as error:
        output.print_error(error)
        return _USAGE if isinstance(error, UsageError | NotPermitted) else _FAILED
    except OSError as error:
        output.print_error(from_os(error, str(error.filename or "a system call")))
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _mount_by_helper(arguments: list[str]) -> int:
    from fusefs.mount.places.attach import remount
    from fusefs.mount.places.mount_points import real_path

    try:
        given, paths = getopt.gnu_getopt(arguments, "sfnvN:o:t:")
    except getopt.GetoptError as error:
        raise UsageError(str(error), _HINT) from error
    if len(paths) != 2:
        raise UsageError("SRC and MNT are required", _HINT)
    letters = {letter for letter, _value in given}
    if "-N" in letters:
        raise UsageError("option -N: not supported", "to mount in another namespace, run: nsenter --mount=FILE mount …")
    if "-f" in letters:
        return 0  # a dry run
    source, target = map(os.fsencode, paths)
    words = [value for letter, value in given if letter == "-o"]
    is_sloppy = "-s" in letters
    if remount(real_path(target), words, is_sloppy=is_sloppy):
        return 0
    if _stands(source, target, words, is_sloppy=is_sloppy):
        return 0  # `mount -a` runs this for existing mounts, since it recognises only mounts of a filesystem's root
    return serve(source, target, words, is_sloppy=is_sloppy)


def _stands(source: bytes, target: bytes, words: list[str], *, is_sloppy: bool) -> bool:
    """Return whether the requested mount already exists, belongs to this user, and works.

    Raises  UsageError if the options are wrong; Refused if the mount does not respond
    """
    from fusefs.mount.places.mount_points import Health, health, real_path, silent_daemon_error, top_mount

    uid = os.geteuid()
    options = parse_options(words, as_root=uid == 0, is_sloppy=is_sloppy, default_coherence=Coherence.SHARED)
    source, target = real_path(source), real_path(target)
    mount = top_mount(target, read_mounts())
    if mount is None or not mount.is_trashd() or mount.owner != uid or mount.root != b"/":
        return False
    is_it = mount.source == source or (source == target and is_inside(mount.source, MOUNTS_RUNTIME))
    is_alike = "ro" not in options.flags or b"ro" in mount.options.split(b",")
    if not (is_it and is_alike):
        return False
    found = health(target)
    if found is Health.SILENT:
        raise silent_daemon_error(target)
    return found is Health.ALIVE


if __name__ == "__main__":
    main()
