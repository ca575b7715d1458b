"""Recovers from killed commands: completes, undoes, or reports what they left in stage/ and restoring/.

Recovery decides by the record and by identities (core.container_states), never by names or ages. It does not touch
locked containers. It removes directories only with rmdir, which fails if the decision was wrong. When a tree is back,
data that was written into its replacement becomes a separate orphan.

`Origin` is the place that a tree came from: its old name, opened beneath the store's base, and the steps that recovery
and restore take there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self, assert_never

from fusefs.core.container_states import (
    DEFAULT_RETENTION_S,
    RestoringAction,
    StageAction,
    State,
    decide_restoring,
    decide_stage,
)
from fusefs.core.errors import ELSEWHERE, WAY_OUT, TrashdError, from_os
from fusefs.core.identity import Identity, IdentityMatch, compare, is_marked
from fusefs.core.names import ContainerId, Name, RelPath, is_container_id, join_path, split_path
from fusefs.core.printable_names import printable, printable_text, shell_word
from fusefs.core.record import Method, Record
from fusefs.core.results import Finding
from fusefs.linux.batched_calls import names_that_may_lack
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.store.backing_and_mount import (
    DIRECTORY,
    UNREACHABLE_ERRNOS,
    add_mounted_side,
    borrow_both_sides,
    suppress_errno,
)
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    dissolve,
    drop_empty_tree,
    drop_unfinished,
    hold,
    move_to_state,
    read_record_unlocked,
    rewrite_record,
    superblock_in,
)
from fusefs.store.keep_entries import settle_kept
from fusefs.store.layout import DROP, HOISTED, LATE_PREFIX, RECORD, RECORD_NEW, REPLACEMENT, TREE, UserFolder
from fusefs.store.silent_nodes import Wait, remaining_wait_s
from fusefs.store.stage import drop_stand_in, identify_at, make_record, remove_unrecorded, stage_new
from fusefs.store.take_over import empty_old_containers, take_over
from fusefs.store.transfer_directory import late_name
from fusefs.store.victim_rename import (
    DirectRename,
    VisibleMove,
    end_temporary_permission,
    grant_temporary_permission,
    mode_to_restore,
)
from fusefs.store.walk import may_give

_UNREACHABLE_ERRNOS = (errno.ENAMETOOLONG, *UNREACHABLE_ERRNOS)
_MOVED_NAMES = {VisibleMove.PLACE: REPLACEMENT, VisibleMove.BACK: TREE}
_BOOT = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
RESCUED_RETENTION_S = 7 * 24 * 3600
"""The retention of orphans that recovery or a restore made: no user requested them, so they need not stay for ever."""


class KeptContainer(Exception):
    """The reason why recovery left a container as it is."""

    def __init__(self, what: str, hint: str = WAY_OUT) -> None:
        super().__init__(what)
        self.hint = hint


def to_finding(folder: UserFolder, where: str, error: OSError) -> Finding:
    hint = ELSEWHERE if folder.store.is_shared() else WAY_OUT
    return Finding(where, from_os(error, where).message_about(where), hint)


def recover(folder: UserFolder, ended_boots: Collection[str] = (), waits: Wait | None = None) -> list[Finding]:
    """Settle the unlocked containers in one user's stage/ and restoring/, as that user; report those that were kept.

    In reaping/, only containers without a record are removed: they are the remains of killed reaps. In orphans/, only
    those without a tree are checked: on btrfs, another process's flush may write an adoption, but not the plain rename
    that moved the tree there (docs/internals/crash-windows.md).
    ended_boots  IDs of boots that the administrator declared ended: none of their processes is running
    waits  called to wait until another node's containers have been watched for long enough. If None, these containers
           are reported, and a later recovery continues the watch
    """
    while True:
        watched: list[float] = []
        problems: list[Finding] = []
        for state in (State.STAGE, State.RESTORING, State.REAPING, State.ORPHANS):
            names = folder.list(state)
            if names and state is State.ORPHANS:
                with folder.open(state) as orphans:
                    names = _without_tree(folder.store.kernel, orphans, names)
            for name in names:
                where = printable(folder.path_to(state, name))
                try:
                    _settle(folder, state, name, ended_boots, watched, watches_locked=waits is not None)
                except KeptContainer as kept:
                    problems.append(Finding(where, str(kept), kept.hint))
                except TrashdError as error:
                    problems.append(Finding(where, error.message(), error.hint))
                except OSError as error:
                    problems.append(to_finding(folder, where, error))
        if waits is None or not watched or not waits(min(watched)):
            return problems


def _without_tree(kernel: Kernel, orphans: Fd, names: Sequence[bytes]) -> list[bytes]:
    """Return the orphans among these names that have no tree; the check is cheap, since there may be very many."""
    containers = [text for name in names if is_container_id(text := name.decode("ascii", "replace"))]
    lacking = []
    for name in map(str.encode, names_that_may_lack(kernel, orphans, containers, TREE)):
        try:
            kernel.stat(orphans, join_path(name, TREE))
        except FileNotFoundError:
            lacking.append(name)
        except OSError:
            continue  # `trashd doctor` reports it
    return lacking


def _settle(
    folder: UserFolder,
    state: State,
    name: bytes,
    ended_boots: Collection[str],
    watched: list[float],
    *,
    watches_locked: bool,
) -> None:
    """Settle one container, unless there is nothing to do or another process is working on it.

    watched  gets the seconds for which the container must still stay unchanged, if another node may be working on it
    watches_locked  also watch and report a container that another boot has locked
    """
    text = name.decode("ascii", "replace")
    if not is_container_id(text):
        raise KeptContainer("not an orphan")
    try:
        is_half_done = state in (State.STAGE, State.RESTORING)
        held = hold(folder, state, ContainerId(text), ended_boots if is_half_done else ())
    except FileNotFoundError:
        _remove_unrecorded(folder, state, name, watched)
        return
    if isinstance(held, ClaimLost):
        if held is ClaimLost.BUSY and is_half_done and watches_locked:
            _watch_locked(folder, state, ContainerId(text), watched)
        return
    with held:
        alive = _may_be_alive(held)
        if alive is None:
            with suppress(FileNotFoundError):
                # We have the lock, so the process that was writing a new record is dead.
                folder.store.kernel.unlink(held.fd, RECORD_NEW)
        if state is State.REAPING:
            return  # the next reap continues with it
        has_ended = held.record.boot in ended_boots
        if alive is None or (has_ended and state is State.ORPHANS):
            _settle_held(held)
            return
        if not has_ended:
            if state is State.ORPHANS:
                raise alive
            if remaining_s := remaining_wait_s(folder.store, held.fd):
                watched.append(remaining_s)
                raise alive
        taken = take_over(held, state)
    if isinstance(taken, HeldContainer):
        with taken:
            _settle_held(taken)


def _watch_locked(folder: UserFolder, state: State, container: ContainerId, watched: list[float]) -> None:
    """Watch a container that another boot has locked: a dead client's lock may last a day. Raises  KeptContainer"""
    kernel = folder.store.kernel
    with suppress(FileNotFoundError):
        record = read_record_unlocked(folder, state, container)
        if not folder.store.is_shared() or record.boot == boot_id():
            return
        with folder.open(state) as state_fd, kernel.open_dir(state_fd, Name(container.encode())) as fd:
            if remaining_s := remaining_wait_s(folder.store, fd):
                watched.append(remaining_s)
        who = f"host {printable_text(record.host)} (boot {printable_text(record.boot)})"
        who += " holds its lock, or the server still keeps that lock"
        raise KeptContainer(who, _hint_with_boot(record, folder.store.base_path))


