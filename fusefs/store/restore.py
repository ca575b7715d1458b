"""Restore a tree by id: to its name by one exchange or rename, or to another path, or only a part of it.

Entries taken by a sweep go back into their original directory, one by one. A directory that is missing there is moved
as a whole; one that exists is merged. An entry whose name is taken stays in the orphan, and is reported. Nothing is
ever replaced.
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
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import ContainerId, Name, RelPath, join, split
from fusefs.core.printable_names import printable
from fusefs.core.record import MAX_FAILURES, Failure, Method
from fusefs.core.results import NOT_GIVEN
from fusefs.linux.directory_metadata import make_like, read_likeness
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, is_inside, read_mounts
from fusefs.linux.syscalls import NO_EXCHANGE
from fusefs.linux.untrusted_path import open_way
from fusefs.linux.xattrs import mark_restored
from fusefs.store.as_owner import ITS_OWNERS, why_other
from fusefs.store.backing_and_mount import (
    ABSENT,
    DIRECTORY,
    BackingAndMount,
    between,
    is_same,
    is_taken,
    refresh,
    wholly_beneath,
    with_mounted,
)
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    drop_empty_tree,
    drop_prepared,
    flush,
    flush_directory,
    forget_size,
    hold,
    hold_soon,
    is_taken_over,
    look_at_record,
    move,
    open_inside,
    rewrite,
    unfinished_name,
)
from fusefs.store.keep_entries import missing, note_part
from fusefs.store.layout import FRESH, TREE, UserFolder, is_stores_own, trusted_owners
from fusefs.store.mounted_paths import open_shown
from fusefs.store.orphans import ListedContainer, act_on
from fusefs.store.recover import KeptContainer, Origin, keep_hoisted, retire_restored, settle_restoring
from fusefs.store.reserve import FOR_USER, with_room
from fusefs.store.take_over import take_over
from fusefs.store.victim import check_operand
from fusefs.store.victim_rename import DirectRename, VisibleMove, VisibleRename, lend, loan, take_back
from fusefs.store.walk import DeepOpener, check_giving, is_bounded, may_give, walk_inwards

_WITHOUT_RETURN = {
    State.REAPING: "it may run on another host, where nothing can stop it for certain, so nothing is restored on this "
    "filesystem; files that it can't delete are moved to quarantine",
    State.QUARANTINE: "a disconnected reaper on another host may still delete it, so on this filesystem it is not "
    "moved back; copy the remaining files (trashd list --json prints their path)",
}
"""Why such a container is not restored on shared filesystems: a reaper has directories in its tree open."""
_SOURCES = (State.ORPHANS, State.REAPING, State.QUARANTINE)
_IN_BOTH = errno.EISDIR


class Restored(NamedTuple):
    """The result of a restore.

    path        where the tree is now
    rescued     the orphan that has the replacement's contents, if there were any
    partial     the reaper had begun to delete it: what it had removed is lost
    closed_uid  if `partial`: current owner of directories that the reaper may have entered, with mode 0700; else None
    is_spared   it is marked as restored, which rules respect (linux/xattrs.py)
    left        entries of a sweep that could not be restored and stay in the orphan; the first by name, `n_left` in all
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
    """A container in restoring/, locked.

    source  the state that it was claimed from
    tree    its tree, opened by the claim (O_PATH), so that it is recognised wherever it is moved; None if there was
            none
    """

    held: HeldContainer
    source: State
    tree: Fd | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Release the lock."""
        self.held.owned.close()


class RestoreDestination(NamedTuple):
    """The destination of a restored tree.

    visible    does the rename there
    path       the path, for messages
    target     path relative to the store's base; None for the origin, where our replacement may make room, and for a
               path outside the base
    at_origin  whether it is the origin
    """

    visible: VisibleRename
    path: bytes
    parent_fd: Fd
    name: Name
    target: RelPath | None
    at_origin: bool

    def by_root(self) -> bool:
        """Whether root renames for the tree's owner, which then needs no temporary permission."""
        return not isinstance(self.visible, DirectRename)


