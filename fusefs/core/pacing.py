"""The pace of a removal: how much a slice may do, and how fast slices may follow each other if others use the disk.

All reapers on a machine rest at the same moments of one clock. So stalls, reads and flushes during a rest are caused by
other processes. If these wait longer outside the rests than during them, we are the cause. Therefore pacing needs no
knowledge of the disk. The pace is the share of time in which the kernel may work for us, whether an unlink takes 10 µs
or 10 ms.

    only user of the disk  full speed, with a short rest now and then to check for other users
    with other users       a share of the time, in small slices with pauses. Each slice begins when the device is idle
                           (engine.pace). The share drops if others wait longer while we work; otherwise it grows slowly

Pure: engine/pace.py takes the measurements.
"""

from __future__ import annotations

import math
from enum import Enum
from math import exp, floor
from operator import add, sub
from typing import NamedTuple

SLICE_S = 0.05
"""The length of a slice: short enough to stop or back off at once, long enough that scheduling costs almost nothing."""
SMALL_SLICE_S = 0.00015
"""The length of a slice if others use the disk: their requests never queue behind more than a few of our calls.
(Measured on xfs: slices twice as long slow one in a hundred of their requests; shorter ones are mostly overhead.)
"""
MAX_NAMES_PER_CHECK = 512
"""The most entries between two readings of the clock: two or three milliseconds of work on a local disk."""
_NAMES_IN_SMALL_SLICE = 128
_OVERRUN_S = SLICE_S / 10
"""How far a slice may overrun its time, if its entries take as long as the previous ones."""
_GROWS = 4
_STEP_BACK = 8
"""A slice begins with one eighth of the number at which the last one ended, since its entries may take longer."""
CUT_BYTES = 64 << 20
"""A large file is truncated in steps of this size when paced (RocksDB and Pebble use the same step)."""


class SliceBudget(NamedTuple):
    """The limits of one slice, which ends as soon as it reaches one of them.

    n_entries, n_bytes  None: no such limit. If either is set, the work is paced: sizes of files are read before they
                        are deleted, and large files are truncated in steps
    """

    seconds: float = SLICE_S
    n_entries: int | None = None
    n_bytes: int | None = None

    def is_paced(self) -> bool:
        """Whether sizes of files are read before they are deleted."""
        return self.n_entries is not None or self.n_bytes is not None


