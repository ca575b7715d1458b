"""Root's hand at the one name that an administrator gave, asked for by a process of the container's owner.

Of what lies in a user's container root believes nothing that he has not looked at himself, before and after the rename:
to the name comes what the record tells of, or what this hand took from there; anything else goes back.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from typing import Self

import msgspec

from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.lifecycle import State
from fusefs.core.names import Name, is_container_id, join
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.store.layout import FRESH, TREE, UserFolder
from fusefs.store.visible import Direct, Move

_COMES = {Move.EXCHANGE: TREE, Move.BACK: TREE, Move.PLACE: FRESH}
"""What of the container gets the name."""
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


class Question(msgspec.Struct):
    """What a child asks of root: a move at the name, what has it, or that the mount looks at it again.

    wanted, method  of the record: the identity of what is to get the name, and how its victim came
    """

    what: str
    state: State = State.STAGE
    container: str = ""
    wanted: Identity | None = None
    method: Method = Method.EXCHANGE


class Answer(msgspec.Struct):
    """What became of it; `refused` is root's own word, `errno` the kernel's."""

    errno: int = 0
    found: tuple[int, int] | None = None
    refused: str = ""


class _NotWanted(Exception):
    """Why something does not get the name."""


class Hand:
    """Changes the name for one user's process, as long as it is open."""

    def __init__(self, folder: UserFolder, visible: Direct | None) -> None:
        """visible: the name; None if the administrator gave none."""
        self._folder = folder
        self._visible = visible
        self._kernel = folder.store.kernel
        self._owned = ExitStack()
        self._taken: list[Fd] = []  # held open, so that nobody makes something else with their numbers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._owned.close()

    def answer(self, message: bytes) -> bytes:
        """Do what a child asks, if it is a move between the name and a container of that user."""
        try:
            question = msgspec.json.decode(message, type=Question)
            if self._visible is None:
                raise PermissionError(errno.EPERM, "no name was given")
            answer = self._obey(self._visible, question)
        except _NotWanted as refused:
            answer = Answer(refused=str(refused))
        except OSError as error:
            answer = Answer(errno=error.errno or errno.EIO)
        except (msgspec.MsgspecError, KeyError):
            answer = Answer(errno=errno.EINVAL)
        return msgspec.json.encode(answer)

    def _obey(self, visible: Direct, question: Question) -> Answer:
        if question.what == "found":
            return Answer(found=visible.found())
        if not is_container_id(question.container):
            raise KeyError(question.container)
        name = question.container.encode()
        if question.what == "refresh":
            visible.refresh_in(self._folder, question.state, name)
            return Answer()
        move = Move[question.what]
        with self._kernel.open_dir(self._folder.fd, join(question.state.value.encode(), name)) as container:
            if self._kernel.fstat(container).st_uid != self._folder.uid:
                raise PermissionError(errno.EPERM, "not that user's container")
            if move in _COMES:
                self._bring(visible, move, question, container)
            else:
                self._note(visible)
                visible.make_in(move, self._folder, question.state, name, container)
        return Answer()

    def _note(self, visible: Direct) -> None:
        """Remember what has the name: it may come back."""
        fd = visible.open()
        if fd is not None:
            self._taken.append(self._owned.enter_context(fd))

    def _bring(self, visible: Direct, move: Move, question: Question, container: Fd) -> None:
        """Let something of the container get the name, and nothing else, whatever its user does meanwhile."""
        kernel, name = self._kernel, question.container.encode()
        with kernel.open_beneath(container, _COMES[move]) as coming:
            self._check(move, question, coming)
            if move is Move.EXCHANGE:
                self._note(visible)
            visible.make_in(move, self._folder, question.state, name, container)
            if visible.has(coming) or any(map(visible.has, self._taken)):
                return  # the latter where a filesystem says 0 and does nothing: who asked looks, too
        told = f"{question.container}: its owner put something else in its place at that moment"
        self._take_away(visible, move, question.state, name, container)
        if move is not Move.EXCHANGE:
            raise _NotWanted(f"{told}; it was given back")
        with kernel.open_beneath(container, TREE) as tree:
            if any(os.path.samestat(kernel.fstat(tree), kernel.fstat(fd)) for fd in self._taken):
                visible.make_in(Move.BACK, self._folder, question.state, name, container)
                if visible.has(tree):
                    raise _NotWanted(f"{told}; it was given back")
                self._take_away(visible, Move.BACK, question.state, name, container)
        raise _NotWanted(f"{told}; the name is free now")

    def _check(self, move: Move, question: Question, coming: Fd) -> None:
        """Raises  _NotWanted unless it is what root took from the name, or what the record tells of."""
        kernel = self._kernel
        st = kernel.fstat(coming)
        if any(os.path.samestat(st, kernel.fstat(fd)) for fd in self._taken):
            return
        if move is Move.BACK:
            why = why_other(question.method, question.wanted, st, kernel.identify(coming))
        elif not stat.S_ISDIR(st.st_mode) or st.st_uid != self._folder.uid:
            why = f"the fresh directory is {_KINDS[stat.S_IFMT(st.st_mode)]} of uid {st.st_uid}"
        elif compare(kernel.identify(coming), question.wanted) is Likelihood.OTHER:
            why = "the fresh directory is not the one of its record"
        else:
            return
        if why:
            raise _NotWanted(f"{question.container}: {why}")

    def _take_away(self, visible: Direct, move: Move, state: State, name: bytes, container: Fd) -> None:
        """Give what got the name wrongly back to its user: to where it was, or beside that if it is taken.

        If he removed the container, it goes to where root alone removes anything. Raises  OSError
        """
        beside = Name(b"refused." + os.urandom(6).hex().encode())
        for to in (beside,) if move is Move.EXCHANGE else (_COMES[move], beside):
            with suppress(OSError):
                visible.take_away(self._folder, state, name, container, to)
                return
        visible.take_to(self._folder.store.u_fd, beside)


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
