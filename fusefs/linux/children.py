"""Child processes that act as another user or with a time limit: forking, messages with fds, and killing."""

from __future__ import annotations

import fcntl
import os
import pwd
import select
import signal
import struct
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import inf
from signal import SIGKILL
from socket import recv_fds, send_fds, socket, socketpair
from typing import NamedTuple, TypeVar

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd, close_on_error

_MESSAGE_MAX = 256 * 1024 * 1024
_HEAD = struct.Struct("=QI")
_MAX_FDS = 253
"""SCM_MAX_FD, unix(7)."""
_CHECK_S = 0.2
_FIRST, _FD_MAX = 3, 2**31 - 1
"""A detached child's fds begin after the standard ones."""
_EXCEPTION_EXIT_CODE = 255
"""A child's exit code after any exception other than OSError; no errno has this value."""
_STOPPED = b"T", b"t"
"""The states of a stopped process in proc_pid_stat(5)."""


class ChildLost(Exception):
    """The child process ended without a result."""


class ChildSilent(ChildLost):
    """The child process was stopped, or took too long."""


def fork(main: Callable[[], object], fds: Sequence[int] | None = None) -> int:
    """Fork a child that calls `main`, and exits with 0 or the errno of an OSError. It is killed when this thread ends.

    fds      the only fds that the child inherits, renumbered from 3; the child then also has its own session, and
             blocks all signals. None: the child inherits all fds
    Returns  the child's pid
    Raises   OSError
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = _EXCEPTION_EXIT_CODE
        try:
            if fds is not None:
                _detach(fds)
            _die_with(parent)
            main()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    return pid


def _detach(fds: Sequence[int]) -> None:
    """Release everything that other processes may wait for (pipes, locks, the terminal); keep only these fds."""
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    os.setsid()
    for before, after in pairwise([-1, *sorted(fds), _FD_MAX]):
        os.closerange(before + 1, after)
    kept = [*[os.open("/dev/null", os.O_RDWR)] * _FIRST, *fds]
    for at, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, len(kept)) for fd in kept]):
        os.dup2(fd, at)
    os.closerange(len(kept), _FD_MAX)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit now if the parent has ended already."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        os._exit(_EXCEPTION_EXIT_CODE)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, so that it won't reply."""
    return _state_of(pid) in _STOPPED


def _state_of(pid: int) -> bytes:
    """Return the state letter of a process; b"" if it has ended. Source  proc_pid_stat(5)"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1]
    except OSError:
        return b""


def send(channel: socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message. The receiver gets its own copies of the fds."""
    send_fds(channel, [_HEAD.pack(len(message), len(fds))], [*fds])
    channel.sendall(message)


def receive(channel: socket, wait: Callable[[], None] = lambda: None) -> tuple[bytes, list[Fd]]:
    """Receive the next message and its fds, which the caller must close.

    wait    called before each read; may raise an exception
    Raises  EOFError if the sender is gone, or has sent anything other than messages
    """
    wait()
    head, numbers, _flags, _address = recv_fds(channel, _HEAD.size, _MAX_FDS)
    fds = [Fd(number) for number in numbers]
    try:
        head += _read(channel, _HEAD.size - len(head), wait)
        length, n_fds = _HEAD.unpack(head)
        if length > _MESSAGE_MAX or n_fds != len(fds):
            raise EOFError
        return _read(channel, length, wait), fds
    except BaseException:
        for fd in fds:
            fd.close()
        raise


def _read(channel: socket, size: int, wait: Callable[[], None]) -> bytes:
    parts = []
    while size:
        wait()
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Child:
    """A child process, and our end of the channel to it."""

    def __init__(self, main: Callable[[socket], object], *, is_detached: bool = False) -> None:
        """Fork the child.

        main         called in the child with its end of the channel
        is_detached  the child inherits nothing but the channel: see `fork`
        Raises       OSError
        """
        self.channel, child_end = socketpair()
        with child_end, close_on_error(self.channel):
            if is_detached:
                self.pid = fork(lambda: main(socket(fileno=_FIRST)), [child_end.fileno()])
            else:
                self.pid = fork(partial(self._run_main, child_end, main))
        self._poll = select.poll()
        self._poll.register(self.channel, select.POLLIN)

    def _run_main(self, child_end: socket, main: Callable[[socket], object]) -> None:
        self.channel.close()
        main(child_end)

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message to the child. Raises  ChildLost"""
        try:
            send(self.channel, message, fds)
        except OSError as error:
            raise ChildLost from error

    def receive(self, limit_s: float = inf, *, is_strict: bool = False) -> tuple[bytes, list[Fd]]:
        """Receive the child's next message, with its fds.

        limit_s    the time limit; time that the child spends running on a processor or waiting for one does not count
        is_strict  count that time, too
        Raises     ChildLost
        """
        deadline_s = time.monotonic() + limit_s

        def wait() -> None:
            nonlocal deadline_s
            while not self._poll.poll(min(_CHECK_S, limit_s) * 1000):
                state = _state_of(self.pid)
                if state == b"R" and not is_strict:
                    deadline_s = time.monotonic() + limit_s
                if state in _STOPPED or time.monotonic() >= deadline_s:
                    raise ChildSilent

        try:
            return receive(self.channel, wait)
        except (EOFError, OSError) as error:
            raise ChildLost from error

    def receive_text(self, limit_s: float = inf, *, is_strict: bool = False) -> bytes:
        """Receive the child's next message like `receive`, but close its fds."""
        message, fds = self.receive(limit_s, is_strict=is_strict)
        for fd in fds:
            fd.close()
        return message

    def kill(self) -> None:
        """Kill the child, even if it is stopped: otherwise, the user it acts as could resume it later."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, SIGKILL)

    def end(self, most_s: float | None = None) -> None:
        """Kill the child, and wait until it has ended.

        most_s  the longest time to wait. A child that hangs for longer is reaped by init when it has ended
        """
        self.channel.close()
        with suppress(ChildProcessError, ProcessLookupError):
            self.kill()
            if most_s is None:
                os.waitpid(self.pid, 0)
                return
            with Fd(os.pidfd_open(self.pid)) as pidfd:
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                ended.poll(most_s * 1000)
            os.waitpid(self.pid, os.WNOHANG)


Ask = Callable[[bytes], bytes]
"""Sends a question to the parent process, and returns the answer."""
_NOBODY_GID = 65534
_QUESTION, _RESULT = b"q", b"r"
_USER_DIRECTORY_VARIABLES = (b"RUNTIME_DIRECTORY", b"STATE_DIRECTORY", b"XDG_RUNTIME_DIR", b"XDG_STATE_HOME")
"""Variables that name directories of a user's files: another user's child must not inherit ours."""


def user_name(uid: int) -> str:
    """Return a user's name, or the UID if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class UserCredentials(NamedTuple):
    """The user for whom a process acts: UID, primary GID, all groups, home directory (empty if there is none)."""

    uid: int
    gid: int
    groups: list[int]
    home: bytes = b""


