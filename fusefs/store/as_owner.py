"""Acting as a folder's owner: what lies in a user's folder is read and changed by a process with that uid (I13).

At the one name that an administrator gave, root renames for that process, on its request. Of what lies in a user's
container root believes nothing that it has not looked at itself, before and after the rename: to the name comes what
the record tells of; anything else goes back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fusefs.core.errors import BY_NAME, AuthorityLost, KernelRefused, NoStore, NotPermitted, Refused, TrashdError
from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.lifecycle import State
from fusefs.core.names import Name, is_container_id, join
from fusefs.core.record import Method
from fusefs.linux.act_as_user import Ask, call_as, user_name
from fusefs.linux.child_channel import ChildLost
from fusefs.linux.fd import Fd
from fusefs.store.container import HeldContainer
from fusefs.store.layout import TREE, Store, UserFolder
from fusefs.store.make_folder import make_roots
from fusefs.store.stage import restock
from fusefs.store.user_folders import open_user
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


ITS_OWNERS = "look at it with ls; its owner can restore it himself: trashd restore ID --to PATH"
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
    """What became of it; `refused` is root's own word, `errno` the kernel's."""

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
        from msgspec import json  # loaded by ask_owner, which alone calls this

        try:
            question = json.decode(message, type=RenameQuestion)
            if self.visible is None:
                raise PermissionError(errno.EPERM, "no name was given")
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
            raise PermissionError(errno.EPERM, "nothing else gets the name")
        kernel = self.folder.store.kernel
        with kernel.open_dir(self.folder.fd, join(question.state.value.encode(), name)) as container:
            if kernel.fstat(container).st_uid != self.folder.uid:
                raise PermissionError(errno.EPERM, "not that user's container")
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
        told = "its owner put something else in its place at that moment; it was given back"
        raise _NotWanted(f"{name.decode()}: {told}")

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
    """Why a tree is not what its record tells of, as far as root goes by it; empty if it is.

    What an identity can't tell is not taken for the same.
    method, wanted  of the record: how the victim came, and its identity
    """
    kind = stat.S_IFMT(st.st_mode)
    kinds = (stat.S_IFDIR, stat.S_IFREG) if method in _FILES_TOO else (stat.S_IFDIR,)
    if kind not in kinds:
        return f"its tree is {_KINDS.get(kind, 'something else')}, not {' or '.join(_KINDS[one] for one in kinds)}"
    match compare(found, wanted):
        case Likelihood.SAME:
            return ""
        case Likelihood.OTHER:
            assert wanted is not None
            return f"its tree is inode {found.ino}, and its record tells of inode {wanted.ino} or of an earlier one"
        case Likelihood.UNKNOWN:
            return "nobody can tell whether its tree is the one of its record"


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
    kind     the result's type, as msgspec decodes it: the child's word is checked like a user's
    visible  the one name that root will change for the child
    Raises   what `body` raises; AuthorityLost; NotPermitted if it is another user's folder and we are not root
    """
    uid = os.geteuid()
    if folder.uid == uid:
        return body(visible)
    if uid != 0:
        raise NotPermitted(folder.path())
    hand = RootRename(folder, visible)
    return ask_owner(
        folder.uid, lambda ask: body(None if visible is None else _RenameThroughRoot(ask)), kind, hand.answer
    )


def make_folder_of(store: Store, uid: int) -> UserFolder:
    """A user's folder in a store, made by root if missing; needs root.

    Where root can't give it away (a network filesystem), its user makes it; what a killed command of that user left is
    completed or undone.
    Raises  AuthorityLost, or what making it met
    """
    from fusefs.store.swap_path import own_folder  # before there is a child, who may not read where it lies

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
    """The result of `body`, run in a process of a user's by root, which it may ask something; kind, Raises as above."""
    from msgspec import json  # late: `swap` and `rm` of one's own need no child

    try:
        message = call_as(uid, lambda ask: _run(body, ask), answer)
    except ChildLost as error:
        raise AuthorityLost(user_name(uid)) from error
    told, _, result = message.partition(b"\n")
    outcome = json.decode(told, type=_ChildsError)
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
    from msgspec import json  # loaded by the parent: a user may not be able to read where it is installed

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
        from msgspec import json  # as in _run

        answer = json.decode(self.ask(json.encode(question)), type=RenameAnswer)
        if answer.refused:
            raise Refused(answer.refused, ITS_OWNERS)
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer
