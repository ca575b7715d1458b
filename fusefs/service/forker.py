"""The forker: forks the service's children. It has no threads and no trio, so that a fork copies nothing half-done.

It is forked before the service starts its loop, does what it is asked, and dies with the service, as its children
die with it. What it is told by the service it believes; what a user wrote it never sees. A child acts for a user; or it
reads users' registries for root's service, and may wait for a disk or a user: the service does not.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

import msgspec
import trio

from fusefs.core.names import Name
from fusefs.core.slice_budget import HOLD, Speed
from fusefs.linux.act_as_user import UserCredentials, become, person
from fusefs.linux.child_channel import die_with_parent
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.low_priority import be_idle
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.runtime_directories import STATE_BELOW_HOME
from fusefs.linux.untrusted_path import open_way
from fusefs.service import timers
from fusefs.service.child import Child
from fusefs.service.messages import (
    FROM_CHILD,
    MESSAGE_MAX,
    Answer,
    Forked,
    Heartbeat,
    Order,
    OrderDone,
    Page,
    Park,
    ReadRegistries,
    SetTempo,
    Spawn,
    Tended,
    ToChild,
    UserRegistry,
    fits,
)
from fusefs.service.open_volume import ROOTS, is_own
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.discover import mount_points
from fusefs.store.layout import Areas, Store, UserFolder
from fusefs.store.registry_targets import LineOf, stores_at_roots, stores_of_users

_PACKET_MAX = 1 << 16
_MAX_FDS = 8
_GO = b"go"
"""To a child that might have ended, and been buried, before the service has its pidfd."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
"""The service decides when its processes end."""
_ANSWERS = 64
_MOST_STORES = 100
"""Of one user's own that are served."""

TakesRegistry = Callable[[UserRegistry, Fd | None], None]
"""Gets what a user's registry names, and its directory (O_PATH), which is open for that long."""
_MOST_BYTES, _LINE_BYTES = MESSAGE_MAX * 3 // 4, 700
"""Of a message, and what a line has besides its path: a user with very long paths has fewer stores served."""


class ForkerLost(Exception):
    """The forker ended: without it the service can't go on."""


class ChildGone(Exception):
    """The child ended, was stopped, hung, or said what makes no sense."""


