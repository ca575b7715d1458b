"""Restores a tree, or a part of it, to its original path with a single exchange or rename, or to another path.

Entries taken by a sweep are moved back to their original directory one by one. A directory that is missing there is
moved as a whole; one that exists is merged. An entry whose name is taken stays in the orphan and is reported.
Nothing is ever replaced.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, Self

from fusefs.core.container_states import State
from fusefs.core.errors import (
    SETTLE,
    AcrossUsers,
    Busy,
    NotFound,
    NotPermitted,
    Occupied,
    OtherFilesystem,
    Refused,
    TakenOver,
    TrashdError,
    UsageError,
    from_os,
)
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import ContainerId, Name, RelPath, join_path, split_path
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import MAX_FAILURES, Failure, Method
from fusefs.core.results import NOT_GIVEN
from fusefs.linux.directory_metadata import make_directory_like, read_metadata
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import is_inside, read_mounts, relative_to
from fusefs.linux.syscalls import NO_EXCHANGE
from fusefs.linux.untrusted_path import open_untrusted
from fusefs.linux.xattrs import mark_restored
from fusefs.store.as_owner import OWNER_RESTORES_HINT, explain_mismatch
from fusefs.store.backing_and_mount import (
    ABSENT_ERRNOS,
    DIRECTORY,
    BackingAndMount,
    borrow_both_sides,
    choose_rename_fds,
    is_same_directory,
    is_taken,
    open_beneath_on_both,
    refresh_in_mount,
)
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    drop_empty_tree,
    drop_recorded_size,
    drop_unfinished,
    flush,
    flush_directory,
    hold,
    hold_soon,
    is_taken_over,
    move_to_state,
    open_inside,
    read_record_unlocked,
    rewrite_record,
    unfinished_name,
)
from fusefs.store.keep_entries import find_missing_kept, record_part
from fusefs.store.layout import REPLACEMENT, TREE, UserFolder, is_store_name, trusted_owners
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.orphans import ListedContainer, call_in_folder
from fusefs.store.recover import KeptContainer, Origin, keep_hoisted, retire_restored, settle_restoring
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.take_over import take_over
from fusefs.store.victim import check_operand
from fusefs.store.victim_rename import (
    DirectRename,
    VisibleMove,
    VisibleRename,
    end_temporary_permission,
    grant_temporary_permission,
    mode_to_restore,
)
from fusefs.store.walk import DeepOpener, check_giving, may_give, must_check_owners, walk_inwards

_WITHOUT_RETURN = {
    State.REAPING: "the reaper may run on another host, where it can't be stopped reliably, so nothing is restored on "
    "this filesystem; files that the reaper can't delete are moved to quarantine",
    State.QUARANTINE: "a disconnected reaper on another host may still delete it, so it is not moved back on this "
    "filesystem; copy the remaining files (trashd list --json prints their path)",
}
"""Hints for states whose containers can't be restored on shared filesystems: a reaper has opened the tree."""
_SOURCES = (State.ORPHANS, State.REAPING, State.QUARANTINE)
_IN_BOTH = errno.EISDIR


class Restored(NamedTuple):
    """The result of a restore.

    path        where the tree is now
    rescued     the orphan that has the replacement's contents, if there were any
    partial     whether the reaper had begun to delete the tree; entries that it had removed are lost
    closed_uid  if `partial`, the owner of directories that the reaper may have given mode 0700
    is_spared   whether the tree is marked as restored, so that rules don't delete it again (linux/xattrs.py)
    left        the first of the `n_left` swept entries that could not be restored and stay in the orphan
    """

    id: ContainerId
    path: bytes
    rescued: ContainerId | None
    partial: bool
    warnings: tuple[str, ...]
    left: tuple[Failure, ...] = ()
    n_left: int = 0
    closed_uid: int | None = None
    is_spared: bool = True


class RestoreClaim(NamedTuple):
    """A locked container in restoring/.

    source  the state that it was claimed from
    tree    its tree (O_PATH), opened at the claim so that it is recognised after a move; None if it was missing
    """

    held: HeldContainer
    source: State
    tree: Fd | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.held.owned.close()


class RestoreDestination(NamedTuple):
    """The destination of a restored tree.

    visible    makes the renames at the destination
    path       the path, for messages
    target     the path relative to the store's base; None for the origin, and for a path outside the base
    at_origin  whether the destination is the origin, where the tree may take the place of our replacement
    """

    visible: VisibleRename
    path: bytes
    parent_fd: Fd
    name: Name
    target: RelPath | None
    at_origin: bool

    def is_by_root(self) -> bool:
        """Return whether root makes the renames for the tree's owner, so that no temporary permission is needed."""
        return not isinstance(self.visible, DirectRename)


