"""Acts as root for other users, partly in processes of those users: restore, `swap --for-owner`, `reap --force`.

Restore: the user's process asks root for each rename at the one name that the administrator gave. Root itself checks
the user's container before and after the rename. Only the tree that the record identifies keeps the name; root moves
any other entry back.

`swap --for-owner`: root swaps the directory into root's own folder, where no other user can exchange the replacement.
Then one rename moves the old tree into a container that a process of the tree's owner has staged. So the owner can't
choose the entry that gets the name. Until that rename, the orphan belongs to root, as its record states, and does not
expire.

Seizing (`reap --force`): root moves a container from a user's quarantine into root's own folder. Root can't claim the
container in the user's folder, where the user may rename entries: root would create records and directories there, and
read the user's record. So root moves the whole container, as `trashd rm` would, with one rename between two directories
that root holds open. The result is root's own orphan, which root reaps in a folder that no other user can enter (I13).
Root locks the record to keep reapers and restores out, but never reads it.
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
from fusefs.core.identity import Identity, IdentityMatch, compare
from fusefs.core.names import ContainerId, Name, RelPath, is_container_id, join_path
from fusefs.core.record import Method, Record
from fusefs.linux.children import Ask, ChildLost, call_in_child_as, user_name
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import place_of, read_mounts, relative_to
from fusefs.store.backing_and_mount import BackingAndMount, Scope, borrow_both_sides
from fusefs.store.container import ClaimLost, HeldContainer, dissolve, hold, move_to_state
from fusefs.store.layout import RECORD, REPLACEMENT, TREE, Store, UserFolder
from fusefs.store.make_folder import make_folder_as_root
from fusefs.store.stage import SwapOptions, TakenContainer, identify_at, restock, stage
from fusefs.store.swap import (
    Adopted,
    Swapped,
    open_own_folder,
    remove,
    store_above,
    swap,
    swap_or_remove_path,
    to_user_error,
)
from fusefs.store.tidy_folder import make_not_proven_error
from fusefs.store.user_folders import add_pointer, open_user_folder
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
OWNER_RESTORES_HINT = "inspect it with ls; its owner can restore it: trashd restore ID --to PATH"
"""The hint if root refuses to move a tree to the requested name."""


class RenameQuestion(NamedTuple):
    """A child's request to root: move a tree to the visible name, identify the entry there, or refresh the mount.

    what            the name of a VisibleMove, "found" or "refresh"
    wanted, method  from the record: the tree's identity, and how the tree was moved into the store
    """

    what: str
    state: State = State.RESTORING
    container: str = ""
    wanted: Identity | None = None
    method: Method = Method.EXCHANGE


class RenameAnswer(NamedTuple):
    """Root's answer: the kernel's errno, the entry's device and inode number, or the reason why root refuses."""

    errno: int = 0
    dev_ino: tuple[int, int] | None = None
    refused: str = ""


class _TreeRefused(Exception):
    """The reason why a tree must not be moved to the requested name."""


