"""Which directory of a store is a user's folder: one look decides, for commands, service and mount alike.

A directory's owner need not have put it there: all who may write in the parent can move it, group mates too. Moving it
to another parent takes write permission on itself, so what is exactly 0700 only its owner can have put there: that is
the condition. But a mode is today's, and the move was then; so the proof is another thing: that the folder lies where
only the store's owner makes names, and is the one that root registered: by its identity, in files that only root can
write. What does not meet the condition is refused, and told; it is never mended, for that would bless what was planted.
What is not proven serves its own user's commands alone.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fusefs.core.container_states import State
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import Name, is_container_id, whose
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import read_subordinates
from fusefs.store.backing_and_mount import DIRECTORY, FILE_TO_LOCK, FILE_TO_READ, FULL, READABLE, suppress_errno
from fusefs.store.layout import FOLDER_MODE, FOLDERS, USERS, Areas, Store, UserFolder, decode_identity
from fusefs.store.store_maker import StoreMaker

MOST = 1000
"""Of one user that are registered, served and listed for root; the others serve their own uids alone."""


class SubordinateFolders:
    """Counts them; pure but for the look at who has which uids."""

    def __init__(self, n_users: int, counted: Iterable[int] = ()) -> None:
        """Count these from the beginning. n_users: of a store; where they are few nobody needs to be asked for"""
        self._holder_of: Callable[[int], int] = read_subordinates().holder_of if n_users > MOST else int
        self._n_counted: Counter[int] = Counter()
        self._n_more: Counter[int] = Counter()
        for uid in counted:
            self.count(uid)

    def count(self, uid: int) -> None:
        """One more; a user's own folder does not count."""
        holder = self._holder_of(uid)
        self._n_counted[holder] += holder != uid

    def is_one_too_many(self, uid: int) -> bool:
        """Whether there is no room for that one; it is noted."""
        holder = self._holder_of(uid)
        is_more = holder != uid and self._n_counted[holder] >= MOST
        self._n_more[holder] += is_more
        return is_more

    def passed_over(self) -> dict[int, int]:
        """For how many of whom there was no room."""
        return {holder: n_more for holder, n_more in self._n_more.items() if n_more}


MOST_REFUSED = 16
"""Directories of one user that did not hold at root's first look; after so many no more of that user are."""
_MAX_BYTES = 8192
_NEW = Name(b".new")
_SPARE = Name(b".spare")
"""Blocks for one file more: on a full volume a folder must be registered before root's reap may free anything in it."""


class RegisteredFolder(NamedTuple):
    """What root noted of one user.

    name      of the user's folder below `u/`; empty if there is none
    identity  of it
    refused   what was not the user's folder when root first saw it, whatever has become of it since
    """

    uid: int
    name: Name = Name(b"")
    identity: Identity = Identity("", 0, 0)
    refused: tuple[Identity, ...] = ()

    def proves(self, found: Identity) -> bool:
        """Whether that is the folder which root registered. Handles must agree to the letter: a snapshot is another.

        Where a filesystem has no identities (FUSE) it is: only root makes names below `u/`.
        """
        if not self.name:
            return False
        if self.identity.handle and found.handle:
            return self.identity.handle == found.handle
        return compare(self.identity, found) is not Likelihood.OTHER

    def is_same(self, found: Identity) -> bool:
        """Whether it certainly is that folder, wherever it lies."""
        return self.proves(found) and compare(self.identity, found) is Likelihood.SAME

    def has_refused(self, found: Identity) -> bool:
        """Whether that is something which was refused at root's first look, or may be."""
        return any(compare(one, found) is not Likelihood.OTHER for one in self.refused)

    def is_closed(self) -> bool:
        """Whether so much of the user's was refused that root looks at nothing more."""
        return len(self.refused) >= MOST_REFUSED


