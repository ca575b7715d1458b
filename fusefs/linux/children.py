"""Child processes, as another user or with a time limit: fork, messages and fds, and their end."""

from __future__ import annotations

import fcntl
import os
import pwd
import select
import signal
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from signal import SIGKILL
from socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket, socketpair
from typing import NamedTuple, TypeVar

from fusefs.linux import syscalls
from fusefs.linux.fd import Fd

_MESSAGE_MAX = 256 * 1024 * 1024
_HEAD = struct.Struct("=QI")
_MAX_FDS = 253
"""SCM_MAX_FD, unix(7)"""
_FD_BYTES = struct.calcsize("i")
_GLANCE_MS = 200


class ChildLost(Exception):
    """The child ended without a result, or was stopped."""


def die_with_parent(parent: int) -> bool:
    """Be killed when the parent ends, however; False if it is gone already."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, SIGKILL)
    return os.getppid() == parent


def is_stopped(pid: int) -> bool:
    """Whether a child of ours was stopped: it will never say anything."""
    seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return seen is not None and seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)


def watch(pid: int, channel: socket) -> Callable[[], None]:
    """What waits until there is something to read from a child.

    Raises  ChildLost, when it is called, if the child was stopped
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)

    def wait() -> None:
        while not poll.poll(_GLANCE_MS):
            if is_stopped(pid):
                raise ChildLost

    return wait


def send(channel: socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message; the other side gets fds of its own."""
    passed = [(SOL_SOCKET, SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    channel.sendmsg([_HEAD.pack(len(message), len(fds))], passed)
    channel.sendall(message)


def receive(channel: socket, wait: Callable[[], None] = lambda: None) -> tuple[bytes, list[Fd]]:
    """The next message and its fds, which are the caller's now.

    wait    called before each read; may raise
    Raises  EOFError if the other side is gone, or says what it can't mean
    """
    wait()
    head, passed, _flags, _address = channel.recvmsg(_HEAD.size, CMSG_SPACE(_MAX_FDS * _FD_BYTES))
    rights = [packed for level, kind, packed in passed if (level, kind) == (SOL_SOCKET, SCM_RIGHTS)]
    fds = [Fd(number) for packed in rights for (number,) in struct.iter_unpack("i", packed)]
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


Ask = Callable[[bytes], bytes]
"""Puts a question to the process that we act for, and returns its answer."""
_NOBODY_GID = 65534
_QUESTION, _RESULT = b"q", b"r"
_PLACES = (b"RUNTIME_DIRECTORY", b"STATE_DIRECTORY", b"XDG_RUNTIME_DIR", b"XDG_STATE_HOME")
"""Variables that say where a user's files are: those that we were started with say it of us."""


def user_name(uid: int) -> str:
    """A user's name, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class UserCredentials(NamedTuple):
    """The user for whom a process acts: user, primary group, all groups, home directory (empty for none)."""

    uid: int
    gid: int
    groups: list[int]
    home: bytes = b""


def person(uid: int) -> UserCredentials:
    """A user as the system knows him; of an unknown one nothing but the uid, and nogroup."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return UserCredentials(uid, _NOBODY_GID, [])
    return UserCredentials(uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid), os.fsencode(entry.pw_dir))


def become(wanted: UserCredentials, parent: int) -> bool:
    """Be that user, with that home, no capability and no way back, and die with the parent; needs root.

    parent   our parent's pid
    Returns  False if the parent is gone already
    Source   capabilities(7): a change from uid 0 to others clears all sets; prctl(2): the process is not dumpable,
             so that its user can't trace it
    """
    os.setgroups(wanted.groups)
    os.setresgid(wanted.gid, wanted.gid, wanted.gid)
    os.setresuid(wanted.uid, wanted.uid, wanted.uid)
    for variable in _PLACES:
        os.environb.pop(variable, None)
    os.environb[b"HOME"] = wanted.home or b"/nonexistent"
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # fs.suid_dumpable may say otherwise
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    return die_with_parent(parent)


def call_as(uid: int, body: Callable[[Ask], bytes], answer: Ask) -> bytes:
    """The result of `body`, run in a child with that uid and no capability; needs root.

    body    gets a function that asks us something while it runs
    answer  our reply to such a question, made with our own authority
    Raises  ChildLost if the child ended without a result or was stopped; a stopped child is killed, or one user
            could hold up an administrator's command for all. What `body` raises must be in its result.
    """
    wanted = person(uid)
    ours, theirs = socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(wanted, parent, theirs, body)
    theirs.close()
    try:
        return _serve(pid, ours, answer)
    finally:
        ours.close()
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)


def _child(wanted: UserCredentials, parent: int, channel: socket, body: Callable[[Ask], bytes]) -> None:
    code = 1
    try:
        if not become(wanted, parent):
            os._exit(code)  # it died before we asked to die with it

        def ask(question: bytes) -> bytes:
            send(channel, _QUESTION + question)
            return receive(channel)[0]

        send(channel, _RESULT + body(ask))
        code = 0
    finally:
        os._exit(code)


def _serve(pid: int, channel: socket, answer: Ask) -> bytes:
    wait = watch(pid, channel)
    while True:
        try:
            message, fds = receive(channel, wait)
        except EOFError as error:
            raise ChildLost from error
        for fd in fds:
            fd.close()  # not asked for
        if message[:1] == _RESULT:
            return message[1:]
        send(channel, answer(message[1:]))


T = TypeVar("T")
LIMIT_S = 3.0
"""How long one answer may take."""
_END_S = 0.2
"""How long one that was killed may take to end, unless it hangs."""
_STANDARD = 3
_MOST_FDS = 1 << 20


def ask_each(
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    silent: set[Hashable],
    where: Callable[[T], Hashable],
    person: UserCredentials | None = None,
    limit_s: float | None = None,
) -> Iterator[tuple[T, bytes | None]]:
    """Each question with its answer; None for what is not answered in time, and for all else that is asked there.

    ask      runs in a child that has none of our fds; what it can't say is its answer, not an error
    silent   those that have not answered, as `where` tells them; it is added to
    person   the user for whom the child acts (needs root); None for ourselves
    limit_s  how long one answer may take, whatever keeps it; None: LIMIT_S, and as long as it lacks but a processor
    """
    done = 0
    while done < len(questions):
        due = [question for question in questions[done:] if where(question) not in silent]
        answers = _AskingChild(due, ask, person, limit_s) if due else None
        try:
            while done < len(questions):
                question = questions[done]
                done += 1
                if where(question) in silent:
                    yield question, None
                    continue
                assert answers is not None
                try:
                    answer = answers.next()
                except EOFError:
                    yield question, b""  # the child fell over it; the next one goes on
                    break
                except TimeoutError:
                    silent.add(where(question))
                    yield question, None
                    break
                yield question, answer
        finally:
            if answers is not None:
                answers.end()


class _AskingChild:
    """A process that puts questions one after the other."""

    def __init__(
        self,
        questions: Sequence[T],
        ask: Callable[[T], bytes],
        person: UserCredentials | None,
        limit_s: float | None,
    ) -> None:
        self._limit_s = limit_s
        self._channel, theirs = socketpair()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _live(parent, theirs, questions, ask, person)
        theirs.close()
        self._poll = select.poll()
        self._poll.register(self._channel, select.POLLIN)

    def next(self) -> bytes:
        """The answer to the next question. Raises  TimeoutError; EOFError: the child has ended"""
        return receive(self._channel, self._wait)[0]

    def _wait(self) -> None:
        while not self._poll.poll((LIMIT_S if self._limit_s is None else self._limit_s) * 1000):
            if self._limit_s is not None or not self._is_working():
                raise TimeoutError

    def _is_working(self) -> bool:
        """Whether it has what it needs but a processor."""
        with open(f"/proc/{self._pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"R"

    def end(self) -> None:
        """Be rid of it. One that hangs is not waited for: it ends when it is let go, and init reaps it."""
        self._channel.close()
        with suppress(ChildProcessError, ProcessLookupError):
            with Fd(os.pidfd_open(self._pid)) as pidfd:
                os.kill(self._pid, SIGKILL)
                _wait_for(pidfd, _END_S if self._limit_s is None else 0)
            os.waitpid(self._pid, os.WNOHANG)


def _wait_for(fd: Fd, seconds: float) -> None:
    """By poll, as select knows no high numbers."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(seconds * 1000)


def _live(
    parent: int,
    channel: socket,
    questions: Sequence[T],
    ask: Callable[[T], bytes],
    person: UserCredentials | None,
) -> None:
    try:
        _let_go(channel.fileno())
        if die_with_parent(parent) if person is None else become(person, parent):
            for question in questions:
                send(channel, ask(question))
    finally:
        os._exit(0)


def _let_go(kept: int) -> None:
    """Close what others may wait for: a pipe, a lock. Only the channel stays."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(_STANDARD):
        if number != kept:
            os.dup2(null, number)
    os.closerange(_STANDARD, max(kept, _STANDARD))
    os.closerange(max(kept + 1, _STANDARD), _MOST_FDS)


_FD_MAX = 2**31 - 1


def child(at_parents_death: signal.Signals, body: Callable[[], None], *fds: int) -> int:
    """A process that has the given fds, as 0 and so on, and nothing else; its pid.

    It exits with 0 if the body does, with the errno if that raises OSError, else with 255.

    To be called on the main thread, whose end the kernel takes for the parent's.

    at_parents_death  it gets this signal then, at once: also where the parent lives on for some thread's sake
    """
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
            os.setsid()
            os.chdir("/")
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, at_parents_death)
            for at, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, len(fds)) for fd in fds]):
                os.dup2(fd, at)
            os.closerange(len(fds), _FD_MAX)
            if os.getppid() == parent_pid:
                body()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    return pid