def restore_by_id(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, inside: bytes | None, to: bytes | None
) -> Restored:
    """Restore a listed orphan, or a part of it, to its origin or another path.

    Raises  TrashdError; then the tree is still an orphan
    """
    try:
        within = None if inside is None else join_path(*split_path(inside))
    except ValueError as error:
        raise UsageError(
            f"{printable(inside or b'')}: not a path in an orphan",
            "write PATH-INSIDE relative to the top of the orphan, without `..`",
        ) from error
    with ExitStack() as owned:
        if to is None:
            if entry.origin is not None and any(map(is_store_name, entry.origin.split(b"/"))):
                # Only staging makes containers. A container that root took over may have lost its record (I3).
                raise Refused(
                    f"{printable(entry.origin)}: this original path is inside a trash store",
                    "restore the orphan elsewhere with --to PATH",
                )
            body, visible = partial(_restore_to_origin, entry, within), None
        else:
            if within is not None and entry.uid != os.geteuid():
                raise UsageError(
                    "PATH-INSIDE and --to can't be combined for another user's orphan",
                    "restore the whole orphan, or run the command as that user",
                )
            parent, name = os.path.split(to.rstrip(b"/"))
            check_operand(to)
            if not name:
                raise Refused(f"--to {printable(to)}: not a name", "--to needs the new path, including the new name")
            try:
                above = owned.enter_context(open_both_sides(kernel, parent or b"."))
            except OSError as error:
                raise from_os(error, to) from error
            if must_check_owners():
                _check_destination(kernel, entry, parent or b".", above)
            body = partial(_restore_elsewhere, entry, within, to, above.fd)
            visible = DirectRename(kernel, above, Name(name))
        try:
            return call_in_folder(kernel, volumes, entry, body, Restored, visible)
        except OSError as error:
            if error.errno == errno.EXDEV and to is not None:
                base = printable(entry.base_path())
                hint = f"restore it with --to to a path below {base}, on its own filesystem, then move it with mv"
                raise OtherFilesystem(to, hint) from error
            acts_as_owner = os.geteuid() == 0 and entry.uid != 0 and to is None
            if isinstance(error, PermissionError) and acts_as_owner and entry.origin and inside is None:
                path = shell_word(entry.origin)
                hint = (
                    "root restores with the rights of the orphan's owner, who may not move it there; "
                    f"instead, run: rmdir {path}; trashd restore {entry.id} --to {path}"
                )
                raise NotPermitted(entry.origin, hint) from error
            raise from_os(error, entry.origin or entry.id) from error


def _check_destination(kernel: Kernel, entry: ListedContainer, path: bytes, above: BackingAndMount) -> None:
    """Make sure that no other user determines, by a link or as owner, where root puts the tree. Raises  AcrossUsers"""
    there = printable(path)
    try:
        absolute = os.path.abspath(path)
        with open_untrusted(kernel, absolute, read_mounts(), trusted_owners(os.geteuid())) as trusted_fd:
            is_it = any(side is not None and is_same_directory(kernel, trusted_fd, side) for side in above)
    except OSError as error:
        if error.errno not in ABSENT_ERRNOS:
            raise from_os(error, path) from error
        is_it = False
    if not is_it:
        raise AcrossUsers(
            f"{there} (another user can change where this path leads)", "use a path that no other user can change"
        )
    if entry.uid:
        check_giving(kernel, above.fd, path, entry.uid)


def _restore_to_origin(
    entry: ListedContainer, inside: RelPath | None, folder: UserFolder, _visible: VisibleRename | None
) -> Restored:
    claim = claim_for_restore(folder, entry.id)
    held = claim.held
    if held.record.method is Method.SWEEP:
        return restore_swept(claim, inside)
    if inside is not None:
        return restore_inside(claim, inside, None)
    with claim, ExitStack() as owned:
        try:
            origin = owned.enter_context(Origin(held))
        except OSError:
            settle_claim(claim)
            raise
        if origin.parent_fd is None:
            settle_claim(claim)
            raise NotFound(
                entry.origin or entry.id, "its original directory is missing or unknown; restore it with --to PATH"
            )
        visible = owned.enter_context(origin.visible())
        path = os.path.join(folder.store.base_path, held.record.origin or b"")
        return restore(claim, RestoreDestination(visible, path, origin.parent_fd, origin.name, None, at_origin=True))


def _restore_elsewhere(
    entry: ListedContainer,
    inside: RelPath | None,
    to: bytes,
    parent_fd: Fd,
    folder: UserFolder,
    visible: VisibleRename | None,
) -> Restored:
    assert visible is not None
    name = Name(os.path.basename(to.rstrip(b"/")))
    base, parent = (os.readlink(b"/proc/self/fd/%d" % fd) for fd in (folder.store.base.fd, parent_fd))
    target = join_path(relative_to(parent, base), name) if is_inside(parent, base) else None
    destination = RestoreDestination(visible, to, parent_fd, name, target, at_origin=False)
    if destination.is_by_root():
        check_for_root(folder, entry.id)
    claim = claim_for_restore(folder, entry.id)
    if inside is not None:
        return restore_inside(claim, inside, destination)
    return restore(claim, destination)


def check_for_root(folder: UserFolder, container: ContainerId) -> None:
    """Before the tree is moved, raise the error that root's rename would raise. Raises  Refused; BadRecord; OSError"""
    kernel = folder.store.kernel
    for state in _SOURCES:
        with suppress(FileNotFoundError):
            record = read_record_unlocked(folder, state, container)
            with folder.open(state) as there, kernel.open_beneath(there, join_path(container.encode(), TREE)) as tree:
                why = explain_mismatch(record.method, record.victim, kernel.fstat(tree), kernel.identify(tree))
            if why:
                raise Refused(f"{container}: {why}", OWNER_RESTORES_HINT)


def claim_for_restore(folder: UserFolder, container: ContainerId) -> RestoreClaim:
    """Lock a container and move it to restoring/. Raises  NotFound; Busy if another process may be working on it"""
    is_shared = folder.store.is_shared()
    for source in _SOURCES:
        if is_shared and source is not State.ORPHANS:
            if container.encode() in folder.list(source):
                raise Busy(f"{container} (a reaper has begun to delete it)", _WITHOUT_RETURN[source])
            continue
        held = hold_soon(folder, source, container)
        if held is ClaimLost.BUSY:
            raise Busy(container)
        if isinstance(held, HeldContainer):
            with close_on_error(held):
                # Mark the tree as partial before the move: if we are killed in between, it must not look complete.
                record = held.record._replace(partial=held.record.partial or source is not State.ORPHANS)
                if record != held.record:
                    held = call_with_room(folder, SPARE_FOR_USER, partial(rewrite_record, held, record))
                if is_shared:
                    # Late calls from its swap or an earlier restore do not reach the new container.
                    taken = call_with_room(folder, SPARE_FOR_USER, partial(take_over, held, State.RESTORING))
                    if isinstance(taken, ClaimLost):
                        raise Busy(container)
                    held = taken
                    with close_on_error(held):
                        tree = _open_tree(held)
                else:
                    tree = _open_tree(held)
                    held = call_with_room(folder, SPARE_FOR_USER, partial(move_to_state, held, State.RESTORING))
            if held.record.partial:
                _drop_cached_names(held)
            return RestoreClaim(held, source, tree)
    raise _explain_unclaimed(folder, container)


def _explain_unclaimed(folder: UserFolder, container: ContainerId) -> NotFound | Busy | Refused:
    for state in (State.STAGE, State.RESTORING):
        if container.encode() in folder.list(state):
            with suppress(OSError, TrashdError):
                held = hold(folder, state, container)
                if held is ClaimLost.BUSY:
                    return Busy(container)
                if isinstance(held, HeldContainer):
                    held.owned.close()
            return Refused(f"{container}: an earlier command on it was interrupted (it is in {state.value}/)", SETTLE)
    return NotFound(container)


def _open_tree(held: HeldContainer) -> Fd | None:
    with suppress(FileNotFoundError):
        return held.owned.enter_context(held.folder.store.kernel.open_beneath(held.fd, TREE))
    return None


def _drop_cached_names(held: HeldContainer) -> None:
    """Make a mount forget the names in a tree that a reaper worked on; otherwise deleted names would reappear in it.

    If a lookup of a directory at its previous path fails, the kernel drops all cached entries below that directory.
    Source  fs/dcache.c, d_invalidate
    """
    store = held.folder.store
    if store.base.mounted is None:
        return
    for state in State:
        if state is not held.state:
            with suppress(OSError):
                store.kernel.stat(store.base.mounted, held.folder.relative_path_to(state, held.name()))


def restore(claim: RestoreClaim, destination: RestoreDestination) -> Restored:
    """Move a claimed container's tree to its destination and remove the container. Takes ownership of `claim`.

    Raises  Occupied, or the kernel's OSError; then the container is back in the state from which it was claimed
    """
    held = claim.held
    kernel = held.folder.store.kernel
    with claim:
        try:
            tree = claim.tree
            if tree is None:
                tree = held.owned.enter_context(kernel.open_beneath(held.fd, TREE))
            _check_giving(kernel, held, destination, kernel.fstat(tree).st_uid)
            held = _with_temporary_permission(kernel, held, tree, destination)
            held = _move_tree(kernel, held, destination)
        except (OSError, TrashdError) as error:
            if is_taken_over(held):
                raise TakenOver(held.id) from error
            settle_claim(claim._replace(held=held))
            raise
        is_spared = mark_restored(kernel, tree)
        warnings = []
        try:
            if held.record.kept is not None or held.record.parts:
                warnings += _return_kept(held, tree, destination)
            end_temporary_permission(held, tree, held.record.lent_mode, destination.visible)
            # Flush the directory that the tree came from, not its destination: btrfs then writes both sides of the
            # rename.
            kernel.fsync(held.fd)
            warnings += keep_hoisted(held)
            rescued = retire_restored(held)
        except OSError as error:
            rescued = None
            warnings.append(
                f"{error.strerror} after the tree was restored; the next trashd command completes the restore"
            )
    restored = Restored(
        held.id, destination.path, rescued, held.record.partial, tuple(warnings), closed_uid=closed_uid_of(held)
    )
    return restored._replace(is_spared=is_spared)


def _check_giving(
    kernel: Kernel, held: HeldContainer, destination: RestoreDestination, owner: int, like: Fd | None = None
) -> None:
    """Raise AcrossUsers if root would put the tree into another user's directory. owner, like: see `may_give`"""
    is_parents = destination.at_origin and held.record.method is not Method.SWEEP
    recorded = held.record.parent if is_parents else None
    check_giving(kernel, destination.parent_fd, os.path.dirname(destination.path), owner, like, recorded)


def _return_kept(held: HeldContainer, tree: Fd, destination: RestoreDestination) -> list[str]:
    """Move kept entries and restored parts from the replacement back into the tree; return those that did not move."""
    warnings = []
    if destination.at_origin:
        with Origin(held) as origin:
            warnings = [f"not moved back: {one}" for one in origin.settle_kept()]
    absent = find_missing_kept(held, tree)
    if absent:
        warnings.append(f"kept by the swap with --keep, but missing now, so not moved back: {', '.join(absent)}")
    return warnings


def _with_temporary_permission(
    kernel: Kernel, held: HeldContainer, tree: Fd, destination: RestoreDestination
) -> HeldContainer:
    """Record the temporary permission that the tree needs, if any, and grant it; return the container.

    Raises  NotPermitted if recovery could not find the tree in order to end the permission
    """
    mode_before = None if destination.is_by_root() else mode_to_restore(kernel.fstat(tree))
    if mode_before is None and held.folder.store.is_shared():
        mode_before = held.record.lent_mode  # the container was taken over with that permission
    if mode_before is not None and destination.target is None and not destination.at_origin:
        raise NotPermitted(
            destination.path,
            "the destination is not below the directory that contains the store; change into that directory first",
        )
    record = held.record._replace(lent_mode=mode_before, target=None if mode_before is None else destination.target)
    if record != held.record:
        held = rewrite_record(held, record)
    grant_temporary_permission(held, tree, mode_before)
    return held


def settle_claim(claim: RestoreClaim) -> None:
    """Settle a claimed container as recovery would do: move it back, or finish the restore if its tree was moved.

    An error in the middle of a restore does not show how far the restore came, but the disk does. Recovery relies on
    identities, which differ in a copy of a volume; here, the tree is still open from the claim. If this function fails,
    the next recovery settles the container.
    """
    held = claim.held
    back_to = State.QUARANTINE if claim.source is State.QUARANTINE else State.ORPHANS
    with suppress(OSError):
        try:
            with Origin(held) as origin:
                settle_restoring(held, origin, back_to)
        except KeptContainer:
            kernel = held.folder.store.kernel
            # Nothing was moved, or everything is back: the tree is in its place, without a replacement beside it.
            tree = claim.tree
            if tree is not None and kernel.is_named(tree, held.fd, TREE) and REPLACEMENT not in kernel.list(held.fd):
                drop_unfinished(held)
                end_temporary_permission(held, tree, held.record.lent_mode)
                move_to_state(held, back_to)


def _move_tree(kernel: Kernel, held: HeldContainer, destination: RestoreDestination) -> HeldContainer:
    """Rename the tree to its destination and return the container.

    If the replacement was moved into the container, it may still have a temporary permission.
    """
    try:
        destination.visible.make(VisibleMove.BACK, held)
    except FileExistsError:
        pass
    else:
        return held
    if not destination.at_origin:
        raise Occupied(destination.path)
    try:
        replacement = kernel.open_beneath(destination.parent_fd, destination.name)
    except FileNotFoundError as error:
        raise Occupied(destination.path, "another process keeps changing this name; try again") from error
    with replacement:
        _check_replacement(kernel, held, replacement, destination)
        mode_before = mode_to_restore(kernel.fstat(replacement))
        if mode_before != held.record.lent_fresh:
            held = rewrite_record(held, held.record._replace(lent_fresh=mode_before))
        grant_temporary_permission(held, replacement, mode_before, destination.visible)
        try:
            if held.folder.store.volume.exchange:
                _exchange_back(kernel, held, destination, replacement)
            else:
                _rename_back(kernel, held, destination, replacement)
        except BaseException:
            end_temporary_permission(held, replacement, mode_before, destination.visible)
            raise
    return held


def _check_replacement(kernel: Kernel, held: HeldContainer, fd: Fd, destination: RestoreDestination) -> None:
    """Raise Occupied unless the entry at the destination is the replacement that the swap put there.

    If identities prove nothing (network filesystems without attributes), any directory may be moved away; its contents
    become a separate orphan.
    """
    likelihood = compare(kernel.identify(fd), held.record.fresh)
    if likelihood is IdentityMatch.SAME:
        return
    is_directory = stat.S_ISDIR(kernel.fstat(fd).st_mode)
    if likelihood is IdentityMatch.OTHER or held.record.fresh is None or not is_directory:
        raise Occupied(destination.path)


def _exchange_back(kernel: Kernel, held: HeldContainer, destination: RestoreDestination, replacement: Fd) -> None:
    """Exchange the tree and the replacement; if the filesystem does not support this after all, use two renames."""
    with kernel.open_beneath(held.fd, TREE) as tree:
        try:
            destination.visible.make(VisibleMove.EXCHANGE, held)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            _rename_back(kernel, held, destination, replacement)
            return
        if kernel.is_named(replacement, held.fd, TREE):
            return
        st = kernel.fstat(tree)
        if destination.visible.stat_name() == (st.st_dev, st.st_ino) and TREE not in kernel.list(held.fd):
            return  # the flag was ignored, and the tree replaced the empty directory
        if kernel.is_named(tree, held.fd, TREE):
            _rename_back(kernel, held, destination, replacement)
            return
    destination.visible.make(VisibleMove.EXCHANGE, held)
    raise Occupied(
        destination.path, "another process put an entry there during the restore; move it away and try again"
    )


def _rename_back(kernel: Kernel, held: HeldContainer, destination: RestoreDestination, replacement: Fd) -> None:
    destination.visible.make(VisibleMove.ASIDE_REPLACEMENT, held)
    try:
        if not kernel.is_named(replacement, held.fd, REPLACEMENT):
            raise Occupied(
                destination.path, "another process put an entry there during the restore; move it away and try again"
            )
        destination.visible.make(VisibleMove.BACK, held)
    except BaseException as error:
        try:
            destination.visible.make(VisibleMove.PLACE, held)
        except FileExistsError:
            raise Occupied(destination.path, "another process put an entry there during the restore") from error
        raise


def restore_inside(claim: RestoreClaim, inside: RelPath, elsewhere: RestoreDestination | None) -> Restored:
    """Restore a part of a claimed container's tree; the rest stays an orphan. Takes ownership of `claim`.

    inside     the part's path in the tree
    elsewhere  the destination; None for the part's original path, where missing directories are made as in the tree
    Raises     NotFound, Occupied, OSError
    """
    held = claim.held
    kernel = held.folder.store.kernel
    path = os.path.join(held.folder.store.base_path, held.record.origin or b"", inside)
    warnings: list[str] = []
    try:
        with ExitStack() as stack:
            *parents, name = split_path(inside)
            tree = stack.enter_context(kernel.open_beneath(held.fd, TREE, DIRECTORY))
            source = stack.enter_context(kernel.open_beneath(tree, join_path(*parents) or b".", DIRECTORY))
            entry_fd = stack.enter_context(kernel.open_beneath(source, name))
            if elsewhere is not None:
                names, path = elsewhere.visible, elsewhere.path
                assert isinstance(names, DirectRename)
                _check_giving(kernel, held, elsewhere, kernel.fstat(source).st_uid, source)
            else:
                target = stack.enter_context(open_origin_directory(kernel, held, tree, parents))
                names = DirectRename(kernel, target, name)
            if mode_to_restore(kernel.fstat(entry_fd)) is not None:
                # A temporary permission must be recorded, but a record has no field for a part's permission.
                raise NotPermitted(
                    path, f"moving it needs write permission on it: chmod u+w {_path_while_orphan(held, inside)}"
                )
            held, lost = record_part(held, inside, is_home=elsewhere is None)
            claim = claim._replace(held=held)
            try:
                names.move_part_to_name(held, inside)
            except FileExistsError as error:
                raise Occupied(path) from error
            warnings += lost
            is_spared = mark_restored(kernel, entry_fd)
            try:
                flush_directory(held, source)  # not the destination: see `restore`
            except OSError as error:
                warnings.append(f"{error.strerror} after it was restored: a power failure may undo the restore")
    except FileNotFoundError as error:
        raise NotFound(
            path, f"the orphan stays in {_path_while_orphan(held, RelPath(b''))} until it is restored or reaped"
        ) from error
    finally:
        settle_claim(claim)
        held.owned.close()
    restored = Restored(held.id, path, None, held.record.partial, tuple(warnings), closed_uid=closed_uid_of(held))
    return restored._replace(is_spared=is_spared)