def _settle_held(held: HeldContainer) -> None:
    with Origin(held) as origin:
        if held.state is State.ORPHANS:
            _settle_empty(held, origin)
        elif held.state is State.STAGE:
            _settle_staged(held, origin)
        else:
            settle_restoring(held, origin)


def _remove_unrecorded(folder: UserFolder, state: State, name: bytes, watched: list[float]) -> None:
    """Remove a container that has no record, using only rmdir: it never contained a victim, or is empty by now.

    Another node, whose lock is not visible, may be making the container. So it is watched first, except in reaping/,
    where containers are not made.
    """
    kernel = folder.store.kernel
    with folder.open(state) as state_fd, suppress(FileNotFoundError):
        with kernel.open_dir(state_fd, name) as fd:
            may_be_made = folder.store.is_shared() and state is not State.REAPING
            if may_be_made and (remaining_s := remaining_wait_s(folder.store, fd)):
                watched.append(remaining_s)
                return
            if not _drop_unfinished_record(kernel, fd):
                return
        remove_unrecorded(kernel, state_fd, name)


def _drop_unfinished_record(kernel: Kernel, fd: Fd) -> bool:
    """Remove an unfinished record; return False if it is still being written."""
    try:
        with kernel.open_beneath(fd, RECORD_NEW, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) as new:
            if not kernel.lock(new):
                return False
            kernel.unlink(fd, RECORD_NEW)
    except FileNotFoundError:
        pass
    return True


