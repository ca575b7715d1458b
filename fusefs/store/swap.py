"""Swap: a fresh directory in the victim's place by one exchange, the old tree an orphan.

rm: the name disappears by one rename into the store; files too, on every filesystem, restorable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from fusefs.core.errors import NotAlike, Refused, TakenOver, TrashdError, Unsettled
from fusefs.core.lifecycle import State
from fusefs.core.names import ContainerId, Name, RelPath
from fusefs.core.printable_names import printable
from fusefs.core.record import Method
from fusefs.linux.directory_metadata import (
    UNREADABLE,
    DirectoryMetadata,
    MetadataDifference,
    apply_likeness,
    differences,
    read_likeness,
)
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.container import HeldContainer, dissolve, flush, is_taken_over, move
from fusefs.store.keep_entries import KeptLinks, keep, withdraw
from fusefs.store.layout import FRESH, TREE, UserFolder
from fusefs.store.locate import Victim
from fusefs.store.stage import ATTEMPTS, Staged, SwapOptions, stage
from fusefs.store.victim_rename import NO_EXCHANGE, VisibleMove, VisibleRename, lend, take_back

Unlike = tuple[MetadataDifference, ...]
"""What of a victim's likeness its fresh directory could not be given."""


class Swapped(NamedTuple):
    """What a swap or a removal did.

    store     the user's folder that has it
    volume    the directory that holds the store, if that is not the root of the mount: commands need to be told
    gap_ns    how long the name was missing (two renames), 0 for an exchange, None for a removal
    unlike    what of the likeness could not be had
    warnings  what could not be finished after the exchange; the next command completes it
    kept      top entries that stay in view
    unnoted   why the caller's registry does not name that store, so that no service reaps there; empty if it does
    expires_ns  when it may be reaped, by the wall clock; None: never by itself
    """

    id: ContainerId
    path: bytes
    store: bytes
    method: Method
    gap_ns: int | None
    unlike: Unlike
    warnings: tuple[str, ...]
    volume: bytes | None = None
    kept: tuple[bytes, ...] = ()
    unnoted: str = ""
    expires_ns: int | None = None

    def base(self) -> bytes:
        """The directory that holds the store."""
        return base_of(self.store)


def base_of(folder: bytes) -> bytes:
    """The directory that holds the store of a user's folder, which is BASE/STORE/AREA/FOLDER."""
    return folder.rsplit(b"/", 3)[0] or b"/"


class Adopted(NamedTuple):
    """What became of a container that has its victim: its id, the user's folder that has it, and what went wrong."""

    id: ContainerId
    store: bytes
    warnings: tuple[str, ...] = ()


def adopt(held: HeldContainer) -> Adopted:
    """Make an orphan of it, in the folder where it is."""
    if held.folder.store.is_shared():
        from fusefs.store.recover import settle_late  # a local filesystem does each call once

        settle_late(held)
    move(held, State.ORPHANS)
    return Adopted(held.id, held.folder.path())


Adopt = Callable[[HeldContainer], Adopted]
"""What is done with a container that has its victim, before its lock goes."""


class ExchangeOutcome(Enum):
    """What an exchange turned out to have done."""

    DONE = "both are where they belong"
    NOTHING = "nothing moved, though the kernel said 0: this filesystem lies about the flag"
    RACED = "something else had the name at that moment"


def swap(
    folder: UserFolder,
    victim: Victim,
    relative: RelPath,
    options: SwapOptions,
    visible: VisibleRename,
    adopt: Adopt = adopt,
) -> Swapped:
    """Swap the victim into a user's folder of a store.

    relative  the victim's parent relative to the store's base
    visible   what does the renames at the victim's name
    Raises    OSError with EXDEV if this store can't take it: try the next one; other OSError, NotAlike, Refused:
              the victim is where it was; Unsettled: everything is kept, and the message says where
    """
    if folder.store.volume.exchange:
        swapped = _by_exchange(folder, victim, relative, options, visible, adopt)
        if swapped is not None:
            return swapped
    return _by_two_renames(folder, victim, relative, options, visible, adopt)


def _by_exchange(
    folder: UserFolder,
    victim: Victim,
    relative: RelPath,
    options: SwapOptions,
    visible: VisibleRename,
    adopt: Adopt,
    n_attempts: int = ATTEMPTS,
) -> Swapped | None:
    """None if the filesystem does not exchange after all; nothing has changed then."""
    with stage(folder, victim, relative, Method.EXCHANGE, options) as staged:
        try:
            unlike = make_alike(staged, victim, options, visible)
            keeping = _keep(staged, victim)
            visible.make(VisibleMove.EXCHANGE, staged.held)
        except (OSError, TrashdError) as error:
            # Not for a Ctrl-C, which may come when all is done already: recovery settles that.
            is_swept = isinstance(error, FileNotFoundError) and not _has_fresh(staged)
            undo(staged, victim, visible, error)
            if is_swept and n_attempts > 1:
                # A recovery that had found no record yet took the fresh directory when there was one: start again.
                return _by_exchange(folder, victim, relative, options, visible, adopt, n_attempts - 1)
            if isinstance(error, OSError) and error.errno in NO_EXCHANGE:
                return None
            raise
        match _judge(staged, victim, visible):
            case ExchangeOutcome.NOTHING:
                unstage(staged, victim, visible)
                return None
            case ExchangeOutcome.RACED:
                _undo_exchange(staged, victim, visible)
            case ExchangeOutcome.DONE:
                pass
        return finish(staged, victim, visible, unlike, 0, keeping, adopt)