class RootRename(NamedTuple):
    """Renames trees from one user's containers to the visible name.

    visible  makes the renames at that name; None if the administrator gave no name
    """

    folder: UserFolder
    visible: DirectRename | None

    def answer(self, message: bytes) -> bytes:
        """Answer a child's request; make a rename only between the visible name and a container of this user."""
        try:
            question = json.decode(message, type=RenameQuestion)
            if self.visible is None:
                raise PermissionError(errno.EPERM, "no destination was given")
            answer = self._execute(self.visible, question)
        except _TreeRefused as refused:
            answer = RenameAnswer(refused=str(refused))
        except OSError as error:
            answer = RenameAnswer(errno=error.errno or errno.EIO)
        except (ValueError, KeyError):
            answer = RenameAnswer(errno=errno.EINVAL)
        return json.encode(answer)

    def _execute(self, visible: DirectRename, question: RenameQuestion) -> RenameAnswer:
        if question.what == "found":
            return RenameAnswer(dev_ino=visible.stat_name())
        if not is_container_id(question.container):
            raise KeyError(question.container)
        name = question.container.encode()
        if question.what == "refresh":
            visible.refresh_in(self.folder, question.state, name)
            return RenameAnswer()
        if VisibleMove[question.what] is not VisibleMove.BACK:
            raise PermissionError(errno.EPERM, "only a restore may move an entry to the requested name")
        kernel = self.folder.store.kernel
        with kernel.open_dir(self.folder.fd, join_path(question.state.value.encode(), name)) as container:
            if kernel.fstat(container).st_uid != self.folder.uid:
                raise PermissionError(errno.EPERM, "the container belongs to another user")
            self._move_to_name(visible, question, container)
        return RenameAnswer()

    def _move_to_name(self, visible: DirectRename, question: RenameQuestion, container: Fd) -> None:
        """Rename the container's tree to the visible name; if the user has replaced the tree, move the entry back."""
        kernel, name = self.folder.store.kernel, question.container.encode()
        with kernel.open_beneath(container, TREE) as tree:
            why = explain_mismatch(question.method, question.wanted, kernel.fstat(tree), kernel.identify(tree))
            if why:
                raise _TreeRefused(f"{name.decode()}: {why}")
            visible.make_in(VisibleMove.BACK, self.folder, question.state, name, container)
            if visible.refers_to(tree):
                return
        self._give_back(visible, question.state, name, container)
        why = "its owner replaced the tree during the restore, so the new entry was moved back"
        raise _TreeRefused(f"{name.decode()}: {why}")

    def _give_back(self, visible: DirectRename, state: State, name: bytes, container: Fd) -> None:
        """Move an entry that is not the recorded tree from the visible name into the container, as `tree` if possible.

        If the user has removed the container, move the entry to a directory where only root can remove entries.
        Raises  OSError
        """
        beside = Name(b"refused." + os.urandom(6).hex().encode())
        for to in (TREE, beside):
            with suppress(OSError):
                visible.move_into_container(self.folder, state, name, container, to)
                return
        visible.move_to_directory(self.folder.store.areas.all()[0][1], beside)


def explain_mismatch(method: Method, recorded: Identity | None, st: os.stat_result, identity: Identity) -> str:
    """Return the reason why a tree is not accepted as the one that its record identifies, or "" if it is accepted.

    A tree whose identity can't be verified is not accepted.
    method, recorded  from the record: how the victim was moved into the store, and the victim's identity
    st, identity      of the tree
    """
    kind = stat.S_IFMT(st.st_mode)
    kinds = (stat.S_IFDIR, stat.S_IFREG) if method in _FILES_TOO else (stat.S_IFDIR,)
    if kind not in kinds:
        return f"it is {_KINDS.get(kind, 'something else')}, not {' or '.join(_KINDS[one] for one in kinds)}"
    match compare(identity, recorded):
        case IdentityMatch.SAME:
            return ""
        case IdentityMatch.OTHER:
            assert recorded is not None
            return (
                f"it is inode {identity.ino}, but its record names inode {recorded.ino}, or an earlier file that had "
                "this number"
            )
        case IdentityMatch.UNKNOWN:
            return "it can't be verified to be the tree that its record names"


class _ChildsError(NamedTuple):
    """An error in the child, to be raised in the parent. error: the class's name; empty if there was none"""

    error: str = ""
    detail: str = ""
    hint: str = ""
    errno: int = 0


def call_as_owner(
    folder: UserFolder, body: Callable[[VisibleRename | None], T], result_type: Any, visible: DirectRename | None = None
) -> T:
    """Run `body` as a folder's owner: in this process if we are the owner, otherwise, as root, in a child process.

    body     gets `visible`, or in a child an object that asks root to make each rename
    result_type  the result's type for msgspec, which validates the child's message like any user input
    visible  makes the renames at the one name that root may change for the child
    Raises   errors from `body`; AuthorityLost; NotPermitted if the folder is another user's and we are not root
    """
    uid = os.geteuid()
    if folder.uid == uid:
        return body(visible)
    if uid != 0:
        raise NotPermitted(folder.path())
    root = RootRename(folder, visible)
    return run_in_user_process(
        folder.uid, lambda ask: body(None if visible is None else _RenameThroughRoot(ask)), result_type, root.answer
    )


