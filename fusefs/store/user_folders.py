"""Whose a folder of a store is, and who may act in it: `standing_of` decides for commands, the service and the mount.

The owner of a directory need not have put it there: everyone who may write in its parent can move it, group members
too. A move to another parent takes write permission on the directory itself, so only its owner can have moved one whose
mode is exactly 0700: that is the condition. But a mode is today's, and the move was earlier. So the proof is another:
the folder lies where only the store's owner makes names, and root registered its identity in files that only root can
write. A directory that does not meet the condition is refused and reported, and never repaired: a repair would approve
what somebody planted. A folder that is not proven serves its own user's commands only.

A user's registry of stores names each that the user uses, so that one in a home directory is found too. A line has the
store's identity besides its path: a copy is another store, which is not vouched for.
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
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import STORE, Name, RelPath, is_container_id, join, split, whose
from fusefs.core.printable_names import printable
from fusefs.linux.fd import Fd, closed_on_error
from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import HOME, lasting_dir
from fusefs.store.backing_and_mount import ABSENT, DIRECTORY, FILE_TO_LOCK, FULL, OUT_OF_REACH, READABLE, suppress_errno
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
    decode,
    encode,
    is_noted,
    note_made,
    read_own,
    registered,
)

MOUNTED = "something is mounted over it"


NOT_MADE = "there is no proof that root created this store"


NOT_REGISTERED = "it is not the directory that root registered (it is a copy, or it was replaced)"


_NONE = "it is not a directory"


_SUBVOLUME = "it is on another subvolume than the store"


_REFUSED_ONCE = "other users could change it when root first inspected it"


_CLOSED = "too many directories with this user's name could be changed by others, so root inspects no more"


_ROOTS = "root creates its own directory only where no other user can create names"


_STRANGERS = "this filesystem lets users move the files of others, so only directories that root created are trusted"


MOST = 1000

"""Subordinate uids of one user whose folders are registered, served and listed for root; the others serve their own."""


MOST_REFUSED = 16

"""Directories of one user that root refused at its first inspection; root then inspects no more of that user."""


_MOST_OPENED = 3

"""Names of one user beside the folder that are opened to report a reason; a user can make thousands."""


_MAX_BYTES = 8192


_SPARE = Name(b".spare")

"""Blocks for one more file: on a full volume a folder must be registered before root's reap may free anything in it."""


class Standing(NamedTuple):
    """Whose a name in a store is, and who may act in it.

    area           which of the areas it is in
    uid            of the user whose folder it is, or would be
    owner          of what has the name; None if that can't be seen
    why            a clause for a person: why it is refused, or never will be proven; empty if it is proven, or waits
                   for root's first inspection
    is_used        whether it serves its user's own commands; False: it is refused
    is_registered  whether only its user or root can have put it there, as far as the store is believed
    is_proven      whether it is believed: root's commands and the service act in it too
    """

    area: Name
    name: Name
    uid: int
    owner: int | None
    why: str
    is_used: bool = False
    is_registered: bool = False
    is_proven: bool = False

    def what(self) -> str:
        """What is reported of it."""
        if self.is_used:
            return f"only uid {self.uid} reaps anything in it: {self.why}"
        return f"not used as the directory of uid {self.uid}: {self.why}"


def standing_of(store: Store, entry: RegisteredFolder, area: Name, name: Name, fd: Fd) -> Standing:
    """Decide whose an opened directory with a user's name is, and who may act in it. It is proven if 1 to 5 hold.

       what is read                              the question that it answers                       if the answer is no
    1  owner, mode, device of the store and its  Can only the store's owner change them?            The store is not
       own directories (`layout.open_store`)                                                        opened.
    2  owner, mode, device of the folder and     Can only its user have moved it, or put anything   Nobody uses it.
       its parts; mounts (`why_not`)             into it?
    3  `security.trashd`, or root's list of      Did root make this store of root's?                Only its user acts
       stores (`registry_lines.who_made`)                                                           in it.
    4  the area: `u/`, or `new/`                 Does it lie where only the store's owner makes     Only its user acts
                                                 names, or has root registered it already? (A       in it, as yet.
                                                 user's own store needs no more.)
    5  root's registry, `folders/<uid>`          Is it the directory that root registered?          Only its user acts
                                                                                                    in it.
    6  its user's list of stores, `volume.json`  Is the store no copy? (`is_vouched`, in a process  Reaped by its ID
                                                 of its user: only that user can read the list.)    only.

    entry   what root registered of that user
    Raises  OSError that says nothing about the directory, such as EMFILE
    """
    kernel, uid, areas = store.kernel, entry.uid, store.areas
    st = kernel.fstat(fd)
    refused = why_not(kernel, fd, st, uid, areas.dev) or (_ROOTS if uid == 0 and area == NEW else "")
    if refused:
        return Standing(area, name, uid, st.st_uid, refused)
    is_own = areas.new_fd is None and kernel.fstat(areas.u_fd).st_uid == uid
    is_registered, doubt = (True, "") if is_own else _check_registered(store, entry, area, name, fd)
    if store.is_unknown():
        why = NOT_MADE
    elif store.made is StoreMaker.BY_ROOT:
        why = doubt
    else:
        why = doubt or NOT_REGISTERED
    is_proven = is_registered and store.made is StoreMaker.BY_ROOT
    return Standing(area, name, uid, owner=uid, why=why, is_used=True, is_registered=is_registered, is_proven=is_proven)