def user_credentials(uid: int) -> UserCredentials:
    """Return a user's credentials from the system's database; for an unknown user, only the UID and nogroup."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return UserCredentials(uid, _NOBODY_GID, [])
    return UserCredentials(uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid), os.fsencode(entry.pw_dir))


def become_user(user: UserCredentials) -> None:
    """Make this child process permanently act as a user, with that home directory and no capabilities; needs root.

    The child is still killed when its parent ends.
    Source   capabilities(7): a change from UID 0 to another clears all sets; prctl(2): the process is not dumpable
             afterwards, so that its user can't trace it, and it loses its parent-death signal, which is set again
    """
    parent = os.getppid()
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    for variable in _USER_DIRECTORY_VARIABLES:
        os.environb.pop(variable, None)
    os.environb[b"HOME"] = user.home or b"/nonexistent"
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # depending on fs.suid_dumpable, the change of UID might not do this
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    _die_with(parent)


def call_in_child_as(uid: int, body: Callable[[Ask], bytes], answer: Ask = lambda _question: b"") -> bytes:
    """Run `body` in a child with this UID and no capabilities, and return its result; needs root.

    body    called with a function that asks this process a question, and returns the answer
    answer  answers a question of `body`, with this process's rights
    Raises  ChildLost if the child ended without a result or was stopped. A stopped child is killed: otherwise one user
            could block an administrator's command for all users. Errors in `body` must be part of its result
    """
    child = Child(partial(_serve_call, user_credentials(uid), body))
    try:
        while True:
            message = child.receive_text()
            if message[:1] == _RESULT:
                return message[1:]
            child.send(answer(message[1:]))
    finally:
        child.end()


def _serve_call(user: UserCredentials, body: Callable[[Ask], bytes], channel: socket) -> None:
    def ask(question: bytes) -> bytes:
        send(channel, _QUESTION + question)
        return receive(channel)[0]

    become_user(user)
    send(channel, _RESULT + body(ask))


T = TypeVar("T")
LIMIT_S = 3.0
"""The time limit for one answer."""
_END_S = 0.2
"""How long to wait for a killed child to end; it may hang."""


def ask_each(
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    silent: set[Hashable],
    place_of: Callable[[T], Hashable],
    user: UserCredentials | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[T, bytes | None]]:
    """Yield each question and its answer; None if it, or an earlier one about the same place, was not answered in time.

    ask      runs in a child that has none of our fds; errors must be part of its answer
    silent   the places (from `place_of`) about which a question was not answered in time; more are added
    user     the user as whom the child acts (needs root); None for our own
    limit_s  the time limit for one answer, whatever delays it; None: LIMIT_S, not counting time that the child spends
             running on a processor or waiting for one
    """
    child = None
    try:
        for index, question in enumerate(questions):
            if place_of(question) in silent:
                yield question, None
                continue
            answer: bytes | None
            if child is None:
                child = Child(partial(_serve_questions, questions, ask, user), is_detached=True)
            try:
                child.send(b"%d" % index)
                answer = child.receive_text(LIMIT_S if limit_s is None else limit_s, is_strict=limit_s is not None)
            except ChildLost as lost:
                child.end(_END_S)
                child = None
                answer = b""  # the child ended during this question; a new child gets the next one
                if isinstance(lost, ChildSilent):
                    silent.add(place_of(question))
                    answer = None
            yield question, answer
    finally:
        if child is not None:
            child.end(_END_S)


def _serve_questions(
    questions: Sequence[T], ask: Callable[[T], bytes], person: UserCredentials | None, channel: socket
) -> None:
    if person is not None:
        become_user(person)
    while True:
        index, _fds = receive(channel)
        send(channel, ask(questions[int(index)]))