class ChildHandle:
    """The service's end of the connection to a child of one user: orders out, answers in, and whether it still runs."""

    def __init__(self, uid: int, pid: int, pidfd: Fd, channel: socket.socket) -> None:
        """channel: our end of it."""
        self.uid = uid
        self.pid = pid
        self.sums = Heartbeat(0, 0, 0.0)
        self.is_busy = False
        self._pidfd = pidfd
        self._socket = channel
        self._channel = trio.socket.from_stdlib_socket(channel)
        self._tempo = HOLD
        self._heard_at = trio.current_time()
        self._why_lost = ""
        self._inbox_end, self._inbox = trio.open_memory_channel[Answer](_ANSWERS)

    def close(self) -> None:
        """Kill it, if it has not ended, and let go of it."""
        self.kill("no longer needed")
        self._channel.close()
        self._inbox_end.close()
        self._pidfd.close()

    def kill(self, why: str) -> None:
        """End it at once; what it was doing is found by the next."""
        self._why_lost = self._why_lost or why
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for the end of its process, which lets go of the volume. Checkpoint"""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def listen(self) -> None:
        """Take in what it says until it ends. Checkpoint"""
        try:
            while packet := await self._channel.recv(MESSAGE_MAX):
                message = FROM_CHILD.decode(packet)
                self._heard_at = trio.current_time()
                if isinstance(message, Heartbeat):
                    self.sums = message
                else:
                    await self._inbox_end.send(message)
        except msgspec.MsgspecError:
            self.kill("it said what makes no sense")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is gone; or we closed it (EBADF, if it had just said something)
        finally:
            self._inbox_end.close()

    def lead(self, tempo: Speed) -> None:
        """Set how fast it goes. While it is in one long system call it is told no more than it can hear."""
        if tempo != self._tempo and self._send(SetTempo(tempo)):
            self._tempo = tempo

    def park(self, *, now: bool = False) -> None:
        """Have it leave what it does where it is; its answers come soon. now: whatever that is"""
        self._say(Park(now))

    async def answers(self, order: Order) -> AsyncGenerator[Answer]:
        """What it answers to an order; the last is no OrderDone that went well.

        Raises  ChildGone; OSError with the errno of what went wrong with the folder or the volume
        Checkpoint  yes
        """
        self.is_busy = True
        try:
            self._heard_at = trio.current_time()
            self._say(order)
            async for answer in self._inbox:
                if isinstance(answer, OrderDone):
                    if answer.errno:
                        raise OSError(answer.errno, answer.error)
                    return
                if not fits(answer, order):
                    self.kill("it answered what nobody asked")
                    continue
                yield answer
                if isinstance(answer, Tended | Page):
                    return
            raise ChildGone(self._why_lost or "its process ended")
        finally:
            self.is_busy = False

    def look_after(self) -> None:
        """Kill it if it was stopped or hangs."""
        silent_s = trio.current_time() - self._heard_at
        if not self.is_busy or silent_s < timers.current.silent_limit_s:
            return
        if self._is_stopped():
            self.kill("it was stopped")
        elif silent_s > timers.current.lost_limit_s:
            self.kill(f"it said nothing for {silent_s:.0f} s")

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")

    def _say(self, message: ToChild) -> None:
        if not self._send(message):
            self.kill("it does not listen")

    def _send(self, message: ToChild) -> bool:
        """Send it, unless the child has heard nothing for long."""
        try:
            self._socket.send(msgspec.json.encode(message))
        except BlockingIOError:
            return False
        except OSError:
            self.kill("its process ended")
        return True


class Forker:
    """The service's side."""

    def __init__(self) -> None:
        """Fork it; there must be no other thread yet."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._in_turn = trio.Lock()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _run(parent, theirs)
        theirs.close()
        self._ours.setblocking(False)
        self._pidfd = Fd(os.pidfd_open(self.pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """End it, and all its children."""
        self._ours.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pidfd.close()

    async def until_lost(self) -> None:
        """Wait for its end. Checkpoint"""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def fork(self, folder: UserFolder, person: UserCredentials) -> ChildHandle:
        """A child that acts for the owner of a folder.

        person  the user to fork as; the service's own for its own folder
        Raises  ForkerLost; OSError if there is none: no memory, too many processes, killed at once
        Checkpoint  yes
        """
        store = folder.store
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        of_store = store.base_path, store.volume, store.owner, store.name
        spawn = Spawn(person, folder.area, folder.name, folder.is_proven, *of_store)
        fds = [theirs.fileno(), folder.fd, store.base.fd, store.fd]
        if store.base.mounted is not None:
            fds.append(store.base.mounted)
        with theirs, ExitStack() as owned:
            owned.enter_context(ours)
            born, pidfd = await self._ask(spawn, fds)
            owned.pop_all()
        ours.setblocking(False)
        return ChildHandle(folder.uid, born.pid, pidfd, ours)

    async def read_registries(self, uids: list[int], take: TakesRegistry, seconds: float) -> bool:
        """Have all users' registries read; whether all were, in so many seconds.

        take    called for each that there is
        Raises  ForkerLost; OSError if there is no process for it
        Checkpoint  yes
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                _born, pidfd = await self._ask(ReadRegistries(uids), [theirs.fileno()])
            ours.setblocking(False)
            with pidfd:
                ours.send(_GO)
                try:
                    with trio.move_on_after(seconds):
                        while await _take_home(ours, take):
                            pass
                        return True
                finally:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return False

    async def _ask(self, spawn: Spawn | ReadRegistries, fds: list[int]) -> tuple[Forked, Fd]:
        """Send one request and hear its answer."""
        async with self._in_turn:
            try:
                await trio.lowlevel.wait_writable(self._ours)
                socket.send_fds(self._ours, [msgspec.json.encode(spawn)], fds)
                with trio.CancelScope(shield=True):  # or the next one would be told of this child
                    await trio.lowlevel.wait_readable(self._ours)
                packet, received, _flags, _address = socket.recv_fds(self._ours, _PACKET_MAX, _MAX_FDS)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ForkerLost from error
        if not packet:
            raise ForkerLost
        forked = msgspec.json.decode(packet, type=Forked)
        if forked.errno:
            raise OSError(forked.errno, os.strerror(forked.errno))
        if not received:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel had no place for it; the child ends
        return forked, Fd(received[0])


async def _take_home(channel: socket.socket, take: TakesRegistry) -> bool:
    """Take in what one user's registry names; False if there are no more."""
    await trio.lowlevel.wait_readable(channel)
    packet, received, flags, _address = socket.recv_fds(channel, MESSAGE_MAX, 1)
    with ExitStack() as owned:
        fds = [owned.enter_context(Fd(fd)) for fd in received]
        if packet and not flags & socket.MSG_TRUNC:
            take(msgspec.json.decode(packet, type=UserRegistry), fds[0] if fds else None)
    return bool(packet)


