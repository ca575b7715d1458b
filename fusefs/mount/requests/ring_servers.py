"""Requests that come by io_uring: a thread on each core answers those that come from there.

The kernel puts a request into an entry of its client's core, and of no other, or lets it wait until one there is
committed. So there is an entry at any time that is not taken for long: where a request goes to the pool, or a thread is
held up in a call, another thread of that core has one, or gets one. A thread has one entry of its own as long as there
may be more threads: what the kernel has meant for another one of a thread that is held up would wait with it. Only
the last thread of a core has further entries, and waits for nothing itself, ever: it has the pool do all that may take
long. While any thread of a core is held up, others of it, but for the first four, have the pool do that too.

A queue whose thread has ended keeps its core's clients waiting for ever, unseen: any end of one, whatever the reason,
aborts the connection.

Source  docs/decisions/0030-io-uring.md
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from fusefs.core.fuse_protocol import ANSWER_HEAD_SIZE, Answer, Request, read_head
from fusefs.linux.fuse_caller import have_own_umask
from fusefs.linux.fuse_ring import ConnectionGone, FuseRing, RingEntry
from fusefs.linux.uring_offer import split_cores
from fusefs.mount.native._core import CoreRing
from fusefs.mount.requests.device_readers import HeldUpWatch, ServingThread
from fusefs.mount.requests.fuse_operations import ReplyInSteps
from fusefs.mount.requests.fuse_requests import FuseRequests, Give, RequestReader

PAYLOAD_BYTES = 1 << 20
"""Of an entry: no request, and no answer, may be larger."""
_N_OF_A_CORE = 4
"""Threads that do what they are asked, whoever is held up."""
_N_MOST = 16
"""Threads of a core, fewer where few fds are to be had; the last has the entries for all further requests that wait."""
_FDS_OF_A_THREAD = 4
"""Of its ring."""
_LIMIT_S = 10.0

Later = Callable[[int, ReplyInSteps, int, int, int, int], None]
"""Has a request answered in the end that has been done: token, steps, number, pid, opcode, and when it began, in ns."""
RingOf = Callable[[FuseRing, Later], CoreRing]
"""The native core (mount/native), for a thread's ring."""

_log = logging.getLogger(__name__)


