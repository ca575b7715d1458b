"""Whether this kernel's FUSE over io_uring lets clients go, tried: what people do when a mount hangs has to help.

A filesystem of one directory is mounted where nobody else sees it, in a mount namespace of a process of its own, once
for each thing that is tried. Who asks it is a process too, and so is its daemon: each is waited for until a deadline,
and killed. What is left then is let go by the end of the connection, and of the namespace.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from fusefs.core import fuse_protocol as wire
from fusefs.core.inode_attributes import Attributes
from fusefs.linux import mount_calls
from fusefs.linux.child_processes import child
from fusefs.linux.fd import Fd
from fusefs.linux.fuse_device import abort, open_abort
from fusefs.linux.fuse_ring import ConnectionGone, FuseRing, RingEntry
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.uring_offer import split_cores

_LIMIT_S, _ALL_S = 5.0, 60.0
"""For each step, some milliseconds if all is well; for all of them."""
_A_WHILE_S = 0.1
"""For a client to have asked; if it has not, the trial is as good, and proves less."""
_POINT = b"/sys/fs/fuse/connections"
"""A directory that is there wherever FUSE is."""
_HELD = b"held"
"""The name that is never answered."""
_KIND, _OPTIONS = b"fuse", b"fd=%d,rootmode=40000,user_id=0,group_id=0"
_PAYLOAD_BYTES = 1 << 13
_INIT_FLAGS_AT, _INIT_MORE_FLAGS_AT = wire.REQUEST_HEAD_SIZE + 12, wire.REQUEST_HEAD_SIZE + 16
_FLAGS = struct.Struct("=I")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
"""fuse_init_out: version, readahead, flags, background requests, write, time, pages, alignment, and more flags."""
_MAX_PAGES, _INIT_EXT, _OVER_IO_URING = 1 << 22, 1 << 30, 1 << 41 - 32
_ROOT = Attributes(0, 1, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 0, 0, 4096, 0, 0, 0, 0)
_READY, _HOLDS, _DONE = b"r", b"h", b"done"


def failures() -> list[str]:
    """What goes wrong on this kernel, as sentences; nothing has to. It takes root, and the switch of the machine.

    Raises  OSError: no process can be made
    """
    reader, writer = map(Fd, os.pipe2(os.O_CLOEXEC))
    with reader:
        with writer:
            pid = child(signal.SIGKILL, _try_all, writer)
        try:
            told = _lines(reader, _ALL_S)
        finally:
            _end(pid)
    if _DONE not in told:
        return [*(line.decode() for line in told), "the trial did not come to its end"]
    return [line.decode() for line in told if line != _DONE]


def _lines(fd: int, limit_s: float) -> list[bytes]:
    """What is written until the other side is closed, or the time is over."""
    poll, text = select.poll(), b""
    poll.register(fd, select.POLLIN)
    deadline_s = time.monotonic() + limit_s
    while poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
        part = os.read(fd, 4096)
        if not part:
            break
        text += part
    return text.split(b"\n")[:-1]


def _try_all() -> None:
    """In a process of its own: try each thing, and write what went wrong to fd 0."""
    mount_calls.leave_mounts()
    attempts: dict[str, Callable[[], bool]] = {
        "a mount does not answer": _answers,
        "a daemon that was stopped does not go on": _goes_on,
        "who waits for a stopped daemon is not let go when that is killed": partial(_lets_go_stopped, _kill),
        "who waits for a daemon is not let go when that is killed": partial(_lets_go, _kill),
        "who waits for a daemon is not let go by an abort": partial(_lets_go, _abort),
        "who waits for a daemon is not let go by umount -f": partial(_lets_go, _unmount),
    }
    for why, attempt in attempts.items():
        try:
            is_well = attempt()
        except OSError as error:
            is_well, why = False, f"{why} ({error.strerror})"
        if not is_well:
            os.write(0, why.encode() + b"\n")
    os.write(0, _DONE + b"\n")


def _answers() -> bool:
    with _mounted(), _asking(_POINT) as client:
        return _code(client) == 0


def _goes_on() -> bool:
    with _stopped() as (daemon, client):
        os.kill(daemon, signal.SIGCONT)
        return _code(client) == 0


def _lets_go_stopped(end: Callable[[int], None]) -> bool:
    """A request is the daemon's as soon as an entry is free, though it knows nothing of it yet."""
    with _stopped() as (daemon, client):
        end(daemon)
        return _code(client) is not None


def _lets_go(end: Callable[[int], None]) -> bool:
    """A request that the daemon has, and does not answer."""
    with _mounted() as (daemon, said), _asking(_POINT + b"/" + _HELD) as client:
        if not _has_said(said, _HOLDS):
            return False
        end(daemon)
        return _code(client) is not None


