"""Checks the invariants I1 to I6 in a store, and checks the caller's registry of stores; changes nothing."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from fusefs.core.container_states import State
from fusefs.core.errors import SETTLE, WAY_OUT, TrashdError
from fusefs.core.identity import IdentityMatch, compare
from fusefs.core.names import ContainerId, is_container_id
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.results import Finding
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import is_inside, read_mounts
from fusefs.store.backing_and_mount import DIRECTORY, BackingAndMount
from fusefs.store.container import UNFINISHED_PREFIX, ClaimLost, HeldContainer, hold
from fusefs.store.layout import (
    BEGUN,
    HIDDEN_PREFIXES,
    HOISTED,
    NEW_PREFIX,
    RECORD,
    RECORD_NEW,
    REPLACEMENT,
    RESERVE,
    TREE,
    UNMOUNT,
    WATCH_PREFIXES,
    Store,
    UserFolder,
    open_own_store,
    open_store,
)
from fusefs.store.recover import to_finding
from fusefs.store.registry_lines import (
    NO_ROOT_MARK,
    StoreMaker,
    can_have_root_mark,
    explain_missing_mark,
    explain_unused_registry,
    has_root_mark,
    hint_for_unknown_maker,
    read_own_lines,
)
from fusefs.store.reserve import has_spare_space, is_stocked, is_used
from fusefs.store.stage import identify_at
from fusefs.store.store_registry import RegistryTarget, UserLine, find_targets
from fusefs.store.tidy_folder import find_refused_names
from fusefs.store.user_folders import MAX_POINTERS, MOUNTED, NOT_MADE, is_vouched, list_pointers

_RECOVER_HINT = "trashd doctor --repair VOLUME refills the reserve"
_COPIED_HINT = f"in a copy or a backup of the volume this is normal, and trashd restore ID works; otherwise {WAY_OUT}"
_EXPECTED_NAMES = {bytes(RECORD), bytes(TREE), bytes(HOISTED), bytes(BEGUN)}
_UNREAD_HINT = (
    "make yourself its owner, and the only user who can write to it and its directory; or remove it: the next command"
    " that needs it creates it again"
)
_GONE_HINT = "no action is needed: the entry is removed when the next store is added"
_RECORD_RETRY_S = 0.2
"""Much longer than a command takes to remove a container whose record it has just removed."""
_BY_KILLED_KEEP = bytes(RECORD_NEW)
"""A file left by a killed `keep`. The next command that changes the orphan removes it; recovery skips most orphans."""


def check_store(store: Store) -> Iterator[Finding]:
    """Yield the problems of the store itself; any user who may read the store can run this."""
    kernel, init = store.kernel, f"trashd init {shell_word(store.base_path)}"
    names: list[bytes] = []
    with suppress(PermissionError), kernel.open_dir(store.base.fd) as readable:
        names = kernel.list(readable)
    for name in names:
        if name.startswith(NEW_PREFIX):
            yield Finding(
                _format_path(store.base_path, name),
                "an unfinished trash store",
                f"{init} completes or removes it",
            )
    if not store.volume.exchange and store.volume.filesystem != kernel.filesystem(store.fd):
        yield Finding(_format_path(store.base_path), "the store was tested on a different type of filesystem", init)
    if store.has_unknown_maker():
        yield Finding(_format_path(store.base_path), NOT_MADE, hint_for_unknown_maker(store.base_path))
    elif (
        store.is_ours_as_root()
        and store.maker is StoreMaker.BY_ROOT
        and not has_root_mark(kernel, store.fd)
        and can_have_root_mark(kernel, store.fd)
    ):
        yield Finding(_format_path(store.base_path), NO_ROOT_MARK, explain_missing_mark(store.base_path))
    yield from find_refused_names(store)


def _format_path(*path: bytes) -> str:
    return printable(os.path.join(*path))


def check_folder(folder: UserFolder) -> list[Finding]:
    """Return the problems in a user's folder. Call this as that user."""
    problems: list[Finding] = []
    if is_used(folder) and not (is_stocked(folder) and has_spare_space(folder)):
        problems.append(
            Finding(
                _format_path(folder.path(), RESERVE),
                "the reserve of blocks for a full volume is incomplete",
                _RECOVER_HINT,
            )
        )
    state_by_name: dict[bytes, State] = {}
    unrecorded: list[tuple[State, bytes]] = []
    for state in State:
        for name in folder.list(state):
            if name in state_by_name:
                where = printable(folder.path_to(state, name))
                problems.append(
                    Finding(where, f"an orphan with the same ID is also in {state_by_name[name].value}/", WAY_OUT)
                )
            state_by_name[name] = state
            try:
                problems += _check_container(folder, state, name)
            except _NoRecord:
                unrecorded.append((state, name))
    if unrecorded:
        time.sleep(_RECORD_RETRY_S)
    for state, name in unrecorded:
        try:
            problems += _check_container(folder, state, name)
        except _NoRecord:
            problems += _check_unrecorded(folder, state, name)
    return [*problems, *_check_pointers(folder)]


