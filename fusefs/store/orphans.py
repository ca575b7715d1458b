"""Lists and finds orphans in all stores that the caller may see, from their records, and changes their retention.

Each record is read by a process of its owner. The origin in a record is only its owner's claim, so the owner must be
checked before the origin is used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from fusefs.core.container_states import DEFAULT_RETENTION_S, State
from fusefs.core.errors import (
    SETTLE,
    BadRecord,
    BrokenStore,
    Busy,
    Incomplete,
    NotFound,
    Refused,
    TakenOver,
    TrashdError,
    Untrusted,
    UsageError,
    from_os,
)
from fusefs.core.human_units import DURATION_MAX_S
from fusefs.core.names import ContainerId, Name, is_container_id, join_path, parse_user_store_name
from fusefs.core.orphan_age import Clock, Now
from fusefs.core.orphan_sums import KeyedSum, OrphanSums, OrphanToSum
from fusefs.core.printable_names import printable, printable_text, shell_word
from fusefs.core.record import RECORD_MAX_BYTES, Failure, Invocation, Method, Record, TreeSize
from fusefs.core.record_decoding import decode_record
from fusefs.core.results import EXPLANATIONS, Finding
from fusefs.linux.batched_calls import read_more, read_small_files
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import flock_holders
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import read_now
from fusefs.linux.mountinfo import Mount, is_inside, read_mounts, relative_to
from fusefs.store.as_owner import call_as_owner, give_unfinished_to_heirs
from fusefs.store.container import (
    ClaimLost,
    HeldContainer,
    hold_soon,
    move_to_state,
    open_record,
    read_fs_clock_ns,
    rewrite_record,
)
from fusefs.store.find_stores import discover_stores, folders_for_caller, with_lower_folders
from fusefs.store.layout import POINTERS, RECORD, TREE, USERS, Store, UserFolder, open_store
from fusefs.store.mounted_paths import open_both_sides
from fusefs.store.reserve import SPARE_FOR_USER, call_with_room
from fusefs.store.silent_nodes import Wait
from fusefs.store.take_over import take_over
from fusefs.store.tidy_folder import (
    format_finding,
    make_not_proven_error,
    prepare_store,
    tidy_folder,
    to_findings,
    waiting_folders,
)
from fusefs.store.user_folders import FolderCensus, is_vouched, lower_stores
from fusefs.store.victim_rename import DirectRename, VisibleRename, end_temporary_permission


class ListedContainer(NamedTuple):
    """One container in a listing.

    path        the container's directory
    origin      the tree's full original path; None for a dropped tree
    problem     why the record can't be read; then the other fields are empty
    failures    the reasons why the container is in quarantine, as many as fit into the record; `n_failed` is their
                number
    partial     the reaper has begun to delete the tree
    is_stopped  the reaper has begun, and no process is working on it now; False if other hosts may have locks
    expires_ns  by the present wall clock; None: never
    clock_set_ns  how far the wall clock was set forward since the removal
    is_proven   whether its folder is proven; otherwise only its user reaps it
    is_vouched  whether its store is known not to be a copy; otherwise it is reaped only by ID
    invocation  the command that created the container; None: unknown
    size        the tree's size, as far as it is known; None once a reaper has begun
    """

    id: ContainerId
    uid: int
    state: State
    path: bytes
    origin: bytes | None = None
    method: Method | None = None
    created_ns: int = 0
    expires_ns: int | None = None
    note: str = ""
    partial: bool = False
    n_failed: int = 0
    problem: str = ""
    failures: tuple[Failure, ...] = ()
    clock_set_ns: int = 0
    is_proven: bool = True
    is_vouched: bool = True
    is_stopped: bool = False
    invocation: Invocation | None = None
    size: TreeSize | None = None

    def base_path(self) -> bytes:
        return os.path.dirname(self.store_path())

    def store_path(self) -> bytes:
        return self.path.rsplit(b"/", 4)[0]  # STORE/AREA/FOLDER/STATE/ID

    def remaining_s(self, now_ns: int) -> int | None:
        """Return the seconds until the orphan expires, negative if it has expired, or None if it never expires."""
        return None if self.expires_ns is None else (self.expires_ns - now_ns) // 1_000_000_000

    def age_s(self, now_ns: int) -> int:
        """Return the seconds since the tree was moved into the store."""
        return (now_ns - self.created_ns - self.clock_set_ns) // 1_000_000_000

    def may_be_reaped_by(self, uid: int) -> bool:
        """Return whether a process of this user may reap the orphan without being given its ID, as in `UserFolder`."""
        return self.is_proven or self.uid == uid != 0


def list_containers(folder: UserFolder, now: Now) -> Iterator[ListedContainer]:
    """List the containers of one user in all states, the oldest of each state first; to be run as that user."""
    vouched = is_vouched(folder.store)
    for state in State:
        names = folder.list(state)
        if not names:
            continue
        with folder.open(state) as state_fd:
            yield from _read_entries(folder, state, state_fd, names, now, is_vouched=vouched)


def scan_containers(folder: UserFolder, now: Now) -> Iterator[ListedContainer]:
    """List a folder's containers like `list_containers`, but in bounded memory, unsorted, and without `is_vouched`.

    A container whose state changes in the meantime may be listed twice.
    """
    kernel = folder.store.kernel
    for state in State:
        try:
            state_fd = kernel.open_dir(folder.fd, Name(state.value.encode()))
        except FileNotFoundError:
            continue
        with state_fd:
            while (block := read_more(kernel, state_fd)) is not None:
                yield from _read_entries(folder, state, state_fd, map(os.fsencode, block.names), now)


_READ_AT_ONCE = 200
"""The number of records in memory at a time; each may take 64 KiB."""


def _read_entries(
    folder: UserFolder, state: State, state_fd: Fd, names: Iterable[bytes], now: Now, *, is_vouched: bool = True
) -> Iterator[ListedContainer]:
    """List the containers among the names in a state's directory, except those that have been moved away."""
    directory = folder.path_to(state, b"")
    containers = [one for name in names if is_container_id(one := name.decode("ascii", "replace"))]
    for first in range(0, len(containers), _READ_AT_ONCE):
        some = containers[first : first + _READ_AT_ONCE]
        texts: list[bytes | None] = [None] * len(some)
        if state is not State.REAPING:  # in reaping/, each record's lock must be checked, too
            texts = read_small_files(folder.store.kernel, state_fd, some, RECORD, folder.uid, RECORD_MAX_BYTES)
        for container, text in zip(some, texts, strict=True):
            name = container.encode()
            path = directory + b"/" + name
            try:
                is_stopped = False
                if text is None:
                    text, is_stopped = _read_closely(folder, state, state_fd, name)
                record = decode_record(text)
            except FileNotFoundError:
                continue  # moved away, or not complete yet
            except (BadRecord, OSError) as error:
                problem = error.message() if isinstance(error, BadRecord) else str(error.strerror)
                yield make_unreadable_entry(folder, state, name, problem, is_vouched=is_vouched)
            else:
                identifier = ContainerId(container)
                yield _entry(folder, state, path, identifier, record, now, is_stopped=is_stopped, is_vouched=is_vouched)


def _read_closely(folder: UserFolder, state: State, state_fd: Fd, name: bytes) -> tuple[bytes, bool]:
    """Return a record, and whether a reaper began to delete its container but stopped. Raises  BadRecord, OSError"""
    kernel = folder.store.kernel
    with kernel.open_dir(state_fd, name) as fd, open_record(kernel, fd, folder.uid) as record_fd:
        text = kernel.read(record_fd, RECORD_MAX_BYTES + 1)
        is_stopped = state is State.REAPING and kernel.is_local(record_fd)
        # This does not take the lock, not even for a moment.
        return text, is_stopped and not flock_holders(kernel.fstat(record_fd))


def _entry(
    folder: UserFolder, state: State, path: bytes, container: ContainerId, record: Record, now: Now,
    *, is_stopped: bool, is_vouched: bool,
) -> ListedContainer:  # fmt: skip
    base, expires_ns, set_ns = folder.store.base_path, record.expires_ns(), record.clock_set_ns(now)
    return ListedContainer(
        id=container,
        uid=folder.uid,
        state=state,
        path=path,
        origin=None if record.origin is None else os.path.join(base, record.origin) if record.origin else base,
        method=record.method,
        created_ns=record.created_ns,
        expires_ns=None if expires_ns is None else expires_ns + set_ns,
        note=record.note,
        partial=record.partial or state is State.REAPING,
        n_failed=len(record.failures),
        failures=record.failures,
        clock_set_ns=set_ns,
        is_proven=folder.is_proven,
        is_vouched=is_vouched,
        is_stopped=is_stopped,
        invocation=record.invocation,
        size=None if record.partial or state is State.REAPING else record.size,
    )