def _check_registered(store: Store, entry: RegisteredFolder, area: Name, name: Name, fd: Fd) -> tuple[bool, str]:
    """Whether a folder in a store of root's is the registered one, and if it never will be, why."""
    if area == USERS:
        proves = name == entry.name and entry.proves(store.kernel.identify(fd))
        return proves, "" if proves else NOT_REGISTERED
    if entry.name or entry.refused:
        found = store.kernel.identify(fd)
        if entry.is_same(found):
            return True, ""  # root registered it, and was killed before moving it
        if entry.has_refused(found):
            return False, _REFUSED_ONCE
        if entry.is_closed():
            return False, _CLOSED
    return False, "" if store.volume.strangers_refused is not False else _STRANGERS


def why_not(kernel: Kernel, fd: Fd, st: os.stat_result, uid: int, dev: int) -> str:
    """Why a directory is not a user's folder; empty if it is. A part that is missing is made when it is needed.

    The access ACL of what is exactly 0700 has an empty mask, and lets no other user in. A default ACL gives nothing
    away either, since all that is made in a folder is 0700 or 0600; it is not read.
    dev  of the store (st_dev): a user may snapshot a btrfs subvolume of their own, with others' directories in it
    """
    why = not_private(st, uid, dev)
    if why or os.geteuid() not in (0, uid):
        return why
    try:
        return next(filter(None, (_why_not_in(kernel, fd, part, uid, dev, part + b"/") for part in FOLDERS)), "")
    except PermissionError:
        return ""  # root of another host; its owner's process asks again (with_lower)


def why_not_deep(kernel: Kernel, fd: Fd, uid: int, dev: int) -> str:
    """Why a directory is not a user's folder, down to every container; empty if it is. For root's first inspection.

    Raises  OSError; PermissionError to root of another host
    """
    if why := why_not(kernel, fd, kernel.fstat(fd), uid, dev):
        return why
    for state in State:
        part = state.value.encode()
        try:
            state_fd = kernel.open_beneath(fd, part, READABLE)
        except FileNotFoundError:
            continue
        with state_fd, kernel.scan(state_fd) as entries:  # one by one: there may be millions
            for name in (os.fsencode(entry.name) for entry in entries if is_container_id(entry.name)):
                if why := _why_not_in(kernel, state_fd, name, uid, dev, os.path.join(part, name)):
                    return why
    return ""


def _why_not_in(kernel: Kernel, dir_fd: Fd, name: bytes, uid: int, dev: int, path: bytes) -> str:
    """Why something in a folder is not a directory of its user's only; empty if it is, or is not there."""
    try:
        why = not_private(kernel.stat(dir_fd, name), uid, dev)
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        why = MOUNTED
    return why and f"{printable(path)} in it: {why}"


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


def why_unread(error: OSError) -> str:
    """Why something that a user can change could not be read.

    Whatever the kernel says of it, a link, a mount or a broken block, concerns that user only: nobody else waits for
    it. Of the store's own directories no other user can change anything, and only their errors are the store's.
    """
    return MOUNTED if error.errno == errno.EXDEV else f"it can't be read: {error.strerror}"


