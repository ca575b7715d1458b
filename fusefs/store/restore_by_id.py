"""restore from an id to the result: which user's process does it, to which name, and how to undo it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from fusefs.core.errors import AcrossUsers, NotFound, OtherFilesystem, Refused, UsageError, from_os
from fusefs.core.names import Name, RelPath, join, split
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, is_inside, read_mounts
from fusefs.linux.untrusted_path import open_way
from fusefs.store.backing_and_mount import ABSENT, BackingAndMount, is_same
from fusefs.store.layout import UserFolder, is_stores_own, trusted_owners
from fusefs.store.merge import merge_back
from fusefs.store.mounted_paths import open_shown
from fusefs.store.origin import Origin
from fusefs.store.orphans import ListedContainer, act_on
from fusefs.store.restore import (
    RestoreClaim,
    Restored,
    RestoreDestination,
    check_for_root,
    claim_for_restore,
    restore,
    restore_inside,
    settle,
)
from fusefs.store.user_boundary import check_giving, is_bounded
from fusefs.store.victim import check_operand
from fusefs.store.victim_rename import DirectRename, VisibleRename


def restore_by_id(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, inside: bytes | None, to: bytes | None
) -> Restored:
    """Restore what a list entry tells of, whole or a part, to its origin or elsewhere.

    Raises  TrashdError; it is an orphan then as before
    """
    try:
        within = None if inside is None else join(*split(inside))
    except ValueError as error:
        raise UsageError(inside or b"", "PATH-INSIDE is relative to the tree, without `..`") from error
    if to is None:
        if entry.origin is not None and any(map(is_stores_own, entry.origin.split(b"/"))):
            # Only staging makes containers; one that root took to delete it may have lost its record by now (I3).
            raise Refused(entry.origin, "it was taken out of a trash store: restore it with --to PATH")
        return _explained(entry, lambda: act_on(kernel, volumes, entry, partial(_home, entry, within), Restored))
    if within is not None and entry.uid != os.geteuid():
        raise UsageError("PATH-INSIDE with --to on another user's orphan", "restore it whole, or as that user")
    parent, name = os.path.split(to.rstrip(b"/"))
    check_operand(to)
    if not name:
        raise Refused(to or "--to with an empty path", "--to takes the new name of what is restored")
    try:
        above = open_shown(kernel, parent or b".")
    except OSError as error:
        raise from_os(error, to) from error
    with above:
        if is_bounded():
            _check_destination(kernel, entry, parent or b".", above)
        visible = DirectRename(kernel, above, Name(name))
        body = partial(_elsewhere, entry, within, to, above.fd)
        return _explained(entry, lambda: act_on(kernel, volumes, entry, body, Restored, visible), to)


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
        raise AcrossUsers(f"{there}: another user chose where that leads", "name the directory itself")
    if entry.uid:
        check_giving(kernel, above.fd, path, entry.uid)


def _explained(entry: ListedContainer, act: Callable[[], Restored], to: bytes | None = None) -> Restored:
    try:
        return act()
    except OSError as error:
        if error.errno == errno.EXDEV and to is not None:
            base = printable(entry.base_path())
            hint = f"restore it --to a path on its own filesystem, somewhere below {base}, and mv it from there"
            raise OtherFilesystem(to, hint) from error
        raise from_os(error, entry.origin or entry.id) from error


def _home(
    entry: ListedContainer, inside: RelPath | None, folder: UserFolder, _visible: VisibleRename | None
) -> Restored:
    claim = claim_for_restore(folder, entry.id)
    held = claim.held
    if held.record.method is Method.SWEEP:
        return merge_back(claim, inside)
    if inside is not None:
        return restore_inside(claim, inside, None)
    with claim, _origin_of(claim) as origin, ExitStack() as owned:
        if origin.parent_fd is None:
            settle(claim)
            raise NotFound(entry.origin or entry.id, "its directory is gone, or it was dropped: use --to PATH")
        visible = owned.enter_context(origin.visible())
        path = os.path.join(folder.store.base_path, held.record.origin or b"")
        there = RestoreDestination(visible, path, origin.parent_fd, origin.name, None, at_origin=True, by_root=False)
        return restore(claim, there)


def _origin_of(claim: RestoreClaim) -> Origin:
    try:
        return Origin(claim.held)
    except OSError:
        settle(claim)
        raise


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
    target = _relative(folder, parent_fd, name)
    by_root = not isinstance(visible, DirectRename)
    if by_root:
        check_for_root(folder, entry.id)
    claim = claim_for_restore(folder, entry.id)
    destination = RestoreDestination(visible, to, parent_fd, name, target, at_origin=False, by_root=by_root)
    if inside is not None:
        return restore_inside(claim, inside, destination)
    return restore(claim, destination)


def _relative(folder: UserFolder, parent_fd: Fd, name: Name) -> RelPath | None:
    """A destination relative to the store's base; None if it does not lie below that."""
    base, parent = (os.readlink(b"/proc/self/fd/%d" % fd) for fd in (folder.store.base.fd, parent_fd))
    return join(below(parent, base), name) if is_inside(parent, base) else None
