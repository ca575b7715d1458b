"""swap and rm from a path to the result: refusals, the right store, the user's folder, the pointer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from fusefs.core.errors import (
    BrokenStore,
    CrossesBoundary,
    KernelRefused,
    NoBacking,
    NoStore,
    NotPermitted,
    TrashdError,
)
from fusefs.core.lifecycle import State
from fusefs.core.names import STORE, RelPath
from fusefs.core.printable_names import printable
from fusefs.linux.directory_metadata import is_frozen
from fusefs.linux.fd import closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, below
from fusefs.store.backing_and_mount import READABLE, Scope
from fusefs.store.keep_entries import choose
from fusefs.store.layout import Store, UserFolder
from fusefs.store.locate import Victim, as_told, existing_stores, find_victim, stores_for
from fusefs.store.refusals import refusals
from fusefs.store.stage import SwapOptions, restock
from fusefs.store.store_maker import way_out
from fusefs.store.store_registry import is_remembered, place_of_store, remember
from fusefs.store.swap import Swapped, remove, swap
from fusefs.store.user_folders import NOT_MADE, open_user
from fusefs.store.victim_rename import DirectRename, VisibleRename

Transact = Callable[[Store, Victim, RelPath], Swapped]
"""Takes a victim into a store; gets the victim's parent relative to the store's base. Tried store by store."""

Point = Callable[[Store, Victim, RelPath], None]
"""Notes in an upper store that a lower one, told relative to the upper one's base, gets the victim."""


