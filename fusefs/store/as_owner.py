"""Acting as a folder's owner: what lies in a user's folder is read and changed by a process with that uid (I13)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fusefs.core.errors import BY_NAME, AuthorityLost, KernelRefused, NoStore, NotPermitted, Refused, TrashdError
from fusefs.linux.act_as_user import Ask, call_as, user_name
from fusefs.linux.child_channel import ChildLost
from fusefs.store.container import HeldContainer
from fusefs.store.layout import Store, UserFolder
from fusefs.store.make_folder import make_roots
from fusefs.store.root_rename import ITS_OWNERS, RenameAnswer, RenameQuestion, RootRename
from fusefs.store.stage import restock
from fusefs.store.user_folders import open_user
from fusefs.store.victim_rename import DirectRename, VisibleRename
from fusefs.store.visible_move import VisibleMove

T = TypeVar("T")


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
    import msgspec  # here, because it takes a tenth of a command's start, and before the child may not read it

    try:
        message = call_as(uid, lambda ask: _run(body, ask), answer)
    except ChildLost as error:
        raise AuthorityLost(user_name(uid)) from error
    told, _, result = message.partition(b"\n")
    outcome = msgspec.json.decode(told, type=_ChildsError)
    if outcome.error == "OSError":
        raise OSError(outcome.errno, os.strerror(outcome.errno), outcome.detail)
    if outcome.error == KernelRefused.__name__:
        raise KernelRefused(outcome.detail, outcome.hint, outcome.errno)
    if outcome.error:
        raise BY_NAME[outcome.error](outcome.detail, outcome.hint)
    wanted: T = msgspec.json.decode(result, type=kind)
    return wanted


def _run(body: Callable[[Ask], T], ask: Ask) -> bytes:
    """What a child says: its error in a line, then what it was asked for."""
    import msgspec

    result, outcome = b"", _ChildsError()
    try:
        result = msgspec.json.encode(body(ask))
    except TrashdError as error:
        outcome = _ChildsError(type(error).__name__, detail=error.detail, hint=error.hint, errno=error.errno)
    except OSError as error:
        outcome = _ChildsError("OSError", detail=str(error.filename or ""), errno=error.errno or errno.EIO)
    return msgspec.json.encode(outcome) + b"\n" + result


class _RenameThroughRoot(NamedTuple):
    """The visible name as the child has it: each step is root's, asked for through the channel."""

    ask: Ask

    def make(self, move: VisibleMove, held: HeldContainer) -> int:
        """See Visible."""
        self._put(RenameQuestion(move.name, held.state, held.name().decode(), held.record.victim, held.record.method))
        return 0

    def found(self) -> tuple[int, int] | None:
        """See Visible."""
        return self._put(RenameQuestion("found")).found

    def refresh(self, held: HeldContainer) -> None:
        """See Visible."""
        self._put(RenameQuestion("refresh", held.state, held.name().decode()))

    def _put(self, question: RenameQuestion) -> RenameAnswer:
        import msgspec

        answer = msgspec.json.decode(self.ask(msgspec.json.encode(question)), type=RenameAnswer)
        if answer.refused:
            raise Refused(answer.refused, ITS_OWNERS)
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer
