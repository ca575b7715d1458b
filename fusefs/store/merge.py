"""Merge: what a sweep took back into the directory that it came from, entry by entry.

A directory that is missing there comes whole, one that is there is descended into. What has its name taken stays
where it is, and is told; nothing is ever replaced.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import NotFound, Occupied, TrashdError
from fusefs.core.identity import Identity
from fusefs.core.names import Name, RelPath, join, split
from fusefs.core.record import MAX_FAILURES, Failure
from fusefs.core.results import NOT_GIVEN
from fusefs.linux.kernel import Kernel
from fusefs.linux.xattrs import mark_restored
from fusefs.store.backing_and_mount import BackingAndMount, between, wholly_beneath
from fusefs.store.container import HeldContainer, drop_empty_tree, flush, forget_size, move, open_inside
from fusefs.store.deep_path import DeepOpener, walk_inwards
from fusefs.store.layout import TREE
from fusefs.store.origin import Origin
from fusefs.store.recover import keep_hoisted, retire_restored
from fusefs.store.restore import RestoreClaim, Restored, RestoreDestination, closed, restore, settle, way_back
from fusefs.store.user_boundary import may_give

_IN_BOTH = errno.EISDIR


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

    What can't be moved is an orphan still, and told: the same again, later, brings the rest.
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
        except FileNotFoundError as error:
            settle(claim)
            raise NotFound(path, "nothing of the orphan belongs there, or the directory above it is gone") from error
        except (OSError, TrashdError):
            settle(claim)
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
        raise NotFound(path, "the directory above it is gone: use --to PATH")
    if there.identity() is not None:
        return None
    visible = owned.enter_context(there.visible())
    return RestoreDestination(visible, path, there.parent_fd, there.name, origin, at_origin=True, by_root=False)


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
        told = tuple(keep_hoisted(held))
        retire_restored(held)
    except OSError as error:
        return (f"{error.strerror} after it was back; the next trashd command completes it",)
    return told


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
           stays is told, if nothing that stays in it is.
    recorded  what the target was when the source's entries were taken from it
    """
    with DeepOpener(kernel, source) as sources, DeepOpener(kernel, target) as targets:
        merging = _Merging(kernel, sources, targets, recorded)
        walk_inwards(start, merging.enter, merging.leave)
    return merging.left


class _Merging:
    """One merge on its way."""

    def __init__(self, kernel: Kernel, sources: DeepOpener, targets: DeepOpener, recorded: Identity | None) -> None:
        self._kernel = kernel
        self._recorded = recorded
        self._sources = sources
        self._targets = targets
        self.left = Unmoved()

    def enter(self, upper: RelPath) -> list[Name]:
        """Move what can be moved of a directory; those in it that both have."""
        try:
            with self._sources.wholly(upper) as here, self._targets.wholly(upper) as there:
                owner, recorded = self._kernel.fstat(here.fd).st_uid, None if upper else self._recorded
                if not may_give(self._kernel, there.fd, owner, here.fd, recorded):
                    self.left = self.left.plus(upper, errno.EPERM, NOT_GIVEN)
                    return []
                both, stays = _move_all(self._kernel, here, there, upper)
        except OSError as error:
            self._stays(upper, error, "openat2")
            return []
        self.left = self.left.and_also(stays)
        return both

    def leave(self, path: RelPath) -> None:
        """Remove a directory that was emptied; there is always the one that all are in."""
        if not path:
            return
        try:
            self._sources.remove(path)
        except FileNotFoundError:
            pass  # another process took it
        except OSError as error:
            if not self.left.n:  # otherwise it may be for what stays in it
                self._stays(path, error, "unlinkat")

    def _stays(self, path: RelPath, error: OSError, call: str) -> None:
        self.left = self.left.plus(path, error.errno or errno.EIO, call)


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