class NamesPerClockCheck:
    """The number of entries that a worker handles between two readings of the clock; low if each entry takes long.

    The number is kept for the next slice, which would need several rounds to find it again.
    """

    def __init__(self) -> None:
        self.n, self._most = 1, MAX_NAMES_PER_CHECK

    def begin(self, slice_s: float) -> None:
        """Set the number for the beginning of a slice of this length; for small slices, it is fixed."""
        if slice_s > SMALL_SLICE_S:
            self.n, self._most = max(1, self.n // _STEP_BACK), MAX_NAMES_PER_CHECK
        else:
            self.n = self._most = _NAMES_IN_SMALL_SLICE

    def record(self, n: int, seconds: float) -> None:
        fits = int(n * _OVERRUN_S / max(seconds, 1e-6))
        self.n = max(1, min(fits, _GROWS * self.n, self._most))


class Speed(NamedTuple):
    """The speed at which a removal may work at the moment.

    entries_per_s, bytes_per_s  None: unlimited; 0: wait
    is_alone  no other process uses the disk: several workers may run at once, with slices of full length
    rests     slices end before the common rests, during which other users of the disk are detected
    is_remote the disk is behind a network, so that single calls may last into a rest unless slices end early
    share     the share of time in which the kernel may work for us, however long a call takes
    """

    entries_per_s: int | None = None
    bytes_per_s: int | None = None
    is_alone: bool = True
    rests: bool = False
    is_remote: bool = False
    share: float = 1.0

    def is_limited(self) -> bool:
        return self.entries_per_s is not None or self.bytes_per_s is not None

    def must_wait(self) -> bool:
        """Whether no work is allowed now."""
        return self.entries_per_s == 0 or self.bytes_per_s == 0


UNLIMITED = Speed()
HOLD = Speed(entries_per_s=0, is_alone=False)


class TokenBucket:
    """A token bucket that gives out tokens for at least one whole slice at a time, and may be overdrawn.

    Overdrawing is allowed because a file's size is known only when the file is deleted: the next slice waits until the
    debt is repaid.
    """

    def __init__(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        self._filled_at_s = now_s
        self._set(per_s, slice_s)
        self._balance = self._least

    def _set(self, per_s: int, slice_s: float) -> None:
        self._per_s = per_s
        self._least = max(per_s * slice_s, 1.0)
        self._most = 2 * self._least

    def change(self, per_s: int, now_s: float, slice_s: float = SLICE_S) -> None:
        """Use another rate from now on, and keep the balance, which may be negative."""
        self._fill(now_s)
        self._set(per_s, slice_s)

    def _fill(self, now_s: float) -> None:
        self._balance = min(self._most, self._balance + (now_s - self._filled_at_s) * self._per_s)
        self._filled_at_s = now_s

    def take(self, now_s: float) -> int:
        """Take all available tokens; return 0 if there are too few for a slice. Pass unused ones to `give_back`."""
        self._fill(now_s)
        if self._balance < self._least:
            return 0
        taken = int(self._balance)
        self._balance -= taken
        return taken

    def give_back(self, n: int) -> None:
        """Put unused tokens back; n is negative if more were used than taken."""
        self._balance += n

    def wait_s(self) -> float:
        """Return the seconds until tokens can be taken: 0 if they are available now, infinity at a rate of 0."""
        missing = max(0.0, self._least - self._balance)
        if not self._per_s:
            return math.inf if missing else 0.0
        return missing / self._per_s


TICK_S = 0.1
"""The load is measured at least this often."""
PERIOD_S, REST_S = 0.25, 0.02
"""The rests while no other process uses the disk, one per period. Others are noticed after the second or third rest."""
LONG_PERIOD_S, LONG_REST_S = 0.5, 0.06
"""The rests while others use the disk, long enough to measure their pace without us."""
REMOTE_PERIOD_S, REMOTE_LONG_PERIOD_S, REMOTE_REST_S = 3.0, 1.0, 0.15
"""The rests on a network filesystem, alone and beside others: longer, because a small write over the network has to fit
into each of them, and therefore fewer.
"""
SETTLE_S = 0.004
"""The start of a rest is ignored, because the kernel may still be working for us."""
FIRST_MEASUREMENT_S = 0.05
"""No work begins before the load has been measured for this long."""
LEAST_SHARE, FIRST_SHARE, MOST_SHARE = 0.005, 0.3, 0.4
"""Shares of the time if others use the disk: the least, the first, and the most, which is so low that we measure harm
before others notice it."""
_MAX_SHARE_DEAF = 0.9
"""The highest share where other users can't be detected."""
_STRONG_CUT, _CUT, _GROWTH = 0.5, 0.8, 1.05
_DECIDE_S = 2.0
_MEMORY_S = 12.0
_HARM, _MUCH_HARM = 1.3, 2.0
"""Ratio of the mean time of others' requests while we work to that during rests. At 1.3 or more, we back off. A lower
ratio may be chance in a few seconds' data. The mean time of reads grows by a third before their 99th percentile grows
by 15 % (measured).
"""
_ENOUGH_REQUESTS, _ENOUGH_PROBES = 150, 4
_MIN_MEASURED_S = 1e-6
"""If requests took less time than this in total, their times are not usable."""
_KEPT_PROBES = 8
_STALL_IO, _STALL_MEMORY, _STALL_CPU = 0.02, 0.05, 0.5
"""Other users are assumed if tasks stalled for at least these shares of a rest. For processors, only heavy use counts,
because the scheduler already shares them."""
_REQUESTS = 2
"""Other users are assumed after this many reads and flushes during a rest; a single one may be the journal's."""
_N_RESTS_WITH_OTHERS, _N_RESTS_CHECKED = 2, 3
"""Other users are assumed if they were detected in two of three rests; a single detection may be due to the journal."""
_N_RESTS_ALONE = 4
"""If others were detected in at most one of this many long rests, we assume that there are no other users."""
_PLANNED_PART, _LAST_PART = 0.9, 0.01
"""Parts of the horizon: the part after which all work should be done, since new orphans need time, too; and the part
over which overdue work is spread.
"""


class RateCaps(NamedTuple):
    """Limits set by an administrator: rates per second, and the time within which all work should be done."""

    entries_per_s: int | None = None
    bytes_per_s: int | None = None
    horizon_s: int | None = None


class Backlog(NamedTuple):
    """The work to be done.

    n_entries         approximate number of entries
    oldest_overdue_s  how long the oldest orphan has been due
    hurries           space is low, so other users of the disk have no priority
    """

    n_entries: int = 0
    oldest_overdue_s: float = 0.0
    hurries: bool = False


class WorkTotals(NamedTuple):
    """The work of all workers since the start, and the sum of their working times."""

    n_entries: int = 0
    n_bytes: int = 0
    busy_s: float = 0.0


class Pressure(NamedTuple):
    """The state of the machine, to be shown to people.

    io, memory, cpu      shares of the last rest in which a task stalled; None: the kernel does not report them
    probe_ms, unlink_us  how long a small durable write and one of our unlinks took
    """

    io: float | None = None
    memory: float | None = None
    cpu: float | None = None
    probe_ms: float | None = None
    unlink_us: float | None = None


class Requests(NamedTuple):
    """The reads and flushes on a device: their numbers, and the total time that each kind took."""

    n_reads: float = 0
    reads_s: float = 0.0
    n_flushes: float = 0
    flushes_s: float = 0.0

    def since(self, before: Requests) -> Requests:
        return Requests(*map(sub, self, before))

    def weighted_after(self, seconds: float) -> Requests:
        """Return the numbers and times, reduced to the weight that they have after this many seconds."""
        by = exp(-seconds / _MEMORY_S)
        return Requests(*(one * by for one in self))

    def plus_sample(self, sample: Sample) -> Requests:
        return Requests(*map(add, self, sample.requests or Requests()))


class Sample(NamedTuple):
    """Measurements over a span of time that was either all rest or all work.

    io, memory, cpu  shares of the span in which a task stalled; None: the kernel does not report them
    requests         None if the volume is on no block device
    """

    is_rest: bool
    seconds: float
    io: float | None = None
    memory: float | None = None
    cpu: float | None = None
    requests: Requests | None = None


class OtherUsers(Enum):
    """Whether other processes use the disk (neighbours, in the documents)."""

    UNKNOWN = "measuring how much others use the disk"
    NONE = "no other process uses the disk"
    SOME = "yielding"


class PacingState(NamedTuple):
    """The state that is kept from one sample to the next; only the functions of this module create one.

    share        share of the time that we use if others use the disk; kept even while there are no others
    rests_with_others  for each of the last rests, whether others were detected
    last         the last rest
    resting, working  others' requests to the device during rests and outside them, since others were detected
    rest_probes, work_probes  how long the last small durable writes took, in seconds
    undecided_s  time since the share was last adjusted
    busy_s_each  time that the kernel works for one entry; None before the first entry
    cannot_detect_others  neither stalls nor requests are reported here, so other users can't be detected
    """

    others: OtherUsers = OtherUsers.UNKNOWN
    share: float = FIRST_SHARE
    rests_with_others: tuple[bool, ...] = ()
    last: Sample | None = None
    resting: Requests = Requests()
    working: Requests = Requests()
    rest_probes: tuple[float, ...] = ()
    work_probes: tuple[float, ...] = ()
    undecided_s: float = 0.0
    busy_s_each: float | None = None
    cannot_detect_others: bool = False


def rest_at(now_s: float, *, is_alone: bool, is_remote: bool = False) -> tuple[float, float]:
    """Return the start and end of the present or next rest, in seconds of CLOCK_MONOTONIC."""
    if is_remote:
        period_s, rest_s = REMOTE_PERIOD_S if is_alone else REMOTE_LONG_PERIOD_S, REMOTE_REST_S
    else:
        period_s, rest_s = (PERIOD_S, REST_S) if is_alone else (LONG_PERIOD_S, LONG_REST_S)
    begins_s = floor(now_s / period_s) * period_s
    if now_s >= begins_s + rest_s:
        begins_s += period_s
    return begins_s, begins_s + rest_s


def shows_others(sample: Sample) -> bool:
    """Whether a rest shows that others used the disk."""
    requests = sample.requests
    return (
        (sample.io or 0.0) >= _STALL_IO
        or (sample.memory or 0.0) >= _STALL_MEMORY
        or (sample.cpu or 0.0) >= _STALL_CPU
        or (requests is not None and requests.n_reads + requests.n_flushes >= _REQUESTS)
    )


def after_sample(state: PacingState, sample: Sample) -> PacingState:
    if sample.io is None and sample.requests is None:
        state = state._replace(cannot_detect_others=True, others=OtherUsers.SOME)
    if sample.is_rest:
        state = state._replace(
            rests_with_others=(*state.rests_with_others, shows_others(sample))[-_N_RESTS_ALONE:], last=sample
        )
    match state.others:
        case OtherUsers.UNKNOWN:
            return (
                _with_others(state, OtherUsers.SOME if state.rests_with_others[-1] else OtherUsers.NONE)
                if sample.is_rest
                else state
            )
        case OtherUsers.NONE:
            return (
                _with_others(state, OtherUsers.SOME)
                if sum(state.rests_with_others[-_N_RESTS_CHECKED:]) >= _N_RESTS_WITH_OTHERS
                else state
            )
        case OtherUsers.SOME:
            if (
                not state.cannot_detect_others
                and len(state.rests_with_others) == _N_RESTS_ALONE
                and sum(state.rests_with_others) <= 1
            ):
                return _with_others(state, OtherUsers.NONE)
            return _decide(_with_requests(state, sample))


def _with_others(state: PacingState, others: OtherUsers) -> PacingState:
    """Record that others appeared or disappeared, and drop the measurements: they were made in another situation."""
    return _without_measurements(state)._replace(others=others, rests_with_others=())


def _without_measurements(state: PacingState) -> PacingState:
    return state._replace(resting=Requests(), working=Requests(), rest_probes=(), work_probes=(), undecided_s=0.0)


def _with_requests(state: PacingState, sample: Sample) -> PacingState:
    resting, working = state.resting.weighted_after(sample.seconds), state.working.weighted_after(sample.seconds)
    if sample.is_rest:
        resting = resting.plus_sample(sample)
    else:
        working = working.plus_sample(sample)
    return state._replace(resting=resting, working=working, undecided_s=state.undecided_s + sample.seconds)


def harm_ratio(state: PacingState) -> float | None:
    """Return the ratio of others' waiting times while we work to those while we rest, or None if it is not known.

    This is computed from the device's request times or, if it reports none, from probes. Stalls can't be used: while we
    work, they include our own.
    """
    from statistics import geometric_mean, median  # imported late: loading it takes as long as a short sweep

    resting, working = state.resting, state.working
    ratios = []
    n_reads, n_flushes = min(resting.n_reads, working.n_reads), min(resting.n_flushes, working.n_flushes)
    if n_reads >= _ENOUGH_REQUESTS and min(resting.reads_s, working.reads_s) > _MIN_MEASURED_S:
        ratios.append(working.reads_s / working.n_reads / (resting.reads_s / resting.n_reads))
    if n_flushes >= _ENOUGH_REQUESTS and min(resting.flushes_s, working.flushes_s) > _MIN_MEASURED_S:
        ratios.append(working.flushes_s / working.n_flushes / (resting.flushes_s / resting.n_flushes))
    if not ratios and min(len(state.rest_probes), len(state.work_probes)) >= _ENOUGH_PROBES:
        ratios.append(median(state.work_probes) / median(state.rest_probes))
    # Each ratio has its own random error, which the mean reduces.
    return geometric_mean(ratios) if ratios else None


def needs_probes(state: PacingState) -> bool:
    """Whether our effect on others can only be measured with small writes of our own (probes)."""
    n_requests = min(state.resting.n_reads + state.resting.n_flushes, state.working.n_reads + state.working.n_flushes)
    return state.others is OtherUsers.SOME and n_requests < _ENOUGH_REQUESTS


def after_remote_probe(state: PacingState) -> PacingState:
    """Return the state after a probe on a network filesystem, whose other clients can't be detected here.

    If no other process on this machine uses the filesystem, the removal runs at full speed until our small writes take
    longer while we work than during rests. From then on, these writes determine the share.
    """
    ratio = harm_ratio(state)
    if state.others is not OtherUsers.NONE or ratio is None or ratio < _HARM:
        return state
    return _without_measurements(state)._replace(
        others=OtherUsers.SOME, cannot_detect_others=True, rests_with_others=()
    )


def _decide(state: PacingState) -> PacingState:
    """Lower the share or raise it a little, if enough time has passed and the harm is known."""
    ratio = harm_ratio(state)
    if state.undecided_s < _DECIDE_S or ratio is None:
        return state
    if ratio >= _HARM:
        # The same evidence must not count twice, so measuring starts again with the smaller share.
        by = _STRONG_CUT if ratio >= _MUCH_HARM else _CUT
        return _without_measurements(state)._replace(share=max(state.share * by, LEAST_SHARE))
    most = MOST_SHARE if not state.cannot_detect_others else _MAX_SHARE_DEAF
    return state._replace(share=min(state.share * _GROWTH, most), undecided_s=0.0)


def after_probe(state: PacingState, seconds: float, *, in_rest: bool) -> PacingState:
    if in_rest:
        return state._replace(rest_probes=(*state.rest_probes, seconds)[-_KEPT_PROBES:])
    return state._replace(work_probes=(*state.work_probes, seconds)[-_KEPT_PROBES:])


def after_progress(state: PacingState, n_entries: int, busy_s: float) -> PacingState:
    """Return the state after n_entries were handled. busy_s: the working time of all workers together"""
    if n_entries <= 0 or busy_s <= 0:
        return state
    before = state.busy_s_each
    each = busy_s / n_entries
    return state._replace(busy_s_each=each if before is None else before + (each - before) / 4)


def speed_now(state: PacingState, caps: RateCaps, backlog: Backlog) -> Speed:
    entries, n_bytes = caps.entries_per_s, caps.bytes_per_s
    if backlog.hurries:
        return Speed(entries, n_bytes)
    if state.others is OtherUsers.UNKNOWN:
        return HOLD
    share = max(state.share, _share_needed(state, caps, backlog))
    is_alone = state.others is OtherUsers.NONE or share >= 1.0
    return Speed(entries, n_bytes, is_alone=is_alone, rests=True, share=1.0 if is_alone else share)


def _share_needed(state: PacingState, caps: RateCaps, backlog: Backlog) -> float:
    """Return the share that is needed to finish within the horizon at an even pace."""
    if caps.horizon_s is None or state.busy_s_each is None:
        return 0.0
    remaining_s = max(caps.horizon_s * _PLANNED_PART - backlog.oldest_overdue_s, caps.horizon_s * _LAST_PART, 1.0)
    return min(backlog.n_entries * state.busy_s_each / remaining_s, 1.0)


def describe(state: PacingState, caps: RateCaps, backlog: Backlog) -> str:
    """Explain the present speed in a short sentence."""
    if backlog.hurries:
        return "hurrying: free space is low"
    if state.others is not OtherUsers.SOME:
        return str(state.others.value)
    share = max(state.share, _share_needed(state, caps, backlog))
    if share > state.share:
        return f"using {share:.0%} of the time to finish within the horizon"
    if state.cannot_detect_others:
        return f"no pressure information (PSI), so latency sets the pace: using {share:.0%} of the time"
    return f"yielding: {_describe_others(state.last)}; using {share:.0%} of the time"


def _describe_others(sample: Sample | None) -> str:
    """Describe what other users of the disk wait for, according to the last rest."""
    if sample is None:
        return "others use the disk"
    shares = (("io", "the disk", _STALL_IO), ("memory", "memory", _STALL_MEMORY), ("cpu", "a processor", _STALL_CPU))
    for kind, resource, least in shares:
        stalled: float | None = getattr(sample, kind)
        if stalled is not None and stalled >= least:
            return f"others wait {stalled:.0%} of the time for {resource}"
    return "others use the disk"