def read_registered(kernel: Kernel, registry_fd: Fd | None, uid: int) -> RegisteredFolder:
    """What root noted of a user: nothing, if there is no such file, or it can't be understood. Raises  OSError"""
    nothing = RegisteredFolder(uid)
    if registry_fd is None:
        return nothing
    try:
        with kernel.open_beneath(registry_fd, plain_name(uid), FILE_TO_READ) as fd:
            fields = json.loads(kernel.read(fd, _MAX_BYTES))
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
    """Note it, durably; needs root, and LOCK held. Raises  OSError"""
    fields = {
        "uid": entry.uid,
        "name": entry.name.decode(),
        "folder": entry.identity._asdict(),
        "refused": [one._asdict() for one in entry.refused],
    }
    file = plain_name(entry.uid)
    new = Name(file + _NEW)
    text = json.dumps(fields).encode() + b"\n"
    with suppress(FileNotFoundError):
        kernel.unlink(registry_fd, new)
    try:
        with kernel.create(registry_fd, new) as fd:
            _fill(kernel, fd, text)
    except OSError as error:
        with suppress(FileNotFoundError):
            kernel.unlink(registry_fd, new)
        if error.errno not in FULL:
            raise
        new = _SPARE
        with kernel.open_beneath(registry_fd, new, FILE_TO_LOCK) as fd:
            _fill(kernel, fd, text)
    kernel.rename(registry_fd, new, registry_fd, file)
    kernel.fsync(registry_fd)


def _fill(kernel: Kernel, fd: Fd, text: bytes) -> None:
    kernel.write(fd, text)
    kernel.chmod(fd, 0o644)
    kernel.fsync(fd)


def ensure_spare(kernel: Kernel, registry_fd: Fd) -> None:
    """Keep room for one file more, if there is room; needs root, and LOCK held. Raises  OSError"""
    with suppress_errno(*FULL, errno.EOPNOTSUPP, errno.EEXIST), kernel.create(registry_fd, _SPARE) as fd:
        kernel.reserve_blocks(fd, _MAX_BYTES)


_MOST_LOOKED_IN = 3
"""Of what bears a user's name beside the folder: it is only to be told, and a user can make thousands."""
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
MOUNTED = "something is mounted over it"
_NONE = "it is no directory"
_SUBVOLUME = "it is another subvolume than the store"
NOT_MADE = "nobody can tell that root made this store, and not one who may move root's directories"
NOT_REGISTERED = "it is not the folder that root registered (a copy, or another one took its place)"
_REFUSED_ONCE = "it was not only its owner's when root first saw it"
_CLOSED = "too much that was not only his bore his name: root looks at nothing more"
_ROOTS = "root makes his own where nobody else does"
_STRANGERS = "this filesystem lets strangers move what is not theirs: only what root makes is proven"


class FolderRefusal(NamedTuple):
    """A name in a store that is a user's by what it says, and not that user's folder, or not proven to be.

    area     which of the areas it is in
    uid      of the user whose it would be
    owner    of its owner, if that can be seen
    why      a clause for a person
    is_used  whether it serves that user's own commands
    """

    area: Name
    name: Name
    uid: int
    owner: int | None
    why: str
    is_used: bool = False

    def what(self) -> str:
        """What is told of it."""
        if self.is_used:
            return f"nobody but uid {self.uid} reaps anything in it: {self.why}"
        return f"not used as a folder of uid {self.uid}: {self.why}"


class FolderCensus(NamedTuple):
    """The folders that are served: their inode numbers by uid; and what is refused, or not proven.

    unread  of users of whom something could not be read now: why, and they are looked at again
    """

    inos: dict[int, int]
    refused: list[FolderRefusal]
    unread: list[FolderRefusal] = []  # noqa: RUF012 - never appended to


class FoundFolder(NamedTuple):
    """A user's folder (O_PATH); the rest as UserFolder has it."""

    area: Name
    name: Name
    fd: Fd
    is_proven: bool
    doubt: str


class _FolderLook(NamedTuple):
    """What one look at a user goes by.

    is_own  whether the store is the user's own
    """

    kernel: Kernel
    areas: Areas
    uid: int
    registered: RegisteredFolder
    dev: int
    is_own: bool
    trusts_modes: bool


def why_unread(error: OSError) -> str:
    """Why something that a user can change could not be read.

    Whatever the kernel says of it, a link, a mount or a broken block, is that user's alone: nobody else has to wait for
    it. Of the store's own directories no other user can change anything, and only their errors are the store's.
    """
    return MOUNTED if error.errno == errno.EXDEV else f"it can't be read: {error.strerror}"


