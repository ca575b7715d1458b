"""The container of a sweep: the entries that the sweep takes keep their paths in it, and become one orphan at the end.

The container's record is durable before anything moves, and serves as the lock. Its `tree` gets the attributes of the
swept directory. Each directory in the tree gets those of its original; it is made under another name, so that
it appears complete.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError, from_os
from fusefs.core.names import ContainerId, Name, RelPath
from fusefs.core.record import Method, TreeSize
from fusefs.linux.directory_metadata import DirectoryMetadata, apply_metadata, make_directory_like, read_metadata
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import relative_to
from fusefs.store.backing_and_mount import DIRECTORY, READABLE, BackingAndMount, Scope, require_both_sides
from fusefs.store.container import (
    HeldContainer,
    dissolve,
    drop_empty_tree,
    drop_unfinished,
    flush,
    mark_complete,
    move_to_state,
    open_inside,
    unfinished_name,
)
from fusefs.store.layout import RECORD_NEW, TREE, UserFolder
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.stage import SwapOptions, make_record, stage
from fusefs.store.swap import add_own_pointer, make_stale_mount_error, open_own_folder, volume_to_report
from fusefs.store.victim import OfferedStore, stores_for
from fusefs.store.walk import DeepOpener, DeepOpeners, make_missing, walk_inwards


class SweepContainer(NamedTuple):
    """A locked container in stage/ into which a sweep moves entries; forked workers share it.

    scope    the swept directory
    tree     the container's `tree`, also opened in the mount if the swept directory is in one
    volume   the directory that holds the store, if commands do not find the store themselves; otherwise None
    offered  the store; if it was made for this sweep and nothing was taken, it is removed
    """

    scope: Scope
    held: HeldContainer
    tree: BackingAndMount
    options: SwapOptions
    volume: bytes | None
    offered: OfferedStore

    def open_target(self, upper: bytes, openers: DeepOpeners) -> BackingAndMount:
        """Open the directory in the tree that receives the entries of an original directory; the caller closes it.

        If it is missing, it is made with the attributes of the original directory.
        upper   path of the original directory, relative to the swept one
        Raises  OSError: ENOENT if the original directory is gone
        """
        return openers.opener_of(self.tree).open_on_both(
            upper, partial(self._make_missing_parents, openers.opener_of(BackingAndMount(self.scope.sides.fd)))
        )

    def _make_missing_parents(self, models: DeepOpener, above: BackingAndMount, path: bytes, missing: bytes) -> None:
        kernel = self.held.folder.store.kernel
        make = partial(make_missing, kernel, above.fd, path, missing, models, self._make_like)
        call_with_room(self.held.folder, SPARE_FOR_USER, make)

    def _make_like(self, target: Fd, name: Name, model: Fd) -> None:
        """Make a directory like `model`. It appears with all attributes, as some can be set only while it is empty."""
        kernel, new = self.held.folder.store.kernel, unfinished_name()
        appear = partial(kernel.rename_free, self.held.fd, new, target, name)
        make_directory_like(kernel, self.held.fd, new, _metadata_for_copy(kernel, model), appear)

    def finish(self, *, is_empty: bool, size: TreeSize | None = None) -> tuple[ContainerId | None, tuple[str, ...]]:
        """Make an orphan of the entries taken, or remove the container; return the orphan's ID, and warnings.

        is_empty  nothing was taken: remove the directories made in the tree, and a store that was made for the sweep
        size      size of the entries taken, as far as it is known
        """
        try:
            drop_unfinished(self.held)
            if is_empty:
                _prune(self.held.folder.store.kernel, self.tree)
            if drop_empty_tree(self.held):
                dissolve(self.held)
                self.offered.discard()
                return None, ()
            move_to_state(mark_complete(self.held, size), State.ORPHANS)
            flush(self.held)
        except OSError as error:
            return self.held.id, (
                f"{error.strerror} at the end of the sweep; the next trashd command on this volume completes the sweep",
            )
        return self.held.id, ()


@contextmanager
def open_sweep_container(kernel: Kernel, scope: Scope, options: SwapOptions) -> Iterator[SweepContainer]:
    """Open a container for entries from a directory, in the first store that accepts them.

    If `finish` is not called, the container remains as after a killed sweep, and recovery adopts its contents.
    Raises  TrashdError; then nothing remains
    """
    with ExitStack() as owned:
        try:
            container = _open_first(kernel, scope, options, owned)
        except OSError as error:
            if error.errno == errno.ESTALE and scope.root.mounted is not None:
                raise make_stale_mount_error(scope) from error
            raise from_os(error, scope.path()) from error
        yield container


def _open_first(kernel: Kernel, scope: Scope, options: SwapOptions, owned: ExitStack) -> SweepContainer:
    """Make the container in the first store that accepts it; `owned` closes it."""
    for offered in stores_for(kernel, scope, scope.path()):
        try:
            with ExitStack() as opened:
                store = opened.enter_context(offered.store)
                add_own_pointer(scope, store)
                folder = opened.enter_context(open_own_folder(store))
                container = _open(kernel, scope, folder, offered, options, opened)
                owned.enter_context(opened.pop_all())
                return container
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        offered.discard()
    raise AssertionError("unreachable: if the last store fails, its error is raised")


def _open(
    kernel: Kernel, scope: Scope, folder: UserFolder, offered: OfferedStore, options: SwapOptions, owned: ExitStack
) -> SweepContainer:
    """Make the container in one store; its tree is also opened in the mount if the swept directory is in one.

    Raises  OSError: EXDEV if entries can't be renamed into it, ESTALE if the mount can't show its tree
    """
    origin = RelPath(relative_to(scope.path(), folder.store.base_path))
    record = make_record(folder, Method.SWEEP, origin, None, kernel.identify(scope.sides.fd))
    record = record._replace(retention_s=options.retention_s, note=options.note, invocation=options.invocation)
    staged = owned.enter_context(stage(folder, os.path.basename(scope.path()), record))
    assert staged.replacement is not None
    try:
        metadata = _metadata_for_copy(kernel, scope.sides.fd)
        if metadata is not None:
            apply_metadata(kernel, staged.replacement, metadata)
        _try_rename(kernel, scope, staged.held)
        if scope.sides.mounted is None:
            tree = BackingAndMount(kernel.open_beneath(staged.held.fd, TREE, DIRECTORY))
        else:
            tree = require_both_sides(scope.sides, open_inside(staged.held, TREE), scope.path())
        owned.enter_context(tree)
    except (OSError, TrashdError):
        with suppress(OSError):  # fails if something is in the tree; then recovery adopts it
            kernel.rmdir(staged.held.fd, TREE)
            dissolve(staged.held)
        raise
    return SweepContainer(scope, staged.held, tree, options, volume_to_report(folder.store, scope.mounts), offered)


def _metadata_for_copy(kernel: Kernel, model: Fd) -> DirectoryMetadata | None:
    """Return a directory's attributes for a copy, with write permission for the owner; None if we can't list it.

    The original may lack that permission, since the entries were taken from deeper directories. But a tree that we
    can't change could not be restored.
    """
    try:
        readable = kernel.open_dir(model)
    except PermissionError:
        return None  # it can be searched but not listed; the sweep got the names from a list
    with readable:
        metadata = read_metadata(kernel, readable)
    return metadata if os.geteuid() == 0 else metadata._replace(mode=metadata.mode | stat.S_IRWXU)


def _try_rename(kernel: Kernel, scope: Scope, held: HeldContainer) -> None:
    """Test whether entries can be renamed from the directory into the container, before any are moved.

    A file without a name is made in the directory and linked into the container for a moment. For a link, the kernel
    makes the same checks as for a rename (project, subvolume, encryption). Recovery removes the name that is used here.
    If this can't be tried, the first renames will show the problem.
    Raises  OSError EXDEV if entries can't be renamed
    """
    try:
        with kernel.create_unnamed(scope.sides.fd) as probe:
            kernel.link_unnamed(probe, held.fd, RECORD_NEW)
            kernel.unlink(held.fd, RECORD_NEW)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise


def _prune(kernel: Kernel, tree: BackingAndMount) -> None:
    """Remove directories below `tree` that contain nothing but directories."""
    with DeepOpener(kernel, tree) as opener:
        for path, names in walk_inwards(RelPath(b"")):
            if names is not None:
                with opener.beneath(path, flags=READABLE) as here:
                    for name in map(Name, kernel.list(here.fd)):
                        if stat.S_ISDIR(kernel.stat(here.fd, name).st_mode):
                            names.append(name)
            elif path:
                with suppress(OSError):
                    opener.remove(path)