def _may_be_alive(held: HeldContainer) -> KeptContainer | None:
    """Return why the process that worked on a container may still be running although we have the lock, else None.

    On a local filesystem, and in this boot through the same mount, that process's lock would have kept us out. Machine
    IDs prove nothing, because machines are cloned. A filesystem that is mounted twice may have two sets of locks.
    """
    kernel, record = held.folder.store.kernel, held.record
    if kernel.is_local(held.fd):
        return None
    is_of_this_boot = record.boot == boot_id()
    if is_of_this_boot and record.superblock == superblock_in(kernel.fstat(held.fd)):
        return None
    who = "a process on another mount of this filesystem" if is_of_this_boot else f"host {printable_text(record.host)}"
    what = f"{who} (boot {printable_text(record.boot)}) may still be working on it"
    volume = held.folder.store.base_path
    takes_over = (
        f"trashd doctor --repair --wait {shell_word(volume)} takes it over if that node stays silent; to skip the wait"
    )
    return KeptContainer(what, _hint_with_boot(record, volume, takes_over))


def _hint_with_boot(record: Record, volume: bytes, *first: str) -> str:
    """Return a hint to declare the record's boot ended. first: other remedies, which come before it"""
    import re  # late: there is seldom anything to report

    if not re.fullmatch(_BOOT, record.boot):
        return WAY_OUT  # not a valid boot ID, and unsafe to paste into a shell
    ends = f"if that boot is over, run trashd doctor --repair --ended {record.boot} {shell_word(volume)}"
    return " ".join((*first, ends))


def _collect_late(held: HeldContainer) -> tuple[Identity | None, Identity | None]:
    """On shared filesystems, move the contents of older containers and transfer directories into this container.

    Returns  the identities of `tree` and of `fresh` afterwards
    Raises   OSError
    """
    if held.folder.store.is_shared():
        empty_old_containers(held)
        settle_late(held)
    kernel = held.folder.store.kernel
    return identify_at(kernel, held.fd, TREE), identify_at(kernel, held.fd, REPLACEMENT)


def _settle_staged(held: HeldContainer, origin: Origin) -> None:
    record = held.record
    action = decide_stage(record, *_collect_late(held), origin.identity())
    match action:
        case StageAction.KEEP:
            raise KeptContainer("`tree` is neither the old nor the new directory that the record names")
        case StageAction.UNMADE | StageAction.BACK:
            origin.settle_kept()
            origin.end_temporary_permission(record.lent_mode, record.victim)
            if record.method is Method.DROPPED:
                _end_permission_of_dropped(held)
            if record.fresh is not None and origin.parent_fd is not None:
                drop_stand_in(held.folder.store.kernel, origin.parent_fd, held.id)
            # If `tree` exists, it was just identified as the replacement; rmdir fails if it is not empty.
            for name in (TREE, REPLACEMENT):
                _remove_prepared(held, name)
            dissolve(held)
        case StageAction.PLACE | StageAction.FORWARD:
            if action is StageAction.PLACE:
                origin.place_entry(VisibleMove.PLACE)
            origin.settle_kept()
            _remove_prepared(held, REPLACEMENT)
            _end_permission_of_tree(held)
            origin.end_temporary_permission(record.lent_mode, record.fresh)
            # Root's next command gives the tree to an heir, so recovery never needs another user's folder.
            if record.heir is None or held.folder.uid:
                move_to_state(held, State.ORPHANS)
        case StageAction.GATHERED:
            drop_unfinished(held)
            if drop_empty_tree(held):
                dissolve(held)
            else:
                move_to_state(held, State.ORPHANS)
        case _:
            assert_never(action)


