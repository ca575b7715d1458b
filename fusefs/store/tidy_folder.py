"""Tidy a user's folder before it is read: recover, adopt dropped trees, fill the reserve. Also adopt a move into drop/.

Names that are refused as users' folders are reported; trashd neither changes nor repairs them.

A tree that is being moved into a drop folder through a mount is adopted at once: a container with a durable record, one
rename, an orphan. The process that moves it makes the rename, with its user's own rights, between `make_ready` and
`finish`, which run as the folder's user. If it is killed in between, the tree is where it was, or in a container that
recovery adopts, as for `trashd rm`.

From a store that root set aside when taking over a volume, each owner takes their own folder out, with their own
rights. It is unknown which user moved what into such a store, or moved it as a whole. So root takes nothing out: the
old store lies in the new one, where no user can move it, and its users' next commands empty it. What they take out has
no expiry: its place does not prove that they wanted it deleted, and only they may act on it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import NamedTuple

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import BadRecord, NoStore, NotProven, TrashdError, from_os
from fusefs.core.names import ContainerId, Name, RelPath, is_container_id, join_path, parse_user_store_name
from fusefs.core.printable_names import printable, shell_word
from fusefs.core.record import Invocation, Method, Record
from fusefs.core.results import Finding
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.backing_and_mount import DIRECTORY, NO_SPACE_ERRNOS, READABLE, BackingAndMount, suppress_errno
from fusefs.store.container import ClaimLost, HeldContainer, dissolve, hold, move_to_state, rewrite_record
from fusefs.store.layout import (
    CACHEDIR_TAG,
    DROP,
    FOLDERS,
    LOCK,
    NEW,
    NODES,
    OLD,
    REAPER_LOCK,
    REGISTRY,
    RESERVE,
    TREE,
    UNMOUNT,
    USERS,
    VOLUME,
    Store,
    UserFolder,
    open_areas,
    open_store,
)
from fusefs.store.make_folder import discard_folder, inspect_new_folders, make_user_folder
from fusefs.store.recover import adopt_dropped, make_orphan, recover, settle_late
from fusefs.store.registry_lines import hint_for_unknown_maker
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room, is_used
from fusefs.store.silent_nodes import Wait
from fusefs.store.stage import identify_at, make_record, restock, stage_new
from fusefs.store.transfer_directory import transfer_directory
from fusefs.store.user_folders import (
    MOUNTED,
    NOT_MADE,
    NOT_REGISTERED,
    FolderVerdict,
    inspect_folders,
    lower_stores,
    names_in,
    open_user_folder,
)

_MOST_NAMED = 3
"""Limit of names reported for one owner, as any user can make thousands."""
_OWNER_DOES = "its owner's next command here, such as trashd list, moves it to the new store"
_HINT = "inspect it, and move your own files out with mv; trashd does not touch it"


def find_refused_names(store: Store, uid: int | None = None) -> list[Finding]:
    """The refused names of all users or of one, a few for each owner. Raises  OSError"""
    census = inspect_folders(store, uid)
    return to_findings(store.path(), [*census.refused, *census.unread, *waiting_folders(store, uid)])


def make_not_proven_error(folder: UserFolder) -> NotProven:
    """The error if only its user may reap in a folder, with a command that changes this if there is one."""
    if folder.doubt not in ("", NOT_REGISTERED):
        return NotProven(folder.path())
    proves = f"trashd init {shell_word(folder.store.base_path)}"
    hint = f"its owner can restore or reap the orphans in it; root can trust it after an inspection: {proves}"
    return NotProven(folder.path(), hint)


def to_findings(store: bytes, refused: Iterable[FolderVerdict]) -> list[Finding]:
    """Findings for the names that are refused in a store, which is given by its path."""
    by_owner = groupby(sorted(refused, key=_by_owner), key=_by_owner)
    return [problem for _owner, ones in by_owner for problem in _findings_of_owner(store, list(ones))]


def _by_owner(refusal: FolderVerdict) -> int:
    return -1 if refusal.owner is None else refusal.owner


def _findings_of_owner(store: bytes, refused: list[FolderVerdict]) -> Iterable[Finding]:
    base_path = os.path.dirname(store)
    refused.sort(key=lambda one: not one.is_used)
    hints = {
        NOT_REGISTERED: f"trashd init {shell_word(base_path)} registers it; inspect it first",
        NOT_MADE: hint_for_unknown_maker(base_path),
        WAITS_FOR_OWNER: _OWNER_DOES,
        MOUNTED: UNMOUNT,
    }
    for one in refused[:_MOST_NAMED]:
        hint = hints.get(MOUNTED if one.why.endswith(MOUNTED) else one.why, _HINT)
        yield Finding(printable(os.path.join(store, one.area, one.name)), one.describe(), hint)
    n_more = len(refused) - _MOST_NAMED
    if n_more > 0:
        owner = "an unknown owner" if refused[0].owner is None else f"uid {refused[0].owner}"
        yield Finding(
            printable(os.path.join(store, refused[0].area)),
            f"{n_more:,} more names of {owner} are not used as directories of users",
            _HINT,
        )


def tidy_folder(folder: UserFolder, ended_boots: Collection[str] = (), waits: Wait | None = None) -> list[str]:
    """Tend one user's folder, as that user; return the problems as text. ended, waits: as for `recover`"""
    problems = [*recover(folder, ended_boots, waits), *adopt_dropped(folder)]
    if is_used(folder):
        restock(folder)
    for store in lower_stores(folder):
        with store:
            problems += find_refused_names(store, folder.uid)
    return [format_finding(problem) for problem in problems]


