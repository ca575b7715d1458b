"""Pace a removal: each slice gets a budget that depends on the load, which is measured while all workers rest.

In the foreground, a removal or walk runs at the limits set by the user, or at a pace adapted to other users of the
disk. Adapting needs no privileges: every user can read the pressure files, and the probe is written to the user's own
directory in the store.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from fusefs.core import pacing
from fusefs.core.pacing import (
    FIRST_MEASUREMENT_S,
    HOLD,
    SETTLE_S,
    SLICE_S,
    SMALL_SLICE_S,
    TICK_S,
    UNLIMITED,
    Backlog,
    OtherUsers,
    PacingState,
    Pressure,
    RateCaps,
    Requests,
    Sample,
    SliceBudget,
    Speed,
    TokenBucket,
    WorkTotals,
    rest_at,
)
from fusefs.core.results import ShouldStop
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.metadata_writeback import MetadataWriteback
from fusefs.linux.pressure import DeviceCounters, Psi, StallTimes

REACTION_S = 0.2
"""Longest time until a change of speed or a request to stop is noticed."""
_NAP_S = 0.002
"""Waits shorter than this are slept through without checking whether to stop."""
_GAP_S = 0.0002
"""Pause between two checks of whether the device is idle."""
_MAKES_UP = 5.0
"""A slice that waited for an idle device may be up to this many times as large, to make up for missed slices."""
_KEPT_OVERRUN, _MAX_OVERRUN_S = 0.999, 0.2
"""The longest time by which recent slices exceeded their budgets, because a call to a slow server could not be stopped:
how fast it is forgotten with each slice, and the most by which slices end early so that our calls are over in a rest.
"""
_PATIENCE_S = 0.1
"""Longest time that a small slice waits for an idle device; then it starts anyway, so it can't starve."""


class MonotonicClock(Protocol):
    """A clock: the module `time`, or a simulated one."""

    def monotonic(self) -> float:
        """See time.monotonic."""

    def sleep(self, seconds: float, /) -> None:
        """See time.sleep."""


class Pacer(Protocol):
    """Sets the speed: either the constant one from the command line, or one adapted to the load on the disk."""

    def tempo(self) -> Speed:
        """Return the currently allowed speed; called at least before each slice."""

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """Record a finished slice; busy_s: how long it kept a worker busy."""

    def wait(self, seconds: float) -> None:
        """Wait for the given time, or until the speed changes."""


