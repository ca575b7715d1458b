"""Implements `trashd check`: does a swap up to the exchange, then undoes it and removes all entries that it made."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import BrokenStore, NotKept, NotPermitted, TrashdError
from fusefs.core.names import Name
from fusefs.core.record import Method
from fusefs.linux.directory_metadata import apply_metadata, is_frozen, project_of, read_metadata
from fusefs.linux.filesystem_probes import check_mergerfs_rename, check_overlay_rename
from fusefs.linux.kernel import OVERLAY_MAGIC, Kernel
from fusefs.linux.mountinfo import MERGERFS
from fusefs.linux.refused_calls import RefusedCall, find_refused_calls
from fusefs.linux.syscalls import NO_EXCHANGE
from fusefs.store.backing_and_mount import NO_SPACE_ERRNOS, preserved_times, suppress_errno
from fusefs.store.container import unfinished_name
from fusefs.store.keep_entries import choose_kept_entries, find_keep_refusals
from fusefs.store.layout import NEW_PART, Store, make_private
from fusefs.store.make_folder import folder_for_check
from fusefs.store.make_store import make_unnamed_store
from fusefs.store.reserve import is_stocked
from fusefs.store.silent_nodes import takeover_s
from fusefs.store.stage import INSIDE, Staged, SwapOptions, drop_stand_in, make_victim_record, stage_new, stand_in
from fusefs.store.swap import copy_metadata, format_differences, refuse_unknown, to_user_error, unstage
from fusefs.store.victim import Victim, existing_stores, find_refusals, find_victim, stores_for
from fusefs.store.victim_rename import DirectRename


class Preflight(NamedTuple):
    """The result of `trashd check`.

    store       the store that would get the orphan; None if there is none
    exists      whether that store exists already
    method      exchange, two-rename, or unknown if nothing could be tried
    project     the project id whose quota the orphan still counts against; None if there are no projects
    refusals    why swap would refuse, each reason with its hint
    unlike      the attributes that the caller could not give to the replacement, as text
    n_holders   how many processes have the directory open (of those that the caller can see)
    kept        the top-level entries that would stay in place
    exit_code   the exit code that swap would return
    missing     the system calls that this process is not allowed to use, and the consequences
    is_shared   whether other machines may have mounted the filesystem, judging by its type
    gap_ns      how long the name was missing when two renames were tried; None if they were not tried
    noreplace   that store's `Volume.noreplace`
    takeover_s  how long another node's command must be silent before its container is taken over; None on a local
                filesystem
    """

    path: bytes
    filesystem: str
    mount_point: bytes
    store: bytes | None
    exists: bool
    method: str
    project: int | None
    refusals: tuple[tuple[str, str], ...]
    unlike: tuple[str, ...]
    n_holders: int
    kept: tuple[bytes, ...] = ()
    exit_code: int = 0
    missing: tuple[RefusedCall, ...] = ()
    is_shared: bool = False
    gap_ns: int | None = None
    noreplace: bool | None = None
    takeover_s: float | None = None

    def with_refusal(self, error: TrashdError) -> Preflight:
        """Add a reason why swap would refuse; the first one determines the exit code."""
        reasons = (*self.refusals, (error.message(), error.hint))
        return self._replace(refusals=reasons, exit_code=self.exit_code or error.exit_code)

    def with_store(self, store: Store, *, exists: bool) -> Preflight:
        """Add the facts about a store that are known before anything is tried."""
        return self._replace(
            store=store.path(),
            exists=exists,
            method=_method(store).value,
            noreplace=store.volume.noreplace,
            takeover_s=takeover_s(store) if store.is_shared() else None,
        )


def check_swap(
    kernel: Kernel, path: bytes, keep: tuple[str, ...] = (), *, accept_differences: bool = False
) -> Preflight:
    """Do a swap up to the exchange, try the exchange with stand-ins, and undo everything. The caller sets `n_holders`.

    keep    globs for the entries that would stay in place
    accept_differences  whether to accept a replacement that differs from the old directory
    Raises  TrashdError if the path can't be checked at all
    """
    with find_victim(kernel, path) as victim:
        result = Preflight(
            victim.path(),
            victim.parent.mount.fstype.decode("ascii", "replace"),
            victim.parent.mount.point,
            store=None,
            exists=False,
            method="unknown",
            project=_project(kernel, victim),
            refusals=(),
            unlike=(),
            n_holders=0,
            missing=find_refused_calls(),
            is_shared=not kernel.is_local(victim.fd),
        )
        for reason in _refusals(kernel, victim):
            result = result.with_refusal(reason)
        if keep and victim.is_directory():
            result = _check_keep(kernel, victim, keep, result)
        if result.refusals:
            return _first_store(kernel, victim, result)
        return _try_stores(kernel, victim, SwapOptions(accept_differences=accept_differences), result)


def _refusals(kernel: Kernel, victim: Victim) -> list[TrashdError]:
    """Return all reasons to refuse the victim. Errors after the first reason are ignored: a swap would end there."""
    reasons = []
    try:
        for reason in find_refusals(kernel, victim, directory=True):
            reasons.append(reason)  # noqa: PERF402 - those before an error are kept
    except OSError:
        if not reasons:
            raise
    return reasons


def _check_keep(kernel: Kernel, victim: Victim, keep: tuple[str, ...], result: Preflight) -> Preflight:
    try:
        staying = choose_kept_entries(kernel, victim, keep)
    except (NotKept, OSError) as error:
        return result.with_refusal(to_user_error(error, victim))
    for reason in find_keep_refusals(kernel, victim, staying):
        result = result.with_refusal(reason)
    return result._replace(kept=staying.names())


def _project(kernel: Kernel, victim: Victim) -> int | None:
    with suppress(OSError), kernel.open_dir(victim.fd) as readable:
        return project_of(kernel, readable)
    return None


def _first_store(kernel: Kernel, victim: Victim, result: Preflight) -> Preflight:
    """Add to the result the existing store that a swap would try first, without trying it."""
    with suppress(OSError, BrokenStore):
        for _relative, store in existing_stores(kernel, victim.parent, []):
            with store:
                return result.with_store(store, exists=True)
    return result


def _method(store: Store) -> Method:
    return Method.EXCHANGE if store.volume.exchange else Method.TWO_RENAME


def _try_stores(kernel: Kernel, victim: Victim, options: SwapOptions, result: Preflight) -> Preflight:
    """Try the stores as a swap does, until one can take the victim."""
    try:
        with ExitStack() as made:
            for offered in stores_for(kernel, victim.parent, victim.path(), partial(make_unnamed_store, made)):
                try:
                    with offered.store as store:
                        result = result.with_store(store, exists=offered.made_in is None)
                        return _try_store(store, victim, options, result)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
    except (OSError, TrashdError) as error:
        return result.with_refusal(to_user_error(error, victim))
    raise AssertionError("unreachable: if the last store fails, its error is raised")


def _try_store(store: Store, victim: Victim, options: SwapOptions, result: Preflight) -> Preflight:
    """Stage a container, try the rename, and dissolve the container. Raises  OSError, TrashdError like the swap"""
    kernel = store.kernel
    visible = DirectRename(kernel, victim.parent.sides, victim.name)
    refuse_unknown(store)
    with folder_for_check(store) as folder, folder.open(State.STAGE) as stage, preserved_times(kernel, stage):
        try:
            staged = stage_new(folder, victim.name, make_victim_record(folder, victim, _method(store), options))
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS or not is_stocked(folder):
                raise
            _refuse_unmovable(kernel, victim)
            return result  # the reserve is kept for a swap
        with staged:
            try:
                # If a check is killed in a folder with a temporary name, no process would find the temporary permission
                # that it granted.
                if staged.held.record.lent_mode is None or not folder.name.startswith(NEW_PART):
                    result = result._replace(
                        unlike=tuple(format_differences(copy_metadata(staged, victim, options, visible)))
                    )
                _refuse_unmovable(kernel, victim)
                with suppress_errno(*NO_SPACE_ERRNOS):  # a swap needs no stand-ins
                    result = _try_rename(staged, victim, result)
            finally:
                unstage(staged, victim, visible)
    return result


def _try_rename(staged: Staged, victim: Victim, result: Preflight) -> Preflight:
    """Try the swap's renames with two empty directories: one in the container, one beside the victim.

    If the check is killed, recovery finds them by their names, and removes them. Raises  OSError
    """
    kernel, held, parent = staged.held.folder.store.kernel, staged.held, victim.parent.sides.fd
    assert staged.replacement is not None
    replacement_name, beside = Name(unfinished_name()), stand_in(held.id)
    extended = read_metadata(kernel, staged.replacement).extended
    with preserved_times(kernel, parent), ExitStack() as owned:
        owned.callback(drop_stand_in, kernel, parent, held.id)
        for place, name in ((held.fd, replacement_name), (parent, beside)):
            fd = owned.enter_context(make_private(kernel, place, name))
            # A rename may depend on the project id, but not on any other attribute.
            apply_metadata(kernel, fd, read_metadata(kernel, fd)._replace(extended=extended))
        if kernel.filesystem(victim.fd) == OVERLAY_MAGIC:
            kernel.mkdir(fd, INSIDE)
            check_overlay_rename(kernel, parent, victim.name, beside)
            kernel.rmdir(fd, INSIDE)
        if victim.parent.mount.fstype == MERGERFS:
            check_mergerfs_rename(victim.parent.root.fd, victim.fd, held.fd)
        if held.record.method is Method.EXCHANGE:
            with suppress_errno(*NO_EXCHANGE):
                kernel.exchange(held.fd, replacement_name, parent, beside)
                return result
        began_ns = time.monotonic_ns()
        kernel.rename(parent, beside, held.fd, unfinished_name())
        kernel.rename_free(held.fd, replacement_name, parent, beside)
        return result._replace(method=Method.TWO_RENAME.value, gap_ns=time.monotonic_ns() - began_ns)


def _refuse_unmovable(kernel: Kernel, victim: Victim) -> None:
    """Raise NotPermitted if modes or flags forbid moving the victim; OSError EROFS if the filesystem is read-only."""
    uid, parent_fd = os.geteuid(), victim.parent.sides.fd
    if kernel.is_read_only(victim.fd) or kernel.is_read_only(victim.parent.sides.names_fd()):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    parent, own = b"/proc/self/fd/%d" % parent_fd, b"/proc/self/fd/%d" % victim.fd
    if is_frozen(victim.fd) or is_frozen(parent_fd):
        raise to_user_error(PermissionError(errno.EPERM, os.strerror(errno.EPERM)), victim)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise NotPermitted(victim.path(), "you have no write permission on its parent directory")
    if victim.stat.st_uid != uid and not os.access(own, os.W_OK, effective_ids=True):
        raise NotPermitted(victim.path())
    above = os.stat(parent)
    if uid and above.st_mode & stat.S_ISVTX and uid not in (above.st_uid, victim.stat.st_uid):
        raise NotPermitted(
            victim.path(),
            "its parent directory has the sticky bit (like /tmp), and you own neither the path nor its parent",
        )