def swap_path(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Swap the directory at a path.

    Raises  TrashdError; the directory is where it was unless it is Unsettled
    """
    return into_a_store(kernel, path, _own(options, swap), directory=True, keep=options.keep)


def remove_path(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Remove whatever is at a path, restorably; errors as for `swap_path`."""
    return into_a_store(kernel, path, _own(options, remove), directory=False)


def _own(
    options: SwapOptions,
    transaction: Callable[[UserFolder, Victim, RelPath, SwapOptions, VisibleRename], Swapped],
) -> Transact:
    def transact(store: Store, victim: Victim, relative: RelPath) -> Swapped:
        with own_folder(store) as folder:
            visible = DirectRename(store.kernel, victim.parent.sides, victim.name)
            return transaction(folder, victim, relative, options, visible)

    return transact


def point_own(store: Store, _victim: Victim, lower: RelPath) -> None:
    """Leave a pointer in the caller's own folder."""
    from fusefs.store.pointers import add_pointer

    with own_folder(store) as folder:
        add_pointer(folder, lower)


def into_a_store(
    kernel: Kernel,
    path: bytes,
    transact: Transact,
    *,
    directory: bool,
    point: Point = point_own,
    keep: tuple[str, ...] = (),
) -> Swapped:
    """Find the victim and refuse, or let the first store that can take it have it.

    Once more if it is gone that had the name when this node looked last.

    directory  whether the victim must be one
    point      leaves the pointer to a lower store in the folder of the user who gets the orphan
    keep       globs of what stays in view
    Raises     TrashdError
    """
    try:
        return _found_into_a_store(kernel, path, transact, directory=directory, point=point, keep=keep)
    except KernelRefused as error:
        if error.errno != errno.ESTALE:
            raise
    with suppress(OSError):
        os.close(os.open(path, READABLE | os.O_CLOEXEC))  # asks the server what has the name, as O_PATH does not
    return _found_into_a_store(kernel, path, transact, directory=directory, point=point, keep=keep)


def _found_into_a_store(
    kernel: Kernel, path: bytes, transact: Transact, *, directory: bool, point: Point, keep: tuple[str, ...]
) -> Swapped:
    with find_victim(kernel, path) as victim:
        try:
            for reason in refusals(kernel, victim, directory=directory):
                raise reason
            if keep:
                victim = victim._replace(staying=choose(kernel, victim, keep))
            return _first_that_takes_it(kernel, victim, transact, point)
        except OSError as error:
            raise explain(error, victim) from error


def _first_that_takes_it(kernel: Kernel, victim: Victim, transact: Transact, point: Point) -> Swapped:
    crossed = False
    try:
        for relative, store, _is_made in stores_for(kernel, victim.parent, victim.path()):
            with store:
                try:
                    if relative:
                        point_to(kernel, victim.parent, relative, lambda upper, lower: point(upper, victim, lower))
                    done = transact(store, victim, RelPath(below(victim.parent.relative, relative)))
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    crossed = True
                else:
                    volume = volume_to_tell(store, victim.parent.mounts)
                    return done._replace(volume=volume, unnoted=_unnoted(store, volume))
    except NoStore as error:
        if not crossed or isinstance(error, BrokenStore):
            raise
        raise CrossesBoundary(victim.path()) from error
    raise CrossesBoundary(victim.path())


def volume_to_tell(store: Store, mounts: Iterable[Mount]) -> bytes | None:
    """The directory that holds a store, for commands that don't find it by themselves: at a mount, or by the registry.

    A mount of ours may be gone by then, and what it shows is where it was.
    """
    lasting = any(mount.point == store.base_path for mount in mounts if not mount.is_ours())
    return None if lasting or is_remembered(store) else place_of_store(store)


def _unnoted(store: Store, volume: bytes | None) -> str:
    """Why no registry names a store of the caller's, if that keeps services from it; empty if it does not."""
    is_found = store.name != STORE or store.is_common()  # at a mount point, by root's service too
    if store.owner != os.geteuid() or (volume is None and (is_found or is_remembered(store))):
        return ""
    return remember(store)


def own_folder(store: Store) -> UserFolder:
    """The caller's folder, made if missing, with what a killed command left in stage/ completed or undone.

    The user's registry names the store from now on.
    Raises  OSError; Untrusted
    """
    kernel = store.kernel
    if store.is_roots_to_keep() and store.is_unknown():
        raise NoStore(f"{printable(store.base_path)}: {NOT_MADE}", way_out(store.base_path))
    remember(store)
    folder = open_user(store, os.geteuid())
    if folder is None:
        folder = _first_folder(store)
        restock(folder)
        return folder
    with closed_on_error(folder), folder.open(State.STAGE) as stage:
        # What others may have put there, making a folder of root's of it, root does nothing about.
        if (folder.is_proven or folder.uid) and not kernel.is_empty(stage):
            from fusefs.store.recover import recover

            recover(folder)
    return folder


def _first_folder(store: Store) -> UserFolder:
    """The caller's folder, who had none when he looked: made, or taken out of what was there before.

    Raises  OSError; NoStore; Busy
    """
    from fusefs.store.make_folder import make_roots, make_user  # only the first command on a volume needs all that
    from fusefs.store.set_aside import take_own

    uid = os.geteuid()
    if store.is_roots_to_keep():
        return make_roots(store, 0)
    take_own(store)
    return open_user(store, uid) or make_user(store)


def point_to(kernel: Kernel, scope: Scope, relative: RelPath, leave: Callable[[Store, RelPath], None]) -> None:
    """Leave a pointer to a lower store in the user's folder of the highest one, before the lower one is used."""
    for upper, store in existing_stores(kernel, scope, [], to_take=False):
        with store:
            if upper != relative and len(upper) < len(relative):
                leave(store, RelPath(below(relative, upper)))
            return


def explain(error: OSError | TrashdError, victim: Victim) -> TrashdError:
    """The error for a person, with the reason where the kernel's word hides it; an error of ours as it is."""
    if isinstance(error, TrashdError):
        return error
    if error.errno in (errno.EPERM, errno.EACCES):
        for fd, what in ((victim.fd, "it"), (victim.parent.sides.fd, "the directory that it is in")):
            if is_frozen(fd):
                hint = f"{what} is immutable or append-only (lsattr -d); chattr -ia first, as root"
                return NotPermitted(victim.path(), hint)
        from fusefs.linux.tree_users import kernel_holds  # only after an error

        if any(hold.kind == "swap" and hold.path == victim.path() for hold in kernel_holds()):
            return NotPermitted(victim.path(), "it is an active swap file: swapoff it first")
    if error.errno == errno.ESTALE and victim.parent.root.mounted is not None:
        return shows_another(victim.parent)
    return as_told(error, victim.path())


def shows_another(scope: Scope) -> NoBacking:
    """What ESTALE means where a mount of ours shows a directory."""
    return NoBacking(scope.root_path + b": it shows another directory than its source")
