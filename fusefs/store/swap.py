"""Implements swap and rm, from the path to the result: refusals, store, user's folder, and the exchange of the victim.

rm needs no exchange: it moves the victim, which may be a file, into the store with a single rename.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from fusefs.core.container_states import State
from fusefs.core.errors import (
    KernelRefused,
    NoBacking,
    NoStore,
    NotAlike,
    NotPermitted,
    Refused,
    TakenOver,
    TrashdError,
    Unsettled,
)
from fusefs.core.names import STORE, ContainerId, Name, RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.directory_metadata import (
    UNREADABLE,
    MetadataDifference,
    apply_metadata,
    differences,
    is_frozen,
    read_metadata,
)
from fusefs.linux.fd import close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, relative_to
from fusefs.linux.syscalls import NO_EXCHANGE
from fusefs.store.backing_and_mount import READABLE, Scope
from fusefs.store.container import HeldContainer, dissolve, flush, is_taken_over, move_to_state
from fusefs.store.keep_entries import KeptLinks, choose_kept_entries, drop_kept_links, link_kept_entries
from fusefs.store.layout import REPLACEMENT, TREE, Store, UserFolder
from fusefs.store.registry_lines import hint_for_unknown_maker
from fusefs.store.stage import ATTEMPTS, Staged, SwapOptions, make_victim_record, restock, stage
from fusefs.store.user_folders import (
    NOT_MADE,
    add_pointer,
    is_registered_store,
    open_user_folder,
    place_of_store,
    register_store,
)
from fusefs.store.victim import Victim, existing_stores, find_refusals, find_victim, stores_for, to_error
from fusefs.store.victim_rename import (
    DirectRename,
    VisibleMove,
    VisibleRename,
    end_temporary_permission,
    grant_temporary_permission,
)

Differences = tuple[MetadataDifference, ...]
"""The attributes of a victim that could not be given to its replacement."""


class Swapped(NamedTuple):
    """The result of a swap or a removal.

    store       the user's folder that contains the orphan
    volume      the directory that holds the store, if commands can't find the store by themselves; otherwise None
    gap_ns      how long the name was missing between two renames; 0 for an exchange, None for a removal
    unlike      the attributes that could not be given to the replacement
    warnings    failed steps after the exchange; the next command completes them
    kept        the top-level entries that stay in place
    unnoted     why the store is not in the caller's registry, so that no service reaps the orphan; otherwise empty
    expires_ns  when the orphan expires, in wall-clock time; None: never
    """

    id: ContainerId
    path: bytes
    store: bytes
    method: Method
    gap_ns: int | None
    unlike: Differences
    warnings: tuple[str, ...]
    volume: bytes | None = None
    kept: tuple[bytes, ...] = ()
    unnoted: str = ""
    expires_ns: int | None = None

    def base(self) -> bytes:
        return base_of(self.store)


def base_of(folder: bytes) -> bytes:
    """Return the directory that holds the store of a user's folder, whose path is BASE/STORE/AREA/FOLDER."""
    return folder.rsplit(b"/", 3)[0] or b"/"


class Adopted(NamedTuple):
    """The orphan that a container became: its id, the user's folder, and warnings."""

    id: ContainerId
    store: bytes
    warnings: tuple[str, ...] = ()


def adopt(held: HeldContainer) -> Adopted:
    """Move the container to orphans/ in its folder."""
    if held.folder.store.is_shared():
        from fusefs.store.recover import settle_late  # only shared filesystems may execute a call twice

        settle_late(held)
    move_to_state(held, State.ORPHANS)
    return Adopted(held.id, held.folder.path())


AdoptFunction = Callable[[HeldContainer], Adopted]
"""Called after the victim is in its container, before the container's lock is released."""