def inspect_store(store: Store) -> None:
    """Register folders that users made in root's store, and remove old stores that they emptied; needs root.

    On a full volume that is done later, on a read-only one not at all.
    Raises  OSError
    """
    if store.is_ours_as_root():
        inspect_new_folders(store)
        discard_emptied(store)


def prepare_store(store: Store, lost: list[TrashdError]) -> None:
    """Prepare root's store: as root, `look_over` it; as another user, take the user's folder out of old stores in it.

    lost  gets the error if that could not be completed
    """
    try:
        inspect_store(store)
        if store.is_common() and os.geteuid() != 0 and not store.kernel.is_read_only(store.fd):
            take_own_from_old(store)
    except (OSError, TrashdError) as error:
        lost.append(from_os(error, store.base_path))


def format_finding(problem: Finding) -> str:
    """Format a finding in one line."""
    return f"{problem.where}: {problem.what} ({problem.hint})"


class ReadyContainer(NamedTuple):
    """A container in stage/ that waits for its tree.

    target_fd  the directory into which the tree is renamed, as TREE: the container or, on shared filesystems, a
           transfer directory in it
    transfer  removes that transfer directory
    """

    held: HeldContainer
    target_fd: Fd
    transfer: ExitStack


def open_folder_of(kernel: Kernel, base_fd: Fd, store_name: Name, drop: Fd, owned: ExitStack) -> UserFolder:
    """Open the user's folder whose drop folder is `drop`; `owned` closes what this opens.

    base_fd  the directory that holds the store
    Raises   OSError; TrashdError if it is no drop folder of a trusted store, or not that user's only
    """
    uid, whose = kernel.fstat(drop).st_uid, parse_user_store_name(store_name)
    base = BackingAndMount(kernel.open_beneath(base_fd, b".", DIRECTORY))
    store = open_store(kernel, base, b"", store_name, of=whose)
    if store is None:
        raise NoStore(store_name)
    owned.enter_context(store)
    folder = open_user_folder(store, uid)
    if folder is None:
        raise NoStore(store_name)
    owned.enter_context(folder)
    if whose not in (None, uid) or os.geteuid() not in (0, uid) or not kernel.is_named(drop, folder.fd, DROP):
        raise NoStore(store_name)
    return folder


def make_move_record(
    folder: UserFolder, dir_fd: Fd, item: Fd, origin: RelPath | None, invocation: Invocation | None
) -> Record:
    """The record of a tree that is about to be moved, without its container's id.

    dir_fd, item  its parent, and the tree itself
    origin        its path, relative to the directory that holds the store; None: it has none
    invocation    the process that moves it
    """
    kernel, method = folder.store.kernel, Method.DROPPED if origin is None else Method.REMOVED
    victim, parent = kernel.identify(item), kernel.identify(dir_fd)
    record = make_record(folder, method, origin, victim, parent)
    return record._replace(retention_s=DEFAULT_RETENTION_S, invocation=invocation)


