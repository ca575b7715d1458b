"""Tidies a user's folder before it is read: recovers, adopts dropped trees, and fills the reserve.

Names that are refused as users' folders are reported; trashd neither changes nor repairs them.

A tree that is being moved into a drop folder through a mount is adopted by that move: with a container, a durable
record and one rename. The daemon makes this rename with the rights of the user who moves the tree, between
`make_ready_container` and `finish_move`, which run as the folder's user. If the process is killed in between, the tree
is where it was, or in a container that recovery adopts, as for `trashd rm`.

If root has replaced a store, the old store is inside the new one, where no user can move it. Each owner takes their own
folder out of it, with their own rights. Root takes nothing out, since it is unknown which users moved entries into the
old store, or moved it as a whole. So the users' next commands empty the old store. Orphans taken out of it have no
expiry: their place does not prove that their owners want them deleted, and only their owners may act on them.
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
"""The most names that are reported for one owner, because any user can make thousands."""
_OWNER_DOES = "its owner's next command here, such as trashd list, moves it to the new store"
_HINT = "inspect it, and move your own files out with mv; trashd does not touch it"


def find_refused_names(store: Store, uid: int | None = None) -> list[Finding]:
    """Return findings about the refused names of all users or of one, a few for each owner. Raises  OSError"""
    census = inspect_folders(store, uid)
    return to_findings(store.path(), [*census.refused, *census.unread, *waiting_folders(store, uid)])


def make_not_proven_error(folder: UserFolder) -> NotProven:
    """Return the error for a folder in which only its user may reap; its hint names a remedy, if there is one."""
    if folder.doubt not in ("", NOT_REGISTERED):
        return NotProven(folder.path())
    proves = f"trashd init {shell_word(folder.store.base_path)}"
    hint = f"its owner can restore or reap the orphans in it; after inspecting it, root can trust it with {proves}"
    return NotProven(folder.path(), hint)


def to_findings(store: bytes, refused: Iterable[FolderVerdict]) -> list[Finding]:
    """Return findings about the names that are refused in a store. store: the store's path"""
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
            f"{n_more:,} more names of {owner} are not used as users' directories",
            _HINT,
        )


def tidy_folder(folder: UserFolder, ended_boots: Collection[str] = (), waits: Wait | None = None) -> list[str]:
    """Tidy one user's folder, as that user; return problems as text. ended_boots, waits: as for `recover`"""
    problems = [*recover(folder, ended_boots, waits), *adopt_dropped(folder)]
    if is_used(folder):
        restock(folder)
    for store in lower_stores(folder):
        with store:
            problems += find_refused_names(store, folder.uid)
    return [format_finding(problem) for problem in problems]


def inspect_store(store: Store) -> None:
    """Register folders that users made in root's store, and remove old stores that they have emptied; needs root.

    On a full volume, this is done later; on a read-only volume, not at all.
    Raises  OSError
    """
    if store.is_ours_as_root():
        inspect_new_folders(store)
        discard_emptied(store)


def prepare_store(store: Store, lost: list[TrashdError]) -> None:
    """Prepare root's store: as root, call `inspect_store`; as another user, take the user's folder out of old stores.

    lost  receives the error if this could not be completed
    """
    try:
        inspect_store(store)
        if store.is_common() and os.geteuid() != 0 and not store.kernel.is_read_only(store.fd):
            take_own_from_old(store)
    except (OSError, TrashdError) as error:
        lost.append(from_os(error, store.base_path))


def format_finding(problem: Finding) -> str:
    return f"{problem.where}: {problem.what} ({problem.hint})"


class ReadyContainer(NamedTuple):
    """A container in stage/ that is waiting for its tree.

    target_fd  the directory into which the tree is to be renamed, as TREE: the container or, on shared filesystems, a
               transfer directory in it
    transfer   removes the transfer directory
    """

    held: HeldContainer
    target_fd: Fd
    transfer: ExitStack