def find_user(kernel: Kernel, areas: Areas, uid: int, *, trusts_modes: bool = True) -> FoundFolder | None:
    """A user's folder in any store, trusted or not, for the caller to close; None if there is none.

    It is what root registered below `u/`, or the first of the other names there and in `new/` that is not refused.
    trusts_modes  False where the store says that other users are not refused what a mode forbids them
    Raises        OSError
    """
    look = _look_for(kernel, areas, uid, trusts_modes)
    for area, fd in areas.all():  # all of an area is read only if the first names are not it
        for name in dict.fromkeys((look.registered.name or plain_name(uid), plain_name(uid))):
            if area != USERS and name != plain_name(uid):
                continue
            found = _look_at(look, area, fd, name)
            if isinstance(found, FoundFolder):
                if found.is_proven or not look.registered.name:
                    return found
                found.fd.close()
    return _choose(look, _names_of(kernel, areas).get(uid, []))[0]


def open_user(store: Store, uid: int) -> UserFolder | None:
    """A user's folder in an opened store, for the caller to close; None if there is none."""
    found = find_user(store.kernel, store.areas, uid, trusts_modes=_trusts_modes(store))
    return None if found is None else UserFolder(store, uid, *_doubted(store, found))


def _trusts_modes(store: Store) -> bool:
    return store.volume.strangers_refused is not False


def all_users(
    store: Store,
    refused: list[FolderRefusal],
    only: int | None = None,
    unread: list[FolderRefusal] | None = None,
) -> Iterator[UserFolder]:
    """The folders of all users, one a user, each opened when it is asked for; the caller closes each.

    refused  gets what is no folder, and what will never be proven to be one
    only     of this user alone
    unread   gets why something of a user could not be read; None: `refused` does
    Raises   OSError of the store's own directories; with `only` of any
    """
    kernel, areas = store.kernel, store.areas
    trusts_modes = _trusts_modes(store)
    noted = None if areas.registry_fd is None else frozenset(kernel.list_anew(areas.registry_fd))
    st = kernel.fstat(store.fd)
    named = _names_of(kernel, areas)
    subordinates = SubordinateFolders(len(named) if only is None else 0)
    for uid, names in named.items():
        if (only is None or uid == only) and not subordinates.is_one_too_many(uid):
            is_noted = noted is not None and plain_name(uid) in noted
            registered = read_registered(kernel, areas.registry_fd, uid) if is_noted else RegisteredFolder(uid)
            is_own = areas.new_fd is None and st.st_uid == uid
            look = _FolderLook(kernel, areas, uid, registered, st.st_dev, is_own, trusts_modes)
            try:
                found, others = _choose(look, names)
                refused.extend(others)
                if found is None and not others:  # root has moved it since it was listed
                    found = find_user(kernel, areas, uid, trusts_modes=trusts_modes)
            except OSError as error:
                if only is not None:
                    raise
                area, _fd, name = names[0]
                failed = FolderRefusal(area, name, uid, uid, why_unread(error))
                (refused if unread is None else unread).append(failed)
                continue
            if found is not None:
                found = _doubted(store, found)
                if found.doubt:
                    refused.append(FolderRefusal(found.area, found.name, uid, uid, found.doubt, is_used=True))
                subordinates.count(uid)
                yield UserFolder(store, uid, *found)
    for holder, n_more in subordinates.passed_over().items():
        why = f"{n_more:,} more names of subordinate uids are passed over: {MOST:,} of one user are served"
        refused.append(FolderRefusal(USERS, Name(b""), holder, holder, why))


def take_census(store: Store, only: int | None = None) -> FolderCensus:
    """Look once at all folders, or at one user's alone. Raises  OSError"""
    census = FolderCensus({}, [], [])
    for folder in all_users(store, census.refused, only, census.unread):
        with folder:
            if folder.is_served_by(os.geteuid()):
                census.inos[folder.uid] = store.kernel.fstat(folder.fd).st_ino
    return census


def named_users(store: Store) -> set[int]:
    """The users whose names there are in a store; one of them need not mean a folder. Raises  OSError"""
    return set(_names_of(store.kernel, store.areas))


def why_refused(folder: UserFolder) -> str:
    """Why a folder that is open is not its user's; empty if it is."""
    kernel = folder.store.kernel
    dev = kernel.fstat(folder.store.fd).st_dev
    return why_not(kernel, folder.fd, kernel.fstat(folder.fd), folder.uid, dev)


def plain_name(uid: int) -> Name:
    """The first name that a user's folder may have; and that of root's note of it."""
    return Name(b"%d" % uid)