def _kill(daemon: int) -> None:
    os.kill(daemon, signal.SIGKILL)


def _abort(_daemon: int) -> None:
    with open_abort(_connection()) as fd:
        abort(fd)


def _unmount(_daemon: int) -> None:
    with suppress(OSError):  # EBUSY: who waits is in there
        mount_calls.unmount(_POINT, mount_calls.MNT_FORCE)


@contextmanager
def _mounted() -> Iterator[tuple[int, Fd]]:
    """A mount over io_uring; its daemon's pid, and what it says. Raises  OSError: it can't be had"""
    said, saying = map(Fd, os.pipe2(os.O_CLOEXEC))
    with said:
        with saying:
            daemon = child(signal.SIGKILL, _serve, saying)
        try:
            if not _has_said(said, _READY):
                raise OSError(errno.EIO, "no mount")
            yield daemon, said
        finally:
            with suppress(OSError):
                mount_calls.unmount(_POINT, mount_calls.MNT_FORCE | mount_calls.MNT_DETACH)
            _end(daemon)


@contextmanager
def _stopped() -> Iterator[tuple[int, int]]:
    """A mount whose daemon is stopped, and somebody who waits for it; their pids."""
    with _mounted() as (daemon, _said):
        os.kill(daemon, signal.SIGSTOP)
        os.waitid(os.P_PID, daemon, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with _asking(_POINT) as client:
            if _code(client, _A_WHILE_S) is not None:
                raise OSError(errno.EALREADY, "answered while it was stopped")
            yield daemon, client


@contextmanager
def _asking(path: bytes) -> Iterator[int]:
    """A process that looks at a path; its pid."""
    client = child(signal.SIGKILL, partial(_look, path))
    try:
        yield client
    finally:
        _end(client)


def _look(path: bytes) -> None:
    os.stat(path)


def _code(pid: int, limit_s: float | None = None) -> int | None:
    """The exit code of a child, -1 if a signal ended it; None: it has not ended when the time is over."""
    with Fd(os.pidfd_open(pid)) as fd:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll((limit_s or _LIMIT_S) * 1000):
            return None
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert seen is not None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -1


def _end(pid: int) -> None:
    """Kill a child; one that can't be killed is left alone."""
    os.kill(pid, signal.SIGKILL)
    if _code(pid) is not None:
        os.waitpid(pid, 0)


def _has_said(fd: int, word: bytes) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(_LIMIT_S * 1000)) and os.read(fd, len(word)) == word


def _connection() -> int:
    """The number of the mount's connection. Raises  OSError ENOENT: there is no mount"""
    for mount in reversed(read_mounts()):  # the last one covers what systemd mounts there
        if mount.point == _POINT:
            return mount.connection()
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def _serve() -> NoReturn:
    """The daemon: it says on fd 0 that it is ready, and that it holds somebody back. All queues are one thread's."""
    with mount_calls.open_fuse() as device, Fd(os.open(_POINT, os.O_PATH | os.O_DIRECTORY)) as point:
        mount_calls.mount(
            b"trashd-trial", point, _KIND, mount_calls.MS_NOSUID | mount_calls.MS_NODEV, _OPTIONS % device
        )
        init = os.read(device, 1 << 16)
        if not _FLAGS.unpack_from(init, _INIT_MORE_FLAGS_AT)[0] & _OVER_IO_URING:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        ring = FuseRing(device, _PAYLOAD_BYTES)
        entries = [ring.new_entry(core) for cores in split_cores() for core in cores]
        unique = wire.read_head(init)[2]
        major, minor, readahead, _ = struct.unpack_from("=IIII", init, wire.REQUEST_HEAD_SIZE)
        body = _INIT_OUT.pack(
            major, minor, readahead, _MAX_PAGES | _INIT_EXT, 1, 1, _PAYLOAD_BYTES, 1, 1, 0, _OVER_IO_URING
        )
        os.write(device, wire.head(unique, len(body)) + body)
        for entry in entries:
            ring.register(entry)
        os.write(0, _READY)
        while True:
            try:
                come = ring.wait()
            except ConnectionGone:
                os._exit(0)
            for entry in come:
                _answer(ring, entry)


def _answer(ring: FuseRing, entry: RingEntry) -> None:
    request = entry.request()
    opcode = wire.read_head(request)[1]
    if opcode == wire.Opcode.LOOKUP and wire.name(request) == _HELD:
        os.write(0, _HOLDS)
        return
    if opcode == wire.Opcode.GETATTR:
        answer = wire.attr_answer()
        wire.put_attr(answer, 1, _ROOT, 0.0)
        entry.answer(memoryview(answer)[wire.ANSWER_HEAD_SIZE :])
    else:
        entry.refuse(errno.ENOSYS)
    ring.commit(entry)