def _remove_prepared(held: HeldContainer, name: Name) -> None:
    """Remove a replacement that never got its name. If it contains the last link to a kept file, make it an orphan.

    Raises  OSError if it is not empty although the swap was to keep nothing
    """
    if held.record.kept is None:
        with suppress(FileNotFoundError):
            held.folder.store.kernel.rmdir(held.fd, name)
    else:
        keep_as_orphan(
            held,
            name,
            held.record.origin,
            f"files that --keep kept in place for {held.id}, and whose names have been removed since then",
        )


def _settle_empty(held: HeldContainer, origin: Origin) -> None:
    """Remove an orphan that has no tree if its victim is still at the origin; otherwise leave it for `trashd doctor`.

    The origin of a dropped tree is unknown, but its orphan can be removed: the tree is still in `drop/`, or the user's
    own mv has not become durable either.
    """
    record = held.record
    if set(held.folder.store.kernel.list(held.fd)) - {RECORD}:
        return
    if record.method is Method.DROPPED:
        _end_permission_of_dropped(held)
    elif compare(origin.identity(), record.victim) is IdentityMatch.SAME:
        origin.end_temporary_permission(record.lent_mode, record.victim)
    else:
        return
    dissolve(held)


def _end_permission_of_dropped(held: HeldContainer) -> None:
    """End the temporary permission of a tree in `drop/`. The record has no origin, so identities are compared."""
    kernel, record = held.folder.store.kernel, held.record
    if record.lent_mode is None:
        return
    with held.folder.open(DROP) as drop:
        for name in kernel.list(drop):
            with suppress(FileNotFoundError), kernel.open_beneath(drop, name) as fd:
                if compare(kernel.identify(fd), record.victim) is IdentityMatch.SAME:
                    end_temporary_permission(held, fd, record.lent_mode)


def _end_permission_of_tree(held: HeldContainer) -> None:
    if held.record.lent_mode is not None:
        kernel = held.folder.store.kernel
        with kernel.open_beneath(held.fd, TREE) as fd:
            end_temporary_permission(held, fd, held.record.lent_mode)


def settle_restoring(held: HeldContainer, origin: Origin, back_to: State = State.ORPHANS) -> None:
    """Complete or undo a restore, as decided by the record and the identities of the entries.

    back_to  the state to return to if the restore did not happen
    Raises   OSError; KeptContainer if it is unclear what happened
    """
    record = held.record
    action = decide_restoring(record, *_collect_late(held), origin.identity())
    if action is not RestoringAction.KEEP:
        drop_unfinished(held)
    match action:
        case RestoringAction.KEEP:
            raise KeptContainer("`tree` is neither the old nor the new directory that the record names")
        case RestoringAction.PLACE:
            if not origin.place_entry(VisibleMove.BACK):
                raise KeptContainer(
                    "its tree can't be moved back: the name is taken, or the parent directory was removed or replaced"
                )
            retire_restored(held)
        case RestoringAction.RETIRE:
            with Origin(held, record.target) as reached:
                reached.settle_kept()
                reached.end_temporary_permission(record.lent_mode, record.victim)
            retire_restored(held)
        case RestoringAction.GIVE_BACK:
            settle_kept(held, None)
            rescue_replacement(held, REPLACEMENT)
            _end_permission_of_tree(held)
            origin.end_temporary_permission(record.lent_fresh, record.fresh)
            move_to_state(held, back_to)
        case RestoringAction.REST:
            _end_permission_of_tree(held)
            if drop_empty_tree(held):
                retire_restored(held)
            else:
                move_to_state(held, back_to)
        case _:
            assert_never(action)


def retire_restored(held: HeldContainer) -> ContainerId | None:
    """Remove a container whose tree is back at its name; keep the data that was written into the replacement.

    Returns  the ID of the orphan that contains this data, if any
    """
    rescued = rescue_replacement(held, TREE) or rescue_replacement(held, REPLACEMENT)
    rescue_hoisted(held)
    dissolve(held)
    return rescued


def rescue_replacement(held: HeldContainer, name: Name) -> ContainerId | None:
    """Remove a replacement that was moved back into a container; if it is not empty, make it an orphan.

    That orphan is kept for a week, since no user requested it, and its owner might not know of it.
    """
    note = f"written into the new directory before {held.id} was restored"
    return keep_as_orphan(held, name, held.record.origin, note, held.record.lent_fresh)


def rescue_hoisted(held: HeldContainer) -> ContainerId | None:
    """Make an orphan of the directories that a reaper has moved up from deep inside a tree; their origin is unknown."""
    note = f"directories from deep inside {held.id}, moved up by the reaper"
    return keep_as_orphan(held, HOISTED, None, note)