def make_unreadable_entry(
    folder: UserFolder, state: State, name: bytes, problem: str, *, is_vouched: bool = True
) -> ListedContainer:
    """Return an entry for a name in a state's directory whose record can't be read, or was not read."""
    return ListedContainer(
        ContainerId(printable(name)), folder.uid, state, folder.path_to(state, name), problem=problem,
        is_proven=folder.is_proven, is_vouched=is_vouched,
    )  # fmt: skip


def explain_failure(failure: Failure) -> str:
    """Describe a reason for quarantine. A user may have written the record, with any number and any text."""
    if failure.call in EXPLANATIONS:
        return f"{printable(failure.name)}: {EXPLANATIONS[failure.call]}"
    is_known = failure.errno in errno.errorcode
    reason = os.strerror(failure.errno) if is_known else f"error {failure.errno}"
    return f"{printable_text(failure.call)} {printable(failure.name or b'.')}: {reason}"


def explain_first(failure: Failure | None, n_failed: int) -> str:
    """Describe the first failure of a removal and the number of other failures; return "" if there is none."""
    if failure is None:
        return ""
    why = explain_failure(failure)
    return why if n_failed == 1 else f"{why}, and {n_failed - 1:,} more"


ID_LEAST_CHARS = 4
"""The minimum length of an abbreviated ID. Without a minimum, an empty variable in a script would match any orphan."""
_MOST_LISTED = 100_000
"""The maximum number of orphans listed for another user: this many take some hundred megabytes in each process."""
T = TypeVar("T")


def call_in_each_folder(
    stores: Iterable[Store],
    body: Callable[[UserFolder], T],
    result_type: Any,
    lost: list[TrashdError] | None = None,
    refused: list[Finding] | None = None,
    serves: Callable[[UserFolder], bool] | None = None,
) -> Iterator[T]:
    """Call `body` for each user's folder, including those in lower stores, in a process of the folder's owner.

    stores   the stores, which are closed one after another
    lost     gets the errors for folders and stores that could not be read, so that one such error does not stop the
             command; also BrokenStore, after which `discover_stores` ends
    refused  gets findings about entries that look like folders but are refused, and about folders that wait for their
             owners in an old store
    serves   whether to include a folder; None: include all
    Raises   without `lost`: the first such error, after all folders are done
    """
    errors: list[TrashdError] = [] if lost is None else lost
    for store in _but_the_broken(stores, errors):
        census = FolderCensus({}, [], [])
        with store:
            try:
                for folder in folders_for_caller(store, census):
                    with folder:
                        if serves is not None and not serves(folder):
                            continue
                        try:
                            results = call_as_owner(folder, partial(_call_with_lower, folder, body), list[result_type])
                        except (OSError, TrashdError) as error:
                            errors.append(from_os(error, folder.path()))
                        else:
                            yield from results
                if refused is not None and store.is_common():
                    census.refused.extend(waiting_folders(store, os.geteuid() or None))
            except OSError as error:
                errors.append(from_os(error, store.base_path))
        for one in census.unread:
            where = os.path.join(store.path(), one.area, one.name)
            errors.append(
                Incomplete(
                    f"{printable(where)}: {one.why}",
                    "its owner can inspect it; the command processed all other directories",
                )
            )
        if refused is not None:
            refused += to_findings(store.path(), census.refused)
    if lost is None and errors:
        raise errors[0]


def _but_the_broken(stores: Iterable[Store], errors: list[TrashdError]) -> Iterator[Store]:
    try:
        yield from stores
    except BrokenStore as error:
        errors.append(error)


def _call_with_lower(folder: UserFolder, body: Callable[[UserFolder], T], _visible: VisibleRename | None) -> list[T]:
    return [body(one) for one in with_lower_folders(folder)]