def closed_uid_of(held: HeldContainer) -> int | None:
    """Return the owner of directories that a reaper may have made inaccessible to others, or None if there are none.

    Only a walk through the tree could find these directories.
    """
    return held.folder.uid if held.record.partial else None


def _path_while_orphan(held: HeldContainer, inside: RelPath) -> str:
    """Return, for messages, the path that a file in the tree has while the tree is an orphan."""
    return printable(os.path.join(held.folder.path_to(State.ORPHANS, held.name()), join_path(TREE, inside)))


def open_origin_directory(kernel: Kernel, held: HeldContainer, tree: Fd, parents: list[Name]) -> BackingAndMount:
    """Open the directory at the original path of a directory in the tree; make missing ones like those in the tree.

    At most six fds are open at a time, at any depth.
    parents  the directory's path in the tree
    """
    if held.record.origin is None:
        raise NotFound(
            f"the original path of {held.id}", "the tree was moved into the drop directory; restore it with --to PATH"
        )
    record = held.record
    base, like = held.folder.store.base, kernel.open_beneath(tree, b".", DIRECTORY)
    is_sweep = record.method is Method.SWEEP  # a sweep's record has the identity of the swept directory itself
    recorded, recorded_above = (record.parent, None) if is_sweep else (record.fresh, record.parent)
    with close_on_error(like):
        if record.origin:
            *upper, last = split_path(record.origin)
            with base.beneath(kernel, join_path(*upper)) as above:
                if not is_taken(kernel, above.fd, last):
                    check_giving(kernel, above.fd, join_path(*upper), kernel.fstat(like).st_uid, None, recorded_above)
                current = _open_or_make(kernel, held, above, last, like, recorded)
        else:
            current = base.beneath(kernel, b"")  # the directory that holds the store was swept
            with close_on_error(current):
                check_giving(kernel, current.fd, held.folder.store.base_path, kernel.fstat(like).st_uid, like, recorded)
    for parent in parents:
        with current, like, close_on_error(kernel.open_beneath(like, parent, DIRECTORY)) as model:
            current, like = _open_or_make(kernel, held, current, parent, model), model
    like.close()
    return current


def _open_or_make(
    kernel: Kernel,
    held: HeldContainer,
    above: BackingAndMount,
    name: Name,
    like: Fd,
    recorded: Identity | None = None,
) -> BackingAndMount:
    """Open a directory by name. If it is missing, make it in the container, where only we can replace it, and move it.

    Raises  AcrossUsers; OSError
    """
    try:
        directory = above.beneath(kernel, name)
        with close_on_error(directory):
            check_giving(kernel, directory.fd, name, kernel.fstat(like).st_uid, like, recorded)
        return directory
    except FileNotFoundError:
        with kernel.open_dir(like) as model:
            metadata = read_metadata(kernel, model)
    new = unfinished_name()
    top = None if above.mounted is None else held.folder.store.base.mounted
    with borrow_both_sides(kernel, held.fd, top, held.relative_path()) as inside:
        source, target = choose_rename_fds(inside, above)
        make_directory_like(kernel, held.fd, new, metadata, partial(kernel.rename_free, source, new, target, name))
    if above.mounted is not None:
        refresh_in_mount(kernel, above.mounted, name)
    directory = above.beneath(kernel, name)
    with close_on_error(directory):
        check_giving(kernel, directory.fd, name, kernel.fstat(like).st_uid, like, None)
    return directory