class ConstantSpeed(NamedTuple):
    always: Speed

    def tempo(self) -> Speed:
        return self.always

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        """See Pacer."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


FULL_SPEED = ConstantSpeed(UNLIMITED)


class SlicePace:
    """Divides a speed into budgets for slices."""

    def __init__(
        self,
        pacer: Pacer,
        is_busy: Callable[[], bool] = lambda: False,
        afterwork: float = 0.0,
        clock: MonotonicClock = time,
    ) -> None:
        """Start at full speed, then follow the pacer.

        is_busy    returns whether the device is busy right now; called only while others use the disk
        afterwork  see Strategy
        """
        self._pacer = pacer
        self._tempo = UNLIMITED
        self._entries: TokenBucket | None = None
        self._bytes: TokenBucket | None = None
        self._clock = clock
        self._small = _SmallSlices(is_busy, afterwork, clock)
        self._rest_ends_s = 0.0
        self._overrun_s = 0.0
        self.was_always_limited = True
        self.follow()

    def follow(self) -> Speed:
        """Read the current speed from the pacer, and adapt the limits to it."""
        tempo = self._pacer.tempo()
        if tempo != self._tempo and not tempo.must_wait():
            now = self._clock.monotonic()
            slice_s = SLICE_S if tempo.is_alone else SMALL_SLICE_S
            self._entries = _changed(self._entries, tempo.entries_per_s, now, slice_s)
            self._bytes = _changed(self._bytes, tempo.bytes_per_s, now, slice_s)
        self._tempo = tempo  # a debt from before a hold is still owed when the hold ends
        return tempo

    def budget(self) -> SliceBudget | None:
        """Return the budget for a slice that starts now, or None if the slice has to wait."""
        tempo = self.follow()
        if tempo.must_wait() or (not tempo.is_alone and not self._small.may_begin()):
            return None
        now = self._clock.monotonic()
        seconds = self._seconds(tempo, now)
        if seconds <= 0.0:
            return None
        n_entries = None if self._entries is None else self._entries.take(now)
        n_bytes = None if self._bytes is None else self._bytes.take(now)
        if not tempo.is_alone and n_entries != 0:
            few = self._small.n_entries
            if self._entries is not None and n_entries is not None:
                self._entries.give_back(max(n_entries - few, 0))
            n_entries = few if n_entries is None else min(n_entries, few)
        budget = SliceBudget(seconds, n_entries, n_bytes)
        if n_entries == 0 or n_bytes == 0:
            self.give_back(budget)
            return None
        self.was_always_limited &= budget.is_paced()
        return budget

    def _seconds(self, tempo: Speed, now_s: float) -> float:
        """Return the longest duration of a slice that starts now. During a rest, the result is 0 or less."""
        seconds = SLICE_S if tempo.is_alone else SMALL_SLICE_S
        if not tempo.rests:
            return seconds
        begins_s, ends_s = rest_at(now_s, is_alone=tempo.is_alone, is_remote=tempo.is_remote)
        if tempo.is_remote:
            begins_s -= self._overrun_s
        self._rest_ends_s = ends_s if begins_s <= now_s else 0.0
        return min(seconds, begins_s - now_s)

    def finish_slice(self, budget: SliceBudget, work: WorkTotals) -> None:
        self._overrun_s = min(max(work.busy_s - budget.seconds, _KEPT_OVERRUN * self._overrun_s), _MAX_OVERRUN_S)
        self.give_back(budget, work.n_entries, work.n_bytes)
        if not self._tempo.is_alone:
            self._small.finish_slice(work, self._tempo.share, self._clock.monotonic())
        self._pacer.record_work(*work)

    def give_back(self, budget: SliceBudget, n_entries: int = 0, n_bytes: int = 0) -> None:
        """Return the unused part of a budget; overspending makes the next slices wait."""
        if self._entries is not None and budget.n_entries is not None:
            self._entries.give_back(budget.n_entries - n_entries)
        if self._bytes is not None and budget.n_bytes is not None:
            self._bytes.give_back(budget.n_bytes - n_bytes)

    def sleep(self) -> None:
        """Wait until there is a budget again, or until the caller should check whether to stop (REACTION_S)."""
        now = self._clock.monotonic()
        waits = [allowance.wait_s() for allowance in (self._entries, self._bytes) if allowance is not None]
        waits += [self._rest_ends_s - now, self._small.wait_s(now)]
        seconds = REACTION_S if self._tempo.must_wait() else min(max(waits), REACTION_S)
        if 0.0 < seconds < _NAP_S:
            self._clock.sleep(seconds)
        else:
            self._pacer.wait(max(seconds, 0.0))


class _SmallSlices:
    """Schedules small slices while others use the disk: for a share of the time, and when the device is idle."""

    def __init__(self, is_busy: Callable[[], bool], afterwork: float, clock: MonotonicClock) -> None:
        self._is_busy = is_busy
        self._afterwork = afterwork
        self._clock = clock
        self._due_s = 0.0
        self._waiting_since_s: float | None = None
        self._fit = 1
        self._share = 0.0
        self.n_entries = 1

    def may_begin(self) -> bool:
        """Return whether a slice may start now. If not, the caller can do other things, and then call this again.

        This waits up to _NAP_S for an idle device: returning to the engine would cause a delay that others notice.
        """
        now_s = self._clock.monotonic()
        if now_s < self._due_s:
            return False
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        nap_ends_s = now_s + _NAP_S
        while now_s - self._waiting_since_s < _PATIENCE_S and self._is_busy():
            if now_s >= nap_ends_s:
                return False
            self._clock.sleep(_GAP_S)
            now_s = self._clock.monotonic()
        missed = (now_s - self._waiting_since_s) * self._share / SMALL_SLICE_S
        self.n_entries = round(self._fit * min(1.0 + missed, _MAKES_UP))
        return True

    def finish_slice(self, work: WorkTotals, share: float, now_s: float) -> None:
        """Account for a finished slice; share: our share of the time."""
        period_s = work.busy_s * (1.0 + self._afterwork) / share
        # Shorter pauses make up for missed time, but there is always a pause.
        self._due_s = max(self._due_s + period_s, now_s + period_s / 2)
        self._waiting_since_s = None
        self._share = share
        if work.n_entries:
            fits = SMALL_SLICE_S * work.n_entries / max(work.busy_s, 1e-6)
            self._fit = max(1, min(round((3 * self._fit + fits) / 4), 2 * self._fit))

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a slice may start, as far as is known now."""
        return self._due_s - now_s


