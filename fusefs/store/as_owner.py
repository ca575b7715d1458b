"""What root does for another user, in a process of that user's: restore, `swap --for-owner`, and `reap --force`.

At the one name that an administrator gave, root renames for that process, on its request. Of what lies in a user's
container root believes nothing that it has not checked itself, before and after the rename: to the name comes what
the record names; anything else goes back.

`swap --for-owner`: root swaps into root's folder, where only root can put anything in the fresh directory's place. Only
then the old tree goes over, by one rename into a container that a process of its owner staged: of what that user could
choose nothing ever has the name. Until then it is root's, which the record says, and is not reaped unasked.

Seizing (`reap --force`): root takes the container out of a user's quarantine into root's own folder. Where its owner
may rename, root must not work by name: a claim there would make root's records and directories in the user's folder,
and read the user's. So root moves the whole container, as `trashd rm` would, by one rename between two directories
that it holds open: what comes after is root's own orphan, which root asked for, and root reaps it in a folder that no
other user can enter (I13). Root locks the record, which it never reads, so that no reaper and no restore is at it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from msgspec import json

from fusefs.core.container_states import StageAction, State, decide_stage
from fusefs.core.errors import (
    BY_NAME,
    AuthorityLost,
    BadRecord,
    KernelRefused,
    NoStore,
    NotPermitted,
    Refused,
    TrashdError,
    from_os,
)
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.names import ContainerId, Name, RelPath, is_container_id, join
from fusefs.core.record import Method, Record
from fusefs.linux.children import Ask, ChildLost, call_as, user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import below, place_of, read_mounts
from fusefs.store.backing_and_mount import BackingAndMount, Scope, with_mounted
from fusefs.store.container import ClaimLost, HeldContainer, dissolve, hold, move
from fusefs.store.layout import FRESH, RECORD, TREE, Store, UserFolder
from fusefs.store.make_folder import make_roots
from fusefs.store.stage import SwapOptions, TakenContainer, identify_at, restock, stage
from fusefs.store.swap import (
    Adopted,
    Swapped,
    explain,
    own_folder,
    remove,
    store_above,
    swap,
    take_path,
)
from fusefs.store.tidy_folder import not_proven
from fusefs.store.user_folders import add_pointer, open_user
from fusefs.store.victim import Victim, mount_of
from fusefs.store.victim_rename import DirectRename, VisibleMove, VisibleRename

T = TypeVar("T")
_FILES_TOO = (Method.REMOVED, Method.DROPPED)
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
ITS_OWNERS = "inspect it with ls; its owner can restore it: trashd restore ID --to PATH"
"""A hint for what root does not put into place."""


class RenameQuestion(NamedTuple):
    """What a child asks of root: that its tree gets the name, what has that, or that the mount looks at it again.

    wanted, method  of the record: the tree's identity, and how it came
    """

    what: str
    state: State = State.RESTORING
    container: str = ""
    wanted: Identity | None = None
    method: Method = Method.EXCHANGE


class RenameAnswer(NamedTuple):
    """What became of it; `refused` is root's reason, `errno` the kernel's."""

    errno: int = 0
    found: tuple[int, int] | None = None
    refused: str = ""


class _NotWanted(Exception):
    """Why something does not get the name."""


class RootRename(NamedTuple):
    """Gives the name to what lies in one user's containers. visible: the name; None if the administrator gave none."""

    folder: UserFolder
    visible: DirectRename | None

    def answer(self, message: bytes) -> bytes:
        """Do what a child asks, if it is a move between the name and a container of that user."""
        try:
            question = json.decode(message, type=RenameQuestion)
            if self.visible is None:
                raise PermissionError(errno.EPERM, "no destination was given")
            answer = self._obey(self.visible, question)
        except _NotWanted as refused:
            answer = RenameAnswer(refused=str(refused))
        except OSError as error:
            answer = RenameAnswer(errno=error.errno or errno.EIO)
        except (ValueError, KeyError):
            answer = RenameAnswer(errno=errno.EINVAL)
        return json.encode(answer)

    def _obey(self, visible: DirectRename, question: RenameQuestion) -> RenameAnswer:
        if question.what == "found":
            return RenameAnswer(found=visible.found())
        if not is_container_id(question.container):
            raise KeyError(question.container)
        name = question.container.encode()
        if question.what == "refresh":
            visible.refresh_in(self.folder, question.state, name)
            return RenameAnswer()
        if VisibleMove[question.what] is not VisibleMove.BACK:
            raise PermissionError(errno.EPERM, "only a restore may take the name")
        kernel = self.folder.store.kernel
        with kernel.open_dir(self.folder.fd, join(question.state.value.encode(), name)) as container:
            if kernel.fstat(container).st_uid != self.folder.uid:
                raise PermissionError(errno.EPERM, "another user's container")
            self._bring(visible, question, container)
        return RenameAnswer()

    def _bring(self, visible: DirectRename, question: RenameQuestion, container: Fd) -> None:
        """Let the container's tree get the name, and nothing else, whatever its user does meanwhile."""
        kernel, name = self.folder.store.kernel, question.container.encode()
        with kernel.open_beneath(container, TREE) as tree:
            why = why_other(question.method, question.wanted, kernel.fstat(tree), kernel.identify(tree))
            if why:
                raise _NotWanted(f"{name.decode()}: {why}")
            visible.make_in(VisibleMove.BACK, self.folder, question.state, name, container)
            if visible.has(tree):
                return
        self._take_away(visible, question.state, name, container)
        why = "its owner replaced it at that moment, so it was moved back"
        raise _NotWanted(f"{name.decode()}: {why}")

    def _take_away(self, visible: DirectRename, state: State, name: bytes, container: Fd) -> None:
        """Give what got the name wrongly back to its user: to where it was, or beside that if it is taken.

        If the user removed the container, it goes to where root alone removes anything. Raises  OSError
        """
        beside = Name(b"refused." + os.urandom(6).hex().encode())
        for to in (TREE, beside):
            with suppress(OSError):
                visible.take_away(self.folder, state, name, container, to)
                return
        visible.take_to(self.folder.store.areas.all()[0][1], beside)