class Unmoved(NamedTuple):
    """The `n` entries that were not moved, with the first failures. n_unmarked: how many were moved but not marked"""

    failures: tuple[Failure, ...] = ()
    n: int = 0
    n_unmarked: int = 0

    def add(self, path: bytes, number: int, call: str = "renameat2") -> Unmoved:
        return self.merged_with(Unmoved((Failure(path, number, call),), 1))

    def merged_with(self, other: Unmoved) -> Unmoved:
        failures = (*self.failures, *other.failures)[:MAX_FAILURES]
        return Unmoved(failures, self.n + other.n, self.n_unmarked + other.n_unmarked)


def restore_swept(claim: RestoreClaim, inside: RelPath | None) -> Restored:
    """Restore all or some of the entries that a sweep took. Takes ownership of `claim`.

    Entries that can't be moved stay in the orphan and are reported; a later restore can move them.
    Raises  NotFound, Occupied, or the kernel's OSError; entries not moved by then stay in the orphan
    """
    claim = claim._replace(held=drop_recorded_size(claim.held))
    held = claim.held
    kernel, origin = held.folder.store.kernel, held.record.origin
    assert origin is not None
    base, relative = held.folder.store.base_path, join_path(origin, inside or b"")
    path = os.path.join(base, relative) if relative else base
    with claim, ExitStack() as owned:
        try:
            gone = _missing_origin(held, origin, path, owned) if inside is None and origin else None
            unmoved = Unmoved()
            if gone is None:
                with open_inside(held, TREE) as tree:
                    if inside is None:
                        unmoved = _merge_all(kernel, held, tree, origin, path)
                    else:
                        unmoved = _merge_part(kernel, held, tree, inside)
        except (OSError, TrashdError) as error:
            settle_claim(claim)
            if isinstance(error, FileNotFoundError):
                hint = "the orphan has no file with this path, or the directory above it is missing"
                raise NotFound(path, hint) from error
            raise
        if gone is not None:
            return restore(claim, gone)  # if this fails, it settles the claim by itself
        warnings = _finish_merge(held)
    is_spared = not unmoved.n_unmarked
    return Restored(
        held.id,
        path,
        None,
        held.record.partial,
        warnings,
        unmoved.failures,
        unmoved.n,
        closed_uid_of(held),
        is_spared=is_spared,
    )


def _missing_origin(held: HeldContainer, origin: RelPath, path: bytes, owned: ExitStack) -> RestoreDestination | None:
    """Return the swept directory's path as the destination for the whole tree, or None if that directory exists."""
    place = owned.enter_context(Origin(held, origin))
    if place.parent_fd is None:
        raise NotFound(path, "the directory above it is missing; restore it with --to PATH")
    if place.identity() is not None:
        return None
    visible = owned.enter_context(place.visible())
    return RestoreDestination(visible, path, place.parent_fd, place.name, origin, at_origin=True)


def _merge_all(kernel: Kernel, held: HeldContainer, tree: BackingAndMount, origin: RelPath, path: bytes) -> Unmoved:
    try:
        target = held.folder.store.base.beneath(kernel, origin)
    except NotADirectoryError as error:
        raise Occupied(path) from error
    with target:
        return merge_directories(kernel, tree, target, RelPath(b""), held.record.parent)


def _merge_part(kernel: Kernel, held: HeldContainer, tree: BackingAndMount, inside: RelPath) -> Unmoved:
    *parents, name = split_path(inside)
    above = join_path(*parents)
    with open_beneath_on_both(kernel, tree, above) as source:
        kernel.stat(source.fd, name)  # a missing entry raises before any directory is made for it
        with open_origin_directory(kernel, held, tree.fd, parents) as target:
            unmoved = merge_entry(kernel, source, target, name, above)
    with suppress(OSError), DeepOpener(kernel, tree) as opener:
        while above:  # remove the directories that contained nothing else
            opener.remove(above)
            above = RelPath(os.path.dirname(above))
    return unmoved


def _finish_merge(held: HeldContainer) -> tuple[str, ...]:
    """Remove the container, or make it an orphan again if its tree is not empty; return warnings."""
    try:
        if not drop_empty_tree(held):
            flush(move_to_state(held, State.ORPHANS))
            return ()
        flush(held)
        warnings = tuple(keep_hoisted(held))
        retire_restored(held)
    except OSError as error:
        return (f"{error.strerror} after it was restored; the next trashd command completes the restore",)
    return warnings


def merge_entry(
    kernel: Kernel, source: BackingAndMount, target: BackingAndMount, name: Name, above: RelPath
) -> Unmoved:
    """Move an entry from one directory to another; return what was not moved. above: path of the first, for messages"""
    number = _move_entry(kernel, source, target, name)
    if number == _IN_BOTH:
        unmoved = merge_directories(kernel, source, target, RelPath(name))
        return unmoved._replace(
            failures=tuple(one._replace(name=join_path(above, one.name)) for one in unmoved.failures)
        )
    return Unmoved().add(join_path(above, name), number) if number else _mark_moved(kernel, target, name)


