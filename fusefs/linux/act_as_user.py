"""Acting as another user: a child process with that uid, its groups, and no capability."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from signal import SIGKILL
from socket import socket, socketpair
from typing import NamedTuple

from fusefs.linux import syscalls
from fusefs.linux.child_channel import ChildLost, die_with_parent, receive, send, watch

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