def is_vouched(store: Store) -> bool:
    """Whether a store is known to be no copy: by its owner's registry, or, of root's, by root having made it.

    To be asked by its user. What is not vouched for is shown and restored from, and nothing in it is reaped unasked. A
    user who can have no registry vouches for what they use, and so does a pointer for where it leads; for a copy that
    can be known as one only `init` does, which makes it a store of its own.
    """
    if store.is_common() or is_remembered(store):
        return True
    if compare(store.kernel.identify(store.fd), store.volume.store) is Likelihood.OTHER:
        return False
    if store.name != STORE:
        # Nobody else can write in it, nor have moved it here: its own file proves that it is no copy of its files. A
        # copy of the whole disk has the same id elsewhere.
        here = place_of_store(store)
        return all(one.path == here for one in registered() if one.volume == store.volume.id)
    return store.is_named or not _can_register()


def _can_register() -> bool:
    """Whether the caller has a registry of stores, or could have one."""
    try:
        path = lasting_dir()
    except FileNotFoundError:
        return False
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


class RegisteredFolder(NamedTuple):
    """What root noted of one user.

    name      of the user's folder below `u/`; empty if there is none
    identity  of it
    refused   what was not the user's folder at root's first inspection, whatever has become of it since
    """

    uid: int
    name: Name = Name(b"")
    identity: Identity = Identity("", 0, 0)
    refused: tuple[Identity, ...] = ()

    def proves(self, found: Identity) -> bool:
        """Whether that is the folder which root registered. Handles must be equal: a snapshot has another.

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
        """Whether that is something which was refused at root's first inspection, or may be."""
        return any(compare(one, found) is not Likelihood.OTHER for one in self.refused)

    def is_closed(self) -> bool:
        """Whether so much of the user's was refused that root inspects nothing more."""
        return len(self.refused) >= MOST_REFUSED


def read_registered(store: Store, uid: int) -> RegisteredFolder:
    """What root noted of a user: nothing, if there is no such file, or it can't be understood. Raises  OSError"""
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
    """Note it, durably; needs root, and LOCK held. Raises  OSError"""
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
        if error.errno not in FULL:
            raise
        _use_spare(kernel, registry_fd, file, text)
    kernel.fsync(registry_fd)


def _use_spare(kernel: Kernel, registry_fd: Fd, file: Name, text: bytes) -> None:
    """Write a note into the spare file, which has its blocks already, and give it the note's name. Raises  OSError"""
    with kernel.open_beneath(registry_fd, _SPARE, FILE_TO_LOCK) as fd:
        kernel.write(fd, text)
        kernel.chmod(fd, 0o644)
        kernel.fsync(fd)
    kernel.rename(registry_fd, _SPARE, registry_fd, file)


def ensure_spare(kernel: Kernel, registry_fd: Fd) -> None:
    """Keep room for one more file, if there is room; needs root, and LOCK held. Raises  OSError"""
    with suppress_errno(*FULL, errno.EOPNOTSUPP, errno.EEXIST), kernel.create(registry_fd, _SPARE) as fd:
        kernel.reserve_blocks(fd, _MAX_BYTES)


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


def named_users(store: Store) -> dict[int, list[tuple[Name, Name]]]:
    """The areas and names in a store that may be folders of each user; none of them need be one. Raises  OSError"""
    # Root moves a folder from `new/` to `u/`: listed in this order it is in one of them, or in both.
    listed = {area: names_in(store.kernel, fd) for area, fd in reversed(store.areas.all())}
    named: dict[int, list[tuple[Name, Name]]] = {}
    for area in reversed(listed):
        for uid, names in listed[area].items():
            named.setdefault(uid, []).extend((area, name) for name in names)
    return named


def open_user(store: Store, uid: int, *, plain_only: bool = False) -> UserFolder | None:
    """A user's folder in a store, for the caller to close; None if there is none.

    It is what root registered below `u/`, or the first of the other names there and in `new/` that is not refused.
    plain_only  by its plain name: what the user fills the directory with is not listed
    Raises      OSError
    """
    entry, plain = read_registered(store, uid), plain_name(uid)
    likely = [(USERS, entry.name or plain), *((area, plain) for area, _fd in store.areas.all())]
    for area, name in dict.fromkeys(likely):  # an area is listed only if these are not it
        opened = _open(store, entry, area, name, [])
        if opened is not None:
            if opened.is_registered or not entry.name:
                return opened.folder
            opened.folder.fd.close()
    return None if plain_only else _choose(store, entry, named_users(store).get(uid, []), [])


