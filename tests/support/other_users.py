"""Do something as another user: with that uid and those groups alone, and no capability."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.support.trashd_command import instead_of_exec

R = TypeVar("R")

_PR_SET_DUMPABLE = 4
_PR_SET_SECUREBITS = 28
_SECBIT_NOROOT = 1  # an exec by uid 0 gives no capabilities back
_CAP_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class ChildDied(Exception):
    """The child ended without a result; the message says how."""


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
    """What the function returns, called in a child as that user; result and exception come back pickled.

    Raises    what the function raises, with the child's traceback as a note; ChildDied: no word came back
    """
    return called_by(partial(become, uid, gid, groups), function, f"as_user({uid})")


def called_by(be: Callable[[], object], function: Callable[[], R], who: str) -> R:
    """What the function returns, called in a child that `be` makes a user; who: the user's name in what is raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _answer(write_fd, be, function, who)
    os.close(write_fd)
    try:
        with os.fdopen(read_fd, "rb") as pipe:
            answer = pipe.read()
    finally:
        _, status = os.waitpid(pid, 0)
    if not answer:
        raise ChildDied(f"the child of {who} ended with {os.waitstatus_to_exitcode(status)}")
    is_result, value = pickle.loads(answer)
    if not is_result:
        raise value
    result: R = value
    return result


def _answer(write_fd: int, be: Callable[[], object], function: Callable[[], R], who: str) -> None:
    """In the child: send the outcome and end, without a trace of the test runner's own clean-up."""
    try:
        try:
            be()
            answer = pickle.dumps((True, function()))
        except BaseException as error:
            told = "".join(traceback.format_exception(error))
            error.add_note(f"in the child of {who}:\n{told}")
            try:
                answer = pickle.dumps((False, error))
                pickle.loads(answer)
            except Exception:
                answer = pickle.dumps((False, ChildDied(told)))
        with os.fdopen(write_fd, "wb") as pipe:
            pipe.write(answer)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)


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
