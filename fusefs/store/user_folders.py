"""Decides whose folder a directory in a store is, and who may act in it; for commands, the service and the mount.

The owner of a directory need not have put it there: every user who may write to its parent, such as a group member,
can move it. A move to another parent requires write permission on the directory itself. So the condition is that its
mode is exactly 0700, with which only the owner can move it. But the mode may have been different when it was moved. So
a folder is proven only if it is where only the store's owner can create entries, and root has registered its identity
in files that only root can write. A directory that does not meet the condition is refused and reported, but never
repaired: a repair would approve what another user planted. An unproven folder serves only its own user's commands.

A user's registry of stores lists each store that the user uses, so that a store in a home directory is found, too. A
line contains the store's identity as well as its path: a copy is a different store, which is not trusted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.errors import TrashdError
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import STORE, Name, RelPath, is_container_id, join_path, parse_uid_name, split_path
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, close_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import MOUNTS_RUNTIME, persistent_dir
from fusefs.store.backing_and_mount import (
    ABSENT_ERRNOS,
    DIRECTORY,
    FILE_TO_LOCK,
    NO_SPACE_ERRNOS,
    READABLE,
    UNREACHABLE_ERRNOS,
    suppress_errno,
)
from fusefs.store.layout import (
    FOLDER_MODE,
    FOLDERS,
    NEW,
    POINTERS,
    USERS,
    Store,
    UserFolder,
    decode_identity,
    open_own_store,
    open_store,
    read_small,
    write_small,
)
from fusefs.store.registry_lines import (
    RegistryLine,
    StoreMaker,
    decode_lines,
    encode_line,
    has_root_mark,
    read_own_lines,
    read_own_registry,
    set_root_mark,
)

MOUNTED = "something is mounted over it"


NOT_MADE = "there is no proof that root created this store"


NOT_REGISTERED = "it is not the directory that root registered (it is a copy, or it was replaced)"


_NONE = "it is not a directory"


_SUBVOLUME = "it is on a different subvolume than the store"


_REFUSED_ONCE = "other users could change it when root first inspected it"


_CLOSED = "too many directories with this user's name could be changed by others, so root inspects no more of them"


_ROOTS = "root creates its own directory only where no other user can create entries"


_STRANGERS = "this filesystem lets users move other users' files, so only directories that root created are trusted"


MAX_SUBORDINATES = 1000
"""The maximum number of one user's subordinate uids whose folders are registered, served, and listed for root.

Beyond this limit, a folder serves only its own uid.
"""


MOST_REFUSED = 16
"""After root has refused this many of a user's directories at the first inspection, it inspects no more of them."""
_MOST_OPENED = 3
"""The most of a user's unused directories that are opened to find the reason; a user can make thousands."""


_MAX_BYTES = 8192


_SPARE = Name(b".spare")
"""The name of a file with reserved blocks for one more entry.

Even on a full volume, a folder must be registered before root's reap may free anything in it.
"""


class FolderVerdict(NamedTuple):
    """A decision about a directory in a store: whose folder it is, and who may act in it.

    area           the store's area that contains it
    uid            the user whose folder it is, or would be
    owner          the directory's owner; None if unknown
    why            a clause for messages: why it is refused, or will never be proven; empty if it is proven, or waits
                   for root's first inspection
    is_used        whether it serves its user's own commands; if not, it is refused
    is_registered  whether only its user or root can have put it there, provided that the store is trusted
    is_proven      whether the store is trusted, too, so that root's commands and the service act in it
    """

    area: Name
    name: Name
    uid: int
    owner: int | None
    why: str
    is_used: bool = False
    is_registered: bool = False
    is_proven: bool = False

    def describe(self) -> str:
        if self.is_used:
            return f"only uid {self.uid} reaps anything in it: {self.why}"
        return f"not used as uid {self.uid}'s directory: {self.why}"


def judge_folder(store: Store, entry: RegisteredFolder, area: Name, name: Name, fd: Fd) -> FolderVerdict:
    """Decide whose folder an opened directory with a user's name is, and who may act in it.

    It is proven if the answers to questions 1 to 5 are yes.
    1. Can only the store's owner change the store and its own directories? Their owner, mode and device show this
       (`layout.open_store`). If not, the store is not opened.
    2. Can only its user have moved the folder, or put anything into it? The owner, mode and device of the folder and
       its parts, and the mounts over them, show this (`explain_not_folder`). If not, it is not used at all.
    3. Did root make this store that belongs to root? `security.trashd` or root's list of stores shows this
       (`registry_lines.find_maker`). If not, only its user acts in it.
    4. Is it where only the store's owner can create entries (`u/`, not `new/`), or has root registered it already? If
       not, only its user acts in it, for now. A user's own store needs no more.
    5. Is it the directory that root registered? Root's registry shows this (`folders/<uid>`). If not, only its user
       acts in it.
    6. Is the store an original, not a copy? Its user's list of stores and `volume.json` show this (`is_vouched`, called
       in a process of its user, who alone can read the list). If it may be a copy, its orphans are reaped only by ID.

    entry   what root registered for that user
    Raises  OSError that does not concern the directory, such as EMFILE
    """
    kernel, uid, areas = store.kernel, entry.uid, store.areas
    st = kernel.fstat(fd)
    refused = explain_not_folder(kernel, fd, st, uid, areas.dev) or (_ROOTS if uid == 0 and area == NEW else "")
    if refused:
        return FolderVerdict(area, name, uid, st.st_uid, refused)
    is_own = areas.new_fd is None and kernel.fstat(areas.u_fd).st_uid == uid
    is_registered, doubt = (True, "") if is_own else _check_registered(store, entry, area, name, fd)
    if store.has_unknown_maker():
        why = NOT_MADE
    elif store.maker is StoreMaker.BY_ROOT:
        why = doubt
    else:
        why = doubt or NOT_REGISTERED
    is_proven = is_registered and store.maker is StoreMaker.BY_ROOT
    return FolderVerdict(
        area, name, uid, owner=uid, why=why, is_used=True, is_registered=is_registered, is_proven=is_proven
    )


def _check_registered(store: Store, entry: RegisteredFolder, area: Name, name: Name, fd: Fd) -> tuple[bool, str]:
    """Return whether a folder in root's store is the registered one, and, if it never will be, the reason."""
    if area == USERS:
        proves = name == entry.name and entry.proves(store.kernel.identify(fd))
        return proves, "" if proves else NOT_REGISTERED
    if entry.name or entry.refused:
        identity = store.kernel.identify(fd)
        if entry.is_same(identity):
            return True, ""  # root registered it, and was killed before moving it
        if entry.has_refused(identity):
            return False, _REFUSED_ONCE
        if entry.is_limit_reached():
            return False, _CLOSED
    return False, "" if store.volume.strangers_refused is not False else _STRANGERS


def explain_not_folder(kernel: Kernel, fd: Fd, st: os.stat_result, uid: int, dev: int) -> str:
    """Return why a directory is not a user's folder, or "" if it is. Missing parts are made when they are needed.

    If the mode is exactly 0700, the mask of an access ACL is empty and lets no other user in. A default ACL is not
    read: it grants nothing, as everything made in a folder has mode 0700 or 0600.
    dev  the store's st_dev: users may snapshot their own btrfs subvolumes, including other users' directories in them
    """
    why = explain_not_private(st, uid, dev)
    if why or os.geteuid() not in (0, uid):
        return why
    try:
        return next(filter(None, (_explain_not_part(kernel, fd, part, uid, dev, part + b"/") for part in FOLDERS)), "")
    except PermissionError:
        return ""  # we are root on another host; a process of its owner checks again (`with_lower_folders`)


def explain_not_folder_deep(kernel: Kernel, fd: Fd, uid: int, dev: int) -> str:
    """Return why a directory is not a user's folder, or "" if it is. Every container in it is checked, too.

    This is for root's first inspection.
    Raises  OSError; PermissionError if the server does not accept this host's root
    """
    if why := explain_not_folder(kernel, fd, kernel.fstat(fd), uid, dev):
        return why
    for state in State:
        part = state.value.encode()
        try:
            state_fd = kernel.open_beneath(fd, part, READABLE)
        except FileNotFoundError:
            continue
        with state_fd, kernel.scan(state_fd) as entries:  # not all at once: there may be millions
            for name in (os.fsencode(entry.name) for entry in entries if is_container_id(entry.name)):
                if why := _explain_not_part(kernel, state_fd, name, uid, dev, os.path.join(part, name)):
                    return why
    return ""


def _explain_not_part(kernel: Kernel, dir_fd: Fd, name: bytes, uid: int, dev: int, path: bytes) -> str:
    """Return why other users may have put something into a part of a folder, or "" if they can't, or it is missing."""
    try:
        why = explain_not_private(kernel.stat(dir_fd, name), uid, dev)
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        why = MOUNTED
    return why and f"{printable(path)} in it: {why}"


def explain_not_private(st: os.stat_result, uid: int, dev: int | None = None) -> str:
    """Return why a file is not a directory that only this user can have put anything into, or "" if it is.

    dev  the st_dev that it must have; None for any
    """
    if not stat.S_ISDIR(st.st_mode):
        return _NONE
    if st.st_uid != uid:
        return f"it belongs to uid {st.st_uid}"
    if dev is not None and st.st_dev != dev:
        return _SUBVOLUME
    mode = stat.S_IMODE(st.st_mode)
    return "" if mode == FOLDER_MODE else f"its mode is {mode:04o} instead of {FOLDER_MODE:04o}"


def explain_unreadable(error: OSError) -> str:
    """Return, as a clause for messages, why something that a user can change could not be read.

    Any error there (a link, a mount, a bad block) affects only that user, so that other users need not wait. An error
    in the store's own directories, which users can't change, affects the whole store.
    """
    return MOUNTED if error.errno == errno.EXDEV else f"it can't be read: {error.strerror}"


def is_vouched(store: Store) -> bool:
    """Return whether a store is known to be an original: its owner's registry lists it, or root made it.

    Call this as its owner. A store that may be a copy can be listed and restored from, but nothing in it is deleted
    automatically. If a user can't have a registry, the stores that they use count as originals, and so does a store
    that a pointer leads to. A recognised copy becomes a store in its own right only through `init`.
    """
    if store.is_common() or is_registered_store(store):
        return True
    if compare(store.kernel.identify(store.fd), store.volume.store) is IdentityMatch.OTHER:
        return False
    if store.name != STORE:
        # No other user can write to the store, or have moved it here. Its volume.json proves that it was not copied,
        # unless the whole disk was. A copy of the whole disk has the same id at a different path.
        base_path = place_of_store(store)
        return all(one.path == base_path for one in read_own_lines() if one.volume == store.volume.id)
    return store.is_named or not _can_register()


def _can_register() -> bool:
    """Return whether the caller has a registry of stores, or could make one."""
    try:
        path = persistent_dir()
    except FileNotFoundError:
        return False
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


class RegisteredFolder(NamedTuple):
    """A user's entry in root's registry.

    name      the name of the user's folder below `u/`; empty if there is none
    identity  that folder's identity
    refused   directories that root refused at the first inspection, whatever has happened to them since
    """

    uid: int
    name: Name = Name(b"")
    identity: Identity = Identity("", 0, 0)
    refused: tuple[Identity, ...] = ()

    def proves(self, identity: Identity) -> bool:
        """Return whether root registered the folder with this identity. File handles must match: a snapshot's differ.

        If a filesystem has no identities (FUSE), the name is enough, as only root creates entries below `u/`.
        """
        if not self.name:
            return False
        if self.identity.handle and identity.handle:
            return self.identity.handle == identity.handle
        return compare(self.identity, identity) is not IdentityMatch.OTHER

    def is_same(self, identity: Identity) -> bool:
        """Return whether the identity is certainly that of the folder that root registered, wherever it is now."""
        return self.proves(identity) and compare(self.identity, identity) is IdentityMatch.SAME

    def has_refused(self, identity: Identity) -> bool:
        """Return whether the identity is, or may be, that of a directory that root refused at the first inspection."""
        return any(compare(one, identity) is not IdentityMatch.OTHER for one in self.refused)

    def is_limit_reached(self) -> bool:
        """Return whether so many of the user's directories were refused that root inspects no more of them."""
        return len(self.refused) >= MOST_REFUSED