def make_folder_for(store: Store, uid: int) -> UserFolder:
    """Open a user's folder in a store; make the folder if it is missing. Needs root.

    If root can't change the folder's owner (on a network filesystem), a process that runs as the user makes the folder.
    Operations that the user's killed commands left unfinished in the folder are completed or undone.
    Raises  AuthorityLost, or the error from making or opening the folder
    """
    if store.is_ours_as_root():
        with suppress(OSError, NoStore):
            make_folder_as_root(store, uid).fd.close()

    def body(_ask: Ask) -> None:
        with open_own_folder(store) as folder:
            restock(folder)

    run_in_user_process(uid, body, None, lambda _question: b"")
    folder = open_user_folder(store, uid)
    if folder is None:
        raise NoStore(store.base_path)
    return folder


def run_in_user_process(uid: int, body: Callable[[Ask], T], result_type: Any, answer: Ask) -> T:
    """Run `body` in a process that runs as a user; return its result. `answer` answers the requests of `body` to root.

    The child must not import modules, since its user may be unable to read trashd's files. So the modules that the
    child needs must have been imported earlier: at the top of this module, or by the parent.
    result_type, Raises  as for `call_as_owner`
    """
    try:
        message = call_in_child_as(uid, lambda ask: _encode_outcome(body, ask), answer)
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
    decoded: T = json.decode(result, type=result_type)
    return decoded


def _encode_outcome(body: Callable[[Ask], T], ask: Ask) -> bytes:
    """Make the child's message: the error on the first line, then the result of `body`."""
    result, outcome = b"", _ChildsError()
    try:
        result = json.encode(body(ask))
    except TrashdError as error:
        outcome = _ChildsError(type(error).__name__, detail=error.detail, hint=error.hint, errno=error.errno)
    except OSError as error:
        outcome = _ChildsError("OSError", detail=str(error.filename or ""), errno=error.errno or errno.EIO)
    return json.encode(outcome) + b"\n" + result


class _RenameThroughRoot(NamedTuple):
    """Implements VisibleRename in a child, by asking root to make each rename."""

    ask: Ask

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        self._ask_root(
            RenameQuestion(move.name, held.state, held.name().decode(), held.record.victim, held.record.method)
        )
        return 0

    def stat_name(self) -> tuple[int, int] | None:
        return self._ask_root(RenameQuestion("found")).dev_ino

    def refresh(self, held: HeldContainer) -> None:
        self._ask_root(RenameQuestion("refresh", held.state, held.name().decode()))

    def _ask_root(self, question: RenameQuestion) -> RenameAnswer:
        answer = json.decode(self.ask(json.encode(question)), type=RenameAnswer)
        if answer.refused:
            raise Refused(answer.refused, OWNER_RESTORES_HINT)
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer


def swap_for_owner(kernel: Kernel, path: bytes, options: SwapOptions) -> Swapped:
    """Swap the directory at a path into its owner's folder; needs root.

    If the owner's process does not receive the tree, root keeps it, and the result has a warning.
    Raises  TrashdError, as for `swap_or_remove_path`
    """
    return swap_or_remove_path(kernel, path, options, _swap_for_owner, directory=True)


def _swap_for_owner(own: UserFolder, victim: Victim, options: SwapOptions, visible: VisibleRename) -> Swapped:
    uid, store = victim.stat.st_uid, own.store
    if uid == own.uid:
        return swap(own, victim, options, visible)
    upper = store_above(victim.parent, store)
    if upper is not None:
        with upper, make_folder_for(upper, uid) as folder:
            lower = RelPath(relative_to(store.base_path, upper.base_path))
            call_as_owner(folder, lambda _names: add_pointer(folder, lower), None)
    return swap(own, victim, options._replace(heir=uid), visible, give_to_heir)