class RingServer:
    """A thread that answers the requests of some cores: of its own, or of all those that have no thread."""

    def __init__(
        self, servers: RingServers, cores: Collection[int], *, is_pinned: bool, is_late: bool, stands_in: bool = False
    ) -> None:
        """Not started yet.

        is_pinned  to its one core
        is_late    others answer already
        stands_in  it does nothing itself that may take long while others are held up
        """
        self._servers = servers
        self.cores = cores
        self._is_pinned = is_pinned
        self._is_late = is_late
        self.stands_in = stands_in
        self.hands_out = False
        """Whether it never does what may take long, as it has further entries."""
        self._ring: FuseRing | None = None
        self._gives: dict[RingEntry, Give] = {}
        self._answered: deque[RingEntry] = deque()
        """Entries with answers by other threads."""
        self._lacking: deque[int] = deque()
        """Cores that are to have one more entry."""
        self._ident = 0
        self._worker: CoreRing | None = None
        self.is_held_up = False
        """Whether it is in a call that takes long."""

    def run(self, told: Callable[[Exception | None], None]) -> None:
        """Serve, from when all may begin to the end of the connection.

        told  called twice: when it has made all that it takes, and when the kernel has taken it; or with what failed
        """
        servers = self._servers
        try:
            ring = self._ring = self._make()
        except (OSError, MemoryError) as error:
            told(error)
            return
        try:
            told(None)
            servers.may_begin.wait()
            if servers.serving is None or not self._register(ring, told):
                return
            self._serve(ring, *servers.serving)
        except ConnectionGone:
            return
        except BaseException:
            servers.abort()
            _log.exception("a thread that answers requests failed; with it the mount ends")
            raise
        finally:
            self._ident = 0  # a thread that begins later may get it
            ring.close()

    def _make(self) -> FuseRing:
        have_own_umask()
        if self._is_pinned:
            os.sched_setaffinity(0, self.cores)
        self._ident = threading.get_ident()
        ring = FuseRing(self._servers.device, PAYLOAD_BYTES)
        try:
            for core in self.cores:
                self._new_entry(ring, core)
        except BaseException:
            ring.close()
            raise
        return ring

    def _new_entry(self, ring: FuseRing, core: int) -> RingEntry:
        entry = ring.new_entry(core)
        self._gives[entry] = partial(self._give, ring, entry)
        return entry

    def _register(self, ring: FuseRing, told: Callable[[Exception | None], None]) -> bool:
        """Give the kernel the entries; whether it has taken them."""
        try:
            for entry in self._gives:
                ring.register(entry)
            ring.flush()
        except OSError as error:
            if not self._is_late:
                ring.register_nothing()
            told(error)
            return False
        told(None)
        return True

    def _give(self, ring: FuseRing, entry: RingEntry, answer: Answer, _unique: int) -> None:
        """A Give; by any thread."""
        if type(answer) is bytearray:
            entry.answer(answer[ANSWER_HEAD_SIZE:])
        elif type(answer) is bytes:
            entry.answer(answer)
        elif type(answer) is int:
            entry.refuse(answer)
        if threading.get_ident() == self._ident:
            ring.commit(entry)
        else:
            self._answered.append(entry)
            ring.wake()

    def _serve(self, ring: FuseRing, requests: FuseRequests, ring_of: RingOf) -> None:
        reader = RequestReader()
        worker = self._worker = ring_of(ring, partial(self._finish, ring, requests, reader))
        thread = ServingThread(worker, self._was_held_up)
        self._servers.watch.add(thread)
        try:
            self._servers.look_around(self.cores)
            ring.answer_with(worker)
            self._go_on(ring, requests, reader, worker)
        finally:
            self._servers.watch.remove(thread)

    def _go_on(self, ring: FuseRing, requests: FuseRequests, reader: RequestReader, worker: CoreRing) -> None:
        gives, answered = self._gives, self._answered
        if self._is_late:
            self._servers.go_on(*self.cores)
        while True:
            while answered:
                ring.commit(answered.popleft())
            while self._lacking:
                queue = self._lacking.popleft()
                ring.register(self._new_entry(ring, queue))
                ring.flush()
                self._servers.go_on(queue)
            come = ring.wait()
            self._be_back()
            for entry in come:
                if not ring.is_empty():  # nobody's answer waits for what may take long
                    ring.flush()
                request = entry.request()
                if self._servers.is_of_ours(request):
                    entry.refuse(errno.ECANCELED)
                    ring.commit(entry)
                    continue
                requests.answer_here(request, reader, gives[entry], hands_out=worker.hands_out)
                self._be_back()
                if entry.is_ours and not answered:
                    self._servers.relieve(self, entry.queue)

    def _finish(
        self,
        ring: FuseRing,
        requests: FuseRequests,
        reader: RequestReader,
        token: int,
        steps: ReplyInSteps,
        unique: int,
        pid: int,
        opcode: int,
        begun_ns: int,
    ) -> None:
        """Have answered what the native core has done."""
        give = self._gives[ring.done(token, unique)]
        requests.finish_soon(steps, unique, pid, opcode, begun_ns, give, reader)

    def _was_held_up(self) -> None:
        """It has been in a request for long; by the watch."""
        self.is_held_up = True
        self._servers.look_around(self.cores)
        for core in self.cores:
            self._servers.relieve(self, core)

    def _be_back(self) -> None:
        if self.is_held_up and self._worker is not None:
            self.is_held_up = self._worker.is_held_up = False
            self._servers.look_around(self.cores)

    def hand_out(self, *, is_on: bool) -> None:
        """Have done by others what may take long, or do it; by any thread."""
        if self._worker is not None:
            self._worker.hands_out = is_on or self.hands_out

    def is_free(self, core: int) -> bool:
        """Whether it can take a request of a core's at once; by any thread."""
        return not self.is_held_up and self._ring is not None and self._ring.has_free_entry(core)

    def n_lacking(self) -> int:
        """Further entries that it is to have, and has not; by any thread."""
        return len(self._lacking)

    def lack(self, core: int) -> None:
        """Have one more entry of a core's, soon, and hand out from now on; by any thread."""
        self.hands_out = True
        self.hand_out(is_on=True)
        self._lacking.append(core)
        if self._ring is not None:
            self._ring.wake()


