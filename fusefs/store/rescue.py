"""Rescue and forget: a way out of the store for containers that no other command understands.

A container whose record is cut short, missing, or of another store, one that recovery keeps, or something that is no
container at all: no other verb touches it (I12). By a person's word it leaves as it is, by one rename of the whole,
its record with it: nothing is opened up, chmodded, taken apart or overwritten, and killed it happened or it did not.
Forgotten it becomes an orphan that has expired, by the transaction of what is dropped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.errors import (
    Busy,
    IsStore,
    NotFound,
    Occupied,
    OtherFilesystem,
    Refused,
    TrashdError,
    Unsettled,
    UsageError,
    from_os,
)
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name, is_container_id
from fusefs.core.printable_names import printable
from fusefs.core.record import NOTE_MAX_CHARS
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.adopt import take_in
from fusefs.store.backing_and_mount import BackingAndMount, between, with_mounted
from fusefs.store.check import check_container
from fusefs.store.claim import ClaimLost, hold
from fusefs.store.container import HeldContainer
from fusefs.store.discover import discover
from fusefs.store.find_orphans import act_on, each_folder, opened_folder
from fusefs.store.layout import FRESH, RECORD, RECORD_NEW, TREE, UNMOUNT, UserFolder, is_stores_own
from fusefs.store.list_orphans import ListedContainer, unreadable
from fusefs.store.mounted_paths import open_shown
from fusefs.store.recover import may_be_alive, recover
from fusefs.store.spare_space import FOR_USER, with_room
from fusefs.store.user_folders import MOUNTED
from fusefs.store.victim_rename import VisibleRename

_LEAST_CHARS = 4
_MOST_TOLD = 20
_UNSETTLED = (State.STAGE, State.RESTORING)


class Rescued(NamedTuple):
    """What left the store.

    id     what it was called there
    where  its directory there
    why    what was wrong with it
    path   where it is now, whole
    holds  the first names in it, sorted; none if it is no directory
    """

    id: str
    where: str
    why: str
    path: bytes
    holds: tuple[bytes, ...]


class Forgotten(NamedTuple):
    """What was given up: `orphan` is its id now, due at once; the others as of `Rescued`."""

    id: str
    where: str
    why: str
    orphan: ContainerId


def find_thing(kernel: Kernel, volumes: Sequence[bytes], wanted: bytes) -> ListedContainer:
    """The one thing of that name in the directory of a state, understood or not; nothing of it is read.

    wanted  its name, as it is or as it is printed; of a container's id a beginning or end will do. `STATE/NAME` where
            two states have it
    Raises  NotFound; UsageError if several have it, or it is too short to be meant; the error of a folder that could
            not be looked at, if it is in none of the others
    """
    state, _, name = wanted.rpartition(b"/")
    lost: list[TrashdError] = []
    named = {
        entry.path: entry
        for part in each_folder(discover(kernel, volumes), partial(_named, state, name), list[ListedContainer], lost)
        for entry in part
    }
    listed = list(named.values())
    found = [entry for entry in listed if os.path.basename(entry.path) == name] or listed
    if len(found) > 1:
        ways = sorted(printable(b"/".join(entry.path.split(b"/")[-2:])) for entry in found)
        hint = "give more of the id, its state too (STATE/ID), or name the volume"
        raise UsageError(f"{printable(wanted)} could be {ways[0]} or {ways[1]}", hint)
    if not found:
        raise lost[0] if lost else NotFound(wanted, "trashd doctor VOLUME tells of all that is not understood")
    return found[0]


def _named(state: bytes, wanted: bytes, folder: UserFolder) -> list[ListedContainer]:
    return [
        unreadable(folder, one, name, "")
        for one in State
        if state in (b"", one.value.encode())
        for name in folder.list(one)
        if wanted in (name, printable(name).encode()) or _is_cut(name, wanted)
    ]


def _is_cut(name: bytes, wanted: bytes) -> bool:
    is_long_enough = len(wanted) >= _LEAST_CHARS and is_container_id(name.decode("ascii", "replace"))
    return is_long_enough and (name.startswith(wanted) or name.endswith(wanted))


def rescue(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, to: bytes, ended: Collection[str] = ()
) -> Rescued:
    """Take something that is not understood out of its store, to a name that is free.

    entry   as found by `find_thing`
    to      on the volume's filesystem, and in no store
    ended   as for `recover`
    Raises  Refused if it is in order; Busy; Occupied, OtherFilesystem; TrashdError: it is where it was then
    """
    with _open_target(kernel, to) as (above, name):
        why = why_stuck(kernel, volumes, entry, ended)
        try:
            # In our own process, as root too: one rename between two directories that we hold open.
            with opened_folder(kernel, volumes, entry, with_own=True) as folder:
                holds = _take_out(folder, entry, above, name, to)
        except OSError as error:
            if error.errno == errno.EXDEV:
                hint = f"name a PATH on the filesystem of {printable(entry.base_path())}"
                raise OtherFilesystem(to, hint) from error
            raise from_os(error, to) from error
    return Rescued(entry.id, printable(entry.path), why, to, holds)


def forget(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, ended: Collection[str] = ()) -> Forgotten:
    """Give something up that is not understood: an orphan that has expired, of the same owner; errors as for `rescue`.

    Its owner's process does it, and reaps it with that user's rights.
    """

    def body(folder: UserFolder, _visible: VisibleRename | None) -> Forgotten:
        why = _look(folder, entry, ended)
        state, name = _state_of(entry), Name(os.path.basename(entry.path))
        note = f"given up by trashd doctor --forget: {state.value}/{printable(name)}: {why}"[:NOTE_MAX_CHARS]
        act = partial(_give_up, folder, state, name, note)
        return Forgotten(entry.id, printable(entry.path), why, with_room(folder, FOR_USER, act))

    try:
        return act_on(kernel, volumes, entry, body, Forgotten)
    except OSError as error:
        raise from_os(error, entry.path) from error


def why_stuck(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, ended: Collection[str] = ()) -> str:
    """What is wrong with it, so that it may be rescued or forgotten; errors as for `rescue`."""
    return act_on(kernel, volumes, entry, lambda folder, _visible: _look(folder, entry, ended), str)


def _look(folder: UserFolder, entry: ListedContainer, ended: Collection[str]) -> str:
    """What is wrong with it, after what can be completed or undone was; to be run as its owner.

    Raises  Refused if nothing is, or nothing is in it; Busy; NotFound if it is not there any more
    """
    recover(folder, ended)
    state, name = _state_of(entry), os.path.basename(entry.path)
    with folder.open(state) as state_fd:
        try:
            folder.store.kernel.stat(state_fd, name)
        except FileNotFoundError as error:
            hint = "what could be completed or undone was, just now: trashd list shows it"
            raise NotFound(entry.path, hint) from error
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise Refused(f"{entry.id}: {MOUNTED}", UNMOUNT) from error
        if state is State.STAGE and _is_bare(folder.store.kernel, state_fd, name):
            raise Refused(f"{entry.id} holds nothing", "trashd doctor --repair VOLUME removes it")
    if is_container_id(entry.id):
        _ask_holder(folder, state, ContainerId(entry.id), ended)
    problems = check_container(folder, state, name)
    if not problems:
        hint = "trashd restore ID --to PATH takes it out, trashd reap --now ID deletes it"
        raise Refused(f"nothing is wrong with {entry.id}", hint)
    return "; ".join(problem.what for problem in problems)


def _ask_holder(folder: UserFolder, state: State, container: ContainerId, ended: Collection[str]) -> None:
    """Raises  Busy if a process works on it; Refused if one on another machine may"""
    try:
        held = hold(folder, state, container)
    except (OSError, TrashdError):
        return  # that is what is wrong with it
    if held is ClaimLost.BUSY:
        raise Busy(container)
    if isinstance(held, HeldContainer):
        with held:
            alive = may_be_alive(held, ended) if state in _UNSETTLED else None
        if alive is not None:
            raise Refused(str(alive), alive.hint)


def _is_bare(kernel: Kernel, state_fd: Fd, name: bytes) -> bool:
    """Whether it is a container without a record, and with nothing in it: its maker may be about to write one."""
    try:
        with kernel.open_dir(state_fd, name) as fd:
            if set(kernel.list(fd)) - {RECORD_NEW, TREE, FRESH}:
                return False
            for part in (TREE, FRESH):
                with suppress(FileNotFoundError), kernel.open_dir(fd, part) as inner:
                    if not kernel.is_empty(inner):
                        return False
    except OSError:
        return False
    return True


def _state_of(entry: ListedContainer) -> State:
    return State(os.path.basename(os.path.dirname(entry.path)).decode())


def _give_up(folder: UserFolder, state: State, name: Name, note: str) -> ContainerId:
    kernel = folder.store.kernel
    with folder.open(state) as state_fd, kernel.open_beneath(state_fd, name) as fd, ExitStack() as owned:
        _lock(kernel, fd, owned)
        return take_in(folder, state_fd, name, origin=None, retention_s=0, note=note)


def _take_out(
    folder: UserFolder, entry: ListedContainer, above: BackingAndMount, name: Name, to: bytes
) -> tuple[bytes, ...]:
    """Rename it; the first names in it. Raises  TrashdError, OSError; it is where it was then"""
    kernel, store = folder.store.kernel, folder.store
    old = os.path.basename(entry.path)
    state = Name(_state_of(entry).value.encode())
    with ExitStack() as owned:
        # Not by UserFolder.open, which makes what is missing: it would be root's.
        state_fd = owned.enter_context(kernel.open_dir(folder.fd, state))
        thing = owned.enter_context(kernel.open_beneath(state_fd, old))
        kind = stat.S_IFMT(kernel.fstat(thing).st_mode)
        if folder.uid != os.geteuid() and kind not in (stat.S_IFDIR, stat.S_IFREG):
            raise Refused(f"{entry.id} is neither a directory nor a file", "its owner can rescue it, or rm it")
        _lock(kernel, thing, owned)
        upper = os.path.dirname(folder.way_to(_state_of(entry), old))
        top = _same_mount(kernel, store.base.mounted, above.mounted)
        source, target = between(owned.enter_context(with_mounted(kernel, state_fd, top, upper)), above)
        try:
            kernel.rename_free(source, old, target, name)
        except FileExistsError as error:
            raise Occupied(to, "name a PATH that does not exist") from error
        if not kernel.is_named(thing, above.fd, name):
            _give_back(kernel, target, name, source, old, to)
        with suppress(OSError):  # it is out; a power cut may put it back
            kernel.fsync(state_fd)
        if kind != stat.S_IFDIR:
            return ()
        with suppress(OSError), kernel.open_dir(thing) as listed:
            return tuple(kernel.list(listed)[:_MOST_TOLD])
    return ()


def _same_mount(kernel: Kernel, one: Fd | None, other: Fd | None) -> Fd | None:
    """The first, if both are in one mount."""
    if one is None or other is None or kernel.fstat(one).st_dev != kernel.fstat(other).st_dev:
        return None
    return one


def _give_back(kernel: Kernel, dir_fd: Fd, name: Name, state_fd: Fd, old: bytes, to: bytes) -> None:
    """What was put in its place at that moment goes back; beside, if that is taken. Raises  Refused, Unsettled"""
    for back in (old, b"refused." + os.urandom(6).hex().encode()):
        with suppress(OSError):
            kernel.rename_free(dir_fd, name, state_fd, back)
            raise Refused(f"{printable(old)}: something else took its place at that moment; it was given back")
    raise Unsettled(f"{printable(to)}: it is not what was asked for, and could not be given back", "look at it with ls")


def _lock(kernel: Kernel, thing: Fd, owned: ExitStack) -> None:
    """Lock its records, if it has any that can be locked. Raises  Busy if one is locked"""
    if not stat.S_ISDIR(kernel.fstat(thing).st_mode):
        return
    for name in (RECORD, RECORD_NEW):
        try:
            # Looked at before it is opened: to open a device node, as root, would be to act.
            with kernel.open_beneath(thing, name) as there:
                if not stat.S_ISREG(kernel.fstat(there).st_mode):
                    continue
                record = owned.enter_context(kernel.reopen(there, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EXDEV):
                raise
            continue  # not there, or another user's: no command of its owner's could have locked it
        if not kernel.lock(record):
            raise Busy(printable(name))


@contextmanager
def _open_target(kernel: Kernel, to: bytes) -> Iterator[tuple[BackingAndMount, Name]]:
    """The directory in which something is to get a name, and the name. Raises  TrashdError"""
    parent, name = os.path.split(to.rstrip(b"/"))
    if name in (b"", b".", b".."):
        raise UsageError(f"--to {printable(to)}", "name a PATH that does not exist")
    try:
        above = open_shown(kernel, parent or b".")
    except OSError as error:
        raise from_os(error, parent or b".") from error
    with above:
        way = os.readlink(b"/proc/self/fd/%d" % above.fd)
        if any(map(is_stores_own, [*way.split(b"/"), name])):
            raise IsStore(to, "name a PATH outside of it")
        yield above, Name(name)