def settle_late(held: HeldContainer) -> None:
    """On shared filesystems, settle entries that arrived in a container late or twice: they may be a user's data.

    The victim becomes `tree`, whatever has that name now; each other entry becomes a separate orphan. Raises  OSError
    """
    kernel, victim = held.folder.store.kernel, held.record.victim
    late = [Name(name) for name in kernel.list_reopened(held.fd) if name.startswith(LATE_PREFIX)]
    for name in late:
        tree, identity = identify_at(kernel, held.fd, TREE), identify_at(kernel, held.fd, name)
        if compare(identity, victim) is IdentityMatch.SAME and compare(tree, victim) is not IdentityMatch.SAME:
            aside = late_name()
            kernel.rename_free(held.fd, TREE, held.fd, aside)
            kernel.rename_free(held.fd, name, held.fd, TREE)
            name = aside
        note = f"moved into {held.id} late, by a call that the server repeated"
        origin = held.record.origin
        make_orphan(held.folder, held.fd, name, origin=origin, retention_s=RESCUED_RETENTION_S, note=note)


def keep_hoisted(held: HeldContainer) -> list[str]:
    """Make an orphan of directories that a reaper has moved up; return a warning if there were any. Raises  OSError"""
    deep = rescue_hoisted(held)
    what = f"directories that the reaper had moved up from deep inside lost their structure; they are kept as {deep}"
    return [] if deep is None else [what]