def merge_directories(
    kernel: Kernel, source: BackingAndMount, target: BackingAndMount, start: RelPath, recorded: Identity | None = None
) -> Unmoved:
    """Move the entries of a directory below `source` to the same path below `target`; return what was not moved.

    The emptied directory is removed, except `source` itself. A failed removal is reported unless entries remain in it.
    start     the path; empty for `source` and `target` themselves
    recorded  the target's identity when the source's entries were taken from it
    """
    unmoved = Unmoved()
    with DeepOpener(kernel, source) as sources, DeepOpener(kernel, target) as targets:
        for path, names in walk_inwards(start):
            if names is None:
                if not path:
                    continue  # the top directory stays
                try:
                    sources.remove(path)
                except FileNotFoundError:
                    pass  # another process took it
                except OSError as error:
                    if not unmoved.n:  # otherwise, entries that remain in it may be the cause
                        unmoved = unmoved.add(path, error.errno or errno.EIO, "unlinkat")
                continue
            try:
                with sources.open_on_both(path) as source_directory, targets.open_on_both(path) as target_directory:
                    if may_give(
                        kernel,
                        target_directory.fd,
                        kernel.fstat(source_directory.fd).st_uid,
                        source_directory.fd,
                        None if path else recorded,
                    ):
                        in_both, stays = _move_all_entries(kernel, source_directory, target_directory, path)
                    else:
                        in_both, stays = [], Unmoved().add(path, errno.EPERM, NOT_GIVEN)
            except OSError as error:
                unmoved = unmoved.add(path, error.errno or errno.EIO, "openat2")
                continue
            names += in_both
            unmoved = unmoved.merged_with(stays)
    return unmoved


def _move_all_entries(
    kernel: Kernel, source: BackingAndMount, target: BackingAndMount, upper: RelPath
) -> tuple[list[Name], Unmoved]:
    """Move all entries that can be moved; return the directories that exist in both, and what was not moved.

    As servers may skip entries in a listing, the directory is read again until nothing more is moved.
    """
    unmarked = Unmoved()
    with kernel.open_dir(source.fd) as readable:
        while True:
            n_moved = 0
            in_both: list[Name] = []
            stays = Unmoved()
            with kernel.scan(readable) as entries:
                for entry in entries:
                    name = Name(os.fsencode(entry.name))
                    # The kernel would report this, too, but only after walking up from both directories, which takes a
                    # long time deep in a tree.
                    if entry.is_dir(follow_symlinks=False) and _are_dirs(kernel, source, target, name):
                        in_both.append(name)
                        continue
                    number = _move_entry(kernel, source, target, name)
                    if number == 0:
                        n_moved += 1
                        unmarked = unmarked.merged_with(_mark_moved(kernel, target, name))
                    elif number == _IN_BOTH:
                        in_both.append(name)
                    else:
                        stays = stays.add(join_path(upper, name), number)
            if not n_moved:
                return in_both, stays.merged_with(unmarked)


def _mark_moved(kernel: Kernel, target: BackingAndMount, name: Name) -> Unmoved:
    """Mark a moved entry as restored; if this fails, count it in the result."""
    with suppress(OSError), kernel.open_beneath(target.fd, name) as fd:
        if mark_restored(kernel, fd):
            return Unmoved()
    return Unmoved(n_unmarked=1)


def _move_entry(kernel: Kernel, here: BackingAndMount, there: BackingAndMount, name: Name) -> int:
    """Move an entry; return 0, the errno, or EISDIR if it is a directory in both places."""
    source, target = choose_rename_fds(here, there)
    try:
        kernel.rename_free(source, name, target, name)
    except FileExistsError:
        return _IN_BOTH if _are_dirs(kernel, here, there, name) else errno.EEXIST
    except FileNotFoundError:
        return errno.ENOENT if _mode(kernel, here, name) else 0  # if it is gone, another process took it
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _are_dirs(kernel: Kernel, source: BackingAndMount, target: BackingAndMount, name: Name) -> bool:
    return all(stat.S_ISDIR(_mode(kernel, side, name)) for side in (source, target))


def _mode(kernel: Kernel, directory: BackingAndMount, name: Name) -> int:
    """Return an entry's mode; 0 if it does not exist, or something is mounted on it."""
    try:
        return kernel.stat(directory.fd, name).st_mode
    except OSError:
        return 0