class _NoRecord(Exception):
    """A container has no record: a command is removing it, or was killed, or trashd did not make the container."""


def _check_unrecorded(folder: UserFolder, state: State, name: bytes) -> Iterator[Finding]:
    kernel = folder.store.kernel
    where = printable(folder.path_to(state, name))
    with folder.open(state) as state_fd, suppress(FileNotFoundError), kernel.open_dir(state_fd, name) as fd:
        removed = {RECORD_NEW, TREE, REPLACEMENT} if state is State.STAGE else {RECORD_NEW}
        names = {name for name in kernel.list(fd) if not name.startswith((UNFINISHED_PREFIX, *WATCH_PREFIXES))}
        if state is State.QUARANTINE or names - removed:
            yield Finding(where, "no record", WAY_OUT)
        elif folder.store.is_shared() and state is not State.REAPING:
            hint = (
                f"trashd doctor --repair --wait {shell_word(folder.store.base_path)} removes it if it does not change"
            )
            yield Finding(where, "no record: another node is writing it, or a killed command left it", hint)
        else:
            yield Finding(where, "no record: left by a killed command", SETTLE)


def _check_container(folder: UserFolder, state: State, name: bytes) -> Iterator[Finding]:
    """Yield the problems of an entry in a state's directory, unless it is locked or was moved. Raises  _NoRecord"""
    where = printable(folder.path_to(state, name))
    text = name.decode("ascii", "replace")
    if not is_container_id(text):
        yield Finding(where, "not an orphan", WAY_OUT)
        return
    try:
        held = hold(folder, state, ContainerId(text))
    except FileNotFoundError:
        raise _NoRecord from None
    except TrashdError as error:
        yield Finding(where, error.message(), WAY_OUT)
    except OSError as error:
        if error.errno == errno.EXDEV:
            yield Finding(where, MOUNTED, UNMOUNT)
        else:
            yield to_finding(folder, where, error)
    else:
        if isinstance(held, ClaimLost):
            if held is ClaimLost.GONE:
                with folder.open(state) as state_fd, suppress(FileNotFoundError):
                    if not stat.S_ISDIR(folder.store.kernel.stat(state_fd, name).st_mode):
                        yield Finding(where, "neither an orphan nor a directory", WAY_OUT)
            return  # otherwise it is locked, or was moved
        with held:
            yield from _check_held(held, where)