class DeviceQueue:
    """Checks whether a volume's device is busy; opens the device's counters at the first check."""

    def __init__(self, volume_fd: int) -> None:
        self._volume_fd = volume_fd
        self._is_open = False
        self._device: DeviceCounters | None = None

    def is_busy(self) -> bool:
        """Return whether the device has requests right now, or False if no device can be found."""
        if not self._is_open:
            self._device = DeviceCounters.open_for(self._volume_fd)
            self._is_open = True
        return self._device is not None and self._device.is_busy()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


def _changed(allowance: TokenBucket | None, per_s: int | None, now_s: float, slice_s: float) -> TokenBucket | None:
    if per_s is None:
        return None
    if allowance is None:
        return TokenBucket(per_s, now_s, slice_s)
    allowance.change(per_s, now_s, slice_s)
    return allowance


_BEFORE_SAMPLE_S = 0.02
"""Time before the first measurement: small orphans are deleted before it starts."""
_EARLY_S = 0.002
"""The sample for a rest ends this much earlier than the rest."""
_LATE_S = 0.01
_PROBE_EVERY_S, _OFTEN_S = 10.0, 1.1
_WRITE_BACK_EVERY_S, _WRITTEN_BACK_S = 0.09, 0.02
"""Interval between write-backs, about one per tick; and how long before a rest they stop, so as not to disturb it."""
_PROBE = bytes(4096)
_KEPT_PROBES = 5


class _CounterSample(NamedTuple):
    at_s: float
    stalls: StallTimes
    requests: Requests | None