def give_unfinished_to_heirs(folder: UserFolder) -> list[str]:
    """Complete killed `swap --for-owner` commands by giving each tree to its heir; return the problems as text."""
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
                        if _is_due_to_heir(held):
                            problems += give_to_heir(held).warnings
            except (FileNotFoundError, TrashdError):
                continue  # recovery has reported it
            except OSError as error:
                problems.append(from_os(error, folder.path_to(State.STAGE, name)).message())
    return problems


def _is_due_to_heir(held: HeldContainer) -> bool:
    kernel, record = held.folder.store.kernel, held.record
    if record.heir is None or REPLACEMENT in kernel.list(held.fd):
        return False
    return decide_stage(record, identify_at(kernel, held.fd, TREE), None, None) is StageAction.FORWARD


def give_to_heir(held: HeldContainer) -> Adopted:
    """Give the tree in root's container to the heir that the record names; if that fails, make the tree root's orphan.

    Raises  OSError; then the tree is in one of the two containers
    """
    heir, kernel = held.record.heir, held.folder.store.kernel
    assert heir is not None
    try:
        with make_folder_for(held.folder.store, heir.uid) as heir_folder, kernel.open_beneath(held.fd, TREE) as tree:
            giver = _RenameToOwner(held, heir_folder, tree)
            take = partial(_receive_tree, heir_folder, held.record._replace(heir=None, retention_s=heir.retention_s))
            try:
                run_in_user_process(heir.uid, take, None, giver.answer)
            except (OSError, TrashdError):
                if giver.received_id is None:
                    raise  # if the heir has the tree, the heir's next command completes this
    except (OSError, TrashdError) as error:
        why = error.message() if isinstance(error, TrashdError) else str(error.strerror)
        move_to_state(held, State.ORPHANS)
        what = (
            f"it could not be given to {user_name(heir.uid)} ({why}), so it is root's orphan {held.id}, which is pinned"
        )
        return Adopted(held.id, held.folder.path(), (f"{what}: trashd restore {held.id} --to PATH",))
    assert giver.received_id is not None
    dissolve(held)
    return Adopted(giver.received_id, heir_folder.path())


def _receive_tree(heir_folder: UserFolder, record: Record, ask: Ask) -> None:
    """As the heir, make a container with a durable record; then ask root to move the tree into it. Raises  OSError"""
    name = os.path.basename(record.origin or b"")
    with stage(heir_folder, name, record) as staged:
        held = staged.held
        number = int(ask(held.id.encode()))
        if number:
            dissolve(held)
            raise OSError(number, os.strerror(number))
        move_to_state(held, State.ORPHANS)
        heir_folder.store.kernel.fsync(held.fd)


class _RenameToOwner:
    """Root's part in giving a tree to an heir: one rename, from root's container into one of the heir's.

    received_id  the ID of the heir's container that has received the tree; None until then
    """

    def __init__(self, held: HeldContainer, heir_folder: UserFolder, tree: Fd) -> None:
        self._held = held
        self._heir_folder = heir_folder
        self._tree = tree
        self.received_id: ContainerId | None = None

    def answer(self, message: bytes) -> bytes:
        """Move the tree into the container whose ID is the message; return an errno as text, 0 for success."""
        try:
            text = message.decode("ascii", "replace")
            if not is_container_id(text):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._move_tree(ContainerId(text))
        except OSError as error:
            return b"%d" % (error.errno or errno.EIO)
        return b"0"

    def _move_tree(self, container: ContainerId) -> None:
        kernel, held, heir_folder = self._held.folder.store.kernel, self._held, self._heir_folder
        name = container.encode()
        with kernel.open_dir(heir_folder.fd, join_path(State.STAGE.value.encode(), name)) as target_fd:
            st = kernel.fstat(target_fd)
            is_private = st.st_uid == heir_folder.uid and not st.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
            if not is_private or kernel.fstat(self._tree).st_uid != heir_folder.uid:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            with borrow_both_sides(
                kernel, target_fd, heir_folder.store.base.mounted, heir_folder.relative_path_to(State.STAGE, name)
            ) as inside:
                DirectRename(kernel, inside, TREE).make(VisibleMove.BACK, held)
            if kernel.is_named(self._tree, held.fd, TREE):
                raise OSError(errno.EIO, os.strerror(errno.EIO))  # the filesystem reported success but did nothing
        self.received_id = container
        # With this flush, btrfs writes both sides of a plain rename before the heir's container moves.
        kernel.fsync(held.fd)