def make_ready_container(folder: UserFolder, name: Name, record: Record) -> ReadyContainer:
    """Make a container with that record, durable; closing `held` closes it. name: of the tree

    Raises  OSError; nothing is left behind then
    """
    held = stage_new(folder, name, record).held
    transfer, target_fd = ExitStack(), held.fd
    if folder.store.is_shared():
        try:
            target_fd = transfer.enter_context(transfer_directory(folder.store.kernel, held.fd))
        except BaseException:
            with held:
                dissolve(held)
            raise
    return ReadyContainer(held, target_fd, transfer)


def finish_move(ready: ReadyContainer, item: Fd) -> bool:
    """Make an orphan of the tree that came; return False, and remove the container, if none came.

    Recovery completes what fails here.
    item    the expected tree
    Raises  OSError if it can't be determined what came
    """
    held = ready.held
    kernel = held.folder.store.kernel
    ready.transfer.close()
    identity = identify_at(kernel, held.fd, TREE)
    with suppress(OSError, TrashdError):
        if identity is None:
            dissolve(held)
        else:
            if not kernel.is_named(item, held.fd, TREE):  # another entry had the name, and the user moved that one
                held = rewrite_record(held, held.record._replace(victim=identity))
            if held.folder.store.is_shared():
                settle_late(held)
            move_to_state(held, State.ORPHANS)
    return identity is not None


WAITS_FOR_OWNER = "it is moved by its owner's next command"
ROOTS_NAME_STAYS = "the name of root proves nothing here: the creator of the store could choose it"
_NOTE = "from a store that root replaced"
_BECOMES = {Name(State.REAPING.value.encode()): Name(State.QUARANTINE.value.encode())}
"""States that change on the way: in `reaping/` the next reaper would continue."""
_STATES = frozenset(state.value.encode() for state in State)


def old_stores(store: Store) -> list[Name]:
    """The stores that were set aside in a store. Raises  OSError"""
    return [Name(name) for name in store.kernel.list_reopened(store.fd) if name.startswith(OLD)]


def waiting_folders(store: Store, only: int | None = None) -> list[FolderVerdict]:
    """The folders in them that wait for their owners, of all users or of one. Raises  OSError"""
    kernel, folders = store.kernel, list[FolderVerdict]()
    for old in old_stores(store):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), ExitStack() as owned:
            fd = owned.enter_context(kernel.open_beneath(store.fd, old, READABLE))
            areas = owned.enter_context(open_areas(kernel, fd))
            for area, area_fd in areas.all():
                for uid, names in names_in(kernel, area_fd).items():
                    if only not in (None, uid):
                        continue
                    why = WAITS_FOR_OWNER if uid else ROOTS_NAME_STAYS
                    folders += [FolderVerdict(Name(join_path(old, area)), name, uid, None, why) for name in names]
    return folders


def take_own_from_old(store: Store) -> None:
    """Move the caller's containers from old stores into their folder of this one, with their own rights, one by one.

    Containers that a process works on are left for the next time.
    Raises  OSError
    """
    uid = os.geteuid()
    olds = old_stores(store) if uid else []
    if not olds:
        return
    from fusefs.store.make_store import remove_folder  # late: few stores have old ones

    for old in olds:
        with _open_own_in_old(store, old, uid) as old_folder:
            if old_folder is not None:
                with open_user_folder(store, uid) or make_user_folder(store) as folder:
                    for part in FOLDERS:
                        if part != RESERVE:
                            _move_part(old_folder, part, folder)
                with suppress(PermissionError):  # root's area: root removes it when it is empty
                    remove_folder(old_folder, old_folder.store.fd)


