"""Whose work it is: what lies in a user's folder is read and changed by a process with that user's uid (I13)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fusefs.core.errors import BY_NAME, AuthorityLost, KernelRefused, NoStore, NotPermitted, TrashdError
from fusefs.core.lifecycle import State
from fusefs.core.names import is_container_id, join
from fusefs.linux.children import ChildLost
from fusefs.linux.credentials import Ask, call_as, user_name
from fusefs.store.container import Held
from fusefs.store.layout import Store, UserFolder, open_user
from fusefs.store.verbs import own_folder
from fusefs.store.visible import Direct, Move, Visible

T = TypeVar("T")

_UNDONE_BY = {Move.EXCHANGE: Move.EXCHANGE, Move.PLACE: Move.ASIDE_FRESH}
_FRESH_TO_NAME = _UNDONE_BY.keys()


class _Outcome(msgspec.Struct):
    """What comes back from the child: a result, or an error to be raised here as what it was there."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    detail: str = ""
    hint: str = ""
    errno: int = 0


class _Question(msgspec.Struct):
    """What the child asks of root: a move at the victim's name, its identity, or that the mount looks at it again."""

    what: str
    state: State = State.STAGE
    container: str = ""


class _Answer(msgspec.Struct):
    errno: int = 0
    found: tuple[int, int] | None = None


def as_owner(folder: UserFolder, body: Callable[[Visible | None], T], kind: Any, visible: Direct | None = None) -> T:
    """The result of `body`, run by us if the folder is ours, else (root) in a process of its owner.

    body     gets who does the renames at a visible name: ourselves, or root on the child's request
    kind     the result's type, as msgspec decodes it: the child's word is checked like a user's
    visible  the one name that root will change for the child
    Raises   what `body` raises; AuthorityLost; NotPermitted if it is somebody else's folder and we are not root
    """
    uid = os.geteuid()
    if folder.uid == uid:
        return body(visible)
    if uid != 0:
        raise NotPermitted(folder.path())
    return _call(folder.uid, body, kind, lambda question: _answer(folder, visible, question), visible is not None)


def make_folder_of(store: Store, uid: int) -> UserFolder:
    """A user's folder in a store, made by that user if missing; needs root.

    Raises  AuthorityLost, or what making it met
    """

    def body(_visible: Visible | None) -> None:
        own_folder(store).fd.close()

    _call(uid, body, None, lambda _question: b"", False)
    folder = open_user(store, uid)
    if folder is None:
        raise NoStore(store.base_path)
    return folder


def _call(uid: int, body: Callable[[Visible | None], T], kind: Any, answer: Ask, asks: bool) -> T:
    try:
        message = call_as(uid, lambda ask: _run(body, _Asked(ask) if asks else None), answer)
    except ChildLost as error:
        raise AuthorityLost(user_name(uid)) from error
    outcome = msgspec.json.decode(message, type=_Outcome)
    if outcome.error == "OSError":
        raise OSError(outcome.errno, os.strerror(outcome.errno), outcome.detail)
    if outcome.error == KernelRefused.__name__:
        raise KernelRefused(outcome.detail, outcome.hint, outcome.errno)
    if outcome.error:
        raise BY_NAME[outcome.error](outcome.detail, outcome.hint)
    result: T = msgspec.json.decode(outcome.result, type=kind)
    return result


def _run(body: Callable[[Visible | None], T], visible: Visible | None) -> bytes:
    try:
        outcome = _Outcome(msgspec.Raw(msgspec.json.encode(body(visible))))
    except TrashdError as error:
        outcome = _Outcome(error=type(error).__name__, detail=error.detail, hint=error.hint, errno=error.errno)
    except OSError as error:
        outcome = _Outcome(error="OSError", detail=str(error.filename or ""), errno=error.errno or errno.EIO)
    return msgspec.json.encode(outcome)


class _Asked:
    """The visible name as the child has it: each step is root's, asked for through the channel."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def make(self, move: Move, held: Held) -> None:
        """See Visible."""
        self._put(_Question(move.name, held.state, held.id))

    def found(self) -> tuple[int, int] | None:
        """See Visible."""
        return self._put(_Question("found")).found

    def refresh(self, held: Held) -> None:
        """See Visible."""
        self._put(_Question("refresh", held.state, held.id))

    def _put(self, question: _Question) -> _Answer:
        answer = msgspec.json.decode(self._ask(msgspec.json.encode(question)), type=_Answer)
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno))
        return answer


def _answer(folder: UserFolder, visible: Direct | None, message: bytes) -> bytes:
    """Root's side: only moves between the one name that the administrator gave and a container of that user."""
    try:
        question = msgspec.json.decode(message, type=_Question)
        if visible is None:
            raise PermissionError(errno.EPERM, "no name was given")
        answer = _obey(folder, visible, question)
    except OSError as error:
        answer = _Answer(errno=error.errno or errno.EIO)
    except (msgspec.MsgspecError, KeyError):
        answer = _Answer(errno=errno.EINVAL)
    return msgspec.json.encode(answer)


def _obey(folder: UserFolder, visible: Direct, question: _Question) -> _Answer:
    if question.what == "found":
        return _Answer(found=visible.found())
    if not is_container_id(question.container):
        raise KeyError(question.container)
    kernel = folder.store.kernel
    name = question.container.encode()
    if question.what == "refresh":
        visible.refresh_in(folder, question.state, name)
        return _Answer()
    with kernel.open_dir(folder.fd, join(question.state.value.encode(), name)) as container:
        if kernel.fstat(container).st_uid != folder.uid:
            raise PermissionError(errno.EPERM, "not that user's container")
        move = Move[question.what]
        visible.make_in(move, folder, question.state, name, container)
        if move in _FRESH_TO_NAME and not _is_directory_of(folder.uid, visible):
            # The user changed what was prepared, and root must leave no link where he could not have put one.
            visible.make_in(_UNDONE_BY[move], folder, question.state, name, container)
            raise PermissionError(errno.EPERM, "not that user's directory")
    return _Answer()


def _is_directory_of(uid: int, visible: Direct) -> bool:
    st = visible.look()
    return st is not None and stat.S_ISDIR(st.st_mode) and st.st_uid == uid