class RingServers:
    """Those of one mount."""

    def __init__(
        self, watch: HeldUpWatch, device: int, abort: Callable[[], None], ask: Callable[[], object], n_fds: int
    ) -> None:
        """Begin with none.

        device  /dev/fuse
        abort   ends the connection, whatever it takes
        ask     something of the mount, as any client does; OSError if that is not possible
        n_fds   that the rings of all threads may have; a core has a few threads in any case
        """
        self.watch = watch
        self.device = device
        self.abort = abort
        self._ask = ask
        self._n_fds, self._n_most = n_fds, _N_MOST
        self._askers: set[int] = set()
        """Threads that ask so, by the numbers that the kernel tells."""
        self.may_begin = threading.Event()
        self.serving: tuple[FuseRequests, RingOf] | None = None
        """What answers; None: there is nothing to answer after all."""
        self._mutex = threading.Lock()
        self._of_core: dict[int, list[RingServer]] = {}
        self._threads: list[threading.Thread] = []
        self._told: SimpleQueue[Exception | None] = SimpleQueue()

    def prepare(self) -> None:
        """Make rings, memory and threads for all cores that there could be, before the kernel is told yes.

        Raises  OSError, MemoryError, RuntimeError: there are none to be had
        """
        own, others = split_cores()
        n_affordable = self._n_fds // (_FDS_OF_A_THREAD * max(1, len(own)))
        self._n_most = min(_N_MOST, max(_N_OF_A_CORE + 1, n_affordable))
        try:
            for core in own:
                self._start(RingServer(self, [core], is_pinned=True, is_late=False), self._told.put)
            if others:
                self._start(RingServer(self, others, is_pinned=False, is_late=False), self._told.put)
            self._await()
        except BaseException:
            self.give_up()
            raise

    def begin(self, requests: FuseRequests, core: RingOf) -> None:
        """Answer from now on, when the kernel has been told yes.

        Raises  OSError: the kernel has not taken it, and goes on with /dev/fuse
        """
        self.serving = requests, core
        self.may_begin.set()
        self._await()

    def give_up(self) -> None:
        """There is nothing to answer."""
        self.may_begin.set()

    def wait_for_end(self, limit_s: float) -> None:
        """Let the threads end, as they do with the connection; one in a call that hangs stays, after that long."""
        end_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _await(self) -> None:
        errors = [self._told.get(timeout=_LIMIT_S) for _ in range(len(self._threads))]
        for error in errors:
            if error is not None:
                raise error

    def _start(self, server: RingServer, told: Callable[[Exception | None], None]) -> None:
        """Raises  RuntimeError: no more threads for us."""
        thread = threading.Thread(target=server.run, args=(told,), daemon=True, name="ring")
        thread.start()
        self._threads.append(thread)
        for core in server.cores:
            self._of_core.setdefault(core, []).append(server)

    def relieve(self, server: RingServer, core: int) -> None:
        """See that a core has a free entry, of which one has its own in use for long; by any thread."""
        with self._mutex:
            present = self._of_core[core]
            if any(one.is_free(core) for one in present):
                return
            if len(present) < self._n_most and not any(one.hands_out and not one.is_held_up for one in present):
                stands_in = len(present) >= _N_OF_A_CORE
                further = RingServer(self, [core], is_pinned=True, is_late=True, stands_in=stands_in)
                further.hands_out = len(present) == self._n_most - 1
                with suppress(RuntimeError):
                    self._start(further, partial(self._started, further, core))
                    return
            self._lack(core, server)

    def look_around(self, cores: Collection[int]) -> None:
        """A thread of these cores is held up, or is not any more, or is new; by any thread."""
        with self._mutex:
            for core in cores:
                present = self._of_core[core]
                is_on = any(one.is_held_up for one in present)
                for one in present:
                    one.hand_out(is_on=is_on and one.stands_in)

    def go_on(self, core: int) -> None:
        """Have the kernel hand out what waits for an entry of a core's: a new one alone doesn't make it, but an answer.

        So a thread becomes a client there, which is refused at once. One for each new entry: another's request may come
        first and take it, and then this one waits with the others.
        """
        with suppress(RuntimeError):  # no more threads for us: the next answer there does it
            threading.Thread(target=self._ask_from, args=(core,), daemon=True, name="ask").start()

    def _ask_from(self, core: int) -> None:
        ident = threading.get_native_id()
        self._askers.add(ident)
        try:
            os.sched_setaffinity(0, {core})
            self._ask()
        except OSError:
            pass  # refused; or the core is not online, or the mount is not to be reached: nobody waits there
        finally:
            self._askers.discard(ident)

    def is_of_ours(self, request: Request) -> bool:
        """Whether such a thread has asked: it must not have to wait itself, and would have the next one ask."""
        return bool(self._askers) and read_head(request)[-1] in self._askers

    def _started(self, server: RingServer, core: int, error: Exception | None) -> None:
        """A further one has begun, or has not: then another one has to do."""
        if error is not None:
            _log.warning("no further thread for requests of core %d: %s", core, error)
            with self._mutex:
                self._of_core[core].remove(server)
                for _ in range(1 + server.n_lacking()):
                    self._lack(core, self._of_core[core][0])

    def _lack(self, core: int, server: RingServer) -> None:
        """Have one more entry of a core's: by one that hands out, or is not held up; or by that one."""
        able = [one for one in self._of_core[core] if not one.is_held_up]
        able.sort(key=lambda one: not one.hands_out)
        (able or [server])[0].lack(core)