@contextmanager
def _open_own_in_old(store: Store, old: Name, uid: int) -> Iterator[UserFolder | None]:
    """A user's folder in an old store that only that user and root could change; None if there is none."""
    kernel = store.kernel
    with ExitStack() as owned:
        old_folder = None
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            fd = owned.enter_context(kernel.open_beneath(store.fd, old, READABLE))
            areas = owned.enter_context(open_areas(kernel, fd))
            owners = {kernel.fstat(one).st_uid for one in (fd, *(area for _name, area in areas.all()))}
            if owners <= {0, uid}:
                old_folder = open_user_folder(store._replace(areas=areas), uid)
        if old_folder is None:
            yield None
            return
        owned.enter_context(old_folder.fd)
        inner = store._replace(fd=dict(areas.all())[old_folder.area])  # its fd is used to open folders only
        yield UserFolder(
            inner, uid, Name(join_path(old, old_folder.area)), old_folder.name, old_folder.fd, is_proven=False
        )


def _move_part(old: UserFolder, part: Name, folder: UserFolder) -> None:
    """Move the contents of one part of a folder to another folder of the same user; the containers no longer expire."""
    kernel = folder.store.kernel
    for name in old.list(part):
        with ExitStack() as owned, suppress(FileNotFoundError, FileExistsError):
            if is_container_id(text := name.decode("ascii", "replace")) and part in _STATES:
                with suppress(BadRecord):
                    held = hold(old, State(part.decode()), ContainerId(text))
                    if held is ClaimLost.BUSY:
                        continue
                    if not isinstance(held, ClaimLost):
                        owned.enter_context(held)
                        if not _remove_expiry(held, folder):
                            continue
            source = owned.enter_context(kernel.open_dir(old.fd, part))
            if part == DROP:
                with suppress(OSError, TrashdError):  # on an error it stays, and is reported
                    make_orphan(folder, source, Name(name), origin=None, retention_s=None, note=_NOTE)
            else:
                place = owned.enter_context(folder.open(_BECOMES.get(part, part)))
                kernel.rename_free(source, name, place, name)


def _remove_expiry(held: HeldContainer, folder: UserFolder) -> bool:
    """Remove the expiry of a container in an old store; return whether there was space to record that.

    folder  its destination
    """
    is_begun = held.record.partial or held.state is State.REAPING
    record = held.record._replace(retention_s=None, partial=is_begun)
    with suppress_errno(*NO_SPACE_ERRNOS):
        if record != held.record:
            call_with_room(folder, SPARE_FOR_USER, partial(rewrite_record, held, record))
        return True
    return False


def discard_emptied(store: Store) -> None:
    """Remove the old stores in root's store that no user has anything in, as far as they are ours; needs root.

    On a read-only volume that is done later.
    Raises  OSError
    """
    if not store.is_ours_as_root() or store.has_unknown_maker() or store.kernel.is_read_only(store.fd):
        return
    kernel, olds = store.kernel, old_stores(store)
    if not olds:
        return
    from fusefs.core.node_heartbeats import is_heartbeat_name  # late: few stores have old ones

    for old in olds:
        with suppress(OSError), kernel.open_dir(store.fd, old) as fd:
            for area in (USERS, NEW):
                with suppress(FileNotFoundError):
                    _discard_folders(kernel, fd, area)
                    kernel.rmdir(fd, area)
            with suppress(FileNotFoundError), kernel.open_dir(fd, REGISTRY) as registry:
                for name in kernel.list(registry):
                    kernel.unlink(registry, name)
            with suppress(FileNotFoundError), kernel.open_dir(fd, NODES) as nodes:
                for name in filter(is_heartbeat_name, kernel.list(nodes)):
                    kernel.unlink(nodes, name)
            for directory in (REGISTRY, NODES):
                with suppress(FileNotFoundError):
                    kernel.rmdir(fd, directory)
            for file in (VOLUME, CACHEDIR_TAG, LOCK, REAPER_LOCK):
                with suppress(FileNotFoundError):
                    kernel.unlink(fd, file)
            kernel.rmdir(store.fd, old)


def _discard_folders(kernel: Kernel, store_fd: Fd, area: Name) -> None:
    """Remove the empty users' folders in an area of an old store, only by rmdir. Raises  OSError"""
    with kernel.open_dir(store_fd, area) as area_fd:
        for name in (name for names in names_in(kernel, area_fd).values() for name in names):
            with suppress(OSError), kernel.open_beneath(area_fd, name, DIRECTORY) as fd:
                discard_folder(kernel, area_fd, name, fd)