def restore_by_id(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, inside: bytes | None, to: bytes | None
) -> Restored:
    """Restore a listed orphan, whole or a part of it, to its origin or another path.

    Raises  TrashdError; it is then an orphan as before
    """
    try:
        within = None if inside is None else join(*split(inside))
    except ValueError as error:
        raise UsageError(
            f"{printable(inside or b'')}: not a path in an orphan",
            "write PATH-INSIDE relative to the top, without `..`",
        ) from error
    with ExitStack() as owned:
        if to is None:
            if entry.origin is not None and any(map(is_stores_own, entry.origin.split(b"/"))):
                # Only staging makes containers; one that root took to delete it may have lost its record by now (I3).
                raise Refused(
                    f"{printable(entry.origin)}: its original path is in a trash store", "restore it with --to PATH"
                )
            body, visible = partial(_back_home, entry, within), None
        else:
            if within is not None and entry.uid != os.geteuid():
                raise UsageError(
                    "PATH-INSIDE and --to can't be combined for another user's orphan",
                    "restore it whole, or as that user",
                )
            parent, name = os.path.split(to.rstrip(b"/"))
            check_operand(to)
            if not name:
                raise Refused(f"--to {printable(to)}: not a name", "--to needs the new path, including the new name")
            try:
                above = owned.enter_context(open_shown(kernel, parent or b"."))
            except OSError as error:
                raise from_os(error, to) from error
            if is_bounded():
                _check_destination(kernel, entry, parent or b".", above)
            body = partial(_elsewhere, entry, within, to, above.fd)
            visible = DirectRename(kernel, above, Name(name))
        try:
            return act_on(kernel, volumes, entry, body, Restored, visible)
        except OSError as error:
            if error.errno == errno.EXDEV and to is not None:
                base = printable(entry.base_path())
                hint = f"restore it with --to to a path below {base}, which is its own filesystem, then move it with mv"
                raise OtherFilesystem(to, hint) from error
            raise from_os(error, entry.origin or entry.id) from error


def _check_destination(kernel: Kernel, entry: ListedContainer, path: bytes, above: BackingAndMount) -> None:
    """Make sure that no other user chose where root puts something, by a link on the way or by owning the directory.

    Raises  AcrossUsers
    """
    there = printable(path)
    try:
        absolute = os.path.normpath(os.path.join(os.getcwdb(), path))
        with open_way(kernel, absolute, read_mounts(), trusted_owners(os.geteuid())) as found:
            is_it = any(side is not None and is_same(kernel, found, side) for side in above)
    except OSError as error:
        if error.errno not in ABSENT:
            raise from_os(error, path) from error
        is_it = False
    if not is_it:
        raise AcrossUsers(f"{there} (another user can change where this path leads)", "name the directory itself")
    if entry.uid:
        check_giving(kernel, above.fd, path, entry.uid)


def _back_home(
    entry: ListedContainer, inside: RelPath | None, folder: UserFolder, _visible: VisibleRename | None
) -> Restored:
    claim = claim_for_restore(folder, entry.id)
    held = claim.held
    if held.record.method is Method.SWEEP:
        return merge_back(claim, inside)
    if inside is not None:
        return restore_inside(claim, inside, None)
    with claim, ExitStack() as owned:
        try:
            origin = owned.enter_context(Origin(held))
        except OSError:
            settle(claim)
            raise
        if origin.parent_fd is None:
            settle(claim)
            raise NotFound(
                entry.origin or entry.id, "its original directory is missing or unknown; restore it with --to PATH"
            )
        visible = owned.enter_context(origin.visible())
        path = os.path.join(folder.store.base_path, held.record.origin or b"")
        return restore(claim, RestoreDestination(visible, path, origin.parent_fd, origin.name, None, at_origin=True))