def keep_as_orphan(
    held: HeldContainer, name: Name, origin: RelPath | None, note: str, mode_before: int | None = None
) -> ContainerId | None:
    """Remove a directory that should be empty; if it is not, make it an orphan that is kept for a week."""
    try:
        held.folder.store.kernel.rmdir(held.fd, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return None
    return make_orphan(
        held.folder, held.fd, name, origin=origin, retention_s=RESCUED_RETENTION_S, note=note, mode_before=mode_before
    )


def make_orphan(
    folder: UserFolder,
    dir_fd: Fd,
    name: Name,
    *,
    origin: RelPath | None,
    retention_s: int | None,
    note: str,
    mode_before: int | None = None,
) -> ContainerId:
    """Make an orphan of an entry in a directory of the same user: write the record, then rename the entry.

    mode_before  the entry's mode before a temporary permission that was granted already; this mode is restored
    Raises  OSError; then the entry is where it was
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        fd = owned.enter_context(kernel.open_beneath(dir_fd, name))
        mode_before = mode_to_restore(kernel.fstat(fd)) if mode_before is None else mode_before
        method = Method.DROPPED if origin is None else Method.REMOVED
        victim = identify_at(kernel, dir_fd, name)
        record = make_record(folder, method, origin, victim)
        record = record._replace(retention_s=retention_s, note=note, lent_mode=mode_before)
        called = name if origin is None else os.path.basename(origin)
        held = owned.enter_context(stage_new(folder, called, record)).held
        try:
            grant_temporary_permission(held, fd, mode_before)
            kernel.rename(dir_fd, name, held.fd, TREE)
        except (OSError, TrashdError):
            end_temporary_permission(held, fd, mode_before)
            dissolve(held)
            raise
        end_temporary_permission(held, fd, mode_before)
        if not kernel.is_named(fd, held.fd, TREE):  # its user had renamed it and given its name to another entry
            identity = identify_at(kernel, held.fd, TREE)
            held = rewrite_record(held, held.record._replace(victim=identity, lent_mode=None))
        if origin is not None:
            # Otherwise btrfs may write the following move, but not this rename. (A dropped tree would simply be
            # adopted again.)
            kernel.fsync(dir_fd)
        move_to_state(held, State.ORPHANS)
    return held.id


def adopt_dropped(folder: UserFolder) -> list[Finding]:
    """Make orphans of all entries in `drop/`; return the problems with entries that stay there."""
    problems: list[Finding] = []
    names = folder.list(DROP)
    if not names:
        return problems
    with folder.open(DROP) as drop:
        for name in names:
            where = printable(os.path.join(folder.path(), DROP, name))
            try:
                make_orphan(folder, drop, Name(name), origin=None, retention_s=DEFAULT_RETENTION_S, note="")
            except FileNotFoundError:
                continue  # its user took it back, or another command has adopted it
            except (OSError, TrashdError) as error:
                why = from_os(error, where)
                problems.append(Finding(where, why.message_about(where), why.hint))
    return problems


class Origin:
    """The place that a tree came from: its name, and its parent directory if that can still be reached."""

    def __init__(self, held: HeldContainer, path: RelPath | None = None) -> None:
        """path: used instead of the record's origin. Users write records, so links in the path are not followed."""
        self._held = held
        self._kernel = held.folder.store.kernel
        self._upper = RelPath(b"")
        self.parent_fd: Fd | None = None
        self.name = Name(b"")
        if path is None and held.record.method is not Method.SWEEP:  # a sweep's tree never had a name there
            path = held.record.origin
        if path is not None:
            *parents, self.name = split_path(path)
            self._upper = join_path(*parents)
            with suppress_errno(*_UNREACHABLE_ERRNOS):
                self.parent_fd = self._kernel.open_beneath(held.folder.store.base.fd, self._upper or b".", DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.parent_fd is not None:
            self.parent_fd.close()

    def identity(self) -> Identity | None:
        """Return the identity of the entry at the name, or None if there is none, or the parent can't be reached."""
        return None if self.parent_fd is None else identify_at(self._kernel, self.parent_fd, self.name)

    @contextmanager
    def visible(self) -> Iterator[DirectRename]:
        """Yield an object that makes renames at the name: in a mount, if one shows the parent. Needs `parent_fd`."""
        assert self.parent_fd is not None
        # Opened only when needed, so that checking containers that need no repair does not wait for a mount's daemon.
        above = self._held.folder.store.base.mounted
        with borrow_both_sides(self._kernel, self.parent_fd, above, self._upper) as sides:
            yield DirectRename(self._kernel, sides, self.name)

    def end_temporary_permission(self, mode: int | None, granted_to: Identity | None) -> None:
        """End a temporary permission, if the entry at the name is the one to which the permission was granted."""
        if mode is None or self.parent_fd is None:
            return
        with suppress(FileNotFoundError), self._kernel.open_beneath(self.parent_fd, self.name) as fd:
            if compare(self._kernel.identify(fd), granted_to) is IdentityMatch.SAME:
                with self.visible() as visible:
                    end_temporary_permission(self._held, fd, mode, visible)

    def unmark(self) -> None:
        """Remove the mark, which is no longer needed, from our replacement if the replacement still has the name."""
        replacement = self._held.record.fresh
        if is_marked(replacement) and self.parent_fd is not None:
            with suppress(OSError), self._kernel.open_beneath(self.parent_fd, self.name, DIRECTORY) as fd:
                if compare(self._kernel.identify(fd), replacement) is IdentityMatch.SAME:
                    self._kernel.unmark(fd)

    def place_entry(self, move_to_it: VisibleMove) -> bool:
        """Move the container's tree or replacement to the name, and end its temporary permission.

        Returns  False if `may_give` forbids the move or the name is taken
        """
        if self.parent_fd is None:
            return False
        with self._kernel.open_beneath(self._held.fd, _MOVED_NAMES[move_to_it]) as fd, self.visible() as visible:
            if move_to_it is VisibleMove.BACK:
                owner, recorded = self._kernel.fstat(fd).st_uid, self._held.record.parent
                if not may_give(self._kernel, self.parent_fd, owner, None, recorded):
                    return False
            try:
                visible.make(move_to_it, self._held)
            except FileExistsError:
                return False
            self.settle_kept()
            end_temporary_permission(self._held, fd, self._held.record.lent_mode, visible)
        return True

    def settle_kept(self) -> list[str]:
        """Call the function `settle_kept` for the entry at the name, while a temporary permission lasts.

        Returns  descriptions of the entries that were not moved, for messages
        Raises   OSError
        """
        if self._held.record.kept is None and not self._held.record.parts:
            return []
        if self.parent_fd is None:
            return settle_kept(self._held, None)
        try:
            fd = self._kernel.open_beneath(self.parent_fd, self.name, DIRECTORY)
        except OSError as error:
            if error.errno not in _UNREACHABLE_ERRNOS:
                raise
            return settle_kept(self._held, None)
        above = self._held.folder.store.base.mounted
        with add_mounted_side(self._kernel, fd, above, join_path(self._upper, self.name)) as sides:
            return settle_kept(self._held, sides)
