"""trashd doctor: stores, configuration, plans, units and the service that runs, and the kernel's switches.

Units and service are the machine's for root, else one's own. Of switches and limits only those count that something
here wants and does not get.
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
from importlib.metadata import version

import click

from fusefs.cli import output
from fusefs.cli.config import problems_in_force
from fusefs.cli.options import Command, PathBytes, json_option, tended
from fusefs.cli.plan import has_plans, problems_in_plans
from fusefs.cli.service import MOUNTS, PREFIX, REAPER, SWEEP, TIMER, FileOutcome, InstallPlace, brought_by_package
from fusefs.cli.status import unwell
from fusefs.core.errors import (
    BrokenStore,
    DaemonGone,
    Exit,
    NotFound,
    RootSquashed,
    TrashdError,
    UsageError,
    errors_about,
)
from fusefs.core.printable_names import printable
from fusefs.core.results import Finding
from fusefs.core.service_status import SeenStatus
from fusefs.core.uring_choice import why_not
from fusefs.linux import systemd
from fusefs.linux.fd import Fd
from fusefs.linux.inotify import InotifyMask, open_inotify, watch
from fusefs.linux.kernel import Kernel
from fusefs.linux.mount_calls import MountLine, mount_lines
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.pressure import PRESSURE, Psi, StallTimes
from fusefs.linux.runtime_directories import runtime_dir
from fusefs.linux.uring_offer import read_facts
from fusefs.store.doctor import check_folder, check_registry, check_store, check_vouched
from fusefs.store.find_stores import discover, stores_at
from fusefs.store.layout import Store, UserFolder
from fusefs.store.orphans import each_folder
from fusefs.store.root_squash import SQUASHED, refuse_squashed
from fusefs.store.silent_nodes import Waits

_PROPERTIES = (
    "Id", "LoadState", "UnitFileState", "ActiveState", "FragmentPath", "ExecStart", "NeedDaemonReload",
)  # fmt: skip
_PROGRAM = re.compile(r"\{ path=(.*?) ; argv\[\]=")
_URING_SETTINGS = tuple(f"{place}/tmpfiles.d/trashd-uring.conf" for place in ("/etc", "/usr/local/lib", "/usr/lib"))
_FUSE_CONF = "/etc/fuse.conf"
_BY_USERS = frozenset({"user", "users", "owner", "group"})
"""Of fstab: others than root may mount it. Source  mount(8)"""


@click.command("doctor", cls=Command, short_help="Say what is wrong here; repair a store.")
@click.argument("volume", type=PathBytes(), required=False)
@click.option("--repair", is_flag=True, help="First complete or undo what killed commands left.")
@click.option("--wait", "waits", is_flag=True, help="With --repair: watch what other nodes left until it is known.")
@click.option(
    "--ended",
    multiple=True,
    metavar="BOOT",
    help="Nothing of that boot of some machine works here any more (may be repeated).",
)
@json_option
def command(volume: bytes | None, repair: bool, waits: bool, ended: tuple[str, ...], as_json: bool) -> int:
    """Say what is wrong here, and what mends it; silent but on a terminal, with exit code 0, if all is well.

    Looked at is every store that is known, against its invariants, the configuration, the plans, and the units of the
    service; as root everybody's, and switches and limits of the kernel that something here wants. VOLUME is the
    directory that holds a `.trashd`, which alone is looked at then. Nothing is ever deleted that is not understood: it
    is kept, and listed here.

    What is listed and can be neither restored nor reaped its owner moves out of the store with mv(1): trashd-doctor(1)
    has the commands.

    On a shared filesystem locks of other machines may be lost, or not be seen here. What another boot, or another
    mount of the filesystem, left half done is watched by each command here: when nothing has changed in it for 90 to
    180 seconds (`takeover_s` in the configuration; `trashd check` prints it), it is taken over, so that the other
    process finds nothing should it wake. --wait waits for that, and names whose lock is there all the same. At once it
    goes when somebody says by --ended, with the boot's id, that it is over.

    \b
    Examples:
      trashd doctor
      trashd doctor /scratch
      trashd doctor --repair /scratch
      trashd doctor --repair --wait /scratch
      trashd doctor --repair --ended 7a9b0c6e-52f4-4c1f-9d51-2f3b7f0d6e11 /scratch
    """
    if ended and not repair:
        raise UsageError("--ended without --repair", "it only names what may be repaired")
    if waits and not repair:
        raise UsageError("--wait without --repair", "there is nothing to wait for")
    waiting = _wait if waits else None
    if volume is not None:
        path = os.path.realpath(volume)
        return _tell_found(printable(path), _examine(path, repair, ended, waiting), as_json=as_json)
    return _examine_all(repair, ended, waiting, as_json=as_json)


def _examine_all(repair: bool, ended: Sequence[str], waits: Waits | None, *, as_json: bool) -> int:
    """Every store that is known, and what else of this machine has a part in it."""
    paths, silent, broken = dict[bytes, None](), list[bytes](), list[Finding]()
    try:
        for store in discover(Kernel(), (), silent):
            with store:
                paths[store.base_path] = None
    except BrokenStore as error:
        broken = [Finding(error.detail, "so no command can use the trash store there", error.hint)]
    found = [Finding(printable(point), "it does not answer", "see what serves it") for point in silent] + broken
    for path in paths:
        try:
            found += _examine(path, repair, ended, waits)
        except TrashdError as error:
            found.append(Finding(printable(path), error.message(), error.hint))
    found += _examine_machine(is_reaping=bool(paths))
    looks = "configuration, plans, units" + ("" if os.geteuid() else ", kernel switches")
    return _tell_found(f"{output.counted(len(paths), 'store')}, {looks}", found, as_json=as_json)


def _examine_machine(*, is_reaping: bool) -> Iterator[Finding]:
    """What is not in a store: as much of it as the caller could change. is_reaping: there are stores"""
    for problem in (*problems_in_force(), *problems_in_plans()):
        place = f"{problem.file}: {problem.key}" if problem.key else problem.file
        yield Finding(place, problem.what, problem.fix)
    try:
        yield from _find_unit_problems(is_reaping=is_reaping, has_rules=has_plans())
    except TrashdError as error:
        yield Finding("the service", error.message(), error.hint)
    yield from _mounts()
    if os.geteuid() == 0:
        lines = list(mount_lines())
        yield from _uring(lines)
        yield from _allow_other(lines)
        if is_reaping:
            yield from _inotify()
            yield from _pressure()


def _examine(path: bytes, repair: bool, ended: Sequence[str], waits: Waits | None) -> list[Finding]:
    """Raises  TrashdError"""
    kernel = Kernel()
    try:
        if repair:
            for _store in _stores(kernel, path):
                pass  # there are some, and root is let in
            tended([path], kernel, ended, waits)  # one of before is brought up to date
        problems = [problem for store in _stores(kernel, path) for problem in check_store(store)]
    except RootSquashed as error:  # all else that root would find here comes of it
        return [Finding(printable(path), SQUASHED, error.hint)]
    problems += check_registry(kernel, path)
    lost: list[TrashdError] = []

    def check(folder: UserFolder) -> list[Finding]:
        return [*check_vouched(folder), *check_folder(folder)]

    for part in each_folder(discover(kernel, [path]), check, list[Finding], lost):
        problems += part
    return problems + [Finding(printable(path), error.message(), error.hint) for error in lost]


def _wait(seconds: float) -> bool:
    """Wait until what another node left was watched for long enough: in a process of its owner."""
    output.warn(f"another node may still work on what it left here: watching that for {math.ceil(seconds)} s")
    time.sleep(seconds)
    return True


def _tell_found(what: str, problems: Sequence[Finding], *, as_json: bool) -> int:
    for problem in dict.fromkeys(problems):
        if as_json:
            output.as_json(problem)
        else:
            print(f"{printable(os.fsencode(problem.where))}: {problem.what}\n  hint: {problem.hint}")
    if not problems and not as_json and sys.stdout.isatty():
        print(f"{what}: all is well")
    return Exit.FAILED if problems else Exit.DONE


def _stores(kernel: Kernel, path: bytes) -> Iterator[Store]:
    """The stores in a directory, each open until the next. Raises  TrashdError; NotFound if there is none"""
    n_there = 0
    with errors_about(path):
        for store in stores_at(kernel, path, read_mounts()):
            n_there += 1
            with store:
                refuse_squashed(store.kernel, store.fd, store.base_path)
                yield store
    if not n_there:
        raise NotFound(path, "there is no store; trashd init makes one")


def _find_unit_problems(*, is_reaping: bool, has_rules: bool) -> Iterator[Finding]:
    """What is wrong with what is installed and what runs. Where systemd doesn't run, nothing is said of units.

    is_reaping  there is something for a reaper
    has_rules   there is something for the timer
    Raises      TrashdError: the service's status can't be read
    """
    from fusefs.service.state_files import read_status

    for_user = os.geteuid() != 0
    place = InstallPlace(for_user, "/", PREFIX)
    word = "--user " if for_user else ""
    with errors_about(runtime_dir()):
        seen = read_status(runtime_dir())
    if seen is not None and not seen.is_running:
        seen = None
    if place.is_installed():
        yield from _files(place, word)
    if place.is_live():
        units = []
        with suppress(systemd.SystemdFailed, FileNotFoundError):  # no systemctl, or none that may ask
            names = (REAPER,) if for_user else (REAPER, TIMER, SWEEP)
            mounts = [] if for_user else systemd.properties(_PROPERTIES, (MOUNTS,))
            units = systemd.properties(_PROPERTIES, names, for_user=for_user) + mounts
        for unit in units:
            if unit["Id"] != REAPER:
                yield from _unit(unit, word, is_wanted=has_rules)
            elif seen is None or unit["ActiveState"] != "inactive":  # else the service runs without systemd
                # A package brings every user's unit, and root's service serves him all the same.
                is_meant = not for_user or place.is_installed() or unit["UnitFileState"] == "enabled"
                yield from _unit(unit, word, is_wanted=is_reaping and is_meant)
    if seen is not None:
        yield from _running(seen, word)


def _files(place: InstallPlace, word: str) -> Iterator[Finding]:
    """What is wrong with what `service install` wrote. A unit that differs may be as its administrator wants it."""
    again = f"trashd service install {word}".rstrip()
    try:
        pieces = place.pieces(has_uring=place.has_uring())
    except NotFound as error:
        yield Finding("what is installed", error.message(), error.hint)
        return
    packaged = None if word else brought_by_package()
    states = {file.path: file.outcome for file in place.compare(pieces)}
    if packaged is not None:
        what = f"units that trashd service install put there hide those that a package brought ({packaged})"
        hint = f"trashd service uninstall && systemctl enable --now {REAPER}"
        yield Finding(f"{PREFIX}/lib/systemd", what, hint)
    elif any(one.is_document and states[one.path] is FileOutcome.KEPT for one in pieces):
        what = f"trashd service install of another version wrote them, and this is {version('trashd')}"
        yield Finding("units and man pages", what, again)
    for path, outcome in states.items():
        if outcome is FileOutcome.GONE:
            yield Finding(printable(os.fsencode(path)), "it is missing", again)


def _unit(unit: Mapping[str, str], word: str, *, is_wanted: bool) -> Iterator[Finding]:
    """What is wrong with one. is_wanted: there is something for it to do"""
    name, state = unit["Id"], unit["ActiveState"]
    control = f"systemctl {word}"
    does = "nothing is reaped by itself" if name == REAPER else "nothing applies the rules"
    if unit["LoadState"] == "masked":
        if is_wanted:
            yield Finding(name, f"it is masked: {does}", f"{control}unmask {name}")
        return
    if unit["LoadState"] != "loaded":
        if unit["LoadState"] != "not-found":
            yield Finding(name, "systemd can't read it", f"systemd-analyze {word}verify {name}")
        return
    if unit["NeedDaemonReload"] == "yes":
        yield Finding(name, "it was changed since systemd read it", f"{control}daemon-reload")
    program = _PROGRAM.search(unit["ExecStart"])
    if program is not None and not (os.path.isfile(program[1]) and os.access(program[1], os.X_OK)):
        what = f"{printable(os.fsencode(program[1]))}, which it runs, can't be executed"
        hint = f"install the package anew, or see what a drop-in of it says: systemctl cat {name}"
        if unit["FragmentPath"].startswith(PREFIX) or word:
            hint = f"trashd service install {word}".rstrip()
        yield Finding(printable(os.fsencode(unit["FragmentPath"])), what, hint)
    elif state == "failed":
        yield Finding(name, "it failed", f"journalctl {word}-u {name} says why")
    elif name in (REAPER, TIMER) and is_wanted:
        if state == "inactive":
            yield Finding(name, f"it does not run: {does}", f"{control}enable --now {name}")
        elif unit["UnitFileState"] == "disabled":
            yield Finding(name, "it runs, and will not after the next boot", f"{control}enable {name}")


def _running(seen: SeenStatus, word: str) -> Iterator[Finding]:
    """What is wrong with it."""
    directory = runtime_dir()
    if seen.status.version != version("trashd"):
        what = f"the service that runs is trashd {seen.status.version}, and this is {version('trashd')}"
        yield Finding(printable(directory), what, f"systemctl {word}restart {REAPER}")
    for error in unwell(seen):
        yield Finding(printable(directory), error.message(), error.hint or "trashd status says more")


def _mounts() -> Iterator[Finding]:
    """Mounts of ours whose daemon is gone, or can open few files for its users."""
    from fusefs.cli.mount import few_files
    from fusefs.mount.places.find_mounts import all_mounts, read_counters

    for mount in all_mounts():
        try:
            seen = read_counters(mount)
        except TrashdError:
            continue  # of an older version, or of another mount namespace
        if not seen.is_running:
            yield Finding(printable(mount.point), "the daemon of this mount is gone", DaemonGone.hint)
        elif few := few_files(seen):
            yield few


def _uring(lines: Sequence[MountLine]) -> Iterator[Finding]:
    """A mount with uring=on sets the switch itself; what sets it at boot may not have been run."""
    settings = next(filter(os.path.exists, _URING_SETTINGS), None)
    wanted = [line.place for line in lines if "uring=on" in line.options]
    place = wanted[0] if wanted else settings
    if place is None:
        return
    facts = read_facts()._replace(barred=frozenset())  # cores that this very command may not use are a daemon's
    if wanted and facts.is_enabled is False:
        facts = facts._replace(is_enabled=True)
    why = why_not(facts)
    if why is None:
        return
    without = "take uring=on away there" if wanted else "trashd service install --no-uring"
    if facts.is_enabled is False:
        hint = f"systemd-tmpfiles --create {settings}"
    elif facts.disabled:
        hint = f"sysctl kernel.io_uring_disabled=0, or {without}"
    else:
        hint = without
    what = f"FUSE over io_uring is wanted, and can't be had ({why}): a mount with uring=on fails"
    yield Finding(place, what, hint)


def _allow_other(lines: Sequence[MountLine]) -> Iterator[Finding]:
    """What users may mount for others is refused by fusermount3."""
    wanted = [line.place for line in lines if "allow_other" in line.options and line.options & _BY_USERS]
    if wanted and "user_allow_other" not in map(str.strip, _text(_FUSE_CONF).splitlines()):
        what = f"users can't mount it: allow_other takes the line user_allow_other in {_FUSE_CONF}"
        yield Finding(wanted[0], what, f"echo user_allow_other >>{_FUSE_CONF}")


def _inotify() -> Iterator[Finding]:
    """A limit on what tells the reaper of what is new, if it is used up. Source  inotify(7)"""
    try:
        with Fd(os.open("/", os.O_PATH)) as root, open_inotify() as inotify:
            watch(inotify, root, InotifyMask.CREATE)
    except OSError as error:
        match error.errno:
            case errno.EMFILE:
                limit, cost = "fs.inotify.max_user_instances", "no reaper can start"
            case errno.ENOSPC:
                limit, cost = "fs.inotify.max_user_watches", "the reaper sees what is new some minutes late"
            case _:
                return
        most = int(_text(f"/proc/sys/{limit.replace('.', '/')}") or "0")
        what = f"all {most:,} of root's are in use: {cost}"
        yield Finding(limit, what, f"sysctl {limit}={max(most, 64) * 2}, and a line of that in /etc/sysctl.d")


def _pressure() -> Iterator[Finding]:
    psi = Psi()
    try:
        if psi.read() == StallTimes(None, None, None):
            what = "this kernel doesn't tell who waits for what (PSI is off): the reaper goes by its own latency alone"
            yield Finding(PRESSURE, what, "psi=1 on the kernel's command line, at the next boot")
    finally:
        psi.close()


def _text(path: str) -> str:
    """What is in a file; nothing if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