def read_registered(store: Store, uid: int) -> RegisteredFolder:
    """Return a user's entry in root's registry, or an empty entry if its file is missing or invalid. Raises  OSError"""
    nothing, kernel = RegisteredFolder(uid), store.kernel
    if store.areas.registry_fd is None:
        return nothing
    try:
        fields = json.loads(read_small(kernel, store.areas.registry_fd, plain_name(uid), _MAX_BYTES) or b"")
    except (FileNotFoundError, ValueError, RecursionError):
        return nothing
    if not isinstance(fields, dict) or fields.get("uid") != uid:
        return nothing
    name, listed, folder = fields.get("name"), fields.get("refused"), decode_identity(fields.get("folder"))
    refused = tuple(filter(None, map(decode_identity, listed))) if isinstance(listed, list) else ()
    if not isinstance(name, str) or folder is None:
        return nothing._replace(refused=refused)
    return RegisteredFolder(uid, Name(name.encode("utf-8", "replace")), folder, refused)


def write_registered(kernel: Kernel, registry_fd: Fd, entry: RegisteredFolder) -> None:
    """Write a user's entry in root's registry durably. Needs root and a locked registry. Raises  OSError"""
    fields = {
        "uid": entry.uid,
        "name": entry.name.decode(),
        "folder": entry.identity._asdict(),
        "refused": [one._asdict() for one in entry.refused],
    }
    file = plain_name(entry.uid)
    text = json.dumps(fields).encode() + b"\n"
    try:
        write_small(kernel, registry_fd, file, text, 0o644)
    except OSError as error:
        if error.errno not in NO_SPACE_ERRNOS:
            raise
        _use_spare(kernel, registry_fd, file, text)
    kernel.fsync(registry_fd)


def _use_spare(kernel: Kernel, registry_fd: Fd, file: Name, text: bytes) -> None:
    """Write an entry into the spare file, which has its blocks already, and rename it to `file`. Raises  OSError"""
    with kernel.open_beneath(registry_fd, _SPARE, FILE_TO_LOCK) as fd:
        kernel.write(fd, text)
        kernel.chmod(fd, 0o644)
        kernel.fsync(fd)
    kernel.rename(registry_fd, _SPARE, registry_fd, file)


def ensure_spare(kernel: Kernel, registry_fd: Fd) -> None:
    """Reserve blocks for one more entry, if there is space. Needs root and a locked registry. Raises  OSError"""
    with suppress_errno(*NO_SPACE_ERRNOS, errno.EOPNOTSUPP, errno.EEXIST), kernel.create(registry_fd, _SPARE) as fd:
        kernel.reserve_blocks(fd, _MAX_BYTES)


def plain_name(uid: int) -> Name:
    """Return a user's plain name: the first choice for their folder, and the name of their entry in root's registry."""
    return Name(b"%d" % uid)


def names_in(kernel: Kernel, area_fd: Fd) -> dict[int, list[Name]]:
    """Return the names in an area that may be users' folders, by uid, the plain name first. Raises  OSError"""
    named: dict[int, list[Name]] = {}
    for name in kernel.list_reopened(area_fd):
        uid = parse_uid_name(name)
        if uid is not None:
            named.setdefault(uid, []).append(Name(name))
    return named