def why_other(method: Method, wanted: Identity | None, st: os.stat_result, found: Identity) -> str:
    """Why a tree is not the one of its record, as far as root goes by that; empty if it is.

    Where identities prove nothing, it counts as another one.
    method, wanted  of the record: how the victim came, and its identity
    """
    kind = stat.S_IFMT(st.st_mode)
    kinds = (stat.S_IFDIR, stat.S_IFREG) if method in _FILES_TOO else (stat.S_IFDIR,)
    if kind not in kinds:
        return f"it is {_KINDS.get(kind, 'something else')}, not {' or '.join(_KINDS[one] for one in kinds)}"
    match compare(found, wanted):
        case Likelihood.SAME:
            return ""
        case Likelihood.OTHER:
            assert wanted is not None
            return f"it is inode {found.ino}, but its record names inode {wanted.ino} or an earlier use of that inode"
        case Likelihood.UNKNOWN:
            return "it can't be verified that it is the tree of its record"


class _ChildsError(NamedTuple):
    """An error of the child's, to be raised here as what it was there; none if it has no name."""

    error: str = ""
    detail: str = ""
    hint: str = ""
    errno: int = 0


def as_owner(
    folder: UserFolder, body: Callable[[VisibleRename | None], T], kind: Any, visible: DirectRename | None = None
) -> T:
    """The result of `body`, run by us if the folder is ours, else (root) in a process of its owner.

    body     gets what does the renames at a visible name: ourselves, or root on the child's request
    kind     the result's type, as msgspec decodes it: what the child sends is checked like what a user sends
    visible  the one name that root will change for the child
    Raises   what `body` raises; AuthorityLost; NotPermitted if it is another user's folder and we are not root
    """
    uid = os.geteuid()
    if folder.uid == uid:
        return body(visible)
    if uid != 0:
        raise NotPermitted(folder.path())
    root = RootRename(folder, visible)
    return ask_owner(
        folder.uid, lambda ask: body(None if visible is None else _RenameThroughRoot(ask)), kind, root.answer
    )


def make_folder_of(store: Store, uid: int) -> UserFolder:
    """A user's folder in a store, made by root if missing; needs root.

    Where root can't give it away (a network filesystem), its user makes it; what a killed command of that user left is
    completed or undone.
    Raises  AuthorityLost, or what making it met
    """
    if store.is_roots_to_keep():
        with suppress(OSError, NoStore):
            make_roots(store, uid).fd.close()

    def body(_ask: Ask) -> None:
        with own_folder(store) as folder:
            restock(folder)

    ask_owner(uid, body, None, lambda _question: b"")
    folder = open_user(store, uid)
    if folder is None:
        raise NoStore(store.base_path)
    return folder


def ask_owner(uid: int, body: Callable[[Ask], T], kind: Any, answer: Ask) -> T:
    """The result of `body`, run in a process of a user's by root, which it may ask something; kind, Raises as above.

    The child must not import anything: its user may not be able to read where trashd is installed. So what it needs is
    imported at the top of this module, or by the parent.
    """
    try:
        message = call_as(uid, lambda ask: _run(body, ask), answer)
    except ChildLost as error:
        raise AuthorityLost(f"user {user_name(uid)}") from error
    first, _, result = message.partition(b"\n")
    outcome = json.decode(first, type=_ChildsError)
    if outcome.error == "OSError":
        raise OSError(outcome.errno, os.strerror(outcome.errno), outcome.detail)
    if outcome.error == KernelRefused.__name__:
        raise KernelRefused(outcome.detail, outcome.hint, outcome.errno)
    if outcome.error:
        raise BY_NAME[outcome.error](outcome.detail, outcome.hint)
    wanted: T = json.decode(result, type=kind)
    return wanted


def _run(body: Callable[[Ask], T], ask: Ask) -> bytes:
    """What a child says: its error in a line, then what it was asked for."""
    result, outcome = b"", _ChildsError()
    try:
        result = json.encode(body(ask))
    except TrashdError as error:
        outcome = _ChildsError(type(error).__name__, detail=error.detail, hint=error.hint, errno=error.errno)
    except OSError as error:
        outcome = _ChildsError("OSError", detail=str(error.filename or ""), errno=error.errno or errno.EIO)
    return json.encode(outcome) + b"\n" + result


class _RenameThroughRoot(NamedTuple):
    """The visible name as the child has it: each step is root's, asked for through the channel."""

    ask: Ask

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """See VisibleRename."""
        self._put(RenameQuestion(move.name, held.state, held.name().decode(), held.record.victim, held.record.method))
        return 0

    def found(self) -> tuple[int, int] | None:
        """See VisibleRename."""
        return self._put(RenameQuestion("found")).found

    def refresh(self, held: HeldContainer) -> None:
        """See VisibleRename."""
        self._put(RenameQuestion("refresh", held.state, held.name().decode()))

    def _put(self, question: RenameQuestion) -> RenameAnswer:
        answer = json.decode(self.ask(json.encode(question)), type=RenameAnswer)
        if answer.refused:
            raise Refused(answer.refused, ITS_OWNERS)
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer


def swap_for_owner(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Swap the directory at a path into its owner's folder; needs root.

    Raises  TrashdError as `swap_path`; where its owner does not take it, that is a warning: root keeps it
    """
    return take_path(kernel, path, options, _swap_for_owner, directory=True)


def _swap_for_owner(own: UserFolder, victim: Victim, options: SwapOptions, visible: VisibleRename) -> Swapped:
    uid, store = victim.stat.st_uid, own.store
    if uid == own.uid:
        return swap(own, victim, options, visible)
    upper = store_above(victim.parent, store)
    if upper is not None:
        with upper, make_folder_of(upper, uid) as folder:
            lower = RelPath(below(store.base_path, upper.base_path))
            as_owner(folder, lambda _names: add_pointer(folder, lower), None)
    return swap(own, victim, options._replace(heir=uid), visible, give)


def give_what_is_left(folder: UserFolder) -> list[str]:
    """Hand over what a killed `swap --for-owner` left in root's folder, once it is recovered; what failed, in words."""
    if folder.uid or os.geteuid():
        return []
    problems: list[str] = []
    for name in folder.list(State.STAGE):
        text = name.decode("ascii", "replace")
        if is_container_id(text):
            try:
                held = hold(folder, State.STAGE, ContainerId(text))
                if isinstance(held, HeldContainer):
                    with held:
                        if _is_to_be_given(held):
                            problems += give(held).warnings
            except (FileNotFoundError, TrashdError):
                continue  # recovery has reported it
            except OSError as error:
                problems.append(from_os(error, folder.path_to(State.STAGE, name)).message())
    return problems


def _is_to_be_given(held: HeldContainer) -> bool:
    kernel, record = held.folder.store.kernel, held.record
    if record.heir is None or FRESH in kernel.list(held.fd):
        return False
    return decide_stage(record, identify_at(kernel, held.fd, TREE), None, None) is StageAction.FORWARD


def give(held: HeldContainer) -> Adopted:
    """Let the heir of a container of root's have its tree; if that user does not take it, it is an orphan of root's.

    Raises  OSError; it is where it was then, or the heir's
    """
    heir, kernel = held.record.heir, held.folder.store.kernel
    assert heir is not None
    try:
        with make_folder_of(held.folder.store, heir.uid) as theirs, kernel.open_beneath(held.fd, TREE) as tree:
            giver = _RenameToOwner(held, theirs, tree)
            take = partial(_take, theirs, held.record._replace(heir=None, retention_s=heir.retention_s))
            try:
                ask_owner(heir.uid, take, None, giver.answer)
            except (OSError, TrashdError):
                if giver.taken is None:
                    raise  # else the heir's next command goes on
    except (OSError, TrashdError) as error:
        why = error.message() if isinstance(error, TrashdError) else str(error.strerror)
        move(held, State.ORPHANS)
        what = (
            f"it could not be given to {user_name(heir.uid)} ({why}), so it is root's orphan {held.id}, which is pinned"
        )
        return Adopted(held.id, held.folder.path(), (f"{what}: trashd restore {held.id} --to PATH",))
    assert giver.taken is not None
    dissolve(held)
    return Adopted(giver.taken, theirs.path())


def _take(theirs: UserFolder, record: Record, ask: Ask) -> None:
    """Take a tree from root: a container with its durable record first, then root's rename; to be run as its owner.

    Raises  OSError
    """
    name = os.path.basename(record.origin or b"")
    with stage(theirs, name, record) as staged:
        held = staged.held
        number = int(ask(held.id.encode()))
        if number:
            dissolve(held)
            raise OSError(number, os.strerror(number))
        move(held, State.ORPHANS)
        theirs.store.kernel.fsync(held.fd)


class _RenameToOwner:
    """Root's side: one rename, from a container of root's into one of the heir's.

    taken  the container that has the tree; None if none has
    """

    def __init__(self, held: HeldContainer, theirs: UserFolder, tree: Fd) -> None:
        self._held = held
        self._theirs = theirs
        self._tree = tree
        self.taken: ContainerId | None = None

    def answer(self, message: bytes) -> bytes:
        """An errno for a container's id; 0 if it has the tree now."""
        try:
            text = message.decode("ascii", "replace")
            if not is_container_id(text):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._give(ContainerId(text))
        except OSError as error:
            return b"%d" % (error.errno or errno.EIO)
        return b"0"

    def _give(self, container: ContainerId) -> None:
        kernel, held, theirs = self._held.folder.store.kernel, self._held, self._theirs
        name = container.encode()
        with kernel.open_dir(theirs.fd, join(State.STAGE.value.encode(), name)) as there:
            st = kernel.fstat(there)
            is_private = st.st_uid == theirs.uid and not st.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if not is_private or kernel.fstat(self._tree).st_uid != theirs.uid:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            with with_mounted(kernel, there, theirs.store.base.mounted, theirs.way_to(State.STAGE, name)) as inside:
                DirectRename(kernel, inside, TREE).make(VisibleMove.BACK, held)
            if kernel.is_named(self._tree, held.fd, TREE):
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # this filesystem says 0 and does nothing
        self.taken = container
        # Where it came from: btrfs then writes both sides of a plain rename, before its owner's container moves.
        kernel.fsync(held.fd)


_QUARANTINE = Name(State.QUARANTINE.value.encode())


def seize(
    folder: UserFolder, container: ContainerId, own: UserFolder, note: str, retention_s: int | None = None
) -> Swapped | ClaimLost:
    """Make an orphan of root's of a container in a user's quarantine; to be run as root.

    folder   the user's; nothing is made in it
    own      root's in the same store
    note     kept with the orphan, which is restored with --to alone
    retention_s  None: it is kept until asked for
    Raises   NotProven if another user may have put it there; BadRecord if there is no record of that user's to lock;
             TrashdError as for `remove_path`: the container
             is where it was, or, Unsettled, kept and the message says where
    """
    kernel = folder.store.kernel
    name = Name(container.encode())
    if not folder.is_proven:
        raise not_proven(folder)
    with ExitStack() as owned:
        try:
            # Not by UserFolder.open, which makes what is missing: it would be root's.
            parent = owned.enter_context(kernel.open_dir(folder.fd, _QUARANTINE))
            fd = owned.enter_context(kernel.open_dir(parent, name))
            record = owned.enter_context(_open_to_lock(kernel, fd, folder.uid))
        except (FileNotFoundError, NotADirectoryError):
            return ClaimLost.GONE
        if not kernel.lock(record):
            return ClaimLost.BUSY
        if not (kernel.is_named(fd, parent, name) and kernel.is_named(record, fd, RECORD)):
            return ClaimLost.GONE
        victim = _victim(folder, parent, name, fd)
        try:
            # It looks again after the rename: what was put to the name meanwhile is given back.
            options = SwapOptions(retention_s, note, taken=_taken(kernel, fd, folder.uid))
            return remove(own, victim, options, DirectRename(kernel, victim.parent.sides, name))
        except OSError as error:
            raise explain(error, victim) from error


def _taken(kernel: Kernel, fd: Fd, uid: int) -> TakenContainer:
    """What came into a user's container later than it was made is judged by root's reaper (reaper/not_removed.py)."""
    st = kernel.fstat(fd)
    is_private = st.st_uid == uid and stat.S_IMODE(st.st_mode) == stat.S_IRWXU
    return TakenContainer(max(0, kernel.statx(fd, asks=True).btime_ns), uid if is_private else None)


def _open_to_lock(kernel: Kernel, container_fd: Fd, uid: int) -> Fd:
    """The record's fd, looked at before it is opened: root's open of a device node that a user put there would act."""
    with kernel.open_beneath(container_fd, RECORD) as there:
        st = kernel.fstat(there)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != uid:
            raise BadRecord(f"record.json is not a regular file of uid {uid}")
        return kernel.reopen(there, os.O_RDWR | os.O_NONBLOCK)


def _victim(folder: UserFolder, parent: Fd, name: Name, fd: Fd) -> Victim:
    """The container as what root removes; it borrows all its fds."""
    kernel, store = folder.store.kernel, folder.store
    st = kernel.fstat(fd)
    if st.st_uid != folder.uid:
        raise BadRecord(f"its directory belongs to uid {st.st_uid}")
    mounts = read_mounts()
    mount = mount_of(kernel, fd, mounts, store.base_path)
    relative = RelPath(join(folder.way(), _QUARANTINE))
    place = place_of(os.readlink(b"/proc/self/fd/%d" % store.base.fd), mount)
    above = Scope(
        BackingAndMount(store.base.fd), store.base_path, place, relative, BackingAndMount(parent), mount, tuple(mounts)
    )
    return Victim(above, name, fd, st)
