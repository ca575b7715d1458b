"""Fork the service's children in a process without threads and trio, so that no fork copies a half-changed state.

The service forks the forker before it starts its event loop. The forker dies with the service, and the children die
with the forker. The forker trusts requests from the service, and never reads data written by users. A child acts for
one user, or reads users' registries for root's service. A child may wait for a disk or a user; the service never does.

A child carries out one order at a time. While it works, it reads messages: a new speed, or the order to park, which
means to leave the work unfinished. Only a child reads its user's files, and it deletes them as that user.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple, Self, assert_never

import msgspec
import trio

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord, ServerAway, TrashdError
from fusefs.core.names import ContainerId, Name, is_container_id
from fusefs.core.pacing import HOLD, Speed
from fusefs.core.record import RECORD_MAX_BYTES
from fusefs.core.results import Reaped, is_kept_for_owner
from fusefs.engine.count_tree import measure_tree, size_of, survey
from fusefs.engine.pace import WalkPacer
from fusefs.linux.batched_calls import read_small_files
from fusefs.linux.children import UserCredentials, become_user, fork, is_stopped, user_credentials
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.pressure import set_idle_priority
from fusefs.linux.runtime_directories import STATE_BELOW_HOME
from fusefs.linux.untrusted_path import open_untrusted
from fusefs.reaper.reap import RemovalOptions, reap
from fusefs.reaper.server_outage import OutageOptions
from fusefs.service import timers
from fusefs.service.messages import (
    FROM_CHILD,
    MESSAGE_MAX,
    PAGE,
    TO_CHILD,
    Answer,
    ContainerEntry,
    DueContainer,
    Forked,
    FromChild,
    Heartbeat,
    Measure,
    Measured,
    Order,
    OrderDone,
    OrphanEnded,
    Page,
    Park,
    ReadRecords,
    ReadRegistries,
    Reap,
    SetTempo,
    Spawn,
    Tend,
    Tended,
    ToChild,
    UserRegistry,
    fits,
)
from fusefs.service.open_volume import ROOTS, is_own
from fusefs.store.as_owner import give_unfinished_to_heirs
from fusefs.store.backing_and_mount import BackingAndMount
from fusefs.store.container import decode_record, read_record_unlocked, record_size
from fusefs.store.find_stores import mount_points, with_lower_folders
from fusefs.store.layout import FOLDERS, RECORD, Areas, Store, UserFolder, open_areas, read_volume, trusted_owners
from fusefs.store.mounted_paths import shown_in_mount
from fusefs.store.store_registry import UserLine, stores_at_roots, stores_of_users
from fusefs.store.tidy_folder import tidy_folder

_PAGE_BYTES = MESSAGE_MAX // 4
_MOST_QUARANTINED, _LONG = 50, 1500
"""Limits for quarantined orphans reported at start-up for root to take over; an administrator handles the others."""
_TOLD_PROBLEMS, _TOLD_CHARS = 20, 300
_AHEAD_S = 1.0
"""How long a page that was read ahead may be used."""


class ServiceGone(Exception):
    """The service has ended."""


class Child:
    """The main loop of a child that acts for a user."""

    def __init__(self, channel: socket.socket, folder: UserFolder, *, uses_mounts: bool) -> None:
        """uses_mounts: whether changes of names are made through a trashd mount that shows them."""
        self._channel = channel
        self._uses_mounts = uses_mounts
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._folder = folder
        self._orders: deque[Order] = deque()
        self._tempo = HOLD
        self._is_parked = False
        self._is_stopped = False
        self._sums = Heartbeat(0, 0, 0.0)
        self._sent_at_s = 0.0
        self._away_since_s: float | None = None
        self._ahead: tuple[ReadRecords, float, Page] | None = None
        self._listing = _NO_LISTING

    def serve(self) -> None:
        """Carry out orders until the service is gone."""
        try:
            while True:
                while not self._orders:
                    self._wait_message(None)
                self._is_parked = self._is_stopped = False
                self._carry_out(self._orders.popleft())
        except ServiceGone:
            return

    def _carry_out(self, order: Order) -> None:
        """Carry out an order. Errors of the folder or the volume are reported to the service, not raised."""
        try:
            self._folder = _as_it_is(self._folder)
            match order:
                case Tend():
                    self._send(self._tend(order.takeover_s))
                case ReadRecords():
                    self._send(self._take_read_ahead(order) or self._read_records(order))
                    self._read_ahead(order)
                case Reap():
                    for chosen in order.chosen:
                        if not self._is_parked:
                            self._send(self._reap(order, chosen))
                    self._send(OrderDone())
                case Measure():
                    for identifier in order.ids:
                        if not self._is_parked:
                            measure = self._measure_when_idle if order.when_idle else self._measure
                            measured = measure(order.base, ContainerId(identifier))
                            if measured is not None:
                                self._send(measured)
                    self._send(OrderDone())
                case _:
                    assert_never(order)
        except TrashdError as error:
            self._send(OrderDone(error.message(), error.errno))
        except OSError as error:
            self._send(OrderDone(os.strerror(error.errno or errno.EIO), error.errno or errno.EIO))

    def _tend(self, takeover_s: int) -> Tended:
        bases, problems = [], []
        with shown_in_mount(self._folder.store) if self._uses_mounts else nullcontext(self._folder.store) as top:
            for folder in _served(self._folder._replace(store=top)):
                bases.append(folder.store.path())
                for part in FOLDERS:
                    folder.open(part).close()  # creates missing ones, which could not be watched
                store = folder.store._replace(takeover_s=takeover_s)
                problems += [*tidy_folder(folder._replace(store=store)), *_complete_handovers(folder)]
        return Tended(bases, [problem[:_TOLD_CHARS] for problem in problems[:_TOLD_PROBLEMS]])

    @contextmanager
    def _open_in(self, base: bytes) -> Iterator[UserFolder]:
        """Open this user's folder in a store, and check that the volume is still the same."""
        for folder in _served(self._folder):
            if folder.store.path() == base:
                yield _as_it_is(folder)
                return
        raise FileNotFoundError(errno.ENOENT, "the trash store no longer exists")

    def _read_records(self, order: ReadRecords) -> Page:
        with self._open_in(order.base) as folder:
            if order.ids is None:
                return self._read_next_page(folder, order)
            claimed = set(_ids(folder, State.REAPING))
            entries = [
                self._read(folder, name, State.REAPING if name in claimed else State.ORPHANS) for name in order.ids
            ]
            return Page(order.base, [*filter(None, entries)], "", _count(folder), len(_ids(folder, State.QUARANTINE)))

    def _read_ahead(self, order: ReadRecords) -> None:
        """Read the next page while the service handles the one that was sent."""
        after = self._listing.last
        if order.ids is None and after and not self._orders:
            following = msgspec.structs.replace(order, after=after, and_quarantined=False)
            with suppress(OSError, TrashdError):  # the order for that page will run into the same error
                self._ahead = (following, time.monotonic(), self._read_records(following))

    def _take_read_ahead(self, order: ReadRecords) -> Page | None:
        """Return the page that was read ahead if it matches the order and is less than a second old, else None.

        The service learns about later changes from its own watches.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        ahead_order, read_at_s, page = ahead
        return page if order == ahead_order and time.monotonic() - read_at_s <= _AHEAD_S else None

    def _read_next_page(self, folder: UserFolder, order: ReadRecords) -> Page:
        if not order.after or self._listing.base != order.base or self._listing.last != order.after:
            self._listing = _list(folder, order)
        listing = self._listing
        ids = listing.next_ids(PAGE)
        texts = self._read_texts(folder, [one for one in ids if one not in listing.claimed])
        entries: list[ContainerEntry] = []
        size, at, last = 0, listing.at, ""
        for last in ids:
            at += len(last) + 1
            state = State.REAPING if last in listing.claimed else State.ORPHANS
            entry = self._read(folder, last, state, texts.get(last))
            if entry is not None:
                entries.append(entry)
                size += _size(entry)
            self._listen()
            if size >= _PAGE_BYTES:
                break
        is_last = at >= len(listing.names)
        self._listing = _NO_LISTING if is_last else listing._replace(at=at, last=last)
        in_quarantine = _ids(folder, State.QUARANTINE)
        reported_ids = in_quarantine[:_MOST_QUARANTINED] if order.and_quarantined else []
        quarantined = [
            one for name in reported_ids if (one := self._read(folder, name, State.QUARANTINE)) and _size(one) < _LONG
        ]
        # The last page has the current number: orphans may have arrived during the listing.
        n_orphans = _count(folder) if is_last else listing.n_listed
        return Page(order.base, entries, "" if is_last else last, n_orphans, len(in_quarantine), quarantined)

    def _read_texts(self, folder: UserFolder, ids: list[str]) -> dict[str, bytes | None]:
        """Return the record texts of many orphans by id; None stands for a record that must be read individually.

        Returns no texts on a network filesystem, where many requests could delay a heartbeat for too long.
        """
        kernel = folder.store.kernel
        with folder.open(State.ORPHANS) as orphans_fd:
            if not kernel.needs_no_server(orphans_fd):
                return {}
            texts = read_small_files(kernel, orphans_fd, ids, RECORD, folder.uid, RECORD_MAX_BYTES)
        return dict(zip(ids, texts, strict=True))

    def _read(self, folder: UserFolder, name: str, state: State, text: bytes | None = None) -> ContainerEntry | None:
        """Read a record; return None if the container is gone. text: the record's text, if it was already read"""
        is_claimed, container = state is State.REAPING, ContainerId(name)
        try:
            if text is None:
                record = read_record_unlocked(folder, state, container)
            else:
                record = decode_record(text, folder, container)
        except FileNotFoundError:
            return None
        except (BadRecord, OSError) as error:
            problem = error.message() if isinstance(error, BadRecord) else str(error.strerror)
            return ContainerEntry(name, is_claimed, 0, None, None, None, problem[:_TOLD_CHARS])
        origin = None if record.origin is None else os.path.join(folder.store.base_path, record.origin)
        entry = ContainerEntry(name, is_claimed, record.created_ns, record.retention_s, origin, record.method)
        boot_ns = record.boot_ns if record.boot == boot_id() else None
        # On a full volume the reasons could not be stored: root must not assume that it may take the container over.
        is_reasonless = state is State.QUARANTINE and not record.failures
        is_kept = is_reasonless or is_kept_for_owner(record.failures)
        entry = entry._replace(is_kept=is_kept, boot_ns=boot_ns)
        size = record.size
        if size is None or size.is_at_least or record.partial or is_claimed:
            return entry
        return entry._replace(n_bytes=size.n_bytes)

    def _reap(self, order: Reap, chosen: DueContainer) -> OrphanEnded:
        container = ContainerId(chosen.id)
        began = time.monotonic()
        origin = None
        try:
            with self._open_in(order.base) as folder:
                entry = self._read(folder, container, State.ORPHANS) or self._read(folder, container, State.REAPING)
                origin = entry.origin if entry is not None else None
                options = RemovalOptions(
                    pace=self,
                    stops=self._stops,
                    parks=lambda: self._is_parked,
                    by_force=order.by_force,
                    outage=self._outage(),
                )
                ended = _to_orphan_ended(
                    reap(folder, container, options, lambda record: record.retention_s == chosen.retention_s)
                )
        except (BadRecord, ServerAway) as error:
            ended = OrphanEnded(container, error=error.message()[:_TOLD_CHARS], errno=error.errno)
        except OSError as error:
            ended = OrphanEnded(container, error=str(error.strerror), errno=error.errno or errno.EIO)
        if not ended.stopped:
            self._is_away(None)
        self._send(self._sums)  # the figures arrive before the result
        return msgspec.structs.replace(ended, origin=origin, seconds=time.monotonic() - began)

    def _outage(self) -> OutageOptions:
        """Return the options for waiting for a filesystem's server. Other users' turns do not extend the wait."""
        since_s, limit_s = self._away_since_s, timers.current.outage_limit_s
        remaining_s = limit_s if since_s is None else max(since_s + limit_s - time.monotonic(), 0.0)
        return OutageOptions(remaining_s, self._is_away, self.wait, timers.current.doubt_pauses_s)

    def _is_away(self, number: int | None) -> None:
        if number is None:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = time.monotonic()
        self._sums = msgspec.structs.replace(self._sums, away=number or 0)

    def _measure(self, base: bytes, container: ContainerId) -> Measured:
        with self._open_in(base) as folder:
            for state in (State.ORPHANS, State.REAPING):
                with folder.open(state) as state_fd:
                    try:
                        fd = folder.store.kernel.open_dir(state_fd, container.encode())
                    except FileNotFoundError:
                        continue
                with fd:
                    kernel = folder.store.kernel
                    counts = survey(
                        kernel, fd, lambda _entries, _bytes: self._listen(), with_shared=True, stops=self._stops
                    )
                    if state is State.ORPHANS and not self._is_stopped:
                        record_size(folder, container, size_of(kernel, fd, counts))
                    return Measured(container, *counts.freed_inodes_and_bytes())
        return Measured(container, 0, 0)

    def _measure_when_idle(self, base: bytes, container: ContainerId) -> Measured | None:
        """Measure an orphan while the disk is idle, and store the size in its record; return None if stopped."""
        with self._open_in(base) as folder:
            kernel = folder.store.kernel
            try:
                record = read_record_unlocked(folder, State.ORPHANS, container)
                with folder.open(State.ORPHANS) as state_fd:
                    fd = kernel.open_dir(state_fd, container.encode())
            except FileNotFoundError:
                return Measured(container, 0, 0)
            with fd:
                if record.partial or record.size is not None:
                    return Measured(container, 0, 0)
                idle = _WhenIdle(self)
                pacer = WalkPacer(idle, idle.stops)
                measured = measure_tree(kernel, fd, walks=True, pauses=pacer, stops=idle.stops)
                pacer()
                if measured.is_stopped or idle.stops():
                    return None
                if measured.size is not None:
                    record_size(folder, container, measured.size)
                return Measured(container, 0, 0)

    def should_stop(self) -> bool:
        """Return whether to leave the current work unfinished."""
        self._listen()
        return self._is_parked or self._is_stopped

    # Called by the engine (engine.pace.Pacer)

    def tempo(self) -> Speed:
        """Return the speed that the service has set most recently."""
        self._listen()
        return self._tempo

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """Add to the sums for the next heartbeat."""
        sums = self._sums
        self._sums = msgspec.structs.replace(
            sums,
            n_entries=sums.n_entries + n_entries,
            n_bytes=sums.n_bytes + n_bytes,
            busy_s=sums.busy_s + busy_s,
        )

    def wait(self, seconds: float) -> None:
        """Wait for the given time, or until the service sends a message."""
        self._wait_message(seconds)
        self._send_heartbeat()

    def _stops(self) -> bool:
        self._listen()
        return self._is_stopped

    # Messages

    def _listen(self) -> None:
        """Handle all messages that have arrived, and send a heartbeat if it is due."""
        while self._poll.poll(0):
            self._receive()
        self._send_heartbeat()

    def _wait_message(self, seconds: float | None) -> None:
        if self._poll.poll(None if seconds is None else seconds * 1e3):
            self._receive()

    def _receive(self) -> None:
        packet = self._channel.recv(MESSAGE_MAX)
        if not packet:
            raise ServiceGone
        message = TO_CHILD.decode(packet)
        match message:
            case SetTempo():
                self._tempo = message.tempo
            case Park():
                self._is_parked = True
                self._is_stopped |= message.now
            case Tend() | ReadRecords() | Reap() | Measure():
                self._orders.append(message)
            case _:
                assert_never(message)

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        every_s = timers.current.held_heartbeat_s if self._tempo == HOLD else timers.current.heartbeat_s
        if now - self._sent_at_s >= every_s:
            self._send(self._sums)

    def _send(self, message: FromChild) -> None:
        self._sent_at_s = time.monotonic()
        try:
            self._channel.send(msgspec.json.encode(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ServiceGone from error


class _WhenIdle:
    """The pace of work that is done only while the disk is idle (engine.pace.Pacer)."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._beside_others_since_s: float | None = None

    def tempo(self) -> Speed:
        """Return the speed that the service has set, or HOLD while other processes use the disk."""
        tempo = self._child.tempo()
        if tempo.is_alone:
            self._beside_others_since_s = None
            return tempo
        if self._beside_others_since_s is None and tempo != HOLD:  # HOLD from the service: another user's turn
            self._beside_others_since_s = time.monotonic()
        return HOLD

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """Do nothing, because a measurement removes nothing."""

    def wait(self, seconds: float) -> None:
        self._child.wait(seconds)

    def stops(self) -> bool:
        """Return whether to give up, because the work was parked or other processes have used the disk for too long."""
        since_s = self._beside_others_since_s
        is_late = since_s is not None and time.monotonic() - since_s >= timers.current.beside_others_limit_s
        return is_late or self._child.should_stop()


def _served(top: UserFolder) -> Iterator[UserFolder]:
    """Return a user's trusted folders in all stores; in a user's own service, also the untrusted ones."""
    return (one for one in with_lower_folders(top) if one.is_proven or not top.is_proven)


def _complete_handovers(folder: UserFolder) -> list[str]:
    """Hand over the trees that a killed `swap --for-owner` left in root's folder, and return the failures."""
    if folder.uid or not folder.is_proven or not folder.list(State.STAGE):
        return []
    with open_areas(folder.store.kernel, folder.store.fd, folder.store.name) as areas:
        return give_unfinished_to_heirs(folder._replace(store=folder.store._replace(areas=areas)))


def _as_it_is(folder: UserFolder) -> UserFolder:
    """Read the volume.json of a folder's store again, since root does not read it in a user's own store.

    Raises  OSError: ESTALE if it belongs to another volume; Untrusted
    """
    store = folder.store
    volume = read_volume(store.kernel, store.fd, store.base_path, name=store.name)
    if volume.id != store.volume.id:
        raise OSError(errno.ESTALE, "volume.json belongs to another volume")
    return folder._replace(store=store._replace(volume=volume))


def _size(entry: ContainerEntry) -> int:
    """Return the approximate size of an entry in a message."""
    return 200 + len(entry.id) + 2 * len(entry.origin or b"") + 6 * len(entry.problem)


class _ContainerListing(NamedTuple):
    """The containers of a store, oldest first. A list of strings would take 100 MiB for a million ids.

    names     the ids that no earlier page contained, each followed by a newline
    n_listed  the number of all ids, including those on earlier pages
    at        where in `names` the next page starts, after the id `last`
    """

    base: bytes
    names: bytes
    claimed: frozenset[str]
    n_listed: int
    at: int = 0
    last: str = ""

    def next_ids(self, most: int) -> list[str]:
        """Return up to `most` ids, starting at `at`."""
        ids: list[str] = []
        at = self.at
        while at < len(self.names) and len(ids) < most:
            end = self.names.index(b"\n", at)
            ids.append(self.names[at:end].decode())
            at = end + 1
        return ids


_NO_LISTING = _ContainerListing(b"", b"", frozenset(), 0)


def _list(folder: UserFolder, order: ReadRecords) -> _ContainerListing:
    claimed = frozenset(_ids(folder, State.REAPING))
    ids = [*_ids(folder, State.ORPHANS), *claimed]
    names = b"".join(name.encode() + b"\n" for name in sorted(ids) if name > order.after)
    return _ContainerListing(order.base, names, claimed, len(ids), last=order.after)


def _count(folder: UserFolder) -> int:
    """Return the number of containers that can be reaped, now or later."""
    return len(_ids(folder, State.ORPHANS)) + len(_ids(folder, State.REAPING))


def _ids(folder: UserFolder, state: State) -> list[str]:
    with folder.open(state) as state_fd:
        names = [name.decode("ascii", "replace") for name in folder.store.kernel.list(state_fd)]
    return [name for name in names if is_container_id(name)]


def _to_orphan_ended(reaped: Reaped) -> OrphanEnded:
    report = reaped.report
    return OrphanEnded(
        id=reaped.id,
        lost=reaped.lost or "",
        n_removed=report.removed,
        n_bytes=report.n_bytes,
        n_failed=report.n_failed,
        stopped=report.stopped,
        failure=report.failures[0] if report.failures else None,
        is_kept=is_kept_for_owner(report.failures),
    )


_PACKET_MAX = 1 << 16
_MAX_FDS = 8
_GO = b"go"
"""A child waits for this message: otherwise it could end, and be reaped, before the service has its pidfd."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
"""The service decides when its processes end."""
_ANSWERS = 64
_MOST_STORES = 100
"""Maximum number of a user's own stores that are served."""
TakesRegistry = Callable[[UserRegistry, Fd | None], None]
"""Called with the stores in a user's registry, and the registry's directory (O_PATH), open for the call only."""
_MOST_BYTES, _LINE_BYTES = MESSAGE_MAX * 3 // 4, 700
"""Size limit for a message, and size of a line without its path. If paths are very long, fewer stores are served."""


class ForkerLost(Exception):
    """The forker has ended, and the service can't continue without it."""


class ChildGone(Exception):
    """The child ended, was stopped, hung, or sent an invalid message."""


class ChildHandle:
    """A handle to the child that works for one user: it sends orders, receives answers, and monitors the process."""

    def __init__(self, uid: int, pid: int, pidfd: Fd, channel: socket.socket) -> None:
        """channel: our end of the socket pair."""
        self.uid = uid
        self.pid = pid
        self.sums = Heartbeat(0, 0, 0.0)
        self.is_busy = False
        self._pidfd = pidfd
        self._socket = channel
        self._channel = trio.socket.from_stdlib_socket(channel)
        self._tempo = HOLD
        self._received_at_s = trio.current_time()
        self._why_lost = ""
        self._inbox_end, self._inbox = trio.open_memory_channel[Answer](_ANSWERS)

    def close(self) -> None:
        """Kill the child if it is still running, and close the handle."""
        self.kill("no longer needed")
        self._channel.close()
        self._inbox_end.close()
        self._pidfd.close()

    def kill(self, why: str) -> None:
        """Kill the child; its successor finds the unfinished work."""
        self._why_lost = self._why_lost or why
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait until the process has ended, and so no longer uses the volume. Checkpoint"""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def listen(self) -> None:
        """Receive messages until the child ends. Checkpoint"""
        try:
            while packet := await self._channel.recv(MESSAGE_MAX):
                message = FROM_CHILD.decode(packet)
                self._received_at_s = trio.current_time()
                if isinstance(message, Heartbeat):
                    self.sums = message
                else:
                    await self._inbox_end.send(message)
        except msgspec.MsgspecError:
            self.kill("the process sent an invalid message")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the child has ended, or we closed the channel (EBADF, if a message had just arrived)
        finally:
            self._inbox_end.close()

    def set_speed(self, tempo: Speed) -> None:
        """Set the child's speed. If the child does not read its messages at the moment, the next call tries again."""
        if tempo != self._tempo and self._send(SetTempo(tempo)):
            self._tempo = tempo

    def park(self, *, now: bool = False) -> None:
        """Order the child to leave work unfinished and answer soon. now: interrupt even a large file's truncation"""
        self._send_or_kill(Park(now))

    async def answers(self, order: Order) -> AsyncGenerator[Answer]:
        """Yield the answers to an order, without the final OrderDone.

        Raises  ChildGone; OSError: the folder or the volume failed
        Checkpoint  yes
        """
        self.is_busy = True
        try:
            self._received_at_s = trio.current_time()
            self._send_or_kill(order)
            async for answer in self._inbox:
                if isinstance(answer, OrderDone):
                    if answer.errno:
                        raise OSError(answer.errno, answer.error)
                    return
                if not fits(answer, order):
                    self.kill("the process sent an unexpected answer")
                    continue
                yield answer
                if isinstance(answer, Tended | Page):
                    return
            raise ChildGone(self._why_lost or "the process ended unexpectedly")
        finally:
            self.is_busy = False

    def check_alive(self) -> None:
        """Kill the child if it was stopped or hangs."""
        silent_s = trio.current_time() - self._received_at_s
        if not self.is_busy or silent_s < timers.current.silent_limit_s:
            return
        if is_stopped(self.pid):
            self.kill("the process was stopped")
        elif silent_s > timers.current.lost_limit_s:
            self.kill(f"the process was silent for {silent_s:.0f} s")

    def _send_or_kill(self, message: ToChild) -> None:
        if not self._send(message):
            self.kill("the process does not read its messages")

    def _send(self, message: ToChild) -> bool:
        """Send a message; return False if the socket buffer is full."""
        try:
            self._socket.send(msgspec.json.encode(message))
        except BlockingIOError:
            return False
        except OSError:
            self.kill("the process ended unexpectedly")
        return True


class Forker:
    """The service's side of the forker."""

    def __init__(self) -> None:
        """Fork the forker; there must be no other thread yet."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._in_turn = trio.Lock()
        with theirs:
            self.pid = fork(partial(_run_forker, self._ours, theirs))
        self._ours.setblocking(False)
        self._pidfd = Fd(os.pidfd_open(self.pid))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Kill the forker, and with it all children."""
        self._ours.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._pidfd.close()

    async def until_lost(self) -> None:
        """Wait until the forker has ended. Checkpoint"""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def fork(self, folder: UserFolder, person: UserCredentials) -> ChildHandle:
        """Fork a child that acts for the owner of a folder.

        person  the user that the child runs as; for the service's own folder, the service's own user
        Raises  ForkerLost; OSError: the fork failed, for example for lack of memory, or the child was killed at once
        Checkpoint  yes
        """
        store = folder.store
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        of_store = store.base_path, store.volume, store.owner, store.name
        spawn = Spawn(person, folder.area, folder.name, folder.is_proven, *of_store)
        fds = [theirs.fileno(), folder.fd, store.base.fd, store.fd]
        with theirs, ExitStack() as owned:
            owned.enter_context(ours)
            born, pidfd = await self._request(spawn, fds)
            owned.pop_all()
        ours.setblocking(False)
        return ChildHandle(folder.uid, born.pid, pidfd, ours)

    async def read_registries(self, uids: list[int], on_registry: TakesRegistry, seconds: float) -> bool:
        """Make a child read all users' registries; return whether the child finished within the given time.

        on_registry  called for each user who has a registry
        Raises  ForkerLost; OSError: the fork failed
        Checkpoint  yes
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                _born, pidfd = await self._request(ReadRegistries(uids), [theirs.fileno()])
            ours.setblocking(False)
            with pidfd:
                ours.send(_GO)
                try:
                    with trio.move_on_after(seconds):
                        while await _receive_registry(ours, on_registry):
                            pass
                        return True
                finally:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return False

    async def _request(self, spawn: Spawn | ReadRegistries, fds: list[int]) -> tuple[Forked, Fd]:
        async with self._in_turn:
            try:
                await trio.lowlevel.wait_writable(self._ours)
                socket.send_fds(self._ours, [msgspec.json.encode(spawn)], fds)
                with trio.CancelScope(shield=True):  # otherwise the next request would get this answer
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
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # this process has no free fd number; the child ends
        return forked, Fd(received[0])


async def _receive_registry(channel: socket.socket, on_registry: TakesRegistry) -> bool:
    """Receive one user's registry; return False if there are no more."""
    await trio.lowlevel.wait_readable(channel)
    packet, received, flags, _address = socket.recv_fds(channel, MESSAGE_MAX, 1)
    with ExitStack() as owned:
        fds = [owned.enter_context(Fd(fd)) for fd in received]
        if packet and not flags & socket.MSG_TRUNC:
            on_registry(msgspec.json.decode(packet, type=UserRegistry), fds[0] if fds else None)
    return bool(packet)


def _run_forker(service: socket.socket, channel: socket.socket) -> None:
    service.close()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait(2) for children: the kernel reaps them
    set_idle_priority()
    while True:
        packet, fds, flags, _address = socket.recv_fds(channel, _PACKET_MAX, _MAX_FDS)
        if not packet:
            return
        is_whole = not flags & socket.MSG_CTRUNC
        _fork(channel, msgspec.json.decode(packet, type=Spawn | ReadRegistries), fds, is_whole=is_whole)


def _fork(channel: socket.socket, spawn: Spawn | ReadRegistries, fds: list[int], *, is_whole: bool) -> None:
    """Fork one child, and report it to the service. is_whole: whether all fds were received"""
    life = partial(_read, spawn, fds) if isinstance(spawn, ReadRegistries) else partial(_serve, spawn, fds)
    with ExitStack() as owned:
        for fd in fds:
            owned.callback(os.close, fd)
        try:
            if not is_whole:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = fork(partial(_live, channel, life))
            pidfd = owned.enter_context(Fd(os.pidfd_open(pid)))
        except OSError as error:
            # There is no memory, there are too many processes, or the user killed the child at once.
            socket.send_fds(channel, [msgspec.json.encode(Forked(errno=error.errno or errno.EAGAIN))], [])
        else:
            socket.send_fds(channel, [msgspec.json.encode(Forked(pid))], [pidfd])


def _live(channel: socket.socket, main: Callable[[], None]) -> None:
    """Run a child. channel: the forker's channel, which the child closes"""
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it waits for children of its own
    try:
        main()
    except BaseException:
        traceback.print_exc()  # a bug in trashd: the traceback goes to the service's log
        sys.stderr.flush()
        raise


def _read(request: ReadRegistries, fds: list[int]) -> None:
    with socket.socket(fileno=fds[0]) as channel, suppress(BrokenPipeError, ConnectionResetError):
        if channel.recv(len(_GO)):
            send_registries(channel, request.uids)


def _serve(spawn: Spawn, fds: list[int]) -> None:
    channel_fd, folder_fd, base_fd, store_fd = map(Fd, fds)
    uid = spawn.person.uid
    # Root's service follows no mounts on the path to a user's own store.
    uses_mounts = spawn.owner in trusted_owners(os.geteuid())
    if os.geteuid() != uid:
        become_user(spawn.person)
    base = BackingAndMount(base_fd)
    areas = Areas(Fd(-1))  # the child opens them when it needs them
    kind, name = Kernel().filesystem(store_fd), Name(spawn.name)
    store = Store(Kernel(), base, spawn.base_path, store_fd, areas, spawn.volume, spawn.owner, kind, name=name)
    with socket.socket(fileno=channel_fd) as channel:
        folder = UserFolder(store, uid, Name(spawn.area), Name(spawn.folder), folder_fd, spawn.is_proven)
        Child(channel, folder, uses_mounts=uses_mounts).serve()


def send_registries(channel: socket.socket, uids: Iterable[int]) -> None:
    """Send the stores in all users' registries, one user per packet. Raises  OSError: the service is gone"""
    kernel, mounts = Kernel(), read_mounts()
    homes: dict[int, list[UserLine]] = {}
    for line_of in stores_of_users(kernel, mounts, uids):
        homes.setdefault(line_of.uid, []).append(line_of)
    for line_of in stores_at_roots(kernel, mount_points(mounts), mounts):
        user_lines = homes.setdefault(line_of.uid, [])
        # If the user has registered the same volume elsewhere, one of the two is a copy, and the registered one is
        # served.
        if all(line_of.line.volume != one.line.volume for one in user_lines):
            user_lines.append(line_of)
    for uid, lines in homes.items():
        home = _to_user_registry(uid, [word for word in lines if is_own(kernel, word, mounts)])
        fds: list[int] = []
        with suppress(OSError):
            fds.append(
                open_untrusted(kernel, os.path.join(user_credentials(uid).home, STATE_BELOW_HOME), mounts, ROOTS)
            )
        try:
            socket.send_fds(channel, [msgspec.json.encode(home)], fds)
        finally:
            for fd in fds:
                os.close(fd)


def _to_user_registry(uid: int, lines: Sequence[UserLine]) -> UserRegistry:
    """Return the newest of a user's stores, as many as the limits allow."""
    served: list[UserLine] = []
    n_bytes = 0
    for line_of in reversed(lines[-_MOST_STORES:]):
        n_bytes += 2 * len(line_of.line.path) + _LINE_BYTES
        if n_bytes > _MOST_BYTES:
            break
        served.insert(0, line_of)
    return UserRegistry(uid, served, len(lines) - len(served))