_QUARANTINE = Name(State.QUARANTINE.value.encode())


def seize(
    folder: UserFolder, container: ContainerId, own: UserFolder, note: str, retention_s: int | None = None
) -> Swapped | ClaimLost:
    """Turn a container in a user's quarantine into root's orphan, which can be restored only with --to; needs root.

    folder       the user's folder; nothing is created in it
    own          root's folder in the same store
    retention_s  None: the orphan never expires
    Raises       NotProven if another user may have put the container there; BadRecord if the container does not belong
                 to this user, or its record is not this user's regular file; TrashdError as for `remove`: then the
                 container is where it was or, for Unsettled, at the place that the message names
    """
    kernel = folder.store.kernel
    name = Name(container.encode())
    if not folder.is_proven:
        raise make_not_proven_error(folder)
    with ExitStack() as owned:
        try:
            # UserFolder.open is not used, since it makes a missing directory, which would belong to root.
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
            # `remove` checks again after the rename, and moves back an entry that has taken the name.
            options = SwapOptions(retention_s, note, taken_container=_make_taken_container(kernel, fd, folder.uid))
            return remove(own, victim, options, DirectRename(kernel, victim.parent.sides, name))
        except OSError as error:
            raise to_user_error(error, victim) from error


def _make_taken_container(kernel: Kernel, fd: Fd, uid: int) -> TakenContainer:
    """Return the data by which root's reaper recognises entries that are moved in later (reaper/late_arrivals.py)."""
    st = kernel.fstat(fd)
    is_private = st.st_uid == uid and stat.S_IMODE(st.st_mode) == stat.S_IRWXU
    return TakenContainer(max(0, kernel.statx(fd, asks_server=True).btime_ns), uid if is_private else None)


def _open_to_lock(kernel: Kernel, container_fd: Fd, uid: int) -> Fd:
    """Open the record, after checking its type: opening a device node that a user put there could have side effects."""
    with kernel.open_beneath(container_fd, RECORD) as path_fd:
        st = kernel.fstat(path_fd)
        if not stat.S_ISREG(st.st_mode) or st.st_uid != uid:
            raise BadRecord(f"record.json is not a regular file that belongs to uid {uid}")
        return kernel.reopen(path_fd, os.O_RDWR | os.O_NONBLOCK)


def _victim(folder: UserFolder, parent: Fd, name: Name, fd: Fd) -> Victim:
    """Return the container as a Victim, for its removal by root. The victim does not own its fds."""
    kernel, store = folder.store.kernel, folder.store
    st = kernel.fstat(fd)
    if st.st_uid != folder.uid:
        raise BadRecord(f"its directory belongs to uid {st.st_uid}")
    mounts = read_mounts()
    mount = mount_of(kernel, fd, mounts, store.base_path)
    relative = RelPath(join_path(folder.relative_path(), _QUARANTINE))
    place = place_of(os.readlink(b"/proc/self/fd/%d" % store.base.fd), mount)
    above = Scope(
        BackingAndMount(store.base.fd), store.base_path, place, relative, BackingAndMount(parent), mount, tuple(mounts)
    )
    return Victim(above, name, fd, st)