def swap(
    folder: UserFolder,
    victim: Victim,
    options: SwapOptions,
    visible: VisibleRename,
    adopt: AdoptFunction = adopt,
    n_attempts: int = ATTEMPTS,
) -> Swapped:
    """Swap the victim into a user's folder in a store.

    visible  makes the renames at the victim's name
    Raises   OSError with EXDEV if this store can't take the victim: try the next; other OSError, NotAlike, Refused: the
             victim is where it was; Unsettled: everything is kept, and the message says where
    """
    if not folder.store.volume.exchange:
        return _by_two_renames(folder, victim, options, visible, adopt)
    with stage(folder, victim.name, make_victim_record(folder, victim, Method.EXCHANGE, options)) as staged:
        try:
            differing = copy_metadata(staged, victim, options, visible)
            kept_links = None if victim.kept_entries is None else link_kept_entries(staged, victim)
            visible.make(VisibleMove.EXCHANGE, staged.held)
        except (OSError, TrashdError) as error:
            # A Ctrl-C is not handled here, as it may arrive after the exchange: recovery settles that.
            is_swept = isinstance(error, FileNotFoundError) and not _has_replacement(staged)
            undo_staging(staged, victim, visible, error)
            if is_swept and n_attempts > 1:
                # A recovery found no record yet and removed the replacement: start again.
                return swap(folder, victim, options, visible, adopt, n_attempts - 1)
            if not isinstance(error, OSError) or error.errno not in NO_EXCHANGE:
                raise
        else:
            if _is_exchanged(staged, victim, visible):
                return finish_swap(staged, victim, visible, differing, 0, kept_links, adopt)
            unstage(staged, victim, visible)
    # Nothing has changed: the filesystem does not support the exchange after all.
    return _by_two_renames(folder, victim, options, visible, adopt)


