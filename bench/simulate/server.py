"""The model of a metadata server and of the machines that ask it.

A message goes its way to the server, waits there for a slot, and is served in that. One that changes a directory waits
for that directory's lock first; what another machine knew of it becomes void, which takes a while. A machine lets one
call at a time change a directory (the kernel's lock of it), from its first message to its last. Where machines share
the processors of one, each message takes some of their time as well.
"""

from collections import deque
from collections.abc import Hashable
from random import Random
from typing import NamedTuple

from bench.simulate.clock import Resume, SimulatedClock, Steps, Wait


class Model(NamedTuple):
    """What a server and the machines are; all times in seconds.

    way_s         of a message there and back, on the average
    look_s, change_s  that a message which looks, or changes a directory, has a slot
    n_slots       messages that are served at a time; 0: as many as come
    revoke_s      more of a change in a directory that another machine changed last: what that one knew of it is void
    spread        of ways and services: standard deviation by mean
    looks_before_change  messages of an unlink before the one that changes
    looks_ahead          that make a name known beforehand; and those before the change of a name that is known
    looks_in_lock
    looks_a_directory    messages for each directory beside its rmdir: opening, asking, listing
    handover_s    from the first rank to another one, and back
    planning_s    of the first rank's processor for each slice, half of it when it goes and half when it comes back
    left_s        and for each directory that comes back with it
    cpu_s         of a processor for a message, where all machines are one with n_processors; 0: they are not
    """

    way_s: float
    look_s: float
    change_s: float
    n_slots: int
    revoke_s: float
    spread: float = 0.0
    looks_before_change: float = 2.0
    looks_ahead: float = 1.0
    looks_in_lock: float = 1.0
    looks_a_directory: float = 5.0
    handover_s: float = 0.002
    planning_s: float = 0.00015
    left_s: float = 0.000015
    cpu_s: float = 0.0
    n_processors: int = 0

    def most_unlinks_per_s(self) -> float:
        """What all slots together can do, each in a directory of its own."""
        return self.n_slots / (self.looks_before_change * self.look_s + self.change_s)

    def apart(self) -> "Model":
        """With a processor for each machine, whose time is a part of the way."""
        return self._replace(way_s=self.way_s + self.cpu_s, cpu_s=0.0, n_processors=0)

    def unlink_s(self) -> float:
        """Of one thread, if nobody else asks."""
        return self.looks_before_change * (self.way_s + self.look_s) + self.way_s + self.change_s


class _Station:
    """So many are served at a time; the others wait in the order in which they came."""

    def __init__(self, clock: SimulatedClock, n: int) -> None:
        self._clock = clock
        self._n_free = n
        self._waiting: deque[Resume] = deque()

    def use(self, seconds: float, then: Resume) -> None:
        """Be served as long as that, as soon as one of them is free."""

        def begin() -> None:
            self._clock.after(seconds, end)

        def end() -> None:
            if self._waiting:
                self._waiting.popleft()()
            else:
                self._n_free += 1
            then()

        if self._n_free:
            self._n_free -= 1
            begin()
        else:
            self._waiting.append(begin)


class _Locks:
    """A lock for each of many things, that exists while somebody has it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Resume]] = {}

    def take(self, what: Hashable, begin: Resume) -> None:
        if what in self._waiting:
            self._waiting[what].append(begin)
        else:
            self._waiting[what] = deque()
            begin()

    def release(self, what: Hashable) -> None:
        waiting = self._waiting[what]
        if waiting:
            waiting.popleft()()
        else:
            del self._waiting[what]


class MetadataServer:
    """One server and the machines that have mounted it."""

    def __init__(self, clock: SimulatedClock, model: Model, seed: int = 0) -> None:
        self.clock = clock
        self.model = model
        self._random = Random(seed)
        self._slots = _Station(clock, model.n_slots)
        self._processors = _Station(clock, model.n_processors) if model.cpu_s else None
        self._locks, self._machines_locks = _Locks(), _Locks()
        self._changed_by: dict[Hashable, int] = {}

    def forget(self, directory: Hashable) -> None:
        """It is gone."""
        self._changed_by.pop(directory, None)

    # Waits, for steps.

    def request_read(self) -> Wait:
        """Return a wait for a message that changes nothing."""
        return lambda resume: self._send(self.model.look_s, None, resume)

    def change(self, machine: int, directory: Hashable) -> Wait:
        """A message that changes a directory."""
        return lambda resume: self._send(self.model.change_s, (machine, directory), resume)

    def lock(self, machine: int, directory: Hashable) -> Wait:
        """A machine's lock of a directory."""
        return lambda resume: self._machines_locks.take((machine, directory), resume)

    def unlock(self, machine: int, directory: Hashable) -> None:
        """Let another call of that machine's change it."""
        self._machines_locks.release((machine, directory))

    def request_reads(self, n: float) -> Steps:
        """Send n messages, one after the other; a fraction is the probability of one more."""
        if not self.model.n_slots:
            yield self.pause(n * (self.model.way_s + self.model.look_s))
            return
        whole = int(n)
        for _ in range(whole + (n > whole and self._random.random() < n - whole)):
            yield self.request_read()

    def unlink(self, machine: int, directory: Hashable, *, is_cached: bool = False) -> Steps:
        """Remove a file or an empty directory from a directory. is_cached: this machine knows the name"""
        yield self.lock(machine, directory)
        model = self.model
        yield from self.request_reads(model.looks_in_lock if is_cached else model.looks_before_change)
        yield self.change(machine, directory)
        self.unlock(machine, directory)

    def pause(self, seconds: float) -> Wait:
        """Nothing, so long."""
        return lambda resume: self.clock.after(seconds, resume)

    def lookup_ahead(self) -> Steps:
        """Look up a name before it is unlinked."""
        yield from self.request_reads(self.model.looks_ahead)

    def _send(self, service_s: float, changed: tuple[int, Hashable] | None, resume: Resume) -> None:
        way_s, processors = self._drawn(self.model.way_s), self._processors

        def travel() -> None:
            self.clock.after(way_s, arrive)

        def arrive() -> None:
            if changed is None:
                self._slots.use(self._drawn(service_s), resume)
            else:
                self._locks.take(changed[1], revoke)

        def revoke() -> None:
            assert changed is not None
            machine, directory = changed
            is_void = self._changed_by.get(directory, machine) != machine
            self._changed_by[directory] = machine
            if is_void:
                self.clock.after(self._drawn(self.model.revoke_s), change)
            else:
                change()

        def change() -> None:
            self._slots.use(self._drawn(service_s), release)

        def release() -> None:
            assert changed is not None
            self._locks.release(changed[1])
            resume()

        if processors is None:
            travel()
        else:
            processors.use(self.model.cpu_s, travel)

    def _drawn(self, mean_s: float) -> float:
        """A time: gamma-distributed around its mean, with the model's spread."""
        spread = self.model.spread
        if not spread or not mean_s:
            return mean_s
        shape = 1.0 / spread**2
        return self._random.gammavariate(shape, mean_s / shape)