def _elsewhere(
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
    target = join(below(parent, base), name) if is_inside(parent, base) else None
    destination = RestoreDestination(visible, to, parent_fd, name, target, at_origin=False)
    if destination.by_root():
        check_for_root(folder, entry.id)
    claim = claim_for_restore(folder, entry.id)
    if inside is not None:
        return restore_inside(claim, inside, destination)
    return restore(claim, destination)


def check_for_root(folder: UserFolder, container: ContainerId) -> None:
    """Refuse in advance what root's rename would refuse, while the tree is still where it was listed.

    Raises  Refused; BadRecord; OSError
    """
    kernel = folder.store.kernel
    for state in _SOURCES:
        with suppress(FileNotFoundError):
            record = look_at_record(folder, state, container)
            with folder.open(state) as there, kernel.open_beneath(there, join(container.encode(), TREE)) as tree:
                why = why_other(record.method, record.victim, kernel.fstat(tree), kernel.identify(tree))
            if why:
                raise Refused(f"{container}: {why}", ITS_OWNERS)


def claim_for_restore(folder: UserFolder, container: ContainerId) -> RestoreClaim:
    """Lock a container and move it to restoring/.

    Raises  NotFound; Busy if a process works on it, or may. A container in reaping/ is locked until the reaper releases
            it
    """
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
            with closed_on_error(held):
                # First mark it, then move it: if we are killed in between, it must not look complete again.
                record = held.record._replace(partial=held.record.partial or source is not State.ORPHANS)
                if record != held.record:
                    held = with_room(folder, FOR_USER, partial(rewrite, held, record))
                if is_shared:
                    # Late calls of its swap or of an earlier restore do not reach the new container.
                    taken = with_room(folder, FOR_USER, partial(take_over, held, State.RESTORING))
                    if isinstance(taken, ClaimLost):
                        raise Busy(container)
                    held = taken
                    with closed_on_error(held):
                        tree = _open_tree(held)
                else:
                    tree = _open_tree(held)
                    held = with_room(folder, FOR_USER, partial(move, held, State.RESTORING))
            if held.record.partial:
                _let_forget(held)
            return RestoreClaim(held, source, tree)
    raise _explain_unclaimed(folder, container)


def _explain_unclaimed(folder: UserFolder, container: ContainerId) -> NotFound | Busy | Refused:
    """Why there is nothing to claim."""
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


def _let_forget(held: HeldContainer) -> None:
    """Let a mount forget cached names in a tree on which a reaper worked: otherwise they would reappear with the tree.

    The kernel drops all cached entries below a directory when a lookup at the directory's last place fails.
    Source  fs/dcache.c, d_invalidate
    """
    store = held.folder.store
    if store.base.mounted is None:
        return
    for state in State:
        if state is not held.state:
            with suppress(OSError):
                store.kernel.stat(store.base.mounted, held.folder.way_to(state, held.name()))


def restore(claim: RestoreClaim, destination: RestoreDestination) -> Restored:
    """Move a claimed container's tree to its destination and remove the container. Takes ownership of `claim`.

    Raises  Occupied, or the kernel's OSError; the container is then where it was claimed
    """
    held = claim.held
    kernel = held.folder.store.kernel
    with claim:
        try:
            tree = claim.tree
            if tree is None:
                tree = held.owned.enter_context(kernel.open_beneath(held.fd, TREE))
            _check_giving(kernel, held, destination, kernel.fstat(tree).st_uid)
            held = _with_loan(kernel, held, tree, destination)
            held = _put(kernel, held, destination)
        except (OSError, TrashdError) as error:
            if is_taken_over(held):
                raise TakenOver(held.id) from error
            settle(claim._replace(held=held))
            raise
        is_spared = mark_restored(kernel, tree)
        warnings = []
        try:
            if held.record.kept is not None or held.record.parts:
                warnings += _take_kept(held, tree, destination)
            take_back(held, tree, held.record.lent_mode, destination.visible)
            # Flush the tree's source, not its destination: btrfs then writes both sides of a plain rename.
            kernel.fsync(held.fd)
            warnings += keep_hoisted(held)
            rescued = retire_restored(held)
        except OSError as error:
            rescued = None
            warnings.append(
                f"{error.strerror} after the tree was restored; the next trashd command completes the restore"
            )
    done = Restored(held.id, destination.path, rescued, held.record.partial, tuple(warnings), closed_uid=closed(held))
    return done._replace(is_spared=is_spared)


def _check_giving(
    kernel: Kernel, held: HeldContainer, destination: RestoreDestination, owner: int, like: Fd | None = None
) -> None:
    """Make sure that root puts nothing into another user's directory. owner, like: as for `may_give`.

    Raises  AcrossUsers
    """
    is_parents = destination.at_origin and held.record.method is not Method.SWEEP
    recorded = held.record.parent if is_parents else None
    check_giving(kernel, destination.parent_fd, os.path.dirname(destination.path), owner, like, recorded)


def _take_kept(held: HeldContainer, tree: Fd, destination: RestoreDestination) -> list[str]:
    """Move entries that the swap kept in place, and parts restored before, from the replacement back into the tree.

    Returns  the entries that were not moved, for messages
    """
    warnings = []
    if destination.at_origin:
        with Origin(held) as origin:
            warnings = [f"not moved back: {one}" for one in origin.settle_kept()]
    absent = missing(held, tree)
    if absent:
        warnings.append(f"kept by the swap with --keep, but missing now, so not moved back: {', '.join(absent)}")
    return warnings


def _with_loan(kernel: Kernel, held: HeldContainer, tree: Fd, destination: RestoreDestination) -> HeldContainer:
    """Write the temporary permission that the tree needs, or none, into the container's record, and grant it.

    Raises  NotPermitted if recovery could not find the tree to end the permission
    """
    lent = None if destination.by_root() else loan(kernel.fstat(tree))
    if lent is None and held.folder.store.is_shared():
        lent = held.record.lent_mode  # it was taken over with that permission
    if lent is not None and destination.target is None and not destination.at_origin:
        raise NotPermitted(
            destination.path,
            "the destination is not below the directory that contains the store; change into that directory first",
        )
    record = held.record._replace(lent_mode=lent, target=None if lent is None else destination.target)
    if record != held.record:
        held = rewrite(held, record)
    lend(held, tree, lent)
    return held


def settle(claim: RestoreClaim) -> None:
    """Settle a claimed container as recovery would: back to where it was claimed, or finished if its tree was moved.

    An error in the middle of a restore does not show how far it came, but the disk does. Recovery relies on identities,
    which differ in a copy of a volume; here the tree is still open from the claim. The next recovery completes what
    fails here.
    """
    held = claim.held
    back_to = State.QUARANTINE if claim.source is State.QUARANTINE else State.ORPHANS
    with suppress(OSError):
        try:
            with Origin(held) as origin:
                settle_restoring(held, origin, back_to)
        except KeptContainer:
            kernel = held.folder.store.kernel
            # Nothing was moved, or all is back: the tree is in its place, with no replacement beside it.
            tree = claim.tree
            if tree is not None and kernel.is_named(tree, held.fd, TREE) and FRESH not in kernel.list(held.fd):
                drop_prepared(held)
                take_back(held, tree, held.record.lent_mode)
                move(held, back_to)


def _put(kernel: Kernel, held: HeldContainer, destination: RestoreDestination) -> HeldContainer:
    """Rename the tree to the name and return the container.

    A replacement that came into it may still have a temporary permission.
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
        fresh = kernel.open_beneath(destination.parent_fd, destination.name)
    except FileNotFoundError as error:
        raise Occupied(destination.path, "another process keeps changing this name; try again") from error
    with fresh:
        _check_our_fresh(kernel, held, fresh, destination)
        lent = loan(kernel.fstat(fresh))
        if lent != held.record.lent_fresh:
            held = rewrite(held, held.record._replace(lent_fresh=lent))
        lend(held, fresh, lent, destination.visible)
        try:
            if held.folder.store.volume.exchange:
                _exchange_back(kernel, held, destination, fresh)
            else:
                _rename_back(kernel, held, destination, fresh)
        except BaseException:
            take_back(held, fresh, lent, destination.visible)
            raise
    return held


def _check_our_fresh(kernel: Kernel, held: HeldContainer, fd: Fd, destination: RestoreDestination) -> None:
    """Raise Occupied unless the entry at the name is the replacement that the swap put there.

    If identities prove nothing (network filesystems without attributes), any directory may be moved away: its contents
    become an orphan of their own.
    """
    likelihood = compare(kernel.identify(fd), held.record.fresh)
    if likelihood is Likelihood.SAME:
        return
    is_directory = stat.S_ISDIR(kernel.fstat(fd).st_mode)
    if likelihood is Likelihood.OTHER or held.record.fresh is None or not is_directory:
        raise Occupied(destination.path)


def _exchange_back(kernel: Kernel, held: HeldContainer, destination: RestoreDestination, fresh: Fd) -> None:
    """Exchange the tree and the replacement; if the filesystem does not exchange after all, use two renames."""
    with kernel.open_beneath(held.fd, TREE) as tree:
        try:
            destination.visible.make(VisibleMove.EXCHANGE, held)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            _rename_back(kernel, held, destination, fresh)
            return
        if kernel.is_named(fresh, held.fd, TREE):
            return
        st = kernel.fstat(tree)
        if destination.visible.found() == (st.st_dev, st.st_ino) and TREE not in kernel.list(held.fd):
            return  # the flag was ignored, and the tree replaced the empty directory
        if kernel.is_named(tree, held.fd, TREE):
            _rename_back(kernel, held, destination, fresh)
            return
    destination.visible.make(VisibleMove.EXCHANGE, held)
    raise Occupied(destination.path, "another process took the name at that moment, and still has it; try again")


def _rename_back(kernel: Kernel, held: HeldContainer, destination: RestoreDestination, fresh: Fd) -> None:
    destination.visible.make(VisibleMove.ASIDE_FRESH, held)
    try:
        if not kernel.is_named(fresh, held.fd, FRESH):
            raise Occupied(
                destination.path, "another process took the name at that moment, and still has it; try again"
            )
        destination.visible.make(VisibleMove.BACK, held)
    except BaseException as error:
        try:
            destination.visible.make(VisibleMove.PLACE, held)
        except FileExistsError:
            raise Occupied(destination.path, "another process took the name at that moment") from error
        raise


def restore_inside(claim: RestoreClaim, inside: RelPath, elsewhere: RestoreDestination | None) -> Restored:
    """Restore a part of a claimed container's tree; the rest stays an orphan. Takes ownership of `claim`.

    inside     path in the tree
    elsewhere  the destination; None for its original path: missing directories on the way are made like the tree's
    Raises     NotFound, Occupied, OSError
    """
    held = claim.held
    kernel = held.folder.store.kernel
    path = os.path.join(held.folder.store.base_path, held.record.origin or b"", inside)
    warnings: list[str] = []
    try:
        with ExitStack() as stack:
            *parents, name = split(inside)
            tree = stack.enter_context(kernel.open_beneath(held.fd, TREE, DIRECTORY))
            source = stack.enter_context(kernel.open_beneath(tree, join(*parents) or b".", DIRECTORY))
            thing = stack.enter_context(kernel.open_beneath(source, name))
            if elsewhere is not None:
                names, path = elsewhere.visible, elsewhere.path
                assert isinstance(names, DirectRename)
                _check_giving(kernel, held, elsewhere, kernel.fstat(source).st_uid, source)
            else:
                target = stack.enter_context(way_back(kernel, held, tree, parents))
                names = DirectRename(kernel, target, name)
            if loan(kernel.fstat(thing)) is not None:
                # A temporary permission must be in a record, which has a field only for that of the tree.
                raise NotPermitted(path, f"moving it needs write permission on it: chmod u+w {_there(held, inside)}")
            held, lost = note_part(held, inside, is_home=elsewhere is None)
            claim = claim._replace(held=held)
            try:
                names.bring(held, inside)
            except FileExistsError as error:
                raise Occupied(path) from error
            warnings += lost
            is_spared = mark_restored(kernel, thing)
            try:
                flush_directory(held, source)  # not the destination, for the reason in `restore`
            except OSError as error:
                warnings.append(f"{error.strerror} after it was restored: a power failure may undo the restore")
    except FileNotFoundError as error:
        raise NotFound(
            path, f"until it is restored or reaped, the orphan is in {_there(held, RelPath(b''))}"
        ) from error
    finally:
        settle(claim)
        held.owned.close()
    done = Restored(held.id, path, None, held.record.partial, tuple(warnings), closed_uid=closed(held))
    return done._replace(is_spared=is_spared)


def closed(held: HeldContainer) -> int | None:
    """The owner of directories that a reaper may have entered and closed; only a walk of the tree could find them."""
    return held.folder.uid if held.record.partial else None


def _there(held: HeldContainer, inside: RelPath) -> str:
    """The path of something in a tree while the tree is an orphan, for messages."""
    return printable(os.path.join(held.folder.path_to(State.ORPHANS, held.name()), join(TREE, inside)))


def way_back(kernel: Kernel, held: HeldContainer, tree: Fd, parents: list[Name]) -> BackingAndMount:
    """Open the original directory that corresponds to a directory in the tree; make missing ones like the tree's.

    At most six fds are open at a time, however deep it is.
    """
    if held.record.origin is None:
        raise NotFound(
            f"the original path of {held.id}", "it was moved into the drop directory; restore it with --to PATH"
        )
    record = held.record
    base, like = held.folder.store.base, kernel.open_beneath(tree, b".", DIRECTORY)
    is_sweep = record.method is Method.SWEEP  # a sweep's record has the identity of the swept directory itself
    recorded, recorded_above = (record.parent, None) if is_sweep else (record.fresh, record.parent)
    with closed_on_error(like):
        if record.origin:
            *upper, last = split(record.origin)
            with base.beneath(kernel, join(*upper)) as above:
                if not is_taken(kernel, above.fd, last):
                    check_giving(kernel, above.fd, join(*upper), kernel.fstat(like).st_uid, None, recorded_above)
                here = _enter(kernel, held, above, last, like, recorded)
        else:
            here = base.beneath(kernel, b"")  # a sweep of the directory that holds the store
            with closed_on_error(here):
                check_giving(kernel, here.fd, held.folder.store.base_path, kernel.fstat(like).st_uid, like, recorded)
    for parent in parents:
        with here, like, closed_on_error(kernel.open_beneath(like, parent, DIRECTORY)) as model:
            here, like = _enter(kernel, held, here, parent, model), model
    like.close()
    return here


def _enter(
    kernel: Kernel,
    held: HeldContainer,
    above: BackingAndMount,
    name: Name,
    like: Fd,
    recorded: Identity | None = None,
) -> BackingAndMount:
    """Open a directory by name.

    If it is missing, make it in the container, where no other user can replace it, and move it.
    Raises  AcrossUsers; OSError
    """
    try:
        there = above.beneath(kernel, name)
        with closed_on_error(there):
            check_giving(kernel, there.fd, name, kernel.fstat(like).st_uid, like, recorded)
        return there
    except FileNotFoundError:
        with kernel.open_dir(like) as model:
            wanted = read_likeness(kernel, model)
    new = unfinished_name()
    top = None if above.mounted is None else held.folder.store.base.mounted
    with with_mounted(kernel, held.fd, top, held.way()) as inside:
        source, target = between(inside, above)
        make_like(kernel, held.fd, new, wanted, partial(kernel.rename_free, source, new, target, name))
    if above.mounted is not None:
        refresh(kernel, above.mounted, name)
    there = above.beneath(kernel, name)
    with closed_on_error(there):
        check_giving(kernel, there.fd, name, kernel.fstat(like).st_uid, like, None)
    return there


class Unmoved(NamedTuple):
    """Entries that stay where they are: the first by name, and their number. n_unmarked: moved, but not marked"""

    failures: tuple[Failure, ...] = ()
    n: int = 0
    n_unmarked: int = 0

    def plus(self, path: bytes, number: int, call: str = "renameat2") -> Unmoved:
        """Add one failure."""
        return self.and_also(Unmoved((Failure(path, number, call),), 1))

    def and_also(self, other: Unmoved) -> Unmoved:
        """Add both."""
        failures = (*self.failures, *other.failures)[:MAX_FAILURES]
        return Unmoved(failures, self.n + other.n, self.n_unmarked + other.n_unmarked)


def merge_back(claim: RestoreClaim, inside: RelPath | None) -> Restored:
    """Restore what a sweep took, all of it or a part of its tree. Takes ownership of `claim`.

    Entries that can't be moved stay in the orphan and are reported: a later restore moves the rest.
    Raises  NotFound, Occupied, or the kernel's OSError; entries not moved by then are in the orphan again
    """
    claim = claim._replace(held=forget_size(claim.held))
    held = claim.held
    kernel, origin = held.folder.store.kernel, held.record.origin
    assert origin is not None
    base, way = held.folder.store.base_path, join(origin, inside or b"")
    path = os.path.join(base, way) if way else base
    with claim, ExitStack() as owned:
        try:
            gone = _gone(held, origin, path, owned) if inside is None and origin else None
            left = Unmoved()
            if gone is None:
                with open_inside(held, TREE) as tree:
                    if inside is None:
                        left = _merge_all(kernel, held, tree, origin, path)
                    else:
                        left = _merge_part(kernel, held, tree, inside)
        except (OSError, TrashdError) as error:
            settle(claim)
            if isinstance(error, FileNotFoundError):
                hint = "the orphan has no file with this path, or the directory above it is missing"
                raise NotFound(path, hint) from error
            raise
        if gone is not None:
            return restore(claim, gone)  # `restore` settles it by itself
        warnings = _end(held)
    is_spared = not left.n_unmarked
    return Restored(
        held.id, path, None, held.record.partial, warnings, left.failures, left.n, closed(held), is_spared=is_spared
    )


def _gone(held: HeldContainer, origin: RelPath, path: bytes, owned: ExitStack) -> RestoreDestination | None:
    """If the swept directory is gone, its place as the destination for the whole tree; else None."""
    there = owned.enter_context(Origin(held, origin))
    if there.parent_fd is None:
        raise NotFound(path, "the directory above it is missing; restore it with --to PATH")
    if there.identity() is not None:
        return None
    visible = owned.enter_context(there.visible())
    return RestoreDestination(visible, path, there.parent_fd, there.name, origin, at_origin=True)


def _merge_all(kernel: Kernel, held: HeldContainer, tree: BackingAndMount, origin: RelPath, path: bytes) -> Unmoved:
    try:
        target = held.folder.store.base.beneath(kernel, origin)
    except NotADirectoryError as error:
        raise Occupied(path) from error
    with target:
        return merge(kernel, tree, target, RelPath(b""), held.record.parent)


def _merge_part(kernel: Kernel, held: HeldContainer, tree: BackingAndMount, inside: RelPath) -> Unmoved:
    *parents, name = split(inside)
    above = join(*parents)
    with wholly_beneath(kernel, tree, above) as source:
        kernel.stat(source.fd, name)  # before anything is made for it
        with way_back(kernel, held, tree.fd, parents) as target:
            left = bring(kernel, source, target, name, above)
    with suppress(OSError), DeepOpener(kernel, tree) as opener:
        while above:  # directories that contained nothing else
            opener.remove(above)
            above = RelPath(os.path.dirname(above))
    return left


def _end(held: HeldContainer) -> tuple[str, ...]:
    """Remove the container, or make it an orphan again if anything is in it; return warnings."""
    try:
        if not drop_empty_tree(held):
            flush(move(held, State.ORPHANS))
            return ()
        flush(held)
        warnings = tuple(keep_hoisted(held))
        retire_restored(held)
    except OSError as error:
        return (f"{error.strerror} after it was restored; the next trashd command completes the restore",)
    return warnings


def bring(kernel: Kernel, source: BackingAndMount, target: BackingAndMount, name: Name, above: RelPath) -> Unmoved:
    """Move one entry of a directory into another one; return what stays.

    above  path of the directory, for messages
    """
    number = _move(kernel, source, target, name)
    if number == _IN_BOTH:
        left = merge(kernel, source, target, RelPath(name))
        return left._replace(failures=tuple(one._replace(name=join(above, one.name)) for one in left.failures))
    return Unmoved().plus(join(above, name), number) if number else _marked(kernel, target, name)


def merge(
    kernel: Kernel, source: BackingAndMount, target: BackingAndMount, start: RelPath, recorded: Identity | None = None
) -> Unmoved:
    """Move the entries of a directory into the directory with the same path on the other side; return what stays.

    start     that path; empty for `source` and `target` themselves. The directory is removed when it is empty, except
              `source` itself; if it can't be removed, that is reported unless entries in it are
    recorded  identity of the target when the source's entries were taken from it
    """
    left = Unmoved()
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
                    if not left.n:  # otherwise entries that stay in it may be the cause
                        left = left.plus(path, error.errno or errno.EIO, "unlinkat")
                continue
            try:
                with sources.wholly(path) as here, targets.wholly(path) as there:
                    if may_give(kernel, there.fd, kernel.fstat(here.fd).st_uid, here.fd, None if path else recorded):
                        both, stays = _move_all(kernel, here, there, path)
                    else:
                        both, stays = [], Unmoved().plus(path, errno.EPERM, NOT_GIVEN)
            except OSError as error:
                left = left.plus(path, error.errno or errno.EIO, "openat2")
                continue
            names += both
            left = left.and_also(stays)
    return left


def _move_all(
    kernel: Kernel, here: BackingAndMount, there: BackingAndMount, upper: RelPath
) -> tuple[list[Name], Unmoved]:
    """Move all entries that can be moved; return the directories that exist on both sides, and what stays.

    The directory is read again until nothing moves, as servers skip entries.
    """
    unmarked = Unmoved()
    with kernel.open_dir(here.fd) as readable:
        while True:
            n_moved = 0
            both: list[Name] = []
            stays = Unmoved()
            with kernel.scan(readable) as entries:
                for entry in entries:
                    name = Name(os.fsencode(entry.name))
                    # The kernel would report this as well, but only after walking up from both directories, which is
                    # slow deep down.
                    if entry.is_dir(follow_symlinks=False) and _are_dirs(kernel, here, there, name):
                        both.append(name)
                        continue
                    number = _move(kernel, here, there, name)
                    if number == 0:
                        n_moved += 1
                        unmarked = unmarked.and_also(_marked(kernel, there, name))
                    elif number == _IN_BOTH:
                        both.append(name)
                    else:
                        stays = stays.plus(join(upper, name), number)
            if not n_moved:
                return both, stays.and_also(unmarked)


def _marked(kernel: Kernel, there: BackingAndMount, name: Name) -> Unmoved:
    """Mark a moved entry as restored."""
    with suppress(OSError), kernel.open_beneath(there.fd, name) as fd:
        if mark_restored(kernel, fd):
            return Unmoved()
    return Unmoved(n_unmarked=1)


def _move(kernel: Kernel, here: BackingAndMount, there: BackingAndMount, name: Name) -> int:
    """Move an entry; return 0, the errno, or EISDIR if it is a directory on both sides."""
    source, target = between(here, there)
    try:
        kernel.rename_free(source, name, target, name)
    except FileExistsError:
        return _IN_BOTH if _are_dirs(kernel, here, there, name) else errno.EEXIST
    except FileNotFoundError:
        return errno.ENOENT if _mode(kernel, here, name) else 0  # otherwise another process took it
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _are_dirs(kernel: Kernel, here: BackingAndMount, there: BackingAndMount, name: Name) -> bool:
    return all(stat.S_ISDIR(_mode(kernel, side, name)) for side in (here, there))


def _mode(kernel: Kernel, directory: BackingAndMount, name: Name) -> int:
    """The mode of an entry; 0 if there is none, or something is mounted on it."""
    try:
        return kernel.stat(directory.fd, name).st_mode
    except OSError:
        return 0
