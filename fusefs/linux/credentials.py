"""Acting as somebody else: a child process with another uid, that user's groups, and no capability."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import socket
from collections.abc import Callable

from fusefs.linux import libc
from fusefs.linux.channel import receive, send
from fusefs.linux.children import ChildLost, watch

Ask = Callable[[bytes], bytes]
"""Puts a question to the process that we act for, and returns its answer."""

_NOBODY_GID = 65534
_QUESTION, _RESULT = b"q", b"r"


def groups_of(uid: int) -> tuple[int, list[int]]:
    """Primary group and all groups of a uid; nogroup alone for one that the system does not know."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return _NOBODY_GID, []
    return entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid)


def group_name(gid: int) -> str:
    """A group's name, or its number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def user_name(uid: int) -> str:
    """A user's name, or his number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def call_as(uid: int, body: Callable[[Ask], bytes], answer: Ask) -> bytes:
    """The result of `body`, run in a child with that uid and no capability; needs root.

    body    gets a function that asks us something while it runs
    answer  our reply to such a question, made with our own authority
    Raises  ChildLost if the child ended without a result or was stopped; a stopped child is killed, or one user
            could hold up an administrator's command for all. What `body` raises must be in its result.
    Source  capabilities(7): a change from uid 0 to others clears all sets; prctl(2): the child is not dumpable,
            so that its user can't trace it
    """
    gid, groups = groups_of(uid)
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(uid, gid, groups, parent, theirs, body)
    theirs.close()
    try:
        return _serve(pid, ours, answer)
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(
    uid: int, gid: int, groups: list[int], parent: int, channel: socket.socket, body: Callable[[Ask], bytes]
) -> None:
    code = 1
    try:
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        libc.prctl(libc.PR_SET_DUMPABLE, 0)  # fs.suid_dumpable may say otherwise
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)  # it died before we asked to die with it

        def ask(question: bytes) -> bytes:
            send(channel, _QUESTION + question)
            return receive(channel)[0]

        send(channel, _RESULT + body(ask))
        code = 0
    finally:
        os._exit(code)


def _serve(pid: int, channel: socket.socket, answer: Ask) -> bytes:
    wait = watch(pid, channel)
    while True:
        try:
            message, fds = receive(channel, wait)
        except EOFError as error:
            raise ChildLost from error
        for fd in fds:
            fd.close()  # nobody asked for any
        if message[:1] == _RESULT:
            return message[1:]
        send(channel, answer(message[1:]))
