"""trashd doctor: check stores, configuration, plans, units, the running service, and kernel settings.

For root, doctor checks the system's units and service; for other users, it checks their own. A kernel setting is
reported only if something on this machine needs it.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import click

from fusefs.cli import output
from fusefs.cli.config import problems_in_force
from fusefs.cli.options import Command, PathBytes, json_option, tended
from fusefs.cli.plan import has_plans, problems_in_plans
from fusefs.cli.service import MOUNTS, PREFIX, REAPER, SWEEP, TIMER, FileOutcome, InstallPlace, brought_by_package
from fusefs.cli.status import unwell
from fusefs.core.config import Config
from fusefs.core.errors import (
    BadConfig,
    BrokenStore,
    DaemonGone,
    Exit,
    NotFound,
    RootSquashed,
    TrashdError,
    UsageError,
    errors_about,
)
from fusefs.core.names import STORE
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.results import Finding
from fusefs.core.service_status import ObservedStatus
from fusefs.core.uring_choice import find_obstacle
from fusefs.core.version import VERSION
from fusefs.linux import systemd
from fusefs.linux.config_files import load_config
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyMask, add_watch, open_inotify
from fusefs.linux.kernel import Kernel
from fusefs.linux.mount_calls import MountLine, read_mount_lines
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.pressure import PRESSURE, Psi, StallTimes
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, runtime_dir
from fusefs.linux.uring_facts import read_facts
from fusefs.store.doctor import check_folder, check_registry, check_store, check_vouched
from fusefs.store.find_stores import discover_stores, stores_at
from fusefs.store.layout import Store, UserFolder
from fusefs.store.orphans import call_in_each_folder
from fusefs.store.root_squash import SQUASHED, refuse_squashed
from fusefs.store.silent_nodes import Wait

_PROPERTIES = (
    "Id", "LoadState", "UnitFileState", "ActiveState", "FragmentPath", "ExecStart", "NeedDaemonReload",
)  # fmt: skip
_PROGRAM = re.compile(r"\{ path=(.*?) ; argv\[\]=")
_URING_SETTINGS = tuple(f"{place}/tmpfiles.d/trashd-uring.conf" for place in ("/etc", "/usr/local/lib", "/usr/lib"))
_NOT_DELETED = "expired orphans are not deleted automatically"
_FUSE_CONF = "/etc/fuse.conf"
_BY_USERS = frozenset({"user", "users", "owner", "group"})
"""The fstab options that allow users other than root to mount. Source  mount(8)"""


@click.command(
    "doctor", cls=Command, short_help="Check trash stores, configuration and services; repair a trash store."
)
@click.argument("volume", type=PathBytes(), required=False)
@click.option("--repair", is_flag=True, help="First complete or undo the operations of commands that were killed.")
@click.option(
    "--wait", "waits", is_flag=True, help="With --repair, wait until operations of other nodes can be taken over."
)
@click.option(
    "--ended",
    multiple=True,
    metavar="BOOT",
    help="With --repair, declare that the node with boot ID BOOT has crashed, shut down or rebooted (repeatable).",
)
@json_option
def command(volume: bytes | None, repair: bool, waits: bool, ended: tuple[str, ...], as_json: bool) -> int:
    """Check trash stores, configuration, plans and services, and print each problem with a hint.

    With VOLUME, doctor checks only the trash store in that directory. Without VOLUME, doctor checks all known stores
    and your own configuration, plans and service. When run by root, it checks the system's configuration, plans and
    service instead, and also the kernel settings. If there are no problems, the exit code is 0, and nothing is printed
    except on a terminal.

    On a shared filesystem, --repair takes over an unfinished operation of another node only once that operation has
    made no progress for 90 or 180 seconds, depending on the filesystem. `takeover_s` in trashd.conf(5) changes this
    time. If you know that the other node has gone down or rebooted, use --ended to skip the wait.

    \b
    Examples:
      trashd doctor
      trashd doctor /scratch
      trashd doctor --repair /scratch
      trashd doctor --repair --wait /scratch
      trashd doctor --repair --ended 7a9b0c6e-52f4-4c1f-9d51-2f3b7f0d6e11 /scratch
    """
    if ended and not repair:
        raise UsageError("--ended needs --repair")
    if waits and not repair:
        raise UsageError("--wait needs --repair")
    waiting = _wait if waits else None
    if volume is not None:
        path = os.path.realpath(volume)
        return _print_findings(printable(path), _examine(path, repair, ended, waiting), as_json=as_json)
    return _examine_all(repair, ended, waiting, as_json=as_json)


def _examine_all(repair: bool, ended: Sequence[str], waits: Wait | None, *, as_json: bool) -> int:
    """Check all known stores, and the settings of this machine on which they depend."""
    paths, silent, broken = dict[bytes, None](), list[bytes](), list[Finding]()
    config, needs_service = Config(), False
    with suppress(BadConfig):  # reported below
        config = load_config().config
    try:
        for store in discover_stores(Kernel(), (), silent):
            with store:
                paths[store.base_path] = None
                needs_service |= _needs_service(store, config)
    except BrokenStore as error:
        broken = [Finding(error.detail, "no command can use this trash store", error.hint)]
    hint = "check the server or the daemon of this mount"
    problems = [Finding(printable(point), "no response", hint) for point in silent] + broken
    for path in paths:
        try:
            problems += _examine(path, repair, ended, waits)
        except TrashdError as error:
            problems.append(Finding(printable(path), error.message(), error.hint))
    problems += _examine_machine(is_reaping=bool(paths), needs_service=needs_service)
    others = "configuration, plans, units" + ("" if os.geteuid() else ", kernel settings")
    return _print_findings(f"{output.counted(len(paths), 'store')}, {others}", problems, as_json=as_json)


def _needs_service(store: Store, config: Config) -> bool:
    """Return whether expired orphans in a store stay if neither root nor the caller runs a service on this machine.

    On a shared filesystem, another machine's service may delete them.
    """
    is_served = config.policy_of(store.base_path, store.volume.id).is_served
    return os.geteuid() in (0, store.owner) and not store.is_shared() and is_served


def _examine_machine(*, is_reaping: bool, needs_service: bool) -> Iterator[Finding]:
    """Check all settings, units and mounts that the caller can change.

    is_reaping, needs_service  whether there are stores, and whether one needs a service: `_needs_service`
    """
    for problem in (*problems_in_force(), *problems_in_plans()):
        place = f"{problem.file}: {problem.key}" if problem.key else problem.file
        yield Finding(place, problem.what, problem.fix)
    try:
        yield from _find_unit_problems(is_reaping=is_reaping, needs_service=needs_service, has_rules=has_plans())
    except TrashdError as error:
        yield Finding("reaper service", error.message(), error.hint)
    yield from _mounts()
    if os.geteuid() == 0:
        lines = list(read_mount_lines())
        yield from _uring(lines)
        yield from _allow_other(lines)
        if is_reaping:
            yield from _inotify()
            yield from _pressure()


def _examine(path: bytes, repair: bool, ended: Sequence[str], waits: Wait | None) -> list[Finding]:
    """Check the stores in a directory. Raises  TrashdError"""
    kernel = Kernel()
    try:
        if repair:
            for _store in _stores(kernel, path):
                pass  # raises an error if there is no store, or if the server squashes root
            tended([path], kernel, ended, waits)  # this also updates a store of an earlier release
        problems = [problem for store in _stores(kernel, path) for problem in check_store(store)]
    except RootSquashed as error:  # root squash causes every other problem that root would find here
        return [Finding(printable(path), SQUASHED, error.hint)]
    problems += check_registry(kernel, path)
    lost: list[TrashdError] = []

    def check(folder: UserFolder) -> list[Finding]:
        return [*check_vouched(folder), *check_folder(folder)]

    for part in call_in_each_folder(discover_stores(kernel, [path]), check, list[Finding], lost):
        problems += part
    return problems + [Finding(printable(path), error.message(), error.hint) for error in lost]


def _wait(seconds: float) -> bool:
    """Wait while another node's unfinished operation has to be watched. Runs in a process of the store's owner."""
    output.warn(f"another node may still be working on this volume; watching its operation for {math.ceil(seconds)} s")
    time.sleep(seconds)
    return True


def _print_findings(checked: str, problems: Sequence[Finding], *, as_json: bool) -> int:
    for problem in dict.fromkeys(problems):
        if as_json:
            output.as_json(problem)
        else:
            print(f"{printable(os.fsencode(problem.where))}: {problem.what}\n  hint: {problem.hint}")
    if not problems and not as_json and sys.stdout.isatty():
        print(f"{checked}: no problems found")
    return Exit.FAILED if problems else Exit.DONE


def _stores(kernel: Kernel, path: bytes) -> Iterator[Store]:
    """Open the stores in a directory, one at a time. Raises  TrashdError; NotFound if there is none"""
    n_stores = 0
    with errors_about(path):
        for store in stores_at(kernel, path, read_mounts()):
            n_stores += 1
            with store:
                refuse_squashed(store.kernel, store.fd, store.base_path)
                yield store
    if not n_stores:
        raise NotFound(os.path.join(path, STORE), f"trashd init {shell_word(path)}")


def _running_service(directory: bytes) -> ObservedStatus | None:
    """Return the status of the service with this runtime directory if it runs. Raises  TrashdError"""
    from fusefs.service.state_files import read_status

    with errors_about(directory):
        service = read_status(directory)
    return service if service is not None and service.is_running else None


def _find_unit_problems(*, is_reaping: bool, needs_service: bool, has_rules: bool) -> Iterator[Finding]:
    """Check installed files, units and the running service. Without systemd, units are not checked.

    is_reaping     whether a reaper that is installed is needed
    needs_service  whether one must run even if none is installed, unless root's service runs
    has_rules      whether the timer is needed
    Raises         TrashdError if the service's status can't be read
    """
    for_user = os.geteuid() != 0
    place = InstallPlace(for_user, "/", PREFIX)
    user_option = "--user " if for_user else ""
    running = _running_service(runtime_dir())
    needs_service = needs_service and running is None and (not for_user or _running_service(SYSTEM_RUNTIME) is None)
    units = []
    if place.is_installed():
        yield from _check_files(place, user_option)
    if place.is_live():
        with suppress(systemd.SystemdFailed, FileNotFoundError):  # no systemctl, or no permission to query
            names = (REAPER,) if for_user else (REAPER, TIMER, SWEEP)
            mounts = [] if for_user else systemd.unit_properties(_PROPERTIES, (MOUNTS,))
            units = systemd.unit_properties(_PROPERTIES, names, for_user=for_user) + mounts
        for unit in units:
            if unit["Id"] != REAPER:
                yield from _check_unit(unit, user_option, is_needed=has_rules)
            elif running is None or unit["ActiveState"] != "inactive":  # otherwise the service runs without systemd
                # A package installs a unit for every user, and root's service serves users who run none of their own.
                is_used = not for_user or place.is_installed() or unit["UnitFileState"] == "enabled" or needs_service
                yield from _check_unit(unit, user_option, is_needed=is_reaping and is_used)
    if running is not None:
        yield from _check_running(running, user_option)
    elif needs_service and not units:
        yield Finding("reaper service", f"not running: {_NOT_DELETED}", "trashd service run")
    elif needs_service and units[0]["LoadState"] == "not-found":
        hint = f"trashd service install {user_option}&& systemctl {user_option}enable --now {REAPER}"
        yield Finding(REAPER, f"not installed: {_NOT_DELETED}", hint)


def _check_files(place: InstallPlace, user_option: str) -> Iterator[Finding]:
    """Check the files that `service install` writes. A unit may differ, since an administrator may have edited it."""
    again = f"trashd service install {user_option}".rstrip()
    try:
        pieces = place.pieces(has_uring=place.has_uring())
    except NotFound as error:
        yield Finding("installed files", error.message(), error.hint)
        return
    packaged = None if user_option else brought_by_package()
    states = {file.path: file.outcome for file in place.compare(pieces)}
    if packaged is not None:
        what = f"units from trashd service install override those of the installed package ({packaged})"
        hint = f"trashd service uninstall && systemctl enable --now {REAPER}"
        yield Finding(f"{PREFIX}/lib/systemd", what, hint)
    elif any(one.is_document and states[one.path] is FileOutcome.KEPT for one in pieces):
        what = f"written by another version; this is trashd {VERSION}"
        yield Finding("units and man pages", what, again)
    for path, outcome in states.items():
        if outcome is FileOutcome.GONE:
            yield Finding(printable(os.fsencode(path)), "missing", again)


def _check_unit(unit: Mapping[str, str], user_option: str, *, is_needed: bool) -> Iterator[Finding]:
    """Check one unit. is_needed: whether the unit has work to do"""
    name, state = unit["Id"], unit["ActiveState"]
    control = f"systemctl {user_option}"
    result = _NOT_DELETED if name == REAPER else "plans are not applied"
    if unit["LoadState"] == "masked":
        if is_needed:
            yield Finding(name, f"masked, so {result}", f"{control}unmask {name}")
        return
    if unit["LoadState"] != "loaded":
        if unit["LoadState"] != "not-found":
            yield Finding(name, "systemd can't load this unit", f"systemd-analyze {user_option}verify {name}")
        return
    if unit["NeedDaemonReload"] == "yes":
        yield Finding(name, "changed on disk since systemd loaded it", f"{control}daemon-reload")
    program = _PROGRAM.search(unit["ExecStart"])
    if program is not None and not (os.path.isfile(program[1]) and os.access(program[1], os.X_OK)):
        what = f"its program can't be executed: {printable(os.fsencode(program[1]))}"
        hint = f"reinstall the package, or check the drop-ins of the unit: systemctl cat {name}"
        if unit["FragmentPath"].startswith(PREFIX) or user_option:
            hint = f"trashd service install {user_option}".rstrip()
        yield Finding(printable(os.fsencode(unit["FragmentPath"])), what, hint)
    elif state == "failed":
        yield Finding(name, "failed", f"journalctl {user_option}-u {name}")
    elif name in (REAPER, TIMER) and is_needed:
        if state == "inactive":
            yield Finding(name, f"not running, so {result}", f"{control}enable --now {name}")
        elif unit["UnitFileState"] == "disabled":
            yield Finding(
                name, "running, but not enabled: it will not start at the next boot", f"{control}enable {name}"
            )


def _check_running(running: ObservedStatus, user_option: str) -> Iterator[Finding]:
    directory = runtime_dir()
    if running.status.version != VERSION:
        what = f"the running service is trashd {running.status.version}, but this command is {VERSION}"
        yield Finding(printable(directory), what, f"systemctl {user_option}restart {REAPER}")
    for error in unwell(running):
        yield Finding(printable(directory), error.message(), error.hint or "trashd status")


def _mounts() -> Iterator[Finding]:
    """Find mounts whose daemon is dead or has a low limit of open files."""
    from fusefs.cli.mount import few_files
    from fusefs.mount.places.find_mounts import all_mounts, read_counters

    for mount in all_mounts():
        try:
            numbers = read_counters(mount)
        except TrashdError:
            continue  # the daemon is of an older version, or the mount is in another namespace
        if not numbers.is_running:
            yield Finding(printable(mount.point), "the daemon of this mount is not running", DaemonGone.hint)
        elif few := few_files(numbers):
            yield few


def _uring(lines: Sequence[MountLine]) -> Iterator[Finding]:
    """Check whether FUSE over io_uring is available if fstab or a boot setting requests it.

    A mount with uring=on switches it on, even if the boot setting is not in force.
    """
    settings = next(filter(os.path.exists, _URING_SETTINGS), None)
    mounts = [line.place for line in lines if "uring=on" in line.options]
    place = mounts[0] if mounts else settings
    if place is None:
        return
    facts = read_facts()._replace(barred=frozenset())  # a daemon can use cores that this command must not use
    if mounts and facts.is_enabled is False:
        facts = facts._replace(is_enabled=True)
    why = find_obstacle(facts)
    if why is None:
        return
    without = "remove uring=on from these mount options" if mounts else "trashd service install --no-uring"
    if facts.is_enabled is False:
        hint = f"systemd-tmpfiles --create {settings}"
    elif facts.disabled:
        hint = f"sysctl kernel.io_uring_disabled=0, or {without}"
    else:
        hint = without
    what = f"FUSE over io_uring is requested but not available ({why}), so mounts with uring=on fail"
    yield Finding(place, what, hint)


def _allow_other(lines: Sequence[MountLine]) -> Iterator[Finding]:
    """Find a mount in fstab that users may make for all users, but that fusermount3 would refuse."""
    places = [line.place for line in lines if "allow_other" in line.options and line.options & _BY_USERS]
    if places and "user_allow_other" not in map(str.strip, _text(_FUSE_CONF).splitlines()):
        what = f"users can't mount this: allow_other requires the line user_allow_other in {_FUSE_CONF}"
        yield Finding(places[0], what, f"echo user_allow_other >>{_FUSE_CONF}")


def _inotify() -> Iterator[Finding]:
    """Find an inotify limit that is used up. The reaper notices new orphans through inotify. Source  inotify(7)"""
    try:
        with Fd(os.open("/", os.O_PATH)) as root, open_inotify() as inotify:
            add_watch(inotify, root, InotifyMask.CREATE)
    except OSError as error:
        match error.errno:
            case errno.EMFILE:
                limit, cost = "fs.inotify.max_user_instances", "the reaper can't start"
            case errno.ENOSPC:
                limit, cost = "fs.inotify.max_user_watches", "the reaper notices new orphans only after some minutes"
            case _:
                return
        most = int(_text(f"/proc/sys/{limit.replace('.', '/')}") or "0")
        what = f"root has reached this limit of {most:,}, so {cost}"
        yield Finding(
            limit,
            what,
            f"sysctl {limit}={max(most, 64) * 2}; to make this permanent, add it to a file in /etc/sysctl.d",
        )


def _pressure() -> Iterator[Finding]:
    psi = Psi()
    try:
        if psi.read() == StallTimes(None, None, None):
            what = (
                "pressure information (PSI) is off in this kernel, so the reaper sets its pace only by its own latency"
            )
            yield Finding(PRESSURE, what, "add psi=1 to the kernel command line and reboot")
    finally:
        psi.close()


def _text(path: str) -> str:
    """Return the text of a file, or an empty string if it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