def list_all_containers(
    kernel: Kernel,
    volumes: Sequence[bytes],
    lost: list[TrashdError] | None = None,
    clocks: tuple[Clock, ...] = (),
    silent: list[bytes] | None = None,
) -> list[ListedContainer]:
    """List the containers in all folders, the oldest first.

    A store that can be reached by two paths is listed once. A container that changes its state in the meantime is
    listed once, in its later state.
    clocks        saved histories of the wall clock
    lost, Raises  as for `call_in_each_folder`
    silent        as for `discover_stores`
    """
    listing = _FolderListing(read_now(kernel, clocks))
    entry_by_place = {
        (entry.path.rsplit(b"/", 2)[0], entry.id): entry
        for part in call_in_each_folder(
            discover_stores(kernel, volumes, silent), listing.list_folder, list[ListedContainer], lost
        )
        for entry in part
    }
    return sorted(entry_by_place.values(), key=lambda entry: entry.id)


class _FolderListing:
    """Lists folders, but limits the number of another user's orphans in all stores, so that the reply is not too large.

    Each user's process has its own copy of this object, so the limit applies to each user.
    """

    def __init__(self, now: Now) -> None:
        self._now = now
        self._caller_uid = os.geteuid()
        self._n_allowed = _MOST_LISTED

    def list_folder(self, folder: UserFolder) -> list[ListedContainer]:
        """List the containers in a folder. Raises  Incomplete"""
        if folder.uid == self._caller_uid:
            return list(list_containers(folder, self._now))
        listed = list(islice(list_containers(folder, self._now), self._n_allowed + 1))
        self._n_allowed -= len(listed)
        if self._n_allowed < 0:
            text = f"{printable(folder.path())}: more than {_MOST_LISTED:,} orphans of one user"
            raise Incomplete(text, "their owner can list them; trashd list --sum-by user shows how many there are")
        return listed


class _FolderSums(NamedTuple):
    path: bytes
    sums: list[KeyedSum]


def sum_orphans(
    kernel: Kernel,
    volumes: Sequence[bytes],
    new_sums: Callable[[], OrphanSums],
    is_counted: Callable[[ListedContainer, int], bool],
    lost: list[TrashdError] | None = None,
    clocks: tuple[Clock, ...] = (),
) -> OrphanSums:
    """Sum up orphans from their records alone, in bounded memory; an orphan whose state changes may be counted twice.

    is_counted  whether an orphan counts at a wall-clock time
    lost, clocks, Raises  as for `list_all_containers`
    """
    now = read_now(kernel, clocks)

    def in_folder(folder: UserFolder) -> _FolderSums:
        sums = new_sums()
        for entry in scan_containers(folder, now):
            if is_counted(entry, now.wall_ns):
                age_s, remaining_s = (
                    (None, None) if entry.problem else (entry.age_s(now.wall_ns), entry.remaining_s(now.wall_ns))
                )
                sums.add(OrphanToSum(entry.uid, folder.store.base_path, entry.origin, age_s, remaining_s, entry.size))
        return _FolderSums(folder.path(), list(sums))

    total, folder_paths = new_sums(), set[bytes]()
    for one in call_in_each_folder(discover_stores(kernel, volumes), in_folder, _FolderSums, lost):
        if one.path not in folder_paths:
            folder_paths.add(one.path)
            total.add_sums(one.sums)
    return total


def tidy_all_folders(
    kernel: Kernel, volumes: Sequence[bytes], ended_boots: Collection[str] = (), waits: Wait | None = None
) -> list[str]:
    """Tidy all folders that the caller may see; return the problems as text.

    A broken store is not reported here, since the caller's next step can't read it either and reports it.
    ended_boots, waits  as for `recover`
    """
    lost: list[TrashdError] = []
    refused: list[Finding] = []
    silent: list[bytes] = []
    stores = (_prepared(store, lost) for store in discover_stores(kernel, volumes, silent))

    caller_uid = os.geteuid()

    def tidy(folder: UserFolder) -> list[str]:
        if not _may_be_tidied(folder, caller_uid):
            return []  # the folder is in a lower store
        return [*tidy_folder(folder, ended_boots, waits), *give_unfinished_to_heirs(folder)]

    settled = [
        line
        for part in call_in_each_folder(
            stores, tidy, list[str], lost, refused, lambda one: _may_be_tidied(one, caller_uid)
        )
        for line in part
    ]
    passed_over = (f"{printable(path)} does not respond, and was skipped" for path in dict.fromkeys(silent))
    errors = (f"{error.message()} ({error.hint})" for error in lost if not isinstance(error, BrokenStore))
    return [*settled, *errors, *map(format_finding, refused), *passed_over]