def _check_held(held: HeldContainer, where: str) -> Iterator[Finding]:
    kernel, record = held.folder.store.kernel, held.record
    if held.state in (State.STAGE, State.RESTORING):
        yield Finding(where, f"left by a killed command ({record.method.value})", SETTLE)
        return
    extra = {
        name for name in kernel.list(held.fd) if not name.startswith((*WATCH_PREFIXES, *HIDDEN_PREFIXES))
    } - _EXPECTED_NAMES
    if held.state is State.ORPHANS:
        extra.discard(_BY_KILLED_KEEP)
    if extra:
        yield Finding(where, f"contains unknown files: {', '.join(sorted(printable(name) for name in extra))}", WAY_OUT)
    tree = identify_at(kernel, held.fd, TREE)
    if tree is None and held.state is State.ORPHANS:
        yield Finding(where, "its tree is missing", WAY_OUT)
    if tree is not None and compare(tree, record.victim) is IdentityMatch.OTHER:
        yield Finding(where, "its tree is not the one in its record", _COPIED_HINT)
    yield from _check_temporary_permission(held, where)


def _check_temporary_permission(held: HeldContainer, where: str) -> Iterator[Finding]:
    """Yield a problem if an orphan's tree still has a temporary permission, which should have ended by now."""
    record, kernel = held.record, held.folder.store.kernel
    if record.lent_mode is None or held.state is not State.ORPHANS or record.partial:
        return
    with suppress(FileNotFoundError), kernel.open_beneath(held.fd, TREE) as tree:
        if stat.S_IMODE(kernel.fstat(tree).st_mode) == record.lent_mode | stat.S_IRWXU:
            yield Finding(where, "it still has the temporary permissions for the rename", "restore its mode with chmod")


def _check_pointers(folder: UserFolder) -> Iterator[Finding]:
    kernel = folder.store.kernel
    for number, (name, lower) in enumerate(list_pointers(folder)):
        where = _format_path(folder.path(), b"pointers", name)
        if number == MAX_POINTERS:
            more = f"only the first {MAX_POINTERS:,} pointers are followed"
            yield Finding(_format_path(folder.path(), b"pointers"), more, "remove pointers that lead to no trash store")
            return
        if lower is None:
            yield Finding(where, "it is not a relative path", "remove it")
            continue
        problems, n_stores = list[Finding](), 0
        for opener in (open_store, open_own_store):
            try:
                base = BackingAndMount(kernel.open_beneath(folder.store.base.fd, lower, DIRECTORY))
                store = opener(kernel, base, os.path.join(folder.store.base_path, lower))
            except TrashdError as error:
                problems.append(Finding(where, error.message(), error.hint))
                continue
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    yield Finding(
                        where, "it leads through a symbolic link, or to something other than a directory", "remove it"
                    )
                break  # that directory was removed or swapped together with its store: nothing is lost
            if store is not None:
                n_stores += 1
                with store:
                    yield from find_refused_names(store, folder.uid)
        if not n_stores:  # otherwise, the problem is another user's store beside the caller's own
            yield from problems


def check_registry(kernel: Kernel, directory: bytes) -> Iterator[Finding]:
    """Yield why the caller's registry is not used, and the missing stores that it lists in or below a directory."""
    unread = explain_unused_registry()
    if unread is not None:
        where, why = unread
        yield Finding(printable(where), f"the registry of stores is not used: {why}", _UNREAD_HINT)
    entries = [UserLine(os.geteuid(), line) for line in read_own_lines() if is_inside(line.path, directory)]
    for entry, lead in find_targets(kernel, entries, read_mounts()):
        if lead is RegistryTarget.GONE:
            where = entry.line.store()
            yield Finding(printable(where), "it is in the registry of stores, but does not exist", _GONE_HINT)


def check_vouched(folder: UserFolder) -> list[Finding]:
    """Return a finding if automatic reaps skip a user's folder because its store may be a copy. Call as that user."""
    store = folder.store
    if is_vouched(store):
        return []
    where, owner_does = store.path(), f"trashd init {shell_word(store.base_path)}"
    what = "it is not in its owner's registry of stores, so it may be a copy, and its orphans are reaped only by ID"
    return [Finding(printable(where), what, f"its owner can register it: {owner_does}")]
