"""Do something as another user: with that uid and those groups alone, and no capability."""

import ctypes
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fusefs.linux import children
from fusefs.linux.children import UserCredentials, user_credentials
from fusefs.store import as_owner, find_stores, orphans, store_registry
from fusefs.store.layout import UserFolder
from fusefs.store.victim_rename import DirectRename, VisibleRename
from tests.support.shared_memory_children import call_in_child
from tests.support.trashd_command import forget_caches, instead_of_exec

R = TypeVar("R")
_PR_SET_DUMPABLE = 4
_PR_SET_SECUREBITS = 28
_SECBIT_NOROOT = 1  # an exec by uid 0 gives no capabilities back
_CAP_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def become(uid: int, gid: int | None = None, groups: Sequence[int] = ()) -> None:
    """Turn this process, root's, into that user for good: all its ids, no capability, not even after exec.

    gid       the uid's number by default; neither has to be in passwd
    """
    gid = uid if gid is None else gid
    if uid == 0:
        _checked(_libc.prctl(_PR_SET_SECUREBITS, ctypes.c_ulong(_SECBIT_NOROOT), 0, 0, 0))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    header, none = struct.pack("=Ii", _CAP_VERSION_3, 0), bytes(24)
    _checked(_libc.capset(header, none))
    # A process that changed its uid can't open its own /proc/self/mem and the like; one that logged in can.
    _checked(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def as_user(uid: int, function: Callable[[], R], *, gid: int | None = None, groups: Sequence[int] = ()) -> R:
    """What the function returns, called as that user in a child with our memory, as shared_memory_children.py has it.

    Raises    what the function raises, with the child's traceback as a note
    """
    return called_by(partial(become, uid, gid, groups), function, f"as_user({uid})")


def called_by(be: Callable[[], object], function: Callable[[], R], who: str) -> R:
    """What the function returns, called in a child that `be` makes a user; who: the user's name in what is raised."""

    def act() -> R:
        be()
        return function()

    forget_caches()
    try:
        return call_in_child(act, who)
    finally:
        forget_caches()


def run_as(
    uid: int,
    argv: Sequence[str | Path],
    *,
    gid: int | None = None,
    groups: Sequence[int] = (),
    stdin: bytes = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as that user, its output captured."""
    return subprocess.run(
        argv,
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env=env,
        check=check,
        preexec_fn=instead_of_exec(argv, env, partial(become, uid, gid, groups)),
    )


@contextmanager
def passable_directory(mode: int = 0o755) -> Iterator[Path]:
    """A fresh one, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="passable-") as name:
        Path(name).chmod(mode)
        yield Path(name)


T = TypeVar("T")
_ASK = "ask_each"
_AS_OWNER = "as_owner"
_blocks: list[None] = []


@contextmanager
def query_without_fork() -> Iterator[None]:
    """Query volumes in this process for the block, without a fork: no volume may hang, and no call may fail.

    Blocks may be in each other, and in several threads.
    """
    _blocks.append(None)
    for module in (find_stores, store_registry):
        setattr(module, _ASK, _ask_each)
    setattr(orphans, _AS_OWNER, _as_owner)
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks:
            for module in (find_stores, store_registry):
                setattr(module, _ASK, children.ask_each)
            setattr(orphans, _AS_OWNER, as_owner.call_as_owner)


def _ask_each(
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    silent: set[Hashable],
    where: Callable[[T], Hashable],
    person: UserCredentials | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[T, bytes | None]]:
    """See children.ask_each."""
    if person is not None:
        return children.ask_each(questions, ask, silent, where, person, limit_s)
    return ((question, ask(question)) for question in questions)


def _as_owner(
    folder: UserFolder, body: Callable[[VisibleRename | None], T], kind: Any, visible: DirectRename | None = None
) -> T:
    """See as_owner.call_as_owner."""
    if visible is not None or os.geteuid() or not folder.uid:
        return as_owner.call_as_owner(folder, body, kind, visible)
    user = user_credentials(folder.uid)
    return as_user(user.uid, partial(body, None), gid=user.gid, groups=user.groups)