def names_in(kernel: Kernel, area_fd: Fd) -> dict[int, list[Name]]:
    """The names in an area that may be users' folders, by uid, the plain one first. Raises  OSError"""
    named: dict[int, list[Name]] = {}
    for name in kernel.list_anew(area_fd):
        uid = whose(name)
        if uid is not None:
            named.setdefault(uid, []).append(Name(name))
    return named


_Named = tuple[Name, Fd, Name]
"""An area's name and fd, and a name in it."""


def _names_of(kernel: Kernel, areas: Areas) -> dict[int, list[_Named]]:
    named: dict[int, list[_Named]] = {}
    # Root moves a folder from `new/` to `u/`: listed in this order it is in one of them, or in both.
    listed = {area: names_in(kernel, fd) for area, fd in reversed(areas.all())}
    for area, fd in areas.all():
        for uid, names in listed[area].items():
            named.setdefault(uid, []).extend((area, fd, name) for name in names)
    return named


def _doubted(store: Store, found: FoundFolder) -> FoundFolder:
    """A folder as it counts in a store that may not be root's: what is registered there proves nothing."""
    if store.made is StoreMaker.BY_ROOT:
        return found
    return found._replace(is_proven=False, doubt=NOT_MADE if store.is_unknown() else found.doubt or NOT_REGISTERED)


def _look_for(kernel: Kernel, areas: Areas, uid: int, trusts_modes: bool) -> _FolderLook:
    registered = read_registered(kernel, areas.registry_fd, uid)
    st = kernel.fstat(areas.u_fd)
    is_own = areas.new_fd is None and st.st_uid == uid
    return _FolderLook(kernel, areas, uid, registered, st.st_dev, is_own, trusts_modes)


def _choose(look: _FolderLook, names: list[_Named]) -> tuple[FoundFolder | None, list[FolderRefusal]]:
    """Which of a user's names is the folder, for the caller to close; what is refused.

    It is the one that is proven, or else the first that is not refused.
    """
    chosen: FoundFolder | None = None
    refused: list[FolderRefusal] = []
    aside: list[tuple[Name, Fd, Name]] = []
    with ExitStack() as owned:
        for area, area_fd, name in names:
            if chosen is not None and (chosen.is_proven or not look.registered.name):
                aside.append((area, area_fd, name))
                continue
            found = _look_at(look, area, area_fd, name)
            if isinstance(found, FolderRefusal):
                refused.append(found)
            elif found is not None:
                owned.enter_context(found.fd)
                loser, chosen = (chosen, found) if chosen is None or found.is_proven else (found, chosen)
                if loser is not None:
                    loser.fd.close()
                    aside.append((loser.area, dict(look.areas.all())[loser.area], loser.name))
        if chosen is not None:
            told = (_look_aside(look, *named, chosen, looks_in=n < _MOST_LOOKED_IN) for n, named in enumerate(aside))
            refused += filter(None, told)
        owned.pop_all()
    return chosen, refused


def _look_at(look: _FolderLook, area: Name, area_fd: Fd, name: Name) -> FoundFolder | FolderRefusal | None:
    """What has one of a user's names: the folder, or why it is not; None if nothing has it.

    Raises  OSError for what says nothing of it, such as EMFILE
    """
    kernel = look.kernel
    try:
        fd = kernel.open_beneath(area_fd, name, DIRECTORY)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refused_unopened(look, area, area_fd, name, error)
    with ExitStack() as owned:
        owned.enter_context(fd)
        st = kernel.fstat(fd)
        why = why_not(kernel, fd, st, look.uid, look.dev)
        if not why and look.uid == 0 and area_fd is look.areas.new_fd:
            why = _ROOTS
        if why:
            return FolderRefusal(area, name, look.uid, st.st_uid, why)
        is_proven, doubt = _prove(look, area_fd, name, fd)
        owned.pop_all()
    return FoundFolder(area, name, fd, is_proven, doubt)