def named_users(store: Store) -> dict[int, list[tuple[Name, Name]]]:
    """Return the areas and names in a store that may be users' folders, by uid, unchecked. Raises  OSError"""
    # Root moves folders from `new/` to `u/`: listed in this order, each is seen at least once.
    listed = {area: names_in(store.kernel, fd) for area, fd in reversed(store.areas.all())}
    named: dict[int, list[tuple[Name, Name]]] = {}
    for area in reversed(listed):
        for uid, names in listed[area].items():
            named.setdefault(uid, []).extend((area, name) for name in names)
    return named


def open_user_folder(store: Store, uid: int, *, plain_only: bool = False) -> UserFolder | None:
    """Open a user's folder in a store; return None if there is none. The caller closes it.

    It is the folder that root registered below `u/`, or else the first one there or in `new/` that is not refused.
    plain_only  find it only by its plain name: the areas, which users can fill, are not listed
    Raises      OSError
    """
    entry, plain = read_registered(store, uid), plain_name(uid)
    candidates = [(USERS, entry.name or plain), *((area, plain) for area, _fd in store.areas.all())]
    for area, name in dict.fromkeys(candidates):  # an area is listed only if these do not exist
        opened = _open_candidate(store, entry, area, name, [])
        if opened is not None:
            if opened.is_registered or not entry.name:
                return opened.folder
            opened.folder.fd.close()
    return None if plain_only else _open_best(store, entry, named_users(store).get(uid, []), [])


def _open_candidate(
    store: Store, entry: RegisteredFolder, area: Name, name: Name, refused: list[FolderVerdict]
) -> _Candidate | None:
    """Open a directory with a user's name if it is used, or else add it to `refused`; the caller closes it.

    Raises  OSError that does not concern the directory, such as EMFILE
    """
    kernel, area_fd = store.kernel, dict(store.areas.all())[area]
    try:
        fd = kernel.open_beneath(area_fd, name, DIRECTORY)
    except OSError as error:
        if error.errno not in ABSENT_ERRNOS:
            raise
        refused += _report_absent(kernel, area_fd, FolderVerdict(area, name, entry.uid, None, MOUNTED), error.errno)
        return None
    with close_on_error(fd):
        standing = judge_folder(store, entry, area, name, fd)
    if standing.is_used:
        folder = UserFolder(store, entry.uid, area, name, fd, standing.is_proven, standing.why)
        return _Candidate(folder, standing.is_registered)
    fd.close()
    refused.append(standing)
    return None


def _report_absent(kernel: Kernel, area_fd: Fd, mounted: FolderVerdict, number: int) -> list[FolderVerdict]:
    """Return what to report about a name that could not be opened as a directory, or [] if the name is gone.

    mounted  what to report if something is mounted over it
    number   the errno from the open
    """
    if number == errno.EXDEV:
        return [mounted]
    if number != errno.ENOENT:
        with suppress(FileNotFoundError):
            owner = kernel.stat(area_fd, mounted.name).st_uid
            return [mounted._replace(owner=owner, why=f"{_NONE}, and belongs to uid {owner}")]
    return []


class _Candidate(NamedTuple):
    """An opened directory that may be a user's folder; the caller closes it."""

    folder: UserFolder
    is_registered: bool


def _open_best(
    store: Store, entry: RegisteredFolder, places: Iterable[tuple[Name, Name]], refused: list[FolderVerdict]
) -> UserFolder | None:
    """Open the directory that is the user's folder, and add the refused ones to `refused`; the caller closes it.

    It is the one that root registered, or else the first that is not refused.
    """
    best: _Candidate | None = None
    beside: list[tuple[Name, Name]] = []
    with ExitStack() as owned:
        for area, name in places:
            if best is not None and (best.is_registered or not entry.name):
                beside.append((area, name))  # no other can be better
                continue
            candidate = _open_candidate(store, entry, area, name, refused)
            if candidate is None:
                continue
            owned.enter_context(candidate.folder)
            if best is not None and not candidate.is_registered:
                candidate.folder.fd.close()
                beside.append((area, name))
                continue
            if best is not None:
                best.folder.fd.close()
                beside.append((best.folder.area, best.folder.name))
            best = candidate
        if best is None:
            return None
        for n, (area, name) in enumerate(beside):
            refused += _report_beside(store, entry, area, name, best.folder, opens=n < _MOST_OPENED)
        owned.pop_all()
        return best.folder


def _report_beside(
    store: Store, entry: RegisteredFolder, area: Name, name: Name, used: UserFolder, *, opens: bool
) -> list[FolderVerdict]:
    """Return why another directory with a user's name is not used, or [] if it is gone.

    used   the user's folder
    opens  whether to check its contents, too
    """
    kernel, area_fd, refused = store.kernel, dict(store.areas.all())[area], list[FolderVerdict]()
    try:
        st = kernel.stat(area_fd, name)
    except OSError as error:
        if error.errno not in ABSENT_ERRNOS:
            raise
        return _report_absent(kernel, area_fd, FolderVerdict(area, name, entry.uid, None, MOUNTED), error.errno)
    why = explain_not_private(st, entry.uid)
    if opens and not why:
        opened = _open_candidate(store, entry, area, name, refused)
        if opened is None:
            return refused
        opened.folder.fd.close()
    used_path = printable(used.area + b"/" + used.name)
    return [FolderVerdict(area, name, entry.uid, st.st_uid, why or f"it is a duplicate: {used_path} is used")]


class SubordinateFolders:
    """Counts the folders of each user's subordinate uids; a user's own folder does not count.

    n_more  how many folders exceed the limit, by user
    """

    def __init__(self, n_users: int, counted: Iterable[int] = ()) -> None:
        """Begin with the uids in `counted`. If the store has few users (`n_users`), /etc/subuid is not read."""
        self._holder_of: Callable[[int], int] = int
        if n_users > MAX_SUBORDINATES:
            from fusefs.linux.user_ids import read_subordinates  # late: a plain swap counts no users

            self._holder_of = read_subordinates().holder_of
        self._n_counted: Counter[int] = Counter()
        self.n_more: Counter[int] = Counter()
        for uid in counted:
            self.count(uid)

    def count(self, uid: int) -> None:
        holder = self._holder_of(uid)
        self._n_counted[holder] += holder != uid

    def is_one_too_many(self, uid: int) -> bool:
        """Return whether a uid exceeds its user's limit; if so, count it in `n_more`."""
        holder = self._holder_of(uid)
        if holder == uid or self._n_counted[holder] < MAX_SUBORDINATES:
            return False
        self.n_more[holder] += 1
        return True


class FolderCensus(NamedTuple):
    """The folders in a store.

    inos     the inode numbers of the folders that are served, by uid
    refused  the directories that are refused, or will never be proven
    unread   the directories that could not be read now and will be inspected again
    """

    inos: dict[int, int]
    refused: list[FolderVerdict]
    unread: list[FolderVerdict]


def all_users(
    store: Store, census: FolderCensus, only: int | None = None, *, plain_only: bool = False
) -> Iterator[UserFolder]:
    """Open each user's folder, one after the other; the caller closes each.

    census      gets the directories that are refused or could not be read
    only        open only this uid's folder
    plain_only  see `open_user_folder`; only together with `only`
    Raises      OSError from the store's own directories; with `only`, from the user's, too
    """
    registry_fd = store.areas.registry_fd
    registered_names = frozenset() if registry_fd is None else frozenset(store.kernel.list_reopened(registry_fd))
    named = {only: [(USERS, plain_name(only))]} if only is not None and plain_only else named_users(store)
    subordinates = SubordinateFolders(len(named) if only is None else 0)
    for uid, places in named.items():
        if only not in (None, uid) or subordinates.is_one_too_many(uid):
            continue
        entry = read_registered(store, uid) if plain_name(uid) in registered_names else RegisteredFolder(uid)
        refused = list[FolderVerdict]()
        try:
            folder = _open_best(store, entry, places, refused)
            if folder is None and not refused:  # root has moved it since it was listed
                folder = open_user_folder(store, uid, plain_only=plain_only)
        except OSError as error:
            if only is not None:
                raise
            census.unread.append(FolderVerdict(*places[0], uid, uid, explain_unreadable(error)))
            continue
        census.refused.extend(refused)
        if folder is not None:
            if folder.doubt:
                census.refused.append(FolderVerdict(folder.area, folder.name, uid, uid, folder.doubt, is_used=True))
            subordinates.count(uid)
            yield folder
    for holder, n_more in subordinates.n_more.items():
        why = f"{n_more:,} more names of subordinate uids are ignored: at most {MAX_SUBORDINATES:,} per user are served"
        census.refused.append(FolderVerdict(USERS, Name(b""), holder, holder, why))


def inspect_folders(store: Store, only: int | None = None, *, plain_only: bool = False) -> FolderCensus:
    """Inspect all users' folders, or one user's. For the arguments and errors, see `all_users`."""
    census = FolderCensus({}, [], [])
    for folder in all_users(store, census, only, plain_only=plain_only):
        with folder:
            if folder.may_be_reaped_by(os.geteuid()):
                census.inos[folder.uid] = store.kernel.fstat(folder.fd).st_ino
    return census


def make_registry_line(store: Store) -> RegistryLine:
    filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
    return RegistryLine(store.kernel.identify(store.fd), store.volume.id, filesystem, place_of_store(store), store.name)


def place_of_store(store: Store) -> bytes:
    """Return the path of the directory that holds a store, outside our mounts if possible. Raises  OSError"""
    path = os.readlink(store.base.fd.path())
    if path != store.base_path and not path.startswith(MOUNTS_RUNTIME + b"/") and _leads_to(store.kernel, path, store):
        return path
    return store.base_path  # if a mount covers its own source: after an unmount, the store is at this path


def _leads_to(kernel: Kernel, path: bytes, store: Store) -> bool:
    try:
        return os.path.samestat(os.stat(path), kernel.fstat(store.base.fd))
    except OSError:
        return False


def is_registered_store(store: Store) -> bool:
    """Return whether the caller's registry lists a store: its identity, and a path that leads to exactly this store.

    A copy at another path is a different store, even if the whole disk was copied.
    """
    try:
        one = make_registry_line(store)
        text = read_own_registry()
    except OSError:
        return False
    return b"\n" + encode_line(one) in b"\n" + text or any(is_same_store(one, other) for other in decode_lines(text))


def is_same_store(one: RegistryLine, other: RegistryLine) -> bool:
    """Return whether two lines refer to the same store at the same path."""
    likelihood = compare(one.identity, other.identity)
    return likelihood is not IdentityMatch.OTHER and (one.volume, one.store()) == (other.volume, other.store())


def register_store(store: Store) -> str:
    """Add a store to the caller's registry when it is used. Return why that failed, as a clause for messages, or "".

    This fails without a writable home directory; messages about the store then contain its path. It also fails for a
    copy, and for a store that another user may have made from root's directories. Root never registers a user's store:
    only its owner does.
    """
    if os.geteuid() == 0 != store.owner:
        return "it is a user's own store, which only that user registers"
    if store.is_ours_as_root() and store.maker is not StoreMaker.BY_ROOT:
        return "there is no proof that root created it"
    try:
        one = make_registry_line(store)
        try:
            if b"\n" + encode_line(one) in b"\n" + read_own_registry():
                return ""
        except FileNotFoundError:
            pass
        if compare(one.identity, store.volume.store) is IdentityMatch.OTHER:
            return "it is a copy of another store"
        from fusefs.store.store_registry import add_line  # late: only the first use of a store needs it

        return add_line(store.kernel, one)
    except OSError as error:
        return error.strerror or "it can't be written"


def record_made_by_root(store: Store) -> bool:
    """Record durably that root made a store; return whether this is recorded now. Needs root. Raises  OSError"""
    if has_root_mark(store.kernel, store.fd):
        return True
    if set_root_mark(store.kernel, store.fd):
        store.kernel.fsync(store.fd)
        return True
    if store.with_maker().maker is StoreMaker.BY_ROOT:
        return True
    from fusefs.store.store_registry import add_line  # late: only the first use of a store needs it

    return not add_line(store.kernel, make_registry_line(store))


# Pointers are relative paths that lead from a user's folder in an upper store to that user's lower stores.

_POINTER_MAX_BYTES = 64 * 1024
MAX_POINTERS = 1000
_NEW = b".new"


def add_pointer(folder: UserFolder, lower: RelPath) -> None:
    """Write a pointer to a lower store durably, if there is none yet.

    lower  the directory that holds the lower store, relative to the one that holds this store
    """
    kernel = folder.store.kernel
    import hashlib  # late: it takes 2 ms, and a swap into the highest store does not need it

    name = hashlib.sha256(lower).hexdigest()[:32].encode()
    with folder.open(POINTERS) as pointers:
        try:
            kernel.stat(pointers, name)
        except FileNotFoundError:
            new = name + b"." + os.urandom(4).hex().encode() + _NEW
            write_small(kernel, pointers, name, lower, new=new)


def list_pointers(folder: UserFolder) -> Iterator[tuple[Name, RelPath | None]]:
    """Yield each pointer's name and path. Users write pointers, so the path is None unless it is plain and relative.

    Yield nothing if `pointers/` itself is not a directory, which `trashd doctor` reports.
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        try:
            pointers = owned.enter_context(kernel.open_dir(folder.fd, POINTERS))
        except OSError as error:
            if error.errno not in UNREACHABLE_ERRNOS:
                raise
            return
        for name in kernel.list(pointers):
            if not name.endswith(_NEW):
                yield Name(name), _read_pointer(kernel, pointers, name)


def read_pointers(kernel: Kernel, pointers: Fd, uid: int) -> list[RelPath]:
    """Return the valid paths in a user's first MAX_POINTERS pointers. A process of that user reads them.

    pointers  the user's `pointers/`, opened for reading
    Raises    OSError
    """

    def read() -> bytes:
        names = [name for name in kernel.list(pointers)[:MAX_POINTERS] if not name.endswith(_NEW)]
        return b"\0".join(lower for name in names if (lower := _read_pointer(kernel, pointers, name)) is not None)

    if uid == os.geteuid():
        text = read()
    else:
        from fusefs.linux.children import ChildLost, call_in_child_as

        try:
            text = call_in_child_as(uid, lambda _ask: read())
        except ChildLost:
            return []  # its user stopped it
    paths = []
    for one in text.split(b"\0"):
        with suppress(ValueError):  # the text comes from a process that the user controls
            paths.append(join_path(*split_path(one)))
    return paths


def _read_pointer(kernel: Kernel, pointers: Fd, name: bytes) -> RelPath | None:
    try:
        text = read_small(kernel, pointers, name, _POINTER_MAX_BYTES)
        return None if text is None else join_path(*split_path(text))
    except (OSError, ValueError):
        return None


def lower_stores(folder: UserFolder) -> Iterator[Store]:
    """Open the stores on this volume that the user's pointers lead to, without following links; the caller closes each.

    Each store is opened once. Only the first MAX_POINTERS pointers are read, as users can write many. A pointer to a
    missing directory or an untrusted store is skipped: `trashd doctor` reports it.
    """
    store = folder.store
    inodes: set[tuple[int, int]] = set()
    for _name, lower in islice(list_pointers(folder), MAX_POINTERS):
        if lower is None:
            continue
        for opener in (open_store, open_own_store):
            try:
                base = store.base.beneath(store.kernel, lower)
                lower_store = opener(store.kernel, base, os.path.join(store.base_path, lower))
            except (OSError, TrashdError):
                continue
            if lower_store is None:
                continue
            st = store.kernel.fstat(lower_store.fd)
            if (st.st_dev, st.st_ino) in inodes:
                with lower_store:
                    continue
            inodes.add((st.st_dev, st.st_ino))
            yield lower_store._replace(is_named=True)
