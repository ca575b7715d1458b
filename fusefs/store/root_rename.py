"""Renames that root makes for a container's owner, at the one name that an administrator gave, on a child's request.

Of what lies in a user's container root believes nothing that it has not looked at itself, before and after the rename:
to the name comes what the record tells of; anything else goes back.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from fusefs.core.identity import Identity, Likelihood, compare
from fusefs.core.lifecycle import State
from fusefs.core.names import Name, is_container_id, join
from fusefs.core.record import Method
from fusefs.linux.fd import Fd
from fusefs.store.layout import TREE, UserFolder
from fusefs.store.victim_rename import DirectRename
from fusefs.store.visible_move import VisibleMove

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
        import msgspec

        try:
            question = msgspec.json.decode(message, type=RenameQuestion)
            if self.visible is None:
                raise PermissionError(errno.EPERM, "no name was given")
            answer = self._obey(self.visible, question)
        except _NotWanted as refused:
            answer = RenameAnswer(refused=str(refused))
        except OSError as error:
            answer = RenameAnswer(errno=error.errno or errno.EIO)
        except (ValueError, KeyError):
            answer = RenameAnswer(errno=errno.EINVAL)
        return msgspec.json.encode(answer)

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