def _prove(look: _FolderLook, area_fd: Fd, name: Name, fd: Fd) -> tuple[bool, str]:
    """Whether what meets the condition is proven to be the folder, and if it never will be, why."""
    registered = look.registered
    if area_fd is look.areas.u_fd:
        if look.is_own or (name == registered.name and registered.proves(look.kernel.identify(fd))):
            return True, ""
        return False, NOT_REGISTERED
    if registered.name or registered.refused:
        found = look.kernel.identify(fd)
        if registered.is_same(found):
            return True, ""  # root registered it, and was killed before moving it
        if registered.has_refused(found):
            return False, _REFUSED_ONCE
        if registered.is_closed():
            return False, _CLOSED
    return False, "" if look.trusts_modes else _STRANGERS


def _look_aside(
    look: _FolderLook, area: Name, area_fd: Fd, name: Name, chosen: FoundFolder, *, looks_in: bool
) -> FolderRefusal | None:
    """Why a user's name beside the folder is none; None if nothing has it. looks_in: not only from outside"""
    try:
        st = look.kernel.stat(area_fd, name)
        if looks_in and not not_private(st, look.uid):
            found = _look_at(look, area, area_fd, name)
            if isinstance(found, FoundFolder):
                found.fd.close()
            elif found is not None:
                return found
    except FileNotFoundError:
        return None
    except OSError as error:
        return _refused_unopened(look, area, area_fd, name, error)
    used = printable(chosen.area + b"/" + chosen.name)
    why = not_private(st, look.uid) or f"it is one too many: {used} is used"
    return FolderRefusal(area, name, look.uid, st.st_uid, why)


def _refused_unopened(look: _FolderLook, area: Name, area_fd: Fd, name: Name, error: OSError) -> FolderRefusal | None:
    if error.errno == errno.EXDEV:
        return FolderRefusal(area, name, look.uid, None, MOUNTED)
    if error.errno not in _NO_DIRECTORY:
        raise error
    try:
        owner = look.kernel.stat(area_fd, name).st_uid
    except FileNotFoundError:
        return None
    return FolderRefusal(area, name, look.uid, owner, f"{_NONE}, but something of uid {owner}")


def why_not(kernel: Kernel, fd: Fd, st: os.stat_result, uid: int, dev: int) -> str:
    """Why a directory is not a user's folder; empty if it is. What of it is missing is made when it is needed.

    The access ACL of what is exactly 0700 has an empty mask, and lets no other user in. A default ACL gives nothing
    away either, since all that is made in a folder is 0700 or 0600; it is not looked at.
    dev  of the store (st_dev): a user may snapshot a btrfs subvolume of their own, with others' directories in it
    """
    why = not_private(st, uid, dev)
    if why or os.geteuid() not in (0, uid):
        return why
    for part in FOLDERS:
        try:
            why = not_private(kernel.stat(fd, part), uid, dev)
        except FileNotFoundError:
            continue
        except PermissionError:
            return ""  # root of another host; its owner's process looks (with_lower)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            why = MOUNTED
        if why:
            return f"{part.decode()}/ in it: {why}"
    return ""


def why_not_deep(kernel: Kernel, fd: Fd, uid: int, dev: int) -> str:
    """Why a directory is not a user's folder, down to every container; empty if it is. For root's first look.

    Raises  OSError; PermissionError to root of another host
    """
    why = why_not(kernel, fd, kernel.fstat(fd), uid, dev)
    if why:
        return why
    for state in State:
        part = Name(state.value.encode())
        try:
            state_fd = kernel.open_beneath(fd, part, READABLE)
        except FileNotFoundError:
            continue
        with state_fd, kernel.scan(state_fd) as entries:  # one by one: there may be millions
            for entry in entries:
                if is_container_id(entry.name):
                    try:
                        why = not_private(kernel.stat(state_fd, os.fsencode(entry.name)), uid, dev)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        if error.errno != errno.EXDEV:
                            raise
                        why = MOUNTED
                    if why:
                        return f"{printable(os.path.join(part, os.fsencode(entry.name)))} in it: {why}"
    return ""


def not_private(st: os.stat_result, uid: int, dev: int | None = None) -> str:
    """Why something is not a directory that only one user can have put anything into; empty if it is.

    dev  on which it must be; None for any
    """
    if not stat.S_ISDIR(st.st_mode):
        return _NONE
    if st.st_uid != uid:
        return f"it belongs to uid {st.st_uid}"
    if dev is not None and st.st_dev != dev:
        return _SUBVOLUME
    mode = stat.S_IMODE(st.st_mode)
    return "" if mode == FOLDER_MODE else f"its mode is {mode:04o} instead of {FOLDER_MODE:04o}"