def _prepared(store: Store, lost: list[TrashdError]) -> Store:
    """Prepare a store, and the lower stores to which its folders point, as far as the caller may see them.

    lost  gets the errors: one user must not prevent root from inspecting other users' folders
    """
    prepare_store(store, lost)
    with suppress(OSError):  # the next step that reads the folders reports it
        for folder in folders_for_caller(store):
            with folder:
                try:
                    _prepare_lower(folder, lost)
                except (OSError, TrashdError) as error:
                    lost.append(from_os(error, folder.path()))
    return store


def _prepare_lower(folder: UserFolder, lost: list[TrashdError]) -> None:
    if folder.list(POINTERS):
        for path in call_as_owner(folder, partial(_lower_paths, folder), list[bytes]):
            with suppress(Untrusted):  # only its owner's commands use it
                lower = _open_store_beneath(folder.store, path)
                if lower is not None:
                    with lower:
                        prepare_store(lower, lost)


def _lower_paths(folder: UserFolder, _visible: VisibleRename | None) -> list[bytes]:
    paths = []
    for store in lower_stores(folder):
        with store:
            paths.append(store.path())
    return paths


def _may_be_tidied(folder: UserFolder, caller_uid: int) -> bool:
    """Return whether recovery, which moves paths that records name, may act on a folder at this caller's request.

    This includes folders in a copy of a store, since only the store's owner can have put the contents of `u/` there.
    """
    is_in_u = folder.area == USERS and not folder.store.has_unknown_maker()
    return is_in_u or folder.may_be_reaped_by(caller_uid)


def find_container(kernel: Kernel, volumes: Sequence[bytes], identifier: str) -> ListedContainer:
    return find_containers(kernel, volumes, [identifier])[0]


def find_containers(
    kernel: Kernel, volumes: Sequence[bytes], identifiers: Sequence[str], clocks: tuple[Clock, ...] = ()
) -> list[ListedContainer]:
    """Find the container for each ID, which may be abbreviated to its beginning or end; the stores are read once.

    clocks  saved histories of the wall clock
    Raises  NotFound; UsageError if several match or the abbreviation is too short
    """
    for identifier in identifiers:
        if len(identifier) < ID_LEAST_CHARS:
            raise UsageError(
                f"'{printable(os.fsencode(identifier))}' is too short for an ID",
                f"give at least {ID_LEAST_CHARS} characters of the ID",
            )
    lost: list[TrashdError] = []
    silent: list[bytes] = []
    listed = list_all_containers(kernel, volumes, lost, clocks, silent)
    containers = []
    for identifier in identifiers:
        match = match_id(volumes, identifier, listed)
        if match is None:
            raise lost[0] if lost else NotFound(os.fsencode(identifier), hint_for_silent(silent))
        containers.append(match)
    return containers


def match_id(volumes: Sequence[bytes], identifier: str, listed: Sequence[ListedContainer]) -> ListedContainer | None:
    """Return the listed container with an ID, or with its beginning or end. Raises  UsageError if several match"""
    exact = [entry for entry in listed if entry.id == identifier]
    matches = exact or [e for e in listed if e.id.startswith(identifier) or e.id.endswith(identifier)]
    if not matches:
        return None
    if len({entry.id for entry in matches}) > 1:
        raise UsageError(
            f"{identifier} is ambiguous: it could be {matches[0].id} or {matches[1].id}",
            "give more characters of the ID",
        )
    return matches[0] if len(matches) == 1 else _choose_copy(volumes, matches)


def hint_for_silent(silent: Sequence[bytes]) -> str:
    """Return a hint for a user whose orphan was not found, if some mount points did not respond."""
    return f"it may be on {', '.join(map(printable, silent))}, which does not respond" if silent else ""


