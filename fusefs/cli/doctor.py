"""trashd doctor."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence

import click

from fusefs.cli import output
from fusefs.cli.config import problems_in_force
from fusefs.cli.options import PathBytes, json_option
from fusefs.cli.plan import has_plans, problems_in_plans
from fusefs.cli.settle_first import tended
from fusefs.cli.switch_problems import switch_problems
from fusefs.cli.unit_problems import unit_problems
from fusefs.core.errors import (
    BrokenStore,
    Exit,
    NotFound,
    RootSquashed,
    TrashdError,
    UsageError,
    errors_about,
)
from fusefs.core.printable_names import printable
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.store.adopt import AdoptionProblem
from fusefs.store.check import check_folder, check_registry, check_store, check_vouched
from fusefs.store.discover import discover, open_at
from fusefs.store.find_orphans import each_folder
from fusefs.store.layout import Store, UserFolder
from fusefs.store.root_squash import SQUASHED, refuse_squashed
from fusefs.store.take_over import Waits


@click.command("doctor", short_help="Say what is wrong here; repair a store.")
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
def command(
    volume: bytes | None,
    repair: bool,
    waits: bool,
    ended: tuple[str, ...],
    as_json: bool,
) -> int:
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
    paths, silent, broken = [], list[bytes](), list[AdoptionProblem]()
    try:
        for store in discover(Kernel(), (), silent):
            with store:
                paths.append(store.base_path)
    except BrokenStore as error:
        broken = [AdoptionProblem(error.detail, "so no command can use the trash store there", error.hint)]
    found = [AdoptionProblem(printable(point), "it does not answer", "see what serves it") for point in silent] + broken
    for path in paths:
        try:
            found += _examine(path, repair, ended, waits)
        except TrashdError as error:
            found.append(AdoptionProblem(printable(path), error.message(), error.hint))
    found += _examine_machine(is_reaping=bool(paths))
    looks = "configuration, plans, units" + ("" if os.geteuid() else ", kernel switches")
    return _tell_found(f"{output.counted(len(paths), 'store')}, {looks}", found, as_json=as_json)


def _examine_machine(*, is_reaping: bool) -> Iterator[AdoptionProblem]:
    """What is not in a store: as much of it as the caller could change. is_reaping: there are stores"""
    for problem in (*problems_in_force(), *problems_in_plans()):
        place = f"{problem.file}: {problem.key}" if problem.key else problem.file
        yield AdoptionProblem(place, problem.what, problem.fix)
    try:
        yield from unit_problems(is_reaping=is_reaping, has_rules=has_plans())
    except TrashdError as error:
        yield AdoptionProblem("the service", error.message(), error.hint)
    if os.geteuid() == 0:
        yield from switch_problems(is_reaping=is_reaping)


def _examine(path: bytes, repair: bool, ended: Sequence[str], waits: Waits | None) -> list[AdoptionProblem]:
    """Raises  TrashdError"""
    kernel = Kernel()
    store = _opened(kernel, path)
    try:
        refuse_squashed(store)
    except RootSquashed as error:  # all else that root would find here comes of it
        store.__exit__()
        return [AdoptionProblem(printable(path), SQUASHED, error.hint)]
    if repair:
        with store:
            tended([path], kernel, ended, waits)
        store = _opened(kernel, path)  # one of before was brought up to date
    with store:
        problems = [*check_store(store), *check_registry(kernel, path)]
        lost: list[TrashdError] = []
        for part in each_folder(discover(kernel, [path]), _check, list[AdoptionProblem], lost):
            problems += part
        return problems + [AdoptionProblem(printable(path), error.message(), error.hint) for error in lost]


def _wait(seconds: float) -> bool:
    """Wait until what another node left was watched for long enough: in a process of its owner."""
    output.warn(f"another node may still work on what it left here: watching that for {math.ceil(seconds)} s")
    time.sleep(seconds)
    return True


def _tell_found(what: str, problems: Sequence[AdoptionProblem], *, as_json: bool) -> int:
    for problem in dict.fromkeys(problems):
        if as_json:
            output.as_json(problem)
        else:
            print(f"{printable(os.fsencode(problem.where))}: {problem.what}\n  hint: {problem.hint}")
    if not problems and not as_json and sys.stdout.isatty():
        print(f"{what}: all is well")
    return Exit.FAILED if problems else Exit.DONE


def _opened(kernel: Kernel, path: bytes) -> Store:
    """The store in a directory. Raises  TrashdError; NotFound if there is none"""
    with errors_about(path):
        store = open_at(kernel, path, read_mounts())
    if store is None:
        raise NotFound(path, "there is no store; trashd init makes one")
    return store


def _check(folder: UserFolder) -> list[AdoptionProblem]:
    return [*check_vouched(folder), *check_folder(folder)]