def _run(parent: int, channel: socket.socket) -> NoReturn:
    """The forker's life."""
    try:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait(2) for children: the kernel reaps them
        be_idle()
        is_wanted = die_with_parent(parent)
        while is_wanted:
            packet, fds, flags, _address = socket.recv_fds(channel, _PACKET_MAX, _MAX_FDS)
            is_wanted = bool(packet)
            if packet:
                is_whole = not flags & socket.MSG_CTRUNC
                _fork(channel, msgspec.json.decode(packet, type=Spawn | ReadRegistries), fds, is_whole=is_whole)
    finally:
        os._exit(0)


def _fork(channel: socket.socket, spawn: Spawn | ReadRegistries, fds: list[int], *, is_whole: bool) -> None:
    """Fork one child and tell the service of it. is_whole: the kernel had a place for each fd"""
    parent = os.getpid()
    with ExitStack() as owned:
        for fd in fds:
            owned.callback(os.close, fd)
        try:
            if not is_whole:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = os.fork()
            if pid == 0:
                channel.close()
                if isinstance(spawn, ReadRegistries):
                    _live(partial(_read, parent, spawn, fds))
                _live(partial(_serve, parent, spawn, fds))
            pidfd = owned.enter_context(Fd(os.pidfd_open(pid)))
        except OSError as error:
            # No memory, too many processes; or its user was quick to kill it.
            socket.send_fds(channel, [msgspec.json.encode(Forked(errno=error.errno or errno.EAGAIN))], [])
        else:
            socket.send_fds(channel, [msgspec.json.encode(Forked(pid))], [pidfd])


def _live(life: Callable[[], None]) -> NoReturn:
    """A child's life, and its end."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it has children of its own, and waits for them
        life()
        code = 0
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()  # a fault of ours: into the service's log
            sys.stderr.flush()
        os._exit(code)


def _read(parent: int, wanted: ReadRegistries, fds: list[int]) -> None:
    """The life of a child that reads registries."""
    if die_with_parent(parent):
        with socket.socket(fileno=fds[0]) as channel, suppress(BrokenPipeError, ConnectionResetError):
            if channel.recv(len(_GO)):
                tell_homes(channel, wanted.uids)


def _serve(parent: int, spawn: Spawn, fds: list[int]) -> None:
    """The life of a child that acts for a user."""
    channel_fd, folder_fd, base_fd, store_fd, *mounted = map(Fd, fds)
    uid = spawn.person.uid
    is_wanted = die_with_parent(parent) if os.geteuid() == uid else become(spawn.person, parent)
    base = BackingAndMount(base_fd, mounted[0] if mounted else None)
    areas = Areas(Fd(-1))  # the child opens them when it needs them
    kind, name = Kernel().filesystem(store_fd), Name(spawn.name)
    store = Store(Kernel(), base, spawn.base_path, store_fd, areas, spawn.volume, spawn.owner, kind, name=name)
    with socket.socket(fileno=channel_fd) as channel:
        if is_wanted:
            folder = UserFolder(store, uid, Name(spawn.area), Name(spawn.folder), folder_fd, spawn.is_proven)
            Child(channel, folder).serve()


def tell_homes(channel: socket.socket, uids: Iterable[int]) -> None:
    """Say what all users' registries name, one user a packet. Raises  OSError: the service is gone"""
    kernel, mounts = Kernel(), read_mounts()
    homes: dict[int, list[LineOf]] = {}
    for word in stores_of_users(kernel, mounts, uids):
        homes.setdefault(word.uid, []).append(word)
    for word in stores_at_roots(kernel, mount_points(mounts), mounts):
        known = homes.setdefault(word.uid, [])
        # What the user has registered elsewhere is a copy here, or there: that user says which it is.
        if all(word.line.volume != one.line.volume for one in known):
            known.append(word)
    for uid, words in homes.items():
        home = _home(uid, [word for word in words if is_own(kernel, word, mounts)])
        fds: list[int] = []
        with suppress(OSError):
            fds.append(open_way(kernel, os.path.join(person(uid).home, STATE_BELOW_HOME), mounts, ROOTS))
        try:
            socket.send_fds(channel, [msgspec.json.encode(home)], fds)
        finally:
            for fd in fds:
                os.close(fd)


def _home(uid: int, words: Sequence[LineOf]) -> UserRegistry:
    """The newest of a user's stores, as many as are served."""
    told: list[LineOf] = []
    n_bytes = 0
    for word in reversed(words[-_MOST_STORES:]):
        n_bytes += 2 * len(word.line.path) + _LINE_BYTES
        if n_bytes > _MOST_BYTES:
            break
        told.insert(0, word)
    return UserRegistry(uid, told, len(words) - len(told))
