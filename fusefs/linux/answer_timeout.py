"""Questions that may never be answered, put by a child process: a dead mount blocks its caller, beyond SIGKILL."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from signal import SIGKILL
from socket import socket, socketpair
from typing import TypeVar

from fusefs.linux.act_as_user import UserCredentials, become
from fusefs.linux.child_channel import die_with_parent, receive, send
from fusefs.linux.fd import Fd

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