def _open(store: Store, entry: RegisteredFolder, area: Name, name: Name, refused: list[Standing]) -> _Candidate | None:
    """What has one of a user's names, if it is used; the caller closes it. refused: gets what is not

    Raises  OSError that says nothing about it, such as EMFILE
    """
    kernel, area_fd = store.kernel, dict(store.areas.all())[area]
    try:
        fd = kernel.open_beneath(area_fd, name, DIRECTORY)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        refused += _absent(kernel, area_fd, Standing(area, name, entry.uid, None, MOUNTED), error.errno)
        return None
    with closed_on_error(fd):
        standing = standing_of(store, entry, area, name, fd)
    if standing.is_used:
        folder = UserFolder(store, entry.uid, area, name, fd, standing.is_proven, standing.why)
        return _Candidate(folder, standing.is_registered)
    fd.close()
    refused.append(standing)
    return None


def _absent(kernel: Kernel, area_fd: Fd, mounted: Standing, number: int) -> list[Standing]:
    """What is reported of a name where there is no directory, by the errno: nothing if it has gone.

    mounted  if something is over it
    """
    if number == errno.EXDEV:
        return [mounted]
    if number != errno.ENOENT:
        with suppress(FileNotFoundError):
            owner = kernel.stat(area_fd, mounted.name).st_uid
            return [mounted._replace(owner=owner, why=f"{_NONE}, and belongs to uid {owner}")]
    return []


class _Candidate(NamedTuple):
    """What has a user's name in an area and may be the folder, which the caller closes."""

    folder: UserFolder
    is_registered: bool


def _choose(
    store: Store, entry: RegisteredFolder, places: Iterable[tuple[Name, Name]], refused: list[Standing]
) -> UserFolder | None:
    """Which of a user's names is the folder, for the caller to close. refused: gets the others

    It is the one that root registered, or else the first that is not refused.
    """
    best: _Candidate | None = None
    beside: list[tuple[Name, Name]] = []
    with ExitStack() as owned:
        for area, name in places:
            if best is not None and (best.is_registered or not entry.name):
                beside.append((area, name))  # no other can be better
                continue
            found = _open(store, entry, area, name, refused)
            if found is None:
                continue
            owned.enter_context(found.folder)
            if best is not None and not found.is_registered:
                found.folder.fd.close()
                beside.append((area, name))
                continue
            if best is not None:
                best.folder.fd.close()
                beside.append((best.folder.area, best.folder.name))
            best = found
        if best is None:
            return None
        for n, (area, name) in enumerate(beside):
            refused += _beside(store, entry, area, name, best.folder, opens=n < _MOST_OPENED)
        owned.pop_all()
        return best.folder


def _beside(
    store: Store, entry: RegisteredFolder, area: Name, name: Name, used: UserFolder, *, opens: bool
) -> list[Standing]:
    """Why a user's name beside the folder is none; nothing if it has gone. opens: the directory, too"""
    kernel, area_fd, refused = store.kernel, dict(store.areas.all())[area], list[Standing]()
    try:
        st = kernel.stat(area_fd, name)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        return _absent(kernel, area_fd, Standing(area, name, entry.uid, None, MOUNTED), error.errno)
    why = not_private(st, entry.uid)
    if opens and not why:
        opened = _open(store, entry, area, name, refused)
        if opened is None:
            return refused
        opened.folder.fd.close()
    used_path = printable(used.area + b"/" + used.name)
    return [Standing(area, name, entry.uid, st.st_uid, why or f"it is a duplicate: {used_path} is used")]


class SubordinateFolders:
    """Counts the folders of each user's subordinate uids; a user's own folder does not count.

    n_more  for how many of which user there is no room
    """

    def __init__(self, n_users: int, counted: Iterable[int] = ()) -> None:
        """Count these from the beginning. n_users: of a store; where they are few, /etc/subuid is not read"""
        self._holder_of: Callable[[int], int] = int
        if n_users > MOST:
            from fusefs.linux.user_ids import read_subordinates  # late: a plain swap counts no users

            self._holder_of = read_subordinates().holder_of
        self._n_counted: Counter[int] = Counter()
        self.n_more: Counter[int] = Counter()
        for uid in counted:
            self.count(uid)

    def count(self, uid: int) -> None:
        """One more."""
        holder = self._holder_of(uid)
        self._n_counted[holder] += holder != uid

    def is_one_too_many(self, uid: int) -> bool:
        """Whether there is no room for that one; it is noted."""
        holder = self._holder_of(uid)
        if holder == uid or self._n_counted[holder] < MOST:
            return False
        self.n_more[holder] += 1
        return True


class FolderCensus(NamedTuple):
    """The folders of a store.

    inos     of those that are served: their inode numbers by uid
    refused  what is refused, or will never be proven
    unread   what of a user could not be read now: it is inspected again
    """

    inos: dict[int, int]
    refused: list[Standing]
    unread: list[Standing]