class PressurePacer:
    """Adapts the speed of a volume's reaper to the load caused by others."""

    def __init__(
        self,
        kernel: Kernel,
        store_fd: Fd,
        caps: RateCaps,
        clock: Callable[[], float] = time.monotonic,
        psi: Psi | None = None,
        *,
        may_write: bool = True,
        write: Callable[[], None] | None = None,
    ) -> None:
        """Start watching the load.

        store_fd  a directory on the volume; the caller still owns this fd
        psi       by default, this machine's pressure files
        may_write  whether we may create files in the directory; if not, the duration of durable writes is not measured
        write     writes a few bytes durably to a network filesystem: few of these support unnamed files, and only the
                  duration of such a write shows how long other clients wait
        """
        self._kernel = kernel
        self._store_fd = store_fd
        self._may_write = may_write
        self._is_remote = write is not None
        self._write = self._write_unnamed if write is None else write
        self._caps = caps
        self._clock = clock
        self._psi = psi or Psi()
        self._device = DeviceCounters.open_for(store_fd)
        self._writeback = MetadataWriteback.open_for(store_fd)
        self._wrote_back_s = clock()
        self._state = PacingState()
        self._backlog = Backlog()
        self._work_done = WorkTotals()
        self._began_s = clock()
        self._tempo = HOLD
        self._last = self._read_counters()
        self._probed_s = self._probe_ended_s = self._began_s - 1.0
        self._is_probing = False
        self._probes: deque[float] = deque(maxlen=_KEPT_PROBES)
        self._new_probes: deque[tuple[float, bool]] = deque()

    def tick(self, work: WorkTotals, backlog: Backlog) -> Speed:
        """Return the speed from now on. The caller must call this again within `next_tick_s`.

        work  the work of all workers since the start
        """
        self._backlog = backlog
        n_entries, busy_s = work.n_entries - self._work_done.n_entries, work.busy_s - self._work_done.busy_s
        self._state = pacing.after_progress(self._state, n_entries, busy_s)
        self._work_done = work
        self._listen()
        while self._new_probes:
            seconds, in_rest = self._new_probes.popleft()
            self._state = pacing.after_probe(self._state, seconds, in_rest=in_rest)
            if self._is_remote:
                self._state = pacing.after_remote_probe(self._state)
        tempo = pacing.speed_now(self._state, self._caps, backlog)
        if self._state.others is OtherUsers.UNKNOWN and self._clock() < self._began_s + _BEFORE_SAMPLE_S:
            tempo = pacing.speed_now(self._state._replace(others=OtherUsers.SOME), self._caps, backlog)
        tempo = tempo._replace(is_remote=self._is_remote)
        if tempo.is_alone != self._tempo.is_alone or tempo.rests != self._tempo.rests:
            self._last = self._read_counters()  # from now on, the rests are at different times
        self._tempo = tempo
        return tempo

    def next_tick_s(self) -> float:
        """Return the seconds until the next useful tick: until a rest starts or ends, but at most TICK_S."""
        now_s = self._clock()
        _, until_s = self._span(now_s)
        return min(max(until_s - now_s, 0.0), TICK_S)

    def _listen(self) -> None:
        """Evaluate a sample if a rest, or the work between two rests, has ended."""
        now_s = self._clock()
        is_rest, until_s = self._span(self._last.at_s)
        if now_s < until_s:
            return
        counters, late_s = self._read_counters(), now_s - until_s
        is_ours = self._is_probing or self._probe_ended_s >= self._last.at_s
        is_whole = is_rest is not None and late_s <= (_EARLY_S if is_rest else _LATE_S)
        has_rests = self._tempo.rests or self._state.others is OtherUsers.UNKNOWN
        if has_rests and is_whole and not is_ours:
            self._state = pacing.after_sample(self._state, _sample(self._last, counters, is_rest=bool(is_rest)))
        elif (
            self._state.others is OtherUsers.UNKNOWN
            and counters.at_s >= self._began_s + _BEFORE_SAMPLE_S + FIRST_MEASUREMENT_S
        ):
            self._began_s = counters.at_s  # there was no tick when the first measurement should have ended: repeat it
        self._last = counters

    def _span(self, at_s: float) -> tuple[bool | None, float]:
        """Return whether a time is in a rest (True), between rests (False) or at an edge (None), and when this ends."""
        if self._state.others is OtherUsers.UNKNOWN:
            begins_s, ends_s = self._began_s + _BEFORE_SAMPLE_S, self._began_s + _BEFORE_SAMPLE_S + FIRST_MEASUREMENT_S
        else:
            begins_s, ends_s = rest_at(at_s, is_alone=self._tempo.is_alone, is_remote=self._is_remote)
        if at_s < begins_s:
            return False, begins_s
        if at_s < begins_s + SETTLE_S:
            return None, begins_s + SETTLE_S
        if at_s < ends_s - _EARLY_S:
            return True, ends_s - _EARLY_S
        return None, ends_s

    def _read_counters(self) -> _CounterSample:
        requests = None if self._device is None else self._device.requests()
        return _CounterSample(self._clock(), self._psi.read(), requests)

    def is_probe_due(self) -> bool:
        """Whether a small durable write is due. The caller should make it soon, in a thread for which nothing waits."""
        if not self._may_write:
            return False
        now_s = self._clock()
        is_rest, until_s = self._span(now_s)
        listens_by_probes = self._is_remote and self._state.others is OtherUsers.NONE
        if not (listens_by_probes or pacing.needs_probes(self._state)):
            # This write is for the status display only. In a rest, it would be mistaken for the load caused by others.
            return is_rest is False and now_s - self._probed_s >= _PROBE_EVERY_S
        # On a network filesystem, writes may be quicker in a rest than during work; that is to be measured.
        expected_s = self._probes[-1] if self._probes and not (self._is_remote and is_rest) else 0.0
        has_time = until_s - now_s >= 2 * expected_s
        if listens_by_probes and is_rest != (len(self._state.rest_probes) <= len(self._state.work_probes)):
            return False
        return is_rest is not None and has_time and now_s - self._probed_s >= _OFTEN_S

    def probe(self) -> None:
        """Write a few bytes durably, and record how long that took. If the write fails, record nothing."""
        self._probed_s = began_s = self._clock()
        is_rest, until_s = self._span(began_s)
        self._is_probing = True  # the counters now measure our own write
        with suppress(OSError):
            self._write()
            seconds = self._clock() - began_s
            self._probes.append(seconds)
            if is_rest is not None and began_s + seconds <= until_s:
                self._new_probes.append((seconds, is_rest))
        self._probe_ended_s = self._clock()
        self._is_probing = False

    def is_write_back_due(self) -> bool:
        """Whether it is time to write back some metadata, which the kernel would otherwise write all at once."""
        if self._writeback is None or self._state.others is not OtherUsers.SOME:
            return False
        now_s = self._clock()
        is_rest, until_s = self._span(now_s)
        is_due = now_s - self._wrote_back_s >= _WRITE_BACK_EVERY_S
        return is_due and is_rest is False and until_s - now_s >= _WRITTEN_BACK_S

    def write_back(self) -> None:
        """Start the write-back. May block while the disk is busy."""
        self._wrote_back_s = self._clock()
        if self._writeback is not None:
            self._writeback.begin()

    def _write_unnamed(self) -> None:
        with self._kernel.create_unnamed(self._store_fd) as fd:
            self._kernel.write(fd, _PROBE)
            self._kernel.fsync(fd)

    def is_yielding(self) -> bool:
        """Whether the speed is reduced because of other users of the disk."""
        return self._state.others is OtherUsers.SOME and not self._backlog.hurries

    def pressure(self) -> Pressure:
        from statistics import median  # importing it takes as long as a short sweep

        rest = self._state.last or Sample(True, 0.0)
        probe_ms = median(self._probes) * 1e3 if self._probes else None
        each_s = self._state.busy_s_each
        return Pressure(rest.io, rest.memory, rest.cpu, probe_ms, None if each_s is None else each_s * 1e6)

    def why(self) -> str:
        """Return the reason for the current speed, as a short sentence for users."""
        return pacing.describe(self._state, self._caps, self._backlog)

    def close(self) -> None:
        self._psi.close()
        if self._writeback is not None:
            self._writeback.close()
        if self._device is not None:
            self._device.close()


