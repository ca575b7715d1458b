"""Restore, from an id to the result: the tree back at its name by one exchange or rename, or elsewhere; or a part.

What a sweep took goes back into the directory that it came from, entry by entry. A directory that is missing there
comes whole, one that is there is descended into. What has its name taken stays where it is, and is reported; nothing
is ever replaced.
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
"""Why it does not come back off local filesystems: a reaper has directories of the tree itself open."""
_SOURCES = (State.ORPHANS, State.REAPING, State.QUARANTINE)
_IN_BOTH = errno.EISDIR


class Restored(NamedTuple):
    """What a restore did.

    path     where the tree is now
    rescued  the orphan with what had been written into the fresh directory, if anything had
    partial  the reaper had begun on it: what it had removed by then is gone
    closed_uid  then, the owner now of directories that it may have entered, with mode 0700; None: it had not begun
    is_spared  it is marked as restored, which rules go by (linux/xattrs.py)
    left     of a sweep: what could not be put back, and is an orphan still; the first by name, `n_left` in all
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
    """A container in restoring/, locked, and what its claim took.

    source  the state that it came from
    tree    its tree, open since then (O_PATH): wherever that is now, it is known; None if there was none
    """

    held: HeldContainer
    source: State
    tree: Fd | None

    def __enter__(self) -> Self:
        """Hold it for the block."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let go of the lock."""
        self.held.owned.close()


class RestoreDestination(NamedTuple):
    """Where a tree shall go.

    visible    what renames there
    path       the same for people
    target     path relative to the store's base; None for the origin, where our fresh directory may make way,
               and for what does not lie below the base
    at_origin  whether it is the origin
    """

    visible: VisibleRename
    path: bytes
    parent_fd: Fd
    name: Name
    target: RelPath | None
    at_origin: bool

    def by_root(self) -> bool:
        """Whether root renames for the tree's owner, which then needs no loan."""
        return not isinstance(self.visible, DirectRename)


def restore_by_id(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, inside: bytes | None, to: bytes | None
) -> Restored:
    """Restore the orphan of a list entry, whole or a part, to its origin or elsewhere.

    Raises  TrashdError; it is an orphan then as before
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
    """Let no other user choose where root puts something: by a link on the way, or a directory of that user's.

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
    """Refuse what root's rename would refuse, while it still lies where it is listed.

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
    """The container in restoring/, locked.

    Raises  NotFound; Busy if a process works on it, or may: from reaping/ it comes only when the reaper has let go
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
                # First the mark, then the move: killed in between it must not look whole again.
                record = held.record._replace(partial=held.record.partial or source is not State.ORPHANS)
                if record != held.record:
                    held = with_room(folder, FOR_USER, partial(rewrite, held, record))
                if is_shared:
                    # No call finds it in there that its swap, or an earlier restore, sent.
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
    """Let a mount forget the names in a tree that a reaper has worked on behind it: they would come back with it.

    The kernel drops all that it has below a directory when it looks for that where it last was, in vain.
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
    """Put a claimed container's tree to its destination; the container ends. Takes over `claim`.

    Raises  Occupied, or OSError as the kernel refused: it is again where it was claimed then
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
            # Where the tree came from, not where it went: btrfs then writes both sides of a plain rename.
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
    """Let root put nothing into another user's directory. owner, like: as for `may_give`. Raises  AcrossUsers"""
    is_parents = destination.at_origin and held.record.method is not Method.SWEEP
    recorded = held.record.parent if is_parents else None
    check_giving(kernel, destination.parent_fd, os.path.dirname(destination.path), owner, like, recorded)