def _keep(staged: Staged, victim: Victim) -> KeptLinks | None:
    """Link what stays in view into the fresh directory. Raises  NotKept, OSError"""
    if victim.staying is None:
        return None
    return keep(staged, victim)


def unstage(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    """Undo a staging whose victim never came: links, loan, prepared directory, record, container, in this order.

    Raises  OSError if it came after all (a kernel may say that a rename failed which it did): the container
            stays as it is then, and recovery decides
    """
    kernel = staged.held.folder.store.kernel
    if victim.staying is not None:
        withdraw(staged, victim)
    take_back(staged.held, victim.fd, staged.held.record.lent_mode, visible)
    for name in (TREE, FRESH):
        if staged.fresh is not None and kernel.is_named(staged.fresh, staged.held.fd, name):
            kernel.rmdir(staged.held.fd, name)
    dissolve(staged.held)


def undo(staged: Staged, victim: Victim, visible: VisibleRename, error: Exception) -> None:
    """`unstage` after an error. Who took the container over does what can't be done here any more."""
    try:
        unstage(staged, victim, visible)
    except OSError:
        if not is_taken_over(staged.held):
            raise
        raise TakenOver(staged.held.id) from error


def _check_ours(staged: Staged) -> None:
    """Raises  TakenOver if what is not found where we had it may be with another node"""
    if is_taken_over(staged.held):
        raise TakenOver(staged.held.id)


def _has_fresh(staged: Staged, name: Name = TREE) -> bool:
    assert staged.fresh is not None
    return staged.held.folder.store.kernel.is_named(staged.fresh, staged.held.fd, name)


def make_alike(staged: Staged, victim: Victim, options: SwapOptions, visible: VisibleRename) -> Unlike:
    """Give the staged fresh directory the victim's likeness, as `give_likeness`, by the loan that this may take."""
    kernel = staged.held.folder.store.kernel
    assert staged.fresh is not None
    lent = staged.held.record.lent_mode
    lend(staged.held, victim.fd, lent, visible)
    with kernel.open_dir(victim.fd) as readable:
        wanted = read_likeness(kernel, readable)
    return give_likeness(kernel, victim, staged.fresh, wanted, accepted=options.unlike)


def give_likeness(kernel: Kernel, victim: Victim, fresh: Fd, wanted: DirectoryMetadata, *, accepted: bool) -> Unlike:
    """Give a fresh directory the victim's likeness; what could not be had.

    Raises  NotAlike if that is anything, and not accepted; OSError ENOKEY, accepted or not, if it is encryption
    """
    apply_likeness(kernel, fresh, wanted)
    unlike = tuple(differences(wanted, read_likeness(kernel, fresh)))
    if unlike and not accepted:
        raise NotAlike(victim.path() + b": " + os.fsencode(", ".join(in_words(unlike))))
    return unlike


def in_words(unlike: Unlike) -> list[str]:
    """What could not be had, in words."""
    return [
        f"{one.what} {UNREADABLE if one.wanted == UNREADABLE else f'{one.got} instead of {one.wanted}'}"
        for one in unlike
    ]


def _judge(staged: Staged, victim: Victim, visible: VisibleRename) -> ExchangeOutcome:
    """Verify both sides by the fds held since before."""
    kernel = staged.held.folder.store.kernel
    assert staged.fresh is not None
    if kernel.is_named(victim.fd, staged.held.fd, TREE):
        # Whatever has the name now: the user may already have moved the fresh directory, rightly.
        return ExchangeOutcome.DONE
    fresh = kernel.fstat(staged.fresh)
    name_is_fresh = visible.found() == (fresh.st_dev, fresh.st_ino)
    if kernel.is_named(staged.fresh, staged.held.fd, TREE) and not name_is_fresh:
        return ExchangeOutcome.NOTHING
    return ExchangeOutcome.RACED


def _undo_exchange(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    """Give the name back to what had it, then raise; where that can't be done, keep all and say so."""
    _check_ours(staged)
    kernel = staged.held.folder.store.kernel
    assert staged.fresh is not None
    fresh = kernel.fstat(staged.fresh)
    where = printable(victim.path())
    if visible.found() == (fresh.st_dev, fresh.st_ino):
        visible.make(VisibleMove.EXCHANGE, staged.held)
        if kernel.is_named(staged.fresh, staged.held.fd, TREE):
            unstage(staged, victim, visible)
            raise Refused(where, "something else took its name at that moment; it was given back, try again")
    raise Unsettled(f"{where} was changed by somebody else during the exchange; see {staged.held.id} in stage/")


def finish(
    staged: Staged,
    victim: Victim,
    visible: VisibleRename,
    unlike: Unlike,
    gap_ns: int | None,
    keeping: KeptLinks | None = None,
    adopt: Adopt = adopt,
) -> Swapped:
    """After the victim came: bring what stays in view, take back loans, flush, adopt.

    Never undone; what fails is told and done later.
    """
    held = staged.held
    warnings = []
    adopted = Adopted(held.id, held.folder.path())
    try:
        if keeping is not None:
            warnings += [f"{held.id} has what was to be kept: {one}" for one in keeping.finish()]
        _take_back_both(staged, victim, visible)
        adopted = adopt(held)
        flush(held)
    except OSError as error:
        warnings.append(f"{error.strerror} after the exchange; the next trashd command on this volume completes it")
    method, kept = held.record.method, () if keeping is None else keeping.staying.names()
    told, ends_ns = (*warnings, *adopted.warnings), held.record.adopted_expires_ns()
    store = adopted.store
    return Swapped(adopted.id, victim.path(), store, method, gap_ns, unlike, told, kept=kept, expires_ns=ends_ns)


def _take_back_both(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    lent = staged.held.record.lent_mode
    if staged.fresh is not None:
        take_back(staged.held, staged.fresh, lent)
    take_back(staged.held, victim.fd, lent, visible)


def _by_two_renames(
    folder: UserFolder, victim: Victim, relative: RelPath, options: SwapOptions, visible: VisibleRename, adopt: Adopt
) -> Swapped:
    """Where there is no exchange: the name is missing between two renames, and the result says how long."""
    kernel = folder.store.kernel
    with stage(folder, victim, relative, Method.TWO_RENAME, options) as staged:
        try:
            unlike = make_alike(staged, victim, options, visible)
            keeping = _keep(staged, victim)
            began_ns = time.monotonic_ns()
            is_shared = folder.store.is_shared()
            gap_ns = visible.make(VisibleMove.REPLACE if is_shared else VisibleMove.ASIDE, staged.held)
        except (OSError, TrashdError) as error:
            undo(staged, victim, visible, error)
            raise
        if not kernel.is_named(victim.fd, staged.held.fd, TREE):
            give_back(staged, victim, visible)
        is_placed = (is_shared and not _has_fresh(staged, FRESH)) or _place(staged, victim, visible)
        gap_ns = gap_ns or time.monotonic_ns() - began_ns
        swapped = finish(staged, victim, visible, unlike, gap_ns, keeping if is_placed else None, adopt)
    if is_placed:
        return swapped
    kept = "" if keeping is None else ", with what was to be kept"
    told = f"something else took its name in the gap, and has it now; the old tree is {swapped.id}{kept}"
    return swapped._replace(warnings=(*swapped.warnings, told))


def _place(staged: Staged, victim: Victim, visible: VisibleRename) -> bool:
    """Put the fresh directory to the name; if that fails, the victim comes back and the error goes on.

    Returns  False if another process took the name in the gap; it has it now, the old tree an orphan like any other
    """
    kernel = staged.held.folder.store.kernel
    try:
        visible.make(VisibleMove.PLACE, staged.held)
    except FileExistsError:
        if victim.staying is not None:
            withdraw(staged, victim)
        kernel.rmdir(staged.held.fd, FRESH)
        return False
    except OSError as error:
        try:
            visible.make(VisibleMove.BACK, staged.held)
        except OSError:
            where = printable(victim.path())
            raise Unsettled(f"{where} is missing ({error.strerror}); its tree is {staged.held.id} in stage/") from error
        unstage(staged, victim, visible)
        raise
    return True


def give_back(staged: Staged, victim: Victim, visible: VisibleRename) -> None:
    """Put back what a rename aside caught instead of the victim, then raise."""
    _check_ours(staged)
    where = printable(victim.path())
    try:
        if staged.fresh is not None and not _has_fresh(staged, FRESH):  # it may have the name already
            visible.make(VisibleMove.ASIDE_FRESH, staged.held)
        visible.make(VisibleMove.BACK, staged.held)
    except OSError as error:
        raise Unsettled(f"{where}: something else had the name; it is kept as {staged.held.id} in stage/") from error
    unstage(staged, victim, visible)
    raise Refused(where, "something else took its name at that moment; it was given back, try again")


def remove(
    folder: UserFolder, victim: Victim, relative: RelPath, options: SwapOptions, visible: VisibleRename
) -> Swapped:
    """Move the victim into a user's folder of a store; arguments and errors as for `swap`."""
    kernel = folder.store.kernel
    with stage(folder, victim, relative, Method.REMOVED, options) as staged:
        try:
            lend(staged.held, victim.fd, staged.held.record.lent_mode, visible)
            visible.make(VisibleMove.ASIDE, staged.held)
        except (OSError, TrashdError) as error:
            undo(staged, victim, visible, error)
            raise
        if not kernel.is_named(victim.fd, staged.held.fd, TREE):
            give_back(staged, victim, visible)
        return finish(staged, victim, visible, (), None)