def all_users(
    store: Store, census: FolderCensus, only: int | None = None, *, plain_only: bool = False
) -> Iterator[UserFolder]:
    """The folders of all users, one a user, each opened when it is asked for; the caller closes each.

    census      gets what is refused, and what could not be read
    only        of this user
    plain_only  as for `open_user`, with `only`
    Raises      OSError of the store's own directories; with `only` of any
    """
    registry_fd = store.areas.registry_fd
    noted = frozenset() if registry_fd is None else frozenset(store.kernel.list_anew(registry_fd))
    named = {only: [(USERS, plain_name(only))]} if only is not None and plain_only else named_users(store)
    subordinates = SubordinateFolders(len(named) if only is None else 0)
    for uid, places in named.items():
        if only not in (None, uid) or subordinates.is_one_too_many(uid):
            continue
        entry = read_registered(store, uid) if plain_name(uid) in noted else RegisteredFolder(uid)
        refused = list[Standing]()
        try:
            folder = _choose(store, entry, places, refused)
            if folder is None and not refused:  # root has moved it since it was listed
                folder = open_user(store, uid, plain_only=plain_only)
        except OSError as error:
            if only is not None:
                raise
            census.unread.append(Standing(*places[0], uid, uid, why_unread(error)))
            continue
        census.refused.extend(refused)
        if folder is not None:
            if folder.doubt:
                census.refused.append(Standing(folder.area, folder.name, uid, uid, folder.doubt, is_used=True))
            subordinates.count(uid)
            yield folder
    for holder, n_more in subordinates.n_more.items():
        why = f"{n_more:,} more names of subordinate uids are ignored: at most {MOST:,} per user are served"
        census.refused.append(Standing(USERS, Name(b""), holder, holder, why))


def take_census(store: Store, only: int | None = None, *, plain_only: bool = False) -> FolderCensus:
    """Inspect all folders, or one user's. Arguments, Raises as for `all_users`"""
    census = FolderCensus({}, [], [])
    for folder in all_users(store, census, only, plain_only=plain_only):
        with folder:
            if folder.is_served_by(os.geteuid()):
                census.inos[folder.uid] = store.kernel.fstat(folder.fd).st_ino
    return census


def describe(store: Store) -> RegistryLine:
    """What a registry is to say of a store. Raises  OSError"""
    filesystem = os.fstatvfs(store.fd).f_fsid & (1 << 64) - 1
    return RegistryLine(store.kernel.identify(store.fd), store.volume.id, filesystem, place_of_store(store), store.name)


def place_of_store(store: Store) -> bytes:
    """The directory that holds a store, where it is without a mount of ours. Raises  OSError"""
    path = os.readlink(store.base.fd.path())
    if store.base.mounted is not None and (path.startswith(HOME + b"/") or not _leads_to(store.kernel, path, store)):
        return store.base_path  # of a mount over itself: when that is gone, the store is there
    return path


def _leads_to(kernel: Kernel, path: bytes, store: Store) -> bool:
    try:
        return os.path.samestat(os.stat(path), kernel.fstat(store.base.fd))
    except OSError:
        return False


def is_remembered(store: Store) -> bool:
    """Whether the caller's registry names a store: its identity, and a path that leads to just that one.

    A copy that stands elsewhere is another store, be it a copy of the whole disk.
    """
    try:
        one = describe(store)
        text = read_own()
    except OSError:
        return False
    return b"\n" + encode(one) in b"\n" + text or any(is_same(one, other) for other in decode(text))


def is_same(one: RegistryLine, other: RegistryLine) -> bool:
    """Whether two lines mean one store at one place."""
    known = compare(one.identity, other.identity)
    return known is not Likelihood.OTHER and (one.volume, one.store()) == (other.volume, other.store())


def remember(store: Store) -> str:
    """Have the caller's registry name a store that is used; why it does not, a clause for a person, or nothing.

    Without a home, or in one that can't be written, it does not: then whatever is told of the store says where it is.
    Root's names no user's store: that is its owner's to do. Nor is a copy vouched for by being used, or what another
    user may have made of root's directories.
    """
    if os.geteuid() == 0 != store.owner:
        return "it is a user's own store, which only that user registers"
    if store.is_roots_to_keep() and store.made is not StoreMaker.BY_ROOT:
        return "there is no proof that root created it"
    try:
        one = describe(store)
        try:
            if b"\n" + encode(one) in b"\n" + read_own():
                return ""
        except FileNotFoundError:
            pass
        if compare(one.identity, store.volume.store) is Likelihood.OTHER:
            return "it is a copy of another store"
        from fusefs.store.store_registry import add_line  # only the first use of a store needs it

        return add_line(store.kernel, one)
    except OSError as error:
        return error.strerror or "it can't be written"