def _choose_copy(volumes: Sequence[bytes], matches: Sequence[ListedContainer]) -> ListedContainer:
    """Choose among containers with the same ID in copies of a volume: the one in the named volume.

    Raises  UsageError if that leaves more than one
    """
    named = [os.path.realpath(volume) for volume in volumes]
    in_volumes = [entry for entry in matches if any(is_inside(one, entry.base_path()) for one in named)]
    if len(in_volumes) == 1 and len(named) == 1:
        return in_volumes[0]
    bases = sorted({entry.base_path() for entry in matches})
    if len(bases) == 1:
        where = " and in ".join(printable(entry.path) for entry in matches[:2])
        raise UsageError(
            f"{matches[0].id} is ambiguous: it is in {where}", "inspect both with ls, and move one out with mv"
        )
    where = " and in ".join(map(printable, bases))
    hint = " or ".join(f"--volume {shell_word(base)}" for base in bases)
    raise UsageError(
        f"{matches[0].id} is ambiguous: it is in {where}", f"one is a copy of the other; select one with {hint}"
    )


def call_in_folder(
    kernel: Kernel,
    volumes: Sequence[bytes],
    entry: ListedContainer,
    body: Callable[[UserFolder, VisibleRename | None], T],
    result_type: Any,
    visible: DirectRename | None = None,
    *,
    needs_proof: bool = False,
) -> T:
    """Run `body` as the owner of the folder that contains a listed container; return the result.

    body, result_type, visible  as for `call_as_owner`
    needs_proof  require that only the owner or root can have put the entry there, unless the folder is the caller's own
    Raises       NotFound if the folder is gone; NotProven; errors from `body`
    """
    caller_uid = os.geteuid()

    def in_its_folder(folder: UserFolder, names: VisibleRename | None) -> list[T]:
        for one in with_lower_folders(folder):
            # The folder's path is not compared, since root may have moved the folder to `u/` in the meantime.
            if one.store.path() == entry.store_path():
                if needs_proof and not one.may_be_reaped_by(caller_uid):
                    raise make_not_proven_error(one)
                return [body(one, names)]
        return []

    for store in discover_stores(kernel, volumes):
        with store:
            for folder in folders_for_caller(store):
                with folder:
                    if folder.uid == entry.uid:
                        call = partial(in_its_folder, folder)
                        for result in call_as_owner(folder, call, list[result_type], visible):
                            return result
    raise NotFound(entry.id)


@contextmanager
def opened_folder(kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer) -> Iterator[UserFolder]:
    """Open, in this process, the folder that contains a listed container, for actions that root itself takes.

    Raises  NotFound if it is gone; Untrusted if its owner's pointer leads to a store that we don't trust
    """
    path = entry.store_path()
    for upper in discover_stores(kernel, volumes):
        with upper:
            store = _open_store_beneath(upper, path) if is_inside(path, upper.base_path) else None
        if store is None:
            continue
        with store:
            for folder in folders_for_caller(store):
                with folder:
                    if folder.uid == entry.uid and folder.store.path() == path:
                        yield folder
                        return
    raise NotFound(entry.id)


def _open_store_beneath(upper: Store, path: bytes) -> Store | None:
    """Open the store at a path in or beneath the directory that holds another store; return None if there is none."""
    base, name = os.path.split(path)
    way = relative_to(base, upper.base_path)
    try:
        sides = upper.base.beneath(upper.kernel, way)
    except OSError:
        return None  # another volume is mounted on the path, or a directory was moved
    try:
        return open_store(upper.kernel, sides, base, Name(name))
    except Untrusted as error:
        hint = f"root can replace it with a new store, which then contains it: trashd init --replace {shell_word(base)}"
        if parse_user_store_name(name) is not None:
            hint = "only its owner's commands can use it"
        raise Untrusted(error.detail, hint) from error


class OrphanFromPath(NamedTuple):
    """An orphan that contains what was at a path. inside: its path in the orphan; None: it is the whole orphan"""

    entry: ListedContainer
    inside: bytes | None


def find_by_origin(
    kernel: Kernel, volumes: Sequence[bytes], path: bytes, listed: Iterable[ListedContainer]
) -> list[OrphanFromPath]:
    """Find the restorable orphans that came from a path, or contain it; the newest comes first.

    If there are none, find those whose deletion has begun: what is left of them can be restored.
    path  may lead through any mount, and need not exist; links in its directories are followed, but not a final link
    """
    mounts = read_mounts()
    path_by_base = _relative_paths(kernel, path, mounts)
    bases: dict[bytes, tuple[int, int] | None] = {}
    matches = []
    for entry in listed:
        if entry.origin is None or entry.state not in (State.ORPHANS, State.REAPING):
            continue
        base = entry.base_path()
        if base not in bases:
            bases[base] = _identity(kernel, base, mounts)
        requested, origin = path_by_base.get(bases[base]), relative_to(entry.origin, base)
        if requested == origin:
            matches.append(OrphanFromPath(entry, None))
        elif requested is not None and is_inside(b"/" + requested, b"/" + origin):
            matches.append(OrphanFromPath(entry, relative_to(b"/" + requested, b"/" + origin)))
    existing = _drop_without_part(kernel, volumes, matches, directory=path.endswith(b"/"))
    complete = [one for one in existing if one.entry.state is State.ORPHANS]
    return sorted(complete or existing, key=lambda one: one.entry.created_ns, reverse=True)


def _drop_without_part(
    kernel: Kernel, volumes: Sequence[bytes], matches: Sequence[OrphanFromPath], *, directory: bool
) -> list[OrphanFromPath]:
    """Drop orphans that lack the requested part; a process of each folder's owner checks this.

    directory  only directories are requested, so also drop entries that are not directories
    """
    parts: dict[bytes, list[tuple[State, str, bytes]]] = {}
    for entry, inside in matches:
        if inside is not None or directory:
            parts.setdefault(entry.path.rsplit(b"/", 2)[0], []).append((entry.state, entry.id, inside or b""))
    if not parts:
        return list(matches)

    flags = os.O_PATH | os.O_NOFOLLOW | (os.O_DIRECTORY if directory else 0)

    def list_with_part(folder: UserFolder) -> list[str]:
        requested = parts.get(folder.path(), ())
        return [name for state, name, inside in requested if _has_part(folder, state, name, inside, flags)]

    stores = discover_stores(kernel, volumes)
    existing = {name for part in call_in_each_folder(stores, list_with_part, list[str], []) for name in part}
    return [one for one in matches if one.entry.id in existing or (one.inside is None and not directory)]


def _relative_paths(kernel: Kernel, path: bytes, mounts: list[Mount]) -> dict[tuple[int, int] | None, bytes]:
    """Return, for a path and each directory above it, the directory's identity and the relative path from there."""
    above, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(above), name)
    path_by_base: dict[tuple[int, int] | None, bytes] = {}
    at = real
    while True:
        path_by_base.setdefault(_identity(kernel, at, mounts), relative_to(real, at))
        if at == b"/":
            break
        at = os.path.dirname(at)
    path_by_base.pop(None, None)
    return path_by_base


def _identity(kernel: Kernel, path: bytes, mounts: list[Mount]) -> tuple[int, int] | None:
    """Return a directory's device and inode number, on the backing side of mounts, or None if it can't be opened."""
    try:
        with open_both_sides(kernel, path, mounts) as sides:
            st = kernel.fstat(sides.fd)
    except (OSError, TrashdError):
        return None
    return st.st_dev, st.st_ino


def _has_part(folder: UserFolder, state: State, name: str, inside: bytes, flags: int) -> bool:
    kernel, path = folder.store.kernel, join_path(name.encode(), TREE, inside)
    try:
        with folder.open(state) as containers, kernel.open_beneath(containers, path, flags):
            return True
    except OSError:
        return False


_NS_PER_S = 1_000_000_000
_STATE_REFUSALS = {
    State.REAPING: (
        "it is already being reaped",
        "on a local filesystem, trashd restore moves the remaining files back",
    ),
    State.QUARANTINE: ("it is in quarantine, where nothing is deleted automatically", "trashd restore moves it back"),
    State.RESTORING: ("it is being restored", SETTLE),
    State.STAGE: ("it is not an orphan yet", SETTLE),
}


class PinnedOrphan(NamedTuple):
    """An orphan with its new retention.

    retention_s  counted from its creation, as in the record; None: pinned
    expires_ns   wall time; None: pinned
    """

    id: ContainerId
    retention_s: int | None
    expires_ns: int | None


