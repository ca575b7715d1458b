"""The service's units and the service that runs, as doctor looks at them; the machine's for root, else one's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version

from fusefs.cli.service import MOUNTS, PREFIX, REAPER, SWEEP, TIMER, InstallPlace
from fusefs.cli.service_files import brought_by_package
from fusefs.cli.service_install import FileOutcome
from fusefs.cli.status import unwell
from fusefs.core.errors import NotFound, errors_about
from fusefs.core.printable_names import printable
from fusefs.core.service_status import SeenStatus
from fusefs.linux import systemd
from fusefs.linux.runtime_directories import runtime_dir
from fusefs.store.adopt import AdoptionProblem

_PROPERTIES = (
    "Id", "LoadState", "UnitFileState", "ActiveState", "FragmentPath", "ExecStart", "NeedDaemonReload",
)  # fmt: skip
_PROGRAM = re.compile(r"\{ path=(.*?) ; argv\[\]=")


def unit_problems(*, is_reaping: bool, has_rules: bool) -> Iterator[AdoptionProblem]:
    """What is wrong with what is installed and what runs. Where systemd doesn't run, nothing is said of units.

    is_reaping  there is something for a reaper
    has_rules   there is something for the timer
    Raises      TrashdError: the service's status can't be read
    """
    for_user = os.geteuid() != 0
    place = InstallPlace(for_user, "/", PREFIX)
    word = "--user " if for_user else ""
    seen = _seen()
    if place.is_installed():
        yield from _files(place, word)
    if place.is_live():
        try:
            units = _looked_at(for_user=for_user)
        except (systemd.SystemdFailed, FileNotFoundError):
            units = []  # no systemctl, or none that may ask
        for unit in units:
            if unit["Id"] != REAPER:
                yield from _unit(unit, word, is_wanted=has_rules)
            elif seen is None or unit["ActiveState"] != "inactive":  # else the service runs without systemd
                # A package brings every user's unit, and root's service serves him all the same.
                is_meant = not for_user or place.is_installed() or unit["UnitFileState"] == "enabled"
                yield from _unit(unit, word, is_wanted=is_reaping and is_meant)
    if seen is not None:
        yield from _running(seen, word)


def _looked_at(*, for_user: bool) -> list[dict[str, str]]:
    """Raises  SystemdFailed, FileNotFoundError"""
    names = (REAPER,) if for_user else (REAPER, TIMER, SWEEP)
    found = systemd.properties(_PROPERTIES, names, for_user=for_user)
    return found if for_user else found + systemd.properties(_PROPERTIES, (MOUNTS,))


def _files(place: InstallPlace, word: str) -> Iterator[AdoptionProblem]:
    """What is wrong with what `service install` wrote. A unit that differs may be as its administrator wants it."""
    again = f"trashd service install {word}".rstrip()
    installation = place.open()
    try:
        pieces = place.pieces(has_uring=place.has_uring(installation))
    except NotFound as error:
        yield AdoptionProblem("what is installed", error.message(), error.hint)
        return
    packaged = None if word else brought_by_package()
    states = {file.path: file.outcome for file in installation.compare(pieces)}
    if packaged is not None:
        what = f"units that trashd service install put there hide those that a package brought ({packaged})"
        hint = f"trashd service uninstall && systemctl enable --now {REAPER}"
        yield AdoptionProblem(f"{PREFIX}/lib/systemd", what, hint)
    elif any(one.is_document and states[one.path] is FileOutcome.KEPT for one in pieces):
        what = f"trashd service install of another version wrote them, and this is {version('trashd')}"
        yield AdoptionProblem("units and man pages", what, again)
    for path, outcome in states.items():
        if outcome is FileOutcome.GONE:
            yield AdoptionProblem(printable(os.fsencode(path)), "it is missing", again)


def _unit(unit: Mapping[str, str], word: str, *, is_wanted: bool) -> Iterator[AdoptionProblem]:
    """What is wrong with one. is_wanted: there is something for it to do"""
    name, state = unit["Id"], unit["ActiveState"]
    control = f"systemctl {word}"
    does = "nothing is reaped by itself" if name == REAPER else "nothing applies the rules"
    if unit["LoadState"] == "masked":
        if is_wanted:
            yield AdoptionProblem(name, f"it is masked: {does}", f"{control}unmask {name}")
        return
    if unit["LoadState"] != "loaded":
        if unit["LoadState"] != "not-found":
            yield AdoptionProblem(name, "systemd can't read it", f"systemd-analyze {word}verify {name}")
        return
    if unit["NeedDaemonReload"] == "yes":
        yield AdoptionProblem(name, "it was changed since systemd read it", f"{control}daemon-reload")
    program = _PROGRAM.search(unit["ExecStart"])
    if program is not None and not (os.path.isfile(program[1]) and os.access(program[1], os.X_OK)):
        what = f"{printable(os.fsencode(program[1]))}, which it runs, can't be executed"
        yield AdoptionProblem(printable(os.fsencode(unit["FragmentPath"])), what, _again(unit, word))
    elif state == "failed":
        yield AdoptionProblem(name, "it failed", f"journalctl {word}-u {name} says why")
    elif name in (REAPER, TIMER) and is_wanted:
        if state == "inactive":
            yield AdoptionProblem(name, f"it does not run: {does}", f"{control}enable --now {name}")
        elif unit["UnitFileState"] == "disabled":
            yield AdoptionProblem(name, "it runs, and will not after the next boot", f"{control}enable {name}")


def _again(unit: Mapping[str, str], word: str) -> str:
    """What puts a unit right whose program is not there."""
    if unit["FragmentPath"].startswith(PREFIX) or word:
        return f"trashd service install {word}".rstrip()
    return "install the package anew, or see what a drop-in of it says: systemctl cat " + unit["Id"]


def _seen() -> SeenStatus | None:
    """The service that lives, if one does. Raises  TrashdError"""
    from fusefs.service.status_file import read_status

    with errors_about(runtime_dir()):
        seen = read_status(runtime_dir())
    return seen if seen is not None and seen.is_running else None


def _running(seen: SeenStatus, word: str) -> Iterator[AdoptionProblem]:
    """What is wrong with it."""
    directory = runtime_dir()
    if seen.status.version != version("trashd"):
        what = f"the service that runs is trashd {seen.status.version}, and this is {version('trashd')}"
        yield AdoptionProblem(printable(directory), what, f"systemctl {word}restart {REAPER}")
    for error in unwell(seen):
        yield AdoptionProblem(printable(directory), error.message(), error.hint or "trashd status says more")