def open_folder_of(kernel: Kernel, base_fd: Fd, store_name: Name, drop: Fd, owned: ExitStack) -> UserFolder:
    """Open the user's folder whose drop folder is `drop`; `owned` closes everything that is opened.

    base_fd  the directory that holds the store
    Raises   OSError; TrashdError unless `drop` is in a trusted store, and only its user can change it
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
    """Make the record for a tree that is about to be moved, without the container's ID.

    dir_fd, item  the tree's parent, and the tree itself
    origin        the tree's path relative to the directory that holds the store; None if it has none
    invocation    the process that moves the tree
    """
    kernel, method = folder.store.kernel, Method.DROPPED if origin is None else Method.REMOVED
    victim, parent = kernel.identify(item), kernel.identify(dir_fd)
    record = make_record(folder, method, origin, victim, parent)
    return record._replace(retention_s=DEFAULT_RETENTION_S, invocation=invocation)


def make_ready_container(folder: UserFolder, name: Name, record: Record) -> ReadyContainer:
    """Make a durable container with this record; the caller closes the result's `held`. name: the tree's name

    Raises  OSError; then nothing remains
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
    """Make an orphan of the tree that was moved in. If no tree was moved in, remove the container and return False.

    Recovery completes steps that fail here.
    item    the expected tree
    Raises  OSError if it can't be determined what was moved in
    """
    held = ready.held
    kernel = held.folder.store.kernel
    ready.transfer.close()
    identity = identify_at(kernel, held.fd, TREE)
    with suppress(OSError, TrashdError):
        if identity is None:
            dissolve(held)
        else:
            if not kernel.is_named(item, held.fd, TREE):  # another entry had the name, and was moved instead
                held = rewrite_record(held, held.record._replace(victim=identity))
            if held.folder.store.is_shared():
                settle_late(held)
            move_to_state(held, State.ORPHANS)
    return identity is not None


WAITS_FOR_OWNER = "its owner's next command moves it"
ROOTS_NAME_STAYS = "root's name proves nothing here, because the creator of the store could choose it"
_NOTE = "from a store that root replaced"
_BECOMES = {Name(State.REAPING.value.encode()): Name(State.QUARANTINE.value.encode())}
"""States that change when a container is moved: in `reaping/`, the next reaper would continue the removal."""
_STATES = frozenset(state.value.encode() for state in State)


def old_stores(store: Store) -> list[Name]:
    """Return the names of the old stores that were set aside in a store. Raises  OSError"""
    return [Name(name) for name in store.kernel.list_reopened(store.fd) if name.startswith(OLD)]


def waiting_folders(store: Store, only: int | None = None) -> list[FolderVerdict]:
    """Find folders in old stores that wait for their owners, of all users or of one. Raises  OSError"""
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
    """Move the caller's containers from old stores into the caller's folder in this store, one by one.

    This uses only the caller's own rights. Containers on which a process is working are left for the next time.
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
                with suppress(PermissionError):  # in root's area; root removes it when it is empty
                    remove_folder(old_folder, old_folder.store.fd)


@contextmanager
def _open_own_in_old(store: Store, old: Name, uid: int) -> Iterator[UserFolder | None]:
    """Open a user's folder in an old store, if only this user and root could change it; otherwise return None."""
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
    """Move one part of a folder's contents to another folder of the same user. Moved containers no longer expire."""
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
                with suppress(OSError, TrashdError):  # after an error, it stays and is reported
                    make_orphan(folder, source, Name(name), origin=None, retention_s=None, note=_NOTE)
            else:
                place = owned.enter_context(folder.open(_BECOMES.get(part, part)))
                kernel.rename_free(source, name, place, name)


def _remove_expiry(held: HeldContainer, folder: UserFolder) -> bool:
    """Remove the expiry of a container in an old store; return whether there was space. folder: its destination"""
    is_begun = held.record.partial or held.state is State.REAPING
    record = held.record._replace(retention_s=None, partial=is_begun)
    with suppress_errno(*NO_SPACE_ERRNOS):
        if record != held.record:
            call_with_room(folder, SPARE_FOR_USER, partial(rewrite_record, held, record))
        return True
    return False


def discard_emptied(store: Store) -> None:
    """Remove old stores from root's store if no user has any files in them; needs root.

    On a read-only volume, this is done later.
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
    """Remove users' empty folders in an area of an old store, using only rmdir. Raises  OSError"""
    with kernel.open_dir(store_fd, area) as area_fd:
        for name in (name for names in names_in(kernel, area_fd).values() for name in names):
            with suppress(OSError), kernel.open_beneath(area_fd, name, DIRECTORY) as fd:
                discard_folder(kernel, area_fd, name, fd)