class DefaultRetention(NamedTuple):
    """The default retention, counted from the creation, as if no retention had been requested."""


class RetentionFromNow(NamedTuple):
    """A retention counted from now, in seconds; None: pinned until released."""

    seconds: int | None


NewRetention = DefaultRetention | RetentionFromNow


def change_retention(
    kernel: Kernel, volumes: Sequence[bytes], entry: ListedContainer, term: NewRetention
) -> PinnedOrphan:
    """Change the retention of a listed orphan, as its owner. Raises  TrashdError; then the record is unchanged"""
    return call_in_folder(
        kernel, volumes, entry, lambda folder, _visible: write_retention(folder, entry.id, term), PinnedOrphan
    )


def write_retention(folder: UserFolder, container: ContainerId, term: NewRetention) -> PinnedOrphan:
    """Write a new retention into an orphan's record; to be run as the folder's owner.

    Raises  Refused if it is no longer an orphan; Busy if it is locked; NotFound; BadRecord; OSError
    """
    try:
        held = hold_soon(folder, State.ORPHANS, container)
    except FileNotFoundError as error:
        raise BadRecord(container) from error
    if held is ClaimLost.BUSY:
        raise Busy(
            container, "a reap or restore of it has just begun, or a process holds the lock on its record; try again"
        )
    if isinstance(held, ClaimLost):
        raise _explain_gone(folder, container)
    with held:
        now = read_now(folder.store.kernel)
        # After the wall clock has been set, some code corrects for that, and some code does not. For both, the orphan
        # must be kept long enough or, for 0 s, expire at once.
        ages = held.record.age_ns(now), now.wall_ns - held.record.created_ns
        retention_s = _retention_s(
            max(ages) if isinstance(term, RetentionFromNow) and term.seconds else min(ages), term
        )
        record = held.record._replace(retention_s=retention_s)
        if record != held.record and folder.store.is_shared():
            _write_retention_shared(held, retention_s)
        elif record != held.record:
            call_with_room(folder, SPARE_FOR_USER, partial(rewrite_record, held, record))
            read_fs_clock_ns(folder.store.kernel, held.fd)  # notifies the reaper, which watches orphans/
            folder.store.kernel.fsync(held.fd)  # flushes the name, too: a pin must survive a power failure
        return PinnedOrphan(container, retention_s, record.expires_ns(now))


def _write_retention_shared(held: HeldContainer, retention_s: int | None) -> None:
    """Write a retention on a shared filesystem, into a new container that becomes the orphan.

    Another node's reaper may have read the old record already, and its claim may arrive late. Raises  Busy; OSError
    """
    change = partial(Record._replace, retention_s=retention_s)
    kernel = held.folder.store.kernel
    try:
        taken = call_with_room(held.folder, SPARE_FOR_USER, partial(take_over, held, State.RESTORING, change))
        if isinstance(taken, ClaimLost):
            raise Busy(held.id)
        with taken:
            if taken.record.lent_mode is not None:
                with kernel.open_beneath(taken.fd, TREE) as tree:
                    end_temporary_permission(taken, tree, taken.record.lent_mode)
            move_to_state(taken, State.ORPHANS)
            kernel.fsync(taken.fd)
    except FileNotFoundError as error:
        raise TakenOver(held.id) from error


def _retention_s(age_ns: int, term: NewRetention) -> int | None:
    """Return the retention for the record, in seconds from the creation."""
    if isinstance(term, DefaultRetention):
        return DEFAULT_RETENTION_S
    if term.seconds is None:
        return None
    # Rounded up to whole seconds, so that the orphan is kept at least as long as requested; 0 s is not rounded up.
    age_s = age_ns // _NS_PER_S + (1 if term.seconds else 0)
    requested_s = min(max(0, age_s + term.seconds), DURATION_MAX_S)
    # A value equal to the default retention would mean that none was requested.
    return requested_s + 1 if requested_s == DEFAULT_RETENTION_S else requested_s


def _explain_gone(folder: UserFolder, container: ContainerId) -> NotFound | Refused:
    name = container.encode()
    for state, (what, hint) in _STATE_REFUSALS.items():
        if name in folder.list(state):
            return Refused(f"{container}: {what}", hint)
    return NotFound(container)