def vouch(store: Store) -> bool:
    """Have it known from now on, durably, that root made a store; whether it is. Needs root. Raises  OSError"""
    if is_noted(store.kernel, store.fd):
        return True
    if note_made(store.kernel, store.fd):
        store.kernel.fsync(store.fd)
        return True
    if store.judged().made is StoreMaker.BY_ROOT:
        return True
    from fusefs.store.store_registry import add_line  # only the first use of a store needs it

    return not add_line(store.kernel, describe(store))


# Pointers lead from a user's folder of an upper store, by relative paths, to the lower stores of that user.

_POINTER_MAX_BYTES = 64 * 1024
MOST_READ = 1000
_NEW = b".new"


def add_pointer(folder: UserFolder, lower: RelPath) -> None:
    """Note a lower store, durably, if it is not noted yet.

    lower  the directory that holds it, relative to the one that holds this store
    """
    kernel = folder.store.kernel
    import hashlib  # 2 ms, which a swap into the highest store doesn't need to spend

    name = hashlib.sha256(lower).hexdigest()[:32].encode()
    with folder.open(POINTERS) as pointers:
        try:
            kernel.stat(pointers, name)
        except FileNotFoundError:
            new = name + b"." + os.urandom(4).hex().encode() + _NEW
            write_small(kernel, pointers, name, lower, new=new)


def pointed(folder: UserFolder) -> Iterator[tuple[Name, RelPath | None]]:
    """Each pointer's name and what it says; None for what is no plain relative path (users write them).

    None at all where `pointers/` itself is something else: its user did that, and the checker reports it.
    """
    kernel = folder.store.kernel
    with ExitStack() as owned:
        try:
            pointers = owned.enter_context(kernel.open_dir(folder.fd, POINTERS))
        except OSError as error:
            if error.errno not in OUT_OF_REACH:
                raise
            return
        for name in kernel.list(pointers):
            if not name.endswith(_NEW):
                yield Name(name), _read(kernel, pointers, name)


def read_pointers(kernel: Kernel, pointers: Fd, uid: int) -> list[RelPath]:
    """What the first pointers of a user say that are plain relative paths, read by a process of that user.

    pointers  the user's directory of them, readable
    Raises    OSError
    """

    def read() -> bytes:
        names = [name for name in kernel.list(pointers)[:MOST_READ] if not name.endswith(_NEW)]
        return b"\0".join(lower for name in names if (lower := _read(kernel, pointers, name)) is not None)

    if uid == os.geteuid():
        text = read()
    else:
        from fusefs.linux.children import ChildLost, call_as

        try:
            text = call_as(uid, lambda _ask: read())
        except ChildLost:
            return []  # its user stopped it
    found = []
    for one in text.split(b"\0"):
        with suppress(ValueError):  # it came from a process of the user's
            found.append(join(*split(one)))
    return found


def _read(kernel: Kernel, pointers: Fd, name: bytes) -> RelPath | None:
    try:
        text = read_small(kernel, pointers, name, _POINTER_MAX_BYTES)
        return None if text is None else join(*split(text))
    except (OSError, ValueError):
        return None


def lower_stores(folder: UserFolder) -> Iterator[Store]:
    """The stores that this user's pointers lead to, beneath the volume and through no link; the caller closes each.

    Each store once, whatever leads to it, and those of the first pointers alone: a pointer is a small file of a user's,
    and what it leads to is read each time. A pointer to a directory that is gone, or to a store that we don't trust,
    leads nowhere: `trashd doctor` reports it.
    """
    store = folder.store
    seen: set[tuple[int, int]] = set()
    for _name, lower in islice(pointed(folder), MOST_READ):
        if lower is None:
            continue
        for opener in (open_store, open_own_store):
            try:
                base = store.base.beneath(store.kernel, lower)
                found = opener(store.kernel, base, os.path.join(store.base_path, lower))
            except (OSError, TrashdError):
                continue
            if found is None:
                continue
            st = store.kernel.fstat(found.fd)
            if (st.st_dev, st.st_ino) in seen:
                with found:
                    continue
            seen.add((st.st_dev, st.st_ino))
            yield found._replace(is_named=True)