def _sample(before: _CounterSample, after: _CounterSample, *, is_rest: bool) -> Sample:
    """Return the load between two counter samples."""
    seconds = max(after.at_s - before.at_s, 1e-6)
    io, memory, cpu = (
        None if a is None or b is None else min(max(a - b, 0.0) / seconds, 1.0)
        for a, b in zip(after.stalls, before.stalls, strict=True)
    )
    requests = None
    if before.requests is not None and after.requests is not None:
        requests = after.requests.since(before.requests)
    return Sample(is_rest, seconds, io, memory, cpu, requests)


@contextmanager
def open_pacer(
    kernel: Kernel, directory: Fd, most: Speed, report: Callable[[str], None] | None, *, may_write: bool = True
) -> Iterator[Pacer]:
    """Open the pacer for a removal on a filesystem.

    directory  any directory there. With may_write, unnamed files are created in it if the kernel permits this
    most       the highest speed
    report     called with a sentence when the removal starts or stops yielding to others; None: it never yields
    """
    if report is None:
        yield ConstantSpeed(most)
        return
    from fusefs.linux.pressure import set_idle_priority

    set_idle_priority()
    pacer = PressurePacer(kernel, directory, RateCaps(most.entries_per_s, most.bytes_per_s), may_write=may_write)
    try:
        yield ForegroundPacer(pacer, report)
    finally:
        pacer.close()


class ForegroundPacer:
    """A pacer without a timer of its own: it measures only while the engine calls one of its methods."""

    def __init__(self, pacer: PressurePacer, report: Callable[[str], None]) -> None:
        self._pacer = pacer
        self._report = report
        self._work_done = WorkTotals()
        self._was_yielding = False
        self._next_s = 0.0
        self._tempo = self._tick()

    def tempo(self) -> Speed:
        return self._tick() if time.monotonic() >= self._next_s else self._tempo

    def record_work(self, n_entries: int, n_bytes: int, busy_s: float) -> None:
        work = self._work_done
        self._work_done = WorkTotals(work.n_entries + n_entries, work.n_bytes + n_bytes, work.busy_s + busy_s)

    def wait(self, seconds: float) -> None:
        before, until_s = self._tempo, time.monotonic() + seconds
        while (now := time.monotonic()) < until_s and self.tempo() == before:
            time.sleep(max(min(until_s, self._next_s) - now, 0.0))

    def _tick(self) -> Speed:
        if self._pacer.is_probe_due():
            self._pacer.probe()
        if self._pacer.is_write_back_due():
            self._pacer.write_back()
        self._tempo = self._pacer.tick(self._work_done, Backlog())
        self._next_s = time.monotonic() + self._pacer.next_tick_s()
        if self._pacer.is_yielding() != self._was_yielding:
            self._was_yielding = not self._was_yielding
            self._report(self._pacer.why())
        return self._tempo


class WalkPacer:
    """Paces a walk: called before each entry, it returns when the entry may be read."""

    def __init__(self, pacer: Pacer, stops: ShouldStop) -> None:
        """stops: called while the pacer waits; once it returns True, the pacer no longer waits"""
        self._pace = SlicePace(pacer)
        self._stops = stops
        self._budget: SliceBudget | None = None
        self._n = 0
        self._most: float = 0
        self._began_s = self._ends_s = 0.0

    def __call__(self) -> None:
        """Wait for the next slice if the current one is over."""
        now_s = time.monotonic()
        if self._n >= self._most or now_s >= self._ends_s:
            if self._budget is not None:
                self._pace.finish_slice(self._budget, WorkTotals(self._n, 0, now_s - self._began_s))
            self._await_budget()
        self._n += 1

    def _await_budget(self) -> None:
        self._n, self._most, self._budget = 0, math.inf, self._pace.budget()
        while self._budget is None and not self._stops():
            self._pace.sleep()
            self._budget = self._pace.budget()
        self._began_s = time.monotonic()
        self._ends_s = math.inf if self._budget is None else self._began_s + self._budget.seconds
        if self._budget is not None and self._budget.n_entries is not None:
            self._most = self._budget.n_entries