def _take_kept(held: HeldContainer, tree: Fd, destination: RestoreDestination) -> list[str]:
    """Take back what the swap kept in view, and parts restored before, from a fresh directory that made way.

    Returns  what is not back, in words
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
    """The container with the loan that its tree needs, or with none, in its record; the loan made.

    Raises  NotPermitted if recovery could not find the tree to end the loan
    """
    lent = None if destination.by_root() else loan(kernel.fstat(tree))
    if lent is None and held.folder.store.is_shared():
        lent = held.record.lent_mode  # it was taken over by that loan
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
    """Do what recovery would with a claimed container: back where it was claimed, or finished if its tree got through.

    An error in the middle of a restore doesn't show how far it came; what is found does. Recovery goes by identities
    alone, which a copy of a volume has others of; we have its tree open since the claim. What fails now, the next
    recovery does.
    """
    held = claim.held
    back_to = State.QUARANTINE if claim.source is State.QUARANTINE else State.ORPHANS
    with suppress(OSError):
        try:
            with Origin(held) as origin:
                settle_restoring(held, origin, back_to)
        except KeptContainer:
            kernel = held.folder.store.kernel
            # Nothing was moved, or all is back: the tree is in its place, and no fresh directory beside it.
            tree = claim.tree
            if tree is not None and kernel.is_named(tree, held.fd, TREE) and FRESH not in kernel.list(held.fd):
                drop_prepared(held)
                take_back(held, tree, held.record.lent_mode)
                move(held, back_to)


def _put(kernel: Kernel, held: HeldContainer, destination: RestoreDestination) -> HeldContainer:
    """The container after its tree went; a fresh directory that came for it may still have a loan."""
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
    """Raise Occupied unless the name has the directory that the swap put there.

    Where identities prove nothing (network filesystems without attributes), any directory may make way: what it holds
    becomes an orphan of its own.
    """
    likelihood = compare(kernel.identify(fd), held.record.fresh)
    if likelihood is Likelihood.SAME:
        return
    is_directory = stat.S_ISDIR(kernel.fstat(fd).st_mode)
    if likelihood is Likelihood.OTHER or held.record.fresh is None or not is_directory:
        raise Occupied(destination.path)


def _exchange_back(kernel: Kernel, held: HeldContainer, destination: RestoreDestination, fresh: Fd) -> None:
    """Where the filesystem turns out not to exchange, though it was seen to, two renames do it."""
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
    """Put a part of a claimed container's tree back; the rest is where it was claimed. Takes over `claim`.

    inside     path in the tree
    elsewhere  where it shall go; None for where it was, with the directories on the way made like the tree's own
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
                # A loan needs a record of it, and a record has room for its tree's alone.
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
                flush_directory(held, source)  # and not where it went, for the reason in `restore`
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
    """The uid that the directories may have that a reaper had entered; how many, only a walk of the tree could show."""
    return held.folder.uid if held.record.partial else None


def _there(held: HeldContainer, inside: RelPath) -> str:
    """Where something of a tree lies while it is an orphan, for people."""
    return printable(os.path.join(held.folder.path_to(State.ORPHANS, held.name()), join(TREE, inside)))


def way_back(kernel: Kernel, held: HeldContainer, tree: Fd, parents: list[Name]) -> BackingAndMount:
    """The directory at the origin that corresponds to one in the tree; missing ones are made like the tree's.

    At most six fds are open at a time, however deep it is.
    """
    if held.record.origin is None:
        raise NotFound(
            f"the original path of {held.id}", "it was moved into the drop directory; restore it with --to PATH"
        )
    record = held.record
    base, like = held.folder.store.base, kernel.open_beneath(tree, b".", DIRECTORY)
    is_sweep = record.method is Method.SWEEP  # which has the identity of the directory itself
    recorded, recorded_above = (record.parent, None) if is_sweep else (record.fresh, record.parent)
    with closed_on_error(like):
        if record.origin:
            *upper, last = split(record.origin)
            with base.beneath(kernel, join(*upper)) as above:
                if not is_taken(kernel, above.fd, last):
                    check_giving(kernel, above.fd, join(*upper), kernel.fstat(like).st_uid, None, recorded_above)
                here = _enter(kernel, held, above, last, like, recorded)
        else:
            here = base.beneath(kernel, b"")  # of a sweep of the directory itself that holds the store
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
    """A directory of that name; made in the container if it is missing, where none can be put in its place.

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
    """What stays where it is: the first by name, all counted. n_unmarked: of what moved, not marked as restored"""

    failures: tuple[Failure, ...] = ()
    n: int = 0
    n_unmarked: int = 0

    def plus(self, path: bytes, number: int, call: str = "renameat2") -> Unmoved:
        """One more."""
        return self.and_also(Unmoved((Failure(path, number, call),), 1))

    def and_also(self, other: Unmoved) -> Unmoved:
        """Both together."""
        failures = (*self.failures, *other.failures)[:MAX_FAILURES]
        return Unmoved(failures, self.n + other.n, self.n_unmarked + other.n_unmarked)


def merge_back(claim: RestoreClaim, inside: RelPath | None) -> Restored:
    """Put what a sweep took back, all of it or what has a path in its tree. Takes over `claim`.

    What can't be moved is an orphan still, and reported: the same again, later, brings the rest.
    Raises  NotFound, Occupied, or OSError as the kernel refused: what is not back by then is an orphan again
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
            return restore(claim, gone)  # which settles it by itself
        warnings = _end(held)
    is_spared = not left.n_unmarked
    return Restored(
        held.id, path, None, held.record.partial, warnings, left.failures, left.n, closed(held), is_spared=is_spared
    )