def unstage(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    """Undo the staging of a victim that was not moved: links, temporary permission, replacement, record and container.

    Raises  OSError if the victim was moved after all, since a kernel may report a failure for a rename that it made;
            then the container stays as it is, and recovery decides
    """
    kernel = staged.held.folder.store.kernel
    if victim.kept_entries is not None:
        drop_kept_links(staged, victim)
    end_temporary_permission(staged.held, victim.fd, staged.held.record.lent_mode, visible)
    for name in (TREE, REPLACEMENT):
        if staged.replacement is not None and kernel.is_named(staged.replacement, staged.held.fd, name):
            kernel.rmdir(staged.held.fd, name)
    dissolve(staged.held)


def undo_staging(staged: Staged, victim: Victim, visible: VisibleRename, error: Exception) -> None:
    """Call `unstage` after an error. Raises  TakenOver if another node took over the container and undoes it instead"""
    try:
        unstage(staged, victim, visible)
    except OSError:
        if not is_taken_over(staged.held):
            raise
        raise TakenOver(staged.held.id) from error


def _raise_if_taken_over(staged: Staged) -> None:
    if is_taken_over(staged.held):
        raise TakenOver(staged.held.id)


def _has_replacement(staged: Staged, name: Name = TREE) -> bool:
    assert staged.replacement is not None
    return staged.held.folder.store.kernel.is_named(staged.replacement, staged.held.fd, name)


def copy_metadata(staged: Staged, victim: Victim, options: SwapOptions, visible: VisibleRename) -> Differences:
    """Give the replacement the victim's metadata, with a temporary permission if needed; return what differs.

    Raises  NotAlike if anything differs and options.accept_differences is not set; OSError ENOKEY if the encryption
            differs, whatever the options
    """
    kernel = staged.held.folder.store.kernel
    assert staged.replacement is not None
    mode_before = staged.held.record.lent_mode
    grant_temporary_permission(staged.held, victim.fd, mode_before, visible)
    with kernel.open_dir(victim.fd) as readable:
        metadata = read_metadata(kernel, readable)
    apply_metadata(kernel, staged.replacement, metadata)
    differing = tuple(differences(metadata, read_metadata(kernel, staged.replacement)))
    if differing and not options.accept_differences:
        raise NotAlike(victim.path() + b" (" + os.fsencode(", ".join(format_differences(differing))) + b")")
    return differing


_UNCHANGED = "nothing was changed; run the command again"


def format_differences(differing: Differences) -> list[str]:
    return [
        f"{one.what} {UNREADABLE if one.wanted == UNREADABLE else f'{one.got} instead of {one.wanted}'}"
        for one in differing
    ]


def _is_exchanged(staged: Staged, victim: Victim, visible: VisibleRename) -> bool:
    """Return whether the exchange happened, judging by fds opened before it; False if the filesystem ignores the flag.

    Raises  Refused if another entry had taken the name by then; that entry has the name again. Unsettled if it could
            not get the name back, and everything is in stage/; OSError, TakenOver
    """
    kernel = staged.held.folder.store.kernel
    assert staged.replacement is not None
    if kernel.is_named(victim.fd, staged.held.fd, TREE):
        return True  # the name is not checked: the user may have moved the replacement already, which is fine
    replacement_stat = kernel.fstat(staged.replacement)
    is_replacement_at_name = visible.stat_name() == (replacement_stat.st_dev, replacement_stat.st_ino)
    if is_replacement_at_name or not kernel.is_named(staged.replacement, staged.held.fd, TREE):
        _undo_exchange(staged, victim, visible)
    return False


def _undo_exchange(staged: Staged, victim: Victim, visible: VisibleRename) -> NoReturn:
    """Give the name back to the entry that had it, and raise Refused; if that fails, raise Unsettled."""
    _raise_if_taken_over(staged)
    kernel = staged.held.folder.store.kernel
    assert staged.replacement is not None
    replacement_stat = kernel.fstat(staged.replacement)
    where = printable(victim.path())
    if visible.stat_name() == (replacement_stat.st_dev, replacement_stat.st_ino):
        visible.make(VisibleMove.EXCHANGE, staged.held)
        if kernel.is_named(staged.replacement, staged.held.fd, TREE):
            unstage(staged, victim, visible)
            raise Refused(f"{where}: another process renamed or replaced it at the same moment", _UNCHANGED)
    raise Unsettled(f"{where} (changed by another process during the exchange; see {staged.held.id} in stage/)")


def finish_swap(
    staged: Staged,
    victim: Victim,
    visible: VisibleRename,
    differing: Differences,
    gap_ns: int | None,
    kept_links: KeptLinks | None = None,
    adopt: AdoptFunction = adopt,
) -> Swapped:
    """Finish a swap once the victim is in the container: move kept entries back, end permissions, adopt, flush.

    Errors do not undo the swap: they become warnings, and the next command completes the steps.
    """
    held = staged.held
    warnings = []
    adopted = Adopted(held.id, held.folder.path())
    try:
        if kept_links is not None:
            warnings += [f"not kept in place, but in {held.id}: {one}" for one in kept_links.finish()]
        mode_before = held.record.lent_mode
        if staged.replacement is not None:
            end_temporary_permission(held, staged.replacement, mode_before)
        end_temporary_permission(held, victim.fd, mode_before, visible)
        adopted = adopt(held)
        flush(held)
    except OSError as error:
        warnings.append(
            f"{error.strerror} after the exchange; the next trashd command on this volume completes the swap"
        )
    method, kept = held.record.method, () if kept_links is None else kept_links.kept_entries.names()
    all_warnings, ends_ns = (*warnings, *adopted.warnings), held.record.adopted_expires_ns()
    store = adopted.store
    return Swapped(
        adopted.id, victim.path(), store, method, gap_ns, differing, all_warnings, kept=kept, expires_ns=ends_ns
    )


def _by_two_renames(
    folder: UserFolder, victim: Victim, options: SwapOptions, visible: VisibleRename, adopt: AdoptFunction
) -> Swapped:
    """Swap without an exchange: between two renames, the name is missing for `gap_ns`, which is part of the result."""
    kernel = folder.store.kernel
    with stage(folder, victim.name, make_victim_record(folder, victim, Method.TWO_RENAME, options)) as staged:
        try:
            differing = copy_metadata(staged, victim, options, visible)
            kept_links = None if victim.kept_entries is None else link_kept_entries(staged, victim)
            began_ns = time.monotonic_ns()
            is_shared = folder.store.is_shared()
            gap_ns = visible.make(VisibleMove.REPLACE if is_shared else VisibleMove.ASIDE, staged.held)
        except (OSError, TrashdError) as error:
            undo_staging(staged, victim, visible, error)
            raise
        if not kernel.is_named(victim.fd, staged.held.fd, TREE):
            give_back_name(staged, victim, visible)
        is_placed = (is_shared and not _has_replacement(staged, REPLACEMENT)) or _place_replacement(
            staged, victim, visible
        )
        gap_ns = gap_ns or time.monotonic_ns() - began_ns
        swapped = finish_swap(staged, victim, visible, differing, gap_ns, kept_links if is_placed else None, adopt)
    if is_placed:
        return swapped
    kept = "" if kept_links is None else ", and contains everything that --keep selected"
    warning = f"another process took the name during the swap, and has it now; the old tree is {swapped.id}{kept}"
    return swapped._replace(warnings=(*swapped.warnings, warning))


def _place_replacement(staged: Staged, victim: Victim, visible: VisibleRename) -> bool:
    """Rename the replacement to the victim's name; if this fails, move the victim back and raise the error.

    Returns  False if another process took the name in the gap: it keeps the name, and the old tree becomes an orphan
    """
    kernel = staged.held.folder.store.kernel
    try:
        visible.make(VisibleMove.PLACE, staged.held)
    except FileExistsError:
        if victim.kept_entries is not None:
            drop_kept_links(staged, victim)
        kernel.rmdir(staged.held.fd, REPLACEMENT)
        return False
    except OSError as error:
        try:
            visible.make(VisibleMove.BACK, staged.held)
        except OSError:
            where = printable(victim.path())
            raise Unsettled(f"{where} (missing: {error.strerror}; its tree is {staged.held.id} in stage/)") from error
        unstage(staged, victim, visible)
        raise
    return True


def give_back_name(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    """Move back an entry that a rename took instead of the victim. Raises  Refused; Unsettled if the move fails"""
    _raise_if_taken_over(staged)
    where = printable(victim.path())
    try:
        if staged.replacement is not None and not _has_replacement(staged, REPLACEMENT):  # it may have the name already
            visible.make(VisibleMove.ASIDE_REPLACEMENT, staged.held)
        visible.make(VisibleMove.BACK, staged.held)
    except OSError as error:
        raise Unsettled(
            f"{where} (replaced by another process; the replacement is {staged.held.id} in stage/)"
        ) from error
    unstage(staged, victim, visible)
    raise Refused(f"{where}: another process renamed or replaced it at the same moment", _UNCHANGED)


def remove(folder: UserFolder, victim: Victim, options: SwapOptions, visible: VisibleRename) -> Swapped:
    """Move the victim into a user's folder in a store. For the arguments and errors, see `swap`."""
    kernel = folder.store.kernel
    with stage(folder, victim.name, make_victim_record(folder, victim, Method.REMOVED, options)) as staged:
        try:
            grant_temporary_permission(staged.held, victim.fd, staged.held.record.lent_mode, visible)
            visible.make(VisibleMove.ASIDE, staged.held)
        except (OSError, TrashdError) as error:
            undo_staging(staged, victim, visible, error)
            raise
        if not kernel.is_named(victim.fd, staged.held.fd, TREE):
            give_back_name(staged, victim, visible)
        return finish_swap(staged, victim, visible, (), None)


SwapFunction = Callable[[UserFolder, Victim, SwapOptions, VisibleRename], Swapped]
"""`swap` or `remove`: moves a victim into a user's folder in a store. Raises  OSError EXDEV if that is impossible"""


def swap_path(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Swap the directory at a path. Raises  TrashdError; unless it is Unsettled, the directory is where it was"""
    return swap_or_remove_path(kernel, path, options, swap, directory=True)


def remove_path(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Move the file or directory at a path into a store, where it can be restored. For errors, see `swap_path`."""
    return swap_or_remove_path(kernel, path, options, remove, directory=False)


def swap_or_remove_path(
    kernel: Kernel, path: bytes, options: SwapOptions, verb: SwapFunction, *, directory: bool
) -> Swapped:
    """Find the victim and call `verb` with it. Try once more if this node had cached an inode that no longer exists.

    directory  whether the victim must be a directory
    Raises     TrashdError
    """
    try:
        with find_victim(kernel, path) as victim:
            return _offer_to_stores(kernel, victim, options, verb, directory=directory)
    except KernelRefused as error:
        if error.errno != errno.ESTALE:
            raise
    with suppress(OSError):
        os.close(os.open(path, READABLE | os.O_CLOEXEC))  # makes this node ask the server, which O_PATH would not do
    with find_victim(kernel, path) as victim:
        return _offer_to_stores(kernel, victim, options, verb, directory=directory)


def _offer_to_stores(
    kernel: Kernel, victim: Victim, options: SwapOptions, verb: SwapFunction, *, directory: bool
) -> Swapped:
    """Check for refusals, then try one store after another until one can take the victim."""
    visible = DirectRename(kernel, victim.parent.sides, victim.name)
    try:
        for reason in find_refusals(kernel, victim, directory=directory):
            raise reason
        if options.keep:
            victim = victim._replace(kept_entries=choose_kept_entries(kernel, victim, options.keep))
        for offered in stores_for(kernel, victim.parent, victim.path()):
            with offered.store as store:
                try:
                    add_own_pointer(victim.parent, store)
                    with open_own_folder(store) as folder:
                        swapped = verb(folder, victim, options, visible)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                else:
                    volume = volume_to_report(store, victim.parent.mounts)
                    return swapped._replace(volume=volume, unnoted=_explain_unregistered(store, volume))
            offered.discard()
        raise AssertionError("unreachable: if the last store fails, its error is raised")
    except OSError as error:
        raise to_user_error(error, victim) from error


def volume_to_report(store: Store, mounts: Iterable[Mount]) -> bytes | None:
    """Return the directory that holds a store if commands can find the store only if a user names this directory.

    Return None if the directory is a mount point or the store is registered. Our own mounts don't count, as they may be
    unmounted.
    """
    lasting = any(mount.point == store.base_path for mount in mounts if not mount.is_trashd())
    return None if lasting or is_registered_store(store) else place_of_store(store)


def _explain_unregistered(store: Store, volume: bytes | None) -> str:
    """Return the reason why a store is not registered if, as a result, no service can find it; otherwise ""."""
    is_discoverable = store.name != STORE or store.is_common()  # at a mount point, where root's service finds it, too
    if store.owner != os.geteuid() or (volume is None and (is_discoverable or is_registered_store(store))):
        return ""
    return register_store(store)


def open_own_folder(store: Store) -> UserFolder:
    """Open the caller's folder, or make it. Complete or undo what killed commands left in stage/.

    This also adds the store to the user's registry.
    Raises  OSError; Untrusted
    """
    kernel = store.kernel
    refuse_unknown(store)
    register_store(store)
    folder = open_user_folder(store, os.geteuid())
    if folder is None:
        folder = _first_folder(store)
        restock(folder)
        return folder
    with close_on_error(folder), folder.open(State.STAGE) as stage:
        # Root does not touch a folder that another user may have made to look like root's.
        if (folder.is_proven or folder.uid) and not kernel.is_empty(stage):
            from fusefs.store.recover import recover

            recover(folder)
    return folder


def refuse_unknown(store: Store) -> None:
    """If we are root, refuse a store of root's if there is no proof that root made it. Raises  NoStore"""
    if store.is_ours_as_root() and store.has_unknown_maker():
        raise NoStore(f"{printable(store.base_path)} ({NOT_MADE})", hint_for_unknown_maker(store.base_path))


def _first_folder(store: Store) -> UserFolder:
    """Make the caller's first folder in a store, or take it from an old store in it. Raises  OSError; NoStore; Busy"""
    from fusefs.store.make_folder import (  # only the first command on a volume needs these
        abandoned_folders,
        make_folder_as_root,
        make_user_folder,
    )
    from fusefs.store.tidy_folder import take_own_from_old

    uid = os.geteuid()
    for abandoned in abandoned_folders(store):
        from fusefs.store.recover import recover

        recover(abandoned)
    if store.is_ours_as_root():
        return make_folder_as_root(store, 0)
    take_own_from_old(store)
    return open_user_folder(store, uid) or make_user_folder(store)


def add_own_pointer(scope: Scope, store: Store) -> None:
    """Write a pointer to a store into the caller's own folder in the store above it, if there is one.

    This is done before the store is used, so that its contents are found even if we are killed.
    """
    upper = store_above(scope, store)
    if upper is not None:
        with upper, open_own_folder(upper) as folder:
            add_pointer(folder, RelPath(relative_to(store.base_path, upper.base_path)))


def store_above(scope: Scope, store: Store) -> Store | None:
    """Open the scope's highest store if it is above the given store, else return None; the caller closes it."""
    if store.base_path == scope.root_path:
        return None
    for _relative, upper in existing_stores(store.kernel, scope, [], to_take=False):
        if len(upper.base_path) < len(store.base_path):
            return upper
        with upper:
            break
    return None


def to_user_error(error: OSError | TrashdError, victim: Victim) -> TrashdError:
    """Convert an error for the user, and add the cause if the errno hides it; return a TrashdError unchanged."""
    if isinstance(error, TrashdError):
        return error
    if error.errno in (errno.EPERM, errno.EACCES):
        for fd, what in ((victim.fd, "it"), (victim.parent.sides.fd, "its parent directory")):
            if is_frozen(fd):
                hint = f"{what} is immutable or append-only (lsattr -d); root can change that: chattr -ia PATH"
                return NotPermitted(victim.path(), hint)
        from fusefs.linux.tree_users import kernel_holds  # only after an error

        if any(hold.kind == "swap" and hold.path == victim.path() for hold in kernel_holds()):
            return NotPermitted(victim.path(), "it is an active swap file; deactivate it first: swapoff PATH")
    if error.errno == errno.ESTALE and victim.parent.root.mounted is not None:
        return make_stale_mount_error(victim.parent)
    return to_error(error, victim.path())


def make_stale_mount_error(scope: Scope) -> NoBacking:
    """Return the error to report for ESTALE if the directory is on one of our mounts."""
    return NoBacking(scope.root_path + b" (it shows a different directory than its source)")