def _gone(held: HeldContainer, origin: RelPath, path: bytes, owned: ExitStack) -> RestoreDestination | None:
    """The place of the directory that was swept, for the tree to take, if that is gone; None if it is there."""
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
        while above:  # directories that had nothing else in them
            opener.remove(above)
            above = RelPath(os.path.dirname(above))
    return left


def _end(held: HeldContainer) -> tuple[str, ...]:
    """The container goes, or is an orphan again with what is left; with what could not be finished."""
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
    """Move one entry of a directory into another one; what of it stays.

    above  what its path begins with, for people
    """
    number = _move(kernel, source, target, name)
    if number == _IN_BOTH:
        left = merge(kernel, source, target, RelPath(name))
        return left._replace(failures=tuple(one._replace(name=join(above, one.name)) for one in left.failures))
    return Unmoved().plus(join(above, name), number) if number else _marked(kernel, target, name)


def merge(
    kernel: Kernel, source: BackingAndMount, target: BackingAndMount, start: RelPath, recorded: Identity | None = None
) -> Unmoved:
    """Move what is in a directory into the one that has the same path on the other side; what of it stays.

    start  that path; empty for the two themselves. The directory goes when it is empty, unless it is that; one that
           stays is reported, if nothing that stays in it is.
    recorded  what the target was when the source's entries were taken from it
    """
    left = Unmoved()
    with DeepOpener(kernel, source) as sources, DeepOpener(kernel, target) as targets:
        for path, names in walk_inwards(start):
            if names is None:
                if not path:
                    continue  # there is always the one that all are in
                try:
                    sources.remove(path)
                except FileNotFoundError:
                    pass  # another process took it
                except OSError as error:
                    if not left.n:  # otherwise it may be for what stays in it
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
    """The directories that both have, and what stays. Read again until nothing moves: servers skip entries."""
    unmarked = Unmoved()
    with kernel.open_dir(here.fd) as readable:
        while True:
            n_moved = 0
            both: list[Name] = []
            stays = Unmoved()
            with kernel.scan(readable) as entries:
                for entry in entries:
                    name = Name(os.fsencode(entry.name))
                    # The kernel would say that as well, after going all the way up from both: deep down that is long.
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
    """Mark what was moved."""
    with suppress(OSError), kernel.open_beneath(there.fd, name) as fd:
        if mark_restored(kernel, fd):
            return Unmoved()
    return Unmoved(n_unmarked=1)


def _move(kernel: Kernel, here: BackingAndMount, there: BackingAndMount, name: Name) -> int:
    """Why an entry stays: 0 if it doesn't, EISDIR if it is a directory that both have."""
    source, target = between(here, there)
    try:
        kernel.rename_free(source, name, target, name)
    except FileExistsError:
        return _IN_BOTH if _are_dirs(kernel, here, there, name) else errno.EEXIST
    except FileNotFoundError:
        return errno.ENOENT if _mode(kernel, here, name) else 0  # else another process took it
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _are_dirs(kernel: Kernel, here: BackingAndMount, there: BackingAndMount, name: Name) -> bool:
    return all(stat.S_ISDIR(_mode(kernel, side, name)) for side in (here, there))


def _mode(kernel: Kernel, directory: BackingAndMount, name: Name) -> int:
    """What has a name; 0 if nothing has it now, or something is mounted on it."""
    try:
        return kernel.stat(directory.fd, name).st_mode
    except OSError:
        return 0
